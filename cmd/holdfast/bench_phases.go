package main

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
)

// meter collects how long operations of one kind took, and how many failed. The zero value
// is ready; it is safe for concurrent use.
type meter struct {
	mu     sync.Mutex
	took   []time.Duration
	failed int
	err    error // the first failure
}

func (m *meter) add(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.took = append(m.took, d)
}

func (m *meter) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed++; m.err == nil {
		m.err = err
	}
}

// sorted returns the durations since the nth, in ascending order.
func (m *meter) sorted(n int) []time.Duration {
	m.mu.Lock()
	s := slices.Clone(m.took[min(max(n, 0), len(m.took)):])
	m.mu.Unlock()
	slices.Sort(s)
	return s
}

func (m *meter) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.took)
}

// percentile is the smallest value that is not below share of all. sorted is not empty.
func percentile(sorted []time.Duration, share float64) time.Duration {
	n := int(share * float64(len(sorted)))
	if float64(n) < share*float64(len(sorted)) {
		n++
	}
	return sorted[min(max(n, 1), len(sorted))-1]
}

// watchMachine notes by how much the system wakes us up too late, until stop is called.
func (m *meter) watchMachine() (stop func()) {
	const nap = 10 * time.Millisecond
	end := make(chan struct{})
	go func() {
		for {
			began := time.Now()
			select {
			case <-time.After(nap):
				m.add(time.Since(began) - nap)
			case <-end:
				return
			}
		}
	}()
	return sync.OnceFunc(func() { close(end) })
}

// budget bounds a phase, in time and number of operations.
type budget struct {
	ctx   context.Context // of the whole measurement
	began time.Time
	time  time.Duration
	ops   int64
	used  atomic.Int64
}

func newBudget(ctx context.Context, d time.Duration, ops int) *budget {
	return &budget{ctx: ctx, began: time.Now(), time: d, ops: int64(ops)}
}

// next reports whether another operation may begin.
func (g *budget) next() bool {
	return g.ctx.Err() == nil && time.Since(g.began) < g.time && g.used.Add(1) <= g.ops
}

// share is how much of the budget has been used, from 0 to 1.
func (g *budget) share() float64 {
	return min(1, max(float64(time.Since(g.began))/float64(g.time), float64(g.used.Load())/float64(g.ops)))
}

// pause keeps a phase from repeating at full speed what fails at once.
func (g *budget) pause() {
	select {
	case <-time.After(20 * time.Millisecond):
	case <-g.ctx.Done():
	}
}

// cycleOnce acquires and releases a key, and books what succeeded in the meters that are not nil.
func (b *bench) cycleOnce(g *budget, locks *holdfast.Locker, key string, acquires, releases, cycles *meter) {
	t0 := time.Now()
	lease, err := locks.TryAcquire(g.ctx, key)
	t1 := time.Now()
	if err == nil {
		err = release(lease)
	}
	t2 := time.Now()
	switch {
	case err == nil:
		cycles.add(t2.Sub(t0))
		if acquires != nil {
			acquires.add(t1.Sub(t0))
			releases.add(t2.Sub(t1))
		}
	case g.ctx.Err() == nil:
		cycles.fail(err)
		g.pause()
	}
}

func (b *bench) oneAtATime(g *budget, locks *holdfast.Locker) {
	for n := 0; g.next(); n++ {
		b.pings.round(g.ctx, &b.cyclePing)
		b.acquires++
		b.cycleOnce(g, locks, b.key(n%b.f.parallel), &b.acquire, &b.release, &b.cycle)
	}
	if b.pings != nil {
		time.Sleep(lateAnswers)
	}
	b.nodes.freeze()
}

func (b *bench) extensions(g *budget, locks *holdfast.Locker) {
	var lease *holdfast.Lease
	defer func() {
		if lease != nil {
			_ = release(lease)
		}
	}()
	for g.next() {
		if lease == nil || lease.Err() != nil {
			if lease != nil {
				_ = release(lease) // it is lost; what the store still has of it would be in our way
			}
			var err error
			if lease, err = locks.TryAcquire(g.ctx, b.key(0)); err != nil {
				b.extend.fail(err)
				g.pause()
				continue
			}
		}
		b.pings.round(g.ctx, &b.extendPing)
		began := time.Now()
		switch err := lease.Extend(g.ctx); {
		case err == nil:
			b.extend.add(time.Since(began))
		case g.ctx.Err() == nil:
			b.extend.fail(err)
			g.pause()
		}
	}
}

func (b *bench) inParallel(g *budget) {
	var all sync.WaitGroup
	for n := range b.f.parallel {
		all.Go(func() {
			for g.next() {
				b.cycleOnce(g, b.locks[0], b.key(n), nil, nil, &b.parallel)
			}
		})
	}
	all.Wait()
	b.parallelTook = time.Since(g.began)
}

// holding is for how long each client of the phase hand-over keeps the key: long enough
// that the others are waiting when it goes.
const holding = 10 * time.Millisecond

// turns follows one key from client to client.
type turns struct {
	mu       sync.Mutex
	released time.Time     // zero before the first release
	taken    chan struct{} // closed at the next grant
}

