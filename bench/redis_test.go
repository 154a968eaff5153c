package bench

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	redsyncgoredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/servertest"
)

// BenchmarkRedis holds all lines, because they share the servers.
func BenchmarkRedis(b *testing.B) {
	servertest.CanPause(b)
	servers := servertest.RedisN(b, 11)
	one, well, ill := servers[:1], servers[1:6], servers[6:]
	awaitVotes(b, servers...)
	b.Run("OneNode", func(b *testing.B) { oneNode(b, one[0].Addr()) })
	b.Run("FiveNodes", func(b *testing.B) { fiveNodes(b, addrs(well)...) })
	b.Run("Held10000", func(b *testing.B) { held(b, one[0]) })
	b.Run("TwoOfFiveFrozen", func(b *testing.B) {
		ill[0].Stop()
		ill[3].Stop()
		defer ill[0].Cont()
		defer ill[3].Cont()
		illNodes(b, "TwoOfFiveFrozen", addrs(well), addrs(ill))
	})
	b.Run("TwoOfFiveDead", func(b *testing.B) {
		ill[1].Kill()
		ill[4].Kill()
		illNodes(b, "TwoOfFiveDead", addrs(well), addrs(ill))
	})
	b.Run("ColdStart", func(b *testing.B) {
		ill[1].Kill()
		ill[4].Kill()
		coldStart(b, addrs(ill))
	})
}

func addrs(servers []*servertest.RedisServer) (list []string) {
	for _, s := range servers {
		list = append(list, s.Addr())
	}
	return list
}

func oneNode(b *testing.B, addr string) {
	b.Run("Sequential", func(b *testing.B) {
		once(b, func() {
			s := sequential(b, []contender{raw(b, onRueidis, addr), ours(b, onRueidis, addr), raw(b, onGoRedis, addr), ours(b, onGoRedis, addr),
				overRedislock(b, addr), overRedsync(b, onGoRedis, addr), overRedsync(b, onRueidis, addr), overRueidislock(b, addr)})
			for _, l := range libraries {
				line, us := "OneNode/Sequential/"+string(l), "holdfast-"+string(l)
				figure(b, line, "p50/raw", s.ratios(us, "raw-"+string(l), cycleTime)...)
				figure(b, line, "p50-us", s.values(us, cycleTime)...)
				figure(b, line, "allocs/pair", s.values(us, allocsOf)...)
				figure(b, line+" raw", "p50-us", s.values("raw-"+string(l), cycleTime)...)
				figure(b, line+" raw", "allocs/pair", s.values("raw-"+string(l), allocsOf)...)
			}
			for _, peer := range []struct{ name, raw string }{{"redislock", "raw-goredis"}, {"redsync-goredis", "raw-goredis"},
				{"redsync-rueidis", "raw-rueidis"}, {"rueidislock", "raw-rueidis"}} {
				line := "OneNode/Sequential " + peer.name
				figure(b, line, "p50/raw", s.ratios(peer.name, peer.raw, cycleTime)...)
				figure(b, line, "allocs/pair", s.values(peer.name, allocsOf)...)
			}
		})
	})
	b.Run("Parallel64", func(b *testing.B) {
		once(b, func() {
			peers := []contender{overRedislock(b, addr), overRedsync(b, onGoRedis, addr), overRedsync(b, onRueidis, addr), overRueidislock(b, addr)}
			s := parallel(b, append(peers, raw(b, onRueidis, addr), ours(b, onRueidis, addr), ours(b, onGoRedis, addr)))
			best := make([]float64, repetitions())
			for i := range best {
				for _, p := range peers {
					best[i] = max(best[i], s[p.name][i].perSecond)
				}
				best[i] = s["holdfast-rueidis"][i].perSecond / best[i]
			}
			line := "OneNode/Parallel64/rueidis"
			figure(b, line, "pairs/raw", s.ratios("holdfast-rueidis", "raw-rueidis", rateOf)...)
			figure(b, line, "pairs/peer", best...)
			figure(b, line, "pairs/s", s.values("holdfast-rueidis", rateOf)...)
			figure(b, "OneNode/Parallel64/goredis", "pairs/raw", s.ratios("holdfast-goredis", "raw-rueidis", rateOf)...)
			for _, p := range peers {
				figure(b, "OneNode/Parallel64 "+p.name, "pairs/raw", s.ratios(p.name, "raw-rueidis", rateOf)...)
			}
		})
	})
}

