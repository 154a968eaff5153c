package holdfast

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

func TestTokensGrow(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		var last Token
		for range 50 {
			l := b.acquire("k")
			if l.Token() <= last {
				t.Fatalf("token %v after %v", l.Token(), last)
			}
			if l.Key() != "k" || l.Owner() != b.holder("k") {
				t.Fatalf("lease on %q of %q, the store says %q", l.Key(), l.Owner(), b.holder("k"))
			}
			last = l.Token()
			b.release(l)
			if b.holder("k") != "" {
				t.Fatal("the key is still held")
			}
		}
		if len(b.locks.f.lines) > 0 {
			t.Error("a line is left")
		}
	})
}

func TestTryAcquireAnswersAtOnce(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		other, err := b.other(&Options{Label: "web-1"}).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		_, err = b.locks.TryAcquire(b.ctx, "k")
		want(t, err, ErrHeld)
		var held *HeldError
		if !errors.As(err, &held) || held.Holder.Label != "web-1" || held.Holder.TTL <= 0 {
			t.Errorf("%v does not say who holds the key", err)
		}
		for _, kind := range []error{ErrUnavailable, ErrUncertain, ErrUnsupported, ErrInvalid} {
			b.faults.Set(storetest.Try, storetest.Fail(kind))
			_, err = b.locks.TryAcquire(b.ctx, "k")
			want(t, err, kind)
		}
		if since := time.Since(began); since > 0 {
			t.Errorf("took %v", since)
		}
		if b.faults.Hits(storetest.Try) != 4 {
			t.Errorf("%d attempts", b.faults.Hits(storetest.Try))
		}
		b.faults.Heal()
		if err := other.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
		l, err := b.locks.TryAcquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.locks.TryAcquire(b.ctx, "k") // by the same process
		want(t, err, ErrHeld)
		b.release(l)
	})
}

func TestAcquireWaitsForHolder(t *testing.T) {
	for name, in := range map[string]func(*testing.T, Options, func(*bed)){"queue": bubble, "polling": plainBubble} {
		t.Run(name, func(t *testing.T) {
			in(t, Options{}, func(b *bed) {
				l, err := b.other(nil).Acquire(b.ctx, "k")
				if err != nil {
					t.Fatal(err)
				}
				time.AfterFunc(time.Minute, func() { _ = l.Release(b.ctx) })
				tries := count(b.faults, storetest.Try)
				began := time.Now()
				mine := b.acquire("k")
				if since := time.Since(began); since < time.Minute || since > time.Minute+2*pollMax {
					t.Errorf("acquired after %v", since)
				}
				if per := float64(tries.Load()) / 60; per > 20 { // it does not spin
					t.Errorf("%.1f attempts per second", per)
				}
				waiting := told[Waiting](b.events)
				if len(waiting) == 0 || !errors.Is(waiting[0].Err, ErrHeld) || waiting[0].Attempt != 1 || waiting[len(waiting)-1].Waited < 40*time.Second {
					t.Errorf("the observer was told %d times, first %+v", len(waiting), waiting[:min(1, len(waiting))])
				}
				b.release(mine)
			})
		})
	}
}

// count counts the calls of op, and lets them pass.
func count(f *storetest.Faults, op storetest.Op) *atomic.Int64 {
	n := new(atomic.Int64)
	f.Set(op, func(ctx context.Context, call func(context.Context) error) error {
		n.Add(1)
		return call(ctx)
	})
	return n
}

// TTL-07: a ttl has the same effect within a process as between processes.
func TestTTLWithinOneProcess(t *testing.T) {
	bubble(t, Options{TTL: time.Second, NoExtend: true}, func(b *bed) {
		first := b.acquire("k")
		ctx := first.Context(b.ctx)
		began := time.Now()
		second := b.acquire("k")
		if since := time.Since(began); since < time.Second || since > time.Second+pollMax {
			t.Errorf("the second acquired after %v", since)
		}
		if context.Cause(ctx) == nil || !errors.Is(first.Err(), ErrLost) {
			t.Error("the first one was not lost before")
		}
		want(t, first.Release(b.ctx), ErrLost)
		if b.holder("k") != second.Owner() {
			t.Error("the late release took the second one's lease")
		}
		b.release(second)
	})
}

