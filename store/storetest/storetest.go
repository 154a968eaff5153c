// Package storetest is the conformance suite of Holdfast's stores: one suite defines what
// a store must do, and every store runs it. It also has benchmarks ([Bench]) and a store
// that loses requests and replies on purpose ([NewFaults]).
//
//	func TestStore(t *testing.T) {
//		storetest.Run(t, storetest.Config{New: func(t testing.TB) storetest.Harness {
//			server := start(t)
//			return storetest.Harness{Open: func() store.Store { return open(t, server) }}
//		}})
//	}
//
// What a store can do is found in its Info and by type assertion of the optional
// interfaces; tests of an ability that a store does not declare do not exist for it. The
// suite judges by order, and by bounds in units of the ttl, so that a busy machine does
// not fail it.
package storetest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Config describes the store under test.
type Config struct {
	// New prepares the shared state of one test. It may be the same for all tests: keys
	// are unique. Clean-up goes to t.Cleanup.
	New func(t testing.TB) Harness

	// Bubble runs each test in a bubble of testing/synctest, for stores without I/O.
	// Otherwise tests of one topic run in parallel, and take real time.
	Bubble bool

	// TTL is the unit of time: leases that tests let expire have this ttl, others four
	// times as much (at most Info.MaxTTL). Zero means one second, or twice Info.MinTTL
	// where that is more.
	TTL time.Duration

	// Fair says that claims which wait are served first come, first served, also those of separate
	// store values, in the order of their first attempts, and without asking again and again.
	Fair bool

	// Refuses tells the keys that this store refuses beyond [store.CheckKey]. Nil: none.
	Refuses func(key string) bool
}

// Harness is the shared state of one test, and the ways to it.
type Harness struct {
	// Open opens another store value on the same state, as another process would.
	Open func() store.Store

	// OpenFaulty opens a store value whose way to the state can be broken, such as one
	// behind a TCP proxy. Nil: the suite wraps Open with [NewFaults].
	OpenFaulty func() (store.Store, Link)
}

// Link is the way between one store value and the shared state.
type Link interface {
	// LoseRequests: from now on nothing arrives at the state, nor ever will.
	LoseRequests()
	// LoseReplies: from now on everything is executed, and no answer comes back.
	LoseReplies()
	// Heal: from now on nothing is lost.
	Heal()
	// Hits tells how many requests and replies were lost so far.
	Hits() int
}

// Run runs the whole suite.
func Run(t *testing.T, cfg Config) {
	s := cfg.New(t).Open()
	for _, topic := range topics {
		t.Run(topic.name, func(t *testing.T) {
			for _, test := range topic.tests {
				if test.suits(cfg, s) {
					t.Run(test.name, func(t *testing.T) { cfg.run(t, test.run) })
				}
			}
		})
	}
}

func (cfg Config) run(t *testing.T, test func(*env)) {
	if cfg.Bubble {
		synctest.Test(t, func(t *testing.T) { test(newEnv(t, cfg)) })
		return
	}
	t.Parallel()
	test(newEnv(t, cfg))
}

type topic struct {
	name  string
	tests []test
}

type test struct {
	name  string
	run   func(*env)
	needs func(store.Store) bool // nil: nothing
	fair  bool                   // needs Config.Fair
}

func (t test) suits(cfg Config, s store.Store) bool {
	return (cfg.Fair || !t.fair) && (t.needs == nil || t.needs(s))
}

var topics = []topic{
	{"Exclusion", exclusionTests},
	{"TTL", ttlTests},
	{"Extension", extensionTests},
	{"Release", releaseTests},
	{"Tokens", tokenTests},
	{"Keys", keyTests},
	{"Contexts", contextTests},
	{"Waiting", waitingTests},
	{"Queue", queueTests},
	{"Uncertainty", uncertaintyTests},
	{"Adoption", adoptionTests},
	{"Inspection", inspectionTests},
}

// is reports whether the store has an optional ability.
func is[T any](s store.Store) bool {
	_, ok := any(s).(T)
	return ok
}

// env is what one test works with.
type env struct {
	testing.TB
	cfg   Config
	h     Harness
	s     store.Store // one process
	s2    store.Store // another one
	info  store.Info
	ttl   time.Duration // of leases that expire in the test
	long  time.Duration // of leases that do not
	ctx   context.Context
	salt  string
	keys  int
	began time.Time
}

