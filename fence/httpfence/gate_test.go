package httpfence_test

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
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

func newGate(t testing.TB, marks fence.Guard, o httpfence.GateOptions) *httpfence.Gate {
	t.Helper()
	g, err := httpfence.NewGate(marks, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// marks is a guard whose calls can be made to fail or to hang.
type marks struct {
	fence.Memory
	mu    sync.Mutex
	calls []string // what was asked
	hook  func(ctx context.Context, call, resource string, t fence.Token) error
}

func (m *marks) set(hook func(ctx context.Context, call, resource string, t fence.Token) error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hook = hook
}

func (m *marks) asked(ctx context.Context, call, resource string, t fence.Token) error {
	m.mu.Lock()
	m.calls = append(m.calls, fmt.Sprint(call, " ", resource, " ", t))
	hook := m.hook
	m.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(ctx, call, resource, t)
}

func (m *marks) Claim(ctx context.Context, resource string, t fence.Token) error {
	if err := m.asked(ctx, "claim", resource, t); err != nil {
		return err
	}
	return m.Memory.Claim(ctx, resource, t)
}

func (m *marks) Check(ctx context.Context, resource string, t fence.Token) error {
	if err := m.asked(ctx, "check", resource, t); err != nil {
		return err
	}
	return m.Memory.Check(ctx, resource, t)
}

// entry is one Enter on its way.
type entry struct {
	leave func()
	err   error
	took  time.Duration
	done  chan struct{}
}

// enter begins an Enter, and waits until it is over or stands.
func enter(ctx context.Context, g *httpfence.Gate, resource string, t fence.Token) *entry {
	e := &entry{done: make(chan struct{})}
	began := time.Now()
	go func() {
		defer close(e.done)
		e.leave, e.err = g.Enter(ctx, resource, t)
		e.took = time.Since(began)
	}()
	synctest.Wait()
	return e
}

func (e *entry) over() bool {
	synctest.Wait()
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

// wants checks how an Enter ended: nil, or a kind.
func (e *entry) wants(t *testing.T, what string, kind error) {
	t.Helper()
	switch {
	case !e.over():
		t.Fatalf("%s waits, want %v", what, kind)
	case !errors.Is(e.err, kind):
		t.Fatalf("%s: %v, want %v", what, e.err, kind)
	case (e.err == nil) != (e.leave != nil):
		t.Fatalf("%s: error %v, and leave is nil: %v", what, e.err, e.leave == nil)
	}
}

func (e *entry) waits(t *testing.T, what string) {
	t.Helper()
	if e.over() {
		t.Fatalf("%s is over: %v, want it to wait", what, e.err)
	}
}

func (e *entry) stale(t *testing.T, what string, want fence.StaleError) {
	t.Helper()
	e.wants(t, what, fence.ErrStale)
	var got *fence.StaleError
	if !errors.As(e.err, &got) || *got != want {
		t.Fatalf("%s: %+v, want %+v", what, got, want)
	}
}

func empty(t *testing.T, g *httpfence.Gate) {
	t.Helper()
	synctest.Wait()
	if s := g.Stats(); s.Resources != 0 || s.InFlight != 0 || s.Waiting != 0 {
		t.Errorf("the gate keeps %+v", s)
	}
}

func TestGateIsAGuard(t *testing.T) {
	var mu sync.Mutex
	of := map[fence.Guard]fence.Guard{} // the marks of each gate
	open := func(t testing.TB, m fence.Guard) fence.Guard {
		g := newGate(t, m, httpfence.GateOptions{Drain: time.Minute})
		mu.Lock()
		defer mu.Unlock()
		of[g] = m
		return g
	}
	fencetest.Run(t, fencetest.Harness{
		New: func(t testing.TB) fence.Guard { return open(t, new(fence.Memory)) },
		Reopen: func(t testing.TB, g fence.Guard) fence.Guard {
			mu.Lock()
			m := of[g]
			mu.Unlock()
			return open(t, m)
		},
	})
}

func TestGateOptions(t *testing.T) {
	for name, o := range map[string]httpfence.GateOptions{"Drain": {Drain: -1}, "RefuseUnknown": {RefuseUnknown: -1}, "Settle": {Settle: -1}} {
		var invalid *fence.InvalidError
		if g, err := httpfence.NewGate(new(fence.Memory), o); !errors.As(err, &invalid) || invalid.Field != name || g != nil {
			t.Errorf("%s below zero: %v", name, err)
		}
	}
	if _, err := httpfence.NewGate(nil, httpfence.GateOptions{}); !errors.Is(err, fence.ErrInvalid) {
		t.Errorf("no marks: %v", err)
	}
}

func TestGateOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		g := newGate(t, m, httpfence.GateOptions{})
		ctx := t.Context()
		a, b := enter(ctx, g, "r", 5), enter(ctx, g, "r", 5)
		a.wants(t, "the first 5", nil)
		b.wants(t, "the second 5", nil)
		enter(ctx, g, "r", 4).stale(t, "4", fence.StaleError{Resource: "r", Token: 4, Seen: 5})

		high := enter(ctx, g, "r", 7)
		high.waits(t, "7 over two 5")
		late := enter(ctx, g, "r", 5)
		late.waits(t, "5 behind 7")
		middle, top := enter(ctx, g, "r", 6), enter(ctx, g, "r", 9)
		a.leave()
		a.leave() // does nothing
		high.waits(t, "7 over one 5")
		if err := m.Memory.Check(ctx, "r", 5); err != nil {
			t.Errorf("the mark was raised while 5 is inside: %v", err)
		}
		b.leave()
		top.wants(t, "9", nil)
		for what, e := range map[fence.Token]*entry{5: late, 6: middle, 7: high} {
			e.stale(t, what.String(), fence.StaleError{Resource: "r", Token: what, Seen: 9})
		}
		if err := m.Memory.Check(ctx, "r", 9); err != nil {
			t.Errorf("9 is inside, and its mark is not there: %v", err)
		}
		if s, want := g.Stats(), (httpfence.Stats{Entered: 3, Stale: 4, InFlight: 1, Resources: 1}); s != want {
			t.Errorf("stats %+v, want %+v", s, want)
		}
		top.leave()
		empty(t, g)
		enter(ctx, g, "r", 8).stale(t, "8 into an empty gate", fence.StaleError{Resource: "r", Token: 8, Seen: 9})
		empty(t, g)
	})
}

