// Package memstore keeps locks in the memory of one process: the semantics of
// Holdfast in their simplest form.
//
// Use it to test your own code. It works inside the bubbles of testing/synctest, it can
// take a lease away ([Store.Lose]) or let its time end ([Store.Expire]), and
// [Store.Peer] stands for another process.
//
// Tokens begin at 1 in each process. Marks of a guard that outlive it, in a database or in
// Redis, therefore refuse those of the next process, or take them for the same: let them
// end with the process, as those of [fence.Memory] do.
package memstore

import (
	"context"
	"crypto/rand"
	"iter"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/label"
	"github.com/holdfast-go/holdfast/store"
)

// reservation is how long a free key is kept for its first waiter. One that does not
// come in that time loses its place, so that a dead waiter delays the others only once.
const reservation = 100 * time.Millisecond

// Store is a [store.Store] in memory, also a [store.BatchExtender], [store.Adopter] and
// [store.Inspector]. Its claims are [store.Waiter]s, served first come, first served.
// [New] makes one; the zero value is of no use. It is safe for concurrent use, keeps no
// goroutine and needs no closing.
//
// Tokens grow over all keys for as long as the process lives. Time is Go's monotonic
// clock, which stops while the machine sleeps.
type Store struct{ *shared }

// shared is the state of a store and its peers.
type shared struct {
	fingerprint string
	birth       time.Time

	mu      sync.Mutex
	token   fence.Token // the last one minted; one counter for all keys, so that no key needs a record for ever
	rows    map[string]*row
	sweepAt int // number of rows at which those that nobody needs are dropped
}

// row is the state of one key. A row without grant and queue need not exist.
type row struct {
	grant *grant
	queue []*claim // waiting, in order of their first refusal
	// reserved is the first of the queue, for whom the free key is kept until turnEnds.
	// The timer then calls the next one.
	reserved *claim
	turnEnds time.Time
	timer    *time.Timer
}

type grant struct {
	owner, label string
	token        fence.Token
	since, until time.Time
	broken       bool // nobody holds it any more, see Break
}

// claim implements [store.Claim] and [store.Waiter]. Its flags are guarded by shared.mu.
type claim struct {
	s     *shared
	key   string
	o     store.ClaimOptions
	owner string
	wake  chan struct{} // capacity one

	queued   time.Time // since when it waits
	granted  bool      // was granted at least once
	lost     bool      // an extension has answered that the grant is gone
	closed   bool      // a release has begun: nothing is granted any more
	released bool      // and has succeeded
}

var (
	_ store.Store         = (*Store)(nil)
	_ store.BatchExtender = (*Store)(nil)
	_ store.Adopter       = (*Store)(nil)
	_ store.Prompt        = (*Store)(nil)
	_ store.Inspector     = (*Store)(nil)
	_ store.Waiter        = (*claim)(nil)
)

// New returns an empty store.
func New() *Store {
	return &Store{&shared{
		fingerprint: "mem:" + rand.Text(),
		birth:       time.Now(),
		rows:        map[string]*row{},
		sweepAt:     64,
	}}
}

// Peer returns another store value that reaches the same locks, as another process
// would have: a Locker on each of them has a queue and leases of its own.
func (s *Store) Peer() *Store { return &Store{s.shared} }

// Info implements [store.Store].
func (s *Store) Info() store.Info {
	return store.Info{
		Name:        "mem",
		Fingerprint: s.fingerprint,
		Fencing:     store.FencingDurable,
		MinTTL:      store.MinTTL,
		TTLStep:     time.Nanosecond,
	}
}

// Prompt implements [store.Prompt]: there is nothing to wait for but Wait.
func (*Store) Prompt() {}

// Claim implements [store.Store].
func (s *Store) Claim(key string, o store.ClaimOptions) store.Claim {
	return s.claim(key, rand.Text(), o)
}

func (s *shared) claim(key, owner string, o store.ClaimOptions) *claim {
	return &claim{s: s, key: key, o: o, owner: owner, wake: make(chan struct{}, 1)}
}

