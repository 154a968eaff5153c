package holdfast

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// Lease is the right to act on a key until its validity ends. It belongs to one
// acquisition, is never used again, and is safe for concurrent use. The package
// documentation draws its states.
type Lease struct {
	k       *Locker
	key     string
	owner   string
	token   Token
	claim   store.Claim
	ttl     time.Duration // asked for
	every   time.Duration // between extensions, as asked; zero: the caller extends
	granted clock.Instant // stamped before the request of the grant
	maxEnd  clock.Instant // end by MaxHold; none where unbounded
	done    chan struct{} // closed when the lease ends

	mu       sync.Mutex
	until    clock.Instant // end of the validity
	pace     time.Duration // every, or less where the store promised less than was asked
	cause    error         // why it ended; nil while it is valid
	err      error         // the same, as callers get it
	ended    clock.Instant // when the validity ended
	timer    *time.Timer   // decides the loss, whatever any call is doing
	contexts map[*leaseContext]struct{}

	busy     chan struct{} // closed when the extension that runs has ended; nil where none runs
	riskAt   clock.Instant // when an extension without an answer is told as a risk
	failures int           // failed extensions in a row
	failing  clock.Instant // when the first of them was noticed
	since    time.Time     // the same, by the wall clock
	failure  error         // the last of them
	giving   *giving       // the last release

	due   clock.Instant // of the next extension; guarded by scheduler.mu
	index int           // in the scheduler's heap, -1 outside; guarded by scheduler.mu
}

// giving is one release that runs or has ended.
type giving struct {
	done chan struct{}
	err  error // set before done is closed
}

type leaseContext struct {
	cancel context.CancelCauseFunc
	stop   func() bool // of the function that forgets it
}

func newLease(g *granting) *Lease {
	k := g.k
	l := &Lease{k: k, key: g.key, owner: g.grant.Owner, token: g.grant.Token, claim: g.claim, ttl: g.ttl,
		granted: g.sent, done: make(chan struct{}), contexts: map[*leaseContext]struct{}{}, index: -1}
	if !k.o.NoExtend {
		l.every = k.o.ExtendEvery
		if g.ttl != k.o.TTL { // an adopted one has the terms of its ticket
			l.every = min(l.every, g.ttl/3)
		}
	}
	if k.o.MaxHold > 0 {
		l.maxEnd = g.sent.Add(k.o.MaxHold)
	}
	l.promise(g.sent, g.grant.TTL)
	return l
}

// promise books what the store promised to a request sent at that instant. This is the only
// place where a validity is computed. l.mu is held, or l is new.
func (l *Lease) promise(sent clock.Instant, ttl time.Duration) {
	validity := store.Validity(ttl, 0) - l.k.o.Margin
	l.until, l.pace = sent.Add(validity), l.every
	if validity < store.Validity(l.k.o.TTL, 0)-l.k.o.Margin {
		l.pace = min(l.every, max(0, validity)/2)
	}
	if l.every > 0 { // halfway between the time of the next extension and the end
		due := sent.Add(l.pace)
		l.riskAt = due.Add(max(0, l.until.Sub(due)) / 2)
	}
}

// start begins to watch and to extend a new lease. It cannot end before it has begun.
func (l *Lease) start() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = time.AfterFunc(l.nextAlarm(), l.alarm)
	l.k.f.sched.add(l, l.granted.Add(l.pace))
}

// Key returns the key.
func (l *Lease) Key() string { return l.key }

// Owner returns the unique random identity of this acquisition. Treat it as a secret:
// whoever knows it can release the lease.
func (l *Lease) Owner() string { return l.owner }

// Token returns the fencing token, the same for the whole life of the lease. It is zero
// where the store mints none.
func (l *Lease) Token() Token { return l.token }

// Validity returns for how long the lease can still be trusted, by the clock that goes on
// while the machine sleeps, unless it is extended; zero when it has ended. It is no
// promise: the caller may be paused right after asking. Only a guard at the resource helps
// against that.
func (l *Lease) Validity() time.Duration {
	l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return 0
	}
	return max(0, l.k.f.clk.Until(l.end()))
}

// Done returns a channel that is closed when the lease ends, for whatever reason.
func (l *Lease) Done() <-chan struct{} { return l.done }

