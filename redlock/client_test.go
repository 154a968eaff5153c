package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var errGone = &net.OpError{Op: "read", Err: errors.New("connection reset")}

// always answers one error to one kind of request, or to all.
func always(op string, err error) func(string) error {
	return func(got string) error {
		if op == got || op == "" {
			return err
		}
		return nil
	}
}

func only(op string, d time.Duration) func(string) error {
	return func(got string) error {
		if op == got {
			time.Sleep(d)
		}
		return nil
	}
}

func mustGrant(t *testing.T, s *Store, key string, ttl time.Duration) *claim {
	t.Helper()
	c := s.Claim(key, store.ClaimOptions{TTL: ttl}).(*claim)
	if _, err := c.Try(context.Background()); err != nil {
		t.Fatalf("Try: %v", err)
	}
	return c
}

// What one node refuses for good does not make the failure of the others final: the quorum may
// come back.
func TestOneRefusedNodeIsNoRefusal(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		fs[0].set(always("", &ServerError{"NOPERM no"}))
		fs[1].set(always("", errGone))
		s := fakeStore(t, Options{}, nodes...)
		c := s.Claim("k", store.ClaimOptions{TTL: time.Second})
		_, err := c.Try(t.Context())
		var node *NodeError
		var reply *store.InvalidError
		if !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrInvalid) {
			t.Errorf("unavailable %v, invalid %v: %v", errors.Is(err, store.ErrUnavailable), errors.Is(err, store.ErrInvalid), err)
		}
		if !errors.As(err, &node) || !errors.As(err, &reply) {
			t.Errorf("the nodes' errors cannot be reached: %v", err)
		}
	})
}

// Many holders that extend at the same time do not stand in each other's way.
func TestConcurrentExtensions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(1)
		s := fakeStore(t, Options{}, nodes...)
		const n = 64
		var claims []*claim
		for i := range n {
			claims = append(claims, mustGrant(t, s, fmt.Sprint("k", i), 10*time.Second))
		}
		fs[0].set(only("keep", 10*time.Millisecond))
		var failed atomic.Int32
		var wg sync.WaitGroup
		for _, c := range claims {
			wg.Go(func() {
				if _, err := c.Extend(t.Context()); err != nil {
					failed.Add(1)
					if failed.Load() == 1 {
						t.Log(err)
					}
				}
			})
		}
		wg.Wait()
		if failed.Load() > 0 {
			t.Errorf("%d of %d extensions failed on a healthy node", failed.Load(), n)
		}
	})
}

// A caller whose context is done does not wait for another's first contact.
func TestFirstContactHonoursContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(1)
		fs[0].set(only("admit", 20*time.Second))
		s := fakeStore(t, Options{NodeTimeout: 10 * time.Second}, nodes...)
		go s.Claim("a", store.ClaimOptions{TTL: time.Second}).Try(context.Background())
		synctest.Wait()
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := s.Claim("b", store.ClaimOptions{TTL: time.Second}).Try(ctx)
		if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > 2*time.Second {
			t.Errorf("%v after %v", err, took)
		}
		time.Sleep(time.Hour)
	})
}

// A node is admitted also where its commands need nearly the node timeout each.
func TestSlowAdmission(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		for _, f := range fs {
			f.set(func(string) error { time.Sleep(80 * time.Millisecond); return nil })
		}
		s := fakeStore(t, Options{NodeTimeout: 250 * time.Millisecond}, nodes...)
		c := s.Claim("k", store.ClaimOptions{TTL: 10 * time.Second})
		var err error
		for range 50 {
			if _, err = c.Try(t.Context()); err == nil {
				break
			}
			time.Sleep(500 * time.Millisecond)
		}
		if err != nil {
			t.Errorf("never granted: %v", err)
		}
		time.Sleep(time.Minute)
	})
}

