package bench

import (
	"cmp"
	"context"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
)

const ttl = 15 * time.Second

// background is the context of every call: the cheapest one there is.
var background = context.Background()

// repetitions are how often each figure is measured in one run.
func repetitions() int {
	if testing.Short() {
		return 1
	}
	return 7
}

// once runs a benchmark's schedule one time, however long benchmarks are to take: it has
// repetitions of its own.
func once(b *testing.B, run func()) {
	for ran := false; b.Loop(); ran = true {
		if ran {
			time.Sleep(10 * time.Millisecond)
			continue
		}
		run()
	}
	b.ReportMetric(0, "ns/op") // of the schedule: says nothing
}

// votes is the age at which a server may vote.
const votes = 31 * time.Second

// awaitVotes waits until servers are old enough. They run without a clock of their own (see
// [servertest.Aged]), which would make each look at the time a system call.
func awaitVotes(b testing.TB, servers ...*servertest.RedisServer) {
	for _, s := range servers {
		for {
			info, err := s.Do("INFO", "server")
			if err != nil {
				b.Fatal(err)
			}
			text, _ := info.(string)
			up, err := strconv.Atoi(servertest.InfoField(text, "uptime_in_seconds"))
			if err != nil {
				b.Fatal(err)
			}
			if up >= int(votes/time.Second) {
				break
			}
			time.Sleep(200 * time.Millisecond)
		}
	}
}

// library is one of the two Redis clients.
type library string

const (
	onRueidis library = "rueidis"
	onGoRedis library = "goredis"
)

var libraries = []library{onRueidis, onGoRedis}

// rueidisOption is what every contender on rueidis gets.
func rueidisOption(addr string) rueidis.ClientOption {
	return rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true}
}

func newRueidis(b testing.TB, addr string) rueidis.Client {
	c, err := rueidis.NewClient(rueidisOption(addr))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.Close)
	return c
}

func newGoRedis(b testing.TB, addr string) *goredis.Client {
	c := goredis.NewClient(&goredis.Options{Addr: addr, PoolSize: 64})
	b.Cleanup(func() { c.Close() })
	return c
}

func (l library) node(b testing.TB, addr string) redlock.Node {
	if l == onGoRedis {
		n, err := goredisnode.New(newGoRedis(b, addr))
		if err != nil {
			b.Fatal(err)
		}
		return n
	}
	n, err := rueidisnode.Dial(rueidisOption(addr))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { n.Close() })
	return n
}

// nodes are over new clients of servers.
func (l library) nodes(b testing.TB, addrs ...string) (nodes []redlock.Node) {
	for _, a := range addrs {
		nodes = append(nodes, l.node(b, a))
	}
	return nodes
}

// locker is a Locker over new clients of servers.
func (l library) locker(b testing.TB, o holdfast.Options, addrs ...string) *holdfast.Locker {
	return newLocker(b, o, l.nodes(b, addrs...)...)
}

// newLocker is a Locker over a store of its own.
func newLocker(b testing.TB, o holdfast.Options, nodes ...redlock.Node) *holdfast.Locker {
	s, err := redlock.New(redlock.Options{}, nodes...)
	if err != nil {
		b.Fatal(err)
	}
	locks, err := holdfast.New(s, &o)
	if err != nil {
		b.Fatal(err)
	}
	return locks
}

// contender does one pair: it acquires key and releases it, and says how long the first took.
type contender struct {
	name string
	pair func(key string) (acquire time.Duration, err error)
}

// pair makes a contender of an acquisition that returns its release.
func pair(name string, acquire func(key string) (release func() error, err error)) contender {
	return contender{name, func(key string) (time.Duration, error) {
		start := time.Now()
		release, err := acquire(key)
		took := time.Since(start)
		if err != nil {
			return took, err
		}
		return took, release()
	}}
}

const (
	goroutines = 64
	burst      = 20
	manyKeys   = 2 * goroutines * burst
)

