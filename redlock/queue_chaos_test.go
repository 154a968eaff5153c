package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// quietVotes is how many VOTEs are sent in a time in which nothing happens.
func quietVotes(fs []*fakeNode, d time.Duration) int {
	before := votesAsked(fs)
	time.Sleep(d)
	return votesAsked(fs) - before
}

// delayed has each request take a random time around d.
func delayed(d time.Duration) func(string) error {
	return func(string) error {
		time.Sleep(d/2 + time.Duration(rand.Int64N(int64(d))))
		return nil
	}
}

// nothingLeft looks for votes and places at the nodes and for claims in the inboxes, when all is over.
func nothingLeft(t *testing.T, fs []*fakeNode, stores []*Store) {
	t.Helper()
	time.Sleep(10 * time.Second) // repeated RELEASEs, and the subscriptions
	synctest.Wait()
	for _, f := range fs {
		owner := f.owner("k")
		f.mu.Lock()
		if owner != "" || len(f.queue["k"]) > 0 || len(f.subs) > 0 {
			t.Errorf("%s is left with the vote of %q, the queue %v, and %d subscriptions", f.name, owner, f.queue["k"], len(f.subs))
		}
		f.mu.Unlock()
	}
	for i, s := range stores {
		s.inbox.mu.Lock()
		if len(s.inbox.claims) > 0 || s.inbox.waiting != 0 {
			t.Errorf("store %d: the inbox is left with %d owners of %d claims", i, len(s.inbox.claims), s.inbox.waiting)
		}
		s.inbox.mu.Unlock()
	}
}

// A holder with a bare quorum dies: who has taken the votes of the other nodes, and given them
// back, has its place still and asks when the holder's ttl ends.
func TestHolderOfBareQuorumDies(t *testing.T) {
	for _, nodes := range []int{3, 5} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				const ttl = 10 * time.Second
				fs, stores := queued(t, 3, nodes)
				mustGrant(t, stores[0], "k", ttl)
				for _, f := range fs[nodes/2+1:] {
					f.forget("k")
				}
				began := time.Now()
				granted := arrive(t, t.Context(), stores[1:], "k")
				for range 2 {
					a := <-granted
					if took := time.Since(began); took > ttl+time.Second {
						t.Errorf("%d is granted after %v", a.who, took)
					}
					a.claim.Release(t.Context())
				}
				nothingLeft(t, fs, stores)
			})
		})
	}
}

// The free votes of a minority that answers late are given back by every waiter that gets one,
// which is no reason to ask again.
func TestFreeVotesAtSlowNodes(t *testing.T) {
	for _, nodes := range []int{3, 5} {
		for _, slow := range []time.Duration{0, 2 * time.Millisecond, 20 * time.Millisecond} {
			t.Run(fmt.Sprint(nodes, " ", slow), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					fs, stores := queued(t, 5, nodes)
					near, far := fs[:nodes/2+1], fs[nodes/2+1:]
					for _, f := range near {
						f.set(delayed(200 * time.Microsecond))
					}
					for _, f := range far {
						f.set(delayed(200*time.Microsecond + slow))
					}
					holder := mustGrant(t, stores[0], "k", 10*time.Second)
					time.Sleep(100 * time.Millisecond)
					for _, f := range far {
						f.forget("k")
					}
					granted := arrive(t, t.Context(), stores[1:], "k")
					n := quietVotes(fs, 8*time.Second)
					t.Logf("%d VOTEs in 8 s", n)
					if n > 50*nodes {
						t.Errorf("%d VOTEs of 4 waiters in 8 s in which nothing happened", n)
					}
					holder.Release(t.Context())
					for range 4 {
						(<-granted).claim.Release(t.Context())
					}
					nothingLeft(t, fs, stores)
				})
			})
		}
	}
}

// Votes that stay split among dead owners are waited for, and not asked for again and again.
func TestVotesSplitAmongTheDead(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const ttl = 20 * time.Second
		fs, stores := queued(t, 1, 5)
		stores[0].mustListen(t)
		die := func(f *fakeNode, name string) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.votes["k"] = fakeVote{newOwner(time.Now().UnixMicro()-1e6, "aaaaaaaaaaaaaaaa", name).text, time.Now().Add(ttl)}
		}
		for i, name := range []string{"b", "b", "c", "c"} {
			die(fs[i], name)
			fs[i].set(delayed(100 * time.Microsecond))
		}
		fs[4].set(delayed(100 * time.Microsecond))
		time.AfterFunc(2*time.Millisecond, func() { die(fs[4], "d") }) // after the waiter has given it back
		granted := arrive(t, t.Context(), stores, "k")
		for range 5 {
			n := quietVotes(fs, time.Second)
			t.Logf("%d VOTEs in a second", n)
			if n > 50 {
				t.Errorf("%d VOTEs in a second", n)
			}
		}
		a := <-granted
		if a.after > ttl+time.Second {
			t.Errorf("granted after %v", a.after)
		}
		a.claim.Release(t.Context())
		nothingLeft(t, fs, stores)
	})
}