// A store that is not put together right stays refused until that is mended.
func TestMisconfiguredStaysRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		fs[2].extra["maxttl"], fs[2].extra["trust"] = "60000", "0"
		s := fakeStore(t, Options{}, nodes...)
		for i := range 20 {
			c := s.Claim("k", store.ClaimOptions{TTL: time.Second})
			_, err := c.Try(t.Context())
			if !errors.Is(err, store.ErrInvalid) {
				t.Fatalf("attempt %d: %v", i, err)
			}
			time.Sleep(700 * time.Millisecond)
		}
		fs[2].mu.Lock()
		delete(fs[2].extra, "maxttl")
		fs[2].mu.Unlock()
		for range 10 {
			time.Sleep(time.Second)
			c := s.Claim("k", store.ClaimOptions{TTL: time.Second})
			if _, err := c.Try(t.Context()); err == nil {
				c.Release(t.Context())
				return
			}
		}
		t.Error("never granted after it was mended")
	})
}

// Two answers of one node are not the answers of two nodes.
func TestReleaseCountsNodesOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		s := fakeStore(t, Options{}, nodes...)
		c := mustGrant(t, s, "k", 10*time.Second)
		for _, f := range fs[1:] {
			f.set(always("release", errGone))
		}
		c.mu.Lock() // as after a healing VOTE whose answer was lost, and a step of the clock
		c.attempt.nodes[0].sent += 5100 * 1000
		c.mu.Unlock()
		if err := c.Release(t.Context()); !errors.Is(err, store.ErrUncertain) {
			t.Errorf("one node of three has answered, and Release says %v", err)
		}
		time.Sleep(time.Minute)
	})
}

// A RELEASE that the node's client never returns from is repeated.
func TestReleaseIsRepeatedBesideAHangingCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(1)
		s := fakeStore(t, Options{}, nodes...)
		c := mustGrant(t, s, "k", 20*time.Second)
		var hung atomic.Bool
		end := make(chan struct{})
		fs[0].set(func(op string) error {
			if op == "release" && hung.CompareAndSwap(false, true) {
				<-end
				return errGone
			}
			return nil
		})
		_ = c.Release(t.Context())
		time.Sleep(5 * time.Second)
		if o := fs[0].owner("k"); o != "" || !hung.Load() {
			t.Error("the vote is still there")
		}
		if err := c.Release(t.Context()); err != nil {
			t.Errorf("Release, after the repetition: %v", err)
		}
		close(end)
		time.Sleep(time.Minute)
	})
}

// The same for a repetition that hangs.
func TestDebtsAreRepaidBesideAHangingCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(1)
		s := fakeStore(t, Options{}, nodes...)
		c := mustGrant(t, s, "k", 20*time.Second)
		var calls atomic.Int32
		end := make(chan struct{})
		fs[0].set(func(op string) error {
			if op != "release" {
				return nil
			}
			switch calls.Add(1) {
			case 1:
				return errGone
			case 2:
				<-end
				return errGone
			}
			return nil
		})
		_ = c.Release(t.Context())
		time.Sleep(5 * time.Second)
		if o := fs[0].owner("k"); o != "" {
			t.Errorf("the vote is still there after %d calls", calls.Load())
		}
		close(end)
		time.Sleep(time.Minute)
	})
}

// A Release after one that failed tries again, also when the repetition has ended.
func TestReleaseTriesAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(1)
		s := fakeStore(t, Options{}, nodes...)
		c := mustGrant(t, s, "k", time.Second)
		fs[0].set(always("release", errGone))
		if err := c.Release(t.Context()); !errors.Is(err, store.ErrUncertain) {
			t.Errorf("first Release: %v", err)
		}
		time.Sleep(10 * time.Second)
		fs[0].set(nil)
		if err := c.Release(t.Context()); err != nil && !errors.Is(err, store.ErrLost) {
			t.Errorf("Release after the node has come back: %v", err)
		}
	})
}

