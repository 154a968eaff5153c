package storetest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var waitingTests = []test{
	{name: "Release", run: testWaitForRelease},
	{name: "ReleaseBeforeWait", run: testWaitAfterRelease},
	{name: "Expiry", run: testWaitForExpiry},
	{name: "Loss", run: testWaitForBreak, needs: is[store.Inspector]},
	{name: "Cancelled", run: testWaitCancelled},
	{name: "Withdrawn", run: testWaitWithdrawn},
	{name: "DeadWaiter", run: testWaitDeadWaiter},
	{name: "Extended", run: testWaitThroughExtensions},
	{name: "ReturnsAtTheEnd", run: testWaitReturnsAtTheEnd, needs: hasWaiter},
}

func hasWaiter(s store.Store) bool {
	_, ok := s.Claim("storetest", store.ClaimOptions{TTL: store.MinTTL, Wait: true}).(store.Waiter)
	return ok
}

// waitFor acquires in the background, beginning with a Try that is refused. The answer
// tells how long it took from the call of then.
func (e *env) waitFor(key string, then func()) (took time.Duration) {
	e.Helper()
	c := e.waiter(e.s2, key)
	e.refused(c, "the waiter")
	var end time.Time
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := e.acquire(e.ctx, c); err != nil {
			e.Errorf("the waiter is not granted the key: %v", err)
		}
		end = time.Now()
	})
	time.Sleep(e.ttl / 4) // lets it wait
	start := time.Now()
	then()
	wg.Wait()
	e.release(c, "the waiter, having been granted the key")
	return end.Sub(start)
}

// promptly complains where a waiter waited for the end of a ttl, instead of the event.
func (e *env) promptly(took time.Duration, what string) {
	e.Helper()
	if took > e.long/2 {
		e.Errorf("the waiter is granted the key %v after %s, the holder's ttl being %v", took, what, e.long)
	}
}

func testWaitForRelease(e *env) {
	key := e.key()
	holder := e.claim(e.s, key)
	e.grant(holder, "the holder")
	e.promptly(e.waitFor(key, func() { e.release(holder, "the holder") }), "the release")
}

// The key becomes free between Try and Wait: no wake-up is left to come.
func testWaitAfterRelease(e *env) {
	key := e.key()
	holder, c := e.claim(e.s, key), e.waiter(e.s2, key)
	e.grant(holder, "the holder")
	held := e.refused(c, "the waiter")
	e.release(holder, "the holder")
	start := time.Now()
	if err := e.wait(e.ctx, c, held); err != nil {
		e.Errorf("Wait for a key that is free answers %v, want nil", err)
	}
	if _, err := e.acquire(e.ctx, c); err != nil {
		e.Errorf("the waiter is not granted the key: %v", err)
	}
	e.promptly(time.Since(start), "Wait for a key that is free")
	e.release(c, "the waiter")
}

// A holder that dies wakes nobody; its waiter comes when the ttl has ended.
func testWaitForExpiry(e *env) {
	key := e.key()
	l := e.hold(e.short(e.s, key), "the holder that dies")
	e.waitFor(key, func() {})
	now := time.Now()
	if early := now.Sub(l.asked); early < store.Validity(l.TTL, 0) {
		e.Errorf("the waiter is granted the key after %v, though the holder was promised %v", early, l.TTL)
	}
	if late := now.Sub(l.answered); late > 2*e.ttl+e.step() {
		e.Errorf("the waiter is granted the key %v after the last grant of %v", late, e.ttl)
	}
}

