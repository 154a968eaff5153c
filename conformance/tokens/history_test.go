package tokens_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// Clients acquire, wait in the queue or do not, extend, release and abandon leases and places at
// random, while nodes are killed, frozen and restarted with and without their data, and the
// network delays, loses and resets. No clock is set while anybody holds anything, so no two may
// hold a key together.
func TestRandomHistory(t *testing.T) {
	for _, n := range []int{1, 3, 5} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			r := newRun(t, n, rand.New(rand.NewPCG(seed, 0)))
			epochs := kit.Count(3, 40)
			for i := 0; i < epochs || i < 4*epochs && r.little(); i++ { // faults may leave no time to one node
				r.epoch()
				if t.Failed() {
					break
				}
			}
			r.check()
		})
	}
}

const (
	epochLength = 3 * time.Second
	longest     = time.Second // ttl
)

// run is a history. It consists of epochs, between which nobody holds anything and the clocks
// of all servers are set forward together, so that those that were restarted become old.
type run struct {
	t       *testing.T
	rng     *rand.Rand // of the faults
	servers []*servertest.RedisServer
	proxies []*servertest.Proxy
	nodes   [][]redlock.Node // of each client
	skipped time.Duration
	last    time.Duration // before the end of the epoch: when a node is restarted at the latest
	young   []bool
	bad     []time.Time // until when
	frozen  []bool

	history
	held, waited, tooYoung, unavailable, lost, extended, abandoned, released, deserted atomic.Int64
	kept, emptied, freezes                                                             int
}

func newRun(t *testing.T, n int, rng *rand.Rand) *run {
	r := &run{t: t, rng: rng, young: make([]bool, n), bad: make([]time.Time, n), frozen: make([]bool, n)}
	servertest.CanPause(t)
	r.servers = servertest.RedisN(t, n, servertest.Aged(time.Hour), servertest.AppendOnly("always"))
	r.proxies = kit.Proxies(t, r.servers)
	for i := range 4 {
		r.nodes = append(r.nodes, rig.Nodes(t, rig.Clients[i%2], r.proxies...))
	}
	return r
}

func (r *run) epoch() {
	var workers sync.WaitGroup
	end := time.Now().Add(epochLength)
	for i := range 8 {
		// A process that knew a node as young would wait in real time for it.
		if i%2 == 0 {
			st := rig.Store(r.t, redlock.Options{NodeTimeout: 150 * time.Millisecond}, r.nodes[i/2]...)
			for j := range 2 {
				rng := rand.New(rand.NewPCG(r.rng.Uint64(), 1))
				workers.Go(func() { r.work(i+j, st, rng, end) })
			}
		}
	}
	r.last = epochLength / 4
	for time.Now().Before(end) {
		r.fault(end)
		time.Sleep(time.Duration(r.rng.IntN(100)) * time.Millisecond)
	}
	for i := range r.servers {
		r.mend(i)
	}
	workers.Wait()
	time.Sleep(longest) // the promises that clients may still trust
	r.skipped += quarantine
	for i, s := range r.servers {
		s.Clock().Set(r.skipped)
		if r.young[i] {
			servertest.Eventually(r.t, 10*time.Second, func() error {
				if up, _ := strconv.Atoi(s.Info("server", "uptime_in_seconds")); time.Duration(up)*time.Second < quarantine {
					return errors.New("the server's uptime does not follow its clock")
				}
				return nil
			})
		}
		r.young[i] = false
	}
}

// work is one worker of a client.
func (r *run) work(who int, st *redlock.Store, rng *rand.Rand, end time.Time) {
	upTo := func(d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }
	ctx := context.Background()
	for time.Now().Before(end) {
		key := "k" + strconv.Itoa(rng.IntN(3))
		ttl := (longest/4 + upTo(longest*3/4)).Truncate(time.Millisecond)
		waits := rng.IntN(3) > 0
		c := st.Claim(key, store.ClaimOptions{TTL: ttl, Wait: waits})
		waited := false
		for tries := rng.IntN(20); ; tries-- {
			asked, start := r.tick(), time.Now()
			g, err := c.Try(ctx)
			from := time.Now()
			if err == nil {
				if waited {
					r.waited.Add(1)
				}
				r.hold(grant{key: key, who: who, token: g.Token, asked: asked, counted: r.tick(), from: from}, c, ttl, start.Add(g.TTL-store.Drift(ttl)), upTo)
				break
			}
			r.count(err)
			if tries <= 0 || !time.Now().Before(end) {
				if waits && rng.IntN(4) == 0 { // as a process that is stopped: its turn may come, and it does not
					r.deserted.Add(1)
					defer c.Release(ctx)
					break
				}
				_ = c.Release(ctx) // a try may have left votes, and a place in the queue
				break
			}
			var held *store.HeldError
			if waited = waits && errors.As(err, &held) && rng.IntN(8) > 0; waited {
				short, cancel := context.WithTimeout(ctx, upTo(longest))
				_ = c.(store.Waiter).Wait(short, held)
				cancel()
			} else {
				time.Sleep(upTo(40 * time.Millisecond)) // also beside a reservation
			}
		}
		time.Sleep(upTo(20 * time.Millisecond))
	}
}

func (r *run) count(err error) {
	var young *redlock.YoungError
	switch {
	case errors.Is(err, store.ErrInvalid) || errors.Is(err, store.ErrLost):
		r.t.Errorf("acquire: %v", err)
	case errors.Is(err, store.ErrHeld):
		r.held.Add(1)
	case errors.Is(err, store.ErrUnavailable):
		r.unavailable.Add(1)
	default:
		r.t.Errorf("an error without a kind: %v", err)
	}
	if errors.As(err, &young) {
		r.tooYoung.Add(1)
	}
}

