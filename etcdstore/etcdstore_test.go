package etcdstore

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// away is a client whose servers are away. It connects when it is asked.
func away(t testing.TB) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:2", "127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestOptions(t *testing.T) {
	c := away(t)
	for field, o := range map[string]Options{
		"Epoch":   {Epoch: -1},
		"Prefix":  {Prefix: "a\x00b"},
		"Session": {Session: time.Second},
	} {
		var invalid *store.InvalidError
		if _, err := New(c, o); !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("%+v answers %v, want an *InvalidError about %s", o, err, field)
		}
	}
	for _, o := range []Options{{Epoch: MaxEpoch + 1}, {Prefix: strings.Repeat("p", 257)}, {Session: -1}, {Session: maxTTL + 1}} {
		if _, err := New(c, o); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("%+v answers %v, want ErrInvalid", o, err)
		}
	}
	if _, err := New(nil, Options{}); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("no client answers %v, want ErrInvalid", err)
	}
	if _, err := NewGuard(nil, ""); !errors.Is(err, fence.ErrInvalid) {
		t.Errorf("a guard without client answers %v, want ErrInvalid", err)
	}
	if _, err := NewGuard(c, "\x00"); !errors.Is(err, fence.ErrInvalid) {
		t.Errorf("a guard with a bad prefix answers %v, want ErrInvalid", err)
	}
}

// Programs find out that they have the same locks, whatever the order of their endpoints.
func TestFingerprint(t *testing.T) {
	c := away(t)
	print := func(o Options) string {
		s, err := New(c, o)
		if err != nil {
			t.Fatal(err)
		}
		return s.Info().Fingerprint
	}
	plain := print(Options{})
	if plain != "etcd:127.0.0.1:1,127.0.0.1:2/holdfast/" || plain != print(Options{Epoch: 3}) {
		t.Errorf("the fingerprint is %q, and %q with an epoch", plain, print(Options{Epoch: 3}))
	}
	if named := print(Options{Cluster: "main", Prefix: "/x/"}); named != "etcd:main/x/" {
		t.Errorf("the fingerprint of a named cluster is %q", named)
	}
}