// A node whose clock is far behind answers first, and a holder is only seen where the next ones are
// waited for: the waiters know that they have to wait all the same.
func TestClockBehindDoesNotPoll(t *testing.T) {
	for _, nodes := range []int{3, 5} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				fs, stores := queued(t, 5, nodes)
				fs[0].ahead = -time.Minute
				for i, f := range fs { // in this order
					f.set(func(string) error { time.Sleep(time.Duration(i+1) * 100 * time.Microsecond); return nil })
				}
				holder := waiterOf(stores[0], "k")
				if _, err := acquire(t.Context(), holder); err != nil {
					t.Fatal(err)
				}
				granted := arrive(t, t.Context(), stores[1:], "k")
				time.Sleep(2 * time.Second) // each has asked for its rank
				n := quietVotes(fs, 3*time.Second)
				t.Logf("%d VOTEs in 3 s", n)
				if n > 4*nodes {
					t.Errorf("%d VOTEs of 4 waiters in 3 s in which nothing happened", n)
				}
				holder.Release(t.Context())
				for range 4 {
					(<-granted).claim.Release(t.Context())
				}
				time.Sleep(2 * time.Minute) // RELEASEs that are ahead of the clock are repeated
				nothingLeft(t, fs, stores)
			})
		})
	}
}

// exclusion looks at the leases of a test: one at a time, with growing tokens.
type exclusion struct {
	mu     sync.Mutex
	token  int64
	holder *claim
	until  time.Time
	grants int
	waited time.Duration // the longest
	dead   []*claim
}

func (x *exclusion) granted(t *testing.T, c *claim, g store.Grant, waited time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if int64(g.Token) <= x.token {
		t.Errorf("token %d after %d", g.Token, x.token)
	}
	if x.holder != nil && time.Now().Before(x.until) {
		t.Error("two hold the key")
	}
	x.token, x.holder, x.until = int64(g.Token), c, time.Now().Add(c.s.clock.Until(c.until))
	x.grants, x.waited = x.grants+1, max(x.waited, waited)
}

func (x *exclusion) released() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.holder = nil
}

func (x *exclusion) died(c *claim) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.dead = append(x.dead, c)
}

// chaotic delays and loses requests and answers.
func chaotic(op string) error {
	if op == "admit" || op == "record" || op == "promoted" {
		return nil
	}
	time.Sleep(100*time.Microsecond + rand.N(400*time.Microsecond))
	if rand.N(30) == 0 {
		time.Sleep(rand.N(20 * time.Millisecond))
	}
	if rand.N(60) == 0 {
		return errGone
	}
	return nil
}

// Requests that get lost or are late, clocks that differ, waiters that give up, holders that die:
// one holds the key at a time, tokens grow, nobody waits for long, and nothing is left.
func TestQueueInChaos(t *testing.T) {
	seeds := 6
	if os.Getenv("HOLDFAST_SOAK") == "1" {
		seeds = 60
	}
	const ttl = 2 * time.Second
	for seed := range seeds {
		nodes := []int{1, 3, 5}[seed%3]
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				fs, stores := queued(t, 6, nodes)
				for _, f := range fs {
					f.ahead = (rand.N(2*time.Second) - time.Second) * time.Duration(seed%4)
					f.set(chaotic)
				}
				var x exclusion
				var wg sync.WaitGroup
				for i := range 2 * len(stores) {
					wg.Go(func() {
						for range 12 {
							turn(t, stores[i/2], ttl, &x)
						}
					})
				}
				wg.Wait()
				t.Logf("%d nodes, %d grants, longest wait %v", nodes, x.grants, x.waited)
				if x.waited > 15*ttl { // holders die one after the other
					t.Errorf("somebody waits for %v", x.waited)
				}
				for _, c := range x.dead { // a node that had not heard of the grant may have a place for it
					c.Release(context.Background())
				}
				nothingLeft(t, fs, stores)
			})
		})
	}
}

