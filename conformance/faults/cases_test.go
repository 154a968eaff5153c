package faults

import (
	"context"
	"errors"
	"math/rand/v2"
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
	"github.com/holdfast-go/holdfast/store"
)

// QUO-04: one of three nodes refuses connections. Acquired by the two others, with the error
// of the third told to the Observer; with two refused nothing is left on the third.
func TestRefusedNodeIsTold(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 3, holdfast.Options{})
			b.proxies[0].Refuse()
			lease := kit.Acquire(t, b.locks, "k")
			servertest.Eventually(t, ttl, func() error {
				for _, e := range kit.Select[holdfast.Node](b.events) {
					if e.Node == b.proxies[0].Addr() && e.Err != nil {
						return nil
					}
				}
				return errors.New("the Observer was not told of the node that refuses")
			})
			if err := lease.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			b.proxies[1].Refuse()
			b.proxies[1].Reset()
			_, err := b.locks.TryAcquire(t.Context(), "k")
			if len(kit.Faulty(t, err)) < 2 {
				t.Errorf("the error does not tell of two nodes: %v", err)
			}
			kit.NoKeys(t, ttl/4, b.servers[2:])
		})
	}
}

// QUO-06: two clients contend for one key on five nodes, round after round. Every round ends
// with one holder, however often the votes are split.
func TestTwoContend(t *testing.T) {
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			b := newBed(t, c, 5, holdfast.Options{})
			contenders := []store.Store{b.store(t, kit.Addrs(b.servers)), b.store(t, kit.Addrs(b.servers))}
			rounds := kit.Count(100, 1000)
			var split, refused atomic.Int64
			var rest int
			for i := range rounds {
				key := "k" + strconv.Itoa(i)
				var holders atomic.Int64
				var wg sync.WaitGroup
				claims := make([]store.Claim, len(contenders))
				won := make([]bool, len(contenders))
				for j, s := range contenders {
					claims[j] = s.Claim(key, store.ClaimOptions{TTL: ttl})
					wg.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), ttl)
						defer cancel()
						for holders.Load() == 0 && ctx.Err() == nil {
							_, err := claims[j].Try(ctx)
							var held *store.HeldError
							var votes *redlock.QuorumError
							switch {
							case err == nil:
								won[j] = true
								holders.Add(1)
							case errors.As(err, &held) && !errors.As(err, &votes):
								refused.Add(1)
								_ = claims[j].(store.Waiter).Wait(ctx, held)
							case errors.As(err, &held):
								split.Add(1)
								_ = claims[j].(store.Waiter).Wait(ctx, held)
							case ctx.Err() == nil:
								time.Sleep(time.Millisecond)
							}
						}
					})
				}
				wg.Wait()
				if n := holders.Load(); n != 1 {
					t.Fatalf("round %d ended with %d holders", i, n)
				}
				for j, claim := range claims {
					if err := claim.Release(t.Context()); err != nil {
						t.Errorf("round %d: Release of %d (won: %v): %v", i, j, won[j], err)
					}
					if won[j] {
						rest++
					}
				}
			}
			t.Logf("%d rounds, each with one holder; %d times refused, %d times the votes were split", rest, refused.Load(), split.Load())
		})
	}
}

// QUO-07: one of three nodes is down for long, then comes back empty. Everything goes on in
// time, nobody storms it with connections, and it joins in again by itself.
func TestNodeDownForLong(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 3, holdfast.Options{})
			kit.Warm(t, b.locks)
			down := time.Duration(kit.Count(3, 120)) * time.Second
			b.servers[0].Kill()
			before := b.proxies[0].Counts().Connections
			var times []time.Duration
			for end := time.Now().Add(down); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				times = append(times, took(func() { b.once(t) }))
			}
			tried := b.proxies[0].Counts().Connections - before
			t.Logf("%d leases with one node down for %v: median %v, longest %v; %d connections tried", len(times), down,
				kit.Median(times).Round(time.Microsecond), kit.Quantile(times, 1).Round(time.Microsecond), tried)
			if longest := kit.Quantile(times, 1); longest >= nodeTimeout {
				t.Errorf("a lease took %v with one node down", longest)
			}
			// go-redis opens up to 20 for one request: it retries, and dials five times.
			if tried == 0 || tried > int64(150*down.Seconds()) {
				t.Errorf("%d connections to a node that was down for %v", tried, down)
			}
			b.servers[0].Restart(kit.Old())
			servertest.Eventually(t, ttl, func() error {
				lease := kit.Acquire(t, b.locks, "back")
				defer func() { _ = lease.Release(t.Context()) }()
				if len(kit.Keys(t, b.servers[0])) == 0 {
					return errors.New("the node that is back has no votes")
				}
				return nil
			})
		})
	}
}

