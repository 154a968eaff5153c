// Package etcdstore keeps locks in etcd: the choice where the lock itself must survive the
// death of a server without two holders and without a token that repeats.
//
//	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"https://etcd-1:2379", ...}, ...})
//	s, err := etcdstore.New(client, etcdstore.Options{})
//	locks, err := holdfast.New(s, nil)
//
// The caller makes and closes the client, and with it decides about TLS, user and password,
// and the endpoints. Give it DialKeepAliveTime and DialKeepAliveTimeout (a few seconds): without
// them a member that is cut off silently is asked again and again. Give it a Logger, too, such as
// zap.NewNop() of go.uber.org/zap: without one it writes a line to stderr for each call that meets no
// server, of which errors tell anyway.
//
// Release what is held before the client is closed: what is left then ends with its ttl. See [New].
//
// # How it works
//
// A key is one key of etcd under Options.Prefix, named by a hash of the lock's key, so that no
// lock is the prefix of another; its value is JSON and tells people the key and the holder.
// Each acquisition has an etcd lease of its own (but see below), whose id the store chooses, so that
// it can be revoked whatever answer was lost. The key is taken by a transaction that creates it where
// it is missing. The fencing token is the revision at which that happened, with Options.Epoch
// before it. Extensions renew the etcd lease, and look whether the key is still there: they cost
// no entry in the log. Release revokes the lease; one without an answer is repeated in the
// background, and the lease's end bounds the damage: [Store.Settle] waits for that.
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
// # A session for thousands of locks
//
// With Options.Session all locks of a store share one etcd lease, as the locks of etcd's package
// concurrency do that share a Session; unlike those they exclude each other within it, and have each
// a ttl of its own. An acquisition is then one transaction, a release one deletion, and the
// extensions of all locks are one renewal of the session and, for each hundred of them, one look
// whether their keys are still there. Tokens are what they are without. Stores with and without a
// session exclude each other. What else there is to know:
//
//   - A ttl is at most as long as the session, which is the store's Info().MaxTTL; a longer one is
//     refused before anything is sent. A lease is valid for no longer than its ttl, and no longer than
//     the servers have promised the session to live, both counted from before the request.
//   - A lock whose lease is not extended goes at the end of its ttl though the session lives: the
//     store deletes its key then, in the background, and again until it is answered. A process
//     that dies or is cut off cannot: its keys go with the session. So the session, not the ttl, is
//     how long a dead holder keeps the others away, and [store.Holder] shows what is left of that.
//   - A lock that is broken ([Store.Break]) goes in the same way: when its holder releases it, and else
//     at the end of the time that it had been promised before; and with the session where its process
//     has died or is cut off.
//   - An acquisition or release whose outcome is unknown is cleared in the background, until
//     that is answered or the session has ended. A small key below Options.Prefix, in void/, keeps
//     a request that arrives later still from taking the lock; it ends with the session.
//   - A session that an operator revokes, or that was not renewed in time, takes all its locks with
//     it: as soon as one call finds out, all of them are lost, with a [*SessionError] as a cause.
//     The next acquisition opens another session, one for all that come at once.
//   - Nothing renews a session but locks that are extended, acquired, or waited for. After the last
//     one it ends by itself, within its ttl: there is nothing to close.
//   - A ticket is good for the ttl of its lease, and whoever adopts it puts the key on an etcd lease
//     of its own: from then on neither the end of the session nor the store that wrote it matters.
//     [Store.Holds] refuses such a lease.
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