// Err returns nil while the lease is valid, and then why it ended: [ErrReleased],
// [ErrHandedOver], or an error that answers [ErrLost] and has the cause, which is an
// [*ExpiredError], a [*LostError] or [ErrMaxHold].
func (l *Lease) Err() error {
	l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Context returns a child of parent that ends with the lease; [context.Cause] then answers
// what [Lease.Err] does, and so [ErrLost] or [ErrReleased]. It carries the key and the token
// for guards (see [fence.FromContext]), and an acquisition of the same key under it is
// [ErrAlreadyHeld]. It costs no goroutine, and nothing after either has ended.
func (l *Lease) Context(parent context.Context) context.Context {
	outer, _ := parent.Value(heldKey{}).(*heldLease)
	parent = context.WithValue(parent, heldKey{}, &heldLease{l, outer})
	if l.token > 0 {
		parent = fence.WithToken(parent, l.key, l.token)
	}
	ctx, cancel := context.WithCancelCause(parent)
	l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		cancel(l.err)
		return ctx
	}
	c := &leaseContext{cancel: cancel}
	c.stop = context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.contexts, c)
	})
	l.contexts[c] = struct{}{}
	return ctx
}

type heldKey struct{}

type heldLease struct {
	lease *Lease
	next  *heldLease
}

// heldIn reports whether ctx is that of a valid lease on key, of this store.
func (f *family) heldIn(ctx context.Context, key string) bool {
	h, _ := ctx.Value(heldKey{}).(*heldLease)
	for ; h != nil; h = h.next {
		other := h.lease.k.f
		same := other == f || other.info.Fingerprint != "" && other.info.Fingerprint == f.info.Fingerprint
		if same && h.lease.key == key && h.lease.Err() == nil {
			return true
		}
	}
	return false
}

// held describes the lease as what stands in another's way.
func (l *Lease) held() *HeldError {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &HeldError{Holder: store.Holder{Key: l.key, Owner: l.owner, Label: l.k.o.Label, Token: l.token,
		TTL: max(0, l.k.f.clk.Until(l.until))}}
}

// end returns when the lease ends unless it is extended. l.mu is held.
func (l *Lease) end() clock.Instant {
	if !l.maxEnd.IsZero() && l.maxEnd.Sub(l.until) < 0 {
		return l.maxEnd
	}
	return l.until
}

// nextAlarm returns the time until alarm has something to do. l.mu is held.
func (l *Lease) nextAlarm() time.Duration {
	next := l.k.f.clk.Until(l.end())
	if l.every > 0 && l.failures == 0 {
		if risk := l.k.f.clk.Until(l.riskAt); risk > 0 {
			next = min(next, risk)
		}
	}
	return max(0, next)
}

// alarm is the lease's own timer.
func (l *Lease) alarm() {
	l.check()
	l.mu.Lock()
	if l.cause != nil {
		l.mu.Unlock()
		return
	}
	var risk Event
	if l.every > 0 && l.failures == 0 && l.k.f.clk.Passed(l.riskAt) {
		risk = l.fail(fmt.Errorf("%w: no extension has been answered for %v", ErrUncertain, round(l.pace)))
	}
	l.timer.Reset(l.nextAlarm())
	l.mu.Unlock()
	if risk != nil {
		l.k.observe(context.Background(), risk)
	}
}

// rearm sets the timer anew, after the machine slept.
func (l *Lease) rearm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause == nil && l.timer != nil {
		l.timer.Reset(l.nextAlarm())
	}
}

// fail books a failed extension and returns the event to tell. l.mu is held.
func (l *Lease) fail(err error) Event {
	if l.failures == 0 {
		l.failing, l.since = l.k.f.clk.Now(), time.Now()
	}
	l.failures++
	l.failure = err
	return AtRisk{Key: l.key, Token: l.token, Owner: l.owner, Left: max(0, l.k.f.clk.Until(l.end())),
		Failing: l.k.f.clk.Since(l.failing), Err: err}
}

// check ends the lease where its time has come.
func (l *Lease) check() {
	l.mu.Lock()
	cause := l.expiry()
	l.mu.Unlock()
	if cause != nil {
		l.lose(cause)
	}
}

// expiry returns the cause where the lease is valid no more by the clock. l.mu is held.
func (l *Lease) expiry() error {
	clk := l.k.f.clk
	switch {
	case l.cause != nil || !clk.Passed(l.end()):
		return nil
	case l.end() == l.maxEnd:
		return ErrMaxHold
	}
	e := &ExpiredError{Held: l.until.Sub(l.granted), Err: l.failure}
	if l.failures > 0 {
		e.Failing, e.Since = max(0, l.until.Sub(l.failing)), l.since
	}
	return e
}

// lose ends the lease as lost. A lost lease is never valid again.
func (l *Lease) lose(cause error) {
	if !l.finish(cause) {
		return
	}
	clk := l.k.f.clk
	l.mu.Lock()
	e := Lost{Key: l.key, Token: l.token, Owner: l.owner, Held: clk.Since(l.granted), Overrun: clk.Since(l.ended), Err: l.err}
	l.mu.Unlock()
	if errors.Is(cause, ErrMaxHold) {
		if g, first := l.startGiving(); first {
			l.k.f.later(func() { l.give(context.Background(), g) })
		}
	} else {
		l.k.f.vacate(l)
	}
	l.k.observe(context.Background(), e)
}

