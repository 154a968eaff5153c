package kit

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// Locker makes a locker over a store.
func Locker(t testing.TB, s store.Store, o holdfast.Options) *holdfast.Locker {
	t.Helper()
	locks, err := holdfast.New(s, &o)
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

// Warm takes a key of its own once, so that the store knows its nodes.
func Warm(t testing.TB, locks *holdfast.Locker) {
	t.Helper()
	lease := Acquire(t, locks, "warm-up")
	if err := lease.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// Acquire acquires or fails the test.
func Acquire(t testing.TB, locks *holdfast.Locker, key string) *holdfast.Lease {
	t.Helper()
	lease, err := locks.Acquire(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return lease
}

// Events keeps what an Observer is told.
type Events struct {
	mu  sync.Mutex
	all []holdfast.Event
}

// Observe implements [holdfast.Observer].
func (e *Events) Observe(_ context.Context, event holdfast.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.all = append(e.all, event)
}

// Select are the events of one type so far.
func Select[E holdfast.Event](e *Events) []E {
	e.mu.Lock()
	defer e.mu.Unlock()
	var list []E
	for _, event := range e.all {
		if x, ok := event.(E); ok {
			list = append(list, x)
		}
	}
	return list
}

// Faulty are the nodes of which a quorum error has no answer, by name.
func Faulty(t testing.TB, err error) map[string]error {
	t.Helper()
	var q *redlock.QuorumError
	if !errors.As(err, &q) {
		t.Fatalf("%v is no QuorumError", err)
	}
	faults := map[string]error{}
	for _, n := range q.Nodes {
		if n.Err != nil {
			faults[n.Node] = n.Err
		}
	}
	return faults
}

// Fault breaks the way to one node, or the node.
type Fault struct {
	Name string
	Do   func(s *servertest.RedisServer, p *servertest.Proxy)
	Undo func(s *servertest.RedisServer, p *servertest.Proxy)
	// Hit reports whether it had an effect.
	Hit func(s *servertest.RedisServer, p *servertest.Proxy) bool
}

// Faults are the ways in which a node does not answer.
var Faults = []Fault{
	{
		Name: "killed",
		Do:   func(s *servertest.RedisServer, _ *servertest.Proxy) { s.Kill() },
		Undo: func(s *servertest.RedisServer, _ *servertest.Proxy) { s.Restart(Old()) },
		Hit:  silent,
	},
	{
		Name: "frozen",
		Do:   func(s *servertest.RedisServer, _ *servertest.Proxy) { s.Stop() },
		Undo: func(s *servertest.RedisServer, _ *servertest.Proxy) { s.Cont() },
		Hit:  func(*servertest.RedisServer, *servertest.Proxy) bool { return true }, // Stop has seen it
	},
	{
		Name: "refused",
		Do: func(_ *servertest.RedisServer, p *servertest.Proxy) {
			p.Refuse()
			p.Reset()
		},
		Undo: func(_ *servertest.RedisServer, p *servertest.Proxy) { p.Heal() },
		Hit: func(_ *servertest.RedisServer, p *servertest.Proxy) bool {
			return unreachable(p.Addr())
		},
	},
	{
		Name: "black-holed",
		Do:   func(_ *servertest.RedisServer, p *servertest.Proxy) { p.BlackHole() },
		Undo: func(_ *servertest.RedisServer, p *servertest.Proxy) { p.Reset(); p.Heal() },
		Hit: func(_ *servertest.RedisServer, p *servertest.Proxy) bool {
			return p.Counts().BlackHoled > 0
		},
	},
	{
		Name: "answers lost",
		Do:   func(_ *servertest.RedisServer, p *servertest.Proxy) { p.DropReplies() },
		Undo: func(_ *servertest.RedisServer, p *servertest.Proxy) { p.Heal() },
		Hit: func(_ *servertest.RedisServer, p *servertest.Proxy) bool {
			return p.Counts().Dropped > 0
		},
	},
}

func silent(s *servertest.RedisServer, _ *servertest.Proxy) bool { return unreachable(s.Addr()) }