// Lose takes the lease on key away, as a flushed server would ([Store.Break] keeps the key until
// the holder cannot trust its lease any more).
// The holder is not told: its next extension answers [store.ErrLost], by itself after
// Options.ExtendEvery at the latest, or at once with Lease.Extend. Another can hold the
// key from now on. Where nobody holds it, Lose answers [store.ErrInvalid].
func (s *Store) Lose(key string) error {
	return s.end(key, func(r *row) { r.grant = nil })
}

// Expire lets the time of the grant on key end now, as if its holder had been paused for
// the rest of its ttl. The holder's own clock has not moved: it notices as with
// [Store.Lose], and until then its lease looks valid while another can hold the key.
// That is the case for which a guard compares fencing tokens. The other is a second
// Locker: one that is granted a key anew ends its own former lease of it. Where nobody
// holds the key, Expire answers [store.ErrInvalid].
func (s *Store) Expire(key string) error {
	return s.end(key, func(r *row) { r.grant.until = time.Now() })
}

func (s *Store) end(key string, how func(*row)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.settled(key)
	if r.grant == nil {
		s.drop(key, r)
		return &store.InvalidError{Field: "key", Value: key, Rule: "is held by nobody"}
	}
	how(r)
	s.settled(key)
	s.drop(key, r)
	return nil
}

// settled returns the row of key as it is now: without a grant whose time has ended, and
// with the free key reserved for its first waiter. The caller holds mu.
func (s *shared) settled(key string) *row {
	r := s.rows[key]
	if r == nil {
		r = &row{}
		s.sweep()
		s.rows[key] = r
	}
	now := time.Now()
	if r.grant != nil && !now.Before(r.grant.until) {
		r.grant = nil
	}
	for r.grant == nil && len(r.queue) > 0 {
		if first := r.queue[0]; r.reserved != first {
			r.unreserve()
			r.reserved, r.turnEnds = first, now.Add(reservation)
			r.timer = time.AfterFunc(reservation, func() { s.settle(key) })
			first.call()
		}
		if now.Before(r.turnEnds) {
			return r
		}
		r.queue = slices.Delete(r.queue, 0, 1)
	}
	r.unreserve()
	return r
}

func (s *shared) settle(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop(key, s.settled(key))
}

func (r *row) unreserve() {
	if r.reserved != nil {
		r.reserved = nil
		r.timer.Stop()
	}
}

// sweep drops the rows that say nothing any more, whenever the number of rows has
// doubled.
func (s *shared) sweep() {
	if len(s.rows) < s.sweepAt {
		return
	}
	now := time.Now()
	for key, r := range s.rows {
		if len(r.queue) == 0 && (r.grant == nil || !now.Before(r.grant.until)) {
			delete(s.rows, key)
		}
	}
	s.sweepAt = 2*len(s.rows) + 64
}

func (s *shared) drop(key string, r *row) {
	if r.grant == nil && len(r.queue) == 0 {
		delete(s.rows, key)
	}
}

// holder tells who keeps others from key: the holder, or the waiter whose turn it is.
func (r *row) holder(key string) store.Holder {
	switch {
	case r.grant != nil:
		g := r.grant
		return store.Holder{Key: key, Owner: g.owner, Label: g.label, Token: g.token, TTL: left(g.until),
			Held: time.Since(g.since), Broken: g.broken}
	case r.reserved != nil:
		return store.Holder{Key: key, Owner: r.reserved.owner, Label: r.reserved.o.Label, TTL: left(r.turnEnds)}
	}
	return store.Holder{Key: key}
}

// left is never zero, which would mean that the time is not known.
func left(until time.Time) time.Duration { return max(1, time.Until(until)) }

func (r *row) lost(key string) error {
	if r.grant == nil {
		return &store.LostError{}
	}
	return &store.LostError{By: &store.HeldError{Holder: r.holder(key)}}
}

func (r *row) heldBy(owner string) bool { return r.grant != nil && r.grant.owner == owner }

