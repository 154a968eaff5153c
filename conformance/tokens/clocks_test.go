package tokens_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

const (
	year       = 365 * 24 * time.Hour
	jump       = 60 * time.Second
	quarantine = 31 * time.Second
)

// faults are what goes wrong in a world.
type faults struct{ nodeClocks, clientClocks, restarts bool }

// Whatever clocks and restarts do to exclusion, tokens are unique and grow. What the protocol
// assumes of clocks is kept: a node's clock goes back by less than 110 s, and it is left alone
// while the node is young and before a restart that loses what it had written ahead of time.
func TestTokensUnderClocksAndRestarts(t *testing.T) {
	cases := map[string]faults{
		"node clocks": {nodeClocks: true},
		"restarts":    {restarts: true},
		"all":         {nodeClocks: true, clientClocks: moveWall != nil, restarts: true},
	}
	if moveWall != nil {
		cases["client clocks"] = faults{clientClocks: true}
	}
	for name, f := range cases {
		for _, n := range []int{1, 5} {
			t.Run(fmt.Sprintf("%s/%d", name, n), func(t *testing.T) {
				if moveWall == nil {
					t.Parallel() // the clock of clients is one for the process
				}
				w := newWorld(t, n, f)
				for range kit.Count(40, 200) {
					w.round()
				}
				w.check()
			})
		}
	}
}

// world is a deployment in which time goes by when the test says so: by setting the clocks of
// all servers forward together. No lease is held while that is done, so nobody can tell it
// from waiting.
type world struct {
	t       *testing.T
	f       faults
	rng     *rand.Rand
	servers []*servertest.RedisServer
	nodes   [][]redlock.Node // of each client
	stores  []*redlock.Store
	begin   time.Time
	skipped time.Duration   // time that went by without waiting
	ahead   []time.Duration // of each server's clock
	back    []time.Duration // when its clock was last set back
	young   []bool
	saved   []*servertest.Snapshot
	deck    []func() // faults to come

	history
	keys, rounds                             int
	jumps, backs, restarts, emptied, refused int

	mu           sync.Mutex
	lows, aheads int     // answers
	errs         []error // of the present round
}

func newWorld(t *testing.T, n int, f faults) *world {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	w := &world{
		t: t, f: f, rng: rand.New(rand.NewPCG(seed, 0)), begin: time.Now(),
		servers: servertest.RedisN(t, n, servertest.Aged(time.Hour)),
		ahead:   make([]time.Duration, n), back: make([]time.Duration, n), young: make([]bool, n),
		saved: make([]*servertest.Snapshot, n), keys: 1,
	}
	for i := range n {
		w.back[i] = -time.Hour
	}
	for i := range 4 {
		w.nodes = append(w.nodes, rig.Nodes(t, rig.Clients[i%2], w.servers...))
	}
	w.renew()
	return w
}

// renew makes new processes of the clients: old ones would wait for a young node in real time.
func (w *world) renew() {
	w.stores = nil
	for _, nodes := range w.nodes {
		w.stores = append(w.stores, rig.Store(w.t, redlock.Options{NodeTimeout: time.Second}, nodes...))
	}
}

func (w *world) now() time.Duration { return time.Since(w.begin) + w.skipped }

func (w *world) set(i int) { w.servers[i].Clock().Set(w.skipped + w.ahead[i]) }

// pass lets time go by.
func (w *world) pass(d time.Duration) {
	w.skipped += d
	for i := range w.servers {
		w.set(i)
	}
}

// quarantine lets every node become old.
func (w *world) quarantine() {
	w.pass(quarantine)
	for i, s := range w.servers {
		if w.young[i] {
			servertest.Eventually(w.t, 5*time.Second, func() error {
				if up, _ := strconv.Atoi(s.Info("server", "uptime_in_seconds")); time.Duration(up)*time.Second < quarantine {
					return errors.New("the server's uptime does not follow its clock")
				}
				return nil
			})
		}
		w.young[i] = false
	}
	w.renew()
	if !w.f.clientClocks {
		return
	}
	// The clients meet the nodes before their clocks move, so that a first stamp for a key
	// whose mark is lost can be far behind.
	for i, st := range w.stores {
		c := st.Claim(fmt.Sprintf("warm%d-%d", w.rounds, i), store.ClaimOptions{TTL: ttl}) // fresh: a clock may have been set back
		servertest.Eventually(w.t, 10*time.Second, func() error {
			_, err := c.Try(context.Background())
			return err
		})
		_ = c.Release(context.Background())
	}
}

