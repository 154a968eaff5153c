package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// An acquisition and its release allocate the lease, and nothing else that is worth a name.
func TestAllocations(t *testing.T) {
	k := locker(t, noStore{}, nil)
	timed, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	for name, c := range map[string]struct {
		ctx  context.Context
		most float64
	}{"background": {context.Background(), 2}, "with a deadline": {timed, 3}} { // one more than it takes: the race detector empties pools
		n := testing.AllocsPerRun(1000, func() {
			l, err := k.Acquire(c.ctx, "k")
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Release(c.ctx); err != nil {
				t.Fatal(err)
			}
		})
		if n > c.most {
			t.Errorf("context %s: %v allocations", name, n)
		}
	}
}

// A waiter does not ask the store for a key that its own process holds, except for a place in
// the store's queue, and is woken at once.
func TestOwnHolderIsAwaited(t *testing.T) {
	for name, c := range map[string]struct {
		in    func(*testing.T, Options, func(*bed))
		tries int64
	}{"queue": {bubble, 0}, "polling": {plainBubble, 0}} {
		t.Run(name, func(t *testing.T) {
			c.in(t, Options{}, func(b *bed) {
				l := b.acquire("k")
				tries := count(b.faults, storetest.Try)
				got := make(chan *Lease)
				go func() { got <- b.acquire("k") }()
				time.Sleep(10 * time.Minute)
				if n := tries.Load(); n != c.tries {
					t.Errorf("%d attempts while this process held the key, want %d", n, c.tries)
				}
				if n := len(told[Waiting](b.events)); n == 0 || n > 60 {
					t.Errorf("told %d times in ten minutes that it waits", n)
				}
				released := time.Now()
				b.release(l)
				l = <-got
				if since := time.Since(released); since > 0 {
					t.Errorf("acquired %v after the release", since)
				}
				// One that is lost keeps the waiter no longer than its validity.
				b.faults.Set(storetest.Extend, storetest.Fail(store.ErrUnavailable))
				go func() { got <- b.acquire("k") }()
				m := <-got
				if l.Err() == nil {
					t.Error("two valid leases")
				}
				b.faults.Heal()
				b.release(m)
			})
		})
	}
}

// releaser is an Observer that releases leases while it is told of events, and takes the time.
type releaser struct {
	mu     sync.Mutex
	leases Leases
	calls  map[string]int
	slow   []string
}

func (r *releaser) Observe(ctx context.Context, e Event) {
	r.mu.Lock()
	leases := r.leases
	r.mu.Unlock()
	if _, ok := e.(Acquired); ok {
		return
	}
	began := time.Now()
	_ = leases.Release(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	name := fmt.Sprintf("%T", e)
	r.calls[name]++
	if since := time.Since(began); since > 0 {
		r.slow = append(r.slow, fmt.Sprintf("%s: %v", name, since))
	}
}

// An Observer may release the lease that it is told of, and others: nothing waits for it.
func TestObserverMayRelease(t *testing.T) {
	acquire := func(b *bed, r *releaser, keys ...string) Leases {
		ls, err := b.locks.AcquireAll(b.ctx, keys...)
		if err != nil {
			t.Fatal(err)
		}
		r.mu.Lock()
		r.leases = ls
		r.mu.Unlock()
		return ls
	}
	for event, scene := range map[string]func(*bed, Leases){
		"holdfast.Released": func(b *bed, ls Leases) { _ = ls[0].Release(b.ctx) },
		"holdfast.Extended": func(*bed, Leases) { time.Sleep(DefaultTTL / 2) },
		"holdfast.AtRisk": func(b *bed, _ Leases) {
			b.faults.Set(storetest.Extend, storetest.Fail(store.ErrUnavailable))
			time.Sleep(DefaultTTL / 2)
		},
		"holdfast.Lost": func(b *bed, ls Leases) { // by the answer to their extension
			for _, l := range ls {
				_ = b.mem.Lose(l.Key())
			}
			time.Sleep(DefaultTTL / 2)
		},
		"holdfast.Lost by MaxHold": func(*bed, Leases) { time.Sleep(DefaultTTL / 2) },
	} {
		t.Run(event, func(t *testing.T) {
			r := &releaser{}
			o := Options{Observer: r}
			event, reason, _ := strings.Cut(event, " ")
			if reason != "" {
				o.MaxHold = DefaultTTL / 5
			}
			bubble(t, o, func(b *bed) {
				r.calls, r.slow = map[string]int{}, nil
				scene(b, acquire(b, r, "a", "b", "c"))
				time.Sleep(DefaultTTL)
				synctest.Wait()
				r.mu.Lock()
				defer r.mu.Unlock()
				if n := r.calls["holdfast.Released"]; n != 3 {
					t.Errorf("told of %d releases of 3 leases", n)
				}
				if r.calls[event] == 0 || len(r.slow) > 0 {
					t.Errorf("told %v; releases took %v", r.calls, r.slow)
				}
			})
		})
	}
}

// timedStore notes when leases are extended.
type timedStore struct {
	*memstore.Store
	mu    sync.Mutex
	sent  []time.Time
	fails bool
}

func (s *timedStore) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	s.mu.Lock()
	for range claims {
		s.sent = append(s.sent, time.Now())
	}
	fails := s.fails
	s.mu.Unlock()
	if fails {
		results := make([]store.Result, len(claims))
		for i := range results {
			results[i].Err = store.ErrUnavailable
		}
		return results
	}
	return s.Store.ExtendMany(ctx, claims)
}