// While a claim is under way nobody enters, and a larger one that comes meanwhile wins.
func TestGateClaimUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		m.set(func(ctx context.Context, call, _ string, _ fence.Token) error {
			if call == "claim" {
				time.Sleep(time.Second)
			}
			return nil
		})
		g := newGate(t, m, httpfence.GateOptions{})
		one := enter(t.Context(), g, "r", 1)
		two := enter(t.Context(), g, "r", 2)
		one.waits(t, "1, whose claim is not done")
		time.Sleep(time.Second)
		two.waits(t, "2, whose claim is not done")
		one.waits(t, "1 behind 2")
		time.Sleep(time.Second)
		two.wants(t, "2", nil)
		one.stale(t, "1", fence.StaleError{Resource: "r", Token: 1, Seen: 2})
		if two.took != 2*time.Second {
			t.Errorf("2 took %v", two.took)
		}
		two.leave()
		empty(t, g)
	})
}

func TestGateDrainRunsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		g := newGate(t, m, httpfence.GateOptions{Drain: 8 * time.Second})
		ctx := t.Context()
		long := enter(ctx, g, "r", 5)
		long.wants(t, "5", nil)
		high := enter(ctx, g, "r", 7)
		time.Sleep(7 * time.Second)
		queued := enter(ctx, g, "r", 5)
		time.Sleep(time.Second)
		high.wants(t, "7", fence.ErrBusy)
		if high.took != 8*time.Second {
			t.Errorf("7 was refused after %v", high.took)
		}
		if err := m.Memory.Check(ctx, "r", 5); err != nil {
			t.Errorf("the mark after a drain that ran out: %v", err)
		}
		// For two seconds nothing of a lower token enters, so that 7 can come again.
		queued.waits(t, "5 right after 7 was refused")
		time.Sleep(time.Second)
		again := enter(ctx, g, "r", 7)
		time.Sleep(5 * time.Second)
		queued.waits(t, "5 behind the second 7")
		long.leave()
		again.wants(t, "the second 7", nil)
		queued.stale(t, "the second 5", fence.StaleError{Resource: "r", Token: 5, Seen: 7})
		again.leave()
		empty(t, g) // at once: 7 had come back
	})
}

func TestGateLowerGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t, new(marks), httpfence.GateOptions{Drain: 8 * time.Second})
		ctx := t.Context()
		long := enter(ctx, g, "r", 5)
		high := enter(ctx, g, "r", 7)
		time.Sleep(8 * time.Second)
		high.wants(t, "7", fence.ErrBusy)
		long.leave()
		queued := enter(ctx, g, "r", 5)
		queued.waits(t, "5 while 7 may come back")
		time.Sleep(2 * time.Second)
		queued.wants(t, "5, since 7 did not come back", nil)
		if queued.took != 2*time.Second {
			t.Errorf("5 was kept waiting for %v", queued.took)
		}
		queued.leave()
		empty(t, g)
		if s := g.Stats(); s.Busy != 1 || s.Entered != 2 {
			t.Errorf("stats %+v", s)
		}
	})
}

// A newcomer that goes on trying enters, although requests of a lower token come all the time
// and each takes nearly as long as a drain may.
func TestGateStarvesNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t, new(marks), httpfence.GateOptions{Drain: 8 * time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		lower := 0
		var mu sync.Mutex
		for i := range 10 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Second)
				for ctx.Err() == nil {
					leave, err := g.Enter(ctx, "r", 5)
					switch {
					case errors.Is(err, fence.ErrStale), errors.Is(err, context.Canceled):
						return
					case errors.Is(err, fence.ErrBusy):
					case err != nil:
						t.Error(err)
						return
					default:
						mu.Lock()
						lower++
						mu.Unlock()
						time.Sleep(15 * time.Second)
						leave()
					}
				}
			})
		}
		time.Sleep(20 * time.Second)
		tries := 0
		for {
			tries++
			leave, err := g.Enter(ctx, "r", 7)
			if err == nil {
				leave()
				break
			}
			if !errors.Is(err, fence.ErrBusy) || tries > 3 {
				t.Fatalf("try %d of 7: %v", tries, err)
			}
			time.Sleep(time.Second)
		}
		cancel()
		wg.Wait()
		if tries != 2 || lower < 10 {
			t.Errorf("7 entered at try %d, after %d entries of 5", tries, lower)
		}
		empty(t, g)
	})
}

func TestGateContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		g := newGate(t, m, httpfence.GateOptions{})
		done, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := g.Enter(done, "r", 5); err != context.Canceled || len(m.calls) != 0 {
			t.Errorf("a done ctx: %v, calls %v", err, m.calls)
		}
		inside := enter(t.Context(), g, "r", 5)
		ctx, cancel := context.WithCancel(t.Context())
		high := enter(ctx, g, "r", 7)
		queued := enter(t.Context(), g, "r", 5)
		queued.waits(t, "5 behind 7")
		cancel()
		high.wants(t, "7", context.Canceled)
		queued.wants(t, "5, since 7 has gone", nil)
		if s := g.Stats(); s.Waiting != 0 || s.InFlight != 2 {
			t.Errorf("stats %+v", s)
		}
		inside.leave()
		queued.leave()
		empty(t, g)
		if err := m.Memory.Check(t.Context(), "r", 5); err != nil {
			t.Errorf("the mark: %v", err)
		}
	})
}

// A claim for which nobody waits any more is ended, and does not refuse those who come then.
func TestGateClaimAbandoned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		m.set(func(ctx context.Context, call, _ string, _ fence.Token) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			return ctx.Err()
		})
		g := newGate(t, m, httpfence.GateOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		first := enter(ctx, g, "r", 7)
		cancel()
		first.wants(t, "the first 7", context.Canceled)
		m.set(nil)
		second := enter(t.Context(), g, "r", 7)
		second.waits(t, "the second 7, while the question of the first has not ended")
		time.Sleep(time.Second)
		second.wants(t, "the second 7", nil)
		second.leave()
		empty(t, g)
	})
}

