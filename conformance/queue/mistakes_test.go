package queue

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/servertest"
)

// publish sends a message to the process of an owner, from every server. All of them must find it.
func (b *bed) publish(owner, format string, args ...any) {
	b.t.Helper()
	text := fmt.Sprintf(format, args...)
	for i, s := range b.servers {
		if heard := rig.Must(b.t, s, "PUBLISH", "holdfast:"+inboxOf(owner), text); heard != int64(1) {
			b.t.Fatalf("%v connections at node %d hear what is told to %s; the test shows nothing", heard, i, owner)
		}
	}
}

// mark is a server's mark of a key.
func (b *bed) mark(s *servertest.RedisServer, key string) string {
	text, _ := rig.Must(b.t, s, "GET", "{"+key+"}:fence").(string)
	return text
}

// A wake-up that comes when the waiter holds the key already, or has given it back, is ignored:
// an answer to it would free the live lease.
func TestLateWakeUps(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n)
		locks := b.locker(holdfast.Options{Label: "b"})
		other := b.locker(holdfast.Options{Label: "c"})
		first := kit.Acquire(t, other, "k")
		waiting := acquire(t, locks, "k")
		b.parked("k", 1)
		release(t, first)
		lease := waiting.wait(ttl)
		wake := func(owner, released string) {
			f := b.mark(b.servers[0], "k")
			b.publish(owner, "w1 wake %s %s %s k", f, owner, released)
			b.publish(owner, "w1 next 250 %s k", owner)
		}
		holds := func(when, label string, lease *holdfast.Lease) {
			t.Helper()
			for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
				if have := b.votes("k", label); have < b.quorum() || lease.Err() != nil {
					t.Fatalf("%s: %d nodes vote for the holder, and its lease says %v", when, have, lease.Err())
				}
			}
			if err := lease.Extend(t.Context()); err != nil {
				t.Errorf("%s: Extend: %v", when, err)
			}
		}
		for began := time.Now(); time.Since(began) < time.Second; { // the store listens for 3 s more
			wake(lease.Owner(), first.Owner())
		}
		holds("wake-ups for the holder", "b", lease)

		old := lease.Owner()
		release(t, lease)
		kit.NoKeys(t, ttl/2, b.servers)
		wake(old, first.Owner())
		time.Sleep(200 * time.Millisecond)
		for i, s := range b.servers {
			if owner, _ := b.voted(s, "k"); owner != "" {
				t.Errorf("after a wake-up for a lease that was released node %d votes for %s", i, owner)
			}
		}

		// Wake-ups for nothing while another holds: the waiter asks, and waits on in its place.
		lease = kit.Acquire(t, other, "k")
		waiting = acquire(t, locks, "k")
		b.parked("k", 1)
		owner := b.places(b.servers[0], "k")[0]
		for range kit.Count(3, 50) {
			wake(old, first.Owner())
			wake(owner, first.Owner())
			wake(owner, lease.Owner()) // who is said to have released, and has not
		}
		holds("wake-ups for a waiter", "c", lease)
		if !waiting.waits() {
			t.Errorf("granted beside the holder: %v", waiting.err)
		}
		b.parked("k", 1)
		for _, text := range []string{"", "w1", "w1 wake", "w1 wake x " + owner + " y k", "w1 wake 9999999999999999999 " + owner + " y k",
			"w1 wake -1 " + owner + " y k", "w1 wake 1 " + owner, "w1 wake 1 " + owner + " y other", "w1 next -5 " + owner + " k", "w1 next 1e9 " + owner + " k",
			"w1 grant 1 1.5 100 - " + owner + " y", "w1 grant 1 x 100 - " + owner + " y k", "w1 grant 1 1.5 -1 - " + owner + " y k",
			"w1 grant 1 1.5 100 unknown " + owner + " y k", "w1 grant", "w2 wake 1 " + owner + " y k", "w1 wake 1  y k", strings.Repeat("w1 wake ", 10000)} {
			b.publish(owner, "%s", text)
		}
		holds("messages that nobody sends", "c", lease)
		release(t, lease)
		release(t, waiting.wait(ttl))
	})
}