// most returns the largest number of extensions in one second, and all of them.
func (s *timedStore) most(from time.Time) (most, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := 0
	for i, at := range s.sent {
		for at.Sub(s.sent[first]) >= time.Second {
			first++
		}
		if at.Sub(from) >= time.Second {
			most, all = max(most, i-first+1), all+1
		}
	}
	return most, all
}

// Leases that were all granted at once, or have all recovered at once, are not all extended
// at once: the store has an even load, of no more extensions than one per lease and period.
func TestLoadIsSpread(t *testing.T) {
	const leases, every = 10_000, 10 * time.Second
	synctest.Test(t, func(t *testing.T) {
		s := &timedStore{Store: memstore.New()}
		k := locker(t, s, &Options{TTL: 3 * every, ExtendEvery: every})
		var ls Leases
		for i := range leases {
			l, err := k.Acquire(context.Background(), fmt.Sprint("k", i))
			if err != nil {
				t.Fatal(err)
			}
			ls = append(ls, l)
		}
		check := func(what string) {
			t.Helper()
			from, periods := time.Now(), 5
			time.Sleep(time.Duration(periods) * every)
			most, all := s.most(from)
			t.Logf("%s: %d extensions in the busiest second, %d in all", what, most, all)
			if most > leases/10*11/10 { // every is ten seconds
				t.Errorf("%s: %d extensions in one second", what, most)
			}
			if all > periods*leases*11/10 || all < periods*leases*8/10 {
				t.Errorf("%s: %d extensions of %d leases in %d periods", what, all, leases, periods)
			}
			if err := ls.Err(); err != nil {
				t.Fatal(err)
			}
		}
		check("granted at once")
		s.mu.Lock()
		s.fails = true
		s.mu.Unlock()
		time.Sleep(every)
		s.mu.Lock()
		s.fails = false
		s.mu.Unlock()
		time.Sleep(2 * every) // those that are overdue come first
		check("recovered at once")
		if err := ls.Release(context.Background()); err != nil {
			t.Fatal(err)
		}
	})
}

// A store that panics in the caller's goroutine leaves neither the line nor the lease shut.
func TestStoreThatPanics(t *testing.T) {
	promptBubble(t, Options{}, func(b *bed) {
		boom := func(context.Context, func(context.Context) error) error { panic("boom") }
		panics := func(call func()) {
			defer func() {
				if recover() != "boom" {
					t.Error("no panic")
				}
			}()
			call()
		}
		b.faults.Next(storetest.Try, boom)
		panics(func() { _, _ = b.locks.Acquire(b.ctx, "k") })
		synctest.Wait() // the claim is given back
		l, err := b.locks.TryAcquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		b.faults.Next(storetest.Release, boom)
		panics(func() { _ = l.Release(b.ctx) })
		b.release(l)
		if b.holder("k") != "" || len(b.locks.f.lines) > 0 {
			t.Error("something is left")
		}
	})
}