func (w *world) key() string { return "k" + strconv.Itoa(w.keys) }

// round is one turn of one client, or of two at once, after a fault.
func (w *world) round() {
	w.rounds++
	w.errs = nil
	w.fault()
	first := w.rng.IntN(len(w.stores))
	turns := []turn{w.turn(first)}
	if w.rng.IntN(4) == 0 {
		turns = append(turns, w.turn((first+1)%len(w.stores)))
	}
	for try := 0; ; try++ {
		granted := w.play(turns)
		if granted {
			return
		}
		w.refused++
		if w.f.restarts && try > 0 { // a client may have connections to what a server was before
			time.Sleep(100 * time.Millisecond << min(try, 4))
		}
		switch {
		case w.t.Failed() || try > 8:
			w.t.Fatalf("round %d: nobody is granted %s: %v", w.rounds, w.key(), errors.Join(w.errs...))
		case try == 0:
			w.pass(2 * ttl) // a holder that has died
		case w.anyYoung():
			w.quarantine()
		case w.f.nodeClocks:
			w.keys++ // a clock that was set back makes a key unavailable
		}
	}
}

func (w *world) anyYoung() bool {
	for _, y := range w.young {
		if y {
			return true
		}
	}
	return false
}

const ttl = 3 * time.Second

// turn is what one client does.
type turn struct {
	who         int
	clock       time.Duration // of the client
	dies, twice bool          // does not release; extends
}

func (w *world) turn(who int) turn {
	t := turn{who: who, dies: w.rng.IntN(6) == 0, twice: w.rng.IntN(3) == 0}
	if w.f.clientClocks {
		t.clock = []time.Duration{0, year, -year}[w.rng.IntN(3)]
		if w.anyYoung() && w.rng.IntN(2) == 0 {
			t.clock = -year // to meet a node that has forgotten its marks
		}
	}
	return t
}

// play lets the clients of a round try at once, and reports whether one was granted. The first
// one's clock is everybody's: it is one for the process.
func (w *world) play(turns []turn) bool {
	if moveWall != nil {
		defer moveWall(turns[0].clock)()
	}
	granted := make([]bool, len(turns))
	var wg sync.WaitGroup
	for i, turn := range turns {
		wg.Go(func() { granted[i] = w.acquire(turn) })
	}
	wg.Wait()
	for _, g := range granted {
		if g {
			return true
		}
	}
	return false
}

func (w *world) acquire(turn turn) bool {
	ctx := store.WithTrace(context.Background(), func(e store.NodeEvent) {
		w.mu.Lock()
		defer w.mu.Unlock()
		switch e.Outcome {
		case "low":
			w.lows++
		case "ahead":
			w.aheads++
		}
	})
	key := w.key()
	c := w.stores[turn.who].Claim(key, store.ClaimOptions{TTL: ttl})
	asked := w.tick()
	g, err := c.Try(ctx)
	if err != nil {
		w.mu.Lock()
		w.errs = append(w.errs, err)
		w.mu.Unlock()
		if errors.Is(err, store.ErrInvalid) {
			w.t.Errorf("%s: %v", key, err)
		}
		if err := c.Release(ctx); err != nil && !errors.Is(err, store.ErrUncertain) {
			w.t.Errorf("%s: release: %v", key, err)
		}
		return false
	}
	w.add(grant{key: key, who: turn.who, token: g.Token, asked: asked, counted: w.tick()})
	if turn.twice { // which heals nodes that have lost the vote
		if again, err := c.Extend(ctx); err == nil && again.Token != g.Token {
			w.t.Errorf("%s: an extension changed token %v to %v", key, g.Token, again.Token)
		}
	}
	if !turn.dies {
		_ = c.Release(ctx) // the lease may be lost by a jump
	}
	return true
}

