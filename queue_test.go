package holdfast

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// process is a store value that writes down the calls of its claims, and complains of one that
// asks for the key while another claim of it holds that.
type process struct {
	store.Store
	name    string
	journal *journal
	holds   atomic.Bool
}

type journal struct {
	mu    sync.Mutex
	calls []string
}

func (j *journal) add(process, call string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.calls = append(j.calls, process+" "+call)
}

// served returns which processes were granted the key, in order.
func (j *journal) served() (names []string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, call := range j.calls {
		var name, what string
		if _, _ = fmt.Sscan(call, &name, &what); what == "granted" {
			names = append(names, name)
		}
	}
	return names
}

func (p *process) Claim(key string, o store.ClaimOptions) store.Claim {
	return &recordedClaim{p, p.Store.Claim(key, o)}
}

type recordedClaim struct {
	p *process
	store.Claim
}

func (c *recordedClaim) Try(ctx context.Context) (store.Grant, error) {
	if c.p.holds.Load() {
		c.p.journal.add(c.p.name, "asks for what it holds")
	}
	g, err := c.Claim.Try(ctx)
	if err == nil {
		c.p.holds.Store(true)
		c.p.journal.add(c.p.name, "granted")
	}
	return g, err
}

func (c *recordedClaim) Wait(ctx context.Context, held *store.HeldError) error {
	if c.p.holds.Load() {
		c.p.journal.add(c.p.name, "waits for what it holds")
	}
	return c.Claim.(store.Waiter).Wait(ctx, held)
}

func (c *recordedClaim) Release(ctx context.Context) error {
	err := c.Claim.Release(ctx)
	c.p.holds.Store(false)
	return err
}

// promptProcess is one whose calls return by themselves.
type promptProcess struct{ *process }

func (promptProcess) Prompt() {}

// The queue is fair between processes, however many goroutines each has, and a process asks the
// store nothing for those that wait behind a lease of its own.
func TestProcessesTakeTurns(t *testing.T) {
	for _, prompt := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			mem, j := memstore.New(), &journal{}
			began := time.Now()
			var wg sync.WaitGroup
			const hold, turns = 10 * time.Millisecond, 5
			for name, goroutines := range map[string]int{"a": 3, "b": 30} {
				p := &process{Store: mem.Peer(), name: name, journal: j}
				var s store.Store = p
				if prompt {
					s = promptProcess{p}
				}
				k := locker(t, s, nil)
				for range goroutines {
					wg.Go(func() {
						for range turns {
							if err := k.Do(context.Background(), "k", func(context.Context, *Lease) error {
								time.Sleep(hold)
								return nil
							}); err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			wg.Wait()
			served := j.served()
			if len(served) != 33*turns || time.Since(began) != 33*turns*hold {
				t.Errorf("served %d times in %v: the key was idle between two holders", len(served), time.Since(began))
			}
			for i := 1; i < 2*3*turns; i++ { // as long as both wait
				if served[i] == served[i-1] {
					t.Errorf("served %v", served[:2*3*turns])
					break
				}
			}
			for _, call := range j.calls {
				if call != "a granted" && call != "b granted" {
					t.Error(call)
				}
			}
		})
	}
}

// Waiters of a store whose calls return by themselves wait in their own goroutines.
func TestPromptWaitersNeedNoGoroutine(t *testing.T) {
	promptBubble(t, Options{}, func(b *bed) {
		holder, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		before := runtime.NumGoroutine()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				l := b.acquire("k")
				synctest.Wait()
				b.release(l)
			})
		}
		synctest.Wait()
		if n := runtime.NumGoroutine() - before; n != 10 {
			t.Errorf("%d goroutines for 10 waiters", n)
		}
		_ = holder.Release(b.ctx)
		wg.Wait()
	})
}

// Waiters that leave one after another, each the first of its line, pass on one claim, which
// waits on: the store hears of the last one only.
func TestClaimIsPassedOn(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		holder, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		tries, releases := count(b.faults, storetest.Try), count(b.faults, storetest.Release)
		var wg sync.WaitGroup
		for i := range 5 {
			ctx, cancel := context.WithTimeout(b.ctx, time.Duration(i+1)*time.Second/2)
			defer cancel()
			wg.Go(func() {
				began := time.Now()
				_, err := b.locks.Acquire(ctx, "k")
				want(t, err, context.DeadlineExceeded, ErrHeld)
				if since := time.Since(began); since != time.Duration(i+1)*time.Second/2 {
					t.Errorf("waiter %d left after %v", i, since)
				}
			})
			synctest.Wait()
		}
		time.Sleep(2250 * time.Millisecond)
		if tries.Load() != 1 || releases.Load() != 0 {
			t.Errorf("%d attempts and %d withdrawals before the last one left", tries.Load(), releases.Load())
		}
		wg.Wait()
		synctest.Wait()
		if tries.Load() != 1 || releases.Load() != 1 || len(b.locks.f.lines) > 0 {
			t.Errorf("%d attempts, %d withdrawals, %d lines at the end", tries.Load(), releases.Load(), len(b.locks.f.lines))
		}
		_ = holder.Release(b.ctx)
	})
}

// A waiter that inherits the claim late in the holder's time tries when that ends, and not a
// whole ttl later.
func TestHeirComesAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, mem := context.Background(), memstore.New()
		if _, err := locker(t, mem.Peer(), &Options{TTL: 10 * time.Second, NoExtend: true}).Acquire(ctx, "k"); err != nil {
			t.Fatal(err)
		}
		k := locker(t, sleepers{mem}, nil)
		began := time.Now()
		first, cancel := context.WithTimeout(ctx, 9*time.Second)
		defer cancel()
		go func() { _, _ = k.Acquire(first, "k") }()
		synctest.Wait()
		l, err := k.Acquire(ctx, "k")
		if since := time.Since(began); err != nil || since > 11*time.Second {
			t.Fatalf("after %v: %v", since, err)
		}
		_ = l.Release(ctx)
	})
}

