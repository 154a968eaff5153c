package breaks

import (
	"context"
	"errors"
	"flag"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

const (
	maxTTL = 3 * time.Second // for which a broken key stays taken
	ttl    = maxTTL
	// patience is for what must happen, on a busy machine too.
	patience = 30 * time.Second
)

var options = redlock.Options{MaxTTL: maxTTL, NodeTimeout: time.Second}

func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "10") // they mostly wait
	kit.Main(m, map[string]func(){"operator": operator})
}

// bed is n servers and ways to them.
type bed struct {
	t       *testing.T
	client  kit.Client
	servers []*servertest.RedisServer
	op      *redlock.Store // of an operator, who has taken no lock
}

func newBed(t *testing.T, c kit.Client, n int) *bed {
	b := &bed{t: t, client: c, servers: kit.Servers(t, n)}
	b.op = b.store()
	return b
}

func (b *bed) store() *redlock.Store { return kit.Store(b.t, b.client, options, kit.Addrs(b.servers)) }

func (b *bed) locker() *holdfast.Locker {
	return kit.Locker(b.t, b.store(), holdfast.Options{TTL: ttl, Label: "holder"})
}

// each runs f for both clients, on one node and on five.
func each(t *testing.T, f func(b *bed)) {
	t.Parallel()
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		f(newBed(t, c, n))
	})
}

// inspect asks until a quorum has answered.
func (b *bed) inspect(key string) (h store.Holder) {
	b.t.Helper()
	servertest.Eventually(b.t, patience, func() (err error) {
		h, err = b.op.Inspect(b.t.Context(), key)
		return err
	})
	return h
}

// breaks breaks the lock of whoever has it.
func (b *bed) breaks(key string) store.Holder {
	b.t.Helper()
	h := b.inspect(key)
	if err := b.op.Break(b.t.Context(), h); err != nil {
		b.t.Fatalf("Break of %+v: %v", h, err)
	}
	return h
}

// grant tries a claim until it is granted.
func (b *bed) grant(c store.Claim) (g store.Grant) {
	b.t.Helper()
	servertest.Eventually(b.t, patience, func() (err error) {
		g, err = c.Try(b.t.Context())
		return err
	})
	return g
}

// votes are the owners that the nodes have, empty where they have none or are not there.
func (b *bed) votes(key string) []string {
	all := make([]string, len(b.servers))
	var asking sync.WaitGroup
	for i, s := range b.servers {
		asking.Go(func() {
			v, _ := s.Do("GET", key)
			all[i], _ = v.(string)
		})
	}
	asking.Wait()
	return all
}

func (b *bed) votedFor(key, owner string) (n int) {
	for _, v := range b.votes(key) {
		if v == owner {
			n++
		}
	}
	return n
}

// tenure is a lease that somebody watches.
type tenure struct {
	*holdfast.Lease
	lost time.Time // set before over is closed
	over chan struct{}
}

func watch(l *holdfast.Lease) *tenure {
	w := &tenure{Lease: l, over: make(chan struct{})}
	go func() {
		defer close(w.over)
		<-l.Done()
		w.lost = time.Now()
	}()
	return w
}

// lostByBreak waits until the holder has lost the lease, and looks at the cause.
func (w *tenure) lostByBreak(t *testing.T) {
	t.Helper()
	select {
	case <-w.over:
	case <-time.After(patience):
		t.Fatal("the holder never loses a lease that was broken")
	}
	var held *store.HeldError
	if err := w.Err(); !errors.Is(err, holdfast.ErrLost) || !errors.As(err, &held) || !held.Holder.Broken {
		t.Errorf("the holder is told %v, want that the lock was broken", err)
	}
	if err := w.Extend(t.Context()); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("extending a lease that was broken answers %v", err)
	}
}

// acquire waits for a lock that was broken, and compares with the former holder at the very
// moment of the grant.
func (w *tenure) acquire(t *testing.T, locks *holdfast.Locker, began time.Time) *holdfast.Lease {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	next, err := locks.Acquire(ctx, w.Key())
	left := w.Validity()
	if err != nil {
		t.Errorf("a lock that was broken is not free after %v: %v", time.Since(began), err)
		return nil
	}
	if left > 0 && w.Err() == nil {
		t.Errorf("another holds the lock while the lease that was broken is valid for %v more", left)
	}
	if next.Token() <= w.Token() {
		t.Errorf("token %v comes after %v", next.Token(), w.Token())
	}
	return next
}
