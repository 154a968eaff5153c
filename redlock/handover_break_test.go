package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// sleeper has the machine of s sleep: Go's clock stands still, and the nodes go on.
func sleeper(s *Store, fs []*fakeNode) (sleep func(d time.Duration)) {
	var slept atomic.Int64
	start := time.Now()
	s.clock = clock.Clock{Boot: func() time.Duration { return time.Since(start) + time.Duration(slept.Load()) }}
	pause := pauser(fs)
	return func(d time.Duration) { slept.Add(int64(d)); pause(d) }
}

// pauser has only the nodes go on.
func pauser(fs []*fakeNode) (pause func(d time.Duration)) {
	return func(d time.Duration) {
		for _, f := range fs {
			f.mu.Lock()
			f.ahead += d
			for key, v := range f.votes {
				f.votes[key] = fakeVote{v.owner, v.until.Add(-d)}
			}
			f.mu.Unlock()
		}
	}
}

// A machine that slept while its claim waited, and was handed the key meanwhile, hears of that when
// it wakes: at a moment at which the reservation has ended. The same of a machine that was paused,
// none of whose clocks goes on.
func TestHandedOverInSleep(t *testing.T) {
	for i := range 4 {
		n := 1 + i/2*2
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 3, n)
			sleep := pauser(fs)
			if i%2 == 0 {
				sleep = sleeper(stores[1], fs)
			}
			holder := hold(t, stores[0])
			c, got := await(t, stores[1])
			for _, f := range fs {
				f.mu.Lock()
				channel := "holdfast:" + stores[1].inbox.name
				deliver := f.subs[channel]
				f.subs[channel] = func(text string) { time.Sleep(time.Millisecond); deliver(text) }
				f.mu.Unlock()
			}
			sleep(3 * time.Second)
			holder.Release(t.Context())
			sleep(5 * time.Second)
			other := hold(t, stores[2])
			time.Sleep(2 * time.Millisecond)
			synctest.Wait()
			c.mu.Lock()
			if c.held {
				t.Errorf("%d nodes: two hold the key", n)
			}
			c.mu.Unlock()
			other.Release(t.Context())
			if h := <-got; h.err != nil {
				t.Error(h.err)
			}
			c.Release(t.Context())
		})
	}
}

// The same, where one of two nodes was heard of before the machine slept.
func TestSleepBetweenMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 3, 3)
		sleep := sleeper(stores[1], fs)
		holder := hold(t, stores[0])
		c, got := await(t, stores[1])
		stores[1].rtt.Store(int64(50 * time.Millisecond)) // the grace
		for i, f := range fs[:2] {
			f.mu.Lock()
			channel := "holdfast:" + stores[1].inbox.name
			deliver := f.subs[channel]
			f.subs[channel] = func(text string) { time.Sleep(time.Duration(1+4*i) * time.Millisecond); deliver(text) }
			f.mu.Unlock()
		}
		fs[2].mu.Lock()
		fs[2].dumb = true
		fs[2].mu.Unlock()
		held := make(chan struct{})
		fs[1].set(func(op string) error { // the second node's release is late
			if op == "release" {
				<-held
			}
			return nil
		})
		go holder.Release(t.Context())
		time.Sleep(2 * time.Millisecond)
		sleep(3 * time.Second)
		close(held)
		time.Sleep(6 * time.Millisecond)
		synctest.Wait()
		c.mu.Lock()
		if c.handed {
			t.Error("granted, and the reservation of a node that made the quorum has ended")
		}
		c.mu.Unlock()
		<-got
		c.Release(t.Context())
	})
}

// mailNode delivers messages late, twice, or not at all.
type mailNode struct{ *fakeNode }

func (f mailNode) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	return f.fakeNode.Subscribe(ctx, channel, func(text string) {
		if rand.N(40) == 0 {
			return
		}
		if rand.N(10) == 0 {
			go func() {
				time.Sleep(rand.N(500 * time.Millisecond))
				if rand.N(4) == 0 {
					time.Sleep(rand.N(5 * time.Second))
				}
				deliver(text)
			}()
			if rand.N(2) == 0 {
				return
			}
		}
		time.Sleep(rand.N(300 * time.Microsecond))
		deliver(text)
	}, up)
}

// keep holds a lease as a Locker does, and may not come in time, or die.
func keepUp(c *claim, g store.Grant, x *exclusion, hold time.Duration) {
	next := c.ttl / 3
	if g.ExtendIn > 0 {
		next = g.ExtendIn
	}
	for end := time.Now().Add(hold); time.Now().Before(end); next = c.ttl / 3 {
		if rand.N(30) == 0 {
			next += rand.N(400 * time.Millisecond)
		}
		time.Sleep(min(next, time.Until(end)))
		if time.Now().Before(end) {
			if _, err := c.Extend(context.Background()); errors.Is(err, store.ErrLost) {
				return
			}
			c.mu.Lock()
			until := time.Now().Add(c.s.clock.Until(c.until))
			c.mu.Unlock()
			x.mu.Lock()
			if x.holder == c {
				x.until = until
			}
			x.mu.Unlock()
		}
	}
}

