package httpfence

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

const (
	defaultDrain = 10 * time.Second

	// retryAfter is what a request is told that was refused as busy; comeback is for how long
	// requests of lower tokens are kept waiting for it to come again.
	retryAfter = time.Second
	comeback   = 2 * retryAfter
)

// Prompt is what marks may implement that can tell a mark at once, without I/O, such as a file's
// that is mapped into memory. A [Gate] then lets requests of the mark's own token in without
// waiting for anybody. It may be called from any goroutine, and must not block.
type Prompt interface {
	// Mark returns the mark of a resource. It is zero where there is none, where it is not durable
	// yet, and where anything is wrong: the gate then asks by Check.
	Mark(resource string) fence.Token
}

// GateOptions are the limits of a [Gate]. The zero value is good where the marks are never lost
// and no former process can have left requests behind.
type GateOptions struct {
	// Drain bounds the wait of each request that may not enter at once: for requests of a lower
	// token to finish, and for the marks. 0 = 10 s.
	Drain time.Duration

	// RefuseUnknown is for how long after NewGate resources without a mark are refused, by
	// ErrUnavailable: where marks may have been lost, holders with old tokens would otherwise be
	// let in as if they were new. Make it longer than the longest ttl, plus the longest time
	// for which a holder may be paused. 0 = not at all: the marks are never lost.
	RefuseUnknown time.Duration

	// Settle is for how long a request that the gate has lost sight of may still be at work. For
	// so long after NewGate a token above a known mark waits, since requests of a former process
	// that was killed may still lie in the sockets of the service; a [Gateway] keeps the place
	// of a request whose answer did not come for as long. 0 = not at all.
	Settle time.Duration
}

// Stats are what a [Gate] has counted since it was made, and what it holds now.
type Stats struct {
	Entered     uint64 // requests that entered
	Stale       uint64 // refused: the token is stale
	Busy        uint64 // refused: requests of another token, or the marks, kept it waiting for too long
	Unavailable uint64 // refused: the marks could not be asked, or the resource is unknown
	InFlight    int    // requests that have entered and not left
	Waiting     int    // requests that wait to enter
	Resources   int    // resources of which something is kept in memory
}

// Gate lets requests to a resource in by the order of their tokens: once a request has entered,
// none of a lower token does any more, and it enters only after all those of lower tokens have
// left. Requests of equal tokens run side by side. Resources do not wait for each other.
//
// The order is that of this gate alone. Where two gates, in two processes, stand before one
// resource, one may still work on a request that it let in before the other let in a larger
// token, even if both use the same marks; then the resource must check for itself.
//
// Of a resource nothing is kept in memory but while requests are in flight or waiting, and two
// seconds longer where a wait ran out. Whoever may send a token may raise a mark for good, so
// authenticate clients before the gate. A Gate is safe for concurrent use.
type Gate struct {
	marks          fence.Guard
	prompt         Prompt // marks, or nil
	drain, settle  time.Duration
	known, settled time.Time // when RefuseUnknown and Settle are over

	mu    sync.Mutex
	rooms map[string]*room
	stats Stats  // but Resources
	asks  uint64 // how often the marks were asked, each of which may have raised one
}

var _ fence.Guard = (*Gate)(nil)

// room is what a gate knows of one resource. Under Gate.mu: all requests inside have the token
// mark, and while marks are asked there are none inside. The room is forgotten when it has
// nobody inside or waiting, asks nothing and holds nothing back.
type room struct {
	resource string
	mark     fence.Token // what the marks have; zero: not known
	inside   int
	waiting  []*waiter

	asked     fence.Token // the token that the marks are asked about; zero: they are not
	stopAsk   func()
	abandoned bool // all who wanted to know have gone

	held  fence.Token // smaller tokens wait for one that was refused as busy to come back
	until time.Time   // until then
	timer *time.Timer
}

type waiter struct {
	token  fence.Token
	at     int // in room.waiting; -1 once answered
	answer chan answer
}

// answer lets a waiter in, or says that its token is stale, or refuses it otherwise.
type answer struct {
	seen fence.Token
	err  error
}

