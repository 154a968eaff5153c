package holdfast

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// many acquires n leases, spread over the time.
func (b *bed) many(n int, over time.Duration) []*Lease {
	b.t.Helper()
	ls := make([]*Lease, n)
	for i := range ls {
		ls[i] = b.acquire(fmt.Sprint("key-", i))
		time.Sleep(over / time.Duration(n))
	}
	return ls
}

// goroutines counts those of this process, which has nothing else to do.
func goroutines() int { runtime.GC(); return runtime.NumGoroutine() }

// 10,000 leases cost at most a goroutine per 100 of them, and are extended in batches; also
// while the store does not answer, and afterwards those that are left go on.
func TestManyLeases(t *testing.T) {
	const leases = 10_000
	racedBubble(t, Options{Observer: noObserver{}}, func(b *bed) {
		before := goroutines()
		var m0, m1 runtime.MemStats
		runtime.ReadMemStats(&m0)
		ls := b.many(leases, 10*time.Second)
		if n := goroutines() - before; n > leases/100 {
			t.Errorf("%d goroutines for %d leases", n, leases)
		}
		runtime.ReadMemStats(&m1)
		t.Logf("%d goroutines, %d bytes of heap per lease", goroutines()-before, (m1.HeapAlloc-m0.HeapAlloc)/leases)
		most := 0
		batches := count(b.faults, storetest.Extend)
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			most = max(most, runtime.NumGoroutine()-before)
		}
		perRound := float64(batches.Load()) / (60 / 5)
		if perRound > 200 {
			t.Errorf("%.0f exchanges for each extension of %d leases", perRound, leases)
		}
		for _, l := range ls {
			if l.Err() != nil {
				t.Fatal(l.Err())
			}
		}
		// Frozen for a while, with calls that ignore their limits.
		freed := make(chan struct{})
		b.faults.Set(storetest.Extend, storetest.HangUntil(freed))
		for range 80 {
			time.Sleep(100 * time.Millisecond)
			most = max(most, runtime.NumGoroutine()-before)
		}
		if most > leases/100 {
			t.Errorf("%d goroutines while the store was frozen", most)
		}
		b.faults.Heal()
		close(freed)
		time.Sleep(time.Minute)
		for _, l := range ls {
			if l.Err() != nil {
				t.Fatal(l.Err())
			}
		}
		// Frozen for good: each is lost by its own clock.
		b.faults.Set(storetest.Extend, storetest.Hang)
		time.Sleep(DefaultTTL)
		for _, l := range ls {
			if !errors.Is(l.Err(), ErrLost) {
				t.Fatalf("not lost: %v", l.Err())
			}
		}
		time.Sleep(DefaultTTL / 3) // as long as a call that was on its way may hang
		synctest.Wait()
		if n := goroutines() - before; n > maxInFlight {
			t.Errorf("%d goroutines are left", n)
		}
	})
}

type noObserver struct{}

func (noObserver) Observe(context.Context, Event) {}

// A store without batches is asked by a fixed number of goroutines.
func TestManyLeasesOneByOne(t *testing.T) {
	plainBubble(t, Options{}, func(b *bed) {
		var mu sync.Mutex
		running, most := 0, 0
		b.faults.Set(storetest.Extend, func(ctx context.Context, call func(context.Context) error) error {
			mu.Lock()
			running++
			most = max(most, running)
			mu.Unlock()
			defer func() { mu.Lock(); running--; mu.Unlock() }()
			time.Sleep(10 * time.Millisecond)
			return call(ctx)
		})
		ls := b.many(1000, 0)
		time.Sleep(time.Minute)
		for _, l := range ls {
			if l.Err() != nil {
				t.Fatal(l.Err())
			}
		}
		mu.Lock()
		if most > maxInFlight || most < 2 {
			t.Errorf("%d extensions at a time", most)
		}
		mu.Unlock()
		_ = Leases(ls).Release(b.ctx)
	})
}

// Extensions that hang hold up neither the loss nor the extension of other leases.
func TestHungBatchesHoldNobodyUp(t *testing.T) {
	plainBubble(t, Options{}, func(b *bed) {
		freed := make(chan struct{})
		var hang []storetest.Fault
		for range maxInFlight - 1 {
			hang = append(hang, storetest.HangUntil(freed))
		}
		stuck := b.many(maxInFlight-1, 0)
		b.faults.Next(storetest.Extend, hang...)
		time.Sleep(DefaultTTL / 3)
		synctest.Wait()
		good := b.many(20, 0)
		began := time.Now()
		for _, l := range stuck {
			<-l.Done()
		}
		if since := time.Since(began); since > DefaultTTL*2/3 {
			t.Errorf("lost after %v more", since)
		}
		time.Sleep(time.Minute)
		for i, l := range good {
			if l.Err() != nil {
				t.Fatal(i, l.Err())
			}
		}
		close(freed)
		time.Sleep(time.Second)
		for _, l := range stuck {
			want(t, l.Err(), ErrLost)
			want(t, l.Release(b.ctx), ErrLost)
		}
		_ = Leases(good).Release(b.ctx)
	})
}

