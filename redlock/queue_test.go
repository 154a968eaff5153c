package redlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// acquire is the Locker's loop: it tries until it is granted, and waits in between.
func acquire(ctx context.Context, c store.Claim) (store.Grant, error) {
	for {
		g, err := c.Try(ctx)
		var held *store.HeldError
		switch {
		case err == nil || ctx.Err() != nil:
			return g, err
		case !errors.As(err, &held):
			return g, err
		}
		if err := c.(store.Waiter).Wait(ctx, held); err != nil {
			return g, err
		}
	}
}

// queueOf opens n stores of the same nodes, on which each can be told of hand-overs.
func queued(t *testing.T, n, nodes int) ([]*fakeNode, []*Store) {
	fs, list := fakes(nodes)
	subscribable(fs)
	t.Cleanup(settle)
	var stores []*Store
	for range n {
		stores = append(stores, fakeStore(t, Options{}, list...))
	}
	return fs, stores
}

// settle lets the subscriptions end.
func settle() { time.Sleep(2 * lingering) }

func waiterOf(s *Store, key string) *claim {
	return s.Claim(key, store.ClaimOptions{TTL: 10 * time.Second, Wait: true}).(*claim)
}

// arrival is a claim that was granted.
type arrival struct {
	who   int
	after time.Duration // since the test's begin
	claim *claim
	token int64
}

// arrive has each of the stores wait for a key, one after the other, and tells who is granted.
func arrive(t *testing.T, ctx context.Context, stores []*Store, key string) <-chan arrival {
	granted := make(chan arrival, len(stores))
	began := time.Now()
	for i, s := range stores {
		go func() {
			c := waiterOf(s, key)
			g, err := acquire(ctx, c)
			if err != nil {
				if ctx.Err() == nil {
					t.Errorf("%d: %v", i, err)
				}
				c.Release(context.Background())
				return
			}
			granted <- arrival{i, time.Since(began), c, int64(g.Token)}
		}()
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
	}
	return granted
}

func votesAsked(fs []*fakeNode) (n int) {
	for _, f := range fs {
		f.mu.Lock()
		n += f.runs["vote"]
		f.mu.Unlock()
	}
	return n
}

// First come, first served, without polling: each hand-over takes no time, and a round or two.
func TestHandOver(t *testing.T) {
	for _, nodes := range []int{1, 3, 5} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				fs, stores := queued(t, 6, nodes)
				first := mustGrant(t, stores[0], "k", 10*time.Second)
				granted := arrive(t, t.Context(), stores[1:], "k")
				time.Sleep(2 * time.Second) // each has asked for its rank
				asked := votesAsked(fs)
				time.Sleep(3 * time.Second)
				if n := votesAsked(fs) - asked; n > 0 {
					t.Errorf("%d VOTEs in 3 s in which nothing happened", n)
				}
				last, lastToken := first, int64(0)
				for i := range 5 {
					asked, began := votesAsked(fs), time.Now()
					if err := last.Release(t.Context()); err != nil {
						t.Fatal(err)
					}
					a := <-granted
					if a.who != i || time.Since(began) > 50*time.Millisecond || a.token <= lastToken {
						t.Errorf("%d is granted after %v with token %d, %d's turn", a.who, time.Since(began), a.token, i)
					}
					synctest.Wait()
					if n := votesAsked(fs) - asked; n > 2*nodes { // the first message may be ahead of the other nodes
						t.Errorf("%d VOTEs for one hand-over", n)
					}
					last, lastToken = a.claim, a.token
				}
				last.Release(t.Context())
				time.Sleep(2 * time.Second)
				for _, f := range fs {
					if f.owner("k") != "" || len(f.queue["k"]) > 0 {
						t.Errorf("%s is left with %q and %v", f.name, f.owner("k"), f.queue["k"])
					}
				}
			})
		})
	}
}

// A waiter learns its place, from 1.
func TestPlaceInQueue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, stores := queued(t, 4, 3)
		holder := mustGrant(t, stores[0], "k", 10*time.Second)
		granted := arrive(t, t.Context(), stores[1:3], "k")
		c := waiterOf(stores[3], "k")
		var held *store.HeldError
		for range 2 { // the first one subscribes
			_, err := c.Try(t.Context())
			if !errors.As(err, &held) {
				t.Fatal(err)
			}
			if held.Place == 0 {
				c.Wait(t.Context(), held)
			}
		}
		if held.Place != 3 {
			t.Errorf("place %d: %v", held.Place, held)
		}
		c.Release(t.Context())
		holder.Release(t.Context())
		for range 2 {
			(<-granted).claim.Release(t.Context())
		}
	})
}

