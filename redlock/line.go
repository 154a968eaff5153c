package redlock

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"
)

// Single is implemented by a [Node] that keeps deadlines by itself. A store of one node then
// makes its calls in the caller's goroutine, since waking another one costs more than the
// server does. A node that is found to be late is raced by the store, as all others are, for a
// while.
type Single interface {
	// RunOne is Run for one call. It returns when the deadline of ctx has passed, at the
	// latest, whatever the server, the network and the client do. It keeps nothing of call.
	RunOne(ctx context.Context, call *Call) Reply
}

const (
	// lateness is by how much a node may miss a deadline: a busy machine is slow, too.
	lateness = 200 * time.Millisecond
	// mistrust is for how long a node that was later than that is raced.
	mistrust = time.Minute
)

// direct returns the node where one call may be made in the caller's goroutine, until the node
// timeout: nobody else is to be asked, nothing is under way, it has answered last, and ctx leaves
// time for it. A client may wait for the connection that another call is making, beyond the
// deadline. The caller then calls runOne.
func (p *peer) direct(ctx context.Context) Single {
	if p.single == nil || len(p.s.peers) > 1 || ctx.Err() != nil {
		return nil
	}
	if end, ok := ctx.Deadline(); ok && time.Until(end) < p.s.opts.NodeTimeout+sharing {
		return nil
	}
	now := p.s.age()
	p.mu.Lock()
	defer p.mu.Unlock()
	if now < p.raced || p.misses > 0 || p.asked > 0 || !p.lines.begin(now) {
		return nil
	}
	p.askingLocked(1, now)
	return p.single
}

// runOne makes one call in the caller's goroutine. What was posted meanwhile goes out next.
func (p *peer) runOne(node Single, call *Call) Reply {
	sent := p.s.age()
	r := node.RunOne(p.s.short.get(sent, p.s.opts.NodeTimeout), call)
	if r.Err != nil {
		late := errors.Is(r.Err, context.DeadlineExceeded) || errors.Is(r.Err, os.ErrDeadlineExceeded)
		if late && !neverSent(r.Err) {
			r.Err = errNoAnswer{p.s.opts.NodeTimeout}
		}
	}
	now := p.s.age()
	if again, parked := p.lines.end(); again {
		p.start(parked)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.returnedLocked(1, answers(r), now)
	if now-sent > p.s.opts.NodeTimeout+sharing+lateness {
		p.raced = now + mistrust
	}
	return r
}

// directCall is what one call needs, to be used again.
type directCall struct {
	call    Call
	vote    voteCall
	release releaseCall
}

func (s *Store) directCall() *directCall {
	if d, ok := s.calls.Get().(*directCall); ok {
		return d
	}
	return new(directCall)
}

// Posted calls wait for the pipeline that is under way, and go out together as the next one:
// that is less work for client and server than as many requests at once, and some clients
// are at their fastest while one goroutine uses them. A node that takes longer than a quarter of the
// usual round trip, or that many wait for, has up to maxLines pipelines at the same time.
const (
	maxLines   = 4
	minLine    = time.Millisecond
	fullLine   = 16
	maxCarried = 128
)

// lines carry calls to a node.
type lines struct {
	mu      sync.Mutex
	waiting []posted
	running int
	began   time.Duration // when the last pipeline was sent
	parked  bool          // a goroutine waits for wake
	wake    chan struct{} // one goroutine is to go on; the sender has reset parked
}

// errand is a call to a node. Its methods are called in a goroutine of the node's, and must
// not block: call once or never, right before it is sent, when all earlier answers of the line
// are booked; answer once.
type errand interface {
	call() Call
	answer(Reply)
}

// posted is an errand on its way.
type posted struct {
	errand
	at time.Duration
}

// post sends a call without waiting. A node whose pipelines do not return gets further ones at
// the pace of the node timeout.
func (p *peer) post(e errand) {
	now := p.asking(1)
	l := &p.lines
	l.mu.Lock()
	l.waiting = append(l.waiting, posted{e, now})
	since := now - l.began
	start := l.running == 0 || since > p.s.opts.NodeTimeout ||
		l.running < maxLines && (since > max(minLine, p.s.roundTrip()/4) || len(l.waiting) >= fullLine)
	parked := false
	if start {
		l.running++
		l.began = now
		parked = l.unpark()
	}
	l.mu.Unlock()
	if start {
		p.start(parked)
	}
}

// start has a goroutine carry what waits: the parked one, which is then to be woken, or a new one.
func (p *peer) start(parked bool) {
	if parked {
		p.lines.wake <- struct{}{} // has room
		return
	}
	go p.carry()
}

// errStale is for a call that was never sent, because those before it took too long.
var errStale = notAsked{errors.New("earlier requests were unanswered")}

// carry sends what waits until nothing does, and then waits a while for more: the stack of a
// new goroutine has to grow first, each time. A Node of another kind may live in a bubble of
// testing/synctest, where a goroutine that waits would be left over.
func (p *peer) carry() {
	var calls []Call
	var batch []posted
	for now := p.s.age(); ; now = p.s.age() {
		var parked bool
		batch, parked = p.lines.take(now, p.single != nil, batch)
		if parked && p.woken() {
			continue
		}
		if len(batch) == 0 {
			return
		}
		calls = calls[:0]
		fresh := batch[:0]
		for _, q := range batch {
			if now-q.at > p.s.opts.NodeTimeout { // whoever posted it does not wait any more
				p.returned(1, false)
				q.answer(Reply{Err: errStale})
				continue
			}
			calls, fresh = append(calls, q.call()), append(fresh, q)
		}
		if len(calls) == 0 {
			continue
		}
		replies := p.send(calls)
		p.returned(len(calls), answers(replies...))
		for i, q := range fresh {
			q.answer(replies[i])
		}
		clear(calls) // which may be kept for a while
	}
}

// woken waits in the parked goroutine, and reports whether it is to go on.
func (p *peer) woken() bool {
	l := &p.lines
	select {
	case <-l.wake:
		return true
	case <-p.s.shortContext().Done():
	}
	l.mu.Lock()
	ends := l.unpark()
	l.mu.Unlock()
	if !ends { // somebody has just woken it
		<-l.wake
	}
	return !ends
}

// begin reports whether nothing was under way, and that something is now.
func (l *lines) begin(now time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running > 0 || len(l.waiting) > 0 {
		return false
	}
	l.running, l.began = 1, now
	return true
}

// end ends what begin began, and reports whether carry must go on in its place: see start.
func (l *lines) end() (again, parked bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) > 0 {
		return true, l.unpark()
	}
	l.running--
	return false, false
}

// unpark reports whether a goroutine was parked, which the caller must then wake, or end. l.mu is
// held.
func (l *lines) unpark() bool {
	parked := l.parked
	l.parked = false
	return parked
}

// take returns what waits, or nothing, with which the line has ended; its goroutine is parked then
// if it may be, and is the only one. The array of used serves those who post next.
func (l *lines) take(now time.Duration, mayPark bool, used []posted) (batch []posted, parked bool) {
	used = used[:cap(used)]
	clear(used)
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.running--
		parked = mayPark && !l.parked
		l.parked = l.parked || parked
		return used[:0], parked
	}
	n := min(len(l.waiting), maxCarried)
	batch = l.waiting[:n:n]
	if l.waiting = l.waiting[n:]; len(l.waiting) == 0 {
		l.waiting = used[:0]
	}
	l.began = now
	return batch, false
}