func (b *bed) once(t *testing.T) {
	t.Helper()
	lease, err := b.locks.TryAcquire(t.Context(), "k")
	if err == nil {
		err = lease.Extend(t.Context())
	}
	if err == nil {
		err = lease.Release(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// CTX-05, class 14: Acquire is cancelled at a random moment within its first two milliseconds. Where it
// answers an error, no lease is left and nothing extends one.
func TestCancelledAcquireLeavesNothing(t *testing.T) {
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		const short = 500 * time.Millisecond
		b := newBed(t, c, n, holdfast.Options{TTL: short})
		kit.Warm(t, b.locks)
		rounds, granted := kit.Count(200, 5000), 0
		for i := range rounds {
			ctx, cancel := context.WithCancel(t.Context())
			timer := time.AfterFunc(time.Duration(rand.Int64N(int64(2*time.Millisecond))), cancel)
			lease, err := b.locks.Acquire(ctx, "k"+strconv.Itoa(i%50))
			timer.Stop()
			cancel()
			switch {
			case err == nil:
				granted++
				if err := lease.Release(t.Context()); err != nil && !errors.Is(err, holdfast.ErrLost) {
					t.Errorf("Release: %v", err)
				}
			case lease != nil || !errors.Is(err, context.Canceled):
				t.Fatalf("a cancelled Acquire answers %v, %v", lease, err)
			}
		}
		if granted == 0 || granted == rounds {
			t.Logf("%d of %d were granted: the moment was never right", granted, rounds)
		}
		kit.NoKeys(t, 4*short, b.servers) // 2 s
		before := b.scripts(t)
		time.Sleep(short)
		if after := b.scripts(t); after != before {
			t.Errorf("%d requests are sent for leases that do not exist", after-before)
		}
		t.Logf("%d of %d were granted before they were cancelled", granted, rounds)
	})
}

func (b *bed) scripts(t *testing.T) (n int) {
	for _, s := range b.servers {
		n += kit.Scripts(t, s)
	}
	return n
}

// LEK-01: waiting for a key that is held costs next to no requests and little processor time.
func TestWaitingIsCheap(t *testing.T) {
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			b := newBed(t, c, 1, holdfast.Options{})
			held := kit.Acquire(t, b.other(t, holdfast.Options{TTL: 30 * time.Second, NoExtend: true}), "k")
			kit.Warm(t, b.locks)
			d := time.Duration(kit.Count(3, 25)) * time.Second
			cpu, before := kit.CPU(), b.scripts(t)
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			if _, err := b.locks.Acquire(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, holdfast.ErrHeld) {
				t.Fatalf("Acquire: %v, want DeadlineExceeded and ErrHeld", err)
			}
			asked, used := b.scripts(t)-before, kit.CPU()-cpu
			t.Logf("a wait of %v: %d requests, %v of processor time (%.2f %% of one core)", d, asked, used.Round(time.Millisecond), 100*float64(used)/float64(d))
			if asked > 10 { // a place in the queue, the subscription, and the rank after 1 s
				t.Errorf("%d requests in %v", asked, d)
			}
			if used > d/20 {
				t.Errorf("%v of processor time in %v", used, d)
			}
			if err := held.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// LEK-03: many different keys leave nothing but their marks, which have an end.
func TestManyKeysLeaveNothing(t *testing.T) {
	b := newBed(t, kit.Rueidis, 1, holdfast.Options{})
	locks := b.other(t, holdfast.Options{})
	many := kit.Count(3000, 100000)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < many; i += 8 {
				lease, err := locks.Acquire(t.Context(), "k"+strconv.Itoa(i))
				if err == nil {
					err = lease.Release(t.Context())
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	kit.NoKeys(t, ttl/4, b.servers)
	if endless := kit.Endless(t, b.servers[0]); len(endless) > 0 {
		t.Errorf("%d records have no end, such as %s", len(endless), endless[0])
	}
	v, err := b.servers[0].Do("EVAL", `local most = 0
		for _, k in ipairs(redis.call('KEYS', '*:fence')) do most = math.max(most, redis.call('PTTL', k)) end
		return most`, "0")
	if most, _ := v.(int64); err != nil || most == 0 || most > 120000 {
		t.Errorf("marks live up to %v ms (%v), want at most two minutes", v, err)
	}
	size, _ := b.servers[0].Do("DBSIZE")
	t.Logf("%d keys used: %v records left, all of them marks that end within %v ms", many, size, v)
}

// LEK-06: leases that are held for a moment leave no goroutine, and no extension after their
// release.
func TestShortLeasesLeaveNoGoroutines(t *testing.T) {
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			b := newBed(t, c, 1, holdfast.Options{})
			locks := b.other(t, holdfast.Options{TTL: 20 * time.Second})
			kit.Warm(t, locks)
			before := runtime.NumGoroutine()
			rounds := kit.Count(500, 100000)
			for range rounds {
				lease := kit.Acquire(t, locks, "k")
				ctx := lease.Context(t.Context())
				time.Sleep(time.Duration(rand.IntN(int(time.Millisecond))))
				if err := lease.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
				if ctx.Err() == nil {
					t.Fatal("the lease's context outlives its release")
				}
			}
			if after := kit.Settled(before, time.Second); after > before {
				t.Errorf("%d goroutines before, %d after %d leases", before, after, rounds)
			}
		})
	}
}

// EXT-01: leases that extend themselves all the time are released at once. No key, no
// goroutine and no request is left.
func TestReleaseBeatsExtension(t *testing.T) {
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		b := newBed(t, c, n, holdfast.Options{})
		const short = 100 * time.Millisecond
		locks := b.other(t, holdfast.Options{TTL: short, ExtendEvery: short / 10})
		kit.Warm(t, locks)
		before := runtime.NumGoroutine()
		rounds := kit.Count(30, 625) // each of 16
		var extended, lost atomic.Int64
		var wg sync.WaitGroup
		for w := range 16 {
			wg.Go(func() {
				for range rounds {
					lease, err := locks.Acquire(t.Context(), "k"+strconv.Itoa(w))
					if err != nil {
						t.Error(err)
						return
					}
					if rand.IntN(4) == 0 { // long enough for an extension to be under way
						time.Sleep(time.Duration(rand.IntN(int(short / 8))))
						extended.Add(1)
					}
					if err := lease.Release(t.Context()); errors.Is(err, holdfast.ErrLost) {
						lost.Add(1) // a busy machine
					} else if err != nil {
						t.Errorf("Release: %v", err)
					}
				}
			})
		}
		wg.Wait()
		quiet := b.scripts(t)
		time.Sleep(3 * short)
		kit.NoKeys(t, ttl/10, b.servers)
		if n > 1 {
			quiet = b.scripts(t) // releases on nodes beyond the quorum may have been on their way
			time.Sleep(short)
		}
		if later := b.scripts(t); later != quiet {
			t.Errorf("%d requests after every lease was released", later-quiet)
		}
		if after := kit.Settled(before, time.Second); after > before+2*n { // connections of a pool
			t.Logf("%d goroutines before, %d after", before, after)
		}
		t.Logf("%d leases, %d of them held past an extension, %d lost", 16*rounds, extended.Load(), lost.Load())
	})
}