// Messages of a slow node come when the turn that they announce is over. No two hold.
func TestMessagesOfASlowNode(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 5)
			proxies := kit.Proxies(t, b.servers)
			var lockers []*holdfast.Locker
			for range 6 {
				lockers = append(lockers, b.locker(holdfast.Options{}, proxies...))
			}
			proxies[4].DelayReplies(30 * time.Millisecond)
			r := newRelay(t, len(lockers))
			stop := r.start(lockers, "k", 0)
			r.reach(kit.Count(200, 10000), ttl*3/4)
			stop()
			if proxies[4].Counts().Delayed == 0 {
				t.Error("nothing was slow: the test shows nothing")
			}
			t.Logf("longest pause %v", r.gap().Round(time.Millisecond))
		})
	}
}

// A waiter withdraws when the vote has been reserved for it and it has not voted yet: the
// reservation goes to the next one at once. The holder's round trip is long, and with it the
// reservation, so that whoever stalls does so for long.
func TestWithdrawalHandsOn(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n)
		runs, lanes := kit.Count(8, 300), kit.Count(4, 12)
		var hits, stalls, granted atomic.Int64
		var wg sync.WaitGroup
		for lane := range lanes {
			wg.Go(func() {
				slow, leaving := kit.Proxies(t, b.servers), kit.Proxies(t, b.servers)
				a := b.locker(holdfast.Options{}, slow...)
				w := b.locker(holdfast.Options{Label: "leaving"}, leaving...)
				x := b.locker(holdfast.Options{})
				for _, p := range slow {
					p.DelayReplies(100 * time.Millisecond)
				}
				for range 12 { // until it knows its round trip
					kit.Warm(t, a)
				}
				for run := lane; run < runs && !t.Failed(); run += lanes {
					hit, got, stalled := b.withdraw(t, fmt.Sprint("k", run), a, w, x, leaving, run/lanes%2 == 0)
					for sum, yes := range map[*atomic.Int64]bool{&hits: hit, &granted: got, &stalls: stalled} {
						if yes {
							sum.Add(1)
						}
					}
				}
			})
		}
		wg.Wait()
		t.Logf("%d runs: the vote was reserved for the one that left %d times, it was granted the key %d times, the next stalled %d times",
			runs, hits.Load(), granted.Load(), stalls.Load())
		if hits.Load() < int64(runs*2/5) {
			t.Error("too seldom: the test shows nothing")
		}
	})
}

// withdraw is one run. Either the one that leaves does not hear of its turn, or it leaves at about
// the time of the release.
func (b *bed) withdraw(t *testing.T, key string, holder, leaving, next *holdfast.Locker, proxies []*servertest.Proxy, unheard bool) (hit, granted, stalled bool) {
	var lost []*servertest.Swallowed
	if unheard {
		for _, p := range proxies {
			lost = append(lost, p.Swallow(wakeUp))
		}
	}
	lease, err := holder.Acquire(context.Background(), key)
	if err != nil {
		t.Error(err)
		return
	}
	first := acquire(t, leaving, key)
	b.parked(key, 1)
	second := acquire(t, next, key)
	b.parked(key, 2)
	for _, s := range b.servers {
		if labelOf(b.places(s, key)[0]) != "leaving" { // they came within the precision of their clocks
			release(t, lease)
			drain(t, 3*ttl, first, second)
			for _, s := range lost {
				s.Stop()
			}
			return b.withdraw(t, key+"'", holder, leaving, next, proxies, unheard)
		}
	}
	time.Sleep(asks) // so that neither asks by itself before the reservation ends
	var releasing sync.WaitGroup
	releasing.Go(func() { release(t, lease) })
	defer releasing.Wait()
	reserve := 12 * 100 * time.Millisecond // less than 16 round trips
	if unheard {
		servertest.Eventually(t, patience, func() error {
			if have := b.votes(key, "leaving"); have < b.quorum() {
				return fmt.Errorf("%s: %d nodes have reserved their vote (first waits: %t, second waits: %t): %s", key, have, first.waits(), second.waits(), b.state(key))
			}
			return nil
		})
		hit = first.waits()
		_, left := b.voted(b.servers[0], key)
		reserve = max(reserve*2/3, left)
	} else {
		time.Sleep(rand.N(2 * time.Millisecond))
	}
	first.cancel()
	left := time.Now()
	<-first.done
	if granted = first.err == nil; granted {
		left = time.Now()
		release(t, first.lease)
	} else if !errors.Is(first.err, context.Canceled) {
		t.Errorf("%s: the one that left is told %v", key, first.err)
	}
	lease = second.wait(3 * ttl)
	if d := second.at.Sub(left); d > reserve*3/4 {
		stalled = true
		t.Errorf("%s: the next has the key %v after the first has left, which had it reserved for %v more (unheard: %t, granted: %t)", key, d, reserve, unheard, granted)
	}
	release(t, lease)
	for _, s := range lost {
		s.Stop()
	}
	return hit, granted, stalled
}

