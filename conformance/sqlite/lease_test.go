package sqlite

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// Leases of another boot are dead, however long they had to live, and the token grows.
func TestLeaseOfAnotherBootIsDead(t *testing.T) {
	s, db := open(t, lockFile(t))
	ctx := context.Background()
	a := claim(s, "k", time.Hour)
	g := grant(t, a)
	mustBeHeld(t, s, "k")
	exec(t, db, `UPDATE holdfast_leases SET boot = 'another boot'`)
	if h, err := s.Inspect(ctx, "k"); err != nil || h.Owner != "" {
		t.Errorf("Inspect = %+v, %v, want nobody", h, err)
	}
	if _, err := a.Extend(ctx); !errors.Is(err, store.ErrLost) {
		t.Errorf("Extend of a lease of another boot: %v", err)
	}
	b := claim(s, "k", time.Hour)
	if next := grant(t, b); next.Token <= g.Token {
		t.Errorf("token %v after %v", next.Token, g.Token)
	}
	if _, err := a.Extend(ctx); !errors.Is(err, store.ErrLost) {
		t.Errorf("Extend: %v", err)
	}
	if err := a.Release(ctx); !errors.Is(err, store.ErrLost) || !errors.Is(err, store.ErrHeld) {
		t.Errorf("Release after another's grant: %v", err)
	}
	mustBeHeld(t, s, "k")
}

// The wall clock only pushes tokens up: with a token from the future they still grow by
// one, as they do when the clock goes back.
func TestTokenGrowsWithoutTheClock(t *testing.T) {
	path := lockFile(t)
	s, db := open(t, path)
	a := claim(s, "k", time.Hour)
	if g := grant(t, a); time.Since(time.UnixMicro(int64(g.Token))).Abs() > time.Minute {
		t.Errorf("the first token is %v, want the time in microseconds", g.Token)
	}
	release(t, a)
	future := time.Now().AddDate(50, 0, 0).UnixMicro()
	exec(t, db, `UPDATE holdfast_leases SET token = ?`, future)
	for want := fence.Token(future + 1); want < fence.Token(future+4); want++ {
		s, db := open(t, path) // also over reopening
		c := claim(s, "k", time.Hour)
		if g := grant(t, c); g.Token != want {
			t.Errorf("token = %v, want %v", g.Token, want)
		}
		release(t, c)
		db.Close()
	}
	exec(t, db, `UPDATE holdfast_leases SET token = ?`, int64(math.MaxInt64))
	if g, err := claim(s, "k", time.Hour).Try(context.Background()); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Try behind the last token = %+v, %v", g, err)
	}
}

// A row outlives its lease, and with it the memory of the token.
func TestRowStays(t *testing.T) {
	s, db := open(t, lockFile(t))
	c := claim(s, "k", time.Hour)
	g := grant(t, c)
	release(t, c)
	if n := query[int64](t, db, `SELECT token FROM holdfast_leases WHERE key = CAST('k' AS BLOB) AND owner = ''`); n != int64(g.Token) {
		t.Errorf("the row has token %d, want %v", n, g.Token)
	}
}

// CLK-06: a process that starts after the end of a dead holder's ttl is granted at its first try.
func TestFirstTryAfterDeadHolder(t *testing.T) {
	path := lockFile(t)
	s, db := open(t, path)
	grant(t, claim(s, "k", store.MinTTL))
	db.Close()
	time.Sleep(2 * store.MinTTL)
	later, _ := open(t, path)
	grant(t, claim(later, "k", time.Minute))
}

// FRK-05: other handles of the file may be opened and closed while a lock is held, in
// the same process too.
func TestClosingAnotherHandleReleasesNothing(t *testing.T) {
	path := lockFile(t)
	s, _ := open(t, path)
	c := claim(s, "k", time.Hour)
	grant(t, c)
	for range 3 {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		other, db := open(t, path)
		mustBeHeld(t, other, "k")
		db.Close()
	}
	if _, err := c.Extend(context.Background()); err != nil {
		t.Errorf("Extend: %v", err)
	}
	child(t, "refused", path, "k").mustSucceed()
}

