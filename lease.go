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

	mu        sync.Mutex
	sent      clock.Instant // stamped before the request that the store has promised something last
	until     clock.Instant // end of the validity, as far as the store has promised
	pace      time.Duration // every, or less where the store promised less than was asked
	short     bool          // the store promised less at the grant, and asked to be extended soon
	lead      time.Duration // how long before until an extension without an answer is told as a risk
	err       error         // why it ended, as callers get it; nil while it is valid
	ended     clock.Instant // when the validity ended
	done      chan struct{} // closed when it ends; nil where nobody has asked for it
	contexts  map[*leaseContext]struct{}
	trouble   *trouble      // nil where the last extension did not fail
	idle      chan struct{} // closed when the extension that runs has ended; nil where nobody waits
	given     chan struct{} // closed when the release that runs has ended; nil where nobody waits
	givingErr error         // of the last release
	giving    givingState
	extending bool // an extension runs

	at    [agendas]time.Duration // guarded by scheduler.mu
	place [agendas]int32         // in the scheduler's agendas, from 1; guarded by scheduler.mu
}

// trouble is a row of failed extensions.
type trouble struct {
	failures int
	began    clock.Instant // when the first of them was noticed
	since    time.Time     // the same, by the wall clock
	last     error
}

// givingState is what has become of the releases of a lease.
type givingState int8

const (
	notGiven givingState = iota // never tried, or not confirmed: may be tried again
	givingNow
	gaveBack // the store has confirmed, or says that it was gone
)

type leaseContext struct {
	cancel context.CancelCauseFunc
	stop   func() bool // of the function that forgets it; nil where there is none
}

func newLease(g *granting) *Lease {
	k := g.k
	l := &Lease{k: k, key: g.key, owner: g.grant.Owner, token: g.grant.Token, claim: g.claim, ttl: g.ttl, granted: g.sent}
	if !k.o.NoExtend {
		l.every = k.o.ExtendEvery
		if g.ttl != k.o.TTL { // an adopted one has the terms of its ticket
			l.every = min(l.every, g.ttl/3)
		}
	}
	l.promise(g.sent, g.grant.TTL)
	if g.grant.ExtendIn > 0 && l.every > 0 {
		l.short, l.pace = true, min(l.pace, g.grant.ExtendIn)
	}
	return l
}

// promise books what the store promised to a request sent at that instant. This is the only
// place where a validity is computed. l.mu is held, or l is new.
func (l *Lease) promise(sent clock.Instant, ttl time.Duration) {
	validity := store.Validity(ttl, 0) - l.k.o.Margin
	l.sent, l.until, l.pace, l.short = sent, sent.Add(validity), l.every, false
	if validity < store.Validity(l.k.o.TTL, 0)-l.k.o.Margin {
		l.pace = min(l.every, max(0, validity)/2)
	}
	left := validity - l.pace // at the time of the next extension
	l.lead = left - max(0, left)/2
}

// start begins to watch and to extend a new lease. It cannot end before it has begun.
func (l *Lease) start(now clock.Instant) {
	l.mu.Lock()
	l.k.f.sched.add(l, now)
	l.mu.Unlock()
	if w, ok := l.claim.(store.Witness); ok {
		w.OnLoss(func() { l.k.f.later(l.recheck) })
	}
}

// recheck extends a lease of which the store has said that it is gone: the answer tells how.
func (l *Lease) recheck() {
	ctx, cancel := context.WithTimeout(context.Background(), l.ttl/3)
	defer cancel()
	_ = l.Extend(ctx)
}

// Key returns the key.
func (l *Lease) Key() string { return l.key }

// Owner returns the unique random identity of this acquisition. Treat it as a secret:
// whoever knows it can release the lease.
func (l *Lease) Owner() string { return l.owner }

// Token returns the fencing token, the same for the whole life of the lease. It is zero
// where the store mints none.
func (l *Lease) Token() Token { return l.token }

// String names the lease for people, without its owner, which is a secret. It may be called at any
// time.
func (l *Lease) String() string { return fmt.Sprintf("lease on %q, token %v", l.key, l.token) }

// GoString is String: a lease has nothing else to show, and its fields change while it is held.
func (l *Lease) GoString() string { return l.String() }