// EXT-08: many leases are extended while the processors are busy. No key comes near its end
// unless its holder knows.
func TestExtensionsUnderLoad(t *testing.T) {
	b := newBed(t, kit.Rueidis, 1, holdfast.Options{})
	const short = time.Second
	locks := b.other(t, holdfast.Options{TTL: short})
	many := kit.Count(50, 200)
	leases := make([]*holdfast.Lease, many)
	for i := range leases {
		leases[i] = kit.Acquire(t, locks, "k"+strconv.Itoa(i))
	}
	ctx := kit.Context(t, time.Duration(kit.Count(3, 60))*time.Second)
	for range kit.Count(1, runtime.GOMAXPROCS(0)) {
		go func() {
			for ctx.Err() == nil { // burn
			}
		}()
	}
	floor, lost := int64(short/time.Millisecond), 0
	for ctx.Err() == nil {
		for i, lease := range leases {
			if lease == nil {
				continue
			}
			v, err := b.servers[0].Do("PTTL", "k"+strconv.Itoa(i))
			if err != nil {
				t.Fatal(err)
			}
			left := v.(int64)
			if lease.Err() != nil {
				leases[i] = nil
				lost++
				continue
			}
			if left < 0 {
				t.Errorf("a key has vanished (%d) and its holder does not know", left)
			}
			floor = min(floor, left)
		}
	}
	t.Logf("%d leases under load: the least time left was %d ms of %v; %d were lost, and their holders knew", many, floor, short, lost)
	for _, lease := range leases {
		if lease != nil {
			_ = lease.Release(t.Context())
		}
	}
}