// NewGate returns a gate that keeps its marks in marks, which should survive the process, and
// does no I/O. Options below zero are refused by a [*fence.InvalidError].
func NewGate(marks fence.Guard, o GateOptions) (*Gate, error) {
	if marks == nil {
		return nil, &fence.InvalidError{Field: "marks", Rule: "must not be nil; new(fence.Memory) keeps them in the process"}
	}
	for name, d := range map[string]time.Duration{"Drain": o.Drain, "RefuseUnknown": o.RefuseUnknown, "Settle": o.Settle} {
		if d < 0 {
			return nil, &fence.InvalidError{Field: name, Value: d.String(), Rule: "must not be negative"}
		}
	}
	if o.Drain == 0 {
		o.Drain = defaultDrain
	}
	now := time.Now()
	prompt, _ := marks.(Prompt)
	return &Gate{
		marks: marks, prompt: prompt, drain: o.Drain, settle: o.Settle,
		known: now.Add(o.RefuseUnknown), settled: now.Add(o.Settle),
		rooms: map[string]*room{},
	}, nil
}

// Enter waits until a request of the token may be worked on. Call leave when the work, and all
// that it has started at the resource, is done; calling it again does nothing.
//
//   - A token below the mark is stale: [*fence.StaleError]. So is one that waits while a larger
//     one raises the mark: of several that wait the largest wins.
//   - A token equal to the mark enters, unless a larger one waits.
//   - A larger one keeps all others out, waits until those inside have left, raises the mark by
//     a Claim of the marks, and enters after that.
//
// The wait is bounded by ctx and by GateOptions.Drain. Where it runs out for the requests inside,
// the error answers [fence.ErrBusy], the mark is as it was, and lower tokens enter again two
// seconds later: one that tries again within them finds that nothing of a lower token has
// entered in between, so that long requests cannot keep it out for ever, one after the other.
// Where ctx ends the wait, lower tokens go on at once: give clients a longer patience than Drain.
//
// Where the marks cannot be asked, do not answer in time, or know nothing of the resource while
// GateOptions.RefuseUnknown lasts, the error answers [fence.ErrUnavailable] and nothing enters.
// A mark may have been raised by a call that failed. A Claim of the marks is made for all who
// wait with the same token, and so not in the context of any of them.
func (g *Gate) Enter(ctx context.Context, resource string, t fence.Token) (leave func(), err error) {
	if err := checkArgs(ctx, resource, t); err != nil {
		return nil, err
	}
	if r := g.walkIn(resource, t); r != nil {
		return g.leaver(r), nil
	}
	r, w := g.knock(resource, t)
	var a answer
	select {
	case a = <-w.answer:
	default:
		a = g.wait(ctx, r, w)
	}
	switch {
	case a.seen != 0:
		return nil, fence.Stale(ctx, resource, t, a.seen)
	case a.err != nil:
		return nil, a.err
	}
	return g.leaver(r), nil
}

// Claim implements [fence.Guard]: it enters and leaves. Requests of lower tokens are done when
// it has returned nil. It asks the marks even where a request of the same token is inside, so
// that it answers for all gates that share them.
func (g *Gate) Claim(ctx context.Context, resource string, t fence.Token) error {
	leave, err := g.Enter(ctx, resource, t)
	if err != nil {
		return err
	}
	defer leave()
	return g.Check(ctx, resource, t)
}

// Check implements [fence.Guard]: it asks the marks.
func (g *Gate) Check(ctx context.Context, resource string, t fence.Token) error {
	if err := checkArgs(ctx, resource, t); err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, g.drain)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- g.marks.Check(short, resource, t) }()
	var err error
	select {
	case err = <-done:
	case <-short.Done():
		err = short.Err()
	}
	switch {
	case err == nil, errors.Is(err, fence.ErrStale), errors.Is(err, fence.ErrUnclaimed), errors.Is(err, fence.ErrNoResource):
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return marksError(resource, err)
}

// Stats returns the counts.
func (g *Gate) Stats() Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.stats
	s.Resources = len(g.rooms)
	return s
}