func newEnv(t testing.TB, cfg Config) *env {
	e := &env{TB: t, cfg: cfg, h: cfg.New(t), salt: rand.Text()[:12], began: time.Now()}
	e.s, e.s2 = e.h.Open(), e.h.Open()
	e.info = e.s.Info()
	e.ttl = cfg.TTL
	if e.ttl == 0 {
		e.ttl = max(time.Second, 2*e.info.MinTTL)
	}
	e.long = 4 * e.ttl
	if e.info.MaxTTL > 0 {
		e.long = min(e.long, e.info.MaxTTL)
	}
	ctx, cancel := context.WithTimeout(t.Context(), max(time.Minute, 60*e.ttl))
	t.Cleanup(cancel)
	e.ctx = ctx
	return e
}

// key returns a key that nobody else uses.
func (e *env) key() string {
	e.keys++
	return fmt.Sprintf("storetest/%s/%d", e.salt, e.keys)
}

// claim makes a claim that does not expire in the test.
func (e *env) claim(s store.Store, key string) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: e.long, Label: "storetest"})
}

// short makes a claim that the test lets expire.
func (e *env) short(s store.Store, key string) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: e.ttl, Label: "storetest"})
}

// waiter makes a claim that waits.
func (e *env) waiter(s store.Store, key string) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: e.long, Wait: true, Label: "storetest"})
}

// kinds are the errors that a store may answer; every other one must be a context's.
var kinds = []error{store.ErrHeld, store.ErrLost, store.ErrReleased, store.ErrUncertain, store.ErrUnavailable,
	store.ErrUnsupported, store.ErrInvalid, context.Canceled, context.DeadlineExceeded}