func TestAcquireWaitsForStore(t *testing.T) {
	for name, fault := range map[string]storetest.Fault{
		"unavailable":  storetest.Fail(fmt.Errorf("node 1: %w", store.ErrUnavailable)),
		"uncertain":    storetest.LoseRequest,
		"lost replies": storetest.LoseReply,
		"bare error":   storetest.Fail(errors.New("connection reset")),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{}, func(b *bed) {
				b.faults.Set(storetest.Try, fault)
				time.AfterFunc(20*time.Second, b.faults.Heal)
				began := time.Now()
				l := b.acquire("k")
				if since := time.Since(began); since < 20*time.Second || since > 20*time.Second+2*retryMax {
					t.Errorf("acquired after %v", since)
				}
				if hits := b.faults.Hits(storetest.Try); hits < 5 || hits > 40 {
					t.Errorf("%d attempts in 20 s", hits)
				}
				if n := len(told[Waiting](b.events)); n != b.faults.Hits(storetest.Try) {
					t.Errorf("told %d of %d attempts", n, b.faults.Hits(storetest.Try))
				}
				b.release(l)
			})
		})
	}
}

func TestAcquireGivesUpWithBothCauses(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(b.ctx, 5*time.Second)
		defer cancel()
		began := time.Now()
		_, err = b.locks.Acquire(ctx, "k")
		want(t, err, context.DeadlineExceeded, ErrHeld)
		if time.Since(began) != 5*time.Second {
			t.Errorf("returned after %v", time.Since(began))
		}
		b.faults.Set(storetest.Try, storetest.Fail(store.ErrUnavailable))
		why := errors.New("shutting down")
		stopped, stop := context.WithCancelCause(b.ctx)
		time.AfterFunc(time.Second, func() { stop(why) })
		_, err = b.locks.Acquire(stopped, "k")
		want(t, err, context.Canceled, why, ErrUnavailable)
		not(t, err, ErrHeld)
		if err := l.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if b.holder("k") != "" {
			t.Error("a claim was left behind")
		}
	})
}

func TestUselessErrorsReturnAtOnce(t *testing.T) {
	for _, kind := range []error{store.ErrInvalid, store.ErrUnsupported, &store.InvalidError{Field: "key", Value: "k", Rule: "holds a list"}} {
		bubble(t, Options{}, func(b *bed) {
			b.faults.Set(storetest.Try, storetest.Fail(kind))
			began := time.Now()
			_, err := b.locks.Acquire(b.ctx, "k")
			want(t, err, kind)
			if time.Since(began) > 0 || b.faults.Hits(storetest.Try) != 1 {
				t.Errorf("%d attempts, %v", b.faults.Hits(storetest.Try), time.Since(began))
			}
		})
	}
}

// A claim whose grant was not heard of until it had lapsed is given up for a fresh one: its
// store answers ErrLost or ErrReleased for ever.
func TestClaimThatHasEnded(t *testing.T) {
	bubble(t, Options{TTL: time.Second}, func(b *bed) {
		b.faults.Next(storetest.Try, func(ctx context.Context, call func(context.Context) error) error {
			err := call(ctx)
			time.Sleep(2 * time.Second)
			return errors.Join(store.ErrUncertain, err)
		})
		began := time.Now()
		l := b.acquire("k")
		if since := time.Since(began); since > 3*time.Second {
			t.Errorf("acquired after %v", since)
		}
		b.release(l)
		for _, ended := range []error{store.ErrLost, store.ErrReleased} {
			claims := 0
			s := &endedStore{Store: b.mem, claims: &claims, err: ended}
			ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
			defer cancel()
			l, err := locker(t, s, nil).Acquire(ctx, "k")
			if err != nil || claims != 2 {
				t.Fatalf("after %v: %v, with %d claims", ended, err, claims)
			}
			b.release(l)
		}
	})
}

// endedStore is a store whose first claim has ended.
type endedStore struct {
	store.Store
	claims *int
	err    error
}

func (s *endedStore) Claim(key string, o store.ClaimOptions) store.Claim {
	c := s.Store.Claim(key, o)
	if *s.claims++; *s.claims == 1 {
		return endedClaim{c, s.err}
	}
	return c
}

type endedClaim struct {
	store.Claim
	err error
}

func (c endedClaim) Try(context.Context) (store.Grant, error) { return store.Grant{}, c.err }

