package bench

import (
	"context"
	"fmt"
	"slices"
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

// clients open a node with a client at its defaults.
var clients = map[string]func(b *testing.B, addr string) redlock.Node{
	"goredis": func(b *testing.B, addr string) redlock.Node {
		c := goredis.NewClient(&goredis.Options{Addr: addr})
		b.Cleanup(func() { c.Close() })
		n, err := goredisnode.New(c)
		if err != nil {
			b.Fatal(err)
		}
		return n
	},
	"rueidis": func(b *testing.B, addr string) redlock.Node {
		n, err := rueidisnode.Dial(rueidis.ClientOption{InitAddress: []string{addr}})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { n.Close() })
		return n
	},
}

var ops = []string{"acquire", "extend", "release"}

// BenchmarkOneOfFiveFrozen compares the medians of five healthy nodes with those of five of
// which one is frozen, in one run and in turns: a burst of each after the other. Each
// iteration is an acquire, an extend and a release of both. It reports the medians and, as
// x-acquire and so on, their ratios, frozen to healthy, and fails where one is above 2.
func BenchmarkOneOfFiveFrozen(b *testing.B) {
	for _, name := range []string{"goredis", "rueidis"} {
		b.Run(name, func(b *testing.B) {
			servertest.CanPause(b)
			well, ill := open(b, name), open(b, name)
			ill.servers[0].Stop()
			b.Cleanup(ill.servers[0].Cont)
			const burst = 20
			i := 0
			for b.Loop() {
				if i++; i%burst != 1 {
					continue // its share was run with the burst's first
				}
				for range burst {
					well.round(b)
				}
				for range burst {
					ill.round(b)
				}
			}
			for _, op := range ops {
				w, f := median(well.times[op]), median(ill.times[op])
				b.ReportMetric(float64(w.Microseconds()), "us-"+op+"-well")
				b.ReportMetric(float64(f.Microseconds()), "us-"+op+"-frozen")
				ratio := float64(f) / float64(w)
				b.ReportMetric(ratio, "x-"+op)
				if len(well.times[op]) >= 400 && ratio > 2 {
					b.Errorf("the median of %s with a frozen node is %.2f times the healthy one, want at most 2", op, ratio)
				}
			}
		})
	}
}

// five is five servers and a locker over them.
type five struct {
	servers []*servertest.RedisServer
	locks   *holdfast.Locker
	times   map[string][]time.Duration
}

func open(b *testing.B, client string) *five {
	f := &five{servers: servertest.RedisN(b, 5, servertest.Aged(time.Hour)), times: map[string][]time.Duration{}}
	var nodes []redlock.Node
	for _, s := range f.servers {
		nodes = append(nodes, clients[client](b, s.Addr()))
	}
	s, err := redlock.New(redlock.Options{}, nodes...)
	if err != nil {
		b.Fatal(err)
	}
	if f.locks, err = holdfast.New(s, nil); err != nil {
		b.Fatal(err)
	}
	for range 100 { // connections, scripts
		f.round(b)
	}
	f.times = map[string][]time.Duration{}
	return f
}

// round is one lease.
func (f *five) round(b *testing.B) {
	ctx := context.Background()
	var lease *holdfast.Lease
	var err error
	for _, op := range ops {
		start := time.Now()
		switch op {
		case "acquire":
			lease, err = f.locks.TryAcquire(ctx, "k")
		case "extend":
			err = lease.Extend(ctx)
		case "release":
			err = lease.Release(ctx)
		}
		f.times[op] = append(f.times[op], time.Since(start))
		if err != nil {
			b.Fatal(fmt.Errorf("%s: %w", op, err))
		}
	}
}

func median(list []time.Duration) time.Duration {
	slices.Sort(list)
	return list[len(list)/2]
}
