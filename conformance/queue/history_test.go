package queue

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// turn is a lease of some process: from its grant until it was given back or ended by itself.
type turn struct {
	token    int64
	from, to int64 // ns
}

// historyChild takes turns, and tells of each before it gives it back. It does not extend, so it
// knows how long it may trust a lease however it is stopped.
func historyChild() {
	args := kit.Args()
	s, _ := kit.ChildStoreWith(redlock.Options{NodeTimeout: nodeTimeout / 4}, args)
	locks, err := holdfast.New(s, &holdfast.Options{TTL: historyTTL, NoExtend: true})
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	for {
		lease, err := locks.Acquire(ctx, "k")
		if err != nil {
			kit.Say("error", err)
			return
		}
		now := time.Now()
		until := now.Add(lease.Validity())
		time.Sleep(rand.N(3 * time.Millisecond))
		to := time.Now()
		if until.Before(to) {
			to = until
		}
		kit.Say("turn", int64(lease.Token()), now.UnixNano(), to.UnixNano())
		_ = lease.Release(ctx)
	}
}

const historyTTL = time.Second

// Processes that wait in the queue are killed, stopped and cut off at random, holders among them.
// No two hold the key together, no token comes twice, and a later holder has the larger one.
func TestProcessesComeAndGo(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		rng := rand.New(rand.NewPCG(seed, 0))
		b := newBed(t, c, n)
		var mu sync.Mutex
		var turns []turn
		var readers sync.WaitGroup
		slots := make([]*slot, kit.Count(4, 6))
		for i := range slots {
			slots[i] = &slot{proxies: kit.Proxies(t, b.servers)}
		}
		begin := func(s *slot) {
			process := kit.Child(t, "history", append([]string{c.Name}, kit.Addrs(s.proxies)...)...)
			s.process = process
			readers.Go(func() {
				for line := range process.Lines() {
					var u turn
					if k, _ := fmt.Sscanf(line, "turn %d %d %d", &u.token, &u.from, &u.to); k == 3 {
						mu.Lock()
						turns = append(turns, u)
						mu.Unlock()
					} else {
						t.Errorf("a process says %q", line)
					}
				}
			})
		}
		for _, s := range slots {
			begin(s)
		}
		counts := map[string]int{}
		enough := func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(turns) >= 20
		}
		end := time.Now().Add(time.Duration(kit.Count(4, 60)) * time.Second)
		for time.Now().Before(end) || !enough() && time.Now().Before(end.Add(patience)) {
			time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
			s := slots[rng.IntN(len(slots))]
			s.mend()
			switch rng.IntN(4) {
			case 0:
				s.process.Kill()
				begin(s)
				counts["killed"]++
			case 1:
				s.process.Stop()
				s.stopped = true
				counts["stopped"]++
			case 2:
				for _, p := range s.proxies {
					p.BlackHole()
				}
				counts["cut off"]++
			case 3:
				counts["reset"] += min(1, s.proxies[rng.IntN(n)].Reset())
			}
		}
		for _, s := range slots {
			s.mend()
		}
		mu.Lock()
		before := len(turns)
		mu.Unlock()
		servertest.Eventually(t, patience, func() error { // it goes on
			mu.Lock()
			defer mu.Unlock()
			if len(turns) < before+20 {
				return fmt.Errorf("%d turns since everything was mended", len(turns)-before)
			}
			return nil
		})
		for _, s := range slots {
			s.process.Kill()
		}
		readers.Wait()
		check(t, turns)
		t.Logf("%d turns; processes and connections: %v", len(turns), counts)
		for _, what := range []string{"killed", "stopped", "cut off"} {
			if counts[what] == 0 && !t.Failed() {
				t.Logf("no process was %s", what)
			}
		}
		if len(turns) < 40 || len(counts) < 2 {
			t.Error("too little happened to show anything")
		}
	})
}

// slot is a place for one process after the other, with its way to the servers.
type slot struct {
	proxies []*servertest.Proxy
	process *kit.Process
	stopped bool
}

func (s *slot) mend() {
	if s.stopped {
		s.process.Cont()
		s.stopped = false
	}
	for _, p := range s.proxies {
		p.Heal()
	}
}

func check(t *testing.T, turns []turn) {
	t.Helper()
	slices.SortFunc(turns, func(a, b turn) int { return cmp.Compare(a.from, b.from) })
	var last turn
	for _, u := range turns {
		switch {
		case u.token <= last.token:
			t.Errorf("token %d after token %d", u.token, last.token)
		case u.from < last.to:
			t.Errorf("two holders for %v: tokens %d and %d", time.Duration(min(last.to, u.to)-u.from), last.token, u.token)
		}
		last = u
	}
}

// The check can fail.
func TestCheck(t *testing.T) {
	for name, turns := range map[string][]turn{
		"twice":    {{5, 1, 2}, {5, 3, 4}},
		"smaller":  {{5, 1, 2}, {4, 3, 4}},
		"together": {{5, 1, 5}, {6, 3, 4}},
	} {
		probe := &testing.T{}
		if check(probe, turns); !probe.Failed() {
			t.Errorf("%s is not found", name)
		}
	}
	check(t, []turn{{5, 1, 2}, {6, 2, 4}, {9, 4, 5}})
}
