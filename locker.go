package holdfast

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// Token is a fencing token: it grows with each grant of a key. Zero means that there is
// none. Show it to the guard of the resource before the first read.
type Token = fence.Token

// withdrawWait bounds how long a call that gave up waits until its claim is withdrawn.
const withdrawWait = 500 * time.Millisecond

// tokensKept bounds for how many keys a family remembers the last token.
const tokensKept = 8192

// Locker acquires leases from one store. It is safe for concurrent use, needs no Close,
// and keeps no goroutine while it holds no lease and nobody waits.
type Locker struct {
	f        *family
	raw      Options   // as given, for With
	o        Options   // with the defaults
	observer *Observer // o.Observer's identity, the same where With inherits it
	limit    limit     // of releases
}

// family is what a Locker shares with those made by its With.
type family struct {
	store  store.Store
	info   store.Info
	prompt bool // calls of the store return by themselves: see [store.Prompt]
	clk    clock.Clock
	sched  *scheduler
	seats  sync.Pool // of *seat

	mu    sync.Mutex
	lines map[string]*line // keys that a goroutine of this process holds or waits for
	spare []*line          // some that are not used now
	seen  map[string]Token // last token granted here, for some keys

	jobsMu  sync.Mutex
	jobs    []func()
	jobRuns int // goroutines that run them
}

// New returns a Locker over s; nil options mean the defaults. It does no I/O. Options that
// s cannot keep, or that contradict each other, are refused with an [*InvalidError], and
// with [ErrUnsupported] where RequireFencing asks too much. Lockers that shall share one
// queue and one stream of extensions are made by [Locker.With], not by a second New.
func New(s store.Store, o *Options) (*Locker, error) {
	if s == nil {
		return nil, &Error{Op: "new", Err: &InvalidError{Field: "store", Rule: "must not be nil"}}
	}
	f := &family{store: s, info: s.Info(), lines: map[string]*line{}, seen: map[string]Token{}}
	_, f.prompt = s.(store.Prompt)
	f.sched = &scheduler{f: f, ends: agenda{which: ends}, dues: agenda{which: dues}}
	var raw Options
	if o != nil {
		raw = *o
	}
	return f.locker(raw, nil)
}

// With returns a Locker over the same store, with the same local queues and extensions, and
// other terms. Zero fields of o are inherited, and so is a bool that is set.
func (k *Locker) With(o Options) (*Locker, error) {
	observer := k.observer
	if o.Observer != nil {
		observer = nil
	}
	return k.f.locker(o.inherit(k.raw), observer)
}

func (f *family) locker(raw Options, observer *Observer) (*Locker, error) {
	o, err := raw.complete(f.info)
	if err != nil {
		return nil, &Error{Op: "new", Store: f.info.Name, Err: err}
	}
	if observer == nil {
		observer = &o.Observer
	}
	return &Locker{f: f, raw: raw, o: o, observer: observer}, nil
}

// fail wraps err once.
func (k *Locker) fail(op, key string, err error) error {
	return &Error{Op: op, Key: key, Store: k.f.info.Name, Err: err}
}

// Acquire waits until it holds key, or ctx is done. ctx bounds the wait only; the lease
// ends by Release, or by loss.
//
// Goroutines of one process that want the same key are served in the order of their calls, one
// after another, and so are all processes where the store has a queue; the package documentation
// says what that order is between processes, and what breaks it. There are no priorities.
//
// It waits for a holder to go ([ErrHeld]) and for the store to come back ([ErrUnavailable],
// [ErrUncertain]); when ctx is done first, the error answers both the context's error and
// what it last waited for. What waiting cannot mend is returned at once: [ErrInvalid],
// [ErrUnsupported], [ErrAlreadyHeld]. A ctx that is done takes nothing, and nothing is left
// behind: the claim is withdrawn, for which Acquire may stay up to a second longer, and half of
// that where the store is not prompt ([store.Prompt]).
func (k *Locker) Acquire(ctx context.Context, key string) (*Lease, error) {
	return k.acquire(ctx, key, true)
}

// TryAcquire makes one attempt, and answers [ErrHeld], [ErrUnavailable] or [ErrUncertain]
// where Acquire would wait. It does not overtake: where this process holds the key or waits
// for it, it makes no attempt of its own but answers what that lease or that waiter knows.
func (k *Locker) TryAcquire(ctx context.Context, key string) (*Lease, error) {
	return k.acquire(ctx, key, false)
}

