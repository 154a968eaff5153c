package faults

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
)

// One of five nodes is frozen, or black-holed: no call waits for it, and a loop of acquire,
// extend and release does not gather goroutines, with go-redis at its defaults too. R1, class 2,
// SLO-01.
func TestFrozenNodeSlowsNobody(t *testing.T) {
	servertest.CanPause(t)
	for _, fault := range []kit.Fault{kit.Faults[1], kit.Faults[3]} {
		for _, c := range kit.Clients {
			t.Run(fault.Name+"/"+c.Name, func(t *testing.T) {
				b := newBed(t, c, 5, holdfast.Options{})
				kit.Warm(t, b.locks)
				rounds := kit.Count(300, 3000)
				well := b.loop(t, rounds)
				b.fault(t, fault, 1)
				stop := peak()
				ill := b.loop(t, rounds)
				most := stop()
				b.hit(t, fault, 1)
				for _, op := range []string{"acquire", "extend", "release"} {
					if longest := kit.Quantile(ill[op], 1); longest >= nodeTimeout {
						t.Errorf("one %s took %v: it waited for the node that is %s", op, longest, fault.Name)
					}
					t.Logf("%-7s median %v well, %v with one node %s (%.2f); p99 %v and %v", op,
						kit.Median(well[op]).Round(time.Microsecond), kit.Median(ill[op]).Round(time.Microsecond), fault.Name,
						float64(kit.Median(ill[op]))/float64(kit.Median(well[op])),
						kit.Quantile(well[op], 0.99).Round(time.Microsecond), kit.Quantile(ill[op], 0.99).Round(time.Microsecond))
				}
				t.Logf("%d goroutines of the library at the most, in %d rounds", most, rounds)
				if most > 150 {
					t.Errorf("%d goroutines gathered in %d rounds", most, rounds)
				}
			})
		}
	}
}

// loop acquires, extends and releases, and answers how long each call took.
func (b *bed) loop(t *testing.T, rounds int) map[string][]time.Duration {
	t.Helper()
	times := map[string][]time.Duration{}
	for range rounds {
		var lease *holdfast.Lease
		var err error
		do := func(op string, f func()) {
			times[op] = append(times[op], took(f))
			if err != nil {
				t.Fatalf("%s: %v", op, err)
			}
		}
		do("acquire", func() { lease, err = b.locks.TryAcquire(t.Context(), "k") })
		do("extend", func() { err = lease.Extend(t.Context()) })
		do("release", func() { err = lease.Release(t.Context()) })
	}
	return times
}

// peak watches the library's goroutines until stop, which answers the largest.
func peak() (stop func() int) {
	var most atomic.Int64
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, 8<<20)
		for {
			most.Store(max(most.Load(), int64(kit.LibraryGoroutines(buf))))
			select {
			case <-end:
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	return func() int {
		close(end)
		<-ended
		return int(most.Load())
	}
}
