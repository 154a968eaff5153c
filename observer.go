package holdfast

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Observer is told what happens to the leases of a [Locker]. Observe is called
// synchronously, from many goroutines, with no lock held: it must not block, because
// extensions and waiters wait for it. ctx is that of the call that the event belongs to,
// possibly done already, and the background context for what happens by itself.
type Observer interface {
	Observe(ctx context.Context, e Event)
}

// Event is one of [Waiting], [Acquired], [Extended], [AtRisk], [Lost], [Released] and
// [Node]. More may come; an Observer ignores those that it does not know.
type Event interface{ event() }

// Waiting: an attempt to acquire did not succeed, and Acquire goes on. It is told for each
// attempt: those are few where the store has a queue, and so a new place is told when the claim
// asks again. Of the goroutines of one process that wait for a key, only the first one is told;
// while their own process holds the key, once.
type Waiting struct {
	Key     string
	Attempt int           // from 1
	Waited  time.Duration // since the call began
	Place   int           // in the store's queue at that attempt, 1 being next; zero: unknown
	Err     error         // why: a [*HeldError], or what is wrong with the store and its nodes
}

// Acquired: a lease was granted.
type Acquired struct {
	Key      string
	Token    Token
	Owner    string
	Validity time.Duration
	Waited   time.Duration // since the call began
	Adopted  bool          // by [Locker.Adopt]
}

// Extended: the store confirmed an extension.
type Extended struct {
	Key      string
	Token    Token
	Owner    string
	Validity time.Duration
	Failures int // failed extensions right before this one
}

// AtRisk: an extension failed, or has had no answer for long. The lease is still valid, for
// as long as Left says, and extension is tried again. It is told for each failure.
type AtRisk struct {
	Key     string
	Token   Token
	Owner   string
	Left    time.Duration // validity
	Failing time.Duration // since the first failure
	Err     error
}

// Lost: the lease is not valid any more.
type Lost struct {
	Key     string
	Token   Token
	Owner   string
	Held    time.Duration // since the grant
	Overrun time.Duration // how late the loss was noticed, after a pause or a suspend
	Err     error         // the cause, as in [Lease.Err]
}

// Released: Release was called and has ended, MaxHold gave the key back, or a ticket was
// taken.
type Released struct {
	Key     string
	Token   Token
	Owner   string
	Held    time.Duration // from the grant to the call
	Overrun time.Duration // how much longer than the lease; zero where it was not lost
	Err     error         // nil where the store confirmed; [ErrHandedOver] for a ticket
}

// Node: one server of the store answered, or did not.
type Node struct{ store.NodeEvent }

func (Waiting) event()  {}
func (Acquired) event() {}
func (Extended) event() {}
func (AtRisk) event()   {}
func (Lost) event()     {}
func (Released) event() {}
func (Node) event()     {}

// observe tells the Locker's Observer, if there is one and something to tell.
func (k *Locker) observe(ctx context.Context, e Event) {
	if k.watched() && e != nil {
		k.o.Observer.Observe(ctx, e)
	}
}

// watched reports whether there is an Observer, for whom events have to be made.
func (k *Locker) watched() bool { return k.o.Observer != nil }

// news are events that are told when nothing else is left to do.
type news []struct {
	k *Locker
	e Event
}

// add puts an event about l behind those before it, if there is one.
func (n *news) add(l *Lease, e Event) {
	if e != nil {
		*n = append(*n, struct {
			k *Locker
			e Event
		}{l.k, e})
	}
}

func (n news) tell(ctx context.Context) {
	for _, one := range n {
		one.k.observe(ctx, one.e)
	}
}

// traced returns ctx with the store's node events going to the Observer.
func (k *Locker) traced(ctx context.Context) context.Context {
	if !k.watched() {
		return ctx
	}
	outer := store.Trace(ctx)
	return store.WithTrace(ctx, func(e store.NodeEvent) {
		if outer != nil {
			outer(e)
		}
		k.observe(ctx, Node{e})
	})
}

// SlogObserver returns an Observer that writes to l: a loss as an error, a lease at risk
// as a warning, grants and releases as information, everything else for debugging. Owners
// are not written: whoever knows one could release the lease.
func SlogObserver(l *slog.Logger) Observer { return slogObserver{l} }

type slogObserver struct{ l *slog.Logger }

func (s slogObserver) Observe(ctx context.Context, e Event) {
	switch e := e.(type) {
	case Waiting:
		s.l.DebugContext(ctx, "waiting for lease", "key", e.Key, "attempt", e.Attempt, "waited", e.Waited, "place", e.Place, "err", e.Err)
	case Acquired:
		s.l.InfoContext(ctx, "lease acquired", "key", e.Key, "token", int64(e.Token), "validity", e.Validity, "waited", e.Waited, "adopted", e.Adopted)
	case Extended:
		s.l.DebugContext(ctx, "lease extended", "key", e.Key, "token", int64(e.Token), "validity", e.Validity, "failures", e.Failures)
	case AtRisk:
		s.l.WarnContext(ctx, "lease at risk", "key", e.Key, "token", int64(e.Token), "left", e.Left, "failing", e.Failing, "err", e.Err)
	case Lost:
		s.l.ErrorContext(ctx, "lease lost", "key", e.Key, "token", int64(e.Token), "held", e.Held, "overrun", e.Overrun, "err", e.Err)
	case Released:
		level := slog.LevelInfo
		if e.Err != nil && !errors.Is(e.Err, ErrHandedOver) {
			level = slog.LevelWarn
		}
		s.l.Log(ctx, level, "lease released", "key", e.Key, "token", int64(e.Token), "held", e.Held, "overrun", e.Overrun, "err", e.Err)
	case Node:
		s.l.DebugContext(ctx, "node answered", "node", e.Node, "op", e.Op, "key", e.Key, "outcome", e.Outcome, "elapsed", e.Elapsed, "err", e.Err)
	}
}