// Leases of different terms share the scheduler, and each is extended in its own time.
func TestMixedTTLs(t *testing.T) {
	bubble(t, Options{TTL: time.Minute}, func(b *bed) {
		var ls Leases
		for _, ttl := range []time.Duration{100 * time.Millisecond, 30 * time.Second, time.Second, 300 * time.Millisecond} {
			k, err := b.locks.With(Options{TTL: ttl})
			if err != nil {
				t.Fatal(err)
			}
			l, err := k.Acquire(b.ctx, ttl.String())
			if err != nil {
				t.Fatal(err)
			}
			ls = append(ls, l, b.acquire("long "+ttl.String()))
			time.Sleep(time.Second)
		}
		time.Sleep(5 * time.Minute)
		if ls.Err() != nil {
			t.Fatal(ls.Err())
		}
		extended := map[string]int{}
		for _, e := range told[Extended](b.events) {
			extended[e.Key]++
		}
		if n := extended["30s"]; n < 29 || n > 35 {
			t.Errorf("a ttl of 30 s was extended %d times in 5 minutes", n)
		}
		if n := extended["1s"]; n < 890 || n > 1050 {
			t.Errorf("a ttl of 1 s was extended %d times in 5 minutes", n)
		}
		if err := ls.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// A batch that the store answers in part is not taken for confirmed.
func TestShortAnswerOfABatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shortBatches{Store: memstore.New()}
		events := &record{}
		k := locker(t, s, &Options{Observer: events})
		l, err := k.Acquire(context.Background(), "k")
		if err != nil {
			t.Fatal(err)
		}
		<-l.Done()
		want(t, l.Err(), ErrLost, ErrUncertain)
		if len(told[Extended](events)) > 0 {
			t.Error("it counts as extended")
		}
		_ = l.Release(context.Background())
	})
}

type shortBatches struct{ *memstore.Store }

func (shortBatches) ExtendMany(context.Context, []store.Claim) []store.Result { return nil }

// No goroutine and no timer is left, however short the leases are (LEK-06, LEK-07): the
// bubble fails where one is.
func TestShortLeasesLeaveNothing(t *testing.T) {
	bubble(t, Options{TTL: 20 * time.Second, Observer: noObserver{}}, func(b *bed) {
		before := goroutines()
		for i := range 20_000 {
			b.release(b.acquire(fmt.Sprint("k", i%7)))
			if i%100 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		synctest.Wait()
		if n := goroutines() - before; n > 0 {
			t.Errorf("%d goroutines are left", n)
		}
		f := b.locks.f
		if len(f.lines) > 0 || len(f.sched.ends.leases) > 0 || len(f.sched.dues.leases) > 0 || len(f.jobs) > 0 || f.jobRuns > 0 {
			t.Error("something is left")
		}
	})
}

// MaxHold gives many keys back at a time, and a store that hangs gathers no goroutines.
func TestMaxHoldOfMany(t *testing.T) {
	racedBubble(t, Options{MaxHold: 10 * time.Second, Observer: noObserver{}}, func(b *bed) {
		before := goroutines()
		ls := b.many(2000, 0)
		freed := make(chan struct{})
		b.faults.Set(storetest.Release, storetest.HangUntil(freed))
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if n := goroutines() - before; n > maxInFlight {
			t.Errorf("%d goroutines", n)
		}
		want(t, Leases(ls).Err(), ErrMaxHold)
		b.faults.Heal()
		close(freed)
		synctest.Wait()
		for _, l := range ls {
			if b.holder(l.Key()) != "" {
				t.Fatalf("%q is held", l.Key())
			}
		}
	})
}

// A lease that ends in the instant of its grant leaves nothing to the scheduler.
func TestLeaseThatEndsAtOnce(t *testing.T) {
	k, err := New(memstore.New(), &Options{TTL: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ended := 0
	for i := range 3000 {
		left := time.Duration(i % 200 * 100)
		g := &granting{k: k, key: "k", ttl: time.Second, claim: k.f.store.Claim("k", store.ClaimOptions{TTL: time.Second}),
			grant: store.Grant{Token: Token(i + 1), Owner: "o", TTL: time.Second},
			sent:  k.f.clk.Now().Add(left - store.Validity(time.Second, 0))}
		k.f.mu.Lock()
		l, err := k.f.accept(g)
		k.f.mu.Unlock()
		if err == nil {
			<-l.Done()
			ended++
		}
	}
	if ended == 0 {
		t.Fatal("no lease was ever valid")
	}
	for range 1000 { // the last one may still be on its way out
		k.f.sched.mu.Lock()
		n := len(k.f.sched.ends.leases)
		k.f.sched.mu.Unlock()
		if n == 0 {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Errorf("of %d leases, some that have ended are still to be extended", ended)
}
