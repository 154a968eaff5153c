package redlock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// singleFake is a fake node that keeps deadlines by itself, and remembers its calls.
type singleFake struct {
	*fakeNode
	direct atomic.Int32 // calls of RunOne
	mu     sync.Mutex
	calls  []Call
}

func (f *singleFake) Run(ctx context.Context, calls ...Call) []Reply {
	f.mu.Lock()
	f.calls = append(f.calls, calls...)
	f.mu.Unlock()
	return f.fakeNode.Run(ctx, calls...)
}

func (f *singleFake) RunOne(ctx context.Context, call *Call) Reply {
	f.direct.Add(1)
	return f.Run(ctx, *call)[0]
}

// releases returns the arguments of all RELEASEs so far.
func (f *singleFake) releases() (args [][]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if opOf(c.Script.Text) == "release" {
			args = append(args, c.Args)
		}
	}
	return args
}

func singleFakes(n int) (fs []*singleFake, nodes []Node) {
	plain, _ := fakes(n)
	for _, f := range plain {
		fs = append(fs, &singleFake{fakeNode: f})
		nodes = append(nodes, fs[len(fs)-1])
	}
	return fs, nodes
}

func (s *Store) parked() (n int) {
	for _, p := range s.peers {
		p.lines.mu.Lock()
		if p.lines.parked {
			n++
		}
		p.lines.mu.Unlock()
	}
	return n
}

// One goroutine of each node waits for more, however many calls there were, and ends when there
// are none: also where a call comes in that very moment.
func TestOneGoroutineWaitsForMore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, nodes := singleFakes(3)
		s := fakeStore(t, Options{}, nodes...)
		ends := s.opts.NodeTimeout + 2*sharing
		for _, pause := range []time.Duration{0, time.Millisecond, s.opts.NodeTimeout, s.opts.NodeTimeout + sharing, ends} {
			for _, key := range []string{"a", "b", "c"} {
				c := mustGrant(t, s, key, time.Second)
				if err := c.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
				if n := s.parked(); n != 3 {
					t.Fatalf("%d goroutines wait at 3 nodes", n)
				}
				time.Sleep(pause)
			}
		}
		time.Sleep(ends)
		synctest.Wait()
		if n := s.parked(); n != 0 {
			t.Errorf("%d goroutines still wait", n)
		}
	})
}

// A RELEASE that waits for the VOTE before it knows what that has answered: where the mark
// stands at the stamp, none is named. One that goes out beside an unanswered VOTE names it.
func TestReleaseKnowsTheVoteBeforeIt(t *testing.T) {
	for _, late := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			fs, nodes := singleFakes(3)
			s := fakeStore(t, Options{}, nodes...)
			mustGrant(t, s, "first", time.Second).Release(t.Context())
			synctest.Wait()
			takes := minLine / 2
			if late {
				takes = 20 * minLine
			}
			fs[2].set(func(op string) error {
				if op == "vote" {
					time.Sleep(takes)
				}
				return nil
			})
			before := len(fs[2].releases())
			c := mustGrant(t, s, "k", time.Second)
			synctest.Wait() // the VOTE is under way
			if late {
				time.Sleep(takes / 2)
			}
			if err := c.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * takes)
			sent := fs[2].releases()[before:]
			if len(sent) != 1 || (sent[0][1] == "0") == late {
				t.Errorf("beside an unanswered VOTE: %v; RELEASEs %q", late, sent)
			}
			if fs[2].owner("k") != "" {
				t.Error("the vote is still there")
			}
			time.Sleep(time.Minute)
		})
	}
}

// A single node that does not answer keeps a call no longer than the node timeout, also where the
// call was made in the caller's goroutine.
func TestDirectCallsEndAtTheNodeTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := singleFakes(1)
		s := fakeStore(t, Options{}, nodes...)
		c := mustGrant(t, s, "k", 10*time.Second)
		fs[0].set(func(string) error {
			time.Sleep(s.opts.NodeTimeout + sharing)
			return context.DeadlineExceeded
		})
		const most = 5 * time.Millisecond
		began := time.Now()
		if err := c.Release(t.Context()); !errors.Is(err, store.ErrUncertain) {
			t.Errorf("Release without an answer: %v, want ErrUncertain", err)
		}
		if d := time.Since(began); d > s.opts.NodeTimeout+sharing+most {
			t.Errorf("Release took %v, the node timeout is %v", d, s.opts.NodeTimeout)
		}
		time.Sleep(time.Minute)
		began = time.Now()
		if _, err := s.Claim("other", store.ClaimOptions{TTL: time.Second}).Try(t.Context()); !errors.Is(err, store.ErrUncertain) {
			t.Errorf("Try without an answer: %v, want ErrUncertain", err)
		}
		if d := time.Since(began); d > s.opts.NodeTimeout+sharing+most {
			t.Errorf("Try took %v, the node timeout is %v", d, s.opts.NodeTimeout)
		}
		time.Sleep(time.Minute)
	})
}

// A node that has missed an answer, or has a request under way, is asked by a goroutine of its own:
// its client may wait for a connection that another call is making.
func TestDirectCallsOfASoundNodeOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := singleFakes(1)
		s := fakeStore(t, Options{}, nodes...)
		grant := func(key string, direct bool) *claim {
			t.Helper()
			before := fs[0].direct.Load()
			c := mustGrant(t, s, key, 10*time.Second)
			if got := fs[0].direct.Load() > before; got != direct {
				t.Errorf("%s: in the caller's goroutine %v, want %v", key, got, direct)
			}
			return c
		}
		c := grant("sound", true)
		fs[0].set(only("keep", time.Second))
		go c.Extend(t.Context())
		synctest.Wait()
		grant("beside an extension", false)
		time.Sleep(time.Minute)
		fs[0].set(always("vote", errGone))
		if _, err := s.Claim("missed", store.ClaimOptions{TTL: time.Second}).Try(t.Context()); err == nil {
			t.Error("a grant without an answer")
		}
		fs[0].set(nil)
		s.peers[0].mu.Lock()
		s.peers[0].misses, s.peers[0].away = 1, s.clock.Now() // the pause is over
		s.peers[0].mu.Unlock()
		grant("after a missing answer", false)
		synctest.Wait() // the line knows of the answer after the round does
		grant("answered again", true)
		time.Sleep(time.Minute)
	})
}

// The shared contexts end by their deadline, which clients and errors tell apart from a caller who
// gave up.
func TestSharedContextsEndByTheirDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := fakeStore(t, Options{}, newFake("n"))
		for range 200 {
			short, request := s.shortContext(), s.requestContext()
			time.Sleep(time.Second)
			for _, ctx := range []context.Context{short, request} {
				if <-ctx.Done(); ctx.Err() != context.DeadlineExceeded {
					t.Fatalf("a shared context ended by %v", ctx.Err())
				}
			}
		}
	})
}