func isAny(err error, targets ...error) bool {
	for _, target := range targets {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// known complains of an error that is of no kind.
func (e *env) known(op string, err error) {
	e.Helper()
	if err != nil && !isAny(err, kinds...) {
		e.Errorf("%s answers an error of no kind of package store: %v", op, err)
	}
}

// steady repeats a call that had no answer, as any caller may, for at most two ttls.
func (e *env) steady(op string, call func() error) error {
	e.Helper()
	start := time.Now()
	for {
		err := call()
		e.known(op, err)
		if !isAny(err, store.ErrUnavailable, store.ErrUncertain) || time.Since(start) > 2*e.ttl {
			return err
		}
		e.pause()
	}
}

// pause sleeps for the time after which asking again is reasonable.
func (e *env) pause() { time.Sleep(e.ttl / 20) }

func (e *env) try(c store.Claim) (g store.Grant, err error) {
	e.Helper()
	err = e.steady("Try", func() error { g, err = c.Try(e.ctx); return err })
	return g, err
}

// grant tries and must be granted.
func (e *env) grant(c store.Claim, what string) store.Grant {
	e.Helper()
	g, err := e.try(c)
	if err != nil {
		e.Fatalf("%s: Try answers %v, want a grant", what, err)
	}
	e.sound(g, what)
	return g
}

// regrant is grant right after another's Release, which returns when a quorum of servers
// has executed it: on a busy machine the others may say for a moment longer that the key
// is held, or to be busy.
func (e *env) regrant(c store.Claim, what string) store.Grant {
	e.Helper()
	for range 3 {
		if g, err := e.try(c); !errors.Is(err, store.ErrHeld) && !errors.Is(err, store.ErrUnavailable) {
			if err != nil {
				e.Fatalf("%s: Try answers %v, want a grant", what, err)
			}
			e.sound(g, what)
			return g
		}
		e.pause()
	}
	return e.grant(c, what)
}

// sound complains of a grant that lacks something.
func (e *env) sound(g store.Grant, what string) {
	e.Helper()
	if g.Owner == "" {
		e.Errorf("%s: the grant has no owner", what)
	}
	if g.TTL <= 0 {
		e.Errorf("%s: the grant has a ttl of %v", what, g.TTL)
	}
	switch none := e.info.Fencing == store.FencingNone; {
	case none && g.Token != 0:
		e.Errorf("%s: the grant has token %v, though Info says FencingNone", what, g.Token)
	case !none && g.Token <= 0:
		e.Errorf("%s: the grant has token %v, want a positive one", what, g.Token)
	}
}

// refused tries and must find the key held.
func (e *env) refused(c store.Claim, what string) *store.HeldError {
	e.Helper()
	g, err := e.try(c)
	if err == nil {
		e.Fatalf("%s: Try grants token %v, want ErrHeld", what, g.Token)
	}
	var held *store.HeldError
	if !errors.As(err, &held) || !errors.Is(err, store.ErrHeld) {
		e.Fatalf("%s: Try answers %v, want a *HeldError", what, err)
	}
	return held
}

// extend extends and must be granted.
func (e *env) extend(c store.Claim, what string) store.Grant {
	e.Helper()
	g, err := e.tryExtend(c)
	if err != nil {
		e.Fatalf("%s: Extend answers %v, want a grant", what, err)
	}
	e.sound(g, what)
	return g
}

func (e *env) tryExtend(c store.Claim) (g store.Grant, err error) {
	e.Helper()
	err = e.steady("Extend", func() error { g, err = c.Extend(e.ctx); return err })
	return g, err
}

// lost extends and must learn that the lease is gone, twice: a loss is final.
func (e *env) lost(c store.Claim, what string) {
	e.Helper()
	for _, time := range []string{"first", "second"} {
		if g, err := e.tryExtend(c); err == nil {
			e.Fatalf("%s: the %s Extend grants token %v, want ErrLost", what, time, g.Token)
		} else if !errors.Is(err, store.ErrLost) {
			e.Fatalf("%s: the %s Extend answers %v, want ErrLost", what, time, err)
		}
	}
}

func (e *env) tryRelease(c store.Claim) error {
	e.Helper()
	return e.steady("Release", func() error { return c.Release(e.ctx) })
}

// release releases and must succeed.
func (e *env) release(c store.Claim, what string) {
	e.Helper()
	if err := e.tryRelease(c); err != nil {
		e.Fatalf("%s: Release answers %v, want nil", what, err)
	}
}

// free must be granted the key through another process, and gives it back.
func (e *env) free(key, what string) store.Grant {
	e.Helper()
	c := e.claim(e.s2, key)
	g := e.grant(c, what)
	e.release(c, what)
	return g
}

// held must find the key held, through another process.
func (e *env) held(key, what string) *store.HeldError {
	e.Helper()
	c := e.claim(e.s2, key)
	held := e.refused(c, what)
	e.release(c, what)
	return held
}

// acquire does what a Locker does: try, wait, try again, until ctx is done. It gives up
// where Wait does not wait.
func (e *env) acquire(ctx context.Context, c store.Claim) (store.Grant, error) {
	for range 10_000 {
		g, err := c.Try(ctx)
		e.known("Try", err)
		var held *store.HeldError
		switch {
		case errors.As(err, &held):
			if err := e.wait(ctx, c, held); err != nil {
				return store.Grant{}, err
			}
		case isAny(err, store.ErrUnavailable, store.ErrUncertain):
			e.pause()
		default:
			return g, err
		}
	}
	return store.Grant{}, errors.New("storetest: not granted in 10,000 attempts")
}

func (e *env) wait(ctx context.Context, c store.Claim, held *store.HeldError) error {
	if w, ok := c.(store.Waiter); ok {
		return w.Wait(ctx, held)
	}
	e.pause()
	return ctx.Err()
}

// lease is a grant, with the instants before and after the call that answered it.
type lease struct {
	store.Grant
	claim           store.Claim
	ttl             time.Duration // that was asked for
	asked, answered time.Time
}

// hold grants a claim made by short, and tells when.
func (e *env) hold(c store.Claim, what string) lease {
	e.Helper()
	asked := time.Now()
	return lease{e.grant(c, what), c, e.ttl, asked, time.Now()}
}

// lapse lets a lease end, whose holder is dead, and grants its key to next:
// not before the time that was promised, and not much later.
func (e *env) lapse(l lease, next store.Claim, what string) lease {
	e.Helper()
	end := l.answered.Add(l.ttl + e.step() + e.ttl/2)
	for {
		asked := time.Now()
		g, err := e.try(next)
		if err == nil {
			e.sound(g, "the successor of "+what)
			if early := time.Since(l.asked); early < store.Validity(l.TTL, 0) {
				e.Fatalf("%s: another is granted the key after %v, though the grant promised %v", what, early, l.TTL)
			}
			return lease{g, next, e.ttl, asked, time.Now()}
		}
		if !errors.Is(err, store.ErrHeld) {
			e.Fatalf("%s: Try answers %v, want ErrHeld or a grant", what, err)
		}
		if asked.After(end) {
			e.Fatalf("%s: the key is still held %v after the last grant of %v", what, asked.Sub(l.answered), l.ttl)
		}
		e.pause()
	}
}

// step is the unit to which the store rounds a ttl.
func (e *env) step() time.Duration {
	if e.info.TTLStep == 0 {
		return time.Millisecond
	}
	return e.info.TTLStep
}
