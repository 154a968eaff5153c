package queue

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/servertest"
)

// Half of the waiters are killed. A release skips them: the first live one has the key at once.
func TestDeadWaitersAreSkipped(t *testing.T) {
	alone(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		alone(t)
		b := newBed(t, c, n)
		slow := kit.Proxies(t, b.servers)
		holder := b.locker(holdfast.Options{}, slow...)
		for _, p := range slow {
			p.DelayReplies(100 * time.Millisecond)
		}
		for range 12 { // until it knows its round trip, and reserves for a long time
			kit.Warm(t, holder)
		}
		lease := kit.Acquire(t, holder, "k")
		all := kit.Count(6, 20)
		waiters := b.waiters("k", ttl, 0, all)
		for _, w := range waiters[:all/2] {
			w.Kill()
		}
		b.listened(all - all/2)
		b.parked("k", all) // nobody has taken the dead away
		next := waiters[all/2]
		released := time.Now()
		release(t, lease)
		within(t, fmt.Sprintf("the first after %d dead ones", all/2), next.granted(t, 3*ttl).Sub(released), 200*time.Millisecond, 1200*time.Millisecond)
		if have := b.votes("k", next.label); have < b.quorum() {
			t.Errorf("the one that says it was granted the key has %d votes", have)
		}
	})
}

// The first waiter is stopped. The release is its turn, which it loses when the reservation ends;
// the second one then has the key, whether it has waited for so long that it was told that it is
// next or has just come.
func TestStoppedWaiterLosesItsTurn(t *testing.T) {
	alone(t)
	servertest.CanPause(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		for _, waited := range []time.Duration{0, asks} {
			t.Run("waited "+waited.String(), func(t *testing.T) {
				alone(t)
				b := newBed(t, c, n)
				holder, other := b.locker(holdfast.Options{}), b.locker(holdfast.Options{Label: "second"})
				lease := kit.Acquire(t, holder, "k")
				first := b.waiters("k", ttl, 0, 1)[0]
				second := acquire(t, other, "k")
				b.parked("k", 2)
				time.Sleep(waited)
				first.Stop()
				released := time.Now()
				release(t, lease)
				var reserved time.Duration
				for _, s := range b.servers {
					if owner, left := b.voted(s, "k"); labelOf(owner) == first.label {
						reserved = max(reserved, time.Since(released)+left)
					}
				}
				if reserved == 0 {
					t.Fatal("nothing is reserved for the stopped waiter: the test shows nothing")
				}
				lease = second.wait(3 * ttl)
				within(t, fmt.Sprintf("the second, after a reservation of %v", reserved.Round(time.Millisecond)), second.at.Sub(released), reserved+asks, ttl*3/4)
				first.Cont() // and does not disturb the holder
				time.Sleep(200 * time.Millisecond)
				if have := b.votes("k", "second"); have < b.quorum() || lease.Err() != nil {
					t.Errorf("after the stopped waiter goes on, the holder has %d votes, and its lease says %v", have, lease.Err())
				}
				release(t, lease)
			})
		}
	})
}

// The same in a queue that moves fast: what the others know of their rank is long out of date.
func TestStoppedWaiterInAFastQueue(t *testing.T) {
	alone(t)
	servertest.CanPause(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		alone(t)
		b := newBed(t, c, n)
		var lockers []*holdfast.Locker
		for range 6 {
			lockers = append(lockers, b.locker(holdfast.Options{}))
		}
		stopped := kit.Child(t, "loop", append([]string{"k", ttl.String(), "stopped", c.Name}, kit.Addrs(b.servers)...)...)
		r := newRelay(t, len(lockers))
		stop := r.start(lockers, "k", 0)
		stopped.Expect(t, "looping", time.Minute)
		r.reach(kit.Count(200, 5000)/n, ttl)
		hits := 0
		for try := 0; hits < kit.Count(1, 5); try++ {
			if try > 20*kit.Count(1, 5) {
				t.Fatalf("stopped in its turn, or not at all: %d of %d tries were of use", hits, try)
			}
			r.reach(r.total()+200/n, ttl)
			r.gap()
			stopped.Stop()
			time.Sleep(20 * time.Millisecond) // what it has sent arrives
			holds := false                    // it may have voted: not just a reservation is to run out
			for _, s := range b.servers {
				owner, left := b.voted(s, "k")
				holds = holds || labelOf(owner) == "stopped" && left > ttl*3/4
			}
			if !holds {
				before := time.Now()
				r.reach(r.total()+5*len(lockers), ttl*3/4)
				gap := r.gap()
				if gap > 200*time.Millisecond { // its turn came
					hits++
					within(t, "longest pause after a waiter was stopped", gap, 250*time.Millisecond+asks, ttl*3/4)
				} else if time.Since(before) > ttl {
					t.Errorf("%d turns took %v", 5*len(lockers), time.Since(before))
				}
			}
			stopped.Cont()
		}
		stop()
		t.Logf("%d turns", r.total())
	})
}