// finish ends the validity, once. No extension begins afterwards.
func (l *Lease) finish(cause error) bool {
	l.mu.Lock()
	if l.cause != nil {
		l.mu.Unlock()
		return false
	}
	l.cause, l.err = cause, cause
	if errors.Is(cause, ErrLost) {
		l.err = l.k.fail("hold", l.key, cause)
	}
	l.ended = l.k.f.clk.Now()
	if end := l.end(); end.Sub(l.ended) < 0 || l.k.f.clk.Passed(end) {
		l.ended = end
	}
	l.timer.Stop()
	contexts := l.contexts
	l.contexts = nil
	close(l.done)
	l.mu.Unlock()
	for c := range contexts {
		c.stop()
		c.cancel(l.err)
	}
	l.k.f.sched.remove(l)
	return true
}

// beginExtend reserves the claim for an extension. It answers false where the lease has
// ended, and a channel to wait for where another extension runs.
func (l *Lease) beginExtend() (busy <-chan struct{}, ok bool) {
	l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil || l.busy != nil {
		return l.busy, false
	}
	l.busy = make(chan struct{})
	return nil, true
}

// endExtend books the answer to an extension that was sent at that instant. An answer that
// comes too late revives nothing.
func (l *Lease) endExtend(ctx context.Context, sent clock.Instant, g store.Grant, err error) error {
	l.check()
	l.mu.Lock()
	close(l.busy)
	l.busy = nil
	if l.cause != nil {
		defer l.mu.Unlock()
		return l.err
	}
	if err == nil && g.Token != l.token && g.Token != 0 {
		err = errTokenChanged
	}
	if errors.Is(err, ErrLost) {
		l.mu.Unlock()
		l.lose(err)
		return l.Err()
	}
	var e Event
	next := l.k.f.clk.Now().Add(min(l.ttl/10, l.pace))
	switch {
	case err == nil:
		l.promise(sent, g.TTL)
		next = sent.Add(l.pace)
		e = Extended{Key: l.key, Token: l.token, Owner: l.owner, Validity: max(0, l.k.f.clk.Until(l.end())), Failures: l.failures}
		l.failures, l.failure = 0, nil
	case ctx.Err() != nil && errors.Is(err, ctx.Err()): // the caller gave up
		err = kinded(err)
	default:
		err = kinded(err)
		e = l.fail(err)
	}
	l.timer.Reset(l.nextAlarm())
	l.mu.Unlock()
	l.k.f.sched.plan(l, next)
	if e != nil {
		l.k.observe(ctx, e)
	}
	return err
}

// Extend asks the store for the whole ttl anew. Leases are extended by themselves unless
// [Options.NoExtend] says otherwise. An error that answers [ErrLost] or [ErrReleased] is
// final. Any other one leaves the lease valid for what is left of its validity; Extend may
// be called again, and the store may have extended. A ctx that is done sends nothing.
func (l *Lease) Extend(ctx context.Context) error {
	if err := l.extend(ctx); err != nil {
		return l.k.fail("extend", l.key, err)
	}
	return nil
}

func (l *Lease) extend(ctx context.Context) error {
	for {
		if ctx.Err() != nil {
			return contextError(ctx)
		}
		busy, ok := l.beginExtend()
		if ok {
			break
		}
		if busy == nil {
			return l.reason()
		}
		select {
		case <-busy:
		case <-ctx.Done():
		case <-l.done:
		}
	}
	answer := make(chan error, 1)
	go func() {
		call, cancel := context.WithTimeout(l.k.traced(ctx), l.Validity())
		defer cancel()
		sent := l.k.f.clk.Now()
		g, err := l.claim.Extend(call)
		answer <- l.endExtend(ctx, sent, g, err)
	}()
	select {
	case err := <-answer:
		if err != nil && l.Err() != nil {
			return l.reason()
		}
		return err
	case <-l.done:
		return l.reason()
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", contextError(ctx), ErrUncertain)
	}
}

