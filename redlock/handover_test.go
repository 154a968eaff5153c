package redlock

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// brief is a claim that is content with a short grant.
func brief(s *Store, key string) *claim {
	return s.Claim(key, store.ClaimOptions{TTL: 10 * time.Second, Wait: true, Least: 100 * time.Millisecond}).(*claim)
}

type handed struct {
	g   store.Grant
	err error
}

// await has a brief claim of s wait behind the holder.
func await(t *testing.T, s *Store) (*claim, <-chan handed) {
	t.Helper()
	c, got := brief(s, "k"), make(chan handed, 1)
	go func() {
		g, err := acquire(t.Context(), c)
		got <- handed{g, err}
	}()
	time.Sleep(100 * time.Millisecond) // the first round, the subscription, and the round that parks
	synctest.Wait()
	return c, got
}

func votesCast(fs []*fakeNode) (n int) {
	for _, f := range fs {
		f.mu.Lock()
		n += f.runs["vote"]
		f.mu.Unlock()
	}
	return n
}

// hold acquires k.
func hold(t *testing.T, s *Store) *claim {
	t.Helper()
	c := brief(s, "k")
	if _, err := acquire(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	return c
}

// The key passes on without a VOTE. The grant is short, and an extension makes it a whole one.
func TestHandOverGrants(t *testing.T) {
	for _, n := range []int{1, 5} {
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 2, n)
			holder := hold(t, stores[0])
			c, got := await(t, stores[1])
			before := votesCast(fs)
			if err := holder.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			h := <-got
			switch {
			case h.err != nil:
				t.Fatal(h.err)
			case votesCast(fs) != before:
				t.Errorf("%d nodes: %d VOTEs after the release", n, votesCast(fs)-before)
			case h.g.Token <= holder.token:
				t.Errorf("token %d after %d", h.g.Token, holder.token)
			case h.g.TTL > c.reserve() || h.g.ExtendIn != handedPace:
				t.Errorf("granted for %v, to be extended in %v", h.g.TTL, h.g.ExtendIn)
			}
			for i, f := range fs {
				if f.owner("k") != h.g.Owner || f.marks["k"] != int64(h.g.Token) {
					t.Errorf("node %d votes for %q with mark %d", i, f.owner("k"), f.marks["k"])
				}
			}
			g, err := c.Extend(t.Context())
			if err != nil || g.TTL != 10*time.Second || g.Token != h.g.Token || g.ExtendIn != 0 {
				t.Errorf("Extend: %+v, %v", g, err)
			}
			time.Sleep(5 * time.Second)
			if err := c.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// Without an extension the grant ends with the reservation, and nobody else has the key before.
func TestHandOverEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 2, 1)
		holder := hold(t, stores[0])
		c, got := await(t, stores[1])
		holder.Release(t.Context())
		<-got
		for !stores[1].clock.Passed(c.until) {
			if fs[0].owner("k") != c.attempt.owner {
				t.Fatal("the reservation has ended before the validity has")
			}
			time.Sleep(time.Millisecond)
		}
		if _, err := c.Extend(t.Context()); err == nil {
			t.Error("extended after its end")
		}
		c.Release(t.Context())
	})
}

// A grant counts from when the reservation was made, however late one hears of it: a process that
// was stopped meanwhile asks, and does not believe it (rule W).
func TestLateGrant(t *testing.T) {
	for _, late := range []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, 5 * time.Second} {
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 3, 1)
			holder := hold(t, stores[0])
			c, got := await(t, stores[1])
			fs[0].mu.Lock()
			channel := "holdfast:" + stores[1].inbox.name
			deliver := fs[0].subs[channel]
			fs[0].subs[channel] = func(text string) { time.Sleep(late); deliver(text) }
			fs[0].mu.Unlock()
			began := time.Now()
			holder.Release(t.Context())
			made := time.Now()
			reserve := holder.reserve()
			time.Sleep(late)
			synctest.Wait()
			c.mu.Lock()
			held, until := c.handed, time.Now().Add(stores[1].clock.Until(c.until))
			c.mu.Unlock()
			if end := made.Add(reserve); held && until.After(end) {
				t.Errorf("%v late: valid until %v, the reservation ends after %v", late, until.Sub(began), end.Sub(began))
			}
			if want := late <= reserve/2; held != want {
				t.Errorf("%v late: granted by it: %t, want %t", late, held, want)
			}
			if h := <-got; h.err != nil {
				t.Error(h.err)
			}
			c.Release(t.Context())
		})
	}
}

