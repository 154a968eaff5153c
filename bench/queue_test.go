package bench

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/servertest"
)

// waiters is how many clients want the key.
const waiters = 16

// crowd is the clients of one contender that want the same key.
type crowd struct {
	name    string
	ours    bool
	acquire []func(ctx context.Context) (release func() error, err error) // of each client
}

// work is what each client does, again and again.
type work struct {
	inside, away time.Duration // with the key, and between two acquisitions
	lead, window time.Duration // of a turn: before it is measured, and while it is
}

var (
	empty = work{lead: 200 * time.Millisecond, window: time.Second}
	busy  = work{inside: 2 * time.Millisecond, away: 10 * time.Millisecond, lead: 200 * time.Millisecond, window: time.Second}
)

// turn is what one turn of a crowd measured.
type turn struct {
	grants    []int         // of each client
	perSecond float64       // hand-overs: grants to another client than the one before
	again     float64       // grants per second to the one that has just released
	gap       time.Duration // median of the hand-overs, from the begin of a release to the return of the next acquire
	requests  float64       // per hand-over, where they are counted
	failed    int           // acquisitions and releases of a peer
}

// stalled is the time in which every turn has ended, unless a waiter was forgotten.
const stalled = time.Minute

// take lets all clients of the crowd work for one turn. Each ends after a last acquisition, so
// that nobody holds the key or waits for it afterwards.
func (c crowd) take(b testing.TB, w work, count func() int) turn {
	ctx, cancel := context.WithTimeout(background, w.lead+w.window+stalled)
	defer cancel()
	var (
		stop, measuring  atomic.Bool
		released, inside atomic.Int64
		failed           atomic.Int64
		last             atomic.Int64 // who held the key
		again            = make([]int, len(c.acquire))
		gaps             = make([][]time.Duration, len(c.acquire))
		began            = time.Now()
		wg               sync.WaitGroup
	)
	for i, acquire := range c.acquire {
		wg.Go(func() {
			for !stop.Load() && ctx.Err() == nil {
				release, err := acquire(ctx)
				got := time.Since(began)
				if err != nil {
					failed.Add(1)
					if c.ours {
						b.Errorf("%s: client %d: %v", c.name, i, err)
					}
					continue
				}
				if inside.Add(1) > 1 && c.ours {
					b.Errorf("%s: client %d was granted the key while another held it", c.name, i)
				}
				switch self := last.Swap(int64(i)) == int64(i); {
				case !measuring.Load():
				case self:
					again[i]++
				default:
					gaps[i] = append(gaps[i], got-time.Duration(released.Load()))
				}
				sleep(w.inside)
				inside.Add(-1)
				released.Store(int64(time.Since(began)))
				if err := release(); err != nil {
					failed.Add(1)
					if c.ours {
						b.Errorf("%s: client %d: %v", c.name, i, err)
					}
				}
				sleep(w.away)
			}
		})
	}
	time.Sleep(w.lead)
	before := count()
	start := time.Now()
	measuring.Store(true)
	time.Sleep(w.window)
	measuring.Store(false)
	took := time.Since(start)
	sent := count() - before
	stop.Store(true)
	wg.Wait()

	all := slices.Concat(gaps...)
	t := turn{failed: int(failed.Load()), perSecond: float64(len(all)) / took.Seconds()}
	for i, g := range gaps {
		t.grants = append(t.grants, len(g)+again[i])
		t.again += float64(again[i]) / took.Seconds()
	}
	if len(all) > 0 {
		t.gap, t.requests = median(all), float64(sent)/float64(len(all))
	}
	return t
}

// sleep costs nothing where there is nothing to sleep.
func sleep(d time.Duration) {
	if d > 0 {
		time.Sleep(d)
	}
}

func uncounted() int { return 0 }

// jain is Jain's index of fairness: 1 where all have as much, 1/n where one has it all.
func jain(grants []int) float64 {
	var sum, squares float64
	for _, g := range grants {
		sum, squares = sum+float64(g), squares+float64(g)*float64(g)
	}
	if sum == 0 {
		return 0
	}
	return sum * sum / (float64(len(grants)) * squares)
}

