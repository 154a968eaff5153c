package faults

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/store"
)

// Defects that were seen in other lock libraries, played against Holdfast. docs/cases.md lists
// them and has their numbers. R1 is TestFrozenNodeSlowsNobody, R6 TestOwnersAreComparedWhole,
// R7 TestTTLThatCannotBeKept, R8 TestOptionsAreNotUsedUp, R9 TestCutOffHolderKnowsFirst, R11
// TestDeadNodeIsNamed.

// R2, class 3: the caller's context ends while most nodes are slow. The call returns then, and nothing
// is left on any node long before the ttl ends.
func TestSlowNodesAndAShortContext(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		kit.Warm(t, b.locks)
		for _, p := range b.proxies[:n/2+1] {
			p.Delay(nodeTimeout / 5)
		}
		ctx, cancel := context.WithTimeout(t.Context(), nodeTimeout/10)
		defer cancel()
		var err error
		d := took(func() { _, err = b.locks.Acquire(ctx, "k") })
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire: %v, want DeadlineExceeded", err)
		}
		if d > nodeTimeout {
			t.Errorf("Acquire took %v, its context ended after %v", d, nodeTimeout/10)
		}
		kit.NoKeys(t, ttl/4, b.servers)
		if b.proxies[0].Counts().Delayed == 0 {
			t.Error("nothing was slow: the test shows nothing")
		}
	})
}

// R3: a lease is released while a slow node has not had its VOTE yet. The VOTE that comes
// after the RELEASE leaves no vote there. The RELEASE goes by another connection: by one of a
// pool, or when rueidis gives up the one that the VOTE is on.
func TestVoteThatComesAfterItsRelease(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			const ttl = 2 * ttl // rueidis may need 10 s to give a connection up: it looks every 5 s, and waits as long
			b := newBed(t, c, 3, holdfast.Options{TTL: ttl})
			rounds := kit.Count(5, 100)
			if c.Name == kit.Rueidis.Name {
				rounds = kit.Count(3, 30) // some take until then
			}
			for range rounds {
				if err := b.acquireEverywhere(t, "warm-up").Release(t.Context()); err != nil {
					t.Fatal(err)
				}
				kit.NoKeys(t, ttl/2, b.servers)
				var first atomic.Bool
				held := b.proxies[2].Hold(func(request []byte) bool {
					return bytes.Contains(request, []byte("late")) && first.CompareAndSwap(false, true)
				})
				began := time.Now()
				lease := kit.Acquire(t, b.locks, "late")
				if err := held.Wait(kit.Context(t, ttl)); err != nil {
					t.Fatal("no VOTE was held back")
				}
				scripts := kit.Scripts(t, b.servers[2])
				more := func(what string) {
					t.Helper()
					for end := time.Now().Add(ttl); kit.Scripts(t, b.servers[2]) == scripts; time.Sleep(time.Millisecond) {
						if time.Now().After(end) {
							t.Fatalf("%s never arrived", what)
						}
					}
					scripts = kit.Scripts(t, b.servers[2])
				}
				if err := lease.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
				more("the RELEASE")
				held.Release()
				more("the VOTE that was held back")
				if keys := kit.Keys(t, b.servers[2]); len(keys) > 0 {
					t.Fatalf("a VOTE after its RELEASE left %q", keys)
				}
				if time.Since(began) > 4*time.Second {
					continue // the stamp may have left the window, and is refused without a mark
				}
				if v, err := b.servers[2].Do("EXISTS", "{late}:fence"); err != nil || v != int64(1) {
					t.Fatalf("no mark stands against the late VOTE: %v, %v", v, err)
				}
			}
		})
	}
}

// R4, class 5, OWN-01: A's lease lapses, B takes the key and gives it back, A extends. A learns of the loss.
func TestExtendAfterAnotherHolder(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		s := b.store(t, kit.Addrs(b.servers))
		// Beneath the Locker, which would not even ask: the store itself must refuse.
		claim := s.Claim("k", store.ClaimOptions{TTL: time.Second})
		a, err := claim.Try(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		other := kit.Acquire(t, b.other(t, holdfast.Options{}), "k")
		if other.Token() <= a.Token {
			t.Errorf("token %v after %v", other.Token(), a.Token)
		}
		if err := other.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := claim.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
			t.Errorf("Extend after another has held the key: %v, want ErrLost", err)
		}
		if err := claim.Release(t.Context()); !errors.Is(err, store.ErrLost) {
			t.Errorf("Release: %v, want ErrLost", err)
		}
		kit.NoKeys(t, ttl/4, b.servers)
	})
}

// R5, classes 3, 10 and 14, OWN-04, CTX-01: what a lease says after its end, and what a second or a cancelled Release does.
func TestAfterRelease(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		lease := kit.Acquire(t, b.locks, "k")
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		if err := lease.Release(cancelled); err != nil {
			t.Errorf("Release under a cancelled context: %v", err)
		}
		kit.NoKeys(t, ttl/4, b.servers)
		if lease.Validity() != 0 || !errors.Is(lease.Err(), holdfast.ErrReleased) {
			t.Errorf("after Release: validity %v, Err %v", lease.Validity(), lease.Err())
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Errorf("second Release: %v", err)
		}
		if err := lease.Extend(t.Context()); !errors.Is(err, holdfast.ErrReleased) || errors.Is(err, holdfast.ErrHeld) {
			t.Errorf("Extend after Release: %v, want ErrReleased", err)
		}
	})
}

// R10, class 8: the servers' clock is 10 s ahead of the client's, or 30 s behind: the ttl on the server
// is what was asked for, and another is refused.
func TestClientClockIsOff(t *testing.T) {
	t.Parallel()
	for _, offset := range []time.Duration{10 * time.Second, -30 * time.Second, 365 * 24 * time.Hour} {
		kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
			b := newBed(t, c, n, holdfast.Options{})
			for _, s := range b.servers {
				s.Clock().Set(offset)
			}
			lease := kit.Acquire(t, b.locks, "k")
			have := 0
			for _, s := range b.servers {
				v, err := s.Do("PTTL", "k")
				switch left, _ := v.(int64); {
				case err != nil || left != -2 && (left < 8000 || left > 10000):
					t.Errorf("clocks %v apart: the key lives %v ms more (%v), asked were 10 s", offset, v, err)
				case left != -2: // which a node beyond the quorum may answer, for a moment
					have++
				}
			}
			if have <= n/2 {
				t.Errorf("clocks %v apart: %d of %d nodes have the key", offset, have, n)
			}
			other := b.other(t, holdfast.Options{})
			if _, err := other.TryAcquire(t.Context(), "k"); !errors.Is(err, holdfast.ErrHeld) {
				t.Errorf("clocks %v apart: another is told %v, want ErrHeld", offset, err)
			}
			if err := lease.Extend(t.Context()); err != nil {
				t.Errorf("clocks %v apart: Extend: %v", offset, err)
			}
			if err := lease.Release(t.Context()); err != nil {
				t.Errorf("clocks %v apart: Release: %v", offset, err)
			}
			next := kit.Acquire(t, other, "k")
			if next.Token() <= lease.Token() {
				t.Errorf("clocks %v apart: token %v after %v", offset, next.Token(), lease.Token())
			}
			if err := next.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