func (r *row) enqueue(c *claim) (place int) {
	if i := slices.Index(r.queue, c); i >= 0 {
		return i + 1
	}
	r.queue = append(r.queue, c)
	c.queued = time.Now()
	return len(r.queue)
}

func (r *row) dequeue(c *claim) {
	if i := slices.Index(r.queue, c); i >= 0 {
		r.queue = slices.Delete(r.queue, i, i+1)
	}
}

func (c *claim) call() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Try implements [store.Claim]. A grant that stands already is found again, with what is
// left of its ttl.
func (c *claim) Try(ctx context.Context) (store.Grant, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if err := c.usable(ctx); err != nil {
		return store.Grant{}, err
	}
	r := c.s.settled(c.key)
	defer c.s.drop(c.key, r)
	if r.heldBy(c.owner) {
		return store.Grant{Token: r.grant.token, Owner: c.owner, TTL: time.Until(r.grant.until)}, nil
	}
	if r.grant != nil || r.reserved != nil && r.reserved != c {
		held := &store.HeldError{}
		if c.o.Wait {
			held.Place = r.enqueue(c)
		}
		held.Holder = r.holder(c.key)
		return store.Grant{}, held
	}
	r.dequeue(c)
	r.unreserve()
	c.s.token++
	c.granted = true
	now := time.Now()
	r.grant = &grant{owner: c.owner, label: c.o.Label, token: c.s.token, since: now, until: now.Add(c.o.TTL)}
	return store.Grant{Token: c.s.token, Owner: c.owner, TTL: c.o.TTL}, nil
}

// usable says why nothing can be done with the claim. The caller holds mu.
func (c *claim) usable(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.closed {
		return store.ErrReleased
	}
	if c.lost {
		return &store.LostError{}
	}
	return nil
}

// Extend implements [store.Claim].
func (c *claim) Extend(ctx context.Context) (store.Grant, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if err := c.usable(ctx); err != nil {
		return store.Grant{}, err
	}
	r := c.s.settled(c.key)
	defer c.s.drop(c.key, r)
	if !r.heldBy(c.owner) {
		c.lost = true
		return store.Grant{}, r.lost(c.key)
	}
	if until := time.Now().Add(c.o.TTL); until.After(r.grant.until) {
		r.grant.until = until
	}
	return store.Grant{Token: r.grant.token, Owner: c.owner, TTL: c.o.TTL}, nil
}

// Release implements [store.Claim].
func (c *claim) Release(ctx context.Context) error {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.released {
		return nil
	}
	c.closed = true
	r := c.s.settled(c.key)
	defer c.s.drop(c.key, r)
	held := r.heldBy(c.owner)
	if held {
		r.grant = nil
	}
	r.dequeue(c)
	c.call() // ends a Wait
	c.s.settled(c.key)
	if c.granted && !held {
		return r.lost(c.key)
	}
	c.released = true
	return nil
}

