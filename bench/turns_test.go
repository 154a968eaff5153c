package bench

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/memstore"
)

// This file is also compiled into the benchmarks of an earlier commit, so that both take turns on
// the same servers: it uses what both have.

// turnsEnv says that this process takes turns: its name, and the addresses of the servers.
const turnsEnv = "HOLDFAST_BENCH_TURNS"

// uncontended are the kinds of turns, by name.
func uncontended(b *testing.B, side string, addrs []string) map[string]func() (perPair time.Duration, allocs float64) {
	one, five := addrs[0], addrs[1:]
	locks, err := holdfast.New(memstore.New(), nil)
	if err != nil {
		b.Fatal(err)
	}
	kinds := map[string]func() (time.Duration, float64){}
	add := func(name string, c contender, take func(*testing.B, contender, int) time.Duration, pairs int) {
		c.name += "/" + side + "/" + name
		warm(b, []contender{c})
		next := 0
		kinds[name] = func() (time.Duration, float64) {
			before := mallocsNow()
			d := take(b, c, next)
			next += pairs
			return d, float64(mallocsNow()-before) / float64(pairs)
		}
	}
	add("memstore/Sequential", overLocker("memstore", locks), alone, turnPairs)
	for _, l := range libraries {
		add("OneNode/Sequential/"+string(l), ours(b, l, one), alone, turnPairs)
		add("FiveNodes/Sequential/"+string(l), ours(b, l, five...), alone, turnPairs)
		add("OneNode/Parallel64/"+string(l), ours(b, l, one), together, goroutines*burst)
		add("FiveNodes/Parallel64/"+string(l), ours(b, l, five...), together, goroutines*burst)
	}
	return kinds
}

const turnPairs = 100

// alone is the median time of a pair of one goroutine.
func alone(b *testing.B, c contender, next int) time.Duration {
	list := make([]time.Duration, turnPairs)
	for i := range list {
		start := time.Now()
		if _, err := c.pair(c.key(next + i)); err != nil {
			b.Fatalf("%s: %v", c.name, err)
		}
		list[i] = time.Since(start)
	}
	return median(list)
}

// together is the time of 64 goroutines, per pair.
func together(b *testing.B, c contender, next int) time.Duration {
	start := time.Now()
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			for i := range burst {
				if _, err := c.pair(c.key(next + g*burst + i)); err != nil {
					b.Errorf("%s: %v", c.name, err)
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start) / (goroutines * burst)
}

// BenchmarkTurns takes a turn for each line of file 3, which names it, and answers the time and
// the allocations of a pair in file 4. Only BenchmarkBefore starts it.
func BenchmarkTurns(b *testing.B) {
	args := strings.Fields(os.Getenv(turnsEnv))
	if len(args) == 0 {
		return
	}
	once(b, func() {
		in, out := os.NewFile(3, "turns"), os.NewFile(4, "answers")
		kinds := uncontended(b, args[0], args[1:])
		fmt.Fprintln(out, "ready")
		for lines := bufio.NewScanner(in); lines.Scan(); {
			d, allocs := kinds[lines.Text()]()
			fmt.Fprintln(out, d.Nanoseconds(), allocs)
		}
	})
}
