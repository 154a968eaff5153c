package fair

import (
	"context"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
)

// FAR-05: one client is far away, and twenty that are near take the lock all the time. It is
// overtaken by those who came while its request was on its way, and by nobody afterwards.
func TestSlowClientIsServed(t *testing.T) {
	for _, n := range []int{1, 5} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			const fast, away = 20, 50 * time.Millisecond // one way
			servers := kit.Servers(t, n)
			near := crowd(t, rig.Rueidis, servers, fast, storeOptions, holdfast.Options{})
			proxies := kit.Proxies(t, servers)
			var granted atomic.Int64 // to those that are near
			var refusedAt atomic.Int64
			s := rig.Store(t, storeOptions, rig.Nodes(t, rig.Rueidis, proxies...)...)
			far := kit.Locker(t, s, holdfast.Options{Observer: observer(func(e holdfast.Event) {
				if _, waits := e.(holdfast.Waiting); waits {
					refusedAt.CompareAndSwap(-1, granted.Load())
				}
			})})
			kit.Warm(t, far)
			for _, p := range proxies {
				p.Delay(away)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			var wg sync.WaitGroup
			for _, locks := range near {
				wg.Go(func() {
					for ctx.Err() == nil {
						lease, err := locks.Acquire(ctx, "k")
						if err != nil {
							continue
						}
						granted.Add(1)
						_ = lease.Release(context.WithoutCancel(ctx))
					}
				})
			}
			limit, stop := context.WithTimeout(ctx, patience)
			defer stop()
			turns, overtakers, most := 0, 0, 0
			var longest time.Duration
			for i := range kit.Count(6, 100) {
				refusedAt.Store(-1)
				began := time.Now()
				lease, err := far.Acquire(limit, "k")
				if err != nil {
					t.Errorf("the slow client is not served: %v", err)
					break
				}
				if at := refusedAt.Load(); at >= 0 && i > 1 { // it has subscribed and knows how far away it is
					k := int(granted.Load() - at)
					turns, overtakers, most = turns+1, overtakers+k, max(most, k)
					longest = max(longest, time.Since(began))
				}
				_ = lease.Release(context.WithoutCancel(ctx))
			}
			cancel()
			wg.Wait()
			t.Logf("the slow one waited %d times, %v at the longest, and had the key after %.1f others (%d at the most); the fast ones had it %d times",
				turns, longest.Round(time.Millisecond), float64(overtakers)/float64(max(turns, 1)), most, granted.Load())
			if turns == 0 {
				t.Error("the slow client never waited: the test shows nothing")
			}
			if overtakers > 2*turns*fast {
				t.Errorf("%d others were served while it waited %d times: more than each of %d twice", overtakers, turns, fast)
			}
		})
	}
}

type observer func(holdfast.Event)

func (o observer) Observe(_ context.Context, e holdfast.Event) { o(e) }