var errDisk = errors.New("disk on fire")

// Marks that fail let nothing pass, and what fails is the request for which they were asked.
func TestGateMarksFail(t *testing.T) {
	uncertain := &fence.Error{Kind: fence.ErrUncertain, Resource: "r", Err: errDisk}
	for _, call := range []string{"check", "claim"} {
		for _, tt := range []struct {
			name       string
			said, kind error
		}{
			{"plain", errDisk, fence.ErrUnavailable},
			{"uncertain", uncertain, fence.ErrUnavailable},
			{"busy", &fence.Error{Kind: fence.ErrBusy, Err: errDisk}, fence.ErrBusy},
			{"invalid", &fence.InvalidError{Field: "column"}, fence.ErrInvalid},
			{"contradiction", &fence.StaleError{Resource: "r", Token: 7, Seen: 7}, fence.ErrUnavailable},
		} {
			t.Run(call+" "+tt.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					m := new(marks)
					g := newGate(t, m, httpfence.GateOptions{})
					inside := enter(t.Context(), g, "r", 5)
					if call == "check" {
						inside.leave()
					}
					m.set(func(_ context.Context, c, resource string, tok fence.Token) error {
						if c == call && resource == "r" && tok == 7 {
							return tt.said
						}
						return nil
					})
					high, same := enter(t.Context(), g, "r", 7), enter(t.Context(), g, "r", 7)
					if call == "claim" {
						lower := enter(t.Context(), g, "r", 5)
						inside.leave()
						lower.wants(t, "5, since 7 could not be claimed", nil)
						lower.leave()
					}
					high.wants(t, "7", tt.kind)
					same.wants(t, "the other 7", tt.kind)
					if !errors.Is(high.err, tt.said) {
						t.Errorf("the reason is lost: %v", high.err)
					}
					empty(t, g)
					m.set(nil)
					high = enter(t.Context(), g, "r", 7)
					high.wants(t, "7 once the marks are well", nil)
					high.leave()
					empty(t, g)
				})
			})
		}
	}
}

// Marks that hang, and do not honour their ctx either, keep one resource closed and no other.
func TestGateMarksHang(t *testing.T) {
	for _, call := range []string{"check", "claim"} {
		t.Run(call, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := new(marks)
				well := make(chan struct{})
				m.set(func(_ context.Context, c, resource string, tok fence.Token) error {
					if resource == "r" && c == call && tok == 7 {
						<-well
						return errDisk
					}
					return nil
				})
				g := newGate(t, m, httpfence.GateOptions{Drain: 8 * time.Second})
				inside := enter(t.Context(), g, "r", 5)
				inside.leave()
				high := enter(t.Context(), g, "r", 7)
				short, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				impatient := enter(short, g, "r", 7)
				other := enter(t.Context(), g, "s", 1)
				other.wants(t, "another resource", nil)
				if other.took != 0 {
					t.Errorf("another resource waited for %v", other.took)
				}
				other.leave()
				time.Sleep(time.Second)
				impatient.wants(t, "7 with a ctx that ends", context.DeadlineExceeded)
				time.Sleep(7 * time.Second)
				high.wants(t, "7", fence.ErrUnavailable)
				if call == "check" {
					if err := g.Check(t.Context(), "r", 7); !errors.Is(err, fence.ErrUnavailable) {
						t.Errorf("Check: %v", err)
					}
				}
				lower := enter(t.Context(), g, "r", 5)
				lower.waits(t, "5, while nobody knows the mark")
				time.Sleep(8 * time.Second)
				lower.wants(t, "5", fence.ErrUnavailable)
				lower = enter(t.Context(), g, "r", 5)
				close(well)
				lower.wants(t, "5 once the marks are well", nil)
				lower.leave()
				empty(t, g)
			})
		})
	}
}

func TestGateRefuseUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		if err := m.Memory.Claim(t.Context(), "known", 5); err != nil {
			t.Fatal(err)
		}
		g := newGate(t, m, httpfence.GateOptions{RefuseUnknown: time.Minute})
		for _, tok := range []fence.Token{5, 6} {
			e := enter(t.Context(), g, "known", tok)
			e.wants(t, "a known resource", nil)
			e.leave()
		}
		enter(t.Context(), g, "new", 1).wants(t, "a new resource", fence.ErrUnavailable)
		time.Sleep(time.Minute - 1)
		enter(t.Context(), g, "new", 1).wants(t, "a new resource near the end", fence.ErrUnavailable)
		if err := m.Memory.Check(t.Context(), "new", 1); !errors.Is(err, fence.ErrNoResource) {
			t.Errorf("the mark of a refused resource: %v", err)
		}
		time.Sleep(time.Nanosecond)
		e := enter(t.Context(), g, "new", 1)
		e.wants(t, "a new resource afterwards", nil)
		e.leave()
		empty(t, g)
		if s := g.Stats(); s.Unavailable != 2 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestGateSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		if err := m.Memory.Claim(t.Context(), "r", 5); err != nil {
			t.Fatal(err)
		}
		g := newGate(t, m, httpfence.GateOptions{Settle: 30 * time.Second, Drain: 10 * time.Second})
		same := enter(t.Context(), g, "r", 5)
		same.wants(t, "the token of the mark", nil)
		same.leave()
		fresh := enter(t.Context(), g, "new", 1)
		fresh.wants(t, "a resource without a mark", nil)
		fresh.leave()

		short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		impatient := enter(short, g, "r", 6)
		high := enter(t.Context(), g, "r", 7)
		impatient.waits(t, "6")
		time.Sleep(5 * time.Second)
		impatient.wants(t, "6", context.DeadlineExceeded)
		high.waits(t, "7")
		time.Sleep(24 * time.Second)
		high.waits(t, "7")
		if err := m.Memory.Check(t.Context(), "r", 5); err != nil {
			t.Errorf("the mark before all has settled: %v", err)
		}
		time.Sleep(time.Second)
		high.wants(t, "7", nil)
		if high.took != 30*time.Second {
			t.Errorf("7 entered after %v", high.took)
		}
		high.leave()
		next := enter(t.Context(), g, "r", 8)
		next.wants(t, "8 after all has settled", nil)
		next.leave()
		empty(t, g)

		// One that only waits for the past to settle leaves nothing when it goes.
		g = newGate(t, m, httpfence.GateOptions{Settle: 30 * time.Second})
		ctx, cancel := context.WithCancel(t.Context())
		gone := enter(ctx, g, "r", 9)
		gone.waits(t, "9")
		cancel()
		gone.wants(t, "9", context.Canceled)
		empty(t, g)
		if err := m.Memory.Check(t.Context(), "r", 8); err != nil {
			t.Errorf("9 has gone and left its mark: %v", err)
		}
	})
}

// A stale answer of the gate tells the holder whose ctx it is, whoever asked the marks.
func TestGateTellsTheHolder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate(t, new(marks), httpfence.GateOptions{})
		told := map[fence.Token]int{}
		holder := func(tok fence.Token) context.Context {
			return fence.WithHolder(t.Context(), "key", tok, func(e *fence.StaleError) { told[e.Token]++ })
		}
		inside := enter(holder(5), g, "r", 5)
		queued, high := enter(holder(6), g, "r", 6), enter(holder(7), g, "r", 7)
		inside.leave()
		high.wants(t, "7", nil)
		queued.wants(t, "6", fence.ErrStale)
		enter(holder(4), g, "r", 4).wants(t, "4", fence.ErrStale)
		high.leave()
		enter(holder(3), g, "r", 3).wants(t, "3", fence.ErrStale)
		if fmt.Sprint(told) != "map[3:1 4:1 6:1]" {
			t.Errorf("told %v", told)
		}
	})
}