func TestDoneContextTakesNothing(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		held := b.acquire("other")
		calls := count(b.faults, storetest.Try)
		extensions := count(b.faults, storetest.Extend)
		ctx, cancel := context.WithCancel(b.ctx)
		cancel()
		for range 20 {
			_, err := b.locks.Acquire(ctx, "k")
			want(t, err, context.Canceled)
			_, err = b.locks.TryAcquire(ctx, "k")
			want(t, err, context.Canceled)
			_, err = b.locks.AcquireAll(ctx, "k", "j")
			want(t, err, context.Canceled)
			want(t, held.Extend(ctx), context.Canceled)
			err = b.locks.Do(ctx, "k", func(context.Context, *Lease) error { t.Error("fn ran"); return nil })
			want(t, err, context.Canceled)
		}
		if calls.Load()+extensions.Load() > 0 {
			t.Error("the store was called")
		}
		b.release(held)
	})
}

// CTX-05: a grant that races with cancellation is given back, and where an error is
// returned there is no live lease.
func TestCancelAtAnyMoment(t *testing.T) {
	rounds := 1000
	bubble(t, Options{TTL: 500 * time.Millisecond}, func(b *bed) {
		faults := []storetest.Fault{nil, storetest.Delay(time.Millisecond), storetest.DelayReply(time.Millisecond), storetest.LoseReply, storetest.LoseRequest}
		granted, refused := 0, 0
		for i := range rounds {
			ctx, cancel := context.WithTimeout(b.ctx, rand.N(2*time.Millisecond))
			fault := storetest.Fault(func(ctx context.Context, call func(context.Context) error) error {
				err := call(ctx)
				cancel() // in the very moment of the grant
				return err
			})
			if i%2 == 0 {
				fault = faults[i/2%len(faults)]
			}
			b.faults.Set(storetest.Try, fault)
			l, err := b.locks.Acquire(ctx, "k")
			if err != nil {
				refused++
				if ctx.Err() == nil {
					t.Fatal(err)
				}
				want(t, err, ctx.Err())
				if owner := b.holder("k"); owner != "" {
					t.Fatalf("round %d: %v, and %q holds the key", i, err, owner)
				}
				continue
			}
			granted++
			cancel()
			if l.Err() != nil {
				t.Fatal(l.Err())
			}
			b.release(l)
		}
		if granted == 0 || refused == 0 {
			t.Errorf("%d granted, %d refused: both must happen", granted, refused)
		}
		time.Sleep(time.Second)
		if b.holder("k") != "" || len(b.locks.f.lines) > 0 || len(b.locks.f.sched.ends.leases) > 0 {
			t.Error("something is left")
		}
	})
}

// A store that ignores the context holds up neither Acquire nor TryAcquire, and what it
// grants later is given back.
func TestStoreThatHangs(t *testing.T) {
	racedBubble(t, Options{TTL: 2 * time.Second}, func(b *bed) {
		freed := make(chan struct{})
		b.faults.SetAll(storetest.HangUntil(freed))
		ctx, cancel := context.WithTimeout(b.ctx, time.Second)
		defer cancel()
		began := time.Now()
		_, err := b.locks.Acquire(ctx, "k")
		want(t, err, context.DeadlineExceeded)
		if since := time.Since(began); since > time.Second+withdrawWait {
			t.Errorf("Acquire returned after %v", since)
		}
		began = time.Now()
		_, err = b.locks.TryAcquire(b.ctx, "k")
		want(t, err, ErrUncertain)
		if since := time.Since(began); since > 3*time.Second+withdrawWait {
			t.Errorf("TryAcquire returned after %v", since)
		}
		b.faults.Heal()
		l := b.acquire("k") // beside the calls that hang
		b.release(l)
		close(freed)
		time.Sleep(time.Second)
		if b.holder("k") != "" {
			t.Error("a late grant was kept")
		}
		if b.faults.Hits(storetest.Try) != 2 {
			t.Errorf("%d calls hung", b.faults.Hits(storetest.Try))
		}
	})
}

// The store is told again of a late grant, should it not have given it back by itself.
func TestLateGrantIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &lateStore{freed: make(chan struct{})}
		k := locker(t, s, nil)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := k.Acquire(ctx, "k")
		want(t, err, context.DeadlineExceeded)
		synctest.Wait()
		if s.releases.Load() != 1 {
			t.Errorf("%d releases on cancellation", s.releases.Load())
		}
		close(s.freed)
		synctest.Wait()
		if s.releases.Load() != 2 {
			t.Errorf("%d releases after the late grant", s.releases.Load())
		}
	})
}