func fiveNodes(b *testing.B, five ...string) {
	b.Run("Sequential", func(b *testing.B) {
		once(b, func() {
			s := sequential(b, []contender{fanOut(b, onRueidis, five...), ours(b, onRueidis, five...), fanOut(b, onGoRedis, five...),
				ours(b, onGoRedis, five...), overRedsync(b, onGoRedis, five...), overRedsync(b, onRueidis, five...)})
			for _, l := range libraries {
				line, us := "FiveNodes/Sequential/"+string(l), "holdfast-"+string(l)
				figure(b, line, "p50/raw", s.ratios(us, "raw-"+string(l), cycleTime)...)
				figure(b, line, "p50-us", s.values(us, cycleTime)...)
				figure(b, line, "allocs/pair", s.values(us, allocsOf)...)
				figure(b, "FiveNodes/Sequential redsync-"+string(l), "p50/raw", s.ratios("redsync-"+string(l), "raw-"+string(l), cycleTime)...)
			}
		})
	})
	b.Run("Parallel64", func(b *testing.B) {
		once(b, func() {
			s := parallel(b, []contender{fanOut(b, onRueidis, five...), ours(b, onRueidis, five...), ours(b, onGoRedis, five...),
				overRedsync(b, onGoRedis, five...), overRedsync(b, onRueidis, five...)})
			figure(b, "FiveNodes/Parallel64/rueidis", "pairs/raw", s.ratios("holdfast-rueidis", "raw-rueidis", rateOf)...)
			figure(b, "FiveNodes/Parallel64/rueidis", "pairs/s", s.values("holdfast-rueidis", rateOf)...)
			for _, name := range []string{"holdfast-goredis", "redsync-goredis", "redsync-rueidis"} {
				figure(b, "FiveNodes/Parallel64 "+name, "pairs/raw", s.ratios(name, "raw-rueidis", rateOf)...)
			}
		})
	})
}

// illNodes compares five nodes of which two are away with five that are well.
func illNodes(b *testing.B, line string, well, ill []string) {
	for _, l := range libraries {
		b.Run(string(l), func(b *testing.B) {
			once(b, func() {
				healthy, failing := ours(b, l, well...), ours(b, l, ill...)
				healthy.name, failing.name = "healthy", "failing"
				s := sequential(b, []contender{healthy, failing})
				figure(b, line+"/"+string(l), "acquire/healthy", s.ratios("failing", "healthy", acquireTime)...)
				figure(b, line+"/"+string(l), "cycle/healthy", s.ratios("failing", "healthy", cycleTime)...)
				figure(b, line+"/"+string(l), "acquire-us", s.values("failing", acquireTime)...)
			})
		})
	}
}

// coldStart opens everything anew while two of five nodes are down.
func coldStart(b *testing.B, five []string) {
	for _, l := range libraries {
		b.Run(string(l), func(b *testing.B) {
			once(b, func() {
				line := "ColdStart/" + string(l)
				var took, granted []float64
				for range repetitions() {
					locks := l.locker(b, holdfast.Options{}, five...)
					start := time.Now()
					lease, err := locks.TryAcquire(background, "cold")
					took = append(took, float64(time.Since(start).Microseconds())/1e3)
					if err != nil {
						b.Errorf("%s: %v", line, err)
						granted = append(granted, 0)
						continue
					}
					granted = append(granted, 1)
					if err := lease.Release(background); err != nil {
						b.Error(err)
					}
				}
				figure(b, line, "granted", granted...)
				figure(b, line, "first-ms", took...)
			})
		})
	}
	b.Run("peers", func(b *testing.B) {
		once(b, func() {
			remark("ColdStart redsync-goredis", redsyncColdly(b, five))
			outcome := "opens its clients"
			for _, a := range five {
				c, err := rueidis.NewClient(rueidisOption(a))
				if err != nil {
					outcome = "cannot be made: " + err.Error()
					break
				}
				c.Close()
			}
			remark("ColdStart rueidis clients of peers", outcome)
		})
	})
}