// reason returns the bare cause of the end.
func (l *Lease) reason() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// Release ends the lease and gives the key back. The validity ends, and extension stops,
// before anything is sent; after Release has returned nothing more is sent for this lease,
// unless the store ignored its limits.
//
// A nil error says that the store confirmed. [ErrLost], with the cause and by how much the
// lease was overrun, says that it had been lost before; the store is told nevertheless.
// Any other error says that the store did not confirm: the key stays taken until the ttl
// ends, or until another call of Release succeeds. After a success, Release answers the
// same again without asking the store.
//
// Release does not stop when ctx is done, not even when it was before, so that it can be
// deferred: it makes one attempt, limited by the ttl and by two seconds. Of ctx it takes
// the values only.
func (l *Lease) Release(ctx context.Context) error {
	l.check()
	l.finish(ErrReleased)
	if errors.Is(l.reason(), ErrHandedOver) {
		return l.k.fail("release", l.key, ErrHandedOver)
	}
	g, first := l.startGiving()
	if first {
		go l.give(ctx, g)
	}
	limit := releaseLimit(l.ttl)
	t := time.NewTimer(limit + limit/4)
	defer t.Stop()
	err := error(nil)
	select {
	case <-g.done:
		err = g.err
	case <-t.C:
		l.k.f.vacate(l)
		err = fmt.Errorf("%w: no answer within %v", ErrUncertain, limit)
	}
	if lost := l.lateness(); lost != nil {
		if errors.Is(err, ErrLost) {
			err = nil
		}
		err = join(lost, err)
	}
	if err != nil {
		return l.k.fail("release", l.key, err)
	}
	return nil
}

// lateness returns the cause of a loss with the times, and nil where it was not lost.
func (l *Lease) lateness() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !errors.Is(l.cause, ErrLost) {
		return nil
	}
	clk := l.k.f.clk
	return fmt.Errorf("%w; released %v after the grant, %v after its end", l.cause, round(clk.Since(l.granted)), round(clk.Since(l.ended)))
}

// startGiving returns the release to wait for, and whether it is the caller's to run:
// releases of one claim never overlap, and none follows one that was confirmed.
func (l *Lease) startGiving() (g *giving, first bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.giving != nil {
		select {
		case <-l.giving.done:
		default:
			return l.giving, false
		}
		if l.giving.err == nil || errors.Is(l.giving.err, ErrLost) {
			return l.giving, false
		}
	}
	l.giving = &giving{done: make(chan struct{})}
	return l.giving, true
}

// give releases the claim, and waits until no extension runs any more.
func (l *Lease) give(ctx context.Context, g *giving) {
	call, cancel := context.WithTimeout(l.k.traced(context.WithoutCancel(ctx)), releaseLimit(l.ttl))
	defer cancel()
	clk := l.k.f.clk
	l.mu.Lock()
	e := Released{Key: l.key, Token: l.token, Owner: l.owner, Held: clk.Since(l.granted)}
	if errors.Is(l.cause, ErrLost) {
		e.Overrun = clk.Since(l.ended)
	}
	busy := l.busy
	l.mu.Unlock()
	err := l.claim.Release(call)
	if err != nil {
		err = kinded(err)
	}
	if busy != nil {
		select {
		case <-busy:
		case <-call.Done():
		}
	}
	l.k.f.vacate(l)
	e.Err = err
	l.k.observe(ctx, e)
	g.err = err
	close(g.done)
}

// discard releases a lease that was granted too late to be handed out.
func (l *Lease) discard() <-chan struct{} {
	l.finish(ErrReleased)
	g, first := l.startGiving()
	if first {
		go l.give(context.Background(), g)
	}
	return g.done
}

// Ticket writes the lease down as one word of text, with which another process of this
// machine and boot can take it over by [Locker.Adopt]. This Lease then ends with
// [ErrHandedOver], and its Release sends nothing. Where Ticket fails, the lease goes on:
// [ErrUnsupported] where the store has no tickets, [ErrLost] where it is lost. A ticket is
// a bearer secret, and lapses when the ttl does.
func (l *Lease) Ticket() (string, error) {
	text, err := l.ticket()
	if err != nil {
		return "", l.k.fail("ticket", l.key, err)
	}
	return text, nil
}

func (l *Lease) ticket() (string, error) {
	adopter, ok := l.k.f.store.(store.Adopter)
	if !ok {
		return "", fmt.Errorf("%w: this store has no tickets", ErrUnsupported)
	}
	for {
		busy, ok := l.beginExtend() // nothing is sent while the ticket is written
		if ok {
			break
		}
		if busy == nil {
			return "", l.reason()
		}
		select {
		case <-busy:
		case <-l.done:
		}
	}
	text, err := adopter.Ticket(l.claim)
	if err == nil && !l.finish(ErrHandedOver) {
		err = l.reason()
	}
	l.mu.Lock()
	close(l.busy)
	l.busy = nil
	l.mu.Unlock()
	if err != nil {
		if errors.Is(err, ErrLost) {
			l.lose(err)
		}
		l.k.f.sched.plan(l, l.k.f.clk.Now())
		return "", kinded(err)
	}
	l.k.f.vacate(l)
	l.k.observe(context.Background(), Released{Key: l.key, Token: l.token, Owner: l.owner, Held: l.k.f.clk.Since(l.granted), Err: ErrHandedOver})
	return text, nil
}