// Messages that are late, doubled or lost beside requests that are, holders that are stopped or
// die, and waiters that give up: one holds the key at a time, tokens grow, and nothing is left.
func TestHandOversInChaos(t *testing.T) {
	seeds := 6
	if os.Getenv("HOLDFAST_SOAK") == "1" {
		seeds = 120
	}
	for seed := range seeds {
		nodes := []int{1, 3, 5}[seed%3]
		ttl := []time.Duration{100 * time.Millisecond, 2 * time.Second, 30 * time.Second}[seed/3%3]
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				fs, list := fakes(nodes)
				subscribable(fs)
				t.Cleanup(settle)
				var stores []*Store
				for i := range fs {
					list[i] = mailNode{fs[i]}
				}
				for range 6 {
					stores = append(stores, fakeStore(t, Options{}, list...))
				}
				for _, f := range fs {
					f.ahead = (rand.N(2*time.Second) - time.Second) * time.Duration(seed%4)
					f.set(chaotic)
				}
				var x exclusion
				var handed atomic.Int32
				var wg sync.WaitGroup
				for i := range 2 * len(stores) {
					wg.Go(func() {
						for range 15 {
							time.Sleep(rand.N(30 * time.Millisecond))
							ctx, cancel := context.WithCancel(context.Background())
							if rand.N(8) == 0 {
								ctx, cancel = context.WithTimeout(context.Background(), rand.N(300*time.Millisecond))
							}
							c := brief(stores[i/2], "k")
							c.ttl, c.least = ttl, ttl/4
							if ttl > time.Second {
								c.least = 100 * time.Millisecond
							}
							began := time.Now()
							g, err := acquire(ctx, c)
							for err != nil && ctx.Err() == nil {
								time.Sleep(20 * time.Millisecond)
								g, err = acquire(ctx, c)
							}
							cancel()
							if err != nil {
								c.Release(context.Background())
								continue
							}
							if g.ExtendIn > 0 {
								handed.Add(1)
							}
							x.granted(t, c, g, time.Since(began))
							keepUp(c, g, &x, []time.Duration{0, rand.N(8 * time.Millisecond), rand.N(60 * time.Millisecond), rand.N(time.Second)}[rand.N(4)])
							if rand.N(40) == 0 {
								x.died(c)
								continue
							}
							x.mu.Lock()
							if x.holder == c {
								x.holder = nil
							}
							x.mu.Unlock()
							c.Release(context.Background())
						}
					})
				}
				wg.Wait()
				t.Logf("%d nodes, ttl %v: %d grants, %d by hand-over, longest wait %v", nodes, ttl, x.grants, handed.Load(), x.waited)
				if x.waited > 15*max(ttl, 2*time.Second)+10*time.Second {
					t.Errorf("somebody waits for %v", x.waited)
				}
				for _, c := range x.dead {
					c.Release(context.Background())
				}
				time.Sleep(ttl)
				nothingLeft(t, fs, stores)
			})
		})
	}
}

// A claim whose grant nobody has taken in time waits on as one of the queue: it neither has the key
// twice, nor blocks it, nor is it forgotten. One that leaves then hands on.
func TestGrantTakenTooLate(t *testing.T) {
	for _, n := range []int{1, 3} {
		for _, leave := range []bool{false, true} {
			for _, late := range []time.Duration{time.Millisecond, 560 * time.Millisecond, 700 * time.Millisecond, 10 * time.Second} {
				bubble(t, func(t *testing.T) {
					fs, stores := queued(t, 3, n)
					holder := hold(t, stores[0])
					c := brief(stores[1], "k")
					var held *store.HeldError
					for range 2 {
						if _, err := c.Try(t.Context()); !errors.As(err, &held) {
							t.Fatal(err)
						}
						ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
						c.Wait(ctx, held)
						cancel()
					}
					other, got := await(t, stores[2])
					woken := make(chan error)
					go func() { woken <- c.Wait(t.Context(), held) }()
					synctest.Wait()
					holder.Release(t.Context())
					if err := <-woken; err != nil {
						t.Fatal(err)
					}
					if !c.handed {
						t.Fatal("not handed over")
					}
					time.Sleep(late)
					if leave {
						began, most := time.Now(), 50*time.Millisecond
						if fs[0].owner("k") == "" { // nothing is there to be handed on
							most = firstAsk
						}
						c.Release(t.Context())
						if h := <-got; h.err != nil || time.Since(began) > most {
							t.Errorf("%d nodes, %v late: %v after %v", n, late, h.err, time.Since(began))
						}
						other.Release(t.Context())
						nothingLeft(t, fs, stores)
						return
					}
					gone := fs[0].owner("k") != c.attempt.owner
					g, err := c.Try(t.Context())
					switch {
					case gone && err == nil:
						other.mu.Lock()
						if other.held && !stores[2].clock.Passed(other.until) {
							t.Errorf("%d nodes, %v late: two hold the key: %+v", n, late, g)
						}
						other.mu.Unlock()
					case !gone && err != nil:
						t.Errorf("%d nodes, %v late: %v", n, late, err)
					}
					if err == nil {
						c.Release(t.Context())
						<-got
						other.Release(t.Context())
					} else {
						<-got
						other.Release(t.Context())
						if _, err := acquire(t.Context(), c); err != nil {
							t.Error(err)
						}
						c.Release(t.Context())
					}
					nothingLeft(t, fs, stores)
				})
			}
		}
	}
}

