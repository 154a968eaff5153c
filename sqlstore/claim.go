package sqlstore

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// claim is one acquisition. Its transactions follow one another: slot is full while one
// runs, also one whose caller has left, so that none can overtake a later one.
type claim struct {
	s    *Store
	key  string
	o    store.ClaimOptions
	slot chan struct{}

	mu       sync.Mutex
	cancel   context.CancelFunc // ends the call that runs, before it takes anything; Release calls it
	released bool               // Release was called: nothing is taken any more
	done     bool               // Release has succeeded
	tried    bool               // the row may be ours
	unsure   bool               // the answer to an earlier Release was lost
	lost     bool               // an extension has answered that the grant is gone
	owner    string
	token    fence.Token   // of the last grant; zero where there was none
	until    time.Duration // end of that grant by the lease clock
}

func errReleased() error { return &fault{kind: store.ErrReleased} }

// begin takes the slot for a call that Release may cut short.
func (c *claim) begin(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	c.mu.Lock()
	c.cancel = cancel
	released := c.released
	c.mu.Unlock()
	err := errReleased()
	if !released {
		err = c.take(ctx)
	}
	if err != nil {
		cancel()
	}
	return ctx, cancel, err
}

// take takes the slot. An earlier call that still runs leaves the outcome open.
func (c *claim) take(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, errNoAnswer)
	defer cancel()
	select {
	case c.slot <- struct{}{}:
		return nil
	case <-ctx.Done():
		return uncertain(context.Cause(ctx))
	}
}

func (c *claim) end() { <-c.slot }

// answer gives way to a Release that came meanwhile.
func (c *claim) answer(g store.Grant, err error) (store.Grant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.released {
		return store.Grant{}, errReleased()
	}
	return g, err
}

// Try takes the key if nobody holds it. See [store.Claim].
func (c *claim) Try(ctx context.Context) (store.Grant, error) {
	if err := cmp.Or(store.CheckKey(c.key), c.s.info.CheckTTL(c.o.TTL)); err != nil {
		return store.Grant{}, err
	}
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return c.answer(store.Grant{}, err)
	}
	defer cancel()
	g, err := race(ctx, c.try, func(left bool, err error) {
		if left && (err == nil || errors.Is(err, store.ErrUncertain)) {
			c.giveBack()
		}
		c.end()
	})
	return c.answer(g, err)
}

func (c *claim) try(ctx context.Context) (store.Grant, error) {
	start := c.s.clock.Now()
	owner, tried, err := c.attempt()
	if err != nil {
		return store.Grant{}, err
	}
	g, err := c.s.engine.grant(ctx, c.key, owner, c.o)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.tried = tried || errors.Is(err, store.ErrUncertain)
		return store.Grant{}, err
	}
	c.token, c.until = fence.Token(g.token), g.until
	return store.Grant{Token: c.token, Owner: owner, TTL: c.o.TTL + g.sent.Sub(start)}, nil
}

// attempt returns the owner to ask for, a fresh one where the last grant has ended, and
// whether the row may have been ours before.
func (c *claim) attempt() (owner string, tried bool, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.lost {
		return "", false, &store.LostError{}
	}
	if c.token != 0 && c.until <= c.s.clock.now() {
		c.owner, c.token = randomID(), 0
	}
	tried, c.tried = c.tried, true
	return c.owner, tried, nil
}

// giveBack releases what was granted after the caller had left.
func (c *claim) giveBack() {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if _, err := c.s.engine.release(ctx, c.key, c.owner); err != nil {
		return // it ends with its ttl
	}
	c.mu.Lock()
	c.owner, c.token, c.tried = randomID(), 0, false
	c.mu.Unlock()
	c.s.wake(c.key)
}

// Extend asks for the ttl anew. See [store.Claim].
func (c *claim) Extend(ctx context.Context) (store.Grant, error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return c.answer(store.Grant{}, err)
	}
	defer cancel()
	g, err := race(ctx, func(ctx context.Context) (g store.Grant, err error) {
		results := c.s.extend(ctx, []*claim{c})
		return results[0].Grant, results[0].Err
	}, func(bool, error) { c.end() })
	return c.answer(g, err)
}

// Release gives the key back. See [store.Claim].
func (c *claim) Release(ctx context.Context) error {
	c.mu.Lock()
	c.released = true
	if c.cancel != nil {
		c.cancel()
	}
	c.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return uncertain(err)
	}
	if err := c.take(ctx); err != nil {
		return err
	}
	lost, err := race(ctx, c.release, func(bool, error) { c.end() })
	if err != nil && !errors.Is(err, store.ErrUncertain) {
		err = uncertain(err)
	}
	return cmp.Or(err, lost)
}

func (c *claim) release(ctx context.Context) (lost, err error) {
	c.mu.Lock()
	owner, idle, unsure := c.owner, c.done || !c.tried, c.unsure
	c.unsure = c.unsure || !idle
	c.mu.Unlock()
	if idle {
		return nil, nil
	}
	r, err := c.s.engine.release(ctx, c.key, owner)
	c.s.wake(c.key)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.token != 0 && !((unsure || r.again) && c.leftBy(r)) {
		lost = r.loss(owner)
	}
	c.done, c.unsure = lost == nil, false
	return lost, nil
}

// leftBy reports whether an earlier Release whose answer was lost explains what was
// found instead of the grant. The caller holds mu.
func (c *claim) leftBy(r row) bool {
	if r.owner == "" && r.token == int64(c.token) {
		return true
	}
	return c.s.clock.now() < c.until && !strings.HasPrefix(r.owner, brokenBy)
}

// Wait looks at the row again and again, at random times, by a plain read, which takes no lock:
// every 5 to 50 ms in SQLite, every 50 to 500 ms at a server, and most often while the key
// changes hands, so that who has waited for long has no less of a chance. It returns at once when
// the key is released by a claim of the same Store, or of another one that a [Listener] hears
// of. See [store.Waiter].
func (c *claim) Wait(ctx context.Context, held *store.HeldError) error {
	start := c.s.clock.Now()
	freed, leave := c.s.awaitFreed(c.key)
	defer leave()
	defer c.s.listen()()
	pause, holder := c.s.minPoll, held.Holder.Owner
	for {
		left := held.Holder.TTL - c.s.clock.Since(start)
		if left <= 0 {
			return ctx.Err()
		}
		timer := time.NewTimer(min(left, pause/2+rand.N(pause)))
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-freed:
			timer.Stop()
			return nil
		case <-timer.C:
		}
		r, err := race(ctx, func(ctx context.Context) (row, error) { return c.s.engine.read(ctx, c.key) }, nil)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil || !r.live():
			return nil // Try finds out
		case r.owner != holder:
			pause, holder = c.s.minPoll, r.owner
		default:
			pause = min(pause*3/2, 10*c.s.minPoll)
		}
	}
}

// freed is closed when a key is released in this process.
type freed struct {
	ch      chan struct{}
	waiters int
}

func (s *Store) awaitFreed(key string) (<-chan struct{}, func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.freed[key]
	if f == nil {
		f = &freed{ch: make(chan struct{})}
		s.freed[key] = f
	}
	f.waiters++
	return f.ch, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if f.waiters--; f.waiters == 0 && s.freed[key] == f {
			delete(s.freed, key)
		}
	}
}

func (s *Store) wake(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.freed[key]; f != nil {
		close(f.ch)
		delete(s.freed, key)
	}
}