// Stamps of healing depend on the offset of the wall clock, which extensions keep right: a
// client whose clock steps forward still gets back the nodes that have lost its vote.
func TestHealingAfterAStepOfTheClientsClock(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		s := fakeStore(t, Options{}, nodes...)
		c := mustGrant(t, s, "k", 10*time.Second)
		synctest.Wait()
		step := time.Hour.Microseconds()
		for _, p := range s.peers {
			p.offset.Add(step) // what the step makes of the samples
		}
		s.offset.Add(step)
		for i := range 12 {
			if f := fs[i/4]; i%4 == 0 {
				f.mu.Lock()
				clear(f.votes)
				clear(f.marks)
				f.mu.Unlock()
			}
			if _, err := c.Extend(t.Context()); err != nil {
				t.Fatalf("extension %d: %v", i, err)
			}
			time.Sleep(3 * time.Second)
		}
		if err := c.Release(t.Context()); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Minute)
	})
}

// A debt is repeated soon although another one is due late.
func TestDebtsDueLateKeepNobodyWaiting(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(1)
		s := fakeStore(t, Options{}, nodes...)
		late := mustGrant(t, s, "late", 10*time.Second)
		late.mu.Lock()
		late.attempt.nodes[0].sent += 8000 * 1000
		late.mu.Unlock()
		c := mustGrant(t, s, "k", 2*time.Second)
		_ = late.Release(t.Context())
		time.Sleep(10 * time.Millisecond)
		var once atomic.Bool
		fs[0].set(func(op string) error {
			if op == "release" && once.CompareAndSwap(false, true) {
				return errGone
			}
			return nil
		})
		_ = c.Release(t.Context())
		time.Sleep(100 * time.Millisecond)
		if fs[0].owner("k") != "" {
			t.Error("not repeated within 100ms")
		}
		time.Sleep(time.Minute)
	})
}

// A node whose clock is far off has stamps of its own, which a ticket does not pass to others.
func TestTicketHasTheCommonStamp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, nodes := fakes(3)
		s := fakeStore(t, Options{}, nodes...)
		if s.boot == "" {
			s.boot = "boot"
		}
		c := mustGrant(t, s, "k", 10*time.Second)
		synctest.Wait()
		c.attempt.nodes[1].sent += time.Hour.Microseconds()
		text, err := s.Ticket(c)
		if err != nil {
			t.Fatal(err)
		}
		ticket, err := store.ParseTicket(text)
		if err != nil || ticket.Stamp != c.attempt.stamp {
			t.Errorf("stamp %d, want %d (%v)", ticket.Stamp, c.attempt.stamp, err)
		}
	})
}

// A prefix must not turn a key into the name of another lock's record.
func TestPrefixedNamesOfRecords(t *testing.T) {
	_, nodes := fakes(1)
	for _, tt := range []struct {
		prefix, key string
		good        bool
	}{
		{"{", "holdfast}:node", false}, {"{hold", "fast}:x", false}, {"{a}:", "fence", false}, {"{a}:", "queue", false},
		{"{a}:x:fe", "nce", false}, {"{}", "x}:fence", false},
		{"jobs:", "queue", true}, {"{a}:", "x", true}, {"", "{a}x", true},
	} {
		s, err := New(Options{Prefix: tt.prefix}, nodes...)
		if err != nil {
			t.Fatal(err)
		}
		c := s.Claim(tt.key, store.ClaimOptions{TTL: time.Second}).(*claim)
		if (c.invalid == nil) != tt.good {
			t.Errorf("%q + %q: %v", tt.prefix, tt.key, c.invalid)
		}
	}
}

// A round that was ended early by the answers of a quorum does not say that a node had its
// whole time.
func TestErrorsNameTheTimeWaited(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		s := fakeStore(t, Options{NodeTimeout: 10 * time.Second}, nodes...)
		mustGrant(t, s, "first", time.Second).Release(t.Context())
		synctest.Wait()
		fs[0].mu.Lock()
		fs[0].votes["k"] = fakeVote{"x", time.Now().Add(time.Hour)}
		fs[0].mu.Unlock()
		fs[2].set(only("vote", time.Minute))
		_, err := s.Claim("k", store.ClaimOptions{TTL: time.Second}).Try(t.Context())
		if err == nil || strings.Contains(err.Error(), "10s") {
			t.Errorf("%v", err)
		}
		time.Sleep(2 * time.Minute)
	})
}