// Wait implements [store.Waiter]. It gives the claim a place in the queue, where it has
// none.
func (c *claim) Wait(ctx context.Context, held *store.HeldError) error {
	end, err := c.queueUp(ctx)
	if err != nil || end <= 0 {
		return err
	}
	if held != nil && held.Holder.TTL > 0 {
		end = min(end, held.Holder.TTL)
	}
	timer := time.NewTimer(end)
	defer timer.Stop()
	select {
	case <-c.wake:
		return nil
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// queueUp answers how long the key is kept from the claim, unless it is told before.
func (c *claim) queueUp(ctx context.Context) (time.Duration, error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	if err := c.usable(ctx); err != nil {
		return 0, err
	}
	r := c.s.settled(c.key)
	defer c.s.drop(c.key, r)
	if r.heldBy(c.owner) || r.grant == nil && (r.reserved == nil || r.reserved == c) {
		return 0, nil
	}
	r.enqueue(c)
	return r.holder(c.key).TTL, nil
}

// ExtendMany implements [store.BatchExtender].
func (s *Store) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	results := make([]store.Result, len(claims))
	for i, c := range claims {
		if own, err := s.own(c); err != nil {
			results[i].Err = err
		} else {
			results[i].Grant, results[i].Err = own.Extend(ctx)
		}
	}
	return results
}

func (s *Store) own(c store.Claim) (*claim, error) {
	if own, ok := c.(*claim); ok && own.s == s.shared {
		return own, nil
	}
	return nil, &store.InvalidError{Field: "claim", Rule: "belongs to another store"}
}

// Ticket implements [store.Adopter]. It is of use in this process only.
func (s *Store) Ticket(sc store.Claim) (string, error) {
	c, err := s.own(sc)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.settled(c.key)
	defer s.drop(c.key, r)
	if !r.heldBy(c.owner) {
		return "", r.lost(c.key)
	}
	return store.Ticket{
		Store: s.fingerprint,
		Key:   []byte(c.key),
		Owner: c.owner,
		Token: r.grant.token,
		TTL:   c.o.TTL,
		Boot:  s.fingerprint,
		Until: r.grant.until.Sub(s.birth),
		Label: c.o.Label,
	}.String(), nil
}

// Adopt implements [store.Adopter]. A ticket of another store, which is any store of
// another process, is [store.ErrInvalid].
func (s *Store) Adopt(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	t, err := store.ParseTicket(ticket)
	if err != nil {
		return nil, store.Grant{}, err
	}
	if t.Store != s.fingerprint {
		return nil, store.Grant{}, &store.InvalidError{Field: "ticket", Rule: "belongs to another store"}
	}
	if err := s.Info().CheckTTL(t.TTL); err != nil {
		return nil, store.Grant{}, err
	}
	c := s.claim(string(t.Key), t.Owner, store.ClaimOptions{TTL: t.TTL, Label: t.Label})
	c.granted = true
	g, err := c.Extend(ctx)
	if err != nil {
		return nil, store.Grant{}, err
	}
	return c, g, nil
}

// maxQueue is how many waiters Inspect names.
const maxQueue = 100

// Inspect implements [store.Inspector].
func (s *Store) Inspect(ctx context.Context, key string) (store.Holder, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return store.Holder{}, err
	}
	r := s.settled(key)
	defer s.drop(key, r)
	h := store.Holder{Key: key}
	if r.grant != nil {
		h = r.holder(key)
	}
	h.Waiting = len(r.queue)
	for _, c := range r.queue[:min(len(r.queue), maxQueue)] {
		h.Queue = append(h.Queue, store.Queued{Owner: c.owner, Label: c.o.Label, Waited: time.Since(c.queued)})
	}
	return h, nil
}

// List implements [store.Inspector]. It answers what held when the iteration began.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) {
		if err := ctx.Err(); err != nil {
			yield(store.Holder{}, err)
			return
		}
		for _, h := range s.holders(prefix) {
			if !yield(h, nil) {
				return
			}
		}
	}
}

func (s *Store) holders(prefix string) (all []store.Holder) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for key, r := range s.rows {
		if strings.HasPrefix(key, prefix) && r.grant != nil && now.Before(r.grant.until) {
			h := r.holder(key)
			h.Waiting = len(r.queue)
			all = append(all, h)
		}
	}
	return all
}

// Break implements [store.Inspector]: the holder's extensions fail from now on, and the key is
// free when its grant would have ended. Where nobody holds the key, it answers [store.ErrLost].
func (s *Store) Break(ctx context.Context, h store.Holder) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	r := s.settled(h.Key)
	defer s.drop(h.Key, r)
	switch g := r.grant; {
	case g == nil:
		return &store.LostError{}
	case g.broken && g.owner == h.Owner:
		return nil
	case g.owner != h.Owner:
		return &store.HeldError{Holder: r.holder(h.Key)}
	}
	r.grant.owner, r.grant.label = rand.Text(), label.BrokenBy()
	r.grant.since, r.grant.broken = time.Now(), true
	return nil
}
