package holdfast

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

const (
	maxInFlight = 16  // batches, and so goroutines, that wait for the store's answers
	maxBatch    = 512 // leases in one batch
)

// never is longer than any process runs: no extension is due, or one is running.
const never = 100 * 365 * 24 * time.Hour

// scheduler extends the leases of one family. It is driven by one timer, armed while there
// are leases, and has no goroutine of its own. It never waits for the store, and decides no
// loss: each lease has a timer for that. It also looks for a machine that slept, because
// those timers are late then.
type scheduler struct {
	f *family

	mu       sync.Mutex
	leases   dueHeap     // all that are valid
	timer    *time.Timer // runs pass
	next     clock.Instant
	inFlight int // batches

	tick    time.Duration // how often to look for sleep: the least that a lease asked for
	watched clock.Instant // since when sleep is counted, and how much there was
	slept   time.Duration
}

// add takes a new lease in, to be extended at due. l.mu is held.
func (s *scheduler) add(l *Lease, due clock.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.due = due; l.every == 0 {
		l.due = l.granted.Add(never)
	}
	heap.Push(&s.leases, l)
	tick := min(time.Second, l.ttl/10)
	if len(s.leases) == 1 {
		s.tick, s.watched, s.slept = tick, s.f.clk.Now(), 0
		s.arm(s.wait(s.watched))
		return
	}
	s.tick = min(s.tick, tick)
	s.hurry(l)
}

// remove forgets a lease that has ended.
func (s *scheduler) remove(l *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.index < 0 {
		return
	}
	heap.Remove(&s.leases, l.index)
	if len(s.leases) == 0 {
		s.timer.Stop()
	}
}

// plan sets when a lease is extended next.
func (s *scheduler) plan(l *Lease, at clock.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.index < 0 || l.every == 0 {
		return
	}
	l.due = at
	heap.Fix(&s.leases, l.index)
	s.hurry(l)
}

// hurry brings the next pass forward where it would come too late for l. s.mu is held.
func (s *scheduler) hurry(l *Lease) {
	now := s.f.clk.Now()
	if wait := min(s.tick, l.due.Sub(now)); wait < s.next.Sub(now) {
		s.arm(wait)
	}
}

// arm sets when the next pass comes. s.mu is held.
func (s *scheduler) arm(wait time.Duration) {
	s.next = s.f.clk.Now().Add(wait)
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.pass)
	} else {
		s.timer.Reset(wait)
	}
}

// early is when l may be extended together with one that is due. s.mu is held.
func early(l *Lease) clock.Instant { return l.due.Add(-l.every / 10) }

// wait returns how long there is nothing to do. s.mu is held, and there is a lease.
func (s *scheduler) wait(now clock.Instant) time.Duration {
	wait := s.tick
	if s.inFlight < maxInFlight { // else the end of a batch brings the next pass
		wait = min(wait, s.leases[0].due.Sub(now))
	}
	return max(0, wait)
}

// pass sends what is due, and looks whether the machine slept.
func (s *scheduler) pass() {
	s.mu.Lock()
	if len(s.leases) == 0 {
		s.mu.Unlock()
		return
	}
	late := s.awake()
	now := s.f.clk.Now()
	for _, b := range s.take(now) {
		go s.extend(b)
	}
	s.arm(s.wait(now))
	s.mu.Unlock()
	for _, l := range late {
		l.rearm()
	}
}

// awake returns the leases whose timers are late because the machine slept, and brings
// their extensions forward by that time. s.mu is held.
func (s *scheduler) awake() []*Lease {
	slept := s.f.clk.Slept(s.watched)
	nap := slept - s.slept
	if nap < time.Millisecond {
		return nil
	}
	s.slept = slept
	for _, l := range s.leases {
		l.due = l.due.Add(-nap)
	}
	heap.Init(&s.leases)
	return append([]*Lease(nil), s.leases...)
}

// batch is a set of leases of one ttl that are extended together.
type batch struct {
	ttl    time.Duration
	leases []*Lease
}

// take returns what is due, as far as the bound on batches allows. s.mu is held.
func (s *scheduler) take(now clock.Instant) (batches []*batch) {
	if s.leases[0].due.Sub(now) > 0 {
		return nil
	}
	limit := 1
	if _, ok := s.f.store.(store.BatchExtender); ok {
		limit = maxBatch
	}
	open := map[time.Duration]*batch{}
	for early(s.leases[0]).Sub(now) <= 0 {
		l := s.leases[0]
		b := open[l.ttl]
		if b == nil || len(b.leases) == limit {
			if s.inFlight == maxInFlight {
				break
			}
			s.inFlight++
			b = &batch{ttl: l.ttl}
			open[l.ttl] = b
			batches = append(batches, b)
		}
		b.leases = append(b.leases, l)
		l.due = now.Add(never)
		heap.Fix(&s.leases, 0)
	}
	return batches
}

// extend sends one batch. It may hang as long as the store does, and then holds up neither
// the other batches nor the loss of its own leases.
func (s *scheduler) extend(b *batch) {
	var claims []store.Claim
	var leases []*Lease
	for _, l := range b.leases {
		if _, ok := l.beginExtend(); ok { // else it has ended, or its holder extends it
			leases = append(leases, l)
			claims = append(claims, l.claim)
		}
	}
	if len(leases) > 0 {
		ctx, cancel := context.WithTimeout(batchTrace(leases), b.ttl/3)
		sent := s.f.clk.Now()
		results := s.ask(ctx, claims)
		cancel()
		for i, l := range leases {
			_ = l.endExtend(context.Background(), sent, results[i].Grant, results[i].Err)
		}
	}
	s.mu.Lock()
	s.inFlight--
	if len(s.leases) > 0 {
		s.arm(s.wait(s.f.clk.Now()))
	}
	s.mu.Unlock()
}

var errNoResult = errors.New("the store answered fewer results than claims")

// ask extends the claims of a batch; there is one where the store knows no batches.
func (s *scheduler) ask(ctx context.Context, claims []store.Claim) []store.Result {
	var results []store.Result
	if many, ok := s.f.store.(store.BatchExtender); ok {
		results = many.ExtendMany(ctx, claims)
	} else {
		for _, c := range claims {
			g, err := c.Extend(ctx)
			results = append(results, store.Result{Grant: g, Err: err})
		}
	}
	for len(results) < len(claims) {
		results = append(results, store.Result{Err: fmt.Errorf("%w: %w", ErrUncertain, errNoResult)})
	}
	return results
}

// batchTrace returns a context that tells node events to the Observers of the leases: an
// event about one key to that lease's, any other to each of them.
func batchTrace(leases []*Lease) context.Context {
	ctx := context.Background()
	byKey := map[string]*Locker{}
	all := map[*Observer]*Locker{}
	for _, l := range leases {
		if l.k.o.Observer != nil {
			byKey[l.key], all[l.k.observer] = l.k, l.k
		}
	}
	if len(all) == 0 {
		return ctx
	}
	return store.WithTrace(ctx, func(e store.NodeEvent) {
		if e.Key != "" {
			if k := byKey[e.Key]; k != nil {
				k.observe(ctx, Node{e})
			}
			return
		}
		for _, k := range all {
			k.observe(ctx, Node{e})
		}
	})
}

// dueHeap orders leases by the time of their next extension.
type dueHeap []*Lease

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].due.Sub(h[j].due) < 0 }
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *dueHeap) Push(x any) {
	l := x.(*Lease)
	l.index = len(*h)
	*h = append(*h, l)
}
func (h *dueHeap) Pop() any {
	old := *h
	l := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	l.index = -1
	return l
}