// Clients that begin at the same instant split the votes of five nodes. Each that does not get
// the key has its place in the queue, by the time at which it came.
func TestLosersHaveTheirPlace(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 5)
			const rivals = 5
			var lockers []*holdfast.Locker
			var watch [rivals]*kit.Events
			for i := range rivals {
				watch[i] = &kit.Events{}
				lockers = append(lockers, b.locker(holdfast.Options{Observer: watch[i]}))
			}
			splits := 0
			var worst time.Duration
			for run := 0; run < kit.Count(8, 200) || splits == 0 && run < 200; run++ {
				key := "k" + strconv.Itoa(run)
				var claims []*claim
				for _, locks := range lockers {
					claims = append(claims, acquire(t, locks, key))
				}
				winner := -1
				servertest.Eventually(t, ttl, func() error {
					for i, c := range claims {
						if !c.waits() {
							winner = i
							return nil
						}
					}
					return fmt.Errorf("%s: nobody is granted the key", key)
				})
				began := time.Now()
				held := claims[winner].wait(ttl)
				servertest.Eventually(t, ttl/2, func() error {
					places := map[string]int{}
					for _, s := range b.servers {
						for _, owner := range b.places(s, key) {
							if owner != held.Owner() { // whose place at a node that it had to heal stays until its release
								places[inboxOf(owner)]++
							}
						}
					}
					for inbox, have := range places {
						if have < b.quorum() {
							return fmt.Errorf("%s: %s has a place on %d of 5 nodes: %s", key, inbox, have, b.state(key))
						}
					}
					if len(places) != rivals-1 {
						return fmt.Errorf("%s: %d claims have a place, want %d: %s", key, len(places), rivals-1, b.state(key))
					}
					return nil
				})
				worst = max(worst, time.Since(began))
				for i, w := range watch {
					won := false
					for _, e := range kit.Select[holdfast.Node](w) {
						won = won || e.Key == key && e.Op == "acquire" && e.Outcome == "ok" && i != winner
					}
					if won {
						splits++
						break
					}
				}
				release(t, held)
				drain(t, ttl, slices.Delete(claims, winner, winner+1)...)
			}
			t.Logf("the votes were split %d times; the last loser had its place after %v", splits, worst.Round(time.Millisecond))
			if splits == 0 {
				t.Error("no vote was split: the test shows nothing")
			}
		})
	}
}

// Many clients that always want the key have it equally often.
func TestTurnsAreFair(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n)
		var lockers []*holdfast.Locker
		for range kit.Count(8, 16) {
			lockers = append(lockers, b.locker(holdfast.Options{}))
		}
		r := newRelay(t, len(lockers))
		stop := r.start(lockers, "k", 0)
		r.reach(len(lockers)*kit.Count(40, 500), ttl*3/4)
		stop()
		j := jain(r.turns)
		t.Logf("turns %v, Jain %.4f, longest pause %v", r.turns, j, r.gap().Round(time.Millisecond))
		want := 0.95
		if kit.Soak() {
			want = 0.99
		}
		if j < want {
			t.Errorf("Jain's index is %.4f, less than %.2f", j, want)
		}
	})
}