// A host dies, with the holder and the first three waiters. The next one has the key within
// 2.25 ttl.
func TestHostDies(t *testing.T) {
	alone(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		for round := range kit.Count(1, 5) {
			t.Run(strconv.Itoa(round), func(t *testing.T) {
				alone(t)
				const ttl = 4 * time.Second
				b := newBed(t, c, n)
				holder := waiter{kit.Child(t, "wait", append([]string{"k", ttl.String(), "holder", c.Name}, kit.Addrs(b.servers)...)...), "holder"}
				holder.granted(t, time.Minute)
				waiters := b.waiters("k", ttl, 0, 5)
				time.Sleep(time.Duration(round) * ttl / 4)
				var wg sync.WaitGroup
				killed := time.Now()
				for _, w := range append([]waiter{holder}, waiters[:3]...) {
					wg.Go(w.Kill)
				}
				wg.Wait()
				within(t, "the next after a host has died", first(t, 10*ttl, waiters[3:]...).Sub(killed), ttl*9/4, ttl*11/4)
			})
		}
	})
}

// first is when the first of the waiters was granted the key, whoever that is.
func first(t testing.TB, limit time.Duration, waiters ...waiter) time.Time {
	t.Helper()
	lines := make(chan string, 2*len(waiters))
	for _, w := range waiters {
		go func() {
			for line := range w.Lines() {
				lines <- line
			}
		}()
	}
	for timeout := time.After(limit); ; {
		select {
		case line := <-lines:
			var ns int64
			if n, _ := fmt.Sscanf(line, "granted %d", &ns); n == 1 {
				return time.Unix(0, ns)
			}
		case <-timeout:
			t.Fatalf("none of %d waiters is granted the key within %v", len(waiters), limit)
		}
	}
}

// A holder dies, beside many other keys with a ttl, which keep Redis from noticing that the key
// has ended. The first waiter has it at the end of the ttl.
func TestHolderDiesBesideManyKeys(t *testing.T) {
	alone(t)
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		alone(t)
		const ttl = 3 * time.Second
		b := newBed(t, c, n)
		for _, s := range b.servers {
			rig.Must(t, s, "EVAL", `for i = 1, tonumber(ARGV[1]) do redis.call('SET', 'other' .. i, '', 'PX', 600000 + i) end`, "0", strconv.Itoa(kit.Count(5000, 50000)))
		}
		locks := b.locker(holdfast.Options{TTL: ttl})
		holder := waiter{kit.Child(t, "wait", append([]string{"k", ttl.String(), "holder", c.Name}, kit.Addrs(b.servers)...)...), "holder"}
		holder.granted(t, time.Minute)
		waiting := acquire(t, locks, "k")
		b.parked("k", 1)
		time.Sleep(asks) // past its first extension
		holder.Kill()
		var early, last []time.Time // when the votes end: not before, and not after
		for _, s := range b.servers {
			before := time.Now()
			owner, left := b.voted(s, "k")
			if labelOf(owner) != holder.label {
				t.Fatalf("a vote of %q; the test shows nothing", owner)
			}
			early, last = append(early, before.Add(left)), append(last, time.Now().Add(left))
		}
		lease := waiting.wait(5 * ttl)
		slices.SortFunc(early, time.Time.Compare)
		slices.SortFunc(last, time.Time.Compare)
		if d := early[b.quorum()-1].Sub(waiting.at); d > 2*time.Millisecond {
			t.Errorf("granted %v before the ttl of the dead holder ended", d)
		}
		within(t, "granted after the end of the ttl", waiting.at.Sub(last[b.quorum()-1]), 50*time.Millisecond, ttl)
		release(t, lease)
	})
}
