package holdfast

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

const (
	maxInFlight = 16  // batches, and so goroutines, that wait for the store's answers
	maxBatch    = 512 // leases in one batch
	fewLeases   = 64  // so many are extended in company; of more, the load is spread
	portion     = 64  // leases that are extended at a time where the load is spread
)

// scheduler watches and extends the leases of one family. It is driven by one timer, which
// runs at least once a tick while there are leases, and has no goroutine of its own. It never
// waits for the store, nor for an Observer: losses come in time whatever those do. It also
// looks for a machine that slept, because the timer is late then.
type scheduler struct {
	f *family

	mu       sync.Mutex
	ends     agenda      // all leases that are valid, by when to look at their validity
	dues     agenda      // those that no extension runs for, by when the next one is due
	timer    *time.Timer // runs pass
	armed    bool        // it will, at next
	next     clock.Instant
	inFlight int // batches

	tick    time.Duration // how often to look for sleep: the least that a lease asked for
	watched clock.Instant // since when sleep is counted, and how much there was
	slept   time.Duration

	rate float64 // extensions per second that the leases ask for
	owed float64 // how many an even load would have sent until then, and were not
	then clock.Instant
}

// The agendas, and the indices of Lease.at and Lease.place.
const (
	ends = iota
	dues
	agendas
)

// on is an instant as the agendas compare it: by Go's clock, as timers do.
func on(i clock.Instant) time.Duration { return i.Sub(clock.Instant{}) }

// add takes a new lease in. l.mu is held.
func (s *scheduler) add(l *Lease, now clock.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tick := min(time.Second, l.ttl/10)
	if len(s.ends.leases) == 0 {
		s.tick, s.watched, s.slept, s.rate = tick, now, 0, 0
	}
	s.tick = min(s.tick, tick)
	s.ends.put(l, on(now)+l.nextAlarm(now))
	if l.every > 0 {
		s.rate += 1 / l.every.Seconds()
		s.dues.put(l, on(l.granted.Add(l.pace)))
	}
	s.hurry(l, now)
}

// remove forgets a lease that has ended. The timer is left to find that out.
func (s *scheduler) remove(l *Lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.place[ends] == 0 {
		return
	}
	s.ends.drop(l)
	s.dues.drop(l)
	if l.every > 0 {
		s.rate -= 1 / l.every.Seconds()
	}
}

// plan sets when a lease is extended next, and looks at its validity anew. l.mu is held, and
// the lease has not ended.
func (s *scheduler) plan(l *Lease, at, now clock.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.every > 0 {
		s.dues.put(l, on(at))
	}
	s.ends.put(l, on(now)+l.nextAlarm(now))
	s.hurry(l, now)
}

// look sets when to look at the validity of a lease. l.mu is held, and it has not ended.
func (s *scheduler) look(l *Lease, now clock.Instant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends.put(l, on(now)+l.nextAlarm(now))
	s.hurry(l, now)
}

// hurry brings the next pass forward where it would come too late for l. s.mu is held.
func (s *scheduler) hurry(l *Lease, now clock.Instant) {
	wait := min(s.beat(), l.at[ends]-on(now))
	if l.place[dues] > 0 && s.inFlight < maxInFlight {
		wait = min(wait, l.at[dues]-on(now))
	}
	if !s.armed || wait < s.next.Sub(now) {
		s.arm(max(0, wait), now)
	}
}

// arm sets when the next pass comes. s.mu is held.
func (s *scheduler) arm(wait time.Duration, now clock.Instant) {
	s.armed, s.next = true, now.Add(wait)
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.pass)
	} else {
		s.timer.Reset(wait)
	}
}

// wait returns how long there is nothing to do. s.mu is held, and there is a lease.
func (s *scheduler) wait(now clock.Instant) time.Duration {
	wait := min(s.beat(), s.ends.leases[0].at[ends]-on(now))
	if len(s.dues.leases) > 0 && s.inFlight < maxInFlight { // else the end of a batch brings the next pass
		wait = min(wait, s.dues.leases[0].at[dues]-on(now))
	}
	return max(0, wait)
}

// beat returns the longest time between two passes. s.mu is held, and there is a lease.
func (s *scheduler) beat() time.Duration {
	if len(s.dues.leases) <= fewLeases || s.inFlight == maxInFlight {
		return s.tick
	}
	return min(s.tick, max(time.Millisecond, time.Duration(portion/s.rate*float64(time.Second))))
}

// pass ends what has run out, sends what is due, and looks whether the machine slept.
func (s *scheduler) pass() {
	s.mu.Lock()
	s.armed = false
	if len(s.ends.leases) == 0 {
		s.mu.Unlock()
		return
	}
	now := s.f.clk.Now()
	s.awake(now)
	var rung []*Lease
	for s.ends.leases[0].at[ends] <= on(now) {
		l := s.ends.leases[0]
		s.ends.put(l, math.MaxInt64) // until it has been looked at
		rung = append(rung, l)
	}
	for _, b := range s.take(now) {
		go s.extend(b)
	}
	s.arm(s.wait(now), now)
	s.mu.Unlock()
	var news news
	for _, l := range rung {
		news.add(l, l.alarm(now))
	}
	news.tell(context.Background()) // the timer is set: the next pass does not wait for this one
}