// Validity returns for how long the lease can still be trusted, by the clock that goes on
// while the machine sleeps, unless it is extended; zero when it has ended. It is no
// promise: the caller may be paused right after asking. Only a guard at the resource helps
// against that.
func (l *Lease) Validity() time.Duration {
	now := l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return 0
	}
	return max(0, now.Until(l.end()))
}

// Done returns a channel that is closed when the lease ends, for whatever reason.
func (l *Lease) Done() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.done == nil {
		l.done = make(chan struct{})
		if l.err != nil {
			close(l.done)
		}
	}
	return l.done
}

// Err returns nil while the lease is valid, and then why it ended: [ErrReleased],
// [ErrHandedOver], or an error that answers [ErrLost] and has the cause, which is an
// [*ExpiredError], a [*LostError], a guard's [*fence.StaleError] or [ErrMaxHold].
func (l *Lease) Err() error {
	l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Context returns a child of parent that ends with the lease; [context.Cause] then answers
// what [Lease.Err] does, and so [ErrLost] or [ErrReleased]. It carries the key and the token
// for guards (see [fence.FromContext]): a guard that is given the context and finds the token
// stale ends the lease, with the [*fence.StaleError] as the cause. An acquisition of the same key
// under the context is [ErrAlreadyHeld]. It costs no goroutine, and nothing after either has ended.
func (l *Lease) Context(parent context.Context) context.Context {
	outer, _ := parent.Value(heldKey{}).(*holding)
	parent = &holding{parent, l, outer}
	if l.token > 0 {
		parent = fence.WithHolder(parent, l.key, l.token, l.refused)
	}
	ctx, cancel := context.WithCancelCause(parent)
	l.check()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		cancel(l.err)
		return ctx
	}
	c := &leaseContext{cancel: cancel}
	if parent.Done() != nil {
		c.stop = context.AfterFunc(ctx, func() {
			l.mu.Lock()
			defer l.mu.Unlock()
			delete(l.contexts, c)
		})
	}
	if l.contexts == nil {
		l.contexts = map[*leaseContext]struct{}{}
	}
	l.contexts[c] = struct{}{}
	return ctx
}

type heldKey struct{}

// holding is a context that carries a lease.
type holding struct {
	context.Context
	lease *Lease
	outer *holding // the next one that it carries
}

func (h *holding) Value(key any) any {
	if key == (heldKey{}) {
		return h
	}
	return h.Context.Value(key)
}

// heldIn reports whether ctx is that of a valid lease on key, of this store.
func (f *family) heldIn(ctx context.Context, key string) bool {
	h, _ := ctx.Value(heldKey{}).(*holding)
	for ; h != nil; h = h.outer {
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
	now := l.k.f.clk.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	return &HeldError{Holder: store.Holder{Key: l.key, Owner: l.owner, Label: l.k.o.Label, Token: l.token,
		TTL: max(0, now.Until(l.until))}}
}

// keeps returns for how long the lease keeps the waiters of its process from asking the store:
// while it is valid, and while its release may have an answer yet.
func (l *Lease) keeps(now clock.Instant) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		return now.Until(l.end())
	}
	limit := releaseLimit(l.ttl)
	return limit + limit/4 - now.Since(l.ended)
}

// end returns when the lease ends unless it is extended. l.mu is held.
func (l *Lease) end() clock.Instant {
	if last := l.last(); l.k.o.MaxHold > 0 && last.Sub(l.until) < 0 {
		return last
	}
	return l.until
}

// last returns when the lease ends by MaxHold, where that is set.
func (l *Lease) last() clock.Instant { return l.granted.Add(l.k.o.MaxHold) }

// nextAlarm returns the time until alarm has something to do. l.mu is held.
func (l *Lease) nextAlarm(now clock.Instant) time.Duration {
	next := now.Until(l.end())
	if l.every > 0 && l.trouble == nil {
		if risk := now.Until(l.until.Add(-l.lead)); risk > 0 {
			next = min(next, risk)
		}
	}
	return max(0, next)
}

// alarm looks at the lease when its time may have come, and returns the event to tell.
func (l *Lease) alarm(now clock.Instant) Event {
	if e := l.expire(now); e != nil {
		return e
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return nil
	}
	var e Event
	if l.every > 0 && l.trouble == nil && now.Until(l.until.Add(-l.lead)) <= 0 {
		e = l.fail(fmt.Errorf("%w: no extension has been answered for %v", ErrUncertain, round(now.Since(l.sent))), now)
	}
	l.k.f.sched.look(l, now)
	return e
}

