package storetest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var contextTests = []test{
	{name: "DoneTakesNothing", run: testDoneTakesNothing},
	{name: "DoneLeavesTheLease", run: testDoneLeavesTheLease},
	{name: "CancelledMidCall", run: testCancelledMidCall},
	{name: "ReturnsSoon", run: testReturnsSoon},
	{name: "LeaseOutlivesContext", run: testLeaseOutlivesContext},
}

// done returns contexts that are done, and the error that says so.
func (e *env) done() map[error]context.Context {
	cancelled, cancel := context.WithCancel(e.ctx)
	cancel()
	late, cancel := context.WithDeadline(e.ctx, time.Now().Add(-time.Second))
	e.Cleanup(cancel)
	return map[error]context.Context{context.Canceled: cancelled, context.DeadlineExceeded: late}
}

func testDoneTakesNothing(e *env) {
	for want, ctx := range e.done() {
		key := e.key()
		c := e.claim(e.s, key)
		if g, err := c.Try(ctx); err == nil {
			e.Errorf("Try with a done context grants token %v", g.Token)
		} else if !errors.Is(err, want) {
			e.Errorf("Try with a done context answers %v, want %v", err, want)
		}
		e.free(key, "a key after Try with a done context")
		if w, ok := c.(store.Waiter); ok {
			holder := e.claim(e.s2, key)
			e.grant(holder, "the holder")
			if err := w.Wait(ctx, e.held(key, "a held key")); !errors.Is(err, want) {
				e.Errorf("Wait with a done context answers %v, want %v", err, want)
			}
			e.release(c, "a claim whose Wait had a done context")
			e.release(holder, "the holder")
			e.free(key, "a key after Wait with a done context")
		}
	}
}

// A done context ends neither the lease nor the claim.
func testDoneLeavesTheLease(e *env) {
	for want, ctx := range e.done() {
		key := e.key()
		c := e.claim(e.s, key)
		e.grant(c, "the holder")
		if _, err := c.Extend(ctx); !errors.Is(err, want) {
			e.Errorf("Extend with a done context answers %v, want %v", err, want)
		} else if errors.Is(err, store.ErrLost) {
			e.Errorf("Extend with a done context answers that the lease is lost: %v", err)
		}
		if s, ok := e.s.(store.BatchExtender); ok {
			if r := s.ExtendMany(ctx, []store.Claim{c}); len(r) != 1 || !errors.Is(r[0].Err, want) {
				e.Errorf("ExtendMany with a done context answers %v, want %v", r, want)
			}
		}
		e.extend(c, "the holder, after Extend with a done context")
		if err := c.Release(ctx); err != nil && !isAny(err, want, store.ErrUncertain) {
			e.Errorf("Release with a done context answers %v, want %v, ErrUncertain or nil", err, want)
		}
		e.release(c, "the holder, after Release with a done context")
		e.free(key, "a key that was released after all")
	}
}

// A Try that is cancelled while it runs either answers the grant, or leaves nothing behind
// that Release does not remove.
func testCancelledMidCall(e *env) {
	key := e.key()
	for i := range 60 {
		ctx, cancel := context.WithCancel(e.ctx)
		c := e.claim(e.s, key)
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(time.Duration(i) * 30 * time.Microsecond)
			cancel()
		})
		_, err := c.Try(ctx)
		wg.Wait()
		e.known("Try", err)
		if err != nil && !isAny(err, context.Canceled, store.ErrUncertain) {
			e.Errorf("a Try that is cancelled while it runs answers %v, want a grant, context.Canceled or ErrUncertain", err)
		}
		e.release(c, "a claim whose Try was cancelled while it ran")
		e.soonFree(key, "a key after Try was cancelled while it ran")
	}
}

// Where nothing answers, a call still returns soon after its context is done.
func testReturnsSoon(e *env) {
	s, link := e.faulty()
	key := e.key()
	held := e.claim(s, e.key())
	e.grant(held, "the holder")
	link.LoseReplies()
	for op, call := range map[string]func(context.Context) error{
		"Try":     func(ctx context.Context) error { _, err := e.claim(s, key).Try(ctx); return err },
		"Extend":  func(ctx context.Context) error { _, err := held.Extend(ctx); return err },
		"Release": func(ctx context.Context) error { return e.claim(s, key).Release(ctx) },
	} {
		ctx, cancel := context.WithTimeout(e.ctx, e.ttl/10)
		start := time.Now()
		err := call(ctx)
		took := time.Since(start)
		cancel()
		e.known(op, err)
		if took > e.ttl {
			e.Errorf("%s returns %v after its start, its context being done after %v", op, took, e.ttl/10)
		}
	}
	if link.Hits() == 0 {
		e.Error("no reply was lost: the test shows nothing")
	}
}

// The context of the acquisition bounds the wait only.
func testLeaseOutlivesContext(e *env) {
	key := e.key()
	ctx, cancel := context.WithCancel(e.ctx)
	c := e.claim(e.s, key)
	if err := e.steady("Try", func() error { _, err := c.Try(ctx); return err }); err != nil {
		e.Fatalf("the holder: Try answers %v, want a grant", err)
	}
	cancel()
	time.Sleep(e.ttl / 4)
	e.held(key, "a key whose holder's Try had a context that is done since")
	e.extend(c, "a holder whose Try had a context that is done since")
	e.release(c, "a holder whose Try had a context that is done since")
}
