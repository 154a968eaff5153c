package queue

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// Rounds with one fault each, in which a holder gives the key to three waiters, one after the
// other. Nobody is lost, and nobody waits for longer than is promised; where nothing was broken
// they come in order.
func TestFaultRounds(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		r := newRounds(t, c, n)
		for i := range kit.Count(6, 250) {
			if r.round(i); t.Failed() {
				break
			}
		}
		t.Logf("in %d rounds the queues had not the order of arrival", r.unlike)
		for name, hits := range r.hits {
			t.Logf("%s: %d rounds; longest wait %v", name, hits, r.worst[name].Round(time.Millisecond))
		}
	})
}

const (
	roundTTL = 3 * time.Second
	rivals   = 4
)

// rounds are servers that keep their data over a restart, so that nothing but waiting is broken.
type rounds struct {
	*bed
	proxies []*servertest.Proxy
	lockers []*holdfast.Locker
	relay   *relay
	rng     *rand.Rand
	deck    []trouble
	hits    map[string]int
	unlike  int // rounds in which they did not stand in the queues in the order in which they came
	worst   map[string]time.Duration
}

// trouble breaks something at node i, and answers how to show that it did and to mend it.
type trouble struct {
	name string
	do   func(r *rounds, i int) (hit func() bool, mend func())
}

func sure() bool { return true }

func nothing(*rounds, int) (func() bool, func()) { return sure, func() {} }

// wakeUp matches what a node tells a waiter for which it has reserved its vote.
func wakeUp(b []byte) bool {
	return bytes.Contains(b, []byte("w1 wake ")) || bytes.Contains(b, []byte("w1 grant "))
}

// lostWakeUp loses what the node tells the first waiter.
func lostWakeUp(r *rounds, i int) (func() bool, func()) {
	s := r.proxies[i].Swallow(servertest.Only(1, wakeUp))
	return func() bool { return s.Count() > 0 }, s.Stop
}

// lostWakeUps loses all that the node tells, in one round.
func lostWakeUps(r *rounds, i int) (func() bool, func()) {
	s := r.proxies[i].Swallow(servertest.Containing("w1 "))
	return func() bool { return s.Count() > 0 }, s.Stop
}

func killedSubscriptions(r *rounds, i int) (func() bool, func()) {
	killed := rig.Must(r.t, r.servers[i], "CLIENT", "KILL", "TYPE", "pubsub").(int64)
	return func() bool { return killed > 0 }, func() {}
}

func restarted(r *rounds, i int) (func() bool, func()) {
	id := r.servers[i].Info("server", "run_id")
	r.servers[i].Restart()
	return func() bool { return r.servers[i].Info("server", "run_id") != id }, func() {}
}

func dead(r *rounds, i int) (func() bool, func()) {
	r.servers[i].Kill()
	return sure, func() { r.servers[i].Restart() }
}

func frozen(r *rounds, i int) (func() bool, func()) {
	r.servers[i].Stop()
	return sure, r.servers[i].Cont
}

func newRounds(t *testing.T, c kit.Client, n int) *rounds {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := &rounds{bed: newBed(t, c, n, servertest.AppendOnly("always")), relay: newRelay(t, rivals),
		rng: rand.New(rand.NewPCG(seed, 0)), hits: map[string]int{}, worst: map[string]time.Duration{}}
	r.proxies = kit.Proxies(t, r.servers)
	for who := range rivals {
		store := kit.Store(t, c, redlock.Options{NodeTimeout: nodeTimeout, TrustRestarts: true}, kit.Addrs(r.proxies))
		r.lockers = append(r.lockers, kit.Locker(t, store, holdfast.Options{TTL: roundTTL, Label: strconv.Itoa(who)}))
	}
	return r
}

func (r *rounds) next() trouble {
	if len(r.deck) == 0 {
		r.deck = []trouble{{"nothing", nothing}, {"lost wake-up", lostWakeUp}, {"killed subscriptions", killedSubscriptions}, {"restarted node", restarted}}
		if len(r.servers) > 1 {
			r.deck = append(r.deck, trouble{"lost messages", lostWakeUps}, trouble{"dead node", dead}, trouble{"frozen node", frozen})
		}
		r.rng.Shuffle(len(r.deck), func(i, j int) { r.deck[i], r.deck[j] = r.deck[j], r.deck[i] })
	}
	next := r.deck[0]
	r.deck = r.deck[1:]
	return next
}

