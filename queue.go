package holdfast

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// The local queue. For each key that this process wants, one runner holds one claim and
// waits at the store with it; the process's waiters stand in line behind. The claim belongs
// to the line: a waiter that leaves passes it on, and the last one withdraws it. While the
// process holds the key itself there is no claim; the one that is made when the lease is
// released takes its place behind those of other processes, which is what makes the queue
// fair between them.
//
// Where the calls of a store return by themselves, the first waiter of the line leads: it runs
// the runner in its own goroutine and context until it is settled or gives up, and the next one
// leads on. So nothing stands between a wake-up of the store and the caller. Else the runner
// has a goroutine, which may hang in the store while each waiter leaves when its own context
// says so.

// How long a waiter sleeps between attempts where the claim has no Wait of its own.
const (
	pollMin, pollMax   = 20 * time.Millisecond, 250 * time.Millisecond // while another holds the key
	retryMin, retryMax = 50 * time.Millisecond, 2 * time.Second        // while the store cannot decide
)

// terms are what a claim is made with. Waiters of other terms cannot inherit it.
type terms struct {
	ttl   time.Duration
	label string
	wait  bool          // false: one attempt
	least time.Duration // validity of a first grant that is of use; zero: all of it
}

// waiter is one call of Acquire or TryAcquire.
type waiter struct {
	k     *Locker
	ctx   context.Context
	key   string
	terms terms
	since clock.Instant
	ready chan struct{} // closed when it is settled or leads; nil for one that leads from the start

	// Guarded by family.mu until ready is closed or leave has returned.
	prev, next *waiter // in its line
	queued     bool    // it stands in a line
	leads      *runner // that its own goroutine runs; nil: none
	done       bool
	tries      int
	lease      *Lease
	err        error // of the call; of the last attempt, if the waiter left

	withdrawn <-chan struct{} // closed when what the attempt may have taken is given back
}

// settle ends the wait. family.mu is held.
func (w *waiter) settle(l *Lease, err error) {
	if !w.done {
		w.done, w.lease, w.err = true, l, err
		if w.leads == nil {
			close(w.ready)
		}
	}
}

// outcome returns nil when the lease is there, and else what the call answers.
func (w *waiter) outcome(hung bool) error {
	await(w.withdrawn, nil)
	switch {
	case w.ctx.Err() != nil:
		return w.abandon()
	case hung:
		return fmt.Errorf("%w: no answer within %v", ErrUncertain, w.terms.ttl)
	}
	return w.err
}

// wait returns when w is settled or has left its line, and reports whether it left because
// the store did not return from its one attempt.
func (w *waiter) wait() (hung bool) {
	var limit <-chan time.Time
	if !w.terms.wait {
		t := time.NewTimer(w.terms.ttl + w.terms.ttl/4)
		defer t.Stop()
		limit = t.C
	}
	select {
	case <-w.ready:
		if w.leads != nil {
			w.leads.lead(w)
		}
	case <-w.ctx.Done():
		w.k.f.leave(w)
	case <-limit:
		w.k.f.leave(w)
		hung = w.lease == nil && w.err == nil
	}
	return hung
}

// abandon gives back what w was granted too late, and returns why it ended.
func (w *waiter) abandon() error {
	if w.lease != nil {
		await(w.lease.discard(), nil)
	}
	waited := round(w.k.f.clk.Since(w.since))
	if w.err == nil {
		return fmt.Errorf("%w after %v", contextError(w.ctx), waited)
	}
	return fmt.Errorf("%w after %v: %w", contextError(w.ctx), waited, w.err)
}

// await waits for a withdrawal, but not for long, and not once quit is closed.
func await(done, quit <-chan struct{}) {
	if done == nil {
		return
	}
	t := time.NewTimer(withdrawWait)
	defer t.Stop()
	select {
	case <-done:
	case <-quit:
	case <-t.C:
	}
}

// line is what this process has to do with one key.
type line struct {
	front, back *waiter // of those who wait, in the order of their calls
	lease       *Lease  // held here, or being released; nil otherwise
	r           *runner // nil where nobody waits
}

func (n *line) push(w *waiter) {
	w.queued, w.prev, w.next = true, n.back, nil
	if n.back == nil {
		n.front = w
	} else {
		n.back.next = w
	}
	n.back = w
}

