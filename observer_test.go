package holdfast

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// The whole life of a lease, as it is told.
func TestEventsInOrder(t *testing.T) {
	bubble(t, Options{TTL: 3 * time.Second}, func(b *bed) {
		b.faults.Next(storetest.Try, storetest.Fail(store.ErrUnavailable))
		l := b.acquire("k")
		time.Sleep(1500 * time.Millisecond)
		b.faults.Next(storetest.Extend, storetest.Fail(store.ErrUnavailable))
		time.Sleep(time.Second)
		b.release(l)
		var got []string
		for _, e := range b.events.events {
			switch e := e.(type) {
			case Waiting:
				got = append(got, "waiting")
			case Acquired:
				got = append(got, "acquired")
				if e.Waited < 25*time.Millisecond || e.Token != l.Token() || e.Owner != l.Owner() || e.Validity != store.Validity(3*time.Second, 0) {
					t.Errorf("%+v", e)
				}
			case Extended:
				got = append(got, "extended")
			case AtRisk:
				got = append(got, "at risk")
				if e.Left <= time.Second || !errors.Is(e.Err, ErrUnavailable) {
					t.Errorf("%+v", e)
				}
			case Released:
				got = append(got, "released")
				if e.Held < 2500*time.Millisecond || e.Overrun != 0 || e.Err != nil {
					t.Errorf("%+v", e)
				}
			default:
				t.Errorf("%+v", e)
			}
		}
		if s := strings.Join(got, " "); s != "waiting acquired extended at risk extended released" {
			t.Error(s)
		}
	})
}

// Events of nodes reach the Observer from every call, and the caller's own trace as well.
func TestNodeEvents(t *testing.T) {
	bubble(t, Options{TTL: 3 * time.Second}, func(b *bed) {
		tell := func(op, key string) storetest.Fault {
			return func(ctx context.Context, call func(context.Context) error) error {
				if f := store.Trace(ctx); f != nil {
					f(store.NodeEvent{Node: "n1", Op: op, Key: key, Outcome: "ok"})
				}
				return call(ctx)
			}
		}
		b.faults.Set(storetest.Try, tell("acquire", "k"))
		b.faults.Set(storetest.Extend, tell("extend", "k"))
		b.faults.Set(storetest.Release, tell("release", "k"))
		mine := 0
		ctx := store.WithTrace(b.ctx, func(store.NodeEvent) { mine++ })
		l, err := b.locks.Acquire(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		// One that is about no key, of a batch with leases of two Lockers and one Observer.
		with, err := b.locks.With(Options{Label: "x"})
		if err != nil {
			t.Fatal(err)
		}
		m, err := with.Acquire(b.ctx, "j")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(1100 * time.Millisecond)
		b.faults.Set(storetest.Extend, tell("admit", ""))
		time.Sleep(time.Second)
		b.release(m)
		b.release(l)
		ops := map[string]int{}
		for _, e := range told[Node](b.events) {
			ops[e.Op]++
		}
		if ops["acquire"] != 2 || ops["extend"] != 1 || ops["admit"] != 1 || ops["release"] != 2 || mine != 1 {
			t.Errorf("told %v, the caller %d", ops, mine)
		}
	})
}

func TestSlogObserver(t *testing.T) {
	var out bytes.Buffer
	handler := slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})
	bubble(t, Options{TTL: 3 * time.Second, Observer: SlogObserver(slog.New(handler))}, func(b *bed) {
		b.faults.Next(storetest.Try, storetest.Fail(store.ErrUnavailable))
		l := b.acquire("k")
		time.Sleep(1500 * time.Millisecond)
		b.release(l)
		l = b.acquire("j")
		b.faults.Set(storetest.Extend, storetest.Fail(store.ErrUnavailable))
		<-l.Done()
		_ = l.Release(b.ctx)
		synctest.Wait()
		b.locks.observe(b.ctx, Node{store.NodeEvent{Node: "n1", Outcome: "busy"}})
		for _, line := range []string{
			`level=DEBUG msg="waiting for lease" key=k attempt=1`,
			`level=INFO msg="lease acquired" key=k token=`,
			`level=DEBUG msg="lease extended" key=k token=`,
			`level=INFO msg="lease released" key=k token=`,
			`level=WARN msg="lease at risk" key=j token=`,
			`level=ERROR msg="lease lost" key=j token=`,
			`level=DEBUG msg="node answered" node=n1`,
		} {
			if !strings.Contains(out.String(), line) {
				t.Errorf("no line %s", line)
			}
		}
		if strings.Contains(out.String(), l.Owner()) {
			t.Error("an owner is written")
		}
	})
}

// An Observer may call back: no lock is held.
func TestObserverMayCallBack(t *testing.T) {
	o := &caller{}
	bubble(t, Options{TTL: time.Second, Observer: o}, func(b *bed) {
		o.locks = b.locks
		b.faults.Next(storetest.Try, storetest.Fail(store.ErrUnavailable))
		l := b.acquire("k")
		o.lease.Store(l)
		b.faults.Set(storetest.Extend, storetest.Fail(store.ErrUnavailable))
		<-l.Done()
		_ = l.Release(b.ctx)
		synctest.Wait()
		if n := o.calls.Load(); n < 5 {
			t.Errorf("%d calls", n)
		}
	})
}

// An Observer that panics takes the lease from the caller of Acquire, and so nobody has it.
func TestObserverPanics(t *testing.T) {
	bubble(t, Options{Observer: panics{}}, func(b *bed) {
		func() {
			defer func() {
				if r := recover(); r != "acquired" {
					t.Errorf("recovered %v", r)
				}
			}()
			_, _ = b.locks.Acquire(b.ctx, "k")
		}()
		if b.holder("k") != "" {
			t.Error("the key is held by nobody")
		}
	})
}

type panics struct{}

func (panics) Observe(_ context.Context, e Event) {
	if _, ok := e.(Acquired); ok {
		panic("acquired")
	}
}

type caller struct {
	locks *Locker
	lease atomic.Pointer[Lease]
	calls atomic.Int64
}

func (c *caller) Observe(ctx context.Context, e Event) {
	c.calls.Add(1)
	l := c.lease.Load()
	if _, waiting := e.(Waiting); l == nil || waiting {
		return
	}
	_ = l.Err()
	_ = l.Validity()
	_ = l.Context(ctx)
	if m, err := c.locks.TryAcquire(context.WithoutCancel(ctx), "j"); err == nil {
		c.lease.Store(nil) // else the release would be told without end
		_ = m.Release(ctx)
		c.lease.Store(l)
	}
}