// sleepers is a prompt store whose claims sleep until the end that they are told of.
type sleepers struct{ *memstore.Store }

func (s sleepers) Claim(key string, o store.ClaimOptions) store.Claim {
	return sleeper{s.Store.Claim(key, o)}
}

type sleeper struct{ store.Claim }

func (sleeper) Wait(ctx context.Context, held *store.HeldError) error {
	return storetest.Delay(held.Holder.TTL)(ctx, func(context.Context) error { return nil })
}

// A wake-up that reaches a waiter which leaves at that moment is its heir's: there is no second.
func TestWakeUpIsPassedOn(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		holder, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(b.ctx)
		b.faults.Next(storetest.Wait, func(ctx context.Context, call func(context.Context) error) error {
			err := call(ctx)
			cancel()
			b.faults.Set(storetest.Wait, storetest.Delay(time.Hour))
			return err
		})
		began := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			if l, err := b.locks.Acquire(ctx, "k"); err == nil { // not where the store is prompt
				b.release(l)
			}
		})
		synctest.Wait()
		wg.Go(func() {
			l := b.acquire("k")
			if since := time.Since(began); since > 0 {
				t.Errorf("acquired after %v", since)
			}
			b.release(l)
		})
		synctest.Wait()
		_ = holder.Release(b.ctx)
		wg.Wait()
	})
}

// The first waiter leaves in the very moment of a wake-up: its heir comes, not the next timer.
func TestLeavingAtAWakeUp(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		other := b.other(nil)
		for i := range 300 {
			holder, err := other.Acquire(b.ctx, "k")
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(b.ctx)
			var wg sync.WaitGroup
			wg.Go(func() {
				if l, err := b.locks.Acquire(ctx, "k"); err == nil {
					b.release(l)
				}
			})
			synctest.Wait()
			var released time.Time
			wg.Go(func() {
				l := b.acquire("k")
				if since := time.Since(released); since > 0 {
					t.Errorf("round %d: acquired %v after the release", i, since)
				}
				b.release(l)
			})
			synctest.Wait()
			released = time.Now()
			wg.Go(func() { _ = holder.Release(b.ctx) })
			wg.Go(func() {
				for range i % 7 {
					runtime.Gosched()
				}
				cancel()
			})
			wg.Wait()
			cancel()
		}
	})
}

// A release that hangs keeps the waiters of its process from asking for no longer than it may
// take, whoever sends it.
func TestHungReleaseKeepsNobody(t *testing.T) {
	racedBubble(t, Options{TTL: 10 * time.Second, MaxHold: time.Second}, func(b *bed) {
		freed := make(chan struct{})
		b.faults.Set(storetest.Release, storetest.HangUntil(freed))
		began := time.Now()
		b.acquire("k")
		l := b.acquire("k")
		if since := time.Since(began); since > 11*time.Second {
			t.Errorf("acquired after %v", since)
		}
		b.faults.Heal()
		close(freed)
		b.release(l)
	})
}

// The bound of a Wait leaves a claim the time that its place in the queue gives it.
func TestWaitLimit(t *testing.T) {
	for _, ttl := range []time.Duration{math.MinInt64, -1, 0, time.Second, 15 * time.Second, 30 * time.Second} {
		for place := range 3000 {
			held := &HeldError{Holder: store.Holder{TTL: ttl}, Place: place}
			rank := time.Duration(place - 1)
			least := max(max(0, ttl)+time.Minute, max(ttl, (rank+1)*time.Second)*5/4)
			if got := waitLimit(held); got < least {
				t.Fatalf("ttl %v, place %d: %v, want at least %v", ttl, place, got, least)
			}
		}
	}
	for _, held := range []*HeldError{{Holder: store.Holder{TTL: math.MaxInt64}, Place: math.MaxInt}, {Place: math.MinInt}} {
		if got := waitLimit(held); got < time.Minute || got > 100*365*24*time.Hour {
			t.Errorf("%+v: %v", held, got)
		}
	}
}

// A waiter's place in the queue is told with each attempt, and how long it has waited; the
// attempts are few.
func TestPlaceIsTold(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		other := b.other(nil)
		holder, err := other.Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 3 { // processes that come before
			k := b.other(nil)
			wg.Go(func() {
				l, err := k.Acquire(b.ctx, "k")
				if err != nil {
					t.Error(err)
					return
				}
				time.Sleep(time.Minute)
				_ = l.Release(b.ctx)
			})
			synctest.Wait()
		}
		wg.Go(func() { b.release(b.acquire("k")) })
		time.Sleep(time.Minute)
		_ = holder.Release(b.ctx)
		wg.Wait()
		var places []int
		var waited time.Duration
		events := told[Waiting](b.events)
		for _, e := range events {
			var held *HeldError
			if !errors.As(e.Err, &held) || held.Place != e.Place || e.Waited < waited {
				t.Errorf("told %+v", e)
			}
			waited = e.Waited
			places = append(places, e.Place)
		}
		if len(events) > 30 { // in four minutes
			t.Errorf("told %d times", len(events))
		}
		if distinct := slices.Compact(slices.Clone(places)); !slices.Equal(distinct, []int{4, 3, 2, 1}) {
			t.Errorf("told places %v", places)
		}
		if e := told[Acquired](b.events); len(e) != 1 || e[0].Waited != 4*time.Minute {
			t.Errorf("told %+v", e)
		}
	})
}
