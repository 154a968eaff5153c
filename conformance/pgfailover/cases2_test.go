package pgfailover

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
)

// FAI-06: the network splits, the replica is promoted, and the old primary serves on. Two clients,
// one on each side, hold the key and write in turns. The resource lets through growing tokens
// only; on which side a token was given does not matter, and no two are equal.
func TestTwoPrimaries(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	ctx := kit.Context(t, 5*time.Minute)
	a := newLocker(t, engine.DB(t, engine.DSN(p.primary, "")))
	first, err := a.Acquire(ctx, "k") // so that the table is on both sides
	if err != nil {
		t.Fatal(err)
	}
	release(t, first)
	replica := engine.DB(t, engine.DSN(p.replica, ""))
	servertest.Eventually(t, patience, func() error {
		if owner, _ := row(t, replica, "k"); owner != "" {
			return errors.New("the replica has not heard of the release")
		}
		return nil
	})
	p.link.BlackHole()
	p.replica.Promote()
	b := newLocker(t, engine.DB(t, engine.DSN(p.replica, "")))
	guard := newGuard(t, kit.OpenSQLite(t, t.TempDir()+"/resource.db"), sqlfence.SQLite)
	write := func(token fence.Token) error {
		return guard.Tx(ctx, "resource", token, func(*sql.Tx) error { return nil })
	}
	seen := map[fence.Token]bool{}
	for i := range kit.Count(6, 100) {
		older, newer := a, b
		if i%2 == 1 {
			older, newer = b, a
		}
		one, err := older.Acquire(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		two, err := newer.Acquire(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		if one.Err() != nil || two.Err() != nil {
			t.Fatalf("the two holders are told %v and %v: the fault did not happen", one.Err(), two.Err())
		}
		if two.Token() <= one.Token() || seen[one.Token()] || seen[two.Token()] { // the two servers have one clock
			t.Errorf("token %v and then %v", one.Token(), two.Token())
		}
		seen[one.Token()], seen[two.Token()] = true, true
		for step, w := range []struct {
			token fence.Token
			stale bool
		}{{one.Token(), false}, {two.Token(), false}, {one.Token(), true}, {two.Token(), false}} {
			if err := write(w.token); errors.Is(err, fence.ErrStale) != w.stale || err != nil && !w.stale {
				t.Errorf("write %d, with token %v: %v; stale: %v", step, w.token, err, w.stale)
			}
		}
		release(t, one)
		release(t, two)
	}
	// One side is given up. What the resource has seen stays, and the next token is larger.
	p.primary.Kill()
	last, err := b.Acquire(ctx, "k")
	if err != nil {
		t.Fatal(err)
	}
	if err := write(last.Token()); err != nil {
		t.Errorf("the first write after the split: %v", err)
	}
	release(t, last)
}

// FAI-05: the primary waits for its replica, which is away. No acquisition says that it succeeded,
// and none leaves the key behind.
func TestSynchronousReplicaAway(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	admin := engine.DB(t, engine.DSN(p.primary, ""))
	s := engine.New(t, engine.DB(t, engine.DSN(p.primary, "")), sqlstore.Options{})
	sqlrig.Free(t, s, "k")
	sqlrig.Exec(t, admin, "ALTER SYSTEM SET synchronous_standby_names = '*'")
	sqlrig.Exec(t, admin, "SELECT pg_reload_conf()")
	servertest.Eventually(t, patience, func() error {
		if sync := sqlrig.Query[string](t, admin, "SELECT coalesce(max(sync_state), '') FROM pg_stat_replication"); sync != "sync" {
			return fmt.Errorf("the replica is %q", sync)
		}
		return nil
	})
	sqlrig.Free(t, s, "k")
	p.link.BlackHole()
	locks := newLocker(t, engine.DB(t, engine.DSN(p.primary, "")))
	for range kit.Count(2, 20) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		lease, err := locks.Acquire(ctx, "k")
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Acquire while the replica is away: %v, %v, want DeadlineExceeded", lease, err)
		}
	}
	servertest.Eventually(t, patience, func() error { // the ttl of an acquisition is two minutes
		if owner, _ := row(t, admin, "k"); owner != "" {
			return fmt.Errorf("%q, of whom nobody knows, has the key", owner)
		}
		return nil
	})
	if p.link.Counts().BlackHoled == 0 {
		t.Error("nothing was kept from the replica")
	}
	p.link.Heal()
	sqlrig.SoonFree(t, s, "k")
}