// KEY-04: keys are bytes.
func TestKeysAreBytes(t *testing.T) {
	s, db := open(t, lockFile(t))
	keys := []string{"Job", "job", "JOB", "\u00e9", "e\u0301", strings.Repeat("漢", 64), "a", "a/b", "a/", "a/b/c",
		"x\ny", "x y", "x y ", "100%", "it's", `"`, "..", "../a", ".", "/", ":", "a:b", "🔒", "\xff\xfe", "\xff", "1", "01",
		"; DROP TABLE holdfast_leases", strings.Repeat("k", store.MaxKeyLen)}
	for _, key := range keys {
		grant(t, claim(s, key, time.Hour))
	}
	for _, key := range keys {
		mustBeHeld(t, s, key)
	}
	if n := query[int](t, db, `SELECT count(*) FROM holdfast_leases`); n != len(keys) {
		t.Errorf("%d rows for %d keys", n, len(keys))
	}
	seen := map[string]bool{}
	for h, err := range s.List(context.Background(), "") {
		if err != nil {
			t.Fatal(err)
		}
		seen[h.Key] = true
	}
	for _, key := range keys {
		if !seen[key] {
			t.Errorf("List leaves %q out", key)
		}
	}
	for _, key := range []string{"", "a\x00b", strings.Repeat("k", store.MaxKeyLen+1), "k:fence", "k:queue"} {
		if _, err := claim(s, key, time.Hour).Try(context.Background()); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("Try of key %q: %v, want ErrInvalid", key, err)
		}
	}
}

// KEY-05: two databases do not interfere, and neither do keys that begin with another.
func TestDatabasesAreIndependent(t *testing.T) {
	one, _ := open(t, lockFile(t))
	two, _ := open(t, lockFile(t))
	grant(t, claim(one, "a", time.Hour))
	grant(t, claim(one, "a:b", time.Hour))
	b := claim(two, "a", time.Hour)
	grant(t, b)
	mustBeHeld(t, one, "a")
	release(t, b)
	mustBeHeld(t, one, "a")
}

// TTL-09: no ttl wraps around.
func TestTTLAtTheEdges(t *testing.T) {
	s, db := open(t, lockFile(t))
	ctx := context.Background()
	for _, ttl := range []time.Duration{math.MinInt64, -1, 0, 1, store.MinTTL - 1, s.Info().MaxTTL + 1, math.MaxInt64} {
		if _, err := claim(s, "k", ttl).Try(ctx); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("Try with a ttl of %v: %v, want ErrInvalid", ttl, err)
		}
	}
	c := claim(s, "k", s.Info().MaxTTL)
	if g := grant(t, c); g.TTL < s.Info().MaxTTL {
		t.Errorf("a ttl of %v was answered by %v", s.Info().MaxTTL, g.TTL)
	}
	if _, err := c.Extend(ctx); err != nil {
		t.Errorf("Extend: %v", err)
	}
	if expires := query[int64](t, db, `SELECT expires FROM holdfast_leases`); expires < int64(s.Info().MaxTTL) {
		t.Errorf("the lease ends at %d", expires)
	}
}

// A lapsed lease is not extended, though nobody has taken the key; and a claim whose
// loss is known takes nothing any more.
func TestLapsedLeaseIsLost(t *testing.T) {
	s, _ := open(t, lockFile(t))
	ctx := context.Background()
	c := claim(s, "k", store.MinTTL)
	grant(t, c)
	time.Sleep(2 * store.MinTTL)
	for range 2 {
		if _, err := c.Extend(ctx); !errors.Is(err, store.ErrLost) || errors.Is(err, store.ErrHeld) {
			t.Errorf("Extend of a lapsed lease: %v", err)
		}
	}
	if _, err := c.Try(ctx); !errors.Is(err, store.ErrLost) {
		t.Errorf("Try after a loss: %v", err)
	}
	if err := c.Release(ctx); !errors.Is(err, store.ErrLost) {
		t.Errorf("Release of a lapsed lease: %v", err)
	}
}

