//go:build holdfast_rules

package rules

import (
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/redlock"
)

const (
	year = 365 * 24 * time.Hour
	ttl  = 10 * time.Second
)

// twoParts: a network falls into two parts. Both clients have seen the same marks, and propose
// the same stamp.
func twoParts(e *env) string {
	e.start(3)
	m := e.marks(4 * time.Second)
	a, b := e.client("A"), e.client("B")
	a.fault("VOTE", 2, 3).since(m + 1).refuse()
	b.fault("VOTE", 1).refuse()

	la, lb := a.claim(ttl), b.claim(ttl)
	_ = la.try(e.ctx) // one node of three
	lb.acquire()      // two of three
	if v := bothValid(la, lb); v != "" {
		return v + "; " + rising(la, lb)
	}
	return rising(la, lb)
}

// twoStamps: node 1 accepts one stamp of A's, node 2 the next. Taken together they look like a
// quorum, and leave B the stamp that A took for its token.
func twoStamps(e *env) string {
	e.start(3)
	m := e.marks(4 * time.Second)
	a, b := e.client("A"), e.client("B")

	// Round m+1: node 1 accepts, node 2 has just accepted m+1 of somebody else's. Round m+2:
	// node 1 does not answer, node 2 accepts. Node 3 does not answer at all.
	a.fault("VOTE", 3).since(m + 1).refuse()
	a.fault("VOTE", 1).since(m + 2).refuse()
	held := a.fault("VOTE", 2).since(m + 1).hold()
	la := a.claim(time.Second)
	try := e.begin(la.try)
	held.await()
	e.mark(2, m+1)
	e.until("node 1 to vote", func() bool { return e.voted(1) != "" })
	held.end()
	_ = try.wait()

	e.elapse(1100 * time.Millisecond) // A dies
	b.fault("VOTE", 2).refuse()
	lb := b.claim(ttl)
	lb.acquire()
	return rising(la, lb)
}

// sameStamp: B's request is late. Meanwhile A gets the lease with the same stamp, and releases.
func sameStamp(e *env) string {
	e.start(3)
	return afterRelease(e, func(b *client, stamp int64) *fault { return b.fault("VOTE").since(stamp).hold() })
}

// lowTwice: the same, and B's client library sends the late request twice.
func lowTwice(e *env) string {
	e.start(3)
	return afterRelease(e, func(b *client, stamp int64) *fault { return b.fault("VOTE").since(stamp).repeat() })
}

// afterRelease has A take and release the lease while B's request of the same stamp is under
// way. Both know from C's lease which stamp is the next.
func afterRelease(e *env, hold func(b *client, stamp int64) *fault) string {
	a, b, c := e.client("A"), e.client("B"), e.client("C")
	m := e.marks(4 * time.Second)
	lc, lb, la := c.claim(ttl), b.claim(ttl), a.claim(ttl)
	lc.acquire()
	c.arrived("VOTE", 2) // the first has seen the marks, the second is accepted
	if lb.try(e.ctx) == nil {
		e.t.Fatal("two holders")
	}
	b.arrived("VOTE", 1)
	lc.release()
	e.unvoted()

	held := hold(b, m+2)
	try := e.begin(lb.try)
	held.await()
	la.acquire()
	if int64(la.token()) != m+2 {
		e.t.Fatalf("A got token %d, not the stamp %d that B proposes", la.token(), m+2)
	}
	a.arrived("VOTE", 2)
	la.release()
	e.unvoted()

	held.end()
	if err := try.wait(); err != nil {
		lb.acquire()
	}
	return rising(lc, la, lb)
}

// tokenOfHealing: A's clock is ahead when it heals node 3. B is granted after A has lapsed, by
// the nodes that the healing has not touched.
func tokenOfHealing(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	missed := a.fault("VOTE", 3).refuse()
	la := a.claim(ttl / 4)
	la.acquire()
	missed.await()
	missed.end()
	first := la.token()

	e.elapse(ttl / 10)
	e.wall(4500 * time.Millisecond)
	la.mustExtend()
	e.until("node 3 to heal", func() bool { return e.voted(3) == la.grant.Owner })
	e.until("the answer", func() bool { return e.healings(3) == 1 })
	e.wall(0)
	for range 3 {
		la.mustExtend()
	}

	e.lapse(1, 2)
	if la.valid() {
		e.t.Fatal("A still trusts its lease")
	}
	b.fault("VOTE", 3).refuse()
	lb := b.claim(ttl)
	lb.acquire()
	if la.token() == first {
		return rising(la, lb)
	}
	return fmt.Sprintf("healing changed A's token from %d to %d; %s, so the resource lets A overwrite B", first, la.token(), rising(la, lb))
}