// farNode is a node at a distance.
type farNode struct {
	*fakeNode
	away time.Duration // one way
}

func (f farNode) Run(ctx context.Context, calls ...Call) []Reply {
	time.Sleep(f.away)
	defer time.Sleep(f.away)
	return f.fakeNode.Run(ctx, calls...)
}

func (f farNode) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	return f.fakeNode.Subscribe(ctx, channel, func(text string) { time.Sleep(f.away); deliver(text) }, up)
}

// A waiter that is far away is granted a reservation only where its extension comes in time.
func TestHandOverFarAway(t *testing.T) {
	handovers := 0
	for away := 5 * time.Millisecond; away < 100*time.Millisecond; away += time.Millisecond {
		bubble(t, func(t *testing.T) {
			fs, list := fakes(3)
			subscribable(fs)
			t.Cleanup(settle)
			near := fakeStore(t, Options{}, list...)
			for i, f := range fs {
				list[i] = farNode{f, away}
			}
			far := fakeStore(t, Options{NodeTimeout: time.Second}, list...)
			short := func(s *Store) *claim {
				return s.Claim("k", store.ClaimOptions{TTL: 4 * time.Second, Wait: true, Least: 100 * time.Millisecond}).(*claim)
			}
			holder, c := short(near), short(far)
			if _, err := holder.Try(t.Context()); err != nil {
				t.Fatal(err)
			}
			got := make(chan handed, 1)
			go func() {
				g, err := acquire(t.Context(), c)
				got <- handed{g, err}
			}()
			time.Sleep(3 * time.Second)
			holder.Release(t.Context())
			h := <-got
			if h.err != nil {
				t.Fatal(h.err)
			}
			if h.g.ExtendIn > 0 {
				handovers++
				time.Sleep(h.g.ExtendIn + 50*time.Millisecond) // on a slow machine
				if _, err := c.Extend(t.Context()); err != nil {
					t.Errorf("%v away, granted for %v: %v", away, h.g.TTL, err)
				}
			}
			c.Release(t.Context())
		})
	}
	if handovers == 0 {
		t.Error("no claim was granted by a hand-over")
	}
}

// Nothing gathers over many hand-overs, of leases that are extended and of such that are not.
func TestHandOversLeaveNothing(t *testing.T) {
	count := 1000
	if os.Getenv("HOLDFAST_SOAK") == "1" {
		count = 100_000
	}
	for _, n := range []int{1, 3} {
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 2, n)
			c, granted := hold(t, stores[0]), 0
			var goroutines int
			for i := range count {
				next := brief(stores[(i+1)%2], "k")
				got := make(chan handed, 1)
				go func() {
					g, err := acquire(t.Context(), next)
					got <- handed{g, err}
				}()
				time.Sleep(5 * time.Millisecond)
				synctest.Wait()
				if i%2 == 0 {
					if _, err := c.Extend(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				c.Release(t.Context())
				h := <-got
				if h.err != nil {
					t.Fatal(h.err)
				}
				if h.g.ExtendIn > 0 {
					granted++
				}
				c = next
				if i == count/10 {
					goroutines = runtime.NumGoroutine()
				}
			}
			for i, s := range stores {
				s.inbox.mu.Lock()
				if len(s.inbox.claims) > 2 || s.inbox.waiting > 0 {
					t.Errorf("store %d: %d owners of %d claims", i, len(s.inbox.claims), s.inbox.waiting)
				}
				s.inbox.mu.Unlock()
			}
			if now := runtime.NumGoroutine(); now > goroutines+10 {
				t.Errorf("%d goroutines, %d after a tenth", now, goroutines)
			}
			if granted < count*9/10 {
				t.Errorf("%d of %d by hand-over", granted, count)
			}
			c.Release(t.Context())
			nothingLeft(t, fs, stores)
		})
	}
}