// Break takes the key at once from its holder, and gives it to nobody before the
// holder's ttl has ended.
func TestBreak(t *testing.T) {
	s, _ := open(t, lockFile(t))
	ctx := context.Background()
	a := claim(s, "k", 5*store.MinTTL)
	start := time.Now()
	g := grant(t, a)
	h, err := s.Inspect(ctx, "k")
	if err != nil || h.Owner != g.Owner {
		t.Fatalf("Inspect = %+v, %v", h, err)
	}
	other := h
	other.Owner = "someone else"
	if err := s.Break(ctx, other); !errors.Is(err, store.ErrHeld) {
		t.Errorf("Break of another owner: %v", err)
	}
	for range 2 {
		if err := s.Break(ctx, h); err != nil {
			t.Fatalf("Break: %v", err)
		}
	}
	if _, err := a.Extend(ctx); !errors.Is(err, store.ErrLost) {
		t.Errorf("Extend after Break: %v", err)
	}
	if err := a.Release(ctx); !errors.Is(err, store.ErrLost) {
		t.Errorf("Release after Break: %v", err)
	}
	broken, err := s.Inspect(ctx, "k")
	if err != nil || broken.Owner == "" || broken.Owner == h.Owner || broken.Token <= h.Token {
		t.Errorf("Inspect after Break = %+v, %v", broken, err)
	}
	b := claim(s, "k", time.Minute)
	for {
		next, err := b.Try(ctx)
		if err == nil {
			if early := time.Since(start); early < store.Validity(g.TTL, 0) {
				t.Errorf("another was granted the key %v after the grant of %v", early, g.TTL)
			}
			if next.Token <= broken.Token {
				t.Errorf("token %v after %v", next.Token, broken.Token)
			}
			break
		}
		if !errors.Is(err, store.ErrHeld) || time.Since(start) > 20*store.MinTTL {
			t.Fatalf("Try after Break: %v", err)
		}
		time.Sleep(store.MinTTL / 10)
	}
	if err := s.Break(ctx, store.Holder{Key: "nobody's", Owner: "x"}); !errors.Is(err, store.ErrLost) {
		t.Errorf("Break of a key that nobody holds: %v", err)
	}
	if err := s.Break(ctx, store.Holder{Key: "k"}); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Break of no owner: %v", err)
	}
}

// A waiter of the same Store is woken by the release, long before it would look again by
// itself; a waiter elsewhere sees it by looking.
func TestWait(t *testing.T) {
	path := lockFile(t)
	s, _ := open(t, path)
	other, _ := open(t, path)
	for _, waiting := range []store.Store{s, other} {
		a := claim(s, "k", time.Hour)
		grant(t, a)
		b := waiting.Claim("k", store.ClaimOptions{TTL: time.Minute, Wait: true})
		var held *store.HeldError
		if _, err := b.Try(context.Background()); !errors.As(err, &held) {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		if err := b.(store.Waiter).Wait(ctx, held); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait for a key that stays held: %v", err)
		}
		cancel()
		woken := make(chan error, 1)
		go func() { woken <- b.(store.Waiter).Wait(context.Background(), held) }()
		time.Sleep(10 * time.Millisecond)
		release(t, a)
		select {
		case err := <-woken:
			if err != nil {
				t.Errorf("Wait: %v", err)
			}
		case <-time.After(time.Minute):
			t.Fatal("Wait does not see the release")
		}
		grant(t, b)
		release(t, b)
	}
	held := &store.HeldError{Holder: store.Holder{TTL: store.MinTTL}}
	grant(t, claim(s, "k", time.Hour))
	start := time.Now()
	if err := claim(s, "k", time.Hour).(store.Waiter).Wait(context.Background(), held); err != nil || time.Since(start) < store.MinTTL {
		t.Errorf("Wait for the end of a ttl: %v after %v", err, time.Since(start))
	}
}

// One connection is enough, also for List while the caller uses the store.
func TestOneConnection(t *testing.T) {
	s, db := open(t, lockFile(t))
	db.SetMaxOpenConns(1)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	const n = 300 // more than a page
	claims := make([]store.Claim, n)
	for i := range claims {
		claims[i] = claim(s, fmt.Sprintf("p/%03d", i), time.Hour)
		grant(t, claims[i])
	}
	grant(t, claim(s, "q", time.Hour))
	grant(t, claim(s, "P/1", time.Hour))
	i := 0
	for h, err := range s.List(ctx, "p/") {
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("p/%03d", i); h.Key != want {
			t.Fatalf("List answers %q, want %q", h.Key, want)
		}
		if _, err := s.Inspect(ctx, h.Key); err != nil {
			t.Fatal(err)
		}
		i++
	}
	if i != n {
		t.Errorf("List answers %d holders, want %d", i, n)
	}
	for i, r := range s.ExtendMany(ctx, claims) {
		if r.Err != nil {
			t.Fatalf("extension %d of a batch: %v", i, r.Err)
		}
	}
	foreign, _ := open(t, lockFile(t))
	if r := s.ExtendMany(ctx, []store.Claim{claim(foreign, "k", time.Hour)}); !errors.Is(r[0].Err, store.ErrInvalid) {
		t.Errorf("ExtendMany of another store's claim: %v", r[0].Err)
	}
}
