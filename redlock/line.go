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
// timeout: nobody else is to be asked, nothing is under way, and ctx leaves time for it. The
// caller then calls runOne.
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
	if now < p.raced || !p.lines.begin(now) {
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
	if p.lines.end() {
		go p.carry()
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
}

// posted is a call on its way. answer is called once, in a goroutine of the node's, and must
// not block.
type posted struct {
	call   Call
	at     time.Duration
	answer func(Reply)
}

// post sends a call without waiting. A node whose pipelines do not return gets further ones at
// the pace of the node timeout.
func (p *peer) post(call Call, answer func(Reply)) {
	now := p.asking(1)
	l := &p.lines
	l.mu.Lock()
	l.waiting = append(l.waiting, posted{call, now, answer})
	since := now - l.began
	start := l.running == 0 || since > p.s.opts.NodeTimeout ||
		l.running < maxLines && (since > max(minLine, p.s.roundTrip()/4) || len(l.waiting) >= fullLine)
	if start {
		l.running++
		l.began = now
	}
	l.mu.Unlock()
	if start {
		go p.carry()
	}
}

// errStale is for a call that was never sent, because those before it took too long.
var errStale = notAsked{errors.New("earlier requests were unanswered")}

// carry sends what waits until nothing does.
func (p *peer) carry() {
	var calls []Call
	for {
		batch := p.lines.take(p.s.age())
		if batch == nil {
			return
		}
		calls = calls[:0]
		fresh := batch[:0]
		for _, q := range batch {
			if p.s.age()-q.at > p.s.opts.NodeTimeout { // whoever posted it does not wait any more
				p.returned(1, false)
				q.answer(Reply{Err: errStale})
				continue
			}
			calls, fresh = append(calls, q.call), append(fresh, q)
		}
		if len(calls) == 0 {
			continue
		}
		replies := p.send(calls)
		p.returned(len(calls), answers(replies...))
		for i, q := range fresh {
			q.answer(replies[i])
		}
	}
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

// end ends what begin began, and reports whether carry must go on in its place.
func (l *lines) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) > 0 {
		return true
	}
	l.running--
	return false
}

// take returns what waits, or nil, with which the line has ended.
func (l *lines) take(now time.Duration) []posted {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.running--
		return nil
	}
	n := min(len(l.waiting), maxCarried)
	batch := l.waiting[:n:n]
	if l.waiting = l.waiting[n:]; len(l.waiting) == 0 {
		l.waiting = nil
	}
	l.began = now
	return batch
}
