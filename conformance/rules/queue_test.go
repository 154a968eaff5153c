//go:build holdfast_rules

package rules

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// waiting is a claim that may be parked.
func (c *client) waiting(ttl time.Duration) *lease {
	return &lease{c: c, claim: c.store.Claim(c.e.key, store.ClaimOptions{TTL: ttl, Wait: true, Least: ttl / 100, Label: c.name})}
}

// park tries until the claim has a place in the queue of every node.
func (l *lease) park() {
	e := l.c.e
	e.t.Helper()
	e.until("a place in the queue", func() bool {
		err := l.try(e.ctx)
		var held *store.HeldError
		if !errors.As(err, &held) {
			e.t.Fatalf("beside a holder %s is told %v", l.c.name, err)
		}
		short, cancel := context.WithTimeout(e.ctx, 50*time.Millisecond)
		defer cancel()
		_ = l.claim.(store.Waiter).Wait(short, held)
		for n := range e.servers {
			if e.do(n+1, "ZCARD", "{"+e.key+"}:queue") != int64(1) {
				return false
			}
		}
		return true
	})
}

// reservedStamp: B waits, and C, the holder, dies. A and B propose the same stamp. A's is accepted,
// and A gives the lease back, which reserves the vote for B, before B's request arrives.
func reservedStamp(e *env) string {
	e.start(1)
	a, b, c := e.client("A"), e.client("B"), e.client("C")
	lc := c.claim(time.Second)
	lc.acquire()
	lb := b.waiting(ttl)
	lb.park()
	e.elapse(1100 * time.Millisecond)
	e.lapse(1)

	late := b.fault("VOTE").since(e.marks(4*time.Second) + 1).hold()
	try := e.begin(lb.try)
	late.await()
	m := late.stamp() - 1
	e.mark(1, m)
	la := a.claim(ttl)
	la.acquire()
	if int64(la.token()) != m+1 {
		e.t.Fatalf("A got token %d, not the stamp %d that B proposes", la.token(), m+1)
	}
	a.arrived("VOTE", 2)
	la.release()
	e.until("the reservation", func() bool { return e.voted(1) != "" && e.voted(1) != la.grant.Owner })
	late.end()
	if err := try.wait(); err != nil {
		lb.acquire()
	}
	return rising(lc, la, lb)
}

// lateNews: A hands over to B, which hears of that when the reservation has ended and C has the key.
func lateNews(e *env) string {
	e.start(1)
	a, b, c := e.client("A"), e.client("B"), e.client("C")
	la := a.claim(ttl)
	la.acquire()
	lb := b.waiting(ttl)
	lb.park()
	mail := b.wire(1).holdMail()
	err := lb.try(e.ctx)
	var held *store.HeldError
	if !errors.As(err, &held) {
		e.t.Fatalf("beside a holder B is told %v", err)
	}
	held.Holder.TTL = patience // B asks when it is told
	woken := e.begin(func(ctx context.Context) error { return lb.claim.(store.Waiter).Wait(ctx, held) })
	time.Sleep(50 * time.Millisecond) // until it waits
	la.release()
	e.until("the reservation", func() bool { return e.voted(1) != "" })
	e.until("its end", func() bool { return e.voted(1) == "" })
	lc := c.claim(ttl)
	lc.acquire()
	(<-mail)()
	if err := woken.wait(); err != nil {
		e.t.Fatalf("B is told, and %v", err)
	}
	_ = lb.try(e.ctx)
	defer lb.claim.Release(e.ctx)
	return bothValid(lb, lc)
}