// key returns a key of the contender's own. They are taken in turn, and come again only after
// every late request for them has ended.
func (c contender) key(i int) string {
	return "bench/key/" + strconv.Itoa(i%manyKeys) + "/" + c.name
}

// warm opens connections and loads scripts.
func warm(b *testing.B, contenders []contender) {
	for _, c := range contenders {
		for i := range goroutines {
			if _, err := c.pair(c.key(i)); err != nil {
				b.Fatalf("%s: %v", c.name, err)
			}
		}
	}
}

// sample is what one repetition measured of one contender.
type sample struct {
	acquire, cycle time.Duration // medians
	allocs         float64       // per pair
	perSecond      float64       // pairs
}

// samples are those of all repetitions, by the name of the contender.
type samples map[string][]sample

// ratios compares a contender with another, repetition by repetition.
func (s samples) ratios(a, b string, of func(sample) float64) (list []float64) {
	for i := range s[a] {
		list = append(list, of(s[a][i])/of(s[b][i]))
	}
	return list
}

func (s samples) values(name string, of func(sample) float64) (list []float64) {
	for _, v := range s[name] {
		list = append(list, of(v))
	}
	return list
}

func cycleTime(s sample) float64   { return float64(s.cycle) / 1e3 }
func acquireTime(s sample) float64 { return float64(s.acquire) / 1e3 }
func allocsOf(s sample) float64    { return s.allocs }
func rateOf(s sample) float64      { return s.perSecond }

// sequential measures one goroutine's pairs: in each repetition many rounds, in each round a
// short burst of every contender, so that whatever else the machine does hits all alike.
func sequential(b *testing.B, contenders []contender) samples {
	warm(b, contenders)
	const rounds = 30
	all := samples{}
	for range repetitions() {
		acquires, cycles := map[string][]time.Duration{}, map[string][]time.Duration{}
		mallocs := map[string]uint64{}
		for round := range rounds {
			for i := range contenders {
				c := contenders[(i+round)%len(contenders)]
				took, whole := make([]time.Duration, 0, burst), make([]time.Duration, 0, burst)
				var names [burst]string
				for i := range names {
					names[i] = c.key(round*burst + i)
				}
				before := mallocsNow()
				for _, key := range names {
					start := time.Now()
					a, err := c.pair(key)
					whole, took = append(whole, time.Since(start)), append(took, a)
					if err != nil {
						b.Fatalf("%s: %v", c.name, err)
					}
				}
				mallocs[c.name] += mallocsNow() - before
				acquires[c.name], cycles[c.name] = append(acquires[c.name], took...), append(cycles[c.name], whole...)
			}
		}
		for _, c := range contenders {
			all[c.name] = append(all[c.name], sample{acquire: median(acquires[c.name]), cycle: median(cycles[c.name]),
				allocs: float64(mallocs[c.name]) / (rounds * burst)})
		}
	}
	return all
}

// mallocsNow is how many objects were allocated since the start.
func mallocsNow() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}

// parallel measures how many pairs 64 goroutines do, each with keys of its own.
func parallel(b *testing.B, contenders []contender) samples {
	warm(b, contenders)
	const rounds = 5
	all := samples{}
	for range repetitions() {
		spent := map[string]time.Duration{}
		for round := range rounds {
			for i := range contenders {
				c := contenders[(i+round)%len(contenders)]
				start := time.Now()
				var wg sync.WaitGroup
				for g := range goroutines {
					wg.Go(func() {
						for i := range burst {
							if _, err := c.pair(c.key((round*goroutines+g)*burst + i)); err != nil {
								b.Errorf("%s: %v", c.name, err)
								return
							}
						}
					})
				}
				wg.Wait()
				spent[c.name] += time.Since(start)
			}
		}
		for _, c := range contenders {
			all[c.name] = append(all[c.name], sample{perSecond: float64(rounds*burst*goroutines) / spent[c.name].Seconds()})
		}
	}
	return all
}

func median[T cmp.Ordered](list []T) T {
	slices.Sort(list)
	return list[len(list)/2]
}
