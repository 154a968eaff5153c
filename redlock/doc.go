// Package redlock keeps locks on Redis: on one server, the plain Redis lock; on N
// independent servers, Redlock, with fencing tokens that the same quorum mints in the same
// round trip.
//
// The lock on a key is a plain string at exactly that key, so that any SET NX PX lock on
// it excludes Holdfast and is excluded. The algorithm is that of the Redis documentation,
// "Distributed Locks with Redis", with the changes that docs/protocol.md specifies and
// argues for: stamps that become fencing tokens, tombstones, extension that never
// re-acquires, and admission, which enforces the "delayed restarts" of antirez, "Is Redlock
// safe?" (2016).
//
// A server that has restarted or was promoted may have forgotten locks. It gets no vote
// before it has been up for max(MaxTTL, 30 s) + 1 s; until then its errors say
// so, as a [*YoungError]. Options.TrustRestarts skips that.
//
// A claim that waits, as Locker.Acquire makes it, stands in a queue on each server, in the order of
// the first attempts. A RELEASE reserves the vote for the first live waiter and tells that
// waiter's process, by one subscription per [Store] and server that begins with the first claim
// that waits and ends three seconds after the last one. For a waiter that extends its leases the
// reservation is the grant: the key passes on in one round trip. A stopped waiter loses its turn when the
// reservation ends. Where a server lets nobody subscribe, on a Cluster, through a proxy that does not
// pass messages on, and for a lock of another library, waiting is jittered polling, bounded by the ttl.
//
// The servers need maxmemory-policy noeviction, and nobody else may delete or write the
// keys: where data share the database, no data key may be the key of a lock (with Options.Prefix before
// it), nor {KEY}:fence, {KEY}:queue or anything with {holdfast}: before it, which are its records. A
// key that holds data is, to all who ask for the lock, held by another library. Redis 5 or later.
package redlock