// A clock of a node that is stepped does not make a grant longer than the reservation.
func TestGrantAndSteppedClock(t *testing.T) {
	for _, step := range []time.Duration{-time.Hour, -3 * time.Second, 3 * time.Second, time.Hour} {
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 2, 1)
			holder := hold(t, stores[0])
			c, got := await(t, stores[1])
			fs[0].mu.Lock()
			fs[0].ahead = step
			fs[0].mu.Unlock()
			holder.Release(t.Context())
			end := time.Now().Add(holder.reserve())
			synctest.Wait()
			c.mu.Lock()
			if until := time.Now().Add(stores[1].clock.Until(c.until)); c.handed && until.After(end) {
				t.Errorf("stepped by %v: valid %v beyond the reservation", step, until.Sub(end))
			}
			c.mu.Unlock()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			select {
			case <-got:
			case <-ctx.Done(): // the clock refuses its stamps: a fault of availability
			}
			c.Release(context.Background())
			time.Sleep(10 * time.Minute) // until nothing is repeated any more
		})
	}
}

// Fewer than Q nodes, other stamps, an unknown admission, and a claim that wants the whole ttl:
// the waiter asks.
func TestNoGrant(t *testing.T) {
	change := func(f *fakeNode, channel string, alter func(text string) string) {
		f.mu.Lock()
		defer f.mu.Unlock()
		deliver := f.subs[channel]
		f.subs[channel] = func(text string) {
			if text = alter(text); text != "" {
				deliver(text)
			}
		}
	}
	for name, alter := range map[string]func(node int, text string) string{
		"lost": func(node int, text string) string {
			if node > 1 {
				return ""
			}
			return text
		},
		"other stamps": func(node int, text string) string {
			m, _ := parseMessage(text)
			return fmt.Sprintf("w1 grant %d %d.0 %d abc %s %s k", m.mark+int64(node), m.clock/1e6, m.reserve.Milliseconds(), m.owner, m.released)
		},
		"unknown": func(node int, text string) string {
			m, _ := parseMessage(text)
			return fmt.Sprintf("w1 grant %d %d.0 %d xyz %s %s k", m.mark, m.clock/1e6, m.reserve.Milliseconds(), m.owner, m.released)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				fs, stores := queued(t, 2, 5)
				holder := hold(t, stores[0])
				c, got := await(t, stores[1])
				for i, f := range fs {
					change(f, "holdfast:"+stores[1].inbox.name, func(text string) string { return alter(i, text) })
				}
				before := votesCast(fs)
				holder.Release(t.Context())
				h := <-got
				if h.err != nil || h.g.ExtendIn != 0 || h.g.TTL < 9*time.Second || votesCast(fs) == before {
					t.Errorf("%+v, %v", h.g, h.err)
				}
				c.Release(t.Context())
			})
		})
	}
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 2, 1)
		holder := hold(t, stores[0])
		granted := arrive(t, t.Context(), stores[1:], "k") // Least is zero
		before := votesCast(fs)
		holder.Release(t.Context())
		a := <-granted
		if votesCast(fs) == before || a.claim.handed {
			t.Error("a claim that wants the whole ttl was granted a reservation")
		}
		a.claim.Release(t.Context())
	})
}

// The messages of the nodes that come after the grant make their promises count: an extension
// needs only a quorum of all nodes, not just those that came first.
func TestLaterMessagesCount(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 2, 5)
		holder := hold(t, stores[0])
		c, got := await(t, stores[1])
		for _, f := range fs[3:] {
			f.mu.Lock()
			channel := "holdfast:" + stores[1].inbox.name
			deliver := f.subs[channel]
			f.subs[channel] = func(text string) { time.Sleep(5 * time.Millisecond); deliver(text) }
			f.mu.Unlock()
		}
		holder.Release(t.Context())
		if h := <-got; h.err != nil || h.g.ExtendIn == 0 {
			t.Fatal(h)
		}
		time.Sleep(6 * time.Millisecond)
		synctest.Wait()
		for _, f := range fs[:2] { // they lose what they promised
			f.forget("k")
		}
		if _, err := c.Extend(t.Context()); err != nil {
			t.Error(err)
		}
		c.Release(t.Context())
	})
}