// walkIn lets a request in whose token is the mark, where nobody else is about the resource and
// the marks are prompt. It returns nil where the request has to knock. A mark that was looked up
// counts only if none can have been raised since.
func (g *Gate) walkIn(resource string, t fence.Token) *room {
	if g.prompt == nil {
		return nil
	}
	g.mu.Lock()
	asks, alone := g.asks, g.rooms[resource] == nil
	g.mu.Unlock()
	if !alone || g.prompt.Mark(resource) != t {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.asks != asks || g.rooms[resource] != nil {
		return nil
	}
	r := &room{resource: resource, mark: t, inside: 1}
	g.rooms[resource] = r
	g.stats.Entered++
	g.stats.InFlight++
	return r
}

// knock makes a waiter, which may have its answer already.
func (g *Gate) knock(resource string, t fence.Token) (*room, *waiter) {
	w := &waiter{token: t, answer: make(chan answer, 1)}
	g.mu.Lock()
	defer g.mu.Unlock()
	r := g.rooms[resource]
	if r == nil {
		r = &room{resource: resource}
		g.rooms[resource] = r
	}
	w.at = len(r.waiting)
	r.waiting = append(r.waiting, w)
	g.stats.Waiting++
	g.advance(r)
	return r, w
}

func (g *Gate) wait(ctx context.Context, r *room, w *waiter) answer {
	timer := time.NewTimer(g.drain + max(0, time.Until(g.settled)))
	defer timer.Stop()
	select {
	case a := <-w.answer:
		return a
	case <-timer.C:
		return g.runOut(r, w)
	case <-ctx.Done():
		return g.giveUp(ctx, r, w)
	}
}

// runOut refuses a waiter that has waited too long, unless it has its answer.
func (g *Gate) runOut(r *room, w *waiter) answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.at >= 0 {
		e := &fence.Error{Kind: fence.ErrBusy, Resource: r.resource, Err: fmt.Errorf("requests of other tokens did not finish within %v", g.drain)}
		if r.asked != 0 {
			e = &fence.Error{Kind: fence.ErrUnavailable, Resource: r.resource, Err: fmt.Errorf("the marks did not answer within %v", g.drain)}
		} else if r.inside > 0 && w.token > r.mark {
			g.hold(r, w.token)
		}
		g.reply(r, w, answer{err: e})
		g.deserted(r)
		g.advance(r)
	}
	return <-w.answer
}

// giveUp takes a waiter out whose ctx has ended. If it was let in meanwhile it leaves: a ctx that
// is done takes nothing.
func (g *Gate) giveUp(ctx context.Context, r *room, w *waiter) answer {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w.at >= 0 {
		g.take(r, w)
		g.deserted(r)
		g.advance(r)
		return answer{err: ctx.Err()}
	}
	a := <-w.answer
	if a == (answer{}) {
		g.exit(r)
		a.err = ctx.Err()
	}
	return a
}

func (g *Gate) leaver(r *room) func() {
	var left atomic.Bool
	return func() {
		if left.Swap(true) {
			return
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		g.exit(r)
	}
}

// What follows is called under g.mu.

func (g *Gate) exit(r *room) {
	r.inside--
	g.stats.InFlight--
	if r.inside == 0 {
		g.advance(r)
	}
}

// advance does what the state of the room calls for. It is called after every change.
func (g *Gate) advance(r *room) {
	g.replyAll(r, func(t fence.Token) bool { return t < r.mark }, answer{seen: r.mark})
	top := fence.Token(0)
	for _, w := range r.waiting {
		top = max(top, w.token)
	}
	switch {
	case r.asked != 0: // its end will call
	case top < r.held: // the timer will
	case top == 0:
		if r.inside == 0 {
			delete(g.rooms, r.resource)
		}
	case top == r.mark:
		g.replyAll(r, func(fence.Token) bool { return true }, answer{})
	case r.inside == 0:
		g.ask(r, top)
	default: // the last one to leave will
	}
}

// replyAll answers the waiters of the tokens that which names.
func (g *Gate) replyAll(r *room, which func(fence.Token) bool, a answer) {
	for i := len(r.waiting) - 1; i >= 0; i-- { // backwards, since reply moves the last one here
		if w := r.waiting[i]; which(w.token) {
			g.reply(r, w, a)
		}
	}
}

func (g *Gate) reply(r *room, w *waiter, a answer) {
	switch {
	case a.seen != 0:
		g.stats.Stale++
	case errors.Is(a.err, fence.ErrBusy):
		g.stats.Busy++
	case a.err != nil:
		g.stats.Unavailable++
	default:
		r.inside++
		g.stats.Entered++
		g.stats.InFlight++
	}
	g.take(r, w)
	w.answer <- a
}

// take takes a waiter out.
func (g *Gate) take(r *room, w *waiter) {
	last := len(r.waiting) - 1
	r.waiting[w.at] = r.waiting[last]
	r.waiting[w.at].at = w.at
	r.waiting[last] = nil
	r.waiting = r.waiting[:last]
	w.at = -1
	g.stats.Waiting--
}

// hold keeps tokens below t waiting for a while, so that t can come back.
func (g *Gate) hold(r *room, t fence.Token) {
	r.held, r.until = max(r.held, t), time.Now().Add(comeback)
	if r.timer != nil {
		r.timer.Reset(comeback)
		return
	}
	r.timer = time.AfterFunc(comeback, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if r.held != 0 && !time.Now().Before(r.until) { // else it was let go, or held again
			r.held = 0
			g.advance(r)
		}
	})
}