// lateStore grants when it is freed, whatever was released before.
type lateStore struct {
	freed    chan struct{}
	releases atomic.Int64
}

func (*lateStore) Info() store.Info { return store.Info{Name: "late"} }

func (s *lateStore) Claim(string, store.ClaimOptions) store.Claim { return s }

func (s *lateStore) Try(context.Context) (store.Grant, error) {
	<-s.freed
	return store.Grant{Owner: "o", TTL: time.Hour}, nil
}

func (s *lateStore) Extend(context.Context) (store.Grant, error) {
	return store.Grant{}, store.ErrUnavailable
}

func (s *lateStore) Release(context.Context) error { s.releases.Add(1); return nil }

// CLK-04, TTL-05: what arrives after its validity is no lease.
func TestGrantThatArrivesTooLate(t *testing.T) {
	bubble(t, Options{TTL: time.Second}, func(b *bed) {
		late := func(ctx context.Context, call func(context.Context) error) error {
			err := call(ctx)
			b.suspend(990 * time.Millisecond) // the validity is 988 ms
			return err
		}
		b.faults.Next(storetest.Try, late)
		_, err := b.locks.TryAcquire(b.ctx, "k")
		want(t, err, ErrUnavailable)
		if b.holder("k") != "" {
			t.Error("the grant was not given back")
		}
		b.faults.Next(storetest.Try, late, late)
		began := time.Now()
		l := b.acquire("k")
		if since := time.Since(began); since > time.Second/2 {
			t.Errorf("acquired after %v: a late grant was not given back", since)
		}
		if b.faults.Hits(storetest.Try) != 3 {
			t.Errorf("%d late grants", b.faults.Hits(storetest.Try))
		}
		if n := len(told[Acquired](b.events)); n != 1 {
			t.Errorf("told of %d grants", n)
		}
		b.release(l)
	})
}

// TOK-01: a token that a guard would refuse is not handed out.
func TestTokensThatDoNotGrow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := Token(0)
		mem := memstore.New()
		s := changed{Store: mem, grant: func(_ string, g *store.Grant) { g.Token = next }}
		k := locker(t, s, nil)
		ctx := context.Background()
		for _, c := range []struct {
			token Token
			good  bool
		}{
			{0, false}, {-5, false}, {7, true}, {7, false}, {6, false}, {8, true},
			{math.MaxInt32, true}, {math.MinInt32, false}, {0, false}, {1, false}, // a counter of 32 bits wraps
			{math.MaxInt64, true}, {math.MinInt64, false}, {math.MaxInt64, false},
		} {
			next = c.token
			l, err := k.Acquire(ctx, "k")
			if c.good {
				if err != nil {
					t.Fatal(err)
				}
				if err := l.Release(ctx); err != nil {
					t.Fatal(err)
				}
				continue
			}
			want(t, err, ErrInvalid)
			if rule := map[bool]string{true: "positive", false: "larger"}[c.token <= 0]; !strings.Contains(err.Error(), rule) {
				t.Error(err)
			}
			if h, _ := mem.Inspect(ctx, "k"); h.Owner != "" {
				t.Errorf("the grant with token %v was not given back", c.token)
			}
		}
		next = 1 // of another key
		if l, err := k.Acquire(ctx, "j"); err != nil {
			t.Error(err)
		} else if err := l.Release(ctx); err != nil {
			t.Error(err)
		}
	})
}

func TestTokenMemoryIsBounded(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		for i := range tokensKept + 1000 {
			b.release(b.acquire(fmt.Sprint("k", i)))
		}
		if n := len(b.locks.f.seen); n > tokensKept {
			t.Errorf("%d tokens are remembered", n)
		}
	})
}

