package redlock

import (
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/clock"
)

// This file holds the direct hand-over of docs/protocol.md, sections 1.2 and 2: a reservation
// that is a grant by itself, so that a key passes on in one round trip.

const (
	// handedPace is when a lease by hand-over is extended to its whole ttl: later than most
	// short sections end, and long before the reservation does.
	handedPace = 10 * time.Millisecond
	// minGrace is for how long the messages of a quorum are waited for once there is one.
	minGrace = time.Millisecond
)

// pair is what a claim that waits has heard of one node.
type pair struct {
	asked clock.Instant // stamped before the last request that was answered by busy,
	clock int64         // the node's clock in that answer,
	mark  int64         // and the mark
	under string        // as what the node was admitted then
	given int64         // the stamp that a hand-over accepted there for the present attempt
}

func (h *pair) book(asked clock.Instant, busy answer, script *voteScript) {
	if asked.Sub(h.asked) < 0 {
		return
	}
	h.asked, h.clock, h.mark, h.under = asked, busy.now, busy.mark, ""
	if script != nil {
		h.under = script.id
	}
}

// forgetGiven is for an attempt that asks, or is over.
func (w *waiting) forgetGiven() {
	for i := range w.pairs {
		w.pairs[i].given = 0
	}
}

// give books that a node has reserved its vote for the attempt, and reports whether that counts
// towards a grant. It does not where the node's last answer is from after the reservation, whose stamp
// is not above the mark then; nor where more time has passed since the node's last answer by its clock than
// by ours, which was stepped, or stood still, as that of a paused virtual machine does: how old the
// message is cannot be told. c.mu is held.
func (c *claim) give(p *peer, m message) bool {
	n, h := &c.attempt.nodes[p.index], &c.w.pairs[p.index]
	switch {
	case m.clock == 0, c.least == 0, !c.held && !c.w.idle: // no grant, not wanted, a round is under way
		return false
	case h.asked.IsZero(), h.under != m.id, m.mark <= h.mark && !off(ruleW):
		return false
	case m.mark > c.s.wall()+aheadLimit.Microseconds(): // no right clock can have more
		return false
	}
	now := c.s.clock.Now()
	waited := time.Duration(m.clock-h.clock) * time.Microsecond
	late := now.Since(h.asked.Add(waited))
	if -late > drift(waited) && !off(ruleW) {
		return false
	}
	h.given, n.mark = m.mark, max(n.mark, m.mark)
	n.marked, n.sent = max(n.marked, m.mark), max(n.sent, m.mark)
	n.until = clock.Max(n.until, now.Add(remains(m.reserve, waited, late)))
	return true
}

// remains is how much of a reservation is left at least, that a message tells of. It was made no sooner
// after the node's last answer than the node's clock says, which is late ago, by whichever of the
// client's clocks says more; and before the message came, which counts where that is in the future.
// Rule W.
func remains(reserve, waited, late time.Duration) time.Duration {
	if off(ruleW) {
		late = 0
	}
	return reserve - drift(reserve) - waited.Abs()/100 - max(0, late)
}

// gather makes the attempt the lease where Q nodes have told the same stamp (rule I). The other
// messages come soon, or the claim asks. c.mu is held.
func (c *claim) gather(m message, now clock.Instant) {
	var room [8]time.Duration // what is left, since instants do not compare over a sleep
	lefts := room[:0]
	for i, n := range c.attempt.nodes {
		if c.w.pairs[i].given == m.mark {
			lefts = append(lefts, now.Until(n.until))
		}
	}
	if len(lefts) < c.s.q {
		if c.w.grace == nil {
			c.w.grace = time.AfterFunc(max(minGrace, 2*c.s.roundTrip()), c.poke)
		}
		return
	}
	c.w.stopGrace()
	left := min(nthSmallest(len(lefts)-c.s.q+1, lefts), c.ttl-drift(c.ttl))
	if left < max(c.enough(), m.reserve/2) || c.ended {
		c.pokeLocked()
		return
	}
	for i := range c.attempt.nodes { // the token counts as sent (rule M)
		n := &c.attempt.nodes[i]
		n.sent = max(n.sent, m.mark)
	}
	c.attempt.stamp = max(c.attempt.stamp, m.mark)
	c.held, c.handed, c.taken, c.token, c.until = true, true, false, fence.Token(m.mark), now.Add(left)
	c.s.inbox.served(c)
	c.signalLocked()
}

// enough is what a grant by hand-over must leave: the validity that is of use, and the time in which
// an extension comes back.
func (c *claim) enough() time.Duration { return c.least + 2*c.s.roundTrip() }

func (w *waiting) stopGrace() {
	if w.grace != nil {
		w.grace.Stop()
		w.grace = nil
	}
}
