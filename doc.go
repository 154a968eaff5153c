// Package holdfast keeps leases on keys in a store that many processes share, and gives
// each grant a fencing token, with which a resource can refuse a holder that is too late.
//
//	locks, err := holdfast.New(store, nil)
//	guard, err := sqlfence.New(db, sqlfence.Options{Dialect: sqlfence.PostgreSQL})
//	err = locks.Do(ctx, "account/123", func(ctx context.Context, lease *holdfast.Lease) error {
//		return guard.Tx(ctx, "account/123", lease.Token(), func(tx *sql.Tx) error {
//			... // reads and writes; refused where a larger token has been seen
//		})
//	})
//
// # What a lease is, and what it is not
//
// No lock service can promise that nobody else acts while you believe to hold a lock: you
// may be paused right after you asked, by the garbage collector, by SIGSTOP, by the move of
// a virtual machine, and your write may hang in the network, until long after the service
// gave the key to another. What a service can give is a lease: the right to act on a key
// for a while. So use needs three parts:
//
//  1. Acquire a lease, and with it a fencing token that is larger than every token granted
//     before for that key.
//  2. Keep it: a [Lease] is extended by itself, and a timer of this process ends it, at the
//     latest when the store might give the key away.
//  3. Guard the resource: it remembers the highest token that it has seen, and refuses
//     smaller ones. This part makes the whole correct under any pause, clock or network fault;
//     the others cannot.
//
// # How do I guard the resource?
//
// Claim before the first read: until the new holder has shown its token to the resource, the
// former holder's writes still pass, and what was read before them is old. Then write with the
// same token. The check is a part of the write, since a check that stands alone leaves room for
// a pause. The guards are
//
//   - fence/sqlfence for SQL databases: the claim is the first statement of the transaction;
//   - fence/redisfence for data in Redis: check and write are one script;
//   - etcdstore.Guard and zkstore.Guard for data in etcd and ZooKeeper: check and write are one
//     transaction;
//   - fence/httpfence for services over HTTP, and the command's gateway for those that cannot
//     be changed;
//   - the command's fence claim and fence check for shell scripts;
//   - [fence.Memory] for what lives in this process, and [fence.Guard] for a guard of one's own,
//     which package fence/fencetest checks.
//
// Give them the context of the lease: a guard that finds its token stale ends the lease.
// docs/guard.md says which guard is for which resource, and what to do where there is none.
//
// # Which store do I need?
//
// None, where all that the lock protects is in one SQL database: sqlstore.Locked holds the lock and
// writes in one transaction. Else:
//
//   - sqlstore on SQLite for the processes of one machine, with nothing to run;
//   - sqlstore on PostgreSQL, MySQL or MariaDB where there is such a server: waiters poll, and a
//     failover to a replica that missed a grant lets two hold;
//   - redlock with one Redis server where double work is a nuisance: the quickest, and no guard is
//     needed there;
//   - redlock over several independent servers, three or five, where the lock shall also work
//     while some of them are down;
//   - etcdstore or zkstore where it shall survive the death of any server without two
//     holders; they are slower, and a cluster is to be run;
//   - memstore for tests, and for one process.
//
// Where double work corrupts something, use any of them together with a guard at the resource.
// docs/choosing-a-store.md says what survives what.
//
// # How long should the ttl be?
//
// As long as others may have to wait after a holder has died, and no longer: a lease is
// extended while it is held, so the ttl need not cover the work. It must be long against
// the time that the store takes to answer. [Options] says the default.
//
// # What do the contexts mean?
//
// The context of Acquire bounds the wait, and nothing else. The lease lives until Release
// or loss, and [Lease.Context] derives a context that ends with it: use that for the work.
// Release does its own small part whatever its context says, so it can be deferred. Work
// that ignores its context goes on after a loss; the guard is there for that.
//
// # How do I learn of a loss?
//
// [Lease.Done] is closed, every context of the lease is cancelled with the cause, and
// [Locker.Do] adds [ErrLost] to its result, also where the work succeeded. Before that, an
// [Observer] is told [AtRisk] when extensions fail. These are the states:
//
//	                 grant
//	                   |
//	                   v
//	  extended  +-----------+  extension failed,   +-----------+
//	 +--------->|   valid   |  or no answer        |  at risk  |  still valid;
//	 |          |           |--------------------->|           |  tried again
//	 +----------|           |<---------------------|           |  every ttl/10
//	            +-----------+      extended        +-----------+
//	              |   |   |                           |  |  |
//	   Release    |   |   | Ticket                    |  |  |  the same
//	    +---------+   |   +----------+                v  v  v
//	    v             |              v
//	released          |         handed over
//	                  | validity over by the local clock; gone from the store;
//	                  v held by another; max hold reached; refused by a guard
//	                lost
//
// The three states below are final. The validity ends at
//
//	instant before the request + ttl that the store granted - drift - margin
//
// on a clock that goes on while the machine sleeps, where the system has one. A timer of
// each lease decides that, whatever any call to the store is doing.
//
// # Can one process hold a key twice?
//
// No. A second Acquire waits, like anyone's; TryAcquire answers
// [ErrHeld]. In the context of a lease on the key, where waiting would be a dead-lock, both
// answer [ErrAlreadyHeld].
//
// # In which order are waiters served?
//
// First come, first served. Within a process, which is here what shares a [Locker] by
// [Locker.With], waiters of a key are served in the order of their calls. Between processes
// it depends on the store: one with a queue (redlock, etcdstore, zkstore, memstore) serves them in the
// order in which their claims first asked, and hands the key over without polling; on any other
// one (sqlstore) each polls, and chance decides.
//
// Each process has one place in the queue, however many of its goroutines wait: while it holds
// the key, its others have none, and when the lease is released its next waiter takes a new place,
// behind the other processes. So two processes that both have waiters take turns. A waiter whose
// context ends leaves its place to the next one of its process with the same ttl and label.
//
// The order is a matter of speed and fairness, never of safety, and it is broken by
//
//   - a waiter that crashed or is stopped: it is passed over, after its turn at the latest;
//   - a message that was lost, or a server that restarted: who is next then comes by a timer of its
//     own;
//   - a holder or waiter of another library on the same key, which knows no queue: waiting is
//     polling then;
//   - a store that cannot queue where it is: redlock without the right to use channels, through
//     some proxies, or on a Cluster, polls as well, and tells the [Observer];
//   - [Locker.TryAcquire], which has no place, and may find the key free for a moment.
//
// There are no priorities. An [Observer] is told of the place and of the time waited ([Waiting],
// [Acquired]).
//
// # Which errors are there?
//
// Every call returns an [*Error] of one line that answers [errors.Is] for its kind:
// [ErrHeld], [ErrAlreadyHeld], [ErrLost], [ErrReleased], [ErrUncertain] (the store may have
// acted), [ErrUnavailable], [ErrUnsupported], [ErrInvalid]. An Acquire that ran out of time
// answers the context's error and what it waited for.
package holdfast
