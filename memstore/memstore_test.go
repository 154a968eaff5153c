package memstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

const ttl = time.Second

func claim(s *memstore.Store, key string) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: ttl})
}

func waiting(s *memstore.Store, key string) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: ttl, Wait: true})
}

func grant(t *testing.T, c store.Claim) store.Grant {
	t.Helper()
	g, err := c.Try(t.Context())
	if err != nil {
		t.Fatalf("Try: %v", err)
	}
	return g
}

// acquire does what a Locker does: try, wait, try again.
func acquire(ctx context.Context, c store.Claim) (store.Grant, error) {
	for {
		g, err := c.Try(ctx)
		var held *store.HeldError
		if !errors.As(err, &held) {
			return g, err
		}
		if err := c.(store.Waiter).Wait(ctx, held); err != nil {
			return store.Grant{}, err
		}
	}
}

// Waiters are served in the order of their first refusal, and each of them as soon as the
// one before has released.
func TestQueueIsFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New()
		holder := claim(s, "k")
		grant(t, holder)
		var order []int
		var wg sync.WaitGroup
		for i := range 20 {
			time.Sleep(time.Millisecond)
			wg.Go(func() {
				c := waiting(s.Peer(), "k")
				if _, err := acquire(t.Context(), c); err != nil {
					t.Errorf("waiter %d: %v", i, err)
					return
				}
				order = append(order, i)
				if err := c.Release(t.Context()); err != nil {
					t.Errorf("waiter %d: Release: %v", i, err)
				}
			})
			synctest.Wait()
		}
		start := time.Now()
		if err := holder.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if d := time.Since(start); d != 0 {
			t.Errorf("the hand-overs took %v, want none", d)
		}
		if got, want := fmt.Sprint(order), "[0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19]"; got != want {
			t.Errorf("served in order %s, want %s", got, want)
		}
	})
}

// Release, Lose, Expire, Break and the end of the ttl each wake the first waiter.
func TestWakeUps(t *testing.T) {
	for name, c := range map[string]struct {
		end   func(s *memstore.Store, holder store.Claim, owner string) error
		after time.Duration
	}{
		"release": {end: func(s *memstore.Store, h store.Claim, _ string) error { return h.Release(context.Background()) }},
		"lose":    {end: func(s *memstore.Store, h store.Claim, _ string) error { return s.Lose("k") }},
		"expire":  {end: func(s *memstore.Store, h store.Claim, _ string) error { return s.Expire("k") }},
		"break": {end: func(s *memstore.Store, h store.Claim, owner string) error {
			return s.Break(context.Background(), store.Holder{Key: "k", Owner: owner})
		}, after: ttl},
		"ttl": {end: func(*memstore.Store, store.Claim, string) error { return nil }, after: ttl},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := memstore.New()
				holder := claim(s, "k")
				g := grant(t, holder)
				start := time.Now()
				var took time.Duration
				var wg sync.WaitGroup
				wg.Go(func() {
					if _, err := acquire(t.Context(), waiting(s, "k")); err != nil {
						t.Error(err)
					}
					took = time.Since(start)
				})
				synctest.Wait()
				if err := c.end(s, holder, g.Owner); err != nil {
					t.Fatal(err)
				}
				wg.Wait()
				if took != c.after {
					t.Errorf("the waiter acquired after %v, want %v", took, c.after)
				}
			})
		})
	}
}

// A waiter that dies delays the next one by its reservation, once.
func TestDeadWaiterDelaysOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New()
		holder := claim(s, "k")
		grant(t, holder)
		dead := waiting(s, "k")
		if _, err := dead.Try(t.Context()); !errors.Is(err, store.ErrHeld) {
			t.Fatalf("Try of the dead waiter: %v, want ErrHeld", err)
		}
		if err := holder.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		next := waiting(s, "k")
		if _, err := acquire(t.Context(), next); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 100*time.Millisecond {
			t.Errorf("the next waiter acquired after %v, want 100ms", d)
		}
		var held *store.HeldError
		if _, err := dead.Try(t.Context()); !errors.As(err, &held) || held.Place != 1 {
			t.Errorf("Try of the dead waiter, back again: %v, want a HeldError with place 1", err)
		}
	})
}

func TestLoseAndExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := memstore.New()
		for name, end := range map[string]func(string) error{"Lose": s.Lose, "Expire": s.Expire} {
			if err := end("k"); !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%s of a key that nobody holds: %v, want ErrInvalid", name, err)
			}
			first := claim(s, "k")
			g1 := grant(t, first)
			if err := end("k"); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			second := claim(s, "k")
			g2 := grant(t, second)
			if g2.Token <= g1.Token {
				t.Errorf("%s: the next token is %v, want more than %v", name, g2.Token, g1.Token)
			}
			if _, err := first.Extend(t.Context()); !errors.Is(err, store.ErrLost) || !errors.Is(err, store.ErrHeld) {
				t.Errorf("%s: Extend of the first holder: %v, want ErrLost and ErrHeld", name, err)
			}
			if err := first.Release(t.Context()); !errors.Is(err, store.ErrLost) {
				t.Errorf("%s: Release of the first holder: %v, want ErrLost", name, err)
			}
			if err := second.Release(t.Context()); err != nil {
				t.Errorf("%s: Release of the second holder: %v", name, err)
			}
		}
	})
}

// Stores of one test do not see each other's locks, peers do.
func TestPeer(t *testing.T) {
	s, other := memstore.New(), memstore.New()
	grant(t, claim(s, "k"))
	grant(t, claim(other, "k"))
	if s.Info().Fingerprint == other.Info().Fingerprint {
		t.Error("two stores have one fingerprint")
	}
	if s.Info() != s.Peer().Info() {
		t.Error("a peer has another Info")
	}
	if _, err := claim(s.Peer(), "k").Try(t.Context()); !errors.Is(err, store.ErrHeld) {
		t.Errorf("Try through a peer: %v, want ErrHeld", err)
	}
}