// turn has a claim wait for the key, or give up, and give it back, or die.
func turn(t *testing.T, s *Store, ttl time.Duration, x *exclusion) {
	time.Sleep(rand.N(100 * time.Millisecond))
	ctx, cancel := context.WithCancel(context.Background())
	if rand.N(8) == 0 {
		ctx, cancel = context.WithTimeout(context.Background(), rand.N(300*time.Millisecond))
	}
	defer cancel()
	c := waiterOf(s, "k")
	c.ttl = ttl
	began := time.Now()
	g, err := acquire(ctx, c)
	for err != nil && ctx.Err() == nil {
		time.Sleep(20 * time.Millisecond)
		g, err = acquire(ctx, c)
	}
	if err != nil {
		c.Release(context.Background())
		return
	}
	x.granted(t, c, g, time.Since(began))
	time.Sleep(rand.N(20 * time.Millisecond))
	if rand.N(25) == 0 {
		x.died(c)
		return
	}
	x.released()
	c.Release(context.Background())
}

// Release ends a Wait of its claim, which is told so.
func TestReleaseEndsWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 2, 3)
		const ttl = 30 * time.Second
		holder := mustGrant(t, stores[0], "k", ttl)
		stores[1].mustListen(t)
		c := waiterOf(stores[1], "k")
		began := time.Now()
		time.AfterFunc(2*time.Second, func() { c.Release(context.Background()) })
		if _, err := acquire(t.Context(), c); !errors.Is(err, store.ErrReleased) && !errors.Is(err, store.ErrHeld) {
			t.Errorf("a claim that is released while it waits: %v", err)
		}
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("Wait goes on for %v after Release", took-2*time.Second)
		}
		holder.Release(t.Context())
		nothingLeft(t, fs, stores)
	})
}

// Release at any moment of a Try and a Wait leaves nothing.
func TestReleaseAnyTime(t *testing.T) {
	for _, nodes := range []int{1, 3, 5} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				fs, stores := queued(t, 3, nodes)
				for _, f := range fs {
					f.set(delayed(250 * time.Microsecond))
				}
				var wg sync.WaitGroup
				for i := range 4 * len(stores) {
					wg.Go(func() {
						for range 20 {
							releaseAnyTime(t, stores[i/4])
						}
					})
				}
				wg.Wait()
				nothingLeft(t, fs, stores)
			})
		})
	}
}

func releaseAnyTime(t *testing.T, s *Store) {
	const ttl = time.Second
	c := waiterOf(s, "k")
	c.ttl = ttl
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			if _, err := acquire(context.Background(), c); errors.Is(err, store.ErrReleased) {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	time.Sleep(rand.N(4 * time.Millisecond))
	c.Release(context.Background())
	if rand.N(2) == 0 {
		c.Release(context.Background())
	}
	released := time.Now()
	<-ended
	if took := time.Since(released); took > ttl/2 {
		t.Errorf("the claim tries and waits for %v after its Release", took)
	}
}

// hangingNode's client does not return, however short the context is.
type hangingNode struct {
	*fakeNode
	hangs  atomic.Bool
	probes atomic.Int32 // under way
	most   atomic.Int32
}

func (f *hangingNode) Run(ctx context.Context, calls ...Call) []Reply {
	if !f.hangs.Load() {
		return f.fakeNode.Run(ctx, calls...)
	}
	if opOf(calls[0].Script.Text) == "probe" {
		f.most.Store(max(f.most.Load(), f.probes.Add(1)))
		defer f.probes.Add(-1)
	}
	time.Sleep(10 * time.Minute)
	return make([]Reply, len(calls))
}

// A client that does not return is asked whether claims may wait at its node whenever a store
// subscribes: those calls do not gather.
func TestProbesDoNotGather(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, list := fakes(3)
		subscribable(fs)
		hanging := &hangingNode{fakeNode: fs[2]}
		list[2] = hanging
		a, b := fakeStore(t, Options{}, list...), fakeStore(t, Options{}, list...)
		mustGrant(t, a, "x", time.Second) // the first contact
		mustGrant(t, b, "x2", time.Second)
		hanging.hangs.Store(true)
		for range 40 {
			holder := mustGrant(t, a, "k", 10*time.Second)
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			c := waiterOf(b, "k")
			if _, err := acquire(ctx, c); !errors.Is(err, store.ErrHeld) && !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			cancel()
			c.Release(context.Background())
			holder.Release(context.Background())
			time.Sleep(lingering + time.Second) // b's subscription ends
		}
		n := hanging.most.Load()
		t.Logf("%d probes at once", n)
		if n == 0 || n > maxHung {
			t.Errorf("%d probes hang at once, want 1 to %d", n, maxHung)
		}
		time.Sleep(time.Hour)
	})
}