func redsyncColdly(b *testing.B, five []string) string {
	var pools []redsyncredis.Pool
	for _, a := range five {
		pools = append(pools, redsyncgoredis.NewPool(newGoRedis(b, a)))
	}
	m := redsync.New(pools...).NewMutex("cold-redsync", redsync.WithExpiry(ttl), redsync.WithTries(1))
	start := time.Now()
	err := m.LockContext(background)
	locked := time.Since(start)
	if err != nil {
		return fmt.Sprintf("fails after %v: %v", locked.Round(time.Millisecond), err)
	}
	start = time.Now()
	_, err = m.UnlockContext(background)
	return fmt.Sprintf("works: lock %v, unlock %v, %v", locked.Round(time.Millisecond), time.Since(start).Round(time.Millisecond), err)
}

// held keeps 10,000 leases and counts what that costs.
func held(b *testing.B, server *servertest.RedisServer) {
	many, window := 10_000, 20*time.Second
	if testing.Short() {
		many, window = 1000, 11*time.Second
	}
	for _, l := range libraries {
		b.Run(string(l), func(b *testing.B) {
			once(b, func() {
				line := "Held10000/" + string(l)
				locks := l.locker(b, holdfast.Options{TTL: 30 * time.Second, ExtendEvery: 10 * time.Second}, server.Addr())
				hold(b, locks, 512, "warm") // connections, pools and maps have their size
				heap, before := heapNow(), runtime.NumGoroutine()
				leases := acquireMany(b, locks, many, "held")
				settle := time.Now()
				for runtime.NumGoroutine() > before && time.Since(settle) < 2*time.Second {
					time.Sleep(10 * time.Millisecond)
				}
				figure(b, line, "goroutines/lease", float64(runtime.NumGoroutine()-before)/float64(many))
				time.Sleep(11 * time.Second) // every lease was extended once
				sent, began := requests(b, server), time.Now()
				time.Sleep(window)
				figure(b, line, "requests/s", float64(requests(b, server)-sent)/time.Since(began).Seconds()*10_000/float64(many))
				figure(b, line, "bytes/lease", float64(int64(heapNow()-heap))/float64(many))
				for _, lease := range leases {
					if err := lease.Err(); err != nil {
						b.Fatal(err)
					}
				}
				releaseMany(b, leases)
			})
		})
	}
}

// hold acquires leases and releases them.
func hold(b *testing.B, locks *holdfast.Locker, n int, prefix string) {
	releaseMany(b, acquireMany(b, locks, n, prefix))
}

func acquireMany(b *testing.B, locks *holdfast.Locker, n int, prefix string) []*holdfast.Lease {
	leases := make([]*holdfast.Lease, n)
	eight(n, func(i int) {
		var err error
		if leases[i], err = locks.Acquire(context.Background(), "account/"+prefix+"/"+strconv.Itoa(i)); err != nil {
			b.Error(err)
		}
	})
	if b.Failed() {
		b.FailNow()
	}
	return leases
}

func releaseMany(b *testing.B, leases []*holdfast.Lease) {
	eight(len(leases), func(i int) {
		if err := leases[i].Release(background); err != nil {
			b.Error(err)
		}
	})
}

// eight runs f for every number below n, in eight goroutines.
func eight(n int, f func(i int)) {
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < n; i += 8 {
				f(i)
			}
		})
	}
	wg.Wait()
}

// heapNow is what is reachable.
func heapNow() uint64 {
	var m runtime.MemStats
	for range 3 { // pools are emptied in two
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// calledByScripts are the commands that our scripts call. Clients of ours send none of them, but
// for INFO at a first contact, which a node answers to this package, too.
const calledByScripts = " get set mget del pttl pexpire time info publish" +
	" zadd zrem zrank zscore zcard zrange zpopmin pubsub|numsub pexpireat expire hget hset hmget type scan "

// requests are the commands that clients of ours have sent to servers: not those that scripts
// called.
func requests(b testing.TB, servers ...*servertest.RedisServer) (n int) {
	for _, s := range servers {
		v, err := s.Do("INFO", "commandstats")
		if err != nil {
			b.Fatal(err)
		}
		text, _ := v.(string)
		for line := range strings.Lines(text) {
			name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
			if !ok || strings.Contains(calledByScripts, " "+name+" ") {
				continue
			}
			calls, _, _ := strings.Cut(rest, ",")
			k, err := strconv.Atoi(calls)
			if err != nil {
				b.Fatal(err)
			}
			n += k
		}
	}
	return n
}