// turns are those of all repetitions, by the name of the crowd.
type turns map[string][]turn

func (s turns) values(name string, of func(turn) float64) (list []float64) {
	for _, t := range s[name] {
		list = append(list, of(t))
	}
	return list
}

func (s turns) ratios(a, b string, of func(turn) float64) (list []float64) {
	for i := range s[a] {
		list = append(list, of(s[a][i])/of(s[b][i]))
	}
	return list
}

// best are a's hand-overs per second over those of the best of names, repetition by repetition.
func (s turns) best(a string, names []string) (list []float64) {
	for i := range s[a] {
		most := 0.0
		for _, n := range names {
			most = max(most, s[n][i].perSecond)
		}
		list = append(list, s[a][i].perSecond/most)
	}
	return list
}

// fair are those of names whose clients got alike: a Jain index of 0.9 over the whole run, or
// the highest one where none has that.
func (s turns) fair(names []string) (fair []string) {
	whole := func(name string) float64 {
		grants := make([]int, len(s[name][0].grants))
		for _, t := range s[name] {
			for i, g := range t.grants {
				grants[i] += g
			}
		}
		return jain(grants)
	}
	for _, n := range names {
		if whole(n) >= 0.9 {
			fair = append(fair, n)
		}
	}
	if fair == nil {
		fair = append(fair, slices.MaxFunc(names, func(a, b string) int { return int(1e9 * (whole(a) - whole(b))) }))
	}
	return fair
}

func handOvers(t turn) float64 { return t.perSecond }
func againOf(t turn) float64   { return t.again }
func gapOf(t turn) float64     { return float64(t.gap) / 1e3 }
func jainOf(t turn) float64    { return jain(t.grants) }

// queueUp lets crowds take turns, each in every repetition, so that whatever else the machine
// does hits all alike.
func queueUp(b testing.TB, w work, times int, crowds []crowd) turns {
	all := turns{}
	for i := range times {
		for k := range crowds {
			c := crowds[(i+k)%len(crowds)]
			all[c.name] = append(all[c.name], c.take(b, w, uncounted))
		}
	}
	return all
}

// peers are the crowds of other libraries, and only the names of those.
func peers(crowds []crowd) (names []string) {
	for _, c := range crowds {
		if !c.ours && !slices.Contains(floors, c.name) {
			names = append(names, c.name)
		}
	}
	return names
}

// BenchmarkQueue measures how a key goes from one holder to the next, with 16 clients that want
// it. All lines are in one benchmark because they share the servers.
func BenchmarkQueue(b *testing.B) {
	servers := servertest.RedisN(b, 6)
	one, five := servers[:1], servers[1:]
	awaitVotes(b, servers...)
	b.Run("OneNode", func(b *testing.B) { queueOnOne(b, one[0].Addr()) })
	b.Run("FiveNodes", func(b *testing.B) { queueOnFive(b, addrs(five)...) })
	b.Run("Requests", func(b *testing.B) {
		for _, l := range libraries {
			b.Run("OneNode/"+string(l), func(b *testing.B) {
				once(b, func() { requestsPerHandOver(b, "Queue/OneNode/Requests/"+string(l), l, one) })
			})
			b.Run("FiveNodes/"+string(l), func(b *testing.B) {
				once(b, func() { requestsPerHandOver(b, "Queue/FiveNodes/Requests/"+string(l), l, five) })
			})
		}
	})
	b.Run("Waiters1000", func(b *testing.B) {
		window := 5 * time.Second
		if os.Getenv("HOLDFAST_SOAK") == "1" {
			window = 27 * time.Second
		}
		for _, l := range libraries {
			b.Run(string(l), func(b *testing.B) {
				settle()
				once(b, func() { patient(b, "Queue/Waiters1000/"+string(l), l, one[0], 1000, window) })
			})
		}
	})
}