func (n *line) cut(w *waiter) {
	if w.prev == nil {
		n.front = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		n.back = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.queued, w.prev, w.next = false, nil, nil
}

// spareLines bounds how many lines a family keeps for later keys.
const spareLines = 64

// line returns the line of key, made where there is none. family.mu is held.
func (f *family) line(key string) *line {
	n := f.lines[key]
	if n != nil {
		return n
	}
	if last := len(f.spare) - 1; last >= 0 {
		n, f.spare = f.spare[last], f.spare[:last]
	} else {
		n = new(line)
	}
	f.lines[key] = n
	return n
}

// prune forgets a line that is of no use. family.mu is held.
func (f *family) prune(key string) {
	if n := f.lines[key]; n != nil && *n == (line{}) {
		delete(f.lines, key)
		if len(f.spare) < spareLines {
			f.spare = append(f.spare, n)
		}
	}
}

// seat is a waiter that leads from the start, with its runner.
type seat struct {
	waiter waiter
	runner runner
}

// sit returns a seat where nobody of this process holds the key or waits for it, and else
// nil.
func (f *family) sit(k *Locker, ctx context.Context, key string, t terms, began clock.Instant) *seat {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lines[key] != nil {
		return nil
	}
	s, _ := f.seats.Get().(*seat)
	if s == nil {
		s = &seat{runner: runner{wake: make(chan struct{}, 1)}}
	}
	s.waiter = waiter{k: k, ctx: ctx, key: key, terms: t, since: began, leads: &s.runner}
	s.runner = runner{f: f, key: key, n: f.line(key), wake: s.runner.wake}
	s.runner.n.r = &s.runner
	s.runner.n.push(&s.waiter)
	s.runner.prepare(&s.waiter)
	return s
}

// leaveSeat keeps a seat for later, which nobody knows any more.
func (f *family) leaveSeat(s *seat) {
	s.waiter, s.runner = waiter{}, runner{wake: s.runner.wake}
	f.seats.Put(s)
}

// vacate tells the waiters that l does not keep them away any more.
func (f *family) vacate(l *Lease) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := f.lines[l.key]; n != nil && n.lease == l {
		n.lease = nil
		if n.r != nil {
			n.r.poke()
		}
		f.prune(l.key)
	}
}

// join puts w into the line of its key, or settles it at once.
func (f *family) join(w *waiter) {
	f.mu.Lock()
	if n := f.lines[w.key]; n != nil && n.lease != nil {
		l := n.lease
		f.mu.Unlock()
		l.check() // a lease that ran out while the machine slept keeps nobody away
		f.mu.Lock()
	}
	defer f.mu.Unlock()
	f.enter(w, nil)
}

// enter is join without a look at the clock; a new claim is made after the one before is
// withdrawn. family.mu is held.
func (f *family) enter(w *waiter, after <-chan struct{}) {
	n := f.line(w.key)
	switch {
	case !w.terms.wait && n.lease != nil:
		w.settle(nil, n.lease.held())
	case !w.terms.wait && n.r != nil && n.r.trying:
		n.r.watchers = append(n.r.watchers, w)
	case !w.terms.wait && n.r != nil:
		w.settle(nil, n.r.last)
	default:
		n.push(w)
		if n.r == nil {
			f.serve(w.key, n, after)
		}
	}
}

// serve starts a runner for a line with waiters, which begins after the claim of the one
// before is withdrawn. family.mu is held.
func (f *family) serve(key string, n *line, after <-chan struct{}) {
	n.r = &runner{f: f, key: key, n: n, after: after, trying: true, wake: make(chan struct{}, 1)}
	n.r.start()
}

// leave takes w out of its line, unless it was settled in the meantime, and lets another lead
// where it did. The last one withdraws the claim.
func (f *family) leave(w *waiter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !w.done {
		w.done = true
		if w.queued {
			w.withdrawn = f.lines[w.key].remove(w)
		}
	}
	if r := w.leads; r != nil && !r.gone {
		r.start()
	}
	w.leads = nil
}