// fault does one of the world's faults, or none: in a new order each time, each as often as
// the others.
func (w *world) fault() {
	if len(w.deck) == 0 {
		w.deck = []func(){func() {}, func() {}}
		if w.f.nodeClocks {
			w.deck = append(w.deck, w.jump, w.jumpBack)
		}
		if w.f.restarts {
			w.deck = append(w.deck, w.save, w.save, w.restart, w.restart, w.quarantine)
		}
		w.rng.Shuffle(len(w.deck), func(i, j int) { w.deck[i], w.deck[j] = w.deck[j], w.deck[i] })
	}
	w.deck[0]()
	w.deck = w.deck[1:]
}

// jump sets the clock of two of five nodes, or of one of one, ahead.
func (w *world) jump() {
	for _, i := range w.rng.Perm(len(w.servers))[:min(2, len(w.servers))] {
		if w.young[i] || w.aheadNow() >= max(1, len(w.servers)/2) {
			continue
		}
		w.ahead[i] = jump
		w.set(i)
		w.jumps++
		w.showClock(i, jump)
	}
}

func (w *world) aheadNow() int {
	n := 0
	for _, d := range w.ahead {
		if d > 0 {
			n++
		}
	}
	return n
}

func (w *world) jumpBack() {
	for i := range w.servers {
		if w.ahead[i] > 0 && !w.young[i] {
			w.ahead[i], w.back[i] = 0, w.now()
			w.set(i)
			w.backs++
			w.showClock(i, 0)
		}
	}
}

// showClock proves by the server's own TIME where its clock stands.
func (w *world) showClock(i int, want time.Duration) {
	off := time.Until(serverTime(w.t, w.servers[i])) - w.skipped
	if d := off - want; d.Abs() > 5*time.Second {
		w.t.Fatalf("the clock of node %d is %v ahead, not %v", i, off, want)
	}
}

func (w *world) save() {
	i := w.rng.IntN(len(w.servers))
	rig.Must(w.t, w.servers[i], "SET", "test:saved", strconv.Itoa(w.rounds))
	s := w.servers[i].SaveSnapshot()
	w.saved[i] = &s
	rig.Must(w.t, w.servers[i], "DEL", "test:saved")
}

// restart kills a node and starts it from its last snapshot, or from nothing.
func (w *world) restart() {
	i := w.rng.IntN(len(w.servers))
	if w.ahead[i] > 0 {
		w.jumpBack()
	}
	// What the node forgets must not be ahead of its clock when it is old.
	w.pass(max(0, w.back[i]+2*jump-w.now()))
	s := w.servers[i]
	id := s.Info("server", "run_id")
	rig.Must(w.t, s, "SET", "test:new", "1")
	s.Kill()
	if w.saved[i] != nil {
		s.RestoreSnapshot(*w.saved[i])
	} else {
		s.Wipe()
		w.emptied++
	}
	s.Restart()
	w.restarts++
	w.young[i] = true
	up, _ := strconv.Atoi(s.Info("server", "uptime_in_seconds"))
	if s.Info("server", "run_id") == id || up > 20 {
		w.t.Fatalf("node %d was not restarted: it is %d s old", i, up)
	}
	if rig.Must(w.t, s, "EXISTS", "test:new") != int64(0) || (w.saved[i] != nil) != (rig.Must(w.t, s, "EXISTS", "test:saved") == int64(1)) {
		w.t.Fatalf("the data of node %d has not gone back", i)
	}
}

func (w *world) check() {
	ordered := w.checkTokens(w.t)
	w.t.Logf("%d rounds, %d grants on %d keys, %d of them ordered after another; %d tries without a grant; clocks of nodes: %d jumps ahead, %d back; restarts: %d, of which %d from nothing; answers low %d, ahead %d",
		w.rounds, len(w.grants), w.keys, ordered, w.refused, w.jumps, w.backs, w.restarts, w.emptied, w.lows, w.aheads)
	if w.f.nodeClocks && (w.jumps == 0 || w.backs == 0) || w.f.restarts && w.restarts == 0 || w.f.clientClocks && (w.lows == 0 || w.aheads == 0) {
		w.t.Error("a fault did not happen")
	}
	if ordered < w.rounds/4 {
		w.t.Error("too few grants of one key in a row to show anything")
	}
}
