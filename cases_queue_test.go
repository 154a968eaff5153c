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

	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// HRD-01: the holder hangs for ever, and a thousand goroutines wait. Each is told in its own
// time, meanwhile they cost the library no goroutine and the store a few requests, and nothing
// of them is left. A holder whose hold is bounded does not hang for ever.
func TestWaitersOfAHungHolder(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		const many, patience = 1000, time.Minute
		hung := b.other(&Options{MaxHold: 3 * patience})
		holder, err := hung.Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		tries := count(b.faults, storetest.Try)
		before := runtime.NumGoroutine()
		var wg sync.WaitGroup
		for range many {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(b.ctx, patience)
				defer cancel()
				began := time.Now()
				_, err := b.locks.Acquire(ctx, "k")
				want(t, err, context.DeadlineExceeded, ErrHeld)
				if waited := time.Since(began); waited != patience {
					t.Errorf("a waiter with %v of patience was told after %v", patience, waited)
				}
			})
		}
		for range 5 {
			time.Sleep(patience / 6)
			synctest.Wait()
			if extra := runtime.NumGoroutine() - before - many; extra > 5 {
				t.Errorf("%d goroutines beside those that wait", extra)
			}
		}
		wg.Wait()
		synctest.Wait()
		if n := tries.Load(); n > 10 {
			t.Errorf("%d attempts in %v by %d waiters of one process", n, patience, many)
		}
		if n := len(b.locks.f.lines); n != 0 {
			t.Errorf("%d lines are left", n)
		}
		l := b.acquire("k")
		want(t, holder.Err(), ErrLost, ErrMaxHold)
		b.release(l)
	})
}

// FAR-03: a holder dies without a release. Its waiter, with patience for much longer, has the
// key when the ttl ends, whether the store wakes it or it polls.
func TestExpiryWakesTheWaiter(t *testing.T) {
	for name, in := range map[string]func(*testing.T, Options, func(*bed)){"queue": bubble, "polling": plainBubble} {
		t.Run(name, func(t *testing.T) {
			in(t, Options{}, func(b *bed) {
				if _, err := b.other(&Options{TTL: time.Second, NoExtend: true}).Acquire(b.ctx, "k"); err != nil {
					t.Fatal(err)
				}
				began := time.Now()
				ctx, cancel := context.WithTimeout(b.ctx, 20*time.Second)
				defer cancel()
				l, err := b.locks.Acquire(ctx, "k")
				if err != nil {
					t.Fatal(err)
				}
				if waited := time.Since(began); waited < time.Second || waited > 1010*time.Millisecond {
					t.Errorf("it has the key after %v", waited)
				}
				b.release(l)
			})
		})
	}
}

// FAR-04: whatever a store says of the time that remains, a waiter neither asks without a
// pause nor sleeps for ever: it has the key soon after that is free.
func TestRemainingTimesThatCannotBe(t *testing.T) {
	for name, in := range map[string]func(*testing.T, Options, func(*bed)){"queue": bubble, "polling": plainBubble} {
		for _, left := range []time.Duration{math.MinInt64, -2 * time.Millisecond, -time.Millisecond, -1, 0, 1, time.Millisecond,
			100 * 365 * 24 * time.Hour, math.MaxInt64} {
			for _, endless := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%d/%v", name, left, endless), func(t *testing.T) {
					in(t, Options{}, func(b *bed) {
						refuse := storetest.Fail(&HeldError{Holder: store.Holder{TTL: left, NoTTL: endless}})
						ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
						defer cancel()
						var asked atomic.Int64
						var freed atomic.Pointer[time.Time]
						b.faults.Set(storetest.Try, func(c context.Context, call func(context.Context) error) error {
							if freed.Load() != nil {
								return call(c)
							}
							if asked.Add(1) > 100000 { // else the bubble's time would stand still
								cancel()
							}
							return refuse(c, call)
						})
						var wg sync.WaitGroup
						wg.Go(func() {
							l, err := b.locks.Acquire(ctx, "k")
							if err != nil {
								t.Error(err)
								return
							}
							if waited := time.Since(*freed.Load()); waited > 2*pollMax {
								t.Errorf("it has the key %v after that was free", waited)
							}
							b.release(l)
						})
						const held = 3 * time.Second
						time.Sleep(held)
						synctest.Wait()
						// That next to nothing remains is believed, again and again.
						if n := time.Duration(asked.Load()); n < held/(2*pollMax) || n > 5*held/time.Millisecond {
							t.Errorf("asked %d times in %v", n, held)
						}
						now := time.Now()
						freed.Store(&now)
						wg.Wait()
					})
				})
			}
		}
	}
}

// contender acquires k again and again until end, holds it for a while each time, and keeps how
// often and how long it waited.
type contender struct {
	grants  int
	longest time.Duration
}