func (k *Locker) acquire(ctx context.Context, key string, wait bool) (*Lease, error) {
	if err := k.admit(ctx, key); err != nil {
		return nil, err
	}
	began, t := k.f.clk.Now(), k.terms(wait)
	if k.f.prompt {
		if s := k.f.sit(k, ctx, key, t, began); s != nil {
			return k.first(s)
		}
	}
	w := &waiter{k: k, ctx: ctx, key: key, terms: t, since: began, ready: make(chan struct{})}
	k.f.join(w)
	if err := w.outcome(w.wait()); err != nil {
		return nil, k.fail("acquire", key, err)
	}
	return k.hand(ctx, w.lease, began, false), nil
}

// terms are those of a claim of this Locker. A grant for a shorter time will do where it is
// extended in time, with room for a slow machine.
func (k *Locker) terms(wait bool) terms {
	t := terms{ttl: k.o.TTL, label: k.o.Label, wait: wait}
	if wait && !k.o.NoExtend {
		t.least = k.o.Margin + min(k.o.TTL/4, 100*time.Millisecond)
	}
	return t
}

// first acquires for a waiter who was the first to want the key.
func (k *Locker) first(s *seat) (*Lease, error) {
	w := &s.waiter
	alone := s.runner.lead(w)
	if err := w.outcome(false); err != nil {
		return nil, k.fail("acquire", w.key, err)
	}
	ctx, lease, began := w.ctx, w.lease, w.since
	if alone {
		k.f.leaveSeat(s)
	}
	return k.hand(ctx, lease, began, false), nil
}

// hand tells of a new lease. Where the Observer panics, nobody has the lease to release it.
func (k *Locker) hand(ctx context.Context, l *Lease, since clock.Instant, adopted bool) *Lease {
	if !k.watched() {
		return l
	}
	told := false
	defer func() {
		if !told {
			_ = l.Release(ctx)
		}
	}()
	k.observe(ctx, Acquired{Key: l.key, Token: l.token, Owner: l.owner, Validity: l.Validity(), Waited: k.f.clk.Since(since), Adopted: adopted})
	told = true
	return l
}

// admit refuses what needs no I/O to be refused.
func (k *Locker) admit(ctx context.Context, key string) error {
	if err := store.CheckKey(key); err != nil {
		return k.fail("acquire", key, err)
	}
	if ctx.Err() != nil {
		return k.fail("acquire", key, contextError(ctx))
	}
	if k.f.heldIn(ctx, key) {
		return k.fail("acquire", key, ErrAlreadyHeld)
	}
	return nil
}

// Do runs fn while it holds key. It waits for the key as [Locker.Acquire] does; ctx bounds
// that wait and is the parent of fn's context, which ends with the lease and carries its
// key and token.
//
// Do returns nil only if fn returned nil, the lease was not lost and the release was
// confirmed. A loss cancels fn's context, with the cause, and always adds [ErrLost] to the
// result; a release that failed adds an [*Error] with Op "release"; fn's own error is never
// hidden. Do waits for fn, however long it takes, and releases also when fn panics or ends
// its goroutine. A fn that gave the lease away by Ticket or Release is no failure.
func (k *Locker) Do(ctx context.Context, key string, fn func(ctx context.Context, lease *Lease) error) error {
	if fn == nil {
		return k.fail("do", key, &InvalidError{Field: "fn", Rule: "must not be nil"})
	}
	lease, err := k.Acquire(ctx, key)
	if err != nil {
		return err
	}
	returned := false
	defer func() {
		if !returned { // a panic, which goes on, or runtime.Goexit
			_ = lease.Release(ctx)
		}
	}()
	err = fn(lease.Context(ctx), lease)
	returned = true
	released := lease.Release(ctx)
	if errors.Is(released, ErrHandedOver) {
		released = nil
	}
	return join(err, released)
}

// Leases are several leases that were acquired together.
type Leases []*Lease

// AcquireAll acquires all keys or none. It waits as [Locker.Acquire] does, in the order of
// the keys' bytes, so that callers cannot block each other crosswise; a key that is given
// twice is acquired once. Where one is lost while it waits for another, it gives up with
// [ErrLost].
func (k *Locker) AcquireAll(ctx context.Context, keys ...string) (Leases, error) {
	if len(keys) == 0 {
		return nil, k.fail("acquire", "", &InvalidError{Field: "keys", Rule: "must be at least one"})
	}
	keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	for _, key := range keys {
		if err := k.admit(ctx, key); err != nil {
			return nil, err
		}
	}
	wait, stop := context.WithCancel(ctx)
	defer stop()
	var got Leases
	for _, key := range keys {
		l, err := k.Acquire(wait, key)
		if err != nil {
			if lost := got.Err(); lost != nil { // which is what ended the wait
				err = lost
			}
			return nil, join(err, got.undo(ctx))
		}
		got = append(got, l)
		wait = l.Context(wait)
	}
	if err := got.Err(); err != nil {
		return nil, join(err, got.undo(ctx))
	}
	return got, nil
}

