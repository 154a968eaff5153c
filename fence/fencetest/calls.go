package fencetest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// A context that is done does nothing. A bad argument is found before.
func testDoneContext(e *env) {
	cancelled, cancel := context.WithCancel(e.ctx)
	cancel()
	late, cancel := context.WithDeadline(e.ctx, time.Now().Add(-time.Second))
	defer cancel()
	for _, ctx := range []context.Context{cancelled, late} {
		r, claimed := e.resource(), e.resource()
		e.claim(e.g, claimed, 5, accepted)
		told := 0
		held := fence.WithHolder(ctx, claimed, 4, func(*fence.StaleError) { told++ })
		for _, t := range []fence.Token{4, 5, 6} {
			for op, err := range map[string]error{
				"Claim of a new resource": e.g.Claim(ctx, r, t),
				"Claim":                   e.g.Claim(held, claimed, t),
				"Check":                   e.g.Check(held, claimed, t),
			} {
				if !errors.Is(err, ctx.Err()) || errors.Is(err, fence.ErrUncertain) {
					e.Errorf("%s with a done context answers %v, want %v alone", op, err, ctx.Err())
				}
			}
		}
		if told != 0 {
			e.Errorf("a done context had the guard ask, and tell the holder")
		}
		e.unmarked(r, "a Claim with a done context")
		e.check(e.g, claimed, 5, accepted)
		e.invalid("Claim with a done context", e.g.Claim(ctx, claimed, 0), "token", "0")
		e.invalid("Check with a done context", e.g.Check(ctx, "", 1), "resource", "")
	}
}

// A stale answer tells the holder whose token the context carries, once, before the call
// returns; nothing else tells anybody.
func testHolder(e *env) {
	key := e.resource() // the key of the lock; in one of the rounds it is the resource as well
	for _, r := range []string{e.resource(), key} {
		for op, call := range map[string]func(fence.Guard, context.Context, string, fence.Token) error{
			"Claim": fence.Guard.Claim, "Check": fence.Guard.Check,
		} {
			e.claim(e.g, r, 9, accepted)
			var mine, others atomic.Int32
			var told fence.StaleError
			tell := func(n *atomic.Int32) func(*fence.StaleError) {
				return func(s *fence.StaleError) { n.Add(1); told = *s }
			}
			ctx := fence.WithHolder(e.ctx, e.salt+"/outer", 4, tell(&others))
			ctx = fence.WithHolder(ctx, key, 5, tell(&mine))
			ctx = fence.WithHolder(ctx, e.salt+"/inner", 6, tell(&others))
			if err := call(e.g, ctx, r, 9); err != nil {
				e.Errorf("%s of the mark, in a context of leases, answers %v", op, err)
			}
			if err := e.g.Check(ctx, r, 10); !errors.Is(err, fence.ErrUnclaimed) {
				e.Errorf("Check above the mark answers %v, want %v", err, unclaimed)
			}
			if n := mine.Load() + others.Load(); n != 0 {
				e.Errorf("holders are told %d times, though nothing was stale", n)
			}
			e.answers(op, call(e.g, ctx, r, 5), r, 5, stale(9))
			if mine.Load() != 1 || others.Load() != 0 {
				e.Errorf("a stale answer to %s tells the holder %d times and others %d times, want once and never", op, mine.Load(), others.Load())
			} else if want := (fence.StaleError{Resource: r, Token: 5, Seen: 9}); told != want {
				e.Errorf("a stale answer to %s tells the holder %+v, want %+v", op, told, want)
			}
		}
	}
}

// The holder is told with no lock held and nothing open: what it does then may come to the
// guard again.
func testHolderAsks(e *env) {
	r := e.resource()
	e.claim(e.g, r, 9, accepted)
	var told atomic.Int32
	ctx := fence.WithHolder(e.ctx, e.salt, 5, func(*fence.StaleError) {
		told.Add(1)
		answered := make(chan error, 1)
		go func() { answered <- errors.Join(e.g.Check(e.ctx, r, 9), e.g.Claim(e.ctx, r, 9)) }()
		select {
		case err := <-answered:
			if err != nil {
				e.Errorf("asked by a holder that is being told, the guard answers %v", err)
			}
		case <-time.After(e.patience):
			e.Errorf("asked by a holder that is being told, the guard waits for itself")
		}
	})
	e.answers("Claim", e.g.Claim(ctx, r, 5), r, 5, stale(9))
	if told.Load() == 0 {
		e.Errorf("the holder is not told")
	}
}