// Whatever is wrong with a claim is told before anything is sent.
func TestRefusedBeforeIO(t *testing.T) {
	s, err := New(away(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	shared, err := New(away(t), Options{Session: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []store.Claim{
		s.Claim("", store.ClaimOptions{TTL: time.Minute}),
		s.Claim("k", store.ClaimOptions{TTL: time.Second}),
		s.Claim("k", store.ClaimOptions{TTL: maxTTL + 1}),
		shared.Claim("k", store.ClaimOptions{TTL: time.Minute + 1}),
	} {
		start := time.Now()
		if _, err := c.Try(t.Context()); !errors.Is(err, store.ErrInvalid) || time.Since(start) > time.Second {
			t.Errorf("a bad claim answers %v after %v, want ErrInvalid at once", err, time.Since(start))
		}
	}
	for text, ticket := range map[string]store.Ticket{
		"cluster":       {Store: "other", Owner: newOwner(5), Stamp: 7, Boot: anyBoot},
		"lacks":         {Store: s.info.Fingerprint, Owner: "x", Stamp: 7, Boot: anyBoot},
		"lacks what":    {Store: s.info.Fingerprint, Owner: newOwner(5), Boot: anyBoot},
		"a ticket of":   {Store: s.info.Fingerprint, Owner: newOwner(5), Stamp: 7, Boot: "b"},
		"at least 2s":   {Store: s.info.Fingerprint, Owner: newOwner(5), Stamp: 7, Boot: anyBoot, TTL: time.Second},
		"TTL \"87601h0": {Store: s.info.Fingerprint, Owner: newOwner(5), Stamp: 7, Boot: anyBoot, TTL: maxTTL + time.Hour},
	} {
		ticket.Key, ticket.Token = []byte("k"), 7
		if ticket.TTL == 0 {
			ticket.TTL = time.Minute
		}
		if _, _, err := s.Adopt(t.Context(), ticket.String()); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), text) {
			t.Errorf("a ticket %+v answers %v, want ErrInvalid with %q", ticket, err, text)
		}
	}
	other, err := New(away(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := other.Claim("k", store.ClaimOptions{TTL: time.Minute})
	if _, err := s.Ticket(c); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Ticket of another store's claim answers %v, want ErrInvalid", err)
	}
	if r := s.ExtendMany(t.Context(), []store.Claim{c}); !errors.Is(r[0].Err, store.ErrInvalid) {
		t.Errorf("ExtendMany of another store's claim answers %v, want ErrInvalid", r[0].Err)
	}
}

// A server that cannot be reached has taken nothing, and calls return nevertheless.
func TestUnreachable(t *testing.T) {
	s, err := New(away(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := s.Claim("k", store.ClaimOptions{TTL: time.Minute})
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := c.Try(ctx); err == nil || errors.Is(err, store.ErrHeld) || errors.Is(err, store.ErrInvalid) {
		t.Errorf("Try answers %v", err)
	}
	if _, err := s.Inspect(t.Context(), "k"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Inspect answers %v, want ErrUnavailable", err)
	}
	if err := c.Release(t.Context()); err != nil {
		t.Errorf("Release of a claim that took nothing answers %v", err)
	}
}

func TestTokens(t *testing.T) {
	for want, got := range map[fence.Token]fence.Token{
		7:             token(0, 7),
		1<<48 | 7:     token(1, 7),
		math.MaxInt64: token(MaxEpoch, 1<<epochShift-1),
	} {
		if got != want {
			t.Errorf("token %d, want %d", got, want)
		}
	}
	if token(1, 1) <= token(0, 1<<epochShift-1) {
		t.Error("the first token of an epoch comes before the last one of the epoch before")
	}
}

// The revision may stand still and grow; where it goes back, or has no room, it is told.
func TestGrew(t *testing.T) {
	var s Store
	for _, c := range []struct {
		before, now int64
		ok          bool
	}{{0, 5, true}, {5, 5, true}, {5, 9, true}, {5, 7, true}, {9, 8, false}, {9, 1 << 48, false}, {9, 10, true}} {
		err := s.grew(c.before, c.now)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, store.ErrInvalid) {
			t.Errorf("revision %d after %d answers %v", c.now, c.before, err)
		}
	}
	if s.seen.Load() != 10 {
		t.Errorf("the largest revision seen is %d, want 10", s.seen.Load())
	}
}

func TestSeconds(t *testing.T) {
	for d, want := range map[time.Duration]int64{1: 1, time.Second: 1, time.Second + 1: 2, 2 * time.Second: 2, maxTTL: int64(maxTTL / time.Second)} {
		if got := seconds(d); got != want {
			t.Errorf("seconds(%v) = %d, want %d", d, got, want)
		}
	}
}

func TestOwners(t *testing.T) {
	for range 100 {
		lease := leaseID()
		if lease <= 0 {
			t.Fatalf("lease id %d", lease)
		}
		if got := leaseOf(newOwner(lease)); got != lease {
			t.Fatalf("the owner of lease %x names %x", lease, got)
		}
	}
	for _, owner := range []string{"", "x", "0", "0000000000000000.x", "-000000000000001.x", "8000000000000000.x", "00000000000000011.x"} {
		if lease := leaseOf(owner); lease != 0 {
			t.Errorf("owner %q names lease %x", owner, lease)
		}
	}
}

// A key of any bytes comes back from its value, and anything else in its place is foreign.
func FuzzRecord(f *testing.F) {
	f.Add("k", "label", []byte("{}"))
	f.Add("\xff\x01", "l\xff", []byte(`{"key":"k","owner":"o"}`))
	f.Add("näme", strings.Repeat("l", 100), []byte(`{"key64":"AA==","owner":"o","since":-1}`))
	f.Fuzz(func(t *testing.T, key, label string, odd []byte) {
		if key == "" {
			return
		}
		e := newEntry(&mvccpb.KeyValue{Value: newRecord(key, "o.1", label, 3).text(), CreateRevision: 7, ModRevision: 7, Lease: 5})
		if e.foreign || e.Key != key || e.Owner != "o.1" || e.Epoch != 3 || e.Broken || len(e.Label) > 3*maxLabel {
			t.Errorf("key %q with label %q reads as %+v", key, label, e)
		}
		if h := e.holder(key, time.Second); h.Token != token(3, 7) || h.Held < 0 || h.NoTTL || h.Foreign {
			t.Errorf("the holder is %+v", h)
		}
		if h := newEntry(&mvccpb.KeyValue{Value: odd}).holder("k", 0); h.Foreign == (h.Token != 0) && h.Foreign || h.Held < 0 {
			t.Errorf("the value %q is of the holder %+v", odd, h)
		}
	})
}

// A mark is read as it was written, and nothing else is one.
func FuzzMark(f *testing.F) {
	for _, s := range []string{"", "0", padded(1), padded(math.MaxInt64), "9999999999999999999", "00000000000000000000", "+0000000000000000001", padded(5) + " "} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		got, err := seenIn("r", []byte(value))
		if err == nil && (padded(got) != value || got <= 0) || err != nil && !errors.Is(err, fence.ErrInvalid) {
			t.Errorf("the mark %q reads as %v, %v", value, got, err)
		}
	})
}

func TestMarksAreOrdered(t *testing.T) {
	tokens := []fence.Token{1, 9, 10, 99, 1 << 31, 1 << 48, 1<<53 + 1, math.MaxInt64 - 1, math.MaxInt64}
	for i, token := range tokens {
		if got, err := seenIn("r", []byte(padded(token))); err != nil || got != token {
			t.Errorf("the mark of %v reads as %v, %v", token, got, err)
		}
		if i > 0 && padded(tokens[i-1]) >= padded(token) {
			t.Errorf("the mark of %v is not below that of %v", tokens[i-1], token)
		}
	}
}

// The reaper revokes until it is answered, one after another, gives up after a while, and is gone when
// nothing is left.
func TestReaper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fails := 5
		revoked := map[int64]int{}
		r := &reaper[int64]{life: t.Context(), most: 1, end: func(_ context.Context, leases []int64) error {
			lease := leases[0]
			if fails > 0 {
				fails--
				return uncertain(errNoAnswer)
			}
			revoked[lease]++
			if lease == 2 {
				return errNoLease
			}
			return nil
		}}
		r.add(1, time.Hour)
		r.add(2, time.Hour)
		r.add(1, time.Hour)
		time.Sleep(time.Minute)
		synctest.Wait()
		if fails != 0 || revoked[1] != 1 || revoked[2] != 1 || r.idle != nil {
			t.Errorf("%d failures are left, the leases were revoked %v, running %v", fails, revoked, r.idle != nil)
		}
		fails = math.MaxInt
		r.add(3, 3*time.Second)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if r.idle != nil || revoked[3] != 0 {
			t.Error("a lease that has ended by itself is still to be revoked")
		}
		tried := math.MaxInt - fails
		if tried < 2 || tried > 10 {
			t.Errorf("revoked %d times in 3s", tried)
		}
	})
}

