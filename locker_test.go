package holdfast

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

// locker returns a Locker whose boot clock is the bubble's own.
func locker(t *testing.T, s store.Store, o *Options) *Locker {
	t.Helper()
	k, err := New(s, o)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	k.f.clk = clock.Clock{Boot: func() time.Duration { return time.Since(began) }}
	return k
}

func TestAcquireExtendRelease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		s := memstore.New()
		k := locker(t, s, nil)
		l, err := k.Acquire(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			time.Sleep(time.Second)
			if err := l.Err(); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := locker(t, s, nil).TryAcquire(ctx, "k"); !errors.Is(err, ErrHeld) {
			t.Fatalf("got %v, want ErrHeld", err)
		}
		if err := l.Release(ctx); err != nil {
			t.Fatal(err)
		}
		if err := l.Release(ctx); err != nil {
			t.Fatal(err)
		}
		if err := l.Err(); !errors.Is(err, ErrReleased) {
			t.Fatal(err)
		}
		m, err := k.TryAcquire(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		if m.Token() <= l.Token() {
			t.Fatal("token did not grow")
		}
		if err := m.Release(ctx); err != nil {
			t.Fatal(err)
		}
	})
}