func TestQueueIsInOrder(t *testing.T) {
	for name, in := range map[string]func(*testing.T, Options, func(*bed)){"queue": bubble, "polling": plainBubble} {
		t.Run(name, func(t *testing.T) {
			in(t, Options{}, func(b *bed) {
				first := b.acquire("k")
				var mu sync.Mutex
				var order []int
				var wg sync.WaitGroup
				for i := range 20 {
					wg.Go(func() {
						l := b.acquire("k")
						mu.Lock()
						order = append(order, i)
						mu.Unlock()
						time.Sleep(time.Second)
						b.release(l)
					})
					synctest.Wait()
				}
				tries := count(b.faults, storetest.Try)
				began := time.Now()
				b.release(first)
				wg.Wait()
				if !slices.IsSorted(order) || len(order) != 20 {
					t.Errorf("served in the order %v", order)
				}
				if since := time.Since(began); since != 20*time.Second {
					t.Errorf("20 holders of a second each took %v: a waiter was not woken at once", since)
				}
				if n := tries.Load(); n > 60 {
					t.Errorf("%d attempts for 20 grants", n)
				}
			})
		})
	}
}

// The claim belongs to the queue: a waiter that leaves hands its place at the store on.
func TestPlaceIsInherited(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		holder, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		releases := count(b.faults, storetest.Release)
		ctx, cancel := context.WithCancel(b.ctx)
		var wg sync.WaitGroup
		var order []string
		wg.Go(func() { // the first one of this process
			_, err := b.locks.Acquire(ctx, "k")
			want(t, err, context.Canceled, ErrHeld)
		})
		synctest.Wait()
		wg.Go(func() {
			l := b.acquire("k")
			order = append(order, "second of this process")
			b.release(l)
		})
		synctest.Wait()
		rival := b.other(nil)
		wg.Go(func() { // comes after the first one, and so after its heir
			l, err := rival.Acquire(b.ctx, "k")
			if err != nil {
				t.Error(err)
				return
			}
			order = append(order, "rival")
			_ = l.Release(b.ctx)
		})
		synctest.Wait()
		cancel()
		synctest.Wait()
		if releases.Load() != 0 {
			t.Error("the claim was withdrawn though another waits")
		}
		if err := holder.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if !slices.Equal(order, []string{"second of this process", "rival"}) {
			t.Errorf("served %v", order)
		}
	})
}

func TestWaitersOfOtherTerms(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		short, err := b.locks.With(Options{TTL: 2 * time.Second, Label: "short"})
		if err != nil {
			t.Fatal(err)
		}
		holder, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.ctx)
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := b.locks.Acquire(ctx, "k")
			want(t, err, context.Canceled)
		})
		synctest.Wait()
		wg.Go(func() {
			l, err := short.Acquire(b.ctx, "k")
			if err != nil {
				t.Error(err)
				return
			}
			if h, _ := b.mem.Inspect(b.ctx, "k"); h.Label != "short" || h.TTL > 2*time.Second {
				t.Errorf("the store says %+v", h)
			}
			b.release(l)
		})
		synctest.Wait()
		tries := count(b.faults, storetest.Try)
		cancel()
		synctest.Wait()
		if tries.Load() != 1 {
			t.Error("the second one did not take a place of its own at once")
		}
		if err := holder.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if b.holder("k") != "" {
			t.Error("the key is held")
		}
	})
}

// TryAcquire does not overtake waiters of its own process, and makes no attempt beside theirs.
func TestTryAcquireRespectsTheQueue(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		b.faults.Set(storetest.Try, storetest.Fail(fmt.Errorf("node 3: %w", store.ErrUnavailable)))
		ctx, cancel := context.WithCancel(b.ctx)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = b.locks.Acquire(ctx, "k") })
		synctest.Wait()
		hits := b.faults.Hits(storetest.Try)
		_, err := b.locks.TryAcquire(b.ctx, "k")
		want(t, err, ErrUnavailable) // what the waiter knows
		if b.faults.Hits(storetest.Try) != hits {
			t.Error("it made an attempt of its own")
		}
		cancel()
		wg.Wait()
		// One attempt is shared by all that come while it is made.
		b.faults.Heal()
		b.faults.Set(storetest.Try, storetest.Delay(time.Second))
		var got atomic.Int64
		hits = b.faults.Hits(storetest.Try)
		for range 10 {
			wg.Go(func() {
				l, err := b.locks.TryAcquire(b.ctx, "j")
				if err != nil {
					want(t, err, ErrHeld)
					return
				}
				got.Add(1)
				time.Sleep(time.Second)
				b.release(l)
			})
		}
		wg.Wait()
		if got.Load() != 1 || b.faults.Hits(storetest.Try) != hits+1 {
			t.Errorf("%d of 10 acquired, by %d attempts", got.Load(), b.faults.Hits(storetest.Try)-hits)
		}
	})
}

