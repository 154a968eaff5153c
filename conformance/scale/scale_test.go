package scale

import (
	"context"
	"errors"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

func TestMain(m *testing.M) { kit.Main(m, nil) }

// Many held leases that extend themselves: at most one goroutine for a hundred, also while a
// node is frozen, and none is lost.
func TestManyLeases(t *testing.T) {
	servertest.CanPause(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		many, ttl := kit.Count(2000, 10000), 15*time.Second
		if !kit.Soak() {
			ttl = 3 * time.Second
		}
		servers := kit.Servers(t, n)
		s := kit.Store(t, c, redlock.Options{NodeTimeout: time.Second}, kit.Addrs(servers))
		extended := &extensions{}
		locks := kit.Locker(t, s, holdfast.Options{TTL: ttl, Observer: extended})
		kit.Warm(t, locks)
		goroutines, heap := runtime.NumGoroutine(), heapNow()

		bound := goroutines + 10000/100 // a hundredth of the full count, also with fewer leases

		leases := acquireMany(t, locks, many)
		if left := kit.Settled(goroutines, ttl/10); left > bound {
			t.Errorf("%d goroutines beside the %d of an idle store", left-goroutines, goroutines)
		}
		t.Logf("%d leases: %d goroutines beside the %d of an idle store, %d bytes of heap for each lease",
			many, runtime.NumGoroutine()-goroutines, goroutines, (int64(heapNow())-int64(heap))/int64(many))

		most := watch(2 * ttl / 3)
		t.Logf("while they extend: at the most %d more goroutines", most-goroutines)
		if most > bound {
			t.Errorf("%d leases have %d goroutines while they extend", many, most-goroutines)
		}
		if n > 1 {
			servers[0].Stop()
			most = watch(4 * ttl / 3)
			servers[0].Cont()
			t.Logf("while one node is frozen for %v: at the most %d more goroutines", 4*ttl/3, most-goroutines)
			if most > bound {
				t.Errorf("%d leases have %d goroutines while a node is frozen", many, most-goroutines)
			}
		}
		for _, l := range leases {
			if err := l.Err(); err != nil {
				t.Fatalf("a lease that was extended all the time: %v", err)
			}
		}
		if extended.Load() < int64(many) {
			t.Errorf("%d extensions of %d leases: the test shows nothing", extended.Load(), many)
		}
		releaseMany(t, leases)
		kit.NoKeys(t, ttl, servers)
	})
}

// What leases cost that are held on one node: a KiB of heap each, no goroutine, and one request
// in each period, not all of them at once.
func TestCostOfHeldLeases(t *testing.T) {
	kit.Each(t, []int{1}, func(t *testing.T, c kit.Client, n int) {
		many, every := kit.Count(2000, 10000), 10*time.Second
		if !kit.Soak() {
			every = 2 * time.Second
		}
		servers := kit.Servers(t, n)
		s := kit.Store(t, c, redlock.Options{NodeTimeout: time.Second}, kit.Addrs(servers))
		locks := kit.Locker(t, s, holdfast.Options{TTL: 3 * every, ExtendEvery: every})
		releaseMany(t, acquireMany(t, locks, many/2)) // the client has its connections and buffers
		goroutines := kit.Settled(0, time.Second)
		heap := heapNow()

		leases := acquireMany(t, locks, many)
		left := kit.Settled(goroutines, time.Second) - goroutines
		const buffers = 512 << 10 // of connections that the client opens meanwhile
		each := (int64(heapNow()) - int64(heap) - buffers) / int64(many)
		t.Logf("%d leases: %d bytes of heap each beside buffers, %d more goroutines in all", many, each, left)
		if each > 1024 {
			t.Errorf("a lease takes %d bytes of heap", each)
		}
		if left > 16 {
			t.Errorf("%d leases have %d goroutines", many, left)
		}

		const periods = 3
		before, most := kit.Scripts(t, servers[0]), 0.0
		for range periods * int(every/time.Second) {
			sent, began := kit.Scripts(t, servers[0]), time.Now()
			time.Sleep(time.Second)
			most = max(most, float64(kit.Scripts(t, servers[0])-sent)/time.Since(began).Seconds())
		}
		all, even := kit.Scripts(t, servers[0])-before, float64(many)/every.Seconds()
		t.Logf("%d requests in %d periods of %v; at the most %.0f in a second, where %.0f are even", all, periods, every, most, even)
		if all > periods*many*11/10 || all < periods*many*8/10 {
			t.Errorf("%d leases were extended by %d requests in %d periods", many, all, periods)
		}
		if most > 2*even { // many times as many where they all come together
			t.Errorf("%.0f requests in a second, where %.0f are even", most, even)
		}
		for _, l := range leases {
			if err := l.Err(); err != nil {
				t.Fatalf("a lease that was extended all the time: %v", err)
			}
		}
		releaseMany(t, leases)
	})
}

// extensions counts extensions, and keeps nothing.
type extensions struct{ atomic.Int64 }

func (e *extensions) Observe(_ context.Context, event holdfast.Event) {
	if _, ok := event.(holdfast.Extended); ok {
		e.Add(1)
	}
}

func acquireMany(t *testing.T, locks *holdfast.Locker, many int) []*holdfast.Lease {
	leases := make([]*holdfast.Lease, many)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < many; i += 8 {
				l, err := locks.Acquire(t.Context(), "k"+strconv.Itoa(i))
				if err != nil {
					t.Error(err)
					return
				}
				leases[i] = l
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
	return leases
}

func releaseMany(t *testing.T, leases []*holdfast.Lease) {
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < len(leases); i += 8 {
				if err := leases[i].Release(t.Context()); err != nil && !errors.Is(err, holdfast.ErrUncertain) {
					t.Errorf("Release: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// watch looks at the number of goroutines for d and answers the largest.
func watch(d time.Duration) (most int) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Millisecond) {
		most = max(most, runtime.NumGoroutine())
	}
	return most
}

func heapNow() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}