// ask finds out about the mark, and raises it to t where that is larger. The room stays as it
// is, whatever the marks do, until they have answered; waiters have their own bounds.
func (g *Gate) ask(r *room, t fence.Token) {
	ctx, cancel := context.WithTimeout(context.Background(), g.drain+max(0, time.Until(g.settled)))
	r.asked, r.stopAsk, r.abandoned = t, cancel, false
	g.asks++
	known := r.mark
	go func() {
		mark, err := g.raise(ctx, r.resource, t, known)
		cancel()
		g.mu.Lock()
		defer g.mu.Unlock()
		r.asked, r.mark = 0, mark
		if err != nil && !r.abandoned {
			g.replyAll(r, func(w fence.Token) bool { return w == t }, answer{err: err})
		}
		if r.held != 0 && mark >= r.held {
			r.held = 0
			r.timer.Stop()
		}
		g.advance(r)
	}()
}

// deserted ends a question that nobody waits for any more.
func (g *Gate) deserted(r *room) {
	if r.asked == 0 || r.abandoned {
		return
	}
	for _, w := range r.waiting {
		if w.token == r.asked {
			return
		}
	}
	r.abandoned = true
	r.stopAsk()
}

// raise returns the mark after it has claimed t, where known, the mark as far as it is, and
// Settle and RefuseUnknown allow for that. It is called without g.mu.
func (g *Gate) raise(ctx context.Context, resource string, t, known fence.Token) (mark fence.Token, err error) {
	if known == 0 {
		err := g.marks.Check(ctx, resource, t)
		switch {
		case errors.Is(err, fence.ErrNoResource):
			if left := time.Until(g.known); left > 0 {
				return 0, &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: &unknownError{left}}
			}
			return g.claim(ctx, resource, t)
		case errors.Is(err, fence.ErrUnclaimed): // the mark is smaller
		default:
			return outcome(resource, t, err)
		}
	}
	if err := sleepUntil(ctx, g.settled); err != nil {
		return 0, marksError(resource, err)
	}
	return g.claim(ctx, resource, t)
}

func (g *Gate) claim(ctx context.Context, resource string, t fence.Token) (mark fence.Token, err error) {
	return outcome(resource, t, g.marks.Claim(ctx, resource, t))
}

// outcome is the mark after the marks have answered err for t.
func outcome(resource string, t fence.Token, err error) (mark fence.Token, _ error) {
	var stale *fence.StaleError
	switch {
	case err == nil:
		return t, nil
	case errors.As(err, &stale) && stale.Seen > t:
		return stale.Seen, nil
	}
	return 0, marksError(resource, err)
}

// marksError is what the marks said, as the reason why a request did not enter. A Claim whose
// outcome is uncertain leaves no doubt about the request: nothing was done.
func marksError(resource string, err error) error {
	if !errors.Is(err, fence.ErrUncertain) {
		for _, kind := range []error{fence.ErrInvalid, fence.ErrBusy, fence.ErrUnavailable, fence.ErrNoResource, fence.ErrApplied} {
			if errors.Is(err, kind) {
				return err
			}
		}
	}
	return &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: err}
}

// unknownError refuses a resource without a mark for a while.
type unknownError struct{ left time.Duration }

// wait is in whole seconds, rounded up.
func (e *unknownError) wait() time.Duration { return (e.left + time.Second - 1).Truncate(time.Second) }

func (e *unknownError) Error() string {
	return fmt.Sprintf("no mark, and marks may have been lost: refused for %v more", e.wait())
}

func sleepUntil(ctx context.Context, at time.Time) error {
	left := time.Until(at)
	if left <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func checkArgs(ctx context.Context, resource string, t fence.Token) error {
	if err := fence.CheckResource(resource); err != nil {
		return err
	}
	if err := fence.CheckToken(t); err != nil {
		return err
	}
	return ctx.Err()
}
