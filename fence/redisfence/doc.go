// Package redisfence is the guard for data in Redis: writes and scripts that run only where the
// fencing token is not below the mark of the resource. Check, mark and write are one script, so
// nothing comes between them, whatever pause the holder has.
//
// It knows no client library: packages redlock/goredisnode and redlock/rueidisnode make its
// [Eval] of clients of the two common ones.
//
//	eval, err := goredisnode.Eval(client)
//	guard, err := redisfence.New(eval, redisfence.Options{})
//	...
//	err = locks.Do(ctx, "account/123", func(ctx context.Context, lease *holdfast.Lease) error {
//		if err := guard.Claim(ctx, "account/123", lease.Token()); err != nil {
//			return err // before the first read
//		}
//		balance := ... // read
//		return guard.Set(ctx, "account/123", lease.Token(), "{account/123}:balance", balance, 0)
//	})
//
// # Locks in the same database
//
// Package redlock keeps a lock at the very key that is locked. So where locks and data share a
// database, no data key may be a lock's key; nor may it be one of a lock's records, which are {KEY}:fence,
// {KEY}:queue (KEY::fence and KEY::queue for a key with a hash tag) and what begins with
// {holdfast}:. A name of its own for the data, as above, or a redlock.Options.Prefix for the locks,
// which is a part of the lock's key, keeps them apart. Data that is at the key before keeps
// everybody waiting for the lock, as another library's lock would.
//
// A write that would replace or delete a lock is refused as an [*fence.InvalidError], and nothing
// is written: the script looks at the first bytes of the key, which a Redis user needs the right
// +getrange for, and is skipped without. It is no round trip. Scripts of one's own are not kept from it.
//
// # Marks
//
// The mark of a resource is a key of its own (see [Guard.MarkKey]) that holds the highest token
// seen, in decimal, without a ttl. Nothing deletes it. The server must not evict it: set
// maxmemory-policy noeviction, or keep guarded data on a server of its own. What is no token
// under a mark's key is an [*fence.InvalidError], never zero.
//
// On a Redis Cluster the data must be in the hash slot of the mark: give the data keys the name of
// the resource as their hash tag, as in account/123 and {account/123}:balance, {account/123}:log; or, where it has a
// hash tag itself, the same one. A single data key named like the resource is in its slot as well, and is for locks
// that are kept elsewhere. While a slot moves to another server a call of several keys may be
// refused for a while ([fence.ErrUnavailable]).
//
// # What a failover forgets
//
// Redis replicates asynchronously. A replica that is promoted without the latest mark accepts
// the former token again, and has lost the latest data too, until the new holder's next call
// raises the mark again: the tokens of package redlock still grow, since they are clock readings
// and not kept where the mark is. Where that window is too much, the resource needs a store that
// commits, such as a database with package sqlfence; WAIT and min-replicas-to-write make the
// window smaller and do not close it.
//
// # Errors
//
// Beside the kinds of package fence as [fence.Guard] describes them: an [*fence.InvalidError] is
// also what a key that holds a lock or another kind of value is, one that is in another hash slot than the
// mark, a sum that is beyond int64, and a mark that is no token. What the server refuses as a
// whole (OOM, READONLY, LOADING, MISCONF, NOPERM, CLUSTERDOWN and the like), and a server that
// cannot be reached, is [fence.ErrUnavailable] with its words; the data is as it was, and at most
// the mark was raised, as by a Claim. A reply that did not come in time is [fence.ErrUncertain].
//
// Nothing is sent twice, neither by this package nor by the client libraries, as they are used
// here. Claim, Set, HSet and Del may be repeated by the caller after [fence.ErrUncertain]: a write
// by another token since then makes that a stale answer. An increment, and most scripts, must
// not be applied twice: [Guard.IncrBySeq] and [Script.RunSeq] number the steps of a holder, and
// answer [fence.ErrApplied] where one was taken before.
package redisfence