// limit is how long a waiter waits at most beside the others' turns.
func (r *rounds) limit() time.Duration {
	if len(r.servers) == 1 {
		return roundTTL * 9 / 4
	}
	return roundTTL + time.Second
}

func (r *rounds) round(number int) {
	r.everywhere()
	lease, err := r.lockers[0].Acquire(kit.Context(r.t, patience), "k")
	if err != nil {
		r.t.Fatalf("round %d: the holder: %v", number, err)
	}
	r.relay.enter(0, lease)
	before := r.relay.total()
	results := make(chan time.Time, rivals)
	for who := 1; who < rivals; who++ {
		go r.wait(who, results)
		r.parked("k", who)
	}
	r.listened(rivals - 1) // none is still cut off by the round before
	order := r.order()
	f, i := r.next(), r.rng.IntN(len(r.servers))
	hit, mend := f.do(r, i)
	released := time.Now()
	r.relay.leave(lease)
	release(r.t, lease)
	var worst time.Duration
	for range rivals - 1 {
		select {
		case at := <-results:
			worst = max(worst, at.Sub(released))
		case <-time.After(4*roundTTL + patience):
			mend()
			r.t.Fatalf("round %d, %s at node %d: a waiter is lost: nothing for %v", number, f.name, i, time.Since(released))
		}
	}
	servertest.Eventually(r.t, patience, func() error { // a node beyond the quorum may be late
		if !hit() {
			return fmt.Errorf("round %d, %s at node %d: nothing was broken", number, f.name, i)
		}
		return nil
	})
	mend()
	r.hits[f.name]++
	r.worst[f.name] = max(r.worst[f.name], worst)
	if worst > r.limit() {
		r.t.Errorf("round %d, %s at node %d: a waiter waits for %v after the release, more than %v", number, f.name, i, worst, r.limit())
	}
	if !slices.Equal(order, []int{1, 2, 3}) {
		r.unlike++ // they came within the precision of their clocks, after slow answers
	}
	if got := r.relay.order[before:]; f.name == "nothing" && order != nil && !slices.Equal(got, order) {
		r.t.Errorf("round %d, nothing broken: waiters are granted the key in the order %v, and stood in the queues as %v", number, got, order)
	}
}

// order is how the waiters stand in the queues, or nil where the nodes differ.
func (r *rounds) order() (order []int) {
	for i, s := range r.servers {
		var at []int
		for _, owner := range r.places(s, "k") {
			who, _ := strconv.Atoi(labelOf(owner))
			at = append(at, who)
		}
		if i > 0 && !slices.Equal(at, order) {
			return nil
		}
		order = at
	}
	return order
}

// wait is one waiter's turn, which is short. It answers when it began.
func (r *rounds) wait(who int, result chan<- time.Time) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*roundTTL+patience)
	defer cancel()
	lease, err := r.lockers[who].Acquire(ctx, "k")
	at := time.Now()
	defer func() { result <- at }()
	if err != nil {
		r.t.Errorf("waiter %d: %v", who, err)
		return
	}
	r.relay.enter(who, lease)
	time.Sleep(2 * time.Millisecond)
	r.relay.leave(lease)
	if err := lease.Release(context.Background()); err != nil && !errors.Is(err, holdfast.ErrUncertain) {
		r.t.Errorf("waiter %d: Release: %v", who, err)
	}
}

// everywhere waits until every locker reaches every server, so that nothing of the round before
// is left or still broken.
func (r *rounds) everywhere() {
	kit.NoKeys(r.t, patience, r.servers)
	for i, locks := range r.lockers {
		key := fmt.Sprintf("warm%d", i)
		servertest.Eventually(r.t, patience, func() error {
			lease, err := locks.TryAcquire(context.Background(), key)
			if err != nil {
				return err
			}
			defer lease.Release(context.Background())
			time.Sleep(5 * time.Millisecond) // the round may end before the last one answers
			for j, s := range r.servers {
				if owner, _ := r.voted(s, key); owner != lease.Owner() {
					return fmt.Errorf("locker %d does not reach node %d", i, j)
				}
			}
			return nil
		})
	}
}