// One slow node does not stretch the pauses of all.
func TestLateAnswersDoNotStretchPauses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		s := fakeStore(t, Options{}, nodes...)
		mustGrant(t, s, "first", time.Second).Release(t.Context())
		fs[2].set(only("vote", time.Hour))
		mustGrant(t, s, "k", time.Second).Release(t.Context())
		time.Sleep(2 * time.Hour)
		if rtt := s.roundTrip(); rtt > s.opts.NodeTimeout {
			t.Errorf("a round trip is taken to be %v", rtt)
		}
	})
}

// A node is asked again although some calls of its client never return.
func TestNodeIsUsedAgainBesideHangingCalls(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		s := fakeStore(t, Options{}, nodes...)
		mustGrant(t, s, "first", time.Second).Release(t.Context())
		end := make(chan struct{})
		var hung atomic.Int32
		fs[2].set(func(op string) error {
			hung.Add(1)
			<-end
			return errGone
		})
		for i := range 200 {
			mustGrant(t, s, fmt.Sprint("k", i), time.Second).Release(t.Context())
			time.Sleep(100 * time.Millisecond)
		}
		if n := hung.Load(); n < 4 || n > 100 {
			t.Errorf("%d calls hang", n)
		}
		before := hung.Load()
		fs[2].set(nil) // new calls are answered, the old ones are not
		fs[0].set(always("", errGone))
		granted := false
		for range 300 {
			time.Sleep(100 * time.Millisecond)
			c := s.Claim("k", store.ClaimOptions{TTL: time.Second})
			_, err := c.Try(t.Context())
			_ = c.Release(t.Context())
			if granted = err == nil; granted {
				break
			}
		}
		if !granted {
			t.Errorf("the node is not used within 30s; %d calls hang", before)
		}
		close(end)
		time.Sleep(time.Hour)
	})
}

// Many clients that want one key of any number of nodes, also an even one, are all granted it,
// one after the other with rising tokens, though messages get lost.
func TestContentionConverges(t *testing.T) {
	for n := 1; n <= 5; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				fs, nodes := fakes(n)
				var lost atomic.Int32
				for _, f := range fs {
					f.set(func(op string) error {
						time.Sleep(time.Duration(rand.IntN(1000)) * time.Microsecond)
						if op != "admit" && rand.IntN(50) == 0 {
							lost.Add(1)
							return errGone
						}
						return nil
					})
				}
				var wg sync.WaitGroup
				var holders atomic.Int32
				var last atomic.Int64
				for range 10 {
					s := fakeStore(t, Options{}, nodes...)
					wg.Go(func() {
						for range 20 {
							if !holdOnce(t, s, &holders, &last) {
								return
							}
						}
					})
				}
				wg.Wait()
				if lost.Load() == 0 {
					t.Error("no message got lost: the test shows less than it says")
				}
				time.Sleep(time.Hour)
			})
		})
	}
}

// holdOnce tries until it is granted the key, and holds it for a while.
func holdOnce(t *testing.T, s *Store, holders *atomic.Int32, last *atomic.Int64) bool {
	c := s.Claim("k", store.ClaimOptions{TTL: 2 * time.Second})
	start := time.Now()
	for {
		g, err := c.Try(t.Context())
		if err == nil {
			if before := last.Swap(int64(g.Token)); int64(g.Token) <= before {
				t.Errorf("token %d after %d", g.Token, before)
			}
			break
		}
		if time.Since(start) > 10*time.Minute {
			t.Errorf("not granted in 300 ttls: %v", err)
			return false
		}
		time.Sleep(time.Duration(5+rand.IntN(20)) * time.Millisecond)
	}
	if n := holders.Add(1); n != 1 {
		t.Errorf("%d hold", n)
	}
	time.Sleep(3 * time.Millisecond)
	holders.Add(-1)
	_ = c.Release(t.Context())
	return true
}