// Calls of TryAcquire that share the attempt of a waiter which gives up make their own.
func TestWatchersOutliveTheirWaiter(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		b.faults.Next(storetest.Try, storetest.Hang)
		ctx, cancel := context.WithCancel(b.ctx)
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := b.locks.Acquire(ctx, "k")
			want(t, err, context.Canceled)
		})
		synctest.Wait()
		var got atomic.Int64
		for range 3 {
			wg.Go(func() {
				if l, err := b.locks.TryAcquire(b.ctx, "k"); err == nil {
					got.Add(1)
					b.release(l)
				} else {
					want(t, err, ErrHeld)
				}
			})
		}
		synctest.Wait()
		cancel()
		wg.Wait()
		if got.Load() == 0 {
			t.Error("none of them acquired the free key")
		}
	})
}

// An attempt that was made for one waiter and counts for its heir is the heir's first.
func TestAttemptsOfAnHeir(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		holder, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		b.faults.Set(storetest.Try, storetest.Delay(time.Second))
		var wg sync.WaitGroup
		var leave []func()
		for range 2 {
			ctx, cancel := context.WithCancel(b.ctx)
			leave = append(leave, cancel)
			wg.Go(func() { _, _ = b.locks.Acquire(ctx, "k") })
			synctest.Wait()
		}
		leave[0]()
		time.Sleep(2 * time.Second)
		leave[1]()
		wg.Wait()
		waits := told[Waiting](b.events)
		for i, e := range waits {
			if e.Attempt != i+1 {
				t.Errorf("%+v is told as number %d", e, i+1)
			}
		}
		if len(waits) == 0 {
			t.Error("nobody waited")
		}
		_ = holder.Release(b.ctx)
	})
}

// Calls of TryAcquire that outlive the waiter whose attempt they share are not refused
// because of what that attempt took.
func TestWatchersAwaitTheWithdrawal(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		b.faults.Next(storetest.Try, storetest.DelayReply(time.Second))
		b.faults.Next(storetest.Release, storetest.Delay(100*time.Millisecond))
		ctx, cancel := context.WithCancel(b.ctx)
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = b.locks.Acquire(ctx, "k") })
		synctest.Wait()
		if b.holder("k") == "" {
			t.Fatal("the attempt took nothing")
		}
		wg.Go(func() {
			l, err := b.locks.TryAcquire(b.ctx, "k")
			if err != nil {
				t.Error(err)
				return
			}
			b.release(l)
		})
		synctest.Wait()
		cancel()
		wg.Wait()
	})
}

// A holder whose grant has no end in sight is asked for no more often than another.
func TestHolderWithEndlessTTL(t *testing.T) {
	for name, in := range map[string]func(*testing.T, Options, func(*bed)){"queue": bubble, "polling": plainBubble} {
		t.Run(name, func(t *testing.T) {
			in(t, Options{}, func(b *bed) {
				ctx, cancel := context.WithTimeout(b.ctx, 10*time.Second)
				defer cancel()
				refuse := storetest.Fail(&HeldError{Holder: store.Holder{TTL: math.MaxInt64}})
				b.faults.Set(storetest.Try, func(c context.Context, call func(context.Context) error) error {
					if b.faults.Hits(storetest.Try) > 500 { // else the bubble's time would stand still
						cancel()
					}
					return refuse(c, call)
				})
				_, err := b.locks.Acquire(ctx, "k")
				want(t, err, context.DeadlineExceeded, ErrHeld)
				t.Logf("%d attempts", b.faults.Hits(storetest.Try))
				time.Sleep(10 * time.Second)
			})
		})
	}
}