// remove takes w out of the line. The next waiter inherits the claim, if its terms are the
// same; else the claim is withdrawn. family.mu is held.
func (n *line) remove(w *waiter) (withdrawn <-chan struct{}) {
	first := n.front == w
	n.cut(w)
	w.err = n.r.last
	if n.front == nil || first && n.r.claim != nil && n.front.terms != n.r.terms {
		return n.r.drop()
	}
	return nil
}

// runner tries for the first waiter of a line until nobody waits.
type runner struct {
	f     *family
	key   string
	n     *line
	after <-chan struct{} // wait for this first
	wake  chan struct{}   // a reason to try at once

	// Guarded by family.mu.
	claim     store.Claim // nil between two claims
	k         *Locker     // whose waiter it was made for
	terms     terms       // of claim
	trying    bool        // an attempt is being made, or will be at once
	last      error       // what the last attempt answered; set where trying is not
	watchers  []*waiter   // calls of TryAcquire that share the attempt
	abort     func()      // ends the call that runs
	waiting   bool        // that call is a Wait
	gone      bool        // nobody waits any more, or another runner has taken over
	withdrawn <-chan struct{}

	// Of the goroutine that runs it.
	asked   clock.Instant // before the attempt that pause came after
	pausing bool          // still: the waiter that led has left meanwhile
	fails   int           // attempts without a grant in a row
	quick   int           // wake-ups in a row that came at once and for nothing
}

// poke ends a wait. family.mu is held.
func (r *runner) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
	if r.waiting && r.abort != nil {
		r.abort()
	}
}

// drop withdraws the claim because nobody wants it. A call that hangs in the store keeps
// this runner, and nothing and nobody else. family.mu is held.
func (r *runner) drop() <-chan struct{} {
	r.withdrawn = r.after
	if r.claim != nil {
		r.withdrawn = r.k.giveBack(r.claim, r.terms.ttl, 3)
	}
	r.end()
	if r.abort != nil {
		r.abort()
	}
	if r.n.front != nil {
		r.f.serve(r.key, r.n, r.withdrawn)
	}
	for _, w := range r.watchers { // their attempt is cancelled: they join another
		if !w.done {
			r.f.enter(w, r.withdrawn)
		}
	}
	return r.withdrawn
}

// end takes the runner out of its line. family.mu is held.
func (r *runner) end() {
	r.gone = true
	r.n.r = nil
	r.poke()
	r.f.prune(r.key)
}

// start lets the runner begin, or go on: in a goroutine of its own or, where the calls of the
// store return by themselves, in that of the first waiter. family.mu is held.
func (r *runner) start() {
	if !r.f.prompt {
		go r.run()
		return
	}
	w := r.n.front
	w.leads = r
	close(w.ready)
}

// run tries until nobody waits.
func (r *runner) run() {
	await(r.after, nil)
	for {
		w, held := r.next()
		if w == nil {
			return
		}
		sent := r.f.clk.Now()
		g, err := r.try(w, held)
		if w, _ = r.settle(g, err, sent); w != nil {
			r.pause(w)
		}
	}
}

// lead is run for w, the first of the line, in its own goroutine and context, until it is
// settled or gives up. It reports whether nobody waits any more.
func (r *runner) lead(w *waiter) (over bool) {
	defer func() {
		if !over { // also where the store or an Observer has panicked
			r.f.leave(w)
		}
	}()
	seated := w.ready == nil
	if !seated {
		await(r.after, w.ctx.Done())
		if r.pausing {
			r.rest(w, r.aged())
		}
	}
	for ; seated || w.ctx.Err() == nil; seated = false {
		sent, held := w.since, (*HeldError)(nil)
		if !seated { // else its claim is made
			_, held = r.next()
			sent = r.f.clk.Now()
		}
		g, err := r.try(w, held)
		if err != nil && w.ctx.Err() != nil {
			return false // an heir tries again at once
		}
		if _, over := r.settle(g, err, sent); w.done {
			return over
		}
		r.asked = sent
		r.pause(w)
	}
	return false
}

// next returns the waiter to try for, with its claim made, or nil when nobody waits. While
// this process itself holds the key, there is nothing to ask the store for: it returns the
// answer instead.
func (r *runner) next() (w *waiter, held *HeldError) {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if r.gone {
		return nil, nil
	}
	w = r.n.front
	if l := r.n.lease; l != nil && l.keeps(r.f.clk.Now()) > 0 {
		r.begin()
		return w, l.held()
	}
	r.prepare(w)
	return w, nil
}

