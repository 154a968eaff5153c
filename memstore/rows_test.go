package memstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// Keys that nobody uses any more leave nothing behind, be they released, lapsed, only
// looked at or refused, and their tokens go on growing nevertheless.
func TestRowsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, ctx := New(), t.Context()
		var last fence.Token
		for i := range 20_000 {
			key := fmt.Sprint(i)
			c := s.Claim(key, store.ClaimOptions{TTL: time.Second})
			g, err := c.Try(ctx)
			if err != nil {
				t.Fatal(err)
			}
			if g.Token <= last {
				t.Fatalf("token %v comes after %v", g.Token, last)
			}
			last = g.Token
			_ = s.Lose(key + "x")
			if _, err := s.Inspect(ctx, key+"y"); err != nil {
				t.Fatal(err)
			}
			w := s.Claim(key, store.ClaimOptions{TTL: time.Second, Wait: true})
			if _, err := w.Try(ctx); !errors.Is(err, store.ErrHeld) {
				t.Fatal(err)
			}
			if err := w.Release(ctx); err != nil {
				t.Fatal(err)
			}
			if i%2 == 0 {
				if err := c.Release(ctx); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(10 * time.Millisecond)
		}
		// 50 hold at a time; the sweep comes when their number has doubled.
		if n := len(s.rows); n > 300 {
			t.Errorf("%d rows are kept for 50 holders", n)
		}
	})
}

// A free key that is reserved for a waiter is kept from those who come later, and they are
// told for whom and for how long.
func TestReservation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, ctx := New(), t.Context()
		holder := s.Claim("k", store.ClaimOptions{TTL: time.Minute})
		if _, err := holder.Try(ctx); err != nil {
			t.Fatal(err)
		}
		waiter := s.Claim("k", store.ClaimOptions{TTL: time.Minute, Wait: true, Label: "waiter"})
		if _, err := waiter.Try(ctx); !errors.Is(err, store.ErrHeld) {
			t.Fatal(err)
		}
		if err := holder.Release(ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(reservation / 4)
		var held *store.HeldError
		_, err := s.Claim("k", store.ClaimOptions{TTL: time.Minute}).Try(ctx)
		if !errors.As(err, &held) || held.Holder.Label != "waiter" || held.Holder.TTL != reservation*3/4 {
			t.Errorf("a Try before the waiter's turn answers %v, want that the key is kept for it", err)
		}
		if h, err := s.Inspect(ctx, "k"); err != nil || h.Owner != "" {
			t.Errorf("Inspect of a reserved key answers %+v, %v, want nobody", h, err)
		}
		if _, err := waiter.Try(ctx); err != nil {
			t.Errorf("the waiter, in its turn, is answered %v", err)
		}
	})
}

// Everything at once, under the race detector: a token is larger than those that were known
// before it was asked for, nobody is left waiting, and nothing is left at the end.
func TestStress(t *testing.T) {
	s, ctx := New(), t.Context()
	var highest atomic.Int64
	var grants, lost atomic.Int32
	var workers sync.WaitGroup
	for i := range 8 {
		workers.Go(func() {
			rng := rand.New(rand.NewPCG(1, uint64(i)))
			for range 150 {
				s := s.Peer()
				c := s.Claim("k", store.ClaimOptions{TTL: time.Minute, Wait: rng.IntN(4) > 0}).(*claim)
				wait, cancel := context.WithTimeout(ctx, time.Duration(rng.IntN(3000))*time.Microsecond)
				for {
					known := highest.Load()
					g, err := c.Try(wait)
					var held *store.HeldError
					if errors.As(err, &held) {
						if c.Wait(wait, held) == nil {
							continue
						}
					}
					if err == nil {
						grants.Add(1)
						if int64(g.Token) <= known {
							t.Errorf("token %v comes after %v", g.Token, known)
						}
						for old := known; old < int64(g.Token) && !highest.CompareAndSwap(old, int64(g.Token)); {
							old = highest.Load()
						}
					}
					break
				}
				cancel()
				if rng.IntN(4) == 0 && s.Lose("k") == nil { // whoever has it by now
					lost.Add(1)
				}
				if err := c.Release(ctx); err != nil && !errors.Is(err, store.ErrLost) {
					t.Errorf("Release answers %v", err)
				}
			}
		})
	}
	workers.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.rows) != 0 {
		t.Errorf("%d rows are left when everybody has released", len(s.rows))
	}
	if grants.Load() == 0 || lost.Load() == 0 {
		t.Errorf("%d grants and %d losses: the test shows little", grants.Load(), lost.Load())
	}
}