// A waiter that gives up between the reservation and its VOTE hands it on, and a claim whose Try
// was cut off, too.
func TestWithdrawalHandsOn(t *testing.T) {
	for _, nodes := range []int{1, 5} {
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 3, nodes)
			holder := mustGrant(t, stores[0], "k", 10*time.Second)
			ctx, cancel := context.WithCancel(t.Context())
			gone := arrive(t, ctx, stores[1:2], "k")
			granted := arrive(t, t.Context(), stores[2:], "k")
			for _, f := range fs { // the first one's VOTE is held back
				f.set(func(op string) error {
					if op == "vote" {
						time.Sleep(100 * time.Millisecond)
					}
					return nil
				})
			}
			holder.Release(t.Context())
			time.Sleep(50 * time.Millisecond)
			cancel()
			began := time.Now()
			a := <-granted
			if took := time.Since(began); took > minReserve {
				t.Errorf("%d nodes: the next waiter is granted after %v", nodes, took)
			}
			a.claim.Release(t.Context())
			if len(gone) > 0 {
				t.Error("granted after it gave up")
			}
		})
	}
}

// A wake-up that gets lost costs no more than the reservation and the time until the next one asks.
func TestLostWakeUp(t *testing.T) {
	for _, nodes := range []int{1, 5} {
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 3, nodes)
			holder := mustGrant(t, stores[0], "k", 10*time.Second)
			granted := arrive(t, t.Context(), stores[1:], "k")
			time.Sleep(3 * time.Second)
			for _, f := range fs {
				f.mu.Lock()
				f.dumb = true
				f.mu.Unlock()
			}
			began := time.Now()
			holder.Release(t.Context())
			for range 2 {
				a := <-granted
				if took := time.Since(began); took > 11*time.Second {
					t.Errorf("%d nodes: %d waits %v", nodes, a.who, took)
				}
				a.claim.Release(t.Context())
			}
		})
	}
}

// A holder that dies: the first waiter asks when the ttl ends, the second one stays behind.
func TestHolderDies(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, stores := queued(t, 3, 3)
		mustGrant(t, stores[0], "k", 3*time.Second)
		began := time.Now()
		granted := arrive(t, t.Context(), stores[1:], "k")
		a := <-granted
		if took := time.Since(began); a.who != 0 || took < 3*time.Second || took > 3*time.Second+20*time.Millisecond {
			t.Errorf("%d is granted after %v", a.who, took)
		}
		a.claim.Release(t.Context())
		if a = <-granted; a.who != 1 {
			t.Error("the order is lost")
		}
		a.claim.Release(t.Context())
	})
}

// A wake-up for a claim that was granted is ignored: a RELEASE would free the live lease.
func TestLateWakeUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 2, 3)
		holder := mustGrant(t, stores[0], "k", 10*time.Second)
		granted := arrive(t, t.Context(), stores[1:], "k")
		holder.Release(t.Context())
		a := <-granted
		owner := a.claim.attempt.owner
		for i, p := range stores[1].peers {
			stores[1].inbox.deliver(p, fmt.Sprintf("w1 wake %d %s %s k", time.Now().UnixMicro(), owner, "h1.x"))
			stores[1].inbox.deliver(stores[1].peers[i], fmt.Sprintf("w1 next 250 %s k", owner))
		}
		time.Sleep(time.Second)
		votes := 0
		for _, f := range fs {
			if f.owner("k") == owner {
				votes++
			}
		}
		if votes < 2 {
			t.Errorf("the lease has %d votes", votes)
		}
		if err := a.claim.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// An attempt that gives votes back goes on under another owner, with its place: the RELEASE that
