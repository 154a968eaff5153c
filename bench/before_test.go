package bench

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/servertest"
)

// BenchmarkBefore compares the uncontended work of this commit with that of an earlier one,
// whose benchmarks HOLDFAST_BENCH_BEFORE names: .ci/compare builds them.
func BenchmarkBefore(b *testing.B) {
	earlier := os.Getenv("HOLDFAST_BENCH_BEFORE")
	if earlier == "" {
		return
	}
	this, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	servers := servertest.RedisN(b, 6)
	awaitVotes(b, servers...)
	sides := []*side{startSide(b, "before", earlier, servers), startSide(b, "now", this, servers)}
	once(b, func() { takeTurns(b, sides[0], sides[1]) })
}

// takeTurns measures every kind, one short turn of the one after one of the other.
func takeTurns(b testing.TB, before, now *side) {
	const alternations = 9
	for _, kind := range slices.Sorted(maps.Keys(beforeLimits)) {
		before.take(b, kind)
		now.take(b, kind)
		var times, allocs, olds, news []float64
		for range repetitions() {
			var ratios, old, nu, oldAllocs, newAllocs []float64
			for i := range alternations {
				var x, y answer
				if i%2 == 0 {
					x, y = before.take(b, kind), now.take(b, kind)
				} else {
					y, x = now.take(b, kind), before.take(b, kind)
				}
				ratios, old, nu = append(ratios, y.ns/x.ns), append(old, x.ns/1e3), append(nu, y.ns/1e3)
				oldAllocs, newAllocs = append(oldAllocs, x.allocs), append(newAllocs, y.allocs)
			}
			times, olds, news = append(times, median(ratios)), append(olds, median(old)), append(news, median(nu))
			allocs = append(allocs, median(newAllocs)-median(oldAllocs))
		}
		line := "Before/" + kind
		figure(b, line, "time/before", times...)
		figure(b, line, "pair-us", news...)
		figure(b, line, "before-us", olds...)
		figure(b, line, "more-allocs", allocs...)
	}
}

// side is a process that takes turns.
type side struct {
	name    string
	orders  io.WriteCloser
	answers *bufio.Reader
}

type answer struct{ ns, allocs float64 }

func startSide(b *testing.B, name, binary string, servers []*servertest.RedisServer) *side {
	ordersRead, orders, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	answers, answersWrite, err := os.Pipe()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(binary, "-test.run=^$", "-test.bench=^BenchmarkTurns$", "-test.benchtime=1x")
	cmd.Env = append(os.Environ(), turnsEnv+"="+name+" "+strings.Join(addrs(servers), " "))
	cmd.ExtraFiles = []*os.File{ordersRead, answersWrite}
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	ordersRead.Close()
	answersWrite.Close()
	s := &side{name: name, orders: orders, answers: bufio.NewReader(answers)}
	b.Cleanup(func() {
		orders.Close() // ends it
		if err := cmd.Wait(); err != nil {
			b.Errorf("the side %s: %v\n%s", name, err, said.String())
		}
		answers.Close()
	})
	if _, err := s.answers.ReadString('\n'); err != nil {
		b.Fatalf("the side %s did not become ready: %v", name, err)
	}
	return s
}

// take makes the side take one turn.
func (s *side) take(b testing.TB, kind string) (a answer) {
	if _, err := fmt.Fprintln(s.orders, kind); err != nil {
		b.Fatalf("the side %s: %v", s.name, err)
	}
	line, err := s.answers.ReadString('\n')
	if err != nil {
		b.Fatalf("the side %s: %v", s.name, err)
	}
	if _, err := fmt.Sscan(line, &a.ns, &a.allocs); err != nil {
		b.Fatalf("the side %s answered %q: %v", s.name, line, err)
	}
	return a
}