// fail books a failed extension and returns the event to tell. l.mu is held.
func (l *Lease) fail(err error, now clock.Instant) Event {
	if l.trouble == nil {
		l.trouble = &trouble{began: now, since: time.Now()}
	}
	l.trouble.failures++
	l.trouble.last = err
	if !l.k.watched() {
		return nil
	}
	return AtRisk{Key: l.key, Token: l.token, Owner: l.owner, Left: max(0, now.Until(l.end())),
		Failing: now.Since(l.trouble.began), Err: err}
}

// check ends the lease where its time has come, and returns the present.
func (l *Lease) check() clock.Instant {
	now := l.k.f.clk.Now()
	if e := l.expire(now); e != nil {
		l.k.observe(context.Background(), e)
	}
	return now
}

// expire ends the lease where its time has come, and returns the event to tell.
func (l *Lease) expire(now clock.Instant) Event {
	l.mu.Lock()
	cause := l.expiry(now)
	l.mu.Unlock()
	if cause == nil {
		return nil
	}
	return l.lose(cause, now)
}

// expiry returns the cause where the lease is valid no more by the clock. l.mu is held.
func (l *Lease) expiry(now clock.Instant) error {
	end := l.end()
	switch {
	case l.err != nil || now.Until(end) > 0:
		return nil
	case l.k.o.MaxHold > 0 && end == l.last():
		return ErrMaxHold
	}
	e := &ExpiredError{Held: l.until.Sub(l.granted)}
	if t := l.trouble; t != nil {
		e.Err, e.Failing, e.Since = t.last, max(0, l.until.Sub(t.began)), t.since
	}
	return e
}

// lose ends the lease as lost, and returns the event to tell, if that is the caller's to do.
// A lost lease is never valid again.
func (l *Lease) lose(cause error, now clock.Instant) Event {
	if !l.finish(cause, now) {
		return nil
	}
	if !errors.Is(cause, ErrMaxHold) { // the store may hold it still
		l.k.f.vacate(l)
		return l.lost(now)
	}
	l.k.f.later(func() { // the loss is told before the release, and the Observer may release
		l.k.observe(context.Background(), l.lost(now))
		l.yield(now)
	})
	return nil
}

// lost returns the event of the loss.
func (l *Lease) lost(now clock.Instant) Event {
	if !l.k.watched() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return Lost{Key: l.key, Token: l.token, Owner: l.owner, Held: now.Since(l.granted), Overrun: now.Since(l.ended), Err: l.err}
}

// yield gives a lost lease back that the store may hold still, unless another does.
func (l *Lease) yield(now clock.Instant) {
	if ctx := context.Background(); l.startGiving() {
		l.k.observe(ctx, l.give(ctx, now))
	}
}

// refused ends the lease because a guard has seen a larger token. The loss is told before the
// guard's call returns, and so before the holder releases.
func (l *Lease) refused(stale *fence.StaleError) {
	now := l.k.f.clk.Now()
	if !l.finish(&refusedError{stale}, now) {
		return
	}
	defer l.k.f.later(func() { l.yield(now) }) // also where the Observer panics
	l.k.observe(context.Background(), l.lost(now))
}

// finish ends the validity, once. No extension begins afterwards.
func (l *Lease) finish(cause error, now clock.Instant) bool {
	l.mu.Lock()
	if l.err != nil {
		l.mu.Unlock()
		return false
	}
	l.err, l.ended = cause, now
	if errors.Is(cause, ErrLost) {
		l.err = l.k.fail("hold", l.key, cause)
	}
	if end := l.end(); now.Until(end) <= 0 {
		l.ended = end
	}
	contexts := l.contexts
	l.contexts = nil
	if l.done != nil {
		close(l.done)
	}
	l.mu.Unlock()
	for c := range contexts {
		if c.stop != nil {
			c.stop()
		}
		c.cancel(l.err)
	}
	l.k.f.sched.remove(l)
	return true
}

// beginExtend reserves the claim for an extension. It answers false where the lease has
// ended, and a channel to wait for where another extension runs.
func (l *Lease) beginExtend() (busy <-chan struct{}, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.err != nil:
		return nil, false
	case l.extending:
		return l.whenIdle(), false
	}
	l.extending = true
	return nil, true
}

// whenIdle returns a channel that is closed when the extension that runs has ended. l.mu is
// held.
func (l *Lease) whenIdle() <-chan struct{} {
	if l.idle == nil {
		l.idle = make(chan struct{})
	}
	return l.idle
}