// undo releases what was acquired in vain. A lease that was lost meanwhile is not news.
func (ls Leases) undo(ctx context.Context) error {
	errs := ls.release(ctx)
	for i, err := range errs {
		if errors.Is(err, ErrLost) {
			errs[i] = nil
		}
	}
	return join(errs...)
}

// Err returns nil while every lease is valid, and else why one is not.
func (ls Leases) Err() error {
	for _, l := range ls {
		if err := l.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Context returns a context that ends with the first lease that ends, as [Lease.Context].
func (ls Leases) Context(parent context.Context) context.Context {
	for _, l := range ls {
		parent = l.Context(parent)
	}
	return parent
}

// Release releases all of them at once, as [Lease.Release], and joins what failed.
func (ls Leases) Release(ctx context.Context) error { return join(ls.release(ctx)...) }

func (ls Leases) release(ctx context.Context) []error {
	errs := make([]error, len(ls))
	var wg sync.WaitGroup
	for i, l := range ls {
		wg.Go(func() { errs[i] = l.Release(ctx) })
	}
	wg.Wait()
	return errs
}

// Adopt takes over a lease that another Locker, also of another process, wrote down by
// [Lease.Ticket]. It refreshes the lease and never acquires: a ticket whose lease has
// lapsed is [ErrLost], a damaged one or one of another store [ErrInvalid], one of another
// machine or boot, or on a store that has no tickets, [ErrUnsupported]. The lease keeps its
// token and the ttl of the ticket. A ticket is a bearer secret, and two that adopt the same
// one are not kept apart, not even by a guard.
func (k *Locker) Adopt(ctx context.Context, ticket string) (*Lease, error) {
	t, err := store.ParseTicket(ticket)
	if err != nil {
		return nil, k.fail("adopt", "", err)
	}
	key := string(t.Key)
	adopter, ok := k.f.store.(store.Adopter)
	switch {
	case !ok:
		return nil, k.fail("adopt", key, fmt.Errorf("%w: this store has no tickets", ErrUnsupported))
	case t.Store != k.f.info.Fingerprint:
		return nil, k.fail("adopt", key, &InvalidError{Field: "ticket", Rule: "belongs to another store"})
	case store.Validity(t.TTL, 0) <= k.o.Margin:
		return nil, k.fail("adopt", key, &InvalidError{Field: "Margin", Value: k.o.Margin.String(),
			Rule: fmt.Sprintf("leaves no validity to a lease with the ticket's ttl of %v", t.TTL)})
	case ctx.Err() != nil:
		return nil, k.fail("adopt", key, contextError(ctx))
	}
	type adopted struct {
		claim store.Claim
		grant store.Grant
		err   error
	}
	call, cancel := context.WithTimeout(ctx, t.TTL)
	defer cancel()
	began := k.f.clk.Now()
	answer := make(chan adopted, 1)
	go func() {
		c, g, err := adopter.Adopt(k.traced(call), ticket)
		answer <- adopted{c, g, err}
	}()
	var a adopted
	select {
	case a = <-answer:
	case <-call.Done(): // a late answer is left to lapse: the ticket is still the caller's
		return nil, k.fail("adopt", key, fmt.Errorf("%w: %w", contextError(call), ErrUncertain))
	}
	if a.err != nil {
		return nil, k.fail("adopt", key, kinded(a.err))
	}
	k.f.mu.Lock()
	l, err := k.f.accept(&granting{k: k, key: key, ttl: t.TTL, claim: a.claim, grant: a.grant, sent: began, adopted: true})
	k.f.mu.Unlock()
	if err != nil {
		await(k.giveBack(a.claim, t.TTL, 3), nil)
		return nil, k.fail("adopt", key, err)
	}
	return k.hand(ctx, l, began, true), nil
}

// granting is a grant that may become a lease.
type granting struct {
	k       *Locker
	key     string
	ttl     time.Duration // asked for
	claim   store.Claim
	grant   store.Grant
	sent    clock.Instant // stamped before the request
	adopted bool
}

// accept makes a lease of a grant and puts it into the key's line, or says why it must not
// be handed out; its claim is then the caller's to release. family.mu is held.
func (f *family) accept(g *granting) (*Lease, error) {
	now := f.clk.Now()
	l := newLease(g)
	if now.Until(l.until) <= 0 {
		return nil, fmt.Errorf("%w: the grant arrived after its validity had run out", ErrUnavailable)
	}
	if err := f.checkToken(g); err != nil {
		return nil, err
	}
	n := f.line(g.key)
	if old := n.lease; old != nil { // the store has granted again: what this process still trusted is gone
		go func() { old.k.observe(context.Background(), old.lose(&LostError{By: l.held()}, now)) }()
	}
	n.lease = l
	l.start(now)
	return l, nil
}

// checkToken refuses a token that a guard would refuse, or that is not above the last one.
// Tokens are compared with those granted through this family only.
func (f *family) checkToken(g *granting) error {
	if f.info.Fencing == store.FencingNone {
		return nil
	}
	t, last := g.grant.Token, f.seen[g.key]
	switch {
	case t <= 0:
		return &InvalidError{Field: "fencing token", Value: t.String(), Rule: "a store that mints tokens must grant a positive one"}
	case t < last, t == last && !g.adopted:
		return &InvalidError{Field: "fencing token", Value: t.String(), Rule: fmt.Sprintf("must be larger than %v, which was granted for this key before; the store has lost state or its clock went back", last)}
	}
	if len(f.seen) >= tokensKept {
		for key := range f.seen { // any one
			delete(f.seen, key)
			break
		}
	}
	f.seen[g.key] = t
	return nil
}

// giveBack releases a claim that nobody wants any more, detached from every context, and
// closes the channel afterwards. A store that does not confirm is asked again, up to tries
// times in all: what it may have granted ends with its ttl anyway.
func (k *Locker) giveBack(c store.Claim, ttl time.Duration, tries int) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for try := range tries {
			if try > 0 {
				time.Sleep(50 * time.Millisecond << try)
			}
			ctx, cancel := context.WithTimeout(k.traced(context.Background()), releaseLimit(ttl))
			err := c.Release(ctx)
			cancel()
			if err == nil || errors.Is(err, ErrLost) || useless(err) {
				return
			}
		}
	}()
	return done
}