func (c *contender) loop(t *testing.T, k *Locker, end time.Time, hold time.Duration) {
	for time.Now().Before(end) {
		began := time.Now()
		l, err := k.Acquire(context.Background(), "k")
		if err != nil {
			t.Error(err)
			return
		}
		if time.Now().Before(end) { // not those that are served when others have left
			c.grants++
		}
		c.longest = max(c.longest, time.Since(began))
		time.Sleep(hold)
		if err := l.Release(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

// PRI-02, FAR-05: there is no priority. Fifty processes contend, one of which calls itself
// important. Nobody waits for longer than all others hold the key once, and all have it as
// often, give or take one.
func TestNobodyIsPreferred(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		const many, hold = 50, 50 * time.Millisecond
		all := make([]contender, many)
		end := time.Now().Add(time.Minute)
		var wg sync.WaitGroup
		for i := range all {
			o := Options{Label: fmt.Sprint("usual ", i)}
			if i == many-1 {
				o.Label = "important"
			}
			wg.Go(func() { all[i].loop(t, b.other(&o), end, hold) })
			synctest.Wait()
		}
		wg.Wait()
		least, most := all[0].grants, all[0].grants
		for i, c := range all {
			least, most = min(least, c.grants), max(most, c.grants)
			if c.longest > (many-1)*hold {
				t.Errorf("process %d waited for %v", i, c.longest)
			}
		}
		if least < 20 || most-least > 1 {
			t.Errorf("granted from %d to %d times", least, most)
		}
	})
}

// FAR-05: a process is served as often as another one, however many goroutines of it wait, and
// its goroutines share alike. So a waiter's turn comes at the latest when every process has
// held the key once for each waiter before it in its own process.
func TestManyGoroutinesGainNothing(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		const hold = 50 * time.Millisecond
		crowds := []int{1, 3, 20}
		end := time.Now().Add(time.Minute)
		all := make([][]contender, len(crowds))
		var wg sync.WaitGroup
		for p, n := range crowds {
			k := b.other(nil)
			all[p] = make([]contender, n)
			for i := range n {
				wg.Go(func() { all[p][i].loop(t, k, end, hold) })
				synctest.Wait()
			}
		}
		wg.Wait()
		var served []int
		for p, n := range crowds {
			sum := 0
			for i, c := range all[p] {
				sum += c.grants
				// Two rounds are the start, where processes come one after another.
				if most := time.Duration(n*len(crowds)+2) * hold; c.longest > most {
					t.Errorf("goroutine %d of %d waited for %v, more than %v", i, n, c.longest, most)
				}
			}
			served = append(served, sum)
		}
		if least, most := slices.Min(served), slices.Max(served); least < 100 || most-least > 3 {
			t.Errorf("processes with %v goroutines were granted %v times", crowds, served)
		}
	})
}

// REN-01: what is refused inside Do takes nothing from the outer lease and leaves no place in
// a queue: another process is kept out until the end, and then has the key at once. Without the
// context of the lease a second Acquire waits like anyone's, for as long as its own says.
func TestRefusedInsideLeavesTheOuter(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		rival := b.other(nil)
		var wg sync.WaitGroup
		var outerEnds time.Time
		err := b.locks.Do(b.ctx, "k", func(ctx context.Context, l *Lease) error {
			wg.Go(func() {
				l, err := rival.Acquire(b.ctx, "k")
				if err != nil {
					t.Error(err)
					return
				}
				if at := time.Now(); outerEnds.IsZero() || at != outerEnds {
					t.Errorf("the rival has the key at %v, the outer call ends at %v", at, outerEnds)
				}
				_ = l.Release(b.ctx)
			})
			synctest.Wait()
			for range 3 {
				want(t, b.locks.Do(ctx, "k", func(context.Context, *Lease) error { return nil }), ErrAlreadyHeld)
				if _, err := b.other(nil).TryAcquire(b.ctx, "k"); !errors.Is(err, ErrHeld) || errors.Is(err, ErrAlreadyHeld) {
					t.Errorf("another process is told %v", err)
				}
			}
			short, cancel := context.WithTimeout(b.ctx, time.Second)
			defer cancel()
			_, err := b.locks.Acquire(short, "k")
			want(t, err, context.DeadlineExceeded, ErrHeld)
			not(t, err, ErrAlreadyHeld)
			if l.Err() != nil || b.holder("k") != l.Owner() {
				t.Error("the outer lease has ended")
			}
			outerEnds = time.Now()
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		wg.Wait()
		if b.holder("k") != "" || len(b.locks.f.lines) != 0 {
			t.Error("something is left")
		}
	})
}

// REN-04: a lease that another goroutine has released is the next waiter's, and stays so
// however often it is released again.
func TestSecondReleaseFreesNobody(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		next := make(chan *Lease, 1)
		go func() {
			l, err := b.other(nil).Acquire(b.ctx, "k")
			if err != nil {
				t.Error(err)
			}
			next <- l
		}()
		synctest.Wait()
		go func() {
			if err := l.Release(b.ctx); err != nil {
				t.Error(err)
			}
		}()
		n := <-next
		for range 3 {
			b.release(l)
			if _, err := b.other(nil).TryAcquire(b.ctx, "k"); !errors.Is(err, ErrHeld) || n.Err() != nil || b.holder("k") != n.Owner() {
				t.Fatalf("after another release: %v, %v, held by %q", err, n.Err(), b.holder("k"))
			}
		}
		b.release(n)
	})
}