// grant returns how long ago the key was released, if it was.
func (t *turns) grant() (since time.Duration, known bool) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.taken)
	t.taken = make(chan struct{})
	return now.Sub(t.released), !t.released.IsZero()
}

// release returns a channel that is closed when the next client has the key.
func (t *turns) release() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.released = time.Now()
	return t.taken
}

// handOvers lets the clients take turns. One that has released comes back when another has
// got the key: else it would get it again before the others look.
func (b *bench) handOvers(g *budget) {
	ctx, cancel := context.WithTimeout(g.ctx, g.time) // it ends waiting, too
	defer cancel()
	t := &turns{taken: make(chan struct{})}
	key := b.key(b.f.parallel)
	var all sync.WaitGroup
	for _, locks := range b.locks {
		all.Go(func() {
			for g.next() {
				lease, err := locks.Acquire(ctx, key)
				if ctx.Err() != nil { // also where the key was got in the last moment
					if err == nil {
						_ = release(lease)
					}
					return
				}
				if err != nil {
					b.handOver.fail(err)
					g.pause()
					continue
				}
				if since, known := t.grant(); known {
					b.handOver.add(since)
				}
				time.Sleep(holding)
				taken := t.release()
				if err := release(lease); err != nil {
					b.handOver.fail(err)
				}
				select {
				case <-taken:
				case <-ctx.Done():
				}
			}
			cancel() // the budget is used up: nobody else is to wait for a turn
		})
	}
	all.Wait()
}

// nodeMeters hears what each node answers to a request for its vote. It is an Observer.
type nodeMeters struct {
	mu     sync.Mutex
	frozen bool
	nodes  map[string]*nodeMeter
}

type nodeMeter struct {
	votes          meter // round trips of the answers
	given, refused int
}

// Observe implements [holdfast.Observer].
func (m *nodeMeters) Observe(_ context.Context, e holdfast.Event) {
	n, ok := e.(holdfast.Node)
	if !ok || n.Op != "acquire" || n.Err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.frozen {
		return
	}
	if m.nodes == nil {
		m.nodes = map[string]*nodeMeter{}
	}
	node := m.nodes[n.Node]
	if node == nil {
		node = &nodeMeter{}
		m.nodes[n.Node] = node
	}
	node.votes.add(n.Elapsed)
	if n.Outcome == "ok" {
		node.given++
	} else {
		node.refused++
	}
}

// freeze ends the count: later votes are those of other phases.
func (m *nodeMeters) freeze() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.frozen = true
}

// lateAnswers is for how long the last votes of nodes beyond the quorum are waited for.
const lateAnswers = 250 * time.Millisecond

// pinger asks Redis servers for the least that they can answer, over connections of the
// client library that the store uses.
type pinger struct {
	quorum int
	nodes  []*pinged
}

type pinged struct {
	name   string         // of the node
	client rueidis.Client // nil where it could not connect
	busy   atomic.Bool    // a PING is unanswered
	meter
}

const pingLimit = time.Second

// newPinger connects. A server that cannot be reached is not asked any more.
func newPinger(specs []storeSpec) (*pinger, error) {
	p := &pinger{quorum: len(specs)/2 + 1}
	var all sync.WaitGroup
	defer all.Wait()
	for _, s := range specs {
		o, err := s.client()
		if err != nil {
			return nil, err
		}
		o.DisableCache, o.Dialer.Timeout = true, pingLimit
		node, err := rueidisnode.Dial(o)
		if err != nil {
			return nil, err
		}
		n := &pinged{name: node.Name()}
		p.nodes = append(p.nodes, n)
		all.Go(func() {
			if c, err := rueidis.NewClient(o); err == nil {
				n.client = c
			}
		})
	}
	return p, nil
}

func (p *pinger) close() {
	for _, n := range p.nodes {
		if n.client != nil {
			n.client.Close()
		}
	}
}

// round sends a PING to all nodes and books in quorum the time until enough of them have
// answered. A node that has not answered the last one is left out. Without nodes it does
// nothing.
func (p *pinger) round(ctx context.Context, quorum *meter) {
	if p == nil {
		return
	}
	began := time.Now()
	ctx, cancel := context.WithDeadline(ctx, began.Add(pingLimit))
	if len(p.nodes) == 1 {
		defer cancel()
		if p.nodes[0].ping(ctx, began) {
			quorum.add(time.Since(began))
		}
		return
	}
	answers := make(chan bool, len(p.nodes))
	var asked sync.WaitGroup
	pending := 0
	for _, n := range p.nodes {
		if n.client == nil || !n.busy.CompareAndSwap(false, true) {
			continue
		}
		pending++
		asked.Go(func() {
			ok := n.ping(ctx, began)
			n.busy.Store(false)
			answers <- ok
		})
	}
	go func() {
		asked.Wait()
		cancel()
	}()
	for needed := p.quorum; pending >= needed; pending-- {
		if !<-answers {
			continue
		}
		if needed--; needed == 0 {
			quorum.add(time.Since(began))
			return
		}
	}
}

func (n *pinged) ping(ctx context.Context, began time.Time) bool {
	if n.client == nil || n.client.Do(ctx, n.client.B().Ping().Build()).Error() != nil {
		return false
	}
	n.add(time.Since(began))
	return true
}