// yearAhead: a client whose clock jumps a year ahead takes the lock once. The marks that it
// leaves end one day.
func yearAhead(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	e.wall(year)
	la := a.claim(ttl)
	la.acquire()
	la.release()
	e.wall(0)
	e.elapse(121 * time.Second)
	lb := b.claim(ttl)
	lb.acquire()
	return rising(la, lb)
}

// yearAheadRelease: the same, and none of that client's votes gets through, only its RELEASE.
func yearAheadRelease(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	lost := a.fault("VOTE").refuse()
	e.wall(year)
	_ = a.claim(ttl).try(e.ctx)
	a.arrived("RELEASE", 1)
	e.wall(0)
	lost.end()

	lb, lc := b.claim(ttl), b.claim(ttl)
	if err := lb.try(e.ctx); err != nil {
		return fmt.Sprintf("a client that never held the lock keeps it from all others: %v", err)
	}
	lb.release()
	e.elapse(121 * time.Second)
	lc.acquire()
	return rising(lb, lc)
}

// hourBehind: a server is set up anew from an older snapshot, and waits until it may vote. A
// client whose clock is an hour behind is the first to ask.
func hourBehind(e *env) string {
	e.start(1)
	a, b := e.client("A"), e.client("B")
	s := e.server(1)
	snapshot := s.SaveSnapshot()
	la := a.claim(ttl)
	la.acquire()
	la.release()

	s.Kill()
	s.RestoreSnapshot(snapshot)
	e.elapse(time.Minute)
	s.Restart(old)
	e.wall(-time.Hour)
	lb := b.claim(ttl)
	lb.acquire()
	return rising(la, lb)
}

// shortMark: the mark that A leaves, as far ahead as a node lets it, has to outlive a jump of
// the node's clock by up to 110 s back.
func shortMark(e *env) string {
	e.start(1)
	a, b := e.client("A"), e.client("B")
	e.wall(4900 * time.Millisecond)
	la := a.claim(ttl)
	la.acquire()
	la.release()

	e.elapse(115500 * time.Millisecond)
	e.do(1, "EXISTS", "{"+e.key+"}:fence") // the server looks at it, and forgets it where its life is over
	e.step(1, -110*time.Second)
	e.wall(-114 * time.Second) // B's clock, 4 s behind the node's
	lb := b.claim(ttl)
	lb.acquire()
	return rising(la, lb)
}

// shortQuarantineTokens: what a node forgets of tokens takes 30 s to be over, however short
// the leases are.
func shortQuarantineTokens(e *env) string {
	e.start(1)
	o := redlock.Options{MaxTTL: time.Second}
	a := e.client("A", o)
	e.wall(4900 * time.Millisecond)
	la := a.claim(time.Second)
	la.acquire()
	la.release()
	e.wall(0)

	e.restart(1)
	e.elapse(2500 * time.Millisecond)
	e.aged(e.server(1), 2*time.Second)
	lb := e.stranger("B", o).claim(time.Second)
	if err := lb.try(e.ctx); young(err) {
		e.elapse(31 * time.Second)
		e.aged(e.server(1), 31*time.Second)
		lb.acquire()
	}
	return rising(la, lb)
}

// badClock: one node's clock is an hour ahead, and it answers first.
func badClock(e *env) string {
	e.start(3)
	a := e.client("A")
	e.step(3, time.Hour)
	m := e.marks(4 * time.Second)
	late := a.fault("VOTE", 1, 2).hold()
	la := a.claim(ttl)
	try := e.begin(la.try)
	e.until("node 3 to answer", func() bool { return a.wire(3).count("VOTE") > 0 })
	late.end()
	return steered(la, try.wait(), m)
}

// badClockWaiter: the same, while another holds the lock, which it releases then.
func badClockWaiter(e *env) string {
	e.start(3)
	a, b := e.client("A"), e.client("B")
	e.step(3, time.Hour)
	lb := b.claim(ttl)
	lb.acquire()
	la := a.claim(ttl)
	late := a.fault("VOTE", 1, 2).hold()
	try := e.begin(la.try)
	e.until("node 3 to answer", func() bool { return a.wire(3).count("VOTE") > 0 })
	late.end()
	if err := try.wait(); err == nil {
		e.t.Fatal("two holders")
	}
	lb.release()
	return steered(la, la.try(e.ctx), int64(lb.token()))
}

// steered says that a single node has kept a client from a free lock, or has made its token.
func steered(l *lease, err error, m int64) string {
	switch {
	case err != nil:
		return fmt.Sprintf("two of three nodes are fine, and yet: %v", err)
	case int64(l.token())-m > time.Minute.Microseconds():
		return fmt.Sprintf("token %d was made by the bad clock", l.token())
	}
	return ""
}
