// Package zkstore keeps locks in ZooKeeper (3.5 or later), over github.com/go-zookeeper/zk.
//
//	s, err := zkstore.Dial(zkstore.Options{Servers: []string{"zk1:2181", "zk2:2181", "zk3:2181"}})
//	locks, err := holdfast.New(s, nil)
//
// # One session
//
// A [Store] has one ZooKeeper session, which all of its claims share: a thousand leases cost one
// connection and one heartbeat. A claim is an ephemeral sequential node whose name has a random
// owner, so that a node whose creation had no answer is found again (the "protected" node of
// ZooKeeper's recipes). The node with the lowest number holds the key, and each waiter watches
// the one before it: first come, first served, also between processes, without a herd.
//
// What ends a lease:
//
//   - Its holder does not extend it: the Store removes the node when the ttl is over.
//   - The holder's process dies, or is cut off: the servers end its session, one session timeout
//     and up to one tick after they last heard of it. This is what [store.Info] calls the step of a
//     ttl, and the time that a dead holder can keep the others waiting.
//   - The session ends for another reason, such as an administrator.
//
// # Validity
//
// A client cannot see that its session has ended. A follower that is cut off from its leader goes
// on answering reads and pings until it notices, while the leader ends the session: a client was
// seen to read its own node for more than six seconds after the leader had deleted it. So nothing
// here relies on the state of the connection. A lease is extended by a sync, which the leader
// answers, and a read that the server executes after it; and it is trusted for half of the
// session's timeout, counted from before the sync was sent. The client pings each third of the
// timeout; its server passes on to the leader that the session lives with the answers to the
// leader's own pings, twice a tick, in the same stream as the sync. So an answer to a sync proves
// that the leader keeps the session for two thirds of its timeout, less half a tick.
//
// That is a half where the timeout is at least three ticks of the servers: six seconds, with their
// default of two seconds for a tick. Do not ask for less. Where the servers raise the timeout to
// their least of two ticks, leases are trusted for five twelfths of it; a server that is
// configured with a minSessionTimeout below two ticks breaks the rule.
//
// A sync is answered by a leader alone, also by one that the others have replaced and that has not
// noticed: followers that crash and come back can elect another long before. So where no quorum has
// agreed to a transaction of the session for a quarter of its timeout, a transaction that changes
// nothing takes the place of the sync. A new leader gives each session its whole timeout anew, and
// no lease is trusted for longer than a timeout from the last transaction.
//
// A claim that is woken needs no sync where a quorum has just agreed to a transaction of its session, most
// often the one that made its node: what is no longer before that node in a list, however old the list is, has
// gone for good. Its lease is then trusted for half of the timeout from before that transaction.
//
// Half of the session's timeout is therefore the largest ttl. Where a server grants a shorter
// timeout than asked (at most 20 ticks, unless configured otherwise), leases are shorter, too. All
// members must have the same bounds of timeouts, and the same tick.
//
// # Tokens
//
// The fencing token is the czxid of the node: the 64-bit number of the transaction that made it,
// which grows over elections. It is not the number in the node's name, which has 32 bits, wraps,
// and starts again when the parent has been deleted. Tokens go back only with the data of the
// ensemble: when it is wiped, or restored from an older copy.
//
// # Nodes
//
// Everything lies below Chroot/holdfast: locks under locks, and the marks of a [Guard] under marks.
// A key is hashed, because paths cannot hold arbitrary bytes; the node of the hash has the key as
// its data. It is a container, which the servers remove some time after the last claim has gone.
// With credentials, nodes can be read and changed by their user alone.
package zkstore