// prepare makes a claim for w where there is none. family.mu is held.
func (r *runner) prepare(w *waiter) {
	if r.claim == nil {
		r.claim = r.f.store.Claim(r.key, store.ClaimOptions{TTL: w.terms.ttl, Wait: w.terms.wait, Least: w.terms.least, Label: w.terms.label})
		r.terms, r.k = w.terms, w.k
	}
	r.begin()
}

// begin notes that an attempt follows, which comes after whatever has woken it. family.mu is
// held.
func (r *runner) begin() {
	select {
	case <-r.wake:
	default:
	}
	r.trying = true
}

// spend gives the claim back, if there is one. family.mu is held.
func (r *runner) spend(tries int) <-chan struct{} {
	c := r.claim
	if c == nil {
		return nil
	}
	r.claim = nil
	return r.k.giveBack(c, r.terms.ttl, tries)
}

// ctx returns the context of the store's calls for w: that of a waiter which leads, and else
// one that ends when nobody waits.
func (r *runner) ctx(w *waiter) context.Context {
	if r.f.prompt {
		return w.k.traced(w.ctx)
	}
	return w.k.traced(context.WithoutCancel(w.ctx))
}

// try makes one attempt for w, unless the answer is known.
func (r *runner) try(w *waiter, held *HeldError) (g store.Grant, err error) {
	switch {
	case held != nil:
		return g, held
	case r.f.prompt:
		g, err = r.claim.Try(r.ctx(w))
	default:
		g, err = r.tryRaced(w)
	}
	if err != nil {
		err = kinded(err)
	}
	return g, err
}

// tryRaced makes an attempt that may hang. It ends when nobody waits, and with the ttl: a
// grant that comes later than that is worth nothing.
func (r *runner) tryRaced(w *waiter) (store.Grant, error) {
	ctx, cancel := context.WithTimeout(r.ctx(w), w.terms.ttl)
	defer cancel()
	if !r.calling(cancel, false) {
		return store.Grant{}, context.Canceled
	}
	g, err := r.claim.Try(ctx)
	r.calling(nil, false)
	return g, err
}

// calling notes how to end the call of the claim that follows, and answers false where it
// shall not be made.
func (r *runner) calling(abort func(), waiting bool) bool {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	r.abort, r.waiting = abort, waiting
	return !r.gone && !(waiting && len(r.wake) > 0)
}

// settle tells whom it concerns how an attempt went. It returns the waiter that waits on,
// or nil where the next attempt can follow at once, and whether nobody waits any more.
func (r *runner) settle(g store.Grant, err error, sent clock.Instant) (next *waiter, over bool) {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if r.gone {
		if err == nil { // a late grant, beside the withdrawal
			claim, withdrawn := r.claim, r.withdrawn
			r.f.mu.Unlock()
			<-withdrawn
			r.k.giveBack(claim, r.terms.ttl, 3)
			r.f.mu.Lock()
		}
		return nil, true
	}
	w := r.n.front
	w.tries++
	var l *Lease
	granted := err == nil
	if granted {
		l, err = r.f.accept(&granting{k: w.k, key: r.key, ttl: r.terms.ttl, claim: r.claim, grant: g, sent: sent})
	}
	r.trying, r.last = false, err
	switch {
	case l != nil:
		r.claim = nil
		if r.pop(w, l, nil); !r.gone || len(r.watchers) > 0 {
			r.last = l.held()
		}
	case !w.terms.wait || useless(err):
		if granted || errors.Is(err, ErrUncertain) { // the caller waits until it is undone
			w.withdrawn = r.spend(3)
		} else {
			r.spend(1)
		}
		r.pop(w, nil, err)
	case granted:
		r.spend(3)
	case errors.Is(err, ErrLost) || errors.Is(err, ErrReleased): // the claim was granted behind our back, and has ended
		r.spend(1)
	}
	for _, watcher := range r.watchers {
		watcher.settle(nil, r.last)
	}
	r.watchers = nil
	if l != nil || w.done {
		return nil, r.gone
	}
	return w, false
}

