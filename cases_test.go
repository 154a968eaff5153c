package holdfast

import (
	"context"
	"fmt"
	"testing"
	"time"
)

// LOS-06: work outlives its ttl, and a waiter waits for little longer than that. Where leases
// are not extended, the context of the work has ended before the waiter's begins. Where they
// are, the waiter is told that the key is held, and its function does not run.
func TestWaiterBesideLongWork(t *testing.T) {
	for name, c := range map[string]struct {
		o     Options
		waits bool // in vain
	}{
		"not extended": {Options{TTL: time.Second, NoExtend: true}, false},
		"extended":     {Options{TTL: time.Second}, true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, c.o, func(b *bed) {
				held := make(chan struct{})
				var ended, began time.Time
				worked := make(chan error, 1)
				go func() {
					worked <- b.locks.Do(b.ctx, "k", func(ctx context.Context, _ *Lease) error {
						close(held)
						select {
						case <-time.After(3 * time.Second):
						case <-ctx.Done():
						}
						ended = time.Now()
						return context.Cause(ctx)
					})
				}()
				<-held
				ctx, cancel := context.WithTimeout(b.ctx, 1100*time.Millisecond)
				defer cancel()
				waited := b.other(&Options{TTL: time.Second}).Do(ctx, "k", func(context.Context, *Lease) error {
					began = time.Now()
					return nil
				})
				err := <-worked
				if c.waits {
					want(t, waited, context.DeadlineExceeded, ErrHeld)
					if err != nil || !began.IsZero() {
						t.Errorf("the work ended by %v, and the waiter ran: %v", err, !began.IsZero())
					}
					return
				}
				want(t, err, ErrLost)
				if waited != nil || began.IsZero() || began.Before(ended) {
					t.Errorf("the waiter is told %v; it began %v after the end of the work", waited, began.Sub(ended))
				}
			})
		})
	}
}

// EVI-05: what a Locker remembers of keys is bounded, and a lease that is held is no part of
// it: it stays extended, refused to others of the process, and releasable.
func TestHeldLeaseIsNeverForgotten(t *testing.T) {
	bubble(t, Options{Observer: noObserver{}}, func(b *bed) {
		l := b.acquire("k")
		for i := range 2*tokensKept + 1000 {
			b.release(b.acquire(fmt.Sprint("other", i)))
			if i%1000 == 0 {
				time.Sleep(DefaultTTL)
			}
		}
		if l.Err() != nil || b.holder("k") != l.Owner() {
			t.Fatalf("the lease is %v, and %q holds the key", l.Err(), b.holder("k"))
		}
		_, err := b.locks.TryAcquire(b.ctx, "k")
		want(t, err, ErrHeld)
		if err := l.Extend(b.ctx); err != nil {
			t.Error(err)
		}
		b.release(l)
		if next := b.acquire("k"); next.Token() <= l.Token() {
			t.Errorf("token %v after %v", next.Token(), l.Token())
		} else {
			b.release(next)
		}
	})
}