// A claim that leaves with a grant that nobody has heard of hands it on.
func TestLeavingWithAGrant(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, stores := queued(t, 3, 5)
		holder := hold(t, stores[0])
		first, got := await(t, stores[1])
		second, then := await(t, stores[2])
		holder.Release(t.Context())
		<-got
		began := time.Now()
		first.Release(t.Context())
		if h := <-then; h.err != nil || time.Since(began) > 50*time.Millisecond {
			t.Errorf("%v after %v", h.err, time.Since(began))
		}
		second.Release(t.Context())
	})
}

// Tokens grow from hand-over to hand-over, and each node's mark follows.
func TestTokensOfHandOvers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, stores := queued(t, 4, 5)
		var tokens []int64
		c := hold(t, stores[0])
		tokens = append(tokens, int64(c.token))
		for i := range 40 {
			next, got := await(t, stores[(i+1)%len(stores)])
			c.Release(t.Context())
			h := <-got
			if h.err != nil || h.g.ExtendIn == 0 {
				t.Fatalf("%d: %+v %v", i, h.g, h.err)
			}
			tokens = append(tokens, int64(h.g.Token))
			c = next
		}
		c.Release(t.Context())
		if !slices.IsSorted(tokens) || len(slices.Compact(slices.Clone(tokens))) != len(tokens) {
			t.Errorf("tokens %v", tokens)
		}
	})
}

// intercept keeps what a node tells the store s, and answers how to deliver it.
func intercept(f *fakeNode, s *Store) (deliver func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	channel := "holdfast:" + s.inbox.name
	real, kept := f.subs[channel], []string(nil)
	f.subs[channel] = func(text string) { kept = append(kept, text) }
	return func() {
		for _, text := range kept {
			real(text)
		}
	}
}

// A message of a reservation that ended before the node answered BUSY last is stale, though the node's
// clock, which was set back since, makes it look fresh (rule W).
func TestGrantOlderThanItsPair(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 3, 1)
		holder := hold(t, stores[0])
		c, got := await(t, stores[1])
		deliver := intercept(fs[0], stores[1])
		holder.Release(t.Context())
		synctest.Wait()
		time.Sleep(holder.reserve() + time.Millisecond) // and it has not asked by itself yet
		other := hold(t, stores[2])
		fs[0].mu.Lock()
		fs[0].ahead = -holder.reserve() // the reservation was made just now, by this clock
		fs[0].mu.Unlock()
		c.poke()
		synctest.Wait()
		deliver()
		synctest.Wait()
		c.mu.Lock()
		if c.held {
			t.Error("granted beside another holder")
		}
		c.mu.Unlock()
		other.Release(t.Context())
		<-got
		c.Release(context.Background())
		time.Sleep(time.Minute)
	})
}

// A message counts for the owner that it names (rule X): RELEASE frees what is reserved for an earlier one.
func TestGrantOfAnEarlierOwner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, stores := queued(t, 2, 3)
		holder := hold(t, stores[0])
		c, got := await(t, stores[1])
		tell := func(owner string) bool {
			for _, p := range stores[1].peers[:2] {
				c.mu.Lock()
				h := c.w.pairs[p.index]
				now := h.clock + stores[1].clock.Since(h.asked).Microseconds()
				c.mu.Unlock()
				c.told(p, message{wake: true, mark: now, clock: now, id: "abc", reserve: time.Second, owner: owner, released: "h1.x"})
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.held
		}
		c.mu.Lock()
		earlier := c.attempt.owner
		rel := c.moveLocked(t.Context())
		c.w.idle = true
		c.mu.Unlock()
		if tell(earlier) {
			t.Error("granted by what was reserved for an earlier owner")
		}
		rel.send(true)
		time.Sleep(100 * time.Millisecond) // the round that the messages asked for
		synctest.Wait()
		c.mu.Lock()
		owner := c.attempt.owner
		c.mu.Unlock()
		if !tell(owner) {
			t.Error("not granted by what is reserved for the present one: the test shows nothing")
		}
		if h := <-got; h.err != nil {
			t.Error(h.err)
		}
		c.Release(t.Context())
		holder.Release(t.Context())
	})
}