// pop settles the first waiter and takes it out of the line. family.mu is held.
func (r *runner) pop(w *waiter, l *Lease, err error) {
	w.settle(l, err)
	r.n.cut(w)
	r.fails, r.quick = 0, 0
	if r.n.front == nil {
		r.end()
	}
}

// pause waits until another attempt for w is worth it.
func (r *runner) pause(w *waiter) {
	r.fails++
	held := r.held()
	if w.k.watched() {
		e := Waiting{Key: r.key, Attempt: w.tries, Waited: r.f.clk.Since(w.since), Err: r.last}
		if held != nil {
			e.Place = held.Place
		}
		w.k.observe(w.ctx, e)
	}
	r.rest(w, held)
}

// held returns what the last attempt says of the holder; nil where it does not.
func (r *runner) held() (held *HeldError) {
	errors.As(r.last, &held)
	return held
}

// aged is held with the ttl that is left by now.
func (r *runner) aged() *HeldError {
	held := r.held()
	if held == nil || held.Holder.TTL <= 0 {
		return held
	}
	now := *held
	now.Holder.TTL = max(1, held.Holder.TTL-r.f.clk.Since(r.asked))
	return &now
}

// rest is pause, told of.
func (r *runner) rest(w *waiter, held *HeldError) {
	r.pausing = false
	if held != nil && r.own() > 0 {
		r.quick = 0
		for left := r.own(); left > 0 && !r.sleep(w, left); left = r.own() {
		}
		return
	}
	waiter, ok := r.claim.(store.Waiter)
	if !ok || held == nil || r.quick > 4 || !r.wait(w, waiter, held) {
		r.quick = 0
		r.sleep(w, r.delay(held))
	}
}

// own returns for how long a lease of this process keeps its waiters away, whose end it tells
// of: until then there is nothing to ask the store for.
func (r *runner) own() time.Duration {
	if l := r.ownLease(); l != nil {
		l.check()
	}
	if l := r.ownLease(); l != nil {
		return l.keeps(r.f.clk.Now())
	}
	return 0
}

func (r *runner) ownLease() *Lease {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if r.gone {
		return nil
	}
	return r.n.lease
}

// waitLimit bounds a Wait: a store that never returns from it still does not keep a free key.
// It is longer than any claim has reason to wait: the further behind its place, the later the
// claim asks by itself.
func waitLimit(held *HeldError) time.Duration {
	return min(max(0, held.Holder.TTL), maxTTL) + time.Minute + 2*time.Second*time.Duration(min(max(0, held.Place), 1e6))
}

// wait lets the claim wait, and answers false where it does not.
func (r *runner) wait(w *waiter, c store.Waiter, held *HeldError) bool {
	ctx, cancel := context.WithTimeout(r.ctx(w), waitLimit(held))
	defer cancel()
	if !r.calling(cancel, true) {
		return true
	}
	began := time.Now()
	err := c.Wait(ctx, held)
	r.calling(nil, false)
	r.pausing = err != nil && r.f.prompt && w.ctx.Err() != nil
	if time.Since(began) > time.Millisecond {
		r.quick = 0
	} else {
		r.quick++
	}
	return err == nil || ctx.Err() != nil
}

// delay returns how long to sleep before the next attempt: longer each time, with jitter,
// and while another holds the key not longer than its grant lasts.
func (r *runner) delay(held *HeldError) time.Duration {
	jitter := 0.5 + rand.Float64()
	if held == nil {
		return time.Duration(jitter * float64(backoff(retryMin, retryMax, r.fails)))
	}
	d := time.Duration(jitter * float64(backoff(pollMin, pollMax, r.fails)))
	if ttl := held.Holder.TTL; ttl > 0 && ttl < d {
		d = min(d, ttl+time.Duration(jitter*float64(2*time.Millisecond)))
	}
	return d
}

// backoff doubles least once per failure after the first, up to most.
func backoff(least, most time.Duration, fails int) time.Duration {
	return min(most, least<<min(max(fails-1, 0), 16))
}

// sleep reports whether it was woken, or w, which leads, gives up.
func (r *runner) sleep(w *waiter, d time.Duration) bool {
	var quit <-chan struct{}
	if r.f.prompt {
		quit = w.ctx.Done()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-r.wake:
		return true
	case <-quit:
		r.pausing = true
		return true
	case <-t.C:
		return false
	}
}