// stopExtending tells those who wait that no extension runs any more. l.mu is held.
func (l *Lease) stopExtending() {
	l.extending = false
	if l.idle != nil {
		close(l.idle)
		l.idle = nil
	}
}

// endExtend books the answer to an extension that was sent at that instant, and returns the
// event to tell. An answer that comes too late revives nothing.
func (l *Lease) endExtend(ctx context.Context, sent, now clock.Instant, g store.Grant, err error) (Event, error) {
	lost := l.expire(now)
	l.mu.Lock()
	l.stopExtending()
	if l.err != nil {
		defer l.mu.Unlock()
		return lost, l.err
	}
	if err == nil && g.Token != l.token && g.Token != 0 {
		err = errTokenChanged
	}
	if err != nil && errors.Is(err, ErrLost) {
		l.mu.Unlock()
		e := l.lose(err, now)
		return e, l.Err()
	}
	defer l.mu.Unlock()
	var e Event
	next := now.Add(min(l.ttl/10, l.pace))
	switch {
	case err == nil:
		l.promise(sent, g.TTL)
		next = sent.Add(l.pace)
		if l.k.watched() {
			extended := Extended{Key: l.key, Token: l.token, Owner: l.owner, Validity: max(0, now.Until(l.end()))}
			if l.trouble != nil {
				extended.Failures = l.trouble.failures
			}
			e = extended
		}
		l.trouble = nil
	case ctx.Err() != nil && errors.Is(err, ctx.Err()): // the caller gave up
		err = kinded(err)
	default:
		err = kinded(err)
		e = l.fail(err, now)
	}
	l.k.f.sched.plan(l, next, now)
	return e, err
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
		l.check()
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
		case <-l.Done():
		}
	}
	answer := make(chan error, 1)
	go func() {
		call, cancel := context.WithTimeout(l.k.traced(ctx), l.Validity())
		defer cancel()
		sent := l.k.f.clk.Now()
		g, err := l.claim.Extend(call)
		e, err := l.endExtend(ctx, sent, l.k.f.clk.Now(), g, err)
		l.k.observe(ctx, e)
		answer <- err
	}()
	select {
	case err := <-answer:
		if err != nil && l.Err() != nil {
			return l.reason()
		}
		return err
	case <-l.Done():
		return l.reason()
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", contextError(ctx), ErrUncertain)
	}
}

// reason returns the bare cause of the end.
func (l *Lease) reason() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e, ok := l.err.(*Error); ok {
		return e.Err
	}
	return l.err
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
	now := l.check()
	l.finish(ErrReleased, now)
	if l.reason() == ErrHandedOver {
		return l.k.fail("release", l.key, ErrHandedOver)
	}
	err := l.giveBack(ctx, now)
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

// giveBack releases the claim, or waits for the release that runs.
func (l *Lease) giveBack(ctx context.Context, now clock.Instant) error {
	mine := l.startGiving()
	if mine && l.k.f.prompt {
		l.k.observe(ctx, l.give(ctx, now))
		return l.givenErr()
	}
	var told chan Event
	left := make(chan struct{})
	if mine {
		told = make(chan Event)
		go func() {
			e := l.give(ctx, now)
			select {
			case told <- e:
			case <-left:
				l.k.observe(ctx, e)
			}
		}()
	}
	limit := releaseLimit(l.ttl)
	t := time.NewTimer(limit + limit/4)
	defer t.Stop()
	given := l.whenGiven()
	if mine {
		given = nil // what told brings comes after it
	}
	select {
	case e := <-told:
		l.k.observe(ctx, e)
	case <-given:
	case <-t.C:
		close(left)
		l.k.f.vacate(l)
		return fmt.Errorf("%w: no answer within %v", ErrUncertain, limit)
	}
	return l.givenErr()
}

// lateness returns the cause of a loss with the times, and nil where it was not lost.
func (l *Lease) lateness() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	e, ok := l.err.(*Error)
	if !ok {
		return nil
	}
	now := l.k.f.clk.Now()
	return fmt.Errorf("%w; released %v after the grant, %v after its end", e.Err, round(now.Since(l.granted)), round(now.Since(l.ended)))
}

// startGiving reports whether a release is the caller's to run: releases of one claim never
// overlap, and none follows one that was confirmed.
func (l *Lease) startGiving() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.giving != notGiven {
		return false
	}
	l.giving = givingNow
	return true
}