// gives them back parks it.
func TestLoserKeepsItsPlace(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 3, 5)
		holder := mustGrant(t, stores[0], "k", 10*time.Second)
		granted := arrive(t, t.Context(), stores[1:2], "k")
		holder.Release(t.Context())
		winner := <-granted
		for _, f := range fs[:2] { // the winner's votes there are gone
			f.mu.Lock()
			delete(f.votes, "k")
			f.mu.Unlock()
		}
		c := waiterOf(stores[2], "k")
		stores[2].mustListen(t)
		done := make(chan error)
		go func() {
			_, err := acquire(t.Context(), c)
			done <- err
		}()
		time.Sleep(500 * time.Millisecond) // a vote that came late has been given back, too
		synctest.Wait()
		for i, f := range fs {
			if owner := f.owner("k"); owner != winner.claim.attempt.owner && owner != "" {
				t.Errorf("%s: the loser kept a vote", f.name)
			}
			f.unpark("k", winner.claim.attempt.owner) // may have a place where it came before the release
			if q := f.queue["k"]; len(q) != 1 || q[0].owner != c.attempt.owner || q[0].birth > c.birth {
				t.Errorf("node %d: queue %v, want %s", i, q, c.attempt.owner)
			}
		}
		winner.claim.Release(t.Context())
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		c.Release(t.Context())
	})
}

// mustListen subscribes, as if a claim had waited before.
func (s *Store) mustListen(t *testing.T) {
	t.Helper()
	s.inbox.mu.Lock()
	if s.inbox.stop == nil {
		s.inbox.left = s.age()
		s.inbox.subscribe()
	}
	s.inbox.mu.Unlock()
	synctest.Wait()
}

// Where the nodes let nobody subscribe, waiting polls, which is told once for each.
func TestNoSubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		t.Cleanup(settle)
		fs, nodes := fakes(3)
		a, b := fakeStore(t, Options{}, nodes...), fakeStore(t, Options{}, nodes...)
		holder := mustGrant(t, a, "k", 10*time.Second)
		var mu sync.Mutex
		told := map[string]int{}
		ctx := store.WithTrace(t.Context(), func(e store.NodeEvent) {
			mu.Lock()
			defer mu.Unlock()
			if e.Op == "subscribe" {
				told[e.Node]++
				if !errors.Is(e.Err, errors.ErrUnsupported) {
					t.Error(e.Err)
				}
			}
		})
		granted := make(chan *claim)
		go func() {
			c := waiterOf(b, "k")
			if _, err := acquire(ctx, c); err != nil {
				t.Error(err)
			}
			granted <- c
		}()
		time.Sleep(3 * time.Second)
		if n := votesAsked(fs); n < 60 || n > 300 {
			t.Errorf("%d VOTEs in 3 s of polling", n)
		}
		began := time.Now()
		holder.Release(t.Context())
		c := <-granted
		if took := time.Since(began); took > 2*maxPoll {
			t.Errorf("granted %v after the release", took)
		}
		c.Release(t.Context())
		if len(told) != 3 || told["n0"] != 1 || told["n1"] != 1 || told["n2"] != 1 {
			t.Errorf("told %v", told)
		}
	})
}

// The lock of another library is asked for: nobody tells when it goes.
func TestForeignHolderIsPolled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 1, 1)
		fs[0].votes["k"] = fakeVote{"somebody", time.Now().Add(time.Hour)}
		granted := arrive(t, t.Context(), stores, "k")
		time.Sleep(5 * time.Second)
		fs[0].mu.Lock()
		delete(fs[0].votes, "k")
		fs[0].mu.Unlock()
		began := time.Now()
		a := <-granted
		if took := time.Since(began); took > 2*maxPoll {
			t.Errorf("granted after %v", took)
		}
		a.claim.Release(t.Context())
	})
}

// The subscriptions end some time after the last claim has left, and no earlier.
func TestSubscriptionEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 2, 3)
		holder := mustGrant(t, stores[0], "k", 10*time.Second)
		granted := arrive(t, t.Context(), stores[1:], "k")
		time.Sleep(2 * lingering / 3)
		holder.Release(t.Context())
		(<-granted).claim.Release(t.Context())
		subs := func() (n int) {
			for _, f := range fs {
				f.mu.Lock()
				n += len(f.subs)
				f.mu.Unlock()
			}
			return n
		}
		time.Sleep(lingering - time.Second)
		if subs() != 3 {
			t.Errorf("%d subscriptions a while after the last waiter", subs())
		}
		time.Sleep(2 * time.Second)
		if subs() != 0 {
			t.Errorf("%d subscriptions are left", subs())
		}
		stores[1].inbox.mu.Lock()
		defer stores[1].inbox.mu.Unlock()
		if n := len(stores[1].inbox.claims); n > 0 || stores[1].inbox.waiting != 0 {
			t.Errorf("%d claims are left in the inbox", n)
		}
	})
}

