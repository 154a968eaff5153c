package holdfast

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// Several processes with several goroutines each, over stores that lose requests and
// replies, delay and fail: no two leases are valid at a time, tokens grow, and a lost lease
// is told to its holder.
func TestExclusionUnderFaults(t *testing.T) {
	span := 2 * time.Minute // of the bubble's time
	if os.Getenv("HOLDFAST_SOAK") != "" {
		span = time.Hour
	}
	racedBubble(t, Options{TTL: 300 * time.Millisecond}, func(b *bed) {
		keys := []string{"a", "b", "c"}
		var mu sync.Mutex
		valid := map[string]*Lease{}
		last := map[string]Token{}
		grants, losses, refusals := 0, 0, 0
		enter := func(l *Lease) {
			mu.Lock()
			defer mu.Unlock()
			if old := valid[l.Key()]; old != nil && old.Err() == nil && l.Err() == nil {
				t.Errorf("two valid leases on %q: tokens %v and %v", l.Key(), old.Token(), l.Token())
			}
			if l.Token() <= last[l.Key()] {
				t.Errorf("token %v after %v", l.Token(), last[l.Key()])
			}
			valid[l.Key()], last[l.Key()] = l, l.Token()
			grants++
		}
		var wg sync.WaitGroup
		stop := time.Now().Add(span)
		injected := 0
		for i := range 4 {
			s, faults := storetest.NewFaults(b.mem.Peer())
			if i%2 == 0 {
				s = prompt{s, s.(store.BatchExtender), s.(store.Adopter)}
			}
			k := locker(t, s, &Options{TTL: 300 * time.Millisecond})
			wg.Go(func() {
				kinds := []storetest.Fault{storetest.LoseReply, storetest.LoseRequest, storetest.Hang, storetest.Delay(50 * time.Millisecond), storetest.DelayReply(400 * time.Millisecond), storetest.Duplicate}
				for time.Now().Before(stop) {
					time.Sleep(rand.N(20 * time.Millisecond))
					op := []storetest.Op{storetest.Try, storetest.Extend, storetest.Extend, storetest.Release, storetest.Wait}[rand.N(5)]
					faults.Next(op, kinds[rand.N(len(kinds))])
				}
				faults.Heal()
				mu.Lock()
				for _, op := range []storetest.Op{storetest.Try, storetest.Extend, storetest.Release} {
					injected += faults.Hits(op)
				}
				mu.Unlock()
			})
			for range 4 {
				wg.Go(func() {
					for time.Now().Before(stop) {
						ctx, cancel := context.WithTimeout(b.ctx, rand.N(2*time.Second))
						var l *Lease
						var err error
						if rand.N(3) == 0 {
							l, err = k.TryAcquire(ctx, keys[rand.N(3)])
						} else {
							l, err = k.Acquire(ctx, keys[rand.N(3)])
						}
						cancel()
						if err != nil {
							mu.Lock()
							refusals++
							mu.Unlock()
							time.Sleep(rand.N(10 * time.Millisecond))
							continue
						}
						enter(l)
						select {
						case <-l.Done():
						case <-time.After(rand.N(500 * time.Millisecond)):
						}
						lost := errors.Is(l.Err(), ErrLost)
						err = l.Release(b.ctx)
						if lost {
							want(t, err, ErrLost)
							mu.Lock()
							losses++
							mu.Unlock()
						}
					}
				})
			}
		}
		wg.Wait()
		time.Sleep(10 * time.Second)
		for _, key := range keys {
			if b.holder(key) != "" {
				t.Errorf("%q is held at the end", key)
			}
		}
		t.Logf("%d grants, %d losses, %d refusals, %d faults", grants, losses, refusals, injected)
		if grants < 100 || losses == 0 || refusals == 0 || injected < 100 {
			t.Error("too little happened")
		}
	})
}

// The same in real time, for the race detector, without faults.
func TestRealTime(t *testing.T) {
	mem := memstore.New()
	var wg sync.WaitGroup
	counter := 0 // guarded by the lease alone
	const holders, rounds = 8, 100
	for i := range holders {
		k, err := New(mem.Peer(), &Options{TTL: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			wg.Go(func() {
				for range rounds {
					err := k.Do(context.Background(), "k", func(ctx context.Context, l *Lease) error {
						seen := counter
						runtime.Gosched()
						counter = seen + 1
						return l.Err()
					})
					if err != nil {
						t.Error(i, err)
					}
				}
			})
		}
	}
	wg.Wait()
	if counter != 2*holders*rounds {
		t.Errorf("counted %d of %d", counter, 2*holders*rounds)
	}
}