// releaseLimit bounds one release.
func releaseLimit(ttl time.Duration) time.Duration { return min(ttl, 2*time.Second) }

// detached returns a context for the release of a claim of that ttl: with the values of ctx
// and a limit of its own.
func (k *Locker) detached(ctx context.Context, ttl time.Duration) (context.Context, context.CancelFunc) {
	switch {
	case ttl != k.o.TTL: // an adopted one
		return context.WithTimeout(context.WithoutCancel(ctx), releaseLimit(ttl))
	case ctx == context.Background():
		return k.limit.context(releaseLimit(ttl)), func() {}
	}
	return &valued{k.limit.context(releaseLimit(ttl)), ctx}, func() {}
}

// limit is a context with a deadline that many calls share: one for each call would cost a
// timer each time.
type limit struct {
	mu    sync.Mutex
	ctx   context.Context
	fresh time.Time // until when ctx is given out
}

// context returns one that ends after d, or up to a sixteenth of it earlier.
func (s *limit) context(d time.Duration) context.Context {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx == nil || now.After(s.fresh) {
		ctx, cancel := context.WithDeadline(context.Background(), now.Add(d))
		_ = cancel // it ends by its deadline, when all who share it are done
		s.ctx, s.fresh = ctx, now.Add(d/16)
	}
	return s.ctx
}

// valued is a context with the values of another one.
type valued struct {
	context.Context
	values context.Context
}

func (v *valued) Value(key any) any {
	if value := v.Context.Value(key); value != nil { // package context asks for what ends it
		return value
	}
	return v.values.Value(key)
}

// later runs job, which talks to the store for nobody who waits, in one of a few goroutines.
func (f *family) later(job func()) {
	f.jobsMu.Lock()
	defer f.jobsMu.Unlock()
	f.jobs = append(f.jobs, job)
	if f.jobRuns < maxInFlight {
		f.jobRuns++
		go f.runJobs()
	}
}

func (f *family) runJobs() {
	for {
		f.jobsMu.Lock()
		if len(f.jobs) == 0 {
			f.jobs = nil
			f.jobRuns--
			f.jobsMu.Unlock()
			return
		}
		job := f.jobs[0]
		f.jobs = f.jobs[1:]
		f.jobsMu.Unlock()
		job()
	}
}
