//go:build holdfast_rules

package rules

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

// breaks takes the lock from the holder of a lease, as an operator does who has not met the
// nodes before.
func (c *client) breaks(l *lease) *call {
	return c.e.begin(func(ctx context.Context) error {
		return c.store.Break(ctx, store.Holder{Key: c.e.key, Owner: l.grant.Owner})
	})
}

func (c *client) mustBreak(l *lease) {
	c.e.t.Helper()
	if err := c.breaks(l).wait(); err != nil {
		c.e.t.Fatalf("%s cannot break the lock: %v", c.name, err)
	}
}

// afterBreak has another client ask for a lock that was broken, at once, and when it must be
// free.
func afterBreak(e *env, la *lease, b *client) string {
	lb := b.claim(ttl)
	if err := lb.try(e.ctx); err != nil && !errors.Is(err, store.ErrHeld) {
		e.t.Fatal(err)
	}
	if v := bothValid(la, lb); v != "" {
		return v
	}
	if !lb.granted() {
		e.elapse(b.store.Info().MaxTTL)
		lb = b.claim(ttl)
		lb.acquire()
	}
	return bothValid(la, lb) + rising(la, lb)
}

// undone reports whether the former holder still has its lease, or a node's vote.
func undone(e *env, la *lease) string {
	if err := la.extend(e.ctx); err == nil {
		return fmt.Sprintf("the break is undone: A's lease is extended, for another %v", (la.until - redlock.Now()).Round(time.Millisecond))
	} else if !errors.Is(err, store.ErrLost) {
		e.t.Fatalf("after a break extending answers %v", err)
	}
	for n := range e.servers {
		if e.voted(n+1) == la.grant.Owner {
			return fmt.Sprintf("node %d votes for the holder whose lock was broken, for another %v ms", n+1, e.do(n+1, "PTTL", e.key))
		}
	}
	return ""
}

// brokenWhileValid: A's lease is valid when an operator breaks the lock.
func brokenWhileValid(nodes int) func(e *env) string {
	return func(e *env) string {
		e.start(nodes)
		a, b, o := e.client("A"), e.client("B"), e.stranger("operator")
		la := a.claim(ttl)
		la.acquire()
		a.arrived("VOTE", 1)
		o.mustBreak(la)
		return afterBreak(e, la, b)
	}
}

// brokenDuringExtension: A's extension is executed before the break, and its answers come
// after it.
func brokenDuringExtension(e *env) string {
	e.start(3)
	a, b, o := e.client("A"), e.client("B"), e.stranger("operator")
	la := a.claim(ttl)
	la.acquire()
	a.arrived("VOTE", 1)
	e.elapse(ttl / 2)
	slow := a.fault("KEEP").holdReplies()
	extension := e.begin(la.extend)
	slow.await()
	o.mustBreak(la)
	slow.end()
	if err := extension.wait(); err != nil {
		e.t.Fatalf("an extension that was executed before the break answers %v", err)
	}
	return afterBreak(e, la, b)
}

// brokenBeforeVote: A's vote of node 3 comes after the break.
func brokenBeforeVote(e *env) string {
	e.start(3)
	a, o := e.client("A"), e.stranger("operator")
	late := a.fault("VOTE", 3).hold()
	la := a.claim(ttl)
	la.acquire()
	late.await()
	o.mustBreak(la)
	late.end()
	a.arrived("VOTE", 1)
	return undone(e, la)
}

// healedBetweenBreaks: the operator's requests reach the nodes one after the other, and
// between them A extends, which heals the node before.
func healedBetweenBreaks(e *env) string {
	e.start(3)
	a, o := e.client("A"), e.stranger("operator")
	la := a.claim(ttl)
	la.acquire()
	a.arrived("VOTE", 1)

	held := func() (f []*fault) {
		for n := range e.servers {
			f = append(f, o.fault("BREAK", n+1).hold())
		}
		return f
	}
	first := held()
	breaking := o.breaks(la)
	for _, f := range first {
		f.await()
	}
	again := held() // once more to the same nodes
	healing := func(node int, f *fault, executed int) {
		f.end()
		e.until("BREAK", func() bool { return o.wire(node).count("BREAK") >= executed })
		// Extend until the node is healed, or has a vote that is not A's, or the lease is lost.
		e.until("an extension", func() bool {
			err := la.extend(e.ctx)
			return errors.Is(err, store.ErrLost) || err == nil && e.voted(node) != ""
		})
	}
	for i, f := range first {
		healing(i+1, f, 1)
	}
	for i, f := range again {
		f.await()
		healing(i+1, f, 2)
	}
	if err := breaking.wait(); err != nil {
		e.t.Fatalf("the operator is told %v", err)
	}
	return undone(e, la)
}