// A wake-up is lost in a queue that moves fast, whose waiters know their rank of long ago: nobody
// waits for a timer by that.
func TestLostWakeUpInAFastQueue(t *testing.T) {
	alone(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		alone(t)
		b := newBed(t, c, n)
		proxies := kit.Proxies(t, b.servers)
		var lockers []*holdfast.Locker
		for range kit.Count(8, 16) {
			lockers = append(lockers, b.locker(holdfast.Options{}, proxies...))
		}
		r := newRelay(t, len(lockers))
		stop := r.start(lockers, "k", 0)
		r.reach(kit.Count(200, 2000)/n, ttl*3/4)
		for run := range kit.Count(2, 20) {
			r.gap()
			var lost []*servertest.Swallowed
			for _, p := range proxies {
				lost = append(lost, p.Swallow(servertest.Only(1, wakeUp)))
			}
			r.reach(r.total()+kit.Count(100, 500)/n, ttl*3/4)
			hits := 0
			for _, s := range lost {
				hits += s.Count()
				s.Stop()
			}
			if hits < b.quorum() {
				t.Errorf("%d messages were lost: the test shows nothing", hits)
			}
			within(t, fmt.Sprintf("run %d: longest pause after a lost wake-up", run), r.gap(), 250*time.Millisecond+asks, ttl*3/4)
		}
		stop()
		t.Logf("%d turns", r.total())
	})
}

// raceChild takes turns from a common start to a common end, with a clock of its own that is off,
// and says how many it had.
func raceChild() {
	args := kit.Args()
	off, _ := time.ParseDuration(args[0])
	if moveWall != nil {
		moveWall(off)
	}
	length, _ := time.ParseDuration(args[2])
	s, _ := kit.ChildStore(args[3:])
	locks, err := holdfast.New(s, &holdfast.Options{TTL: ttl})
	if err != nil {
		panic(err)
	}
	warm, err := locks.Acquire(context.Background(), "warm")
	if err == nil {
		err = warm.Release(context.Background())
	}
	kit.Say("ready", err)
	begin := readTime(args[1])
	time.Sleep(time.Until(begin))
	ctx, cancel := context.WithDeadline(context.Background(), begin.Add(length))
	defer cancel()
	turns := 0
	for ctx.Err() == nil {
		if lease, err := locks.Acquire(ctx, "k"); err == nil {
			turns++
			_ = lease.Release(context.Background())
		}
	}
	kit.Say("turns", turns)
}

// readTime waits for a file, and reads the time that it says.
func readTime(path string) time.Time {
	for {
		if text, err := os.ReadFile(path); err == nil {
			ns, _ := strconv.ParseInt(string(text), 10, 64)
			return time.Unix(0, ns)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// The clocks of clients are apart by 1 s, where the build can move them. They have their turns
// equally often all the same, as each corrects its clock by every answer.
func TestClocksApartAreFair(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n)
		begin := filepath.Join(t.TempDir(), "begin")
		length := time.Duration(kit.Count(3, 20)) * time.Second
		var racers []*kit.Process
		for i := range kit.Count(4, 8) {
			off := time.Duration(i%2) * time.Second
			racers = append(racers, kit.Child(t, "race", append([]string{off.String(), begin, length.String(), c.Name}, kit.Addrs(b.servers)...)...))
		}
		var turns []int
		for _, p := range racers {
			p.Expect(t, "ready", time.Minute)
		}
		at := []byte(strconv.FormatInt(time.Now().Add(100*time.Millisecond).UnixNano(), 10))
		if err := errors.Join(os.WriteFile(begin+"~", at, 0o600), os.Rename(begin+"~", begin)); err != nil {
			t.Fatal(err)
		}
		for _, p := range racers {
			k, err := strconv.Atoi(p.Expect(t, "turns", time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			turns = append(turns, k)
		}
		j := jain(turns)
		t.Logf("clocks apart: %t; turns %v, Jain %.4f", moveWall != nil, turns, j)
		want := 0.9
		if kit.Soak() {
			want = 0.98
		}
		if j < want {
			t.Errorf("Jain's index is %.4f, less than %.2f", j, want)
		}
	})
}