// Whatever comes in whatever order, with marks that fail and stall at times: those inside have
// one token, it never falls, and its mark is there.
func TestGateRandom(t *testing.T) {
	outcomes := map[string]int{}
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) { randomRun(t, seed, outcomes) })
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Log(outcomes)
	for _, kind := range []string{"entered", "stale", "gone", "failed marks", fence.ErrBusy.Error(), fence.ErrUnavailable.Error()} {
		if outcomes[kind] < 20 {
			t.Errorf("%s: %d", kind, outcomes[kind])
		}
	}
}

func randomRun(t *testing.T, seed uint64, outcomes map[string]int) {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(seed, 1))
	roll := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return rng.IntN(n)
	}
	m := new(marks)
	m.set(func(ctx context.Context, call, _ string, _ fence.Token) error {
		switch roll(30) {
		case 0:
			time.Sleep(time.Duration(roll(3000)) * time.Millisecond)
		case 1:
			mu.Lock()
			outcomes["failed marks"]++
			mu.Unlock()
			return errDisk
		case 2:
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	var guard fence.Guard = m
	if seed%3 == 0 {
		guard = &promptMarks{Guard: m, memory: &m.Memory}
	}
	g := newGate(t, guard, httpfence.GateOptions{Drain: 2 * time.Second, Settle: time.Duration(seed%2) * 500 * time.Millisecond})
	type inside struct {
		token fence.Token
		n     int
	}
	now := map[string]inside{}
	var wg sync.WaitGroup
	for i := range 120 {
		resource, tok := fmt.Sprint("r", roll(2)), fence.Token(1+i/12+roll(4))
		start, work, patience := i*150+roll(1500), roll(900), 200+roll(6000)
		if roll(12) == 0 {
			work += 4000
		}
		wg.Go(func() {
			time.Sleep(time.Duration(start) * time.Millisecond)
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(patience)*time.Millisecond)
			defer cancel()
			leave, err := g.Enter(ctx, resource, tok)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				var e *fence.Error
				switch {
				case errors.As(err, &e):
					outcomes[e.Kind.Error()]++
				case errors.Is(err, fence.ErrStale):
					outcomes["stale"]++
				case ctx.Err() != nil && errors.Is(err, ctx.Err()):
					outcomes["gone"]++
				default:
					t.Errorf("an error of no kind: %v", err)
				}
				return
			}
			outcomes["entered"]++
			in := now[resource]
			if tok < in.token || tok > in.token && in.n > 0 {
				t.Errorf("%v entered %s, where %d of %v are inside", tok, resource, in.n, in.token)
			}
			now[resource] = inside{tok, in.n + 1}
			if err := m.Memory.Check(context.Background(), resource, tok); err != nil {
				t.Errorf("%v is inside %s: %v", tok, resource, err)
			}
			mu.Unlock()
			time.Sleep(time.Duration(work) * time.Millisecond)
			mu.Lock()
			in = now[resource]
			in.n--
			now[resource] = in
			leave()
		})
	}
	wg.Wait()
	time.Sleep(time.Minute)
	empty(t, g)
}

// promptMarks are marks that tell a mark at once. What it tells may be old when it is heard.
type promptMarks struct {
	fence.Guard
	memory *fence.Memory
	delay  func()
}

func (m *promptMarks) Mark(resource string) (mark fence.Token) {
	var stale *fence.StaleError
	switch err := m.memory.Check(context.Background(), resource, 1); {
	case err == nil:
		mark = 1
	case errors.As(err, &stale):
		mark = stale.Seen
	}
	if m.delay != nil {
		m.delay()
	}
	return mark
}

