package faults

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// OWN-02, OWN-05: two goroutines share a locker. The lease of the first lapses, the second
// takes the key; the late release of the first says that it was lost and frees nobody. On
// three nodes the second one has two.
func TestLateReleaseFreesNobody(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		short, err := b.locks.With(holdfast.Options{TTL: 500 * time.Millisecond, NoExtend: true})
		if err != nil {
			t.Fatal(err)
		}
		kit.Warm(t, b.locks)
		first := kit.Acquire(t, short, "k")
		ctx := first.Context(t.Context())
		if n > 1 {
			b.proxies[0].Refuse()
			b.proxies[0].Reset()
		}
		second := kit.Acquire(t, b.locks, "k")
		if first.Owner() == second.Owner() || second.Token() <= first.Token() {
			t.Errorf("both have owner %q, or tokens %v and %v", first.Owner(), first.Token(), second.Token())
		}
		if ctx.Err() == nil || !errors.Is(first.Err(), holdfast.ErrLost) {
			t.Errorf("the second has the key and the first is told %v", first.Err())
		}
		for range 2 {
			err := first.Release(t.Context())
			if !errors.Is(err, holdfast.ErrLost) || errors.Is(err, holdfast.ErrReleased) {
				t.Errorf("late Release: %v, want ErrLost", err)
			}
			for _, part := range []string{"release", `"k"`, "after the grant", "after its end"} {
				if !strings.Contains(fmt.Sprint(err), part) {
					t.Errorf("%v does not say %q", err, part)
				}
			}
		}
		var held *holdfast.HeldError
		_, err = b.other(t, holdfast.Options{}).TryAcquire(t.Context(), "k")
		if !errors.As(err, &held) || held.Holder.Owner != second.Owner() {
			t.Errorf("another process is told %v, want that the second one holds the key", err)
		}
		if err := second.Release(t.Context()); err != nil {
			t.Errorf("Release of the second: %v", err)
		}
	})
}

// OWN-03: the network breaks during a release. It says so, the lease stays releasable, and
// what else the locker holds is untouched.
func TestReleaseIntoABrokenNetwork(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		lease, other := kit.Acquire(t, b.locks, "k"), kit.Acquire(t, b.locks, "other")
		for _, p := range b.proxies {
			p.BlackHole()
		}
		err := lease.Release(t.Context())
		if !errors.Is(err, holdfast.ErrUncertain) || errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release into a black hole: %v, want ErrUncertain", err)
		}
		for i, s := range b.servers {
			if b.proxies[i].Counts().BlackHoled == 0 {
				t.Errorf("node %d was not black-holed: the test shows nothing", i)
			}
			if v, err := s.Do("GET", "k"); err != nil || v != lease.Owner() && n == 1 {
				t.Errorf("the key is not ours any more: %v, %v", v, err)
			}
			b.proxies[i].Reset()
			b.proxies[i].Heal()
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Errorf("second Release: %v", err)
		}
		servertest.Eventually(t, ttl/2, func() error {
			for _, s := range b.servers {
				if v, err := s.Do("EXISTS", "k"); err != nil || v != int64(0) {
					return fmt.Errorf("%s still has the key: %v, %v", s.Addr(), v, err)
				}
			}
			return nil
		})
		if err := other.Err(); err != nil {
			t.Errorf("the other lease: %v", err)
		}
		if err := other.Release(t.Context()); err != nil {
			t.Errorf("Release of the other lease: %v", err)
		}
	})
}

// Class 4: the servers delete the votes, the replies get lost and the connections break. A
// client library that then sent the RELEASE again would find no vote; the lease was not lost.
func TestReleaseWhoseReplyIsLost(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		if err := b.acquireEverywhere(t, "k").Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		kit.NoKeys(t, ttl/2, b.servers) // and each server has the script of RELEASE
		for range kit.Count(3, 50) {
			lease := b.acquireEverywhere(t, "k")
			var before int64
			for _, p := range b.proxies {
				before += p.Counts().Dropped
				p.DropReplies()
			}
			released := make(chan error, 1)
			go func() { released <- lease.Release(t.Context()) }()
			kit.NoKeys(t, ttl/2, b.servers)
			var dropped int64
			servertest.Eventually(t, ttl/2, func() error {
				dropped = -before
				for _, p := range b.proxies {
					dropped += p.Counts().Dropped
				}
				if dropped == 0 {
					return errors.New("no reply was lost")
				}
				return nil
			})
			for _, p := range b.proxies {
				p.Heal() // which ends the connections
			}
			if err := <-released; errors.Is(err, holdfast.ErrLost) || err != nil && !errors.Is(err, holdfast.ErrUncertain) {
				t.Fatalf("Release whose reply was lost: %v", err)
			}
			if err := lease.Release(t.Context()); err != nil {
				t.Fatalf("second Release: %v", err)
			}
		}
	})
}

