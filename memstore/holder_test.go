package memstore_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/memstore"
)

// When a holder notices that its lease was taken away, as the docs of Lose and Expire say:
// by its next extension, or at once when it extends by hand. Until then its lease looks
// valid, while another, with a larger token, has the key.
func TestHolderNotices(t *testing.T) {
	for name, end := range map[string]func(*memstore.Store) error{
		"Lose":   func(s *memstore.Store) error { return s.Lose("k") },
		"Expire": func(s *memstore.Store) error { return s.Expire("k") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				s := memstore.New()
				locker := func(s *memstore.Store) *holdfast.Locker {
					k, err := holdfast.New(s, &holdfast.Options{TTL: 9 * time.Second, ExtendEvery: 3 * time.Second})
					if err != nil {
						t.Fatal(err)
					}
					return k
				}
				first, err := locker(s).Acquire(ctx, "k")
				if err != nil {
					t.Fatal(err)
				}
				defer first.Release(context.Background())
				time.Sleep(time.Second)
				if err := end(s); err != nil {
					t.Fatal(err)
				}
				second, err := locker(s.Peer()).TryAcquire(ctx, "k")
				if err != nil {
					t.Fatalf("another does not get the key: %v", err)
				}
				defer second.Release(context.Background())
				if first.Err() != nil || first.Validity() == 0 || second.Token() <= first.Token() {
					t.Errorf("at once: first %v, valid for %v, token %v; second token %v",
						first.Err(), first.Validity(), first.Token(), second.Token())
				}
				start := time.Now()
				<-first.Done()
				if took := time.Since(start); took > 2*time.Second+time.Millisecond {
					t.Errorf("the holder notices after %v, its next extension was due in 2s", took)
				}
				if err := first.Err(); !errors.Is(err, holdfast.ErrLost) || !errors.Is(err, holdfast.ErrHeld) {
					t.Errorf("the holder is told %v, want ErrLost and ErrHeld", err)
				}
				if err := end(s); err != nil {
					t.Fatal(err)
				}
				if err := second.Extend(ctx); !errors.Is(err, holdfast.ErrLost) {
					t.Errorf("Extend by hand answers %v, want ErrLost at once", err)
				}
			})
		})
	}
}