// Others that come while the first one of a key tries by itself are served after it, and by
// its claim where it gives up.
func TestOthersBehindTheFirst(t *testing.T) {
	promptBubble(t, Options{}, func(b *bed) {
		for _, gives := range []string{"acquires", "gives up", "fails"} {
			ctx, cancel := context.WithCancel(b.ctx)
			fault := storetest.Delay(time.Second)
			if gives == "fails" {
				fault = storetest.Fail(store.ErrInvalid)
			}
			b.faults.Next(storetest.Try, func(ctx context.Context, call func(context.Context) error) error {
				time.Sleep(time.Second)
				return fault(ctx, call)
			})
			var wg sync.WaitGroup
			wg.Go(func() {
				l, err := b.locks.Acquire(ctx, "k")
				switch gives {
				case "acquires":
					if err != nil {
						t.Error(err)
						return
					}
					time.Sleep(time.Second)
					b.release(l)
				case "gives up":
					want(t, err, context.Canceled)
				case "fails":
					want(t, err, ErrInvalid)
				}
			})
			synctest.Wait()
			for range 3 {
				wg.Go(func() {
					l := b.acquire("k")
					time.Sleep(time.Second)
					b.release(l)
				})
				wg.Go(func() {
					if l, err := b.locks.TryAcquire(b.ctx, "k"); err == nil {
						b.release(l)
					} else if !errors.Is(err, ErrHeld) && gives != "fails" {
						t.Error(err)
					}
				})
			}
			if gives == "gives up" {
				time.AfterFunc(1500*time.Millisecond, cancel)
			}
			began := time.Now()
			wg.Wait()
			cancel()
			if since := time.Since(began); since > 7*time.Second {
				t.Errorf("%s: all of it took %v", gives, since)
			}
			synctest.Wait()
			if b.holder("k") != "" || len(b.locks.f.lines) > 0 {
				t.Errorf("%s: something is left", gives)
			}
		}
	})
}

// The limit of a release is its own, and the values are the caller's.
func TestContextOfRelease(t *testing.T) {
	type name struct{}
	bubble(t, Options{TTL: 10 * time.Second}, func(b *bed) {
		for i := range 50 {
			ctx, cancel := context.WithCancel(context.WithValue(b.ctx, name{}, i))
			cancel()
			called := false
			b.faults.Next(storetest.Release, func(c context.Context, call func(context.Context) error) error {
				called = true
				deadline, ok := c.Deadline()
				if left := time.Until(deadline); !ok || left > 2*time.Second || left < 2*time.Second*15/16 {
					t.Errorf("limited to %v", left)
				}
				if c.Value(name{}) != i || c.Err() != nil {
					t.Errorf("value %v, %v", c.Value(name{}), c.Err())
				}
				child, stop := context.WithCancel(c)
				defer stop()
				if child.Value(name{}) != i {
					t.Error("a child lacks the value")
				}
				return call(c)
			})
			l := b.acquire("k")
			if err := l.Release(ctx); err != nil || !called {
				t.Fatal(err, called)
			}
			time.Sleep(30 * time.Millisecond)
		}
		l := b.acquire("k") // and it ends, for a reason of its own
		b.faults.Next(storetest.Release, func(c context.Context, _ func(context.Context) error) error {
			<-c.Done()
			return context.Cause(c)
		})
		ctx, cancel := context.WithCancelCause(b.ctx)
		cancel(errors.New("the caller's"))
		began := time.Now()
		want(t, l.Release(ctx), ErrUncertain, context.DeadlineExceeded)
		if since := time.Since(began); since > 2*time.Second {
			t.Errorf("after %v", since)
		}
		b.release(l)
	})
}

// A lease that has little left when it arrives is lost in time as well.
func TestLossOfALateGrant(t *testing.T) {
	bubble(t, Options{TTL: 10 * time.Second, NoExtend: true}, func(b *bed) {
		began := time.Now()
		b.faults.Next(storetest.Try, func(ctx context.Context, call func(context.Context) error) error {
			err := call(ctx)
			time.Sleep(9700 * time.Millisecond)
			return err
		})
		<-b.acquire("k").Done()
		if since := time.Since(began); since != store.Validity(10*time.Second, 0) {
			t.Errorf("lost after %v", since)
		}
	})
}

// blocker is an Observer that does what it must not: it does not return.
type blocker struct {
	freed chan struct{}
	told  atomic.Int64
}

func (b *blocker) Observe(_ context.Context, e Event) {
	if _, ok := e.(Acquired); !ok {
		b.told.Add(1)
		<-b.freed
	}
}

// An Observer that blocks holds up extensions, and no loss.
func TestObserverThatBlocks(t *testing.T) {
	o := &blocker{}
	bubble(t, Options{Observer: o}, func(b *bed) {
		o.freed = make(chan struct{})
		b.faults.Set(storetest.Extend, storetest.Hang)
		var lost sync.WaitGroup
		for i := range 3 * maxInFlight {
			l, began := b.acquire(fmt.Sprint("k", i)), time.Now()
			lost.Go(func() {
				<-l.Done()
				if since := time.Since(began); since != validity {
					t.Errorf("lost after %v, not %v", since, validity)
				}
			})
			time.Sleep(DefaultTTL / 20)
		}
		lost.Wait()
		if o.told.Load() == 0 {
			t.Error("it was told nothing")
		}
		close(o.freed)
		time.Sleep(time.Minute)
	})
}