// After a subscription was made again every waiter asks once: its wake-up may have been lost.
func TestResubscription(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 2, 1)
		holder := mustGrant(t, stores[0], "k", 10*time.Second)
		granted := arrive(t, t.Context(), stores[1:], "k")
		time.Sleep(3 * time.Second)
		fs[0].mu.Lock()
		fs[0].dumb = true
		fs[0].mu.Unlock()
		holder.Release(t.Context())
		time.Sleep(minReserve / 2)
		began := time.Now()
		s := stores[1]
		s.inbox.up(s.inbox.gen, s.peers[0])
		a := <-granted
		if took := time.Since(began); took > 50*time.Millisecond {
			t.Errorf("granted %v after the subscription came back", took)
		}
		a.claim.Release(t.Context())
	})
}

func TestParseMessage(t *testing.T) {
	for payload, want := range map[string]message{
		"w1 wake 17 h1.a h1.b a key with spaces": {wake: true, mark: 17, owner: "h1.a", released: "h1.b"},
		"w1 grant 17 12.000005 250 ab h1.a h1.b a k": {wake: true, mark: 17, clock: 12000005, id: "ab", reserve: 250 * time.Millisecond,
			owner: "h1.a", released: "h1.b"},
		"w1 next 250 h1.a k": {reserve: 250 * time.Millisecond, owner: "h1.a"},
	} {
		if m, ok := parseMessage(payload); !ok || m != want {
			t.Errorf("%q: %v %v", payload, m, ok)
		}
	}
	for _, payload := range []string{"", "w1", "w1 wake", "w1 wake 17 h1.a h1.b", "w2 wake 17 h1.a h1.b k", "w1 wake x h1.a h1.b k",
		"w1 wake -1 h1.a h1.b k", "w1 grant 17 12 250 ab h1.a h1.b", "w1 grant 17 12.5 0 ab h1.a h1.b k", "w1 grant 17 12.1000000 250 ab h1.a h1.b k",
		"w1 grant 17 x 250 ab h1.a h1.b k", "w1 grant 17 1.5 250  h1.a h1.b k", "w1 grant 17 1.5 99999 ab h1.a h1.b k", "w1 next 99999 h1.a k", "w1 next 250 h1.a", "w1 other 1 h1.a h1.b k"} {
		if m, ok := parseMessage(payload); ok {
			t.Errorf("%q is %v", payload, m)
		}
	}
}

func FuzzParseMessage(f *testing.F) {
	f.Add("w1 wake 17 h1.a h1.b key")
	f.Add("w1 next 250 h1.a k")
	f.Add("w1 grant 17 12.000005 250 ab h1.a h1.b a k")
	f.Fuzz(func(t *testing.T, payload string) {
		m, ok := parseMessage(payload)
		if ok && (!strings.HasPrefix(payload, "w1 ") || m.mark < 0 || m.reserve < 0 || m.reserve > maxReserve) {
			t.Errorf("%q: %+v", payload, m)
		}
	})
}

// The Q-th smallest place, of those nodes that have one.
func TestPlace(t *testing.T) {
	_, nodes := fakes(5)
	bubble(t, func(t *testing.T) {
		s := fakeStore(t, Options{}, nodes...)
		for _, c := range []struct {
			places []int64
			want   int64
		}{
			{[]int64{0, 0, 0, 0, 0}, 0}, {[]int64{1, 1, 0, 0, 0}, 0}, {[]int64{3, 1, 2, 0, 0}, 3},
			{[]int64{3, 1, 2, 1, 1}, 1}, {[]int64{1, 1, somewhere, 0, 0}, somewhere},
		} {
			cl := waiterOf(s, "k")
			cl.attempt = cl.newAttempt("x")
			for i, p := range c.places {
				cl.attempt.nodes[i].place = p
			}
			if got := cl.place(); got != c.want {
				t.Errorf("%v: %d, want %d", slices.Clone(c.places), got, c.want)
			}
		}
	})
}