// REN-01
func TestAlreadyHeld(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		twin := locker(t, b.mem, nil) // the same store by another New
		var after context.Context
		err := b.locks.Do(b.ctx, "k", func(ctx context.Context, l *Lease) error {
			for _, k := range []*Locker{b.locks, twin} {
				began := time.Now()
				_, err := k.Acquire(ctx, "k")
				want(t, err, ErrAlreadyHeld)
				_, err = k.TryAcquire(ctx, "k")
				want(t, err, ErrAlreadyHeld)
				_, err = k.AcquireAll(ctx, "a", "k")
				want(t, err, ErrAlreadyHeld)
				err = k.Do(ctx, "k", func(context.Context, *Lease) error { t.Error("fn ran"); return nil })
				want(t, err, ErrAlreadyHeld)
				if time.Since(began) > 0 {
					t.Error("it waited")
				}
			}
			return b.locks.Do(ctx, "inner", func(ctx context.Context, _ *Lease) error {
				_, err := b.locks.TryAcquire(ctx, "k") // through two levels
				want(t, err, ErrAlreadyHeld)
				if l.Err() != nil {
					t.Error("the outer lease ended")
				}
				after = context.WithoutCancel(ctx)
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		l, err := b.locks.TryAcquire(after, "k") // the lease has ended
		if err != nil {
			t.Fatal(err)
		}
		b.release(l)
		stranger := locker(t, memstore.New(), nil) // another store
		err = b.locks.Do(b.ctx, "k", func(ctx context.Context, _ *Lease) error {
			l, err := stranger.TryAcquire(ctx, "k")
			if err == nil {
				err = l.Release(ctx)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestAcquireAll(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		ls, err := b.locks.AcquireAll(b.ctx, "c", "a", "b", "a")
		if err != nil {
			t.Fatal(err)
		}
		var keys []string
		for _, l := range ls {
			keys = append(keys, l.Key())
		}
		if !slices.Equal(keys, []string{"a", "b", "c"}) {
			t.Errorf("acquired %v", keys)
		}
		ctx := ls.Context(b.ctx)
		for _, l := range ls {
			if token, ok := fence.FromContext(ctx, l.Key()); !ok || token != l.Token() {
				t.Error("the context does not carry the token of", l.Key())
			}
		}
		time.Sleep(time.Minute)
		if ls.Err() != nil || ctx.Err() != nil {
			t.Fatal(ls.Err())
		}
		_ = b.mem.Lose("b")
		time.Sleep(10 * time.Second)
		want(t, ls.Err(), ErrLost)
		want(t, context.Cause(ctx), ErrLost)
		want(t, ls.Release(b.ctx), ErrLost)
		for _, key := range keys {
			if b.holder(key) != "" {
				t.Error(key, "is held")
			}
		}
	})
}

func TestAcquireAllOrNone(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		holder, err := b.other(nil).Acquire(b.ctx, "b")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
		defer cancel()
		_, err = b.locks.AcquireAll(ctx, "a", "b", "c")
		want(t, err, context.DeadlineExceeded, ErrHeld)
		for _, key := range []string{"a", "c"} {
			if b.holder(key) != "" {
				t.Error(key, "is held")
			}
		}
		// One that is lost while it waits for another ends the wait.
		time.AfterFunc(time.Second, func() { _ = b.mem.Lose("a") })
		began := time.Now()
		_, err = b.locks.AcquireAll(b.ctx, "a", "b")
		want(t, err, ErrLost)
		not(t, err, context.Canceled)
		if since := time.Since(began); since > DefaultTTL {
			t.Errorf("gave up after %v", since)
		}
		if err := holder.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if b.holder("a") != "" || b.holder("b") != "" {
			t.Error("something is left")
		}
	})
}

// What AcquireAll could not give back is told, also where another lease was lost meanwhile.
func TestAcquireAllLeavesSomething(t *testing.T) {
	bubble(t, Options{TTL: time.Second}, func(b *bed) {
		if _, err := b.other(nil).Acquire(b.ctx, "c"); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(100*time.Millisecond, func() {
			b.faults.Set(storetest.Release, storetest.LoseRequest)
			_ = b.mem.Lose("a")
		})
		_, err := b.locks.AcquireAll(b.ctx, "a", "b", "c")
		want(t, err, ErrLost, ErrUncertain)
		if b.holder("b") == "" {
			t.Error("the fault did not happen")
		}
		b.faults.Heal()
		time.Sleep(time.Minute)
	})
}

func TestTwoCrosswise(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		other := b.other(nil)
		var wg sync.WaitGroup
		for _, c := range []struct {
			k    *Locker
			keys []string
		}{{b.locks, []string{"a", "b"}}, {other, []string{"b", "a"}}} {
			wg.Go(func() {
				for range 50 {
					ls, err := c.k.AcquireAll(b.ctx, c.keys...)
					if err != nil {
						t.Error(err)
						return
					}
					time.Sleep(time.Millisecond)
					if err := ls.Release(b.ctx); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
	})
}
