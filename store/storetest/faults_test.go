package storetest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

const ttl = time.Second

func faulty(t *testing.T) (*memstore.Store, store.Claim, *Faults) {
	t.Helper()
	s := memstore.New()
	fs, faults := NewFaults(s)
	return s, fs.Claim("k", store.ClaimOptions{TTL: ttl}), faults
}

func holds(t *testing.T, s *memstore.Store) bool {
	t.Helper()
	h, err := s.Inspect(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	return h.Owner != ""
}

// What each fault makes of a Try: its answer, when it comes, and whether the store has
// acted by then and a second later.
func TestFaults(t *testing.T) {
	broken := errors.New("broken")
	for name, c := range map[string]struct {
		fault       Fault
		want        error
		after       time.Duration
		acted, late bool
	}{
		"none":                  {nil, nil, 0, true, true},
		"LoseRequest":           {LoseRequest, store.ErrUncertain, 0, false, false},
		"LoseReply":             {LoseReply, store.ErrUncertain, 0, true, true},
		"Duplicate":             {Duplicate, nil, 0, true, true},
		"Delay":                 {Delay(ttl / 10), nil, ttl / 10, true, true},
		"Delay past ctx":        {Delay(ttl), context.DeadlineExceeded, ttl / 4, false, false},
		"DelayReply":            {DelayReply(ttl / 10), nil, ttl / 10, true, true},
		"DelayReply past ctx":   {DelayReply(ttl), store.ErrUncertain, ttl / 4, true, true},
		"Hang":                  {Hang, context.DeadlineExceeded, ttl / 4, false, false},
		"Late":                  {Late(ttl / 2), store.ErrUncertain, 0, false, true},
		"Fail":                  {Fail(broken), broken, 0, false, false},
		"Fail as a held key is": {Fail(&store.HeldError{}), store.ErrHeld, 0, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, claim, faults := faulty(t)
				faults.Set(Try, c.fault)
				ctx, cancel := context.WithTimeout(t.Context(), ttl/4)
				defer cancel()
				start := time.Now()
				g, err := claim.Try(ctx)
				if !errors.Is(err, c.want) {
					t.Errorf("Try answers %v, want %v", err, c.want)
				}
				if (err == nil) != (g.Token == 1) {
					t.Errorf("Try answers token %v with error %v", g.Token, err)
				}
				if took := time.Since(start); took != c.after {
					t.Errorf("Try answers after %v, want %v", took, c.after)
				}
				if got := holds(t, s); got != c.acted {
					t.Errorf("the store has acted: %v, want %v", got, c.acted)
				}
				time.Sleep(ttl*3/4 - 1 - time.Since(start))
				if got := holds(t, s); got != c.late {
					t.Errorf("the store has acted later: %v, want %v", got, c.late)
				}
				hits := 1
				if c.fault == nil {
					hits = 0
				}
				if got := faults.Hits(Try); got != hits {
					t.Errorf("%d hits, want %d", got, hits)
				}
			})
		})
	}
}

// HangUntil keeps its caller past the end of its context, and acts afterwards.
func TestHangUntil(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, claim, faults := faulty(t)
		ch := make(chan struct{})
		faults.Set(Try, HangUntil(ch))
		ctx, cancel := context.WithTimeout(t.Context(), ttl/10)
		defer cancel()
		done := make(chan error)
		go func() {
			_, err := claim.Try(ctx)
			done <- err
		}()
		time.Sleep(ttl)
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("Try returned before ch was closed: %v", err)
		default:
		}
		faults.Heal() // does not free it
		close(ch)
		if err := <-done; !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Try answers %v, want context.DeadlineExceeded", err)
		}
		if holds(t, s) {
			t.Error("a Try whose context was done has taken the key")
		}
	})
}

