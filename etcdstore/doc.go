// Package etcdstore keeps locks in etcd: the choice where the lock itself must survive the
// death of a server without two holders and without a token that repeats.
//
//	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"https://etcd-1:2379", ...}, ...})
//	s, err := etcdstore.New(client, etcdstore.Options{})
//	locks, err := holdfast.New(s, nil)
//
// The caller makes and closes the client, and with it decides about TLS, user and password,
// and the endpoints. Give it DialKeepAliveTime and DialKeepAliveTimeout (a few seconds): without
// them a member that is cut off silently is asked again and again.
//
// # How it works
//
// A key is one key of etcd under Options.Prefix, named by a hash of the lock's key, so that no
// lock is the prefix of another; its value is JSON and tells people the key and the holder.
// Each acquisition has an etcd lease of its own, whose id the store chooses, so that it can be
// revoked whatever answer was lost. The key is taken by a transaction that creates it where it
// is missing. The fencing token is the revision at which that happened, with Options.Epoch
// before it. Extensions renew the etcd lease, and look whether the key is still there: they cost
// no entry in the log. Release revokes the lease; one without an answer is repeated in the
// background, and the lease's end bounds the damage.
//
// Claims that wait queue up by keys of their own, on their leases, in the order of their first
// attempts, also those of different processes. The queue only says who comes first: one that
// does not come within 200 ms of its turn loses it to the next. Who is first watches the lock, most
// others the one before them, so that a release wakes few. An attempt that does not wait takes a
// free key, whoever queues.
//
// A ttl is whole seconds in etcd: a fraction is rounded up, and a dead holder's key is free half
// a second later still, because the server looks for lapsed leases twice a second. The
// smallest is 2 s; a cluster whose election timeout is longer than 1.3 s keeps dead
// holders' keys for 1.5 election timeouts. After an election every lease counts from its
// beginning, so that a dead holder keeps its key for up to a ttl and an election longer. While
// the cluster has no majority nothing is granted, extended or ended.
//
// # Tokens and restored clusters
//
// Revisions grow for as long as the cluster's data live. They go back where a cluster is
// restored from a snapshot or made anew: a guard then refuses what it has seen larger tokens
// for. Give the stores a larger Options.Epoch after each such event (or restore with
// etcdutl snapshot restore --bump-revision --mark-compacted). A store that is in use while the
// revision goes back refuses to grant, by an [store.InvalidError], until it has grown again. Leases
// that were granted after the snapshot are not in it: let the longest ttl pass before a restored
// cluster is started.
package etcdstore