// A request of the mark's own token that meets nobody enters at once, and never after a larger
// one, however old the mark is that it was told.
func TestGatePromptMarks(t *testing.T) {
	m := new(marks)
	slow := 0
	var mu sync.Mutex
	g := newGate(t, &promptMarks{m, &m.Memory, func() {
		mu.Lock()
		slow++
		nap := slow%3 == 0
		mu.Unlock()
		if nap {
			time.Sleep(200 * time.Microsecond)
		}
	}}, httpfence.GateOptions{})
	var highest atomic.Int64
	var entered, again atomic.Int64
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 300 {
				tok := fence.Token(1 + n/2 + i%2)
				leave, err := g.Enter(t.Context(), "r", tok)
				if errors.Is(err, fence.ErrStale) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if h := highest.Load(); int64(tok) < h {
					t.Errorf("%v entered after %d", tok, h)
				} else {
					highest.Store(int64(tok))
				}
				entered.Add(1)
				leave()
			}
		})
	}
	wg.Wait()
	m.mu.Lock()
	asked := len(m.calls)
	m.mu.Unlock()
	for range 10 {
		leave, err := g.Enter(t.Context(), "r", fence.Token(highest.Load()))
		if err != nil {
			t.Fatal(err)
		}
		again.Add(1)
		leave()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.calls) != asked {
		t.Errorf("marks that are prompt were asked %d times more", len(m.calls)-asked)
	}
	if s := g.Stats(); s.Resources != 0 || s.InFlight != 0 || s.Entered != uint64(entered.Load()+again.Load()) {
		t.Errorf("the gate keeps %+v, %d entered", s, entered.Load()+again.Load())
	}
}

// A claim whose outcome is uncertain may have raised the mark: nobody goes on as if it had not.
func TestGateUncertainClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(marks)
		g := newGate(t, m, httpfence.GateOptions{})
		inside := enter(t.Context(), g, "r", 5)
		m.set(func(ctx context.Context, call, resource string, tok fence.Token) error {
			if call == "claim" {
				m.Memory.Claim(ctx, resource, tok)
				return &fence.Error{Kind: fence.ErrUncertain, Resource: resource, Err: errDisk}
			}
			return nil
		})
		high, lower := enter(t.Context(), g, "r", 7), enter(t.Context(), g, "r", 5)
		inside.leave()
		high.wants(t, "7", fence.ErrUnavailable)
		lower.stale(t, "5", fence.StaleError{Resource: "r", Token: 5, Seen: 7})
		high = enter(t.Context(), g, "r", 7)
		high.wants(t, "the second 7", nil)
		high.leave()
		empty(t, g)
	})
}

// Claim answers for all gates that share the marks, also beside a request that is inside.
func TestGateClaimAsksTheMarks(t *testing.T) {
	m := new(fence.Memory)
	a, b := newGate(t, m, httpfence.GateOptions{}), newGate(t, m, httpfence.GateOptions{})
	leave, err := a.Enter(t.Context(), "r", 5)
	if err != nil {
		t.Fatal(err)
	}
	defer leave()
	if err := b.Claim(t.Context(), "r", 6); err != nil {
		t.Fatal(err)
	}
	if err := a.Claim(t.Context(), "r", 5); !errors.Is(err, fence.ErrStale) {
		t.Errorf("a claim of 5 after another gate's of 6: %v", err)
	}
}

// One whose ctx ends at the moment that it is let in does not stay inside.
func TestGateContextEndsAtTheDoor(t *testing.T) {
	m := new(marks)
	g := newGate(t, m, httpfence.GateOptions{})
	hits := 0
	for n := fence.Token(1); hits < 3 && n < 50000; n++ {
		ctx, cancel := context.WithCancel(t.Context())
		m.set(func(_ context.Context, call, _ string, _ fence.Token) error {
			if call == "claim" {
				cancel()
			}
			return nil
		})
		before := g.Stats().Entered
		leave, err := g.Enter(ctx, "r", n)
		if err == nil {
			leave()
		} else if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		s := g.Stats()
		for ; s.Resources != 0 && s.InFlight == 0; s = g.Stats() { // the claim goes on for nobody
			time.Sleep(time.Microsecond)
		}
		if s.InFlight != 0 {
			t.Fatalf("try %d, Enter: %v; the gate keeps %+v", n, err, s)
		}
		if err != nil && s.Entered > before {
			hits++ // let in, and out again
		}
		cancel()
	}
	if hits == 0 {
		t.Error("it never happened")
	}
}