// A call returns when its context is done, whatever the client does, and does not know the outcome.
func TestRace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ended atomic.Int32
		block := make(chan struct{})
		hang := func(context.Context) (int, error) { <-block; return 7, nil }
		for _, limit := range []time.Duration{time.Second, time.Hour} {
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			start := time.Now()
			_, err := race(ctx, hang, func() { ended.Add(1) })
			if took := time.Since(start); !errors.Is(err, store.ErrUncertain) || took > min(limit, callLimit)+answerGrace {
				t.Errorf("a call that hangs answers %v after %v", err, took)
			}
			cancel()
		}
		if ended.Load() != 0 {
			t.Error("a call that hangs has ended")
		}
		close(block)
		synctest.Wait()
		if ended.Load() != 2 {
			t.Error("nobody is told that a late call has ended")
		}
		if v, err := race(t.Context(), func(context.Context) (int, error) { return 7, nil }, func() {}); v != 7 || err != nil {
			t.Errorf("a call answers %v, %v", v, err)
		}
	})
}

// A store has one session, until it has ended, is idle past its time, or is full of void keys.
func TestCurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Store{session: minTTL}
		n := s.current()
		if s.current() != n || n.id <= 0 {
			t.Fatalf("the session is not shared: %+v", n)
		}
		n.made, n.sent, n.asked, n.ttl = true, time.Now(), time.Now(), minTTL
		c := &claim{s: s}
		n.add(c)
		time.Sleep(2 * minTTL)
		if s.current() != n {
			t.Error("a session is given up while a claim may have keys on it")
		}
		n.drop(c)
		if s.current() == n || !n.ended {
			t.Error("a session is used that was idle for longer than it lives")
		}
		n = s.current()
		n.voids = maxVoids
		if s.current() == n || n.ended {
			t.Error("a session that is full of void keys is used for new claims, or has ended for the others")
		}
		n = s.current()
		n.end()
		if s.current() == n {
			t.Error("a session that has ended is used")
		}
		n.add(c)
		if len(n.claims) != 0 {
			t.Error("a session that has ended keeps claims")
		}
	})
}

