package holdfast_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/memstore"
)

// A guard that refuses a token ends the lease whose context carried it, and no other.
func TestStaleAnswerEndsTheLease(t *testing.T) {
	var seen lossCounter
	locks, err := holdfast.New(memstore.New(), &holdfast.Options{Observer: &seen})
	if err != nil {
		t.Fatal(err)
	}
	other, err := locks.Acquire(t.Context(), "other")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Release(t.Context())
	var guard fence.Memory
	err = locks.Do(other.Context(t.Context()), "account/1", func(ctx context.Context, lease *holdfast.Lease) error {
		if err := guard.Claim(ctx, "account/1", lease.Token()); err != nil || lease.Err() != nil {
			t.Errorf("claim of a fresh token: %v, lease: %v", err, lease.Err())
		}
		if err := guard.Claim(t.Context(), "account/1", lease.Token()+1); err != nil {
			t.Error(err)
		}
		err := guard.Claim(ctx, "account/1", lease.Token())
		if !errors.Is(err, fence.ErrStale) {
			t.Errorf("claim of a stale token: %v", err)
		}
		if ctx.Err() == nil || !errors.Is(context.Cause(ctx), holdfast.ErrLost) || !errors.Is(context.Cause(ctx), fence.ErrStale) {
			t.Errorf("the context has not ended with the cause: %v", context.Cause(ctx))
		}
		if n := seen.Load(); n != 1 {
			t.Errorf("%d events of the loss when the guard has answered, want 1", n)
		}
		if lease.Validity() != 0 || !errors.Is(lease.Extend(t.Context()), holdfast.ErrLost) {
			t.Error("the lease goes on")
		}
		return err
	})
	var stale *fence.StaleError
	if !errors.Is(err, holdfast.ErrLost) || !errors.As(err, &stale) {
		t.Errorf("Do = %v, want lost, with the guard's answer", err)
	}
	if other.Err() != nil {
		t.Errorf("another lease in the same context has ended: %v", other.Err())
	}
	// The store held the key still, so it was given back.
	again, err := locks.TryAcquire(t.Context(), "account/1")
	if err != nil {
		t.Fatalf("the key was not given back: %v", err)
	}
	if err := again.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if n := seen.Load(); n != 1 {
		t.Errorf("%d events of the loss, want 1", n)
	}
}

// lossCounter counts the losses by a guard's answer that it is told of.
type lossCounter struct{ atomic.Int32 }

func (c *lossCounter) Observe(_ context.Context, e holdfast.Event) {
	if e, ok := e.(holdfast.Lost); ok && errors.Is(e.Err, fence.ErrStale) {
		c.Add(1)
	}
}

// An Observer of the loss may use the lease and the guard; where it panics the key is given back.
func TestObserverOfARefusal(t *testing.T) {
	var guard fence.Memory
	for name, use := range map[string]func(context.Context, *holdfast.Lease){
		"releases":  func(_ context.Context, l *holdfast.Lease) { _ = l.Release(context.Background()) },
		"extends":   func(_ context.Context, l *holdfast.Lease) { _ = l.Extend(context.Background()) },
		"asks":      func(ctx context.Context, l *holdfast.Lease) { _ = guard.Claim(ctx, "r", l.Token()) },
		"panics":    func(context.Context, *holdfast.Lease) { panic("mine") },
		"only sees": func(context.Context, *holdfast.Lease) {},
	} {
		t.Run(name, func(t *testing.T) {
			var held context.Context
			var lease *holdfast.Lease
			o := &order{lost: func() { use(held, lease) }}
			locks, err := holdfast.New(memstore.New(), &holdfast.Options{Observer: o})
			if err != nil {
				t.Fatal(err)
			}
			if lease, err = locks.Acquire(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			held = lease.Context(t.Context())
			if err := guard.Claim(t.Context(), "r", lease.Token()+1); err != nil {
				t.Fatal(err)
			}
			func() {
				defer func() {
					if r := recover(); (r != nil) != (name == "panics") {
						t.Errorf("panic: %v", r)
					}
				}()
				if err := guard.Claim(held, "r", lease.Token()); !errors.Is(err, fence.ErrStale) {
					t.Errorf("Claim: %v", err)
				}
			}()
			if err := lease.Release(t.Context()); !errors.Is(err, fence.ErrStale) {
				t.Errorf("Release: %v", err)
			}
			again, err := locks.Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			_ = again.Release(t.Context())
			if got := o.String(); !strings.HasPrefix(got, "acquired lost ") || strings.Count(got, "lost") != 1 {
				t.Errorf("events: %s", got)
			}
		})
	}
}

// order writes down the kinds of events, and calls lost within that of a loss.
type order struct {
	mu    sync.Mutex
	kinds strings.Builder
	lost  func()
}

func (o *order) add(kind string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.kinds.WriteString(kind + " ")
}

func (o *order) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.kinds.String()
}

func (o *order) Observe(_ context.Context, e holdfast.Event) {
	switch e.(type) {
	case holdfast.Acquired:
		o.add("acquired")
	case holdfast.Lost:
		o.add("lost")
		o.lost()
	case holdfast.Released:
		o.add("released")
	}
}