// awake brings everything forward by the time that the machine slept, while Go's clock stood
// still. s.mu is held.
func (s *scheduler) awake(now clock.Instant) {
	slept := now.Slept(s.watched)
	nap := slept - s.slept
	if nap < time.Millisecond {
		return
	}
	s.slept = slept
	s.ends.shift(-nap)
	s.dues.shift(-nap)
}

// batch is a set of leases of one ttl that are extended together.
type batch struct {
	ttl    time.Duration
	leases []*Lease
}

// take returns what is due, as far as the bound on batches allows, and some that will be: of
// few leases those that will be soon, where one is; of many as many as an even load has.
// s.mu is held.
func (s *scheduler) take(now clock.Instant) (batches []*batch) {
	share, few := s.share(now), len(s.dues.leases) <= fewLeases
	limit := 1
	if _, ok := s.f.store.(store.BatchExtender); ok {
		limit = maxBatch
	}
	var open map[time.Duration]*batch
	taken := 0
	for ; len(s.dues.leases) > 0; taken++ {
		l := s.dues.leases[0]
		wait := l.at[dues] - on(now)
		company := few && taken > 0 && wait <= l.every/10
		spread := taken < share && wait <= l.every*49/50 // leave alone what may not live long
		if wait > 0 && !company && !spread {
			break
		}
		b := open[l.ttl]
		if b == nil || len(b.leases) == limit {
			if s.inFlight == maxInFlight {
				break
			}
			s.inFlight++
			b = &batch{ttl: l.ttl}
			if open == nil {
				open = map[time.Duration]*batch{}
			}
			open[l.ttl] = b
			batches = append(batches, b)
		}
		b.leases = append(b.leases, l)
		s.dues.drop(l)
	}
	s.owed = max(0, s.owed-float64(taken))
	return batches
}

// share returns how many leases are to be extended now, due or not, so that the store has an
// even load also where all of them were granted, or recovered, at once. The load is a little
// larger than it need be: else what a late timer leaves out would gather. s.mu is held.
func (s *scheduler) share(now clock.Instant) int {
	passed := now.Sub(s.then)
	s.then = now
	if len(s.dues.leases) <= fewLeases {
		s.owed = 0
		return 0
	}
	s.owed = min(s.owed+1.03*s.rate*passed.Seconds(), 1.5*portion)
	return int(s.owed)
}

// extend sends one batch. It may hang as long as the store does, and then holds up neither
// the other batches nor the loss of its own leases.
func (s *scheduler) extend(b *batch) {
	claims := make([]store.Claim, 0, len(b.leases))
	leases := make([]*Lease, 0, len(b.leases))
	var news news
	now := s.f.clk.Now()
	for _, l := range b.leases {
		news.add(l, l.expire(now))
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
		now = s.f.clk.Now()
		for i, l := range leases {
			e, _ := l.endExtend(context.Background(), sent, now, results[i].Grant, results[i].Err)
			news.add(l, e)
		}
	}
	news.tell(context.Background()) // after all are booked: an Observer may release any of them
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inFlight--
	if now := s.f.clk.Now(); len(s.ends.leases) > 0 {
		s.arm(s.wait(now), now)
	}
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

// agenda is a heap of leases by one of their times.
type agenda struct {
	which  int
	leases []*Lease
}

// put sets the time of a lease, which may be there already.
func (a *agenda) put(l *Lease, at time.Duration) {
	l.at[a.which] = at
	if p := l.place[a.which]; p > 0 {
		heap.Fix(a, int(p-1))
	} else {
		heap.Push(a, l)
	}
}

// drop takes a lease out, if it is there.
func (a *agenda) drop(l *Lease) {
	if p := l.place[a.which]; p > 0 {
		heap.Remove(a, int(p-1))
	}
}

// shift moves all times by d, which leaves their order as it is.
func (a *agenda) shift(d time.Duration) {
	for _, l := range a.leases {
		if l.at[a.which] != math.MaxInt64 {
			l.at[a.which] += d
		}
	}
}

func (a *agenda) Len() int           { return len(a.leases) }
func (a *agenda) Less(i, j int) bool { return a.leases[i].at[a.which] < a.leases[j].at[a.which] }
func (a *agenda) Swap(i, j int) {
	ls := a.leases
	ls[i], ls[j] = ls[j], ls[i]
	ls[i].place[a.which], ls[j].place[a.which] = int32(i+1), int32(j+1)
}
func (a *agenda) Push(x any) {
	l := x.(*Lease)
	a.leases = append(a.leases, l)
	l.place[a.which] = int32(len(a.leases))
}
func (a *agenda) Pop() any {
	last := len(a.leases) - 1
	l := a.leases[last]
	a.leases[last] = nil
	a.leases = a.leases[:last]
	l.place[a.which] = 0
	return l
}
