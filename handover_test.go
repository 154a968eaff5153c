package holdfast

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

// shortStore grants for a while only, to be extended soon, to whoever is content with that.
type shortStore struct {
	*memstore.Store
	first, in time.Duration // of a grant
	slow      time.Duration // each extension
	down      atomic.Bool   // extensions fail
	extended  atomic.Int32
}

type shortClaim struct {
	store.Claim
	s     *shortStore
	brief bool
	ends  time.Time // where it has not been extended
}

func (s *shortStore) Claim(key string, o store.ClaimOptions) store.Claim {
	return &shortClaim{Claim: s.Store.Claim(key, o), s: s, brief: o.Least > 0 && o.Least <= s.first}
}

func (c *shortClaim) Try(ctx context.Context) (store.Grant, error) {
	g, err := c.Claim.Try(ctx)
	if err == nil && c.brief {
		g.TTL, g.ExtendIn = c.s.first, c.s.in
		c.ends = time.Now().Add(c.s.first)
	}
	return g, err
}

func (s *shortStore) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	results := make([]store.Result, len(claims))
	time.Sleep(s.slow)
	for i, sc := range claims {
		c := sc.(*shortClaim)
		switch {
		case s.down.Load():
			results[i].Err = store.ErrUnavailable
		case !c.ends.IsZero() && time.Now().After(c.ends):
			results[i].Err = &store.LostError{}
		default:
			results[i].Grant, results[i].Err = c.Claim.Extend(ctx)
			s.extended.Add(1)
			c.ends = time.Time{}
		}
	}
	return results
}

func (c *shortClaim) Extend(ctx context.Context) (store.Grant, error) {
	r := c.s.ExtendMany(ctx, []store.Claim{c})[0]
	return r.Grant, r.Err
}

func (s *shortStore) Ticket(c store.Claim) (string, error) {
	return s.Store.Ticket(c.(*shortClaim).Claim)
}

func (s *shortStore) Adopt(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	c, g, err := s.Store.Adopt(ctx, ticket)
	return &shortClaim{Claim: c, s: s}, g, err
}

func shortBubble(t *testing.T, o Options, test func(t *testing.T, s *shortStore, locks *Locker, events *record)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &shortStore{Store: memstore.New(), first: 400 * time.Millisecond, in: 10 * time.Millisecond}
		events := &record{}
		o.Observer = events
		test(t, s, locker(t, s, &o), events)
	})
}