func queueOnOne(b *testing.B, addr string) {
	crowds := crowdsOnOne(b, waiters, addr)
	b.Run("Empty", func(b *testing.B) {
		once(b, func() {
			s := queueUp(b, empty, repetitions(), crowds)
			for _, l := range libraries {
				line, us, floor := "Queue/OneNode/Empty/"+string(l), "holdfast-"+string(l), "blpop-"+string(l)
				figure(b, line, "rate/blpop", s.ratios(us, floor, handOvers)...)
				figure(b, line, "rate/peer", s.best(us, peers(crowds))...)
				figure(b, line, "jain", s.values(us, jainOf)...)
			}
			s.list(b, "Queue/OneNode/Empty", crowds)
		})
	})
	b.Run("Busy", func(b *testing.B) {
		once(b, func() {
			s := queueUp(b, busy, repetitions(), crowds)
			for _, l := range libraries {
				line, us, floor := "Queue/OneNode/Busy/"+string(l), "holdfast-"+string(l), "blpop-"+string(l)
				figure(b, line, "gap/blpop", s.ratios(us, floor, gapOf)...)
				figure(b, line, "jain", s.values(us, jainOf)...)
			}
			s.list(b, "Queue/OneNode/Busy", crowds)
		})
	})
}

func queueOnFive(b *testing.B, five ...string) {
	crowds := crowdsOnFive(b, waiters, five...)
	b.Run("Empty", func(b *testing.B) {
		once(b, func() {
			s := queueUp(b, empty, repetitions(), crowds)
			fair := s.fair(peers(crowds))
			for _, l := range libraries {
				line, us := "Queue/FiveNodes/Empty/"+string(l), "holdfast-"+string(l)
				figure(b, line, "rate/peer", s.best(us, peers(crowds))...)
				figure(b, line, "rate/fair-peer", s.best(us, fair)...)
				figure(b, line, "jain", s.values(us, jainOf)...)
			}
			remark("Queue/FiveNodes/Empty", fmt.Sprint("peers with a Jain index of 0.9, or the fairest one: ", fair))
			s.list(b, "Queue/FiveNodes/Empty", crowds)
		})
	})
}

// list puts what every crowd did into the table.
func (s turns) list(b testing.TB, line string, crowds []crowd) {
	for _, c := range crowds {
		figure(b, line+" "+c.name, "hand-overs/s", s.values(c.name, handOvers)...)
		figure(b, line+" "+c.name, "to-itself/s", s.values(c.name, againOf)...)
		figure(b, line+" "+c.name, "gap-us", s.values(c.name, gapOf)...)
		figure(b, line+" "+c.name, "jain", s.values(c.name, jainOf)...)
		failed := 0
		for _, t := range s[c.name] {
			failed += t.failed
		}
		if failed > 0 {
			remark(line+" "+c.name, fmt.Sprint(failed, " calls failed"))
		}
	}
}

// requestsPerHandOver counts what clients send to all servers together for one hand-over, with few
// waiters and with many. Each has a store of its own; up to 16 have clients of their own.
func requestsPerHandOver(b testing.TB, line string, l library, servers []*servertest.RedisServer) {
	sizes := []int{4, waiters, 256}
	var crowds []crowd
	for _, n := range sizes {
		crowds = append(crowds, overHoldfast(b, l, n, addrs(servers)...))
	}
	steady := empty
	steady.lead = 2 * time.Second // 256 that come at once to a free key need a second for that
	per := make([][]float64, len(sizes))
	for i := range (repetitions() + 1) / 2 {
		for k := range sizes {
			k = (i + k) % len(sizes)
			t := crowds[k].take(b, steady, func() int { return requests(b, servers...) })
			per[k] = append(per[k], t.requests)
		}
	}
	for k, n := range sizes {
		if n != waiters {
			var alike []float64
			for i, v := range per[k] {
				alike = append(alike, v/per[slices.Index(sizes, waiters)][i])
			}
			figure(b, line, fmt.Sprintf("of-%d/of-%d", n, waiters), alike...)
		}
	}
	for k, n := range sizes {
		figure(b, line, "of-"+strconv.Itoa(n), per[k]...)
	}
}