func testWaitForBreak(e *env) {
	if e.info.MaxTTL > 0 && e.info.MaxTTL >= e.long {
		// Such a store may keep a broken key until every promise has run out.
		e.Logf("a key that was broken may stay taken for %v", e.info.MaxTTL)
	}
	key := e.key()
	g := e.grant(e.claim(e.s, key), "the holder")
	took := e.waitFor(key, func() {
		if err := e.s.(store.Inspector).Break(e.ctx, store.Holder{Key: key, Owner: g.Owner}); err != nil {
			e.Errorf("Break of the holder answers %v", err)
		}
	})
	if limit := max(e.long, e.info.MaxTTL) + 2*e.ttl; took > limit {
		e.Errorf("the waiter is granted the key %v after Break, want at most %v", took, limit)
	}
}

// Wait returns soon after its context is done, and its claim, once released, keeps no
// place that would block others.
func testWaitCancelled(e *env) {
	key := e.key()
	holder, c := e.claim(e.s, key), e.waiter(e.s2, key)
	e.grant(holder, "the holder")
	e.refused(c, "the waiter")
	ctx, cancel := context.WithTimeout(e.ctx, e.ttl/4)
	defer cancel()
	start := time.Now()
	if _, err := e.acquire(ctx, c); !errors.Is(err, context.DeadlineExceeded) {
		e.Errorf("a waiter whose context is done answers %v, want context.DeadlineExceeded", err)
	}
	if took := time.Since(start); took > e.ttl {
		e.Errorf("a waiter whose context is done after %v returns after %v", e.ttl/4, took)
	}
	e.release(c, "the cancelled waiter")
	e.release(c, "the cancelled waiter, a second time")
	e.release(holder, "the holder")
	e.free(key, "a key whose only waiter was withdrawn")
}

// A waiter that is withdrawn while another waits behind it does not hold that one up.
func testWaitWithdrawn(e *env) {
	key := e.key()
	holder, first := e.claim(e.s, key), e.waiter(e.s, key)
	e.grant(holder, "the holder")
	e.refused(first, "the first waiter")
	took := e.waitFor(key, func() {
		e.release(first, "the first waiter, which gives up")
		e.release(holder, "the holder")
	})
	e.promptly(took, "the release")
}

// A waiter that dies holds the others up for a while, not for good.
func testWaitDeadWaiter(e *env) {
	key := e.key()
	holder := e.claim(e.s, key)
	e.grant(holder, "the holder")
	e.refused(e.waiter(e.s, key), "the waiter that dies")
	took := e.waitFor(key, func() { e.release(holder, "the holder") })
	e.promptly(took, "the release, a dead waiter being before it")
}

// The holder extends: waiters go on waiting, past the end that they were told of.
func testWaitThroughExtensions(e *env) {
	key := e.key()
	holder := e.short(e.s, key)
	e.grant(holder, "the holder")
	took := e.waitFor(key, func() {
		for range 5 {
			if _, err := e.tryExtend(holder); err != nil {
				e.Errorf("Extend of a lease that is waited for answers %v", err)
				return
			}
			time.Sleep(e.ttl / 3)
		}
		e.release(holder, "the holder")
	})
	if took < 5*(e.ttl/3) {
		e.Errorf("the waiter is granted the key after %v, the holder having held it for %v", took, 5*(e.ttl/3))
	}
}

// Wait returns at the latest when held says that the grant ends, be it extended or not.
func testWaitReturnsAtTheEnd(e *env) {
	key := e.key()
	holder, c := e.short(e.s, key), e.waiter(e.s2, key)
	e.grant(holder, "the holder")
	held := e.refused(c, "the waiter")
	start := time.Now()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := c.(store.Waiter).Wait(e.ctx, held); err != nil {
			e.Errorf("Wait answers %v, want nil", err)
		}
		if took := time.Since(start); took > held.Holder.TTL+e.ttl/2 {
			e.Errorf("Wait returns after %v, though held says that the grant ends in %v", took, held.Holder.TTL)
		}
	})
	for range 8 {
		time.Sleep(e.ttl / 4)
		if _, err := e.tryExtend(holder); err != nil {
			break // too busy a machine; the bound stands
		}
	}
	e.release(holder, "the holder")
	wg.Wait()
	e.release(c, "the waiter")
}