// A grant for a shorter time is extended when the store says, and the lease then has its ttl. A short
// section sends no extension.
func TestShortGrant(t *testing.T) {
	shortBubble(t, Options{TTL: 10 * time.Second, Margin: time.Second / 10}, func(t *testing.T, s *shortStore, locks *Locker, events *record) {
		l, err := locks.Acquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if v := l.Validity(); v > 300*time.Millisecond || v < 250*time.Millisecond {
			t.Errorf("valid for %v at first", v)
		}
		time.Sleep(9 * time.Millisecond)
		if n := s.extended.Load(); n > 0 {
			t.Errorf("extended %d times before the store's time", n)
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		if v := l.Validity(); v < 9*time.Second || s.extended.Load() != 1 {
			t.Errorf("valid for %v after %d extensions", v, s.extended.Load())
		}
		time.Sleep(3 * time.Second)
		if n := s.extended.Load(); n != 1 {
			t.Errorf("%d extensions in a third of the ttl", n)
		}
		time.Sleep(30 * time.Second)
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
		before := s.extended.Load()
		if err := locks.Do(t.Context(), "k", func(context.Context, *Lease) error { time.Sleep(8 * time.Millisecond); return nil }); err != nil {
			t.Error(err)
		}
		if n := s.extended.Load() - before; n > 0 {
			t.Errorf("%d extensions of a short section", n)
		}
		if n := len(told[AtRisk](events)) + len(told[Lost](events)); n > 0 {
			t.Errorf("told of %d risks and losses", n)
		}
	})
}

// Whoever extends by hand, or does not wait, gets the whole ttl at once; and so does one whose margin
// leaves too little.
func TestWholeGrant(t *testing.T) {
	for _, o := range []Options{{TTL: 10 * time.Second, NoExtend: true}, {TTL: 10 * time.Second, Margin: 350 * time.Millisecond}} {
		shortBubble(t, o, func(t *testing.T, s *shortStore, locks *Locker, _ *record) {
			l, err := locks.Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			if v := l.Validity(); v < 9*time.Second {
				t.Errorf("%+v: valid for %v", o, v)
			}
			l.Release(t.Context())
		})
	}
	shortBubble(t, Options{TTL: 10 * time.Second}, func(t *testing.T, s *shortStore, locks *Locker, _ *record) {
		l, err := locks.TryAcquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if v := l.Validity(); v < 9*time.Second {
			t.Errorf("TryAcquire: valid for %v", v)
		}
		l.Release(t.Context())
	})
}

// Extensions that fail for a while cost nothing; where none gets through, the lease is lost when the
// short grant ends.
func TestShortGrantAtRisk(t *testing.T) {
	for _, mended := range []bool{true, false} {
		shortBubble(t, Options{TTL: 10 * time.Second}, func(t *testing.T, s *shortStore, locks *Locker, events *record) {
			s.down.Store(true)
			l, err := locks.Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(300 * time.Millisecond)
			s.down.Store(!mended)
			time.Sleep(200 * time.Millisecond)
			synctest.Wait()
			if err := l.Err(); (err == nil) != mended || err != nil && !errors.Is(err, ErrLost) {
				t.Errorf("mended %t: %v", mended, err)
			}
			if n := len(told[AtRisk](events)); n == 0 {
				t.Error("nobody was told of the risk")
			}
			if n := len(told[Lost](events)); (n == 0) != mended {
				t.Errorf("mended %t: told of %d losses", mended, n)
			}
			l.Release(t.Context())
		})
	}
}

// A ticket is one of the whole ttl; where that cannot be had, there is none, and the lease goes on.
func TestTicketOfShortGrant(t *testing.T) {
	shortBubble(t, Options{TTL: 10 * time.Second}, func(t *testing.T, s *shortStore, locks *Locker, _ *record) {
		l, err := locks.Acquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		s.down.Store(true)
		if _, err := l.Ticket(); !errors.Is(err, ErrUnavailable) || l.Err() != nil {
			t.Errorf("Ticket: %v, lease %v", err, l.Err())
		}
		s.down.Store(false)
		text, err := l.Ticket()
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		l, err = locks.Adopt(t.Context(), text)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Many short grants at once, on a store that takes its time: none is lost.
func TestManyShortGrants(t *testing.T) {
	shortBubble(t, Options{TTL: 10 * time.Second}, func(t *testing.T, s *shortStore, locks *Locker, _ *record) {
		s.slow = 100 * time.Millisecond
		var leases []*Lease
		for i := range 3000 {
			l, err := locks.Acquire(t.Context(), fmt.Sprint(i))
			if err != nil {
				t.Fatal(err)
			}
			leases = append(leases, l)
			if i%3 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		time.Sleep(20 * time.Second)
		for i, l := range leases {
			if l.Err() != nil {
				t.Fatalf("%d: %v", i, l.Err())
			}
			l.Release(t.Context())
		}
	})
}

// A machine that sleeps before the first extension finds the lease lost.
func TestSleepAfterShortGrant(t *testing.T) {
	shortBubble(t, Options{TTL: 10 * time.Second}, func(t *testing.T, s *shortStore, locks *Locker, _ *record) {
		began, asleep := time.Now(), new(atomic.Int64)
		locks.f.clk = clock.Clock{Boot: func() time.Duration { return time.Since(began) + time.Duration(asleep.Load()) }}
		l, err := locks.Acquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		asleep.Store(int64(time.Second))
		if err := l.Err(); !errors.Is(err, ErrLost) || l.Validity() > 0 {
			t.Errorf("after a second of sleep: %v, valid for %v", err, l.Validity())
		}
		l.Release(t.Context())
	})
}