// What the servers have promised counts from when it was asked for. It suffices where no more than
// a tenth is missing, and not where it is in doubt.
func TestEnough(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &session{s: &Store{session: 20 * time.Second}}
		if left, ok := n.enough(minTTL, time.Now()); left != 0 || ok {
			t.Errorf("a session that was not made lives for %v, %v", left, ok)
		}
		n.made, n.sent, n.ttl = true, time.Now(), 20*time.Second
		time.Sleep(2 * time.Second)
		for ttl, want := range map[time.Duration]bool{minTTL: true, 18 * time.Second: true, 20 * time.Second: true, 20*time.Second + time.Second: false} {
			if left, ok := n.enough(ttl, time.Now()); left != 18*time.Second || ok != want {
				t.Errorf("for a ttl of %v %v are left, enough: %v", ttl, left, ok)
			}
		}
		n.doubt()
		if left, ok := n.enough(minTTL, time.Now()); left != 0 || ok {
			t.Errorf("a session that is in doubt lives for %v, %v", left, ok)
		}
	})
}

// What lasts is ended however long that takes, and together.
func TestReaperOfWhatLasts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lasts, answers atomic.Bool
		lasts.Store(true)
		var sizes []int
		r := &reaper[int]{life: t.Context(), most: 3, lasts: func(int) bool { return lasts.Load() }, end: func(_ context.Context, some []int) error {
			if !answers.Load() {
				return uncertain(errNoAnswer)
			}
			sizes = append(sizes, len(some))
			return nil
		}}
		for k := range 7 {
			r.add(k, time.Second)
		}
		time.Sleep(time.Hour)
		answers.Store(true)
		time.Sleep(2 * maxReap)
		synctest.Wait()
		if len(sizes) != 3 || sizes[0]+sizes[1]+sizes[2] != 7 || r.idle != nil {
			t.Errorf("ended %v at once, running %v", sizes, r.idle != nil)
		}
		answers.Store(false)
		lasts.Store(false)
		r.add(8, time.Second)
		time.Sleep(time.Minute)
		synctest.Wait()
		if r.idle != nil {
			t.Error("what has ended by itself is still to be ended")
		}
	})
}

// When the client is closed nothing is tried any more, and nobody waits for it.
func TestReaperWithoutClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		life, closing := context.WithCancel(t.Context())
		var tried atomic.Int32
		r := &reaper[int]{life: life, most: 1, lasts: func(int) bool { return true }, end: func(context.Context, []int) error {
			tried.Add(1)
			return uncertain(errNoAnswer)
		}}
		if err := r.wait(t.Context()); err != nil {
			t.Errorf("with nothing to do: %v", err)
		}
		r.add(1, time.Hour)
		short, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := r.wait(short); !errors.Is(err, context.DeadlineExceeded) || tried.Load() == 0 {
			t.Errorf("with something left: %v, tried %d times", err, tried.Load())
		}
		closing()
		if err := r.wait(t.Context()); err != nil {
			t.Errorf("without client: %v", err)
		}
		before := tried.Load()
		r.add(2, time.Hour)
		time.Sleep(time.Hour)
		synctest.Wait()
		if tried.Load() != before || r.idle != nil || len(r.left) != 0 {
			t.Errorf("tried %d times more without client, %d are left", tried.Load()-before, len(r.left))
		}
	})
}
