//go:build holdfast_rules

package rules

import (
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

func young(err error) bool {
	var y *redlock.YoungError
	return errors.As(err, &y)
}

// slowReplies: the replies to A's votes take more than half of the ttl.
func slowReplies(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	slow := a.fault("VOTE").holdReplies()
	la := a.claim(ttl)
	try := e.begin(la.try)
	slow.await()
	e.elapse(6 * time.Second)
	slow.end()
	if err := try.wait(); err != nil {
		e.t.Fatal(err)
	}
	return besideTicket(e, la, b, 5*time.Second)
}

// besideTicket lets time pass until the lock is free, has B take it, and compares with what
// A's ticket says of A's lease.
func besideTicket(e *env, la *lease, b *client, d time.Duration) string {
	_, la.until = la.ticket()
	e.elapse(d)
	e.lapse(1, 2, 3)
	lb := b.claim(la.grant.TTL)
	lb.acquire()
	return bothValid(la, lb)
}

// differentRates: the nodes' clocks are 1 % faster than A's.
func differentRates(e *env) string {
	e.start(3)
	o := redlock.Options{MaxTTL: 2000 * time.Second}
	a, b := e.client("A", o), e.client("B", o)
	la := a.claim(o.MaxTTL)
	la.acquire()
	_, la.until = la.ticket()
	e.elapse(1985 * time.Second)
	for n := range e.servers {
		e.step(n+1, 16*time.Second)
	}
	lb := b.claim(o.MaxTTL)
	lb.acquire()
	return bothValid(la, lb)
}

// lapsedRelease: A's lease has lapsed and B holds when A releases.
func lapsedRelease(e *env) string {
	e.start(3)
	a, b, c := e.client("A"), e.client("B"), e.client("C")
	la, lb, lc := a.claim(ttl), b.claim(ttl), c.claim(ttl)
	la.acquire()
	e.elapse(ttl)
	e.lapse(1, 2, 3)
	lb.acquire()
	la.release()
	a.arrived("RELEASE", 1)
	_ = lc.try(e.ctx)
	return bothValid(lb, lc)
}

// lateRelease: A withdraws a first attempt, and the requests are late. The second attempt is
// granted before they arrive.
func lateRelease(e *env) string {
	e.start(3)
	a, b, c := e.client("A"), e.client("B"), e.client("C")
	missed := c.fault("VOTE", 1).refuse()
	lc := c.claim(ttl)
	lc.acquire()
	missed.await()
	missed.end()

	la := a.claim(ttl)
	late := a.fault("RELEASE").hold()
	refusals := a.fault("VOTE", 2, 3).holdReplies() // which would spare node 1 the request
	try := e.begin(la.try)                          // node 1 votes for A, the others have voted for C
	e.until("the vote of node 1", func() bool { return e.voted(1) != "" })
	refusals.end()
	late.await()
	a.arrived("VOTE", 1)
	if try.giveUp() == nil {
		e.t.Fatal("two holders")
	}
	lc.release()
	la.acquire()
	late.end()
	a.arrived("RELEASE", 1)
	lb := b.claim(ttl)
	_ = lb.try(e.ctx)
	return bothValid(la, lb)
}

// olderExtension: the replies to an extension come after the next one was sent, whose requests
// are lost.
func olderExtension(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	la := a.claim(ttl)
	la.acquire()

	e.elapse(3 * time.Second)
	slow := a.fault("KEEP").holdReplies()
	first := e.begin(la.extend)
	slow.await()
	first.cancel()
	if err := first.wait(); err == nil {
		e.t.Fatal("extended without an answer")
	}

	e.elapse(5 * time.Second)
	lost := a.fault("KEEP").hold()
	slow.stop()
	second := e.begin(la.extend)
	lost.await()
	slow.end()
	e.until("the late answers", func() bool { return e.told("extend") >= len(e.servers) })
	_ = second.waitOr(soon)
	return besideTicket(e, la, b, 4500*time.Millisecond)
}

// shorter: a request of a lease's own, with a shorter ttl, is late.
func shorter(op string) func(e *env) string {
	return func(e *env) string {
		e.start(3)
		a, b := e.client("A"), e.client("B")
		la := a.claim(ttl)
		la.acquire()
		la.mustExtend()
		a.arrived(op, 1)
		for _, w := range a.wires {
			w.resend(op, argTTL, "1000")
		}
		e.elapse(2 * time.Second)
		lb := b.claim(ttl)
		_ = lb.try(e.ctx)
		return bothValid(la, lb)
	}
}

// How a lease comes back to life.
const (
	byLateAnswers = iota
	byExtension
	byAdoption
)

// revived: A's lease lapses while node 1 still has its vote, of an extension whose replies were
// lost. B takes and releases the lock through the other two. Then a healing vote of A's, sent
// in time, arrives at node 3: A's votes are a quorum again.
func revived(how int) func(e *env) string {
	return func(e *env) string {
		e.start(3)
		a, b, c := e.client("A"), e.client("B"), e.client("C")
		missed := a.fault("VOTE", 3).refuse()
		la := a.claim(4 * time.Second)
		la.acquire()
		missed.await()
		missed.end()

		e.elapse(time.Second)
		healing := a.fault("VOTE", 3).hold()
		e.wall(4500 * time.Millisecond) // A's clock is ahead when it heals
		la.mustExtend()
		healing.await()
		e.wall(0)

		e.elapse(3 * time.Second)
		if !la.valid() {
			e.t.Fatal("A has lapsed too early")
		}
		answers := a.fault("KEEP", 1).holdReplies()
		lost := a.fault("KEEP", 2).hold()
		late := a.fault("KEEP", 3).hold()
		extension := e.begin(la.extend)
		answers.await()
		lost.await()
		late.await()
		var ticket string
		if how != byLateAnswers {
			_ = extension.giveUp()
		}
		if how == byAdoption {
			ticket, _ = la.ticket()
		}

		e.lapse(2)
		if la.valid() {
			e.t.Fatal("A still trusts its lease")
		}
		e.wall(-3 * time.Second) // B's clock is behind A's
		lb := b.claim(ttl)
		lb.acquire()
		lb.release()
		for _, n := range []int{2, 3} {
			e.until("the release", func() bool { return e.voted(n) == "" })
		}
		healing.end()
		e.until("A's late vote", func() bool { return e.voted(3) == la.grant.Owner })

		again := la
		switch how {
		case byLateAnswers:
			late.end()
			answers.end()
			e.until("the late answers", func() bool { return e.told("extend") >= 5 })
			_ = extension.waitOr(soon)
		case byExtension:
			answers.end()
			late.end()
			_ = la.extend(e.ctx)
		case byAdoption:
			again, _ = c.adopt(e.ctx, ticket)
		}
		if again.valid() {
			return fmt.Sprintf("A's lease (token %d) had lapsed and is valid for another %v, with the whole of B's (token %d) inside",
				again.token(), (again.until - redlock.Now()).Round(time.Millisecond), lb.token())
		}
		return ""
	}
}

// ghostVote: the RELEASE of a lease overtakes its VOTE at node 3, whose clock may be behind.
func ghostVote(behind time.Duration) func(e *env) string {
	return func(e *env) string {
		e.start(3)
		a := e.client("A")
		e.step(3, -behind)
		late := a.fault("VOTE", 3).hold()
		la := a.claim(ttl)
		la.acquire()
		late.await()
		time.Sleep(50 * time.Millisecond) // what a client posts at once goes out after the VOTE, and would not overtake it
		la.release()
		// From this moment node 3 would accept the stamp; the client repeats the RELEASE then.
		e.until("node 3's clock", func() bool { return int64(la.token()) < e.time(3)+(5*time.Second).Microseconds() })
		e.untilOr(3*time.Second, func() bool { return a.wire(3).word("RELEASE") == "DONE" })
		late.end()
		e.until("the late vote", func() bool { return a.wire(3).count("VOTE") > 0 })
		if owner := e.voted(3); owner != "" {
			return fmt.Sprintf("node 3 votes for an attempt that has ended, for another %v ms", e.do(3, "PTTL", e.key))
		}
		return ""
	}
}

// rollingRestarts: node 3 has missed A's vote, and has a higher mark of a client that came too
// late. Then the other nodes are restarted, one after the other, and each is healed before the
// next.
func rollingRestarts(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	missed := a.fault("VOTE", 3).refuse()
	la := a.claim(ttl)
	la.acquire()
	missed.await()
	missed.end()
	e.wall(time.Second)
	lb := b.claim(ttl)
	if lb.try(e.ctx) == nil {
		e.t.Fatal("two holders")
	}
	e.wall(0)
	e.until("B's withdrawal", func() bool { return b.wire(3).count("VOTE") > 0 && e.voted(3) == "" })
	if e.marked(3) <= int64(la.token()) {
		e.t.Fatal("node 3 has no higher mark")
	}

	for _, n := range []int{3, 1, 2} {
		if n != 3 {
			e.restart(n, old)
		}
		// A few extensions, of which each heals what the one before has found.
		for range 5 {
			if err := la.extend(e.ctx); err != nil {
				return fmt.Sprintf("the restart of one node at a time ends the lease: %v", err)
			}
			before := e.healings(n)
			e.untilOr(200*time.Millisecond, func() bool { return e.voted(n) == la.grant.Owner || e.healings(n) > before })
			if e.voted(n) == la.grant.Owner {
				break
			}
		}
	}
	return ""
}

// youngNode: node 3 votes for B, restarts, and has forgotten it when A heals. B's vote of node
// 2 comes when A's has run out there.
func youngNode(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	missed := a.fault("VOTE", 3).refuse()
	la := a.claim(4 * time.Second)
	la.acquire()
	missed.await()
	missed.end()

	try, late, lb := splitVote(e, b)
	e.restart(3)

	e.elapse(time.Second)
	la.mustExtend()
	e.until("the healing of node 3", func() bool { return e.healings(3) > 0 })

	e.elapse(3 * time.Second)
	return runsOutAtNode2(e, la, lb, try, late)
}

// splitVote has B ask for the lock that A holds at nodes 1 and 2: its request to node 1 is
// lost, the one to node 2 late, and node 3 votes for it.
func splitVote(e *env, b *client) (try *call, late *fault, lb *lease) {
	b.fault("VOTE", 1).hold()
	late = b.fault("VOTE", 2).hold()
	e.wall(3500 * time.Millisecond) // so that a late request is not too old
	lb = b.claim(ttl * 2)
	try = e.begin(lb.try)
	late.await()
	e.until("B's vote of node 3", func() bool { return e.voted(3) != "" && b.wire(3).count("VOTE") > 0 })
	e.wall(0)
	return try, late, lb
}

// runsOutAtNode2: A extends, without node 2. Its vote there runs out, and B's late request
// arrives.
func runsOutAtNode2(e *env, la, lb *lease, try *call, late *fault) string {
	lost := la.c.fault("KEEP", 2).hold()
	extension := e.begin(la.extend)
	lost.await()
	e.until("the other answers", func() bool { return la.c.wire(1).count("KEEP") >= 2 && la.c.wire(3).count("KEEP") >= 2 })
	_ = extension.waitOr(soon)

	e.lapse(2)
	late.end()
	if err := try.wait(); err != nil {
		e.t.Fatalf("B is not granted: %v", err)
	}
	return bothValid(la, lb)
}

// promiseOver: node 3's promise to A has run out, and it has voted for B, when it goes back to
// an older state in which A's vote is there, with its clock 4.5 s back.
func promiseOver(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	la := a.claim(ttl)
	la.acquire()
	e.until("the vote of node 3", func() bool { return e.voted(3) == la.grant.Owner })
	snapshot := e.server(3).SaveSnapshot()

	e.elapse(6 * time.Second)
	lost := a.fault("KEEP", 3).hold()
	extension := e.begin(la.extend)
	lost.await()
	if err := extension.wait(); err != nil {
		e.t.Fatal(err)
	}
	e.lapse(3)
	try, late, lb := splitVote(e, b)

	s := e.server(3)
	s.Kill()
	s.RestoreSnapshot(snapshot)
	e.step(3, -4500*time.Millisecond)
	s.Restart()
	if e.voted(3) != la.grant.Owner {
		e.t.Fatal("node 3 does not have A's vote back")
	}
	lost.end()
	e.elapse(3 * time.Second)
	return runsOutAtNode2(e, la, lb, try, late)
}

// shortQuarantine: A's only node restarts empty, and votes for B before A's lease has ended.
func shortQuarantine(e *env) string {
	e.start(1)
	o := redlock.Options{MaxTTL: 1000 * time.Second}
	la := e.client("A", o).claim(o.MaxTTL)
	la.acquire()
	e.restart(1)
	e.elapse(950 * time.Second)
	e.aged(e.server(1), 949*time.Second)
	lb := e.stranger("B", o).claim(o.MaxTTL)
	if err := lb.try(e.ctx); err != nil && !young(err) {
		e.t.Fatal(err)
	}
	return bothValid(la, lb)
}

// deleted: an operator deletes the lock on all nodes. The holder must not put it back.
func deleted(nodes int) func(e *env) string {
	return func(e *env) string {
		e.start(nodes)
		a := e.client("A")
		la := a.claim(ttl)
		la.acquire()
		e.deleteAll(a)
		if err := la.extend(e.ctx); !errors.Is(err, store.ErrLost) {
			e.t.Fatalf("the lock is deleted, and extending answers %v", err)
		}
		return e.putBack(la)
	}
}

// deletedTicket: the same, and the holder is another process, which has a ticket.
func deletedTicket(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	la := a.claim(ttl)
	la.acquire()
	ticket, _ := la.ticket()
	e.deleteAll(a)
	if _, err := b.adopt(e.ctx, ticket); !errors.Is(err, store.ErrLost) {
		e.t.Fatalf("the lock is deleted, and adopting answers %v", err)
	}
	return e.putBack(la)
}

// deleteAll deletes the votes, when all nodes have given them.
func (e *env) deleteAll(a *client) {
	a.arrived("VOTE", 1)
	for i := range a.wires {
		e.do(i+1, "DEL", e.key)
	}
}

func (e *env) putBack(l *lease) string {
	e.untilOr(100*time.Millisecond, func() bool { return e.voted(1) != "" })
	if e.voted(1) != "" {
		return fmt.Sprintf("the deletion is undone by the extension of a lost lease, for another %v ms", e.do(1, "PTTL", e.key))
	}
	return ""
}