// acquireEverywhere acquires a key with a vote of every node, and opens all connections that
// the clients may use: one that is opened while replies get lost sends no request.
func (b *bed) acquireEverywhere(t *testing.T, key string) (lease *holdfast.Lease) {
	t.Helper()
	servertest.Eventually(t, 2*ttl, func() error {
		lease = kit.Acquire(t, b.locks, key)
		var err error
		for range 20 { // the last one may be slow
			err = nil
			for _, s := range b.servers {
				if v, e := s.Do("GET", key); e != nil || v != lease.Owner() {
					err = fmt.Errorf("%s has the vote %v, not ours: %v", s.Addr(), v, e)
				}
			}
			time.Sleep(20 * time.Millisecond) // also for the reply to reach us
			if err == nil {
				return nil
			}
		}
		return errors.Join(err, lease.Release(t.Context()))
	})
	for range 40 { // rueidis has four and takes any of them
		if err := lease.Extend(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Millisecond)
	return lease
}

// Class 4, QUO-04: every node votes, and the replies get lost. The attempt says that it is not
// known whether it was granted, and is undone on all nodes long before the ttl ends.
func TestVotesWhoseRepliesAreLost(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		kit.Warm(t, b.locks)
		for _, p := range b.proxies {
			p.DropReplies()
		}
		lease, err := b.locks.TryAcquire(t.Context(), "k")
		if lease != nil || !errors.Is(err, holdfast.ErrUncertain) || !errors.Is(err, holdfast.ErrUnavailable) {
			t.Errorf("TryAcquire without an answer: %v, %v, want ErrUncertain and ErrUnavailable", lease, err)
		}
		for i, p := range b.proxies {
			if p.Counts().Dropped == 0 {
				t.Errorf("node %d has answered: the test shows nothing", i)
			}
			p.Heal() // which ends the connections
		}
		kit.NoKeys(t, ttl/2, b.servers)
		servertest.Eventually(t, ttl/2, func() error {
			next, err := b.locks.TryAcquire(t.Context(), "k")
			if err == nil {
				err = next.Release(t.Context())
			}
			return err
		})
	})
}

// R6, class 7, OWN-09: an owner is compared whole. A vote of somebody else, whose owner may
// even begin as ours does, is neither extended nor released, and the lease is lost.
func TestOwnersAreComparedWhole(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		const rivalTTL = 30 * time.Second
		b := newBed(t, c, n, holdfast.Options{TTL: 2 * time.Second, ExtendEvery: 200 * time.Millisecond})
		for _, rival := range []func(owner string) string{
			func(string) string { return "rival" },
			func(owner string) string { return owner + "0" },
			func(owner string) string { return owner[:len(owner)-1] },
		} {
			kit.Warm(t, b.locks)
			lease := kit.Acquire(t, b.locks, "k")
			owner := rival(lease.Owner())
			for _, s := range b.servers {
				if _, err := s.Do("SET", "k", owner, "PX", fmt.Sprint(rivalTTL.Milliseconds())); err != nil {
					t.Fatal(err)
				}
			}
			taken := time.Now()
			select {
			case <-lease.Done():
			case <-time.After(ttl):
				t.Fatal("the loss is not noticed")
			}
			if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
				t.Errorf("Release: %v, want ErrLost", err)
			}
			var lost *store.LostError
			if !errors.As(lease.Err(), &lost) || lost.By == nil || lost.By.Holder.Owner != owner {
				t.Errorf("lost by %v, want that %q holds the key", lease.Err(), owner)
			}
			for _, s := range b.servers {
				if v, err := s.Do("GET", "k"); err != nil || v != owner {
					t.Errorf("the vote of %q is now %v, %v", owner, v, err)
				}
				left, err := s.Do("PTTL", "k")
				if ms, _ := left.(int64); err != nil || ms < 0 || time.Duration(ms)*time.Millisecond > rivalTTL-time.Since(taken)+time.Second {
					t.Errorf("%v after it was set for %v, the vote of %q lives for %v ms: %v", time.Since(taken), rivalTTL, owner, left, err)
				}
				if _, err := s.Do("DEL", "k"); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
