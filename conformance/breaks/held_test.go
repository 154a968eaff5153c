package breaks

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// An operator breaks a lock for which nobody waits: the holder, who goes on extending, loses
// it at its next extension and never gets it back; the next one gets it when it must be free,
// with a higher token.
func TestBreakHeld(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		a := watch(kit.Acquire(t, b.locker(), "k"))
		h := b.breaks("k")
		began := time.Now()
		if h.Owner != a.Owner() || h.Label != "holder" {
			t.Errorf("Inspect tells of %+v, the holder is %s", h, a.Owner())
		}
		broken := b.inspect("k")
		if !broken.Broken || !strings.HasPrefix(broken.Label, "broken by ") || broken.TTL <= 0 || broken.TTL > maxTTL {
			t.Errorf("after Break Inspect tells of %+v", broken)
		}
		a.lostByBreak(t)
		next := a.acquire(t, b.locker(), began)
		if next == nil {
			return
		}
		if d := time.Since(began); d > 3*maxTTL {
			t.Errorf("the key is free %v after a break, the nodes' MaxTTL is %v", d, maxTTL)
		}
		if n := b.votedFor("k", a.Owner()); n > 0 {
			t.Errorf("%d nodes vote for the former holder", n)
		}
		if err := next.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// The same with waiters in two processes: they get the lock one after the other.
func TestBreakWithWaiters(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		a := watch(kit.Acquire(t, b.locker(), "k"))
		var mu sync.Mutex
		var tokens []holdfast.Token
		var told error
		var waiting sync.WaitGroup
		began := time.Now()
		for range 2 {
			locks := b.locker()
			for range 2 {
				waiting.Go(func() {
					next := a.acquire(t, locks, began)
					if next == nil {
						return
					}
					mu.Lock()
					tokens = append(tokens, next.Token())
					mu.Unlock()
					if err := next.Release(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
		}
		waiting.Go(func() { // one that gives up while the lock is broken
			a.lostByBreak(t)
			ctx, cancel := context.WithTimeout(t.Context(), maxTTL/10)
			defer cancel()
			_, told = b.locker().Acquire(ctx, "k")
		})
		b.breaks("k")
		waiting.Wait()
		if !slices.IsSorted(tokens) || len(slices.Compact(tokens)) != 4 {
			t.Errorf("the waiters get tokens %v", tokens)
		}
		var held *store.HeldError
		if errors.As(told, &held) && !held.Holder.Broken {
			t.Errorf("a waiter is told %v, want who broke the lock", told)
		}
		kit.NoKeys(t, patience, b.servers)
	})
}

// One or two of five nodes are down or frozen when the lock is broken.
func TestBreakWithNodesAway(t *testing.T) {
	t.Parallel()
	for i, fault := range kit.Faults[:2] {
		for away := 1; away <= 2; away++ {
			c := kit.Clients[(i+away)%2]
			t.Run(fault.Name+"/"+string('0'+rune(away))+"x"+c.Name, func(t *testing.T) {
				t.Parallel()
				servertest.CanPause(t)
				b := newBed(t, c, 5)
				locks := b.locker()
				kit.Warm(t, locks)
				a := watch(kit.Acquire(t, locks, "k"))
				for _, s := range b.servers[:away] {
					fault.Do(s, nil)
				}
				mended := false
				mend := func() {
					for _, s := range b.servers[:away] {
						if !mended {
							fault.Undo(s, nil)
						}
					}
					mended = true
				}
				t.Cleanup(mend)
				b.breaks("k")
				began := time.Now()
				a.lostByBreak(t)
				mend() // and what the nodes still had for the former holder helps it no more
				for range 3 {
					if err := a.Extend(t.Context()); !errors.Is(err, holdfast.ErrLost) {
						t.Errorf("with all nodes back, extending answers %v", err)
					}
				}
				if next := a.acquire(t, b.locker(), began); next != nil {
					if err := next.Release(t.Context()); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

// With three of five nodes away nothing is broken, and the operator is told which they are.
func TestBreakWithoutQuorum(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 5)
			claim := b.store().Claim("k", store.ClaimOptions{TTL: ttl, Label: "holder"})
			g := b.grant(claim)
			b.inspect("k")
			for _, s := range b.servers[:3] {
				s.Stop()
				t.Cleanup(s.Cont)
			}
			began := time.Now()
			_, err := b.op.Inspect(t.Context(), "k")
			if d := time.Since(began); d > 5*options.NodeTimeout {
				t.Errorf("Inspect takes %v with frozen nodes", d)
			}
			if !errors.Is(err, store.ErrUnavailable) || len(kit.Faulty(t, err)) != 3 {
				t.Errorf("Inspect without a quorum answers %v", err)
			}
			err = b.op.Break(t.Context(), store.Holder{Key: "k", Owner: g.Owner})
			if !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUncertain) || len(kit.Faulty(t, err)) != 3 {
				t.Errorf("Break without a quorum answers %v", err)
			}
			for _, err = range b.op.List(t.Context(), "") {
			}
			if !errors.Is(err, store.ErrUnavailable) || len(kit.Faulty(t, err)) != 3 {
				t.Errorf("List without a quorum ends with %v", err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := b.op.Inspect(ctx, "k"); !errors.Is(err, context.Canceled) {
				t.Errorf("Inspect with a done context: %v", err)
			}
			for _, s := range b.servers[:3] {
				s.Cont()
			}
			if owners := b.broken("k"); len(owners) > 0 {
				t.Errorf("a Break that could do nothing has left %q", owners)
			}
		})
	}
}

// Two operators break the same lock at once: each is told that it is broken, by itself or by
// the other, and the lock is free after the time of one. With four nodes, they may share them.
func TestTwoOperators(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 4, 5} {
		for _, c := range kit.Clients {
			t.Run(string('0'+rune(n))+"x"+c.Name, func(t *testing.T) {
				t.Parallel()
				b := newBed(t, c, n)
				holder, next, other := b.store(), b.store(), b.store()
				const keys = 10
				var all sync.WaitGroup
				for i := range keys {
					key := "k/" + string('0'+rune(i))
					all.Go(func() {
						claim := holder.Claim(key, store.ClaimOptions{TTL: ttl})
						asked := time.Now()
						g := b.grant(claim)
						var both sync.WaitGroup
						for _, op := range []store.Inspector{b.op, other} {
							both.Go(func() {
								err := op.Break(t.Context(), store.Holder{Key: key, Owner: g.Owner})
								var held *store.HeldError
								if err != nil && !(errors.As(err, &held) && held.Holder.Broken) {
									t.Errorf("Break beside another: %v", err)
								}
							})
						}
						both.Wait()
						began := time.Now()
						if _, err := claim.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
							t.Errorf("extending a lease that two have broken answers %v", err)
						}
						again := b.grant(next.Claim(key, store.ClaimOptions{TTL: ttl}))
						if early := time.Since(asked); early < store.Validity(g.TTL, 0) {
							t.Errorf("another is granted the key %v after a grant of %v", early, g.TTL)
						}
						if d := time.Since(began); d > 3*maxTTL {
							t.Errorf("the key is free %v after the breaks", d)
						}
						if again.Token <= g.Token {
							t.Errorf("token %v comes after %v", again.Token, g.Token)
						}
					})
				}
				all.Wait()
			})
		}
	}
}

// The holder lets go, and another gets the key, while an operator's requests are on their way:
// they take nothing from the new holder, and the operator is told of it.
func TestBreakOvertaken(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		proxies := kit.Proxies(t, b.servers)
		op := kit.Store(t, b.client, options, kit.Addrs(proxies))
		first := b.store().Claim("k", store.ClaimOptions{TTL: ttl})
		g := b.grant(first)
		servertest.Eventually(t, patience, func() error {
			_, err := op.Inspect(t.Context(), "k")
			return err
		})
		var holds []*servertest.Held
		for _, p := range proxies {
			holds = append(holds, p.Hold(isBreak))
		}
		result := make(chan error, 1)
		go func() { result <- op.Break(t.Context(), store.Holder{Key: "k", Owner: g.Owner}) }()
		for _, h := range holds {
			if err := h.Wait(kit.Context(t, patience)); err != nil {
				t.Fatal(err)
			}
		}
		if err := first.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		kit.NoKeys(t, patience, b.servers)
		second := b.store().Claim("k", store.ClaimOptions{TTL: ttl})
		n := b.grant(second)
		for _, h := range holds {
			h.Release()
		}
		err := <-result
		var held *store.HeldError
		if !errors.As(err, &held) || held.Holder.Owner != n.Owner {
			t.Errorf("Break of a holder that has let go, another holding the key, answers %v", err)
		}
		if _, err := second.Extend(t.Context()); err != nil {
			t.Errorf("the new holder cannot extend: %v", err)
		}
		if err := second.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