// event is one claim, with its place in the order of all beginnings and ends.
type event struct {
	token      fence.Token
	begin, end int64
	err        error
}

const (
	workers = 8   // at the same time
	rounds  = 3   // of claims of all the tokens
	tokens  = 100 // in each round
)

// Claims of many holders at once are as if made one after another: once a token has been
// accepted or seen, no smaller one is accepted from then on.
func testConcurrent(e *env) {
	guards := []fence.Guard{e.g, e.another(), e.another()}
	for range rounds {
		r := e.resource()
		history := e.storm(guards, r)
		e.linear(r, history)
		e.check(e.g, r, tokens, accepted)
		e.claim(guards[2], r, tokens-1, stale(tokens))
	}
}

// storm claims the tokens from 1 on, some of them twice, in any order.
func (e *env) storm(guards []fence.Guard, r string) []event {
	var order []fence.Token
	for t := range tokens {
		order = append(order, fence.Token(t+1))
		if t%4 == 0 {
			order = append(order, fence.Token(t+1))
		}
	}
	rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	history := make([]event, len(order))
	var clock, next atomic.Int64
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			g := guards[i%len(guards)]
			for {
				n := int(next.Add(1)) - 1
				if n >= len(order) {
					return
				}
				h := &history[n]
				h.token, h.begin = order[n], clock.Add(1)
				h.err = e.patiently(func() error { return g.Claim(e.ctx, r, h.token) })
				h.end = clock.Add(1)
			}
		})
	}
	wg.Wait()
	return history
}

// patiently repeats a call that others kept waiting for longer than the guard waits: on a
// busy machine that is an honest answer.
func (e *env) patiently(call func() error) error {
	for {
		err := call()
		if !errors.Is(err, fence.ErrBusy) || e.ctx.Err() != nil {
			return err
		}
		select {
		case <-e.ctx.Done():
		case <-time.After(time.Duration(1+rand.IntN(20)) * time.Millisecond):
		}
	}
}

// linear complains of a history of claims that no order of them explains.
func (e *env) linear(r string, history []event) {
	e.Helper()
	begun := map[fence.Token]int64{} // the first claim of each
	for _, h := range history {
		if first, ok := begun[h.token]; !ok || h.begin < first {
			begun[h.token] = h.begin
		}
	}
	for _, h := range history {
		e.known("Claim", h.err)
		var s *fence.StaleError
		seen := h.token
		switch {
		case h.err == nil:
		case !errors.As(h.err, &s):
			e.Errorf("one of many claims answers %v", h.err)
			continue
		default:
			if s.Resource != r || s.Token != h.token || s.Seen <= h.token {
				e.Errorf("a claim of %v answers %+v", h.token, *s)
			}
			if first, ok := begun[s.Seen]; !ok || first > h.end {
				e.Errorf("a claim of %v answers that %v has been seen, before anybody claimed it", h.token, s.Seen)
			}
			seen = s.Seen
		}
		for _, later := range history {
			if later.err == nil && later.begin > h.end && later.token < seen {
				e.Errorf("token %v was accepted after the answer to a claim of %v, by which %v had been seen", later.token, h.token, seen)
				return
			}
		}
	}
}

// Resources do not disturb each other.
func testManyResources(e *env) {
	guards := []fence.Guard{e.g, e.another()}
	resources := make([]string, 40)
	for i := range resources {
		resources[i] = e.resource()
	}
	token := func(i int) fence.Token { return fence.Token(1000 + i) }
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := w; i < len(resources); i += workers {
				g, r := guards[i%2], resources[i]
				for _, t := range []fence.Token{1, token(i) - 1, token(i), token(i)} {
					if err := e.patiently(func() error { return g.Claim(e.ctx, r, t) }); err != nil {
						e.Errorf("a claim of %v, beside claims of other resources, answers %v", t, err)
					}
				}
			}
		})
	}
	wg.Wait()
	for i, r := range resources {
		e.check(guards[(i+1)%2], r, token(i), accepted)
		e.claim(guards[(i+1)%2], r, token(i)-1, stale(token(i)))
	}
}