// patient lets n stores over one client wait for a key that stays held, and counts what that
// costs from the third second on.
func patient(b testing.TB, line string, l library, server *servertest.RedisServer, n int, window time.Duration) {
	holder := l.locker(b, holdfast.Options{}, server.Addr())
	lease, err := holder.Acquire(background, "bench/queue/patient")
	if err != nil {
		b.Fatal(err)
	}
	nodes := l.nodes(b, server.Addr())
	if err := tryOnce(newLocker(b, holdfast.Options{}, nodes...)); err != nil { // connections are open
		b.Fatal(err)
	}
	heap, goroutines, stacks := heapNow(), runtime.NumGoroutine(), stacksNow()
	lockers := make([]*holdfast.Locker, n)
	for i := range lockers {
		lockers[i] = newLocker(b, holdfast.Options{}, nodes...)
	}
	ctx, cancel := context.WithCancel(background)
	var wg sync.WaitGroup
	for i := range lockers {
		wg.Go(func() {
			if lease, err := lockers[i].Acquire(ctx, "bench/queue/patient"); err == nil {
				b.Errorf("%s: waiter %d was granted a key that is held", line, i)
				lease.Release(background)
			}
		})
	}
	time.Sleep(3 * time.Second)
	sent, began := requests(b, server), time.Now()
	time.Sleep(window)
	figure(b, line, "requests/s", float64(requests(b, server)-sent)/time.Since(began).Seconds())
	figure(b, line, "goroutines/waiter", float64(runtime.NumGoroutine()-goroutines)/float64(n))
	figure(b, line, "bytes/waiter", float64(int64(heapNow()-heap))/float64(n))
	figure(b, line, "stack/waiter", float64(int64(stacksNow()-stacks))/float64(n))
	runtime.KeepAlive(lockers)
	cancel()
	wg.Wait()
	if err := lease.Release(background); err != nil {
		b.Errorf("%s: the holder: %v", line, err)
	}
}

// settle waits until what earlier lines have left behind, such as subscriptions, has ended: no
// goroutine ends or begins for a while.
func settle() {
	last, since := runtime.NumGoroutine(), time.Now()
	for began := time.Now(); time.Since(since) < 4*time.Second && time.Since(began) < 30*time.Second; time.Sleep(50 * time.Millisecond) {
		if n := runtime.NumGoroutine(); n != last {
			last, since = n, time.Now()
		}
	}
}

func tryOnce(locks *holdfast.Locker) error {
	lease, err := locks.TryAcquire(background, "bench/queue/free")
	if err != nil {
		return err
	}
	return lease.Release(background)
}

// stacksNow is what the stacks of goroutines take.
func stacksNow() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.StackInuse
}

// TestQueueBenchmarks runs what the benchmarks of the queue are made of, for a moment.
func TestQueueBenchmarks(t *testing.T) {
	const few = 3
	moment := work{lead: 10 * time.Millisecond, window: 50 * time.Millisecond}
	servers := servertest.RedisN(t, 6, servertest.Aged(votes))
	one, five := servers[:1], servers[1:]
	crowds := append(crowdsOnOne(t, few, one[0].Addr()), crowdsOnFive(t, few, addrs(five)...)...)
	for i, c := range crowds {
		got := c.take(t, moment, uncounted)
		if len(got.grants) != few {
			t.Errorf("crowd %d, %s: %d clients, want %d", i, c.name, len(got.grants), few)
		}
		if got.perSecond == 0 && (c.ours || slices.Contains(floors, c.name)) {
			t.Errorf("crowd %d, %s: no grant", i, c.name)
		}
	}
	c := overHoldfast(t, onRueidis, few, one[0].Addr())
	if got := c.take(t, moment, func() int { return requests(t, one...) }); got.requests < 2 {
		t.Errorf("%v requests per hand-over: an acquisition and a release are two", got.requests)
	}
	patient(t, "patient", onGoRedis, one[0], few, 10*time.Millisecond)
}

func TestJain(t *testing.T) {
	for _, c := range []struct {
		grants []int
		want   float64
	}{{[]int{5, 5, 5, 5}, 1}, {[]int{8, 0, 0, 0}, 0.25}, {[]int{4, 4, 0, 0}, 0.5}, {[]int{0, 0}, 0}} {
		if got := jain(c.grants); got != c.want {
			t.Errorf("of %v: %v, want %v", c.grants, got, c.want)
		}
	}
}