// hold keeps a lease for a while, extends it now and then, and releases or abandons it. The
// holder could trust it until the last moment of its validity, or until it released.
func (r *run) hold(g grant, c store.Claim, ttl time.Duration, until time.Time, upTo func(time.Duration) time.Duration) {
	ctx := context.Background()
	for n := int(upTo(4)); n > 0; n-- {
		time.Sleep(upTo(ttl * 2 / 5))
		start := time.Now()
		again, err := c.Extend(ctx)
		switch {
		case err == nil:
			if again.Token != g.token {
				r.t.Errorf("%s: an extension changed token %v to %v", g.key, g.token, again.Token)
			}
			r.extended.Add(1)
			// Late answers to an earlier extension may have kept the lease beyond until, which
			// nobody could know; it has then been held all the time.
			if u := start.Add(again.TTL - store.Drift(ttl)); u.After(until) {
				until = u
			}
			continue
		case errors.Is(err, store.ErrLost):
			r.lost.Add(1)
		case errors.Is(err, store.ErrUnavailable):
			continue
		default:
			r.t.Errorf("%s: extend: %v", g.key, err)
		}
		break
	}
	time.Sleep(upTo(ttl / 8))
	g.to = until
	if upTo(4) == 0 {
		r.abandoned.Add(1)
		r.add(g)
		return
	}
	if now := time.Now(); now.Before(until) {
		g.to = now
	}
	r.add(g)
	r.released.Add(1)
	if err := c.Release(ctx); err != nil && !errors.Is(err, store.ErrLost) && !errors.Is(err, store.ErrUncertain) {
		r.t.Errorf("%s: release: %v", g.key, err)
	}
}

// fault ends what is due and does something to a node, mostly to so few that a quorum is left.
func (r *run) fault(end time.Time) {
	out, young := 0, 0
	for i, until := range r.bad {
		if !until.IsZero() && time.Now().After(until) {
			r.mend(i)
		}
		if !r.bad[i].IsZero() || r.young[i] {
			out++
		}
		if r.young[i] {
			young++
		}
	}
	n := len(r.servers)
	i := r.rng.IntN(n)
	if time.Until(end) < r.last { // at least one in each epoch, and only one of an only node
		r.last = 0
		r.restart(i)
		return
	}
	if !r.bad[i].IsZero() || out >= max(1, (n-1)/2) && r.rng.IntN(8) > 0 {
		return
	}
	p := r.proxies[i]
	r.bad[i] = time.Now().Add(time.Duration(50+r.rng.IntN(600)) * time.Millisecond)
	kind := r.rng.IntN(6)
	if r.freezes == 0 {
		kind = 1 // at least one in each run
	}
	switch kind {
	case 0:
		if n > 1 && (r.young[i] || young < (n-1)/2) {
			r.restart(i)
		}
	case 1:
		r.servers[i].Stop()
		r.frozen[i] = true
		r.freezes++
	case 2:
		p.Delay(time.Duration(r.rng.IntN(300)) * time.Millisecond)
	case 3:
		p.BlackHole()
	case 4:
		p.DropReplies()
	case 5:
		p.Reset()
	}
}

// mend ends a node's fault.
func (r *run) mend(i int) {
	if r.frozen[i] {
		r.servers[i].Cont()
	}
	r.proxies[i].Heal()
	r.frozen[i], r.bad[i] = false, time.Time{}
}

// restart kills a node and starts it again, with or without its data.
func (r *run) restart(i int) {
	s := r.servers[i]
	s.Kill()
	r.frozen[i], r.young[i] = false, true
	if r.rng.IntN(2) == 0 {
		s.Wipe()
		r.emptied++
	} else {
		r.kept++
	}
	time.Sleep(time.Duration(r.rng.IntN(300)) * time.Millisecond)
	s.Restart()
	if up, _ := strconv.Atoi(s.Info("server", "uptime_in_seconds")); up > 25 {
		r.t.Errorf("a restarted server says it is %d s old", up)
	}
}

// little reports whether too little has happened to show anything.
func (r *run) little() bool {
	return len(r.grants) < 10 || r.waited.Load() == 0 || r.kept+r.emptied == 0 || r.freezes == 0
}

func (r *run) check() {
	ordered := r.checkTokens(r.t)
	r.checkExclusion(r.t)
	var c servertest.Counts
	for _, p := range r.proxies {
		n := p.Counts()
		c.Delayed, c.BlackHoled, c.Dropped, c.Reset = c.Delayed+n.Delayed, c.BlackHoled+n.BlackHoled, c.Dropped+n.Dropped, c.Reset+n.Reset
	}
	r.t.Logf("%d grants, %d of them after a wait, %d ordered; %d places deserted; %d extensions, %d lost, %d released, %d abandoned; refused: %d held, %d unavailable, %d of them with a young node; "+
		"%d restarts with data, %d without, %d freezes; messages: %d delayed, %d black-holed, %d replies dropped, %d connections reset",
		len(r.grants), r.waited.Load(), ordered, r.deserted.Load(), r.extended.Load(), r.lost.Load(), r.released.Load(), r.abandoned.Load(), r.held.Load(), r.unavailable.Load(), r.tooYoung.Load(),
		r.kept, r.emptied, r.freezes, c.Delayed, c.BlackHoled, c.Dropped, c.Reset)
	if r.little() || ordered == 0 || c.Delayed+c.BlackHoled+c.Dropped+c.Reset == 0 {
		r.t.Error("too little happened to show anything")
	}
}