// whenGiven returns a channel that is closed when no release runs.
func (l *Lease) whenGiven() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.giving != givingNow {
		ended := make(chan struct{})
		close(ended)
		return ended
	}
	if l.given == nil {
		l.given = make(chan struct{})
	}
	return l.given
}

func (l *Lease) givenErr() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.givingErr
}

// endGiving books how a release went.
func (l *Lease) endGiving(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.givingErr, l.giving = err, notGiven
	if err == nil || errors.Is(err, ErrLost) {
		l.giving = gaveBack
	}
	if l.given != nil {
		close(l.given)
		l.given = nil
	}
}

var errPanicked = fmt.Errorf("%w: the store's Release panicked", ErrUncertain)

// give releases the claim, waits until no extension runs any more, and returns the event to
// tell: that the release is booked by then lets an Observer call Release.
func (l *Lease) give(ctx context.Context, now clock.Instant) Event {
	err := errPanicked
	defer func() {
		l.k.f.vacate(l)
		l.endGiving(err)
	}()
	call, cancel := l.k.detached(ctx, l.ttl)
	defer cancel()
	if err = l.claim.Release(l.k.traced(call)); err != nil {
		err = kinded(err)
	}
	l.awaitIdle(call)
	if !l.k.watched() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	e := Released{Key: l.key, Token: l.token, Owner: l.owner, Held: now.Since(l.granted), Err: err}
	if _, lost := l.err.(*Error); lost {
		e.Overrun = now.Since(l.ended)
	}
	return e
}

// awaitIdle waits until no extension runs, or ctx is done.
func (l *Lease) awaitIdle(ctx context.Context) {
	l.mu.Lock()
	if !l.extending {
		l.mu.Unlock()
		return
	}
	idle := l.whenIdle()
	l.mu.Unlock()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

// discard releases a lease that was granted too late to be handed out.
func (l *Lease) discard() <-chan struct{} {
	now := l.k.f.clk.Now()
	l.finish(ErrReleased, now)
	if l.startGiving() {
		go func() {
			ctx := context.Background()
			l.k.observe(ctx, l.give(ctx, now))
		}()
	}
	return l.whenGiven()
}

// Ticket writes the lease down as one word of text, with which another process of this
// machine and boot can take it over by [Locker.Adopt]. This Lease then ends with
// [ErrHandedOver], and its Release sends nothing. Where Ticket fails, the lease goes on:
// [ErrUnsupported] where the store has no tickets, [ErrLost] where it is lost. A ticket is
// a bearer secret, and lapses when the ttl does. A lease that has just been handed over is extended first,
// for up to a third of the ttl; where that fails, Ticket does, with the store's error.
func (l *Lease) Ticket() (string, error) {
	text, err := l.ticket()
	if err != nil {
		return "", l.k.fail("ticket", l.key, err)
	}
	return text, nil
}

// lengthen extends a lease that was granted for a shorter time than asked, and not extended since:
// whoever takes it over could not come in time.
func (l *Lease) lengthen() error {
	l.mu.Lock()
	short := l.short
	l.mu.Unlock()
	if !short {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), l.ttl/3)
	defer cancel()
	return l.extend(ctx)
}

func (l *Lease) ticket() (string, error) {
	adopter, ok := l.k.f.store.(store.Adopter)
	if !ok {
		return "", fmt.Errorf("%w: this store has no tickets", ErrUnsupported)
	}
	if err := l.lengthen(); err != nil {
		return "", err
	}
	now := l.check()
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
		case <-l.Done():
		}
		now = l.check()
	}
	text, err := adopter.Ticket(l.claim)
	if err == nil && !l.finish(ErrHandedOver, now) {
		err = l.reason()
	}
	l.mu.Lock()
	l.stopExtending()
	if l.err == nil {
		l.k.f.sched.plan(l, now, now)
	}
	l.mu.Unlock()
	if err != nil {
		if errors.Is(err, ErrLost) {
			l.k.observe(context.Background(), l.lose(err, now))
		}
		return "", kinded(err)
	}
	l.k.f.vacate(l)
	if l.k.watched() {
		l.k.observe(context.Background(), Released{Key: l.key, Token: l.token, Owner: l.owner, Held: now.Since(l.granted), Err: ErrHandedOver})
	}
	return text, nil
}