// churn is a child process that acquires, extends and releases until it is killed.
func churn() {
	args := kit.Args()
	s, _ := kit.ChildStore(args[1:])
	locks, err := holdfast.New(s, &holdfast.Options{TTL: time.Second, ExtendEvery: 20 * time.Millisecond})
	if err != nil {
		kit.Say("error", err)
		return
	}
	for i := 0; ; i++ {
		lease, err := locks.Acquire(context.Background(), args[0]+strconv.Itoa(i%4))
		if i == 0 {
			kit.Say("churning", err)
		}
		if err != nil {
			continue
		}
		_ = lease.Extend(context.Background())
		if i%4 != 0 { // some are left to their own extensions
			_ = lease.Release(context.Background())
		} else {
			go func() {
				time.Sleep(50 * time.Millisecond)
				_ = lease.Release(context.Background())
			}()
		}
	}
}

// TTL-06: a holder is killed at random moments. No record of a lock is ever without an end.
func TestKilledHolderLeavesNothingEndless(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		servers := kit.Servers(t, n)
		left := 0
		kills := kit.Count(5, 250) // in each of four
		for i := range kills {
			child := kit.Child(t, "churn", append([]string{"k" + strconv.Itoa(i) + ".", c.Name}, kit.Addrs(servers)...)...)
			child.Expect(t, "churning", time.Minute)
			time.Sleep(time.Duration(rand.Int64N(int64(60 * time.Millisecond))))
			child.Kill()
			for _, s := range servers {
				if endless := kit.Endless(t, s); len(endless) > 0 {
					t.Fatalf("after kill -9 %q have no end", endless)
				}
				left += len(kit.Keys(t, s))
			}
		}
		if left == 0 {
			t.Error("no kill left a vote: the test shows nothing")
		}
		t.Logf("%d kills left %d votes, each with an end", kills, left)
		kit.NoKeys(t, ttl, servers)
	})
}

// RED-13: A releases within two milliseconds of the end of its ttl while B acquires. A's
// RELEASE never takes B's vote.
func TestReleaseAtTheEndOfTheTTL(t *testing.T) {
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			b := newBed(t, c, 1, holdfast.Options{})
			as, bs := b.store(t, kit.Addrs(b.servers)), b.store(t, kit.Addrs(b.servers))
			const short = store.MinTTL
			rounds := kit.Count(5, 800) // each of 64
			var before, after atomic.Int64
			var wg sync.WaitGroup
			for w := range 64 {
				wg.Go(func() {
					key := "k" + strconv.Itoa(w)
					for range rounds {
						a := as.Claim(key, store.ClaimOptions{TTL: short})
						start := time.Now()
						if _, err := a.Try(t.Context()); errors.Is(err, store.ErrUnavailable) {
							_ = a.Release(t.Context()) // granted too late to be of use: the machine is busy
							continue
						} else if err != nil {
							t.Errorf("A: %v", err)
							return
						}
						released := make(chan error, 1)
						jitter := time.Duration(rand.Int64N(int64(4*time.Millisecond))) - 2*time.Millisecond
						time.AfterFunc(time.Until(start.Add(short+jitter)), func() { released <- a.Release(t.Context()) })
						next := bs.Claim(key, store.ClaimOptions{TTL: ttl})
						time.Sleep(time.Until(start.Add(short - 3*time.Millisecond)))
						g, err := next.Try(t.Context())
						for errors.Is(err, store.ErrHeld) {
							g, err = next.Try(t.Context())
						}
						if err != nil {
							t.Errorf("B: %v", err)
							return
						}
						if err := <-released; err == nil {
							before.Add(1)
						} else if errors.Is(err, store.ErrLost) {
							after.Add(1)
						} else {
							t.Errorf("Release of A: %v", err)
						}
						if v, err := b.servers[0].Do("GET", key); err != nil || v != g.Owner {
							t.Errorf("B's vote is gone after A's Release: %v, %v", v, err)
						}
						if err := next.Release(t.Context()); err != nil {
							t.Errorf("Release of B: %v", err)
						}
					}
				})
			}
			wg.Wait()
			t.Logf("%d releases came within the validity, %d after it", before.Load(), after.Load())
			if before.Load()+after.Load() == 0 {
				t.Error("no lease was released: the test shows nothing")
			}
		})
	}
}
