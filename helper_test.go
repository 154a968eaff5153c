package holdfast

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// bed is what most tests lie in: a store with faults, a Locker on it and a record of what
// its Observer was told; beneath is the store without faults, as another process sees it.
type bed struct {
	t       *testing.T
	ctx     context.Context
	mem     *memstore.Store
	faults  *storetest.Faults
	locks   *Locker
	events  *record
	suspend func(time.Duration) // lets the boot clock, and nothing else, go on
}

// bubble runs a test twice, each time in a bubble, over a memstore whose calls can fail: one
// whose calls the Locker races, and one that is prompt, whose calls must return by themselves.
func bubble(t *testing.T, o Options, test func(*bed)) {
	t.Helper()
	racedBubble(t, o, test)
	promptBubble(t, o, test)
}

// racedBubble is the half of bubble where the store may hang.
func racedBubble(t *testing.T, o Options, test func(*bed)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		mem := memstore.New()
		s, faults := storetest.NewFaults(mem)
		test(newBed(t, mem, s, faults, o))
	})
}

func promptBubble(t *testing.T, o Options, test func(*bed)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		mem := memstore.New()
		s, faults := storetest.NewFaults(mem)
		test(newBed(t, mem, prompt{s, s.(store.BatchExtender), s.(store.Adopter)}, faults, o))
	})
}

// prompt is a store that says so, whatever the faults do.
type prompt struct {
	store.Store
	store.BatchExtender
	store.Adopter
}

func (prompt) Prompt() {}

// plainBubble does the same over a store without any optional interface.
func plainBubble(t *testing.T, o Options, test func(*bed)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		mem := memstore.New()
		s, faults := storetest.NewFaults(plain{mem})
		test(newBed(t, mem, s, faults, o))
	})
}

func newBed(t *testing.T, mem *memstore.Store, s store.Store, faults *storetest.Faults, o Options) *bed {
	b := &bed{t: t, ctx: context.Background(), mem: mem, faults: faults, events: &record{}}
	if o.Observer == nil {
		o.Observer = b.events
	}
	b.locks = locker(t, s, &o)
	began, asleep := time.Now(), time.Duration(0)
	var mu sync.Mutex
	b.locks.f.clk = clock.Clock{Boot: func() time.Duration {
		mu.Lock()
		defer mu.Unlock()
		return time.Since(began) + asleep
	}}
	b.suspend = func(d time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		asleep += d
	}
	return b
}

// locker returns a Locker whose boot clock is the bubble's own.
func locker(t *testing.T, s store.Store, o *Options) *Locker {
	t.Helper()
	k, err := New(s, o)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	k.f.clk = clock.Clock{Boot: func() time.Duration { return time.Since(began) }}
	return k
}

// other returns a Locker of another process.
func (b *bed) other(o *Options) *Locker { return locker(b.t, b.mem.Peer(), o) }

func (b *bed) acquire(key string) *Lease {
	b.t.Helper()
	l, err := b.locks.Acquire(b.ctx, key)
	if err != nil {
		b.t.Fatal(err)
	}
	return l
}

func (b *bed) release(l *Lease) {
	b.t.Helper()
	if err := l.Release(b.ctx); err != nil {
		b.t.Fatal(err)
	}
}

// holder answers who holds key in the store; empty for nobody.
func (b *bed) holder(key string) string {
	b.t.Helper()
	h, err := b.mem.Inspect(b.ctx, key)
	if err != nil {
		b.t.Fatal(err)
	}
	return h.Owner
}

// want fails unless err answers all kinds, on one line.
func want(t *testing.T, err error, kinds ...error) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %v", kinds)
	}
	for _, kind := range kinds {
		if !errors.Is(err, kind) {
			t.Fatalf("%q does not answer %q", err, kind)
		}
	}
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("%q is no *Error", err)
	}
	if strings.ContainsAny(err.Error(), "\n\r") {
		t.Fatalf("%q has several lines", err)
	}
}

// not fails if err answers one of the kinds.
func not(t *testing.T, err error, kinds ...error) {
	t.Helper()
	for _, kind := range kinds {
		if errors.Is(err, kind) {
			t.Fatalf("%q answers %q", err, kind)
		}
	}
}

// record is an Observer that remembers.
type record struct {
	mu     sync.Mutex
	events []Event
}

func (r *record) Observe(_ context.Context, e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

// told returns the events of one kind.
func told[E Event](r *record) (found []E) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e, ok := e.(E); ok {
			found = append(found, e)
		}
	}
	return found
}

// plain hides the optional interfaces of a store and of its claims.
type plain struct{ s store.Store }

func (p plain) Info() store.Info { return p.s.Info() }

func (p plain) Claim(key string, o store.ClaimOptions) store.Claim {
	return struct{ store.Claim }{p.s.Claim(key, o)}
}

// changed is a store whose Info and grants are changed on the way.
type changed struct {
	store.Store
	info  func(*store.Info)
	grant func(op string, g *store.Grant)
}

func (c changed) Info() store.Info {
	i := c.Store.Info()
	if c.info != nil {
		c.info(&i)
	}
	return i
}

func (c changed) Claim(key string, o store.ClaimOptions) store.Claim {
	return &changedClaim{c.Store.Claim(key, o), c.grant}
}

type changedClaim struct {
	store.Claim
	change func(op string, g *store.Grant)
}

func (c *changedClaim) Try(ctx context.Context) (store.Grant, error) {
	g, err := c.Claim.Try(ctx)
	return c.changed("try", g, err)
}

func (c *changedClaim) Extend(ctx context.Context) (store.Grant, error) {
	g, err := c.Claim.Extend(ctx)
	return c.changed("extend", g, err)
}

func (c *changedClaim) changed(op string, g store.Grant, err error) (store.Grant, error) {
	if err == nil && c.change != nil {
		c.change(op, &g)
	}
	return g, err
}