// Next goes before Set, a nil lets a call pass, and each op has faults and hits of its own.
func TestFaultsInOrder(t *testing.T) {
	first, second, always := errors.New("first"), errors.New("second"), errors.New("always")
	_, claim, faults := faulty(t)
	faults.Set(Extend, Fail(always))
	faults.Next(Extend, Fail(first), nil, Fail(second))
	if _, err := claim.Try(t.Context()); err != nil {
		t.Fatalf("Try answers %v, faults of Extend must not happen to it", err)
	}
	for i, want := range []error{first, nil, second, always, always} {
		if _, err := claim.Extend(t.Context()); err != want {
			t.Errorf("Extend %d answers %v, want %v", i, err, want)
		}
	}
	faults.Heal()
	if _, err := claim.Extend(t.Context()); err != nil {
		t.Errorf("Extend after Heal answers %v", err)
	}
	if n := faults.Hits(Extend); n != 4 {
		t.Errorf("Extend was hit %d times, want 4", n)
	}
	if n := faults.Hits(Try) + faults.Hits(Release); n != 0 {
		t.Errorf("other calls were hit %d times", n)
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	faults.Set(Extend, LoseReply)
	if _, err := claim.Extend(done); !errors.Is(err, context.Canceled) || errors.Is(err, store.ErrUncertain) {
		t.Errorf("Extend with a done context answers %v, want context.Canceled alone", err)
	}
}

// The parts of a store, to make stores with any set of abilities from.
type (
	plain   struct{ s store.Store }
	batch   struct{ store.BatchExtender }
	adopter struct{ store.Adopter }
	inspect struct{ store.Inspector }
	unwait  struct{ store.Claim }
)

func (p plain) Info() store.Info { return p.s.Info() }
func (p plain) Claim(key string, o store.ClaimOptions) store.Claim {
	return unwait{p.s.Claim(key, o)}
}

// NewFaults implements just what the store beneath does.
func TestFaultsAbilities(t *testing.T) {
	m := memstore.New()
	p, b, a, i := plain{m}, batch{m}, adopter{m}, inspect{m}
	abilities := func(s store.Store) string {
		_, waits := s.Claim("k", store.ClaimOptions{TTL: ttl}).(store.Waiter)
		return fmt.Sprintf("batch %v, adopter %v, inspector %v, waiter %v",
			is[store.BatchExtender](s), is[store.Adopter](s), is[store.Inspector](s), waits)
	}
	for _, s := range []store.Store{
		m, p,
		struct {
			plain
			batch
		}{p, b},
		struct {
			plain
			adopter
		}{p, a},
		struct {
			plain
			inspect
		}{p, i},
		struct {
			plain
			batch
			adopter
		}{p, b, a},
		struct {
			plain
			batch
			inspect
		}{p, b, i},
		struct {
			plain
			adopter
			inspect
		}{p, a, i},
	} {
		wrapped, _ := NewFaults(s)
		if got, want := abilities(wrapped), abilities(s); got != want {
			t.Errorf("%T: the fault store has %s, the store %s", s, got, want)
		}
	}
}

// Faults happen to batches, adoptions and inspections too.
func TestFaultsOfOptionalCalls(t *testing.T) {
	m := memstore.New()
	s, faults := NewFaults(m)
	ctx := t.Context()
	c := s.Claim("k", store.ClaimOptions{TTL: ttl})
	g, err := c.Try(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ticket, err := s.(store.Adopter).Ticket(c)
	if err != nil {
		t.Fatal(err)
	}
	list := func() (last error) {
		for _, err := range s.(store.Inspector).List(ctx, "") {
			last = err
		}
		return last
	}
	calls := map[string]func() error{
		"ExtendMany": func() error { return s.(store.BatchExtender).ExtendMany(ctx, []store.Claim{c})[0].Err },
		"Adopt":      func() error { _, _, err := s.(store.Adopter).Adopt(ctx, ticket); return err },
		"Inspect":    func() error { _, err := s.(store.Inspector).Inspect(ctx, "k"); return err },
		"List":       list,
		"Break":      func() error { return s.(store.Inspector).Break(ctx, store.Holder{Key: "k", Owner: g.Owner}) },
	}
	faults.SetAll(Fail(store.ErrUnavailable))
	for name, call := range calls {
		if err := call(); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("%s without a connection answers %v, want ErrUnavailable", name, err)
		}
	}
	if n := faults.Hits(Extend) + faults.Hits(Adopt) + faults.Hits(Inspect); n != len(calls) {
		t.Errorf("%d hits of %d calls", n, len(calls))
	}
	faults.Heal()
	for _, name := range []string{"ExtendMany", "Adopt", "Inspect", "List", "Break"} {
		if err := calls[name](); err != nil {
			t.Errorf("%s, healed, answers %v", name, err)
		}
	}
}
