package pgfailover

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// pair is a primary and its replica, whose link can be cut.
type pair struct {
	primary, replica *servertest.SQLServer
	link             *servertest.Proxy
}

func newPair(t testing.TB, opts ...servertest.SQLOption) pair {
	t.Helper()
	p := servertest.PostgreSQL(t, opts...)
	link := servertest.NewProxy(t, p.Addr())
	return pair{p, p.Replica(link.Addr()), link}
}

// failOver ends the primary and promotes the replica. What the link kept back is lost.
func (p pair) failOver(t testing.TB) {
	t.Helper()
	if n := p.link.Counts().BlackHoled; n == 0 {
		t.Error("nothing was kept from the replica")
	}
	p.primary.Kill()
	p.link.Close()
	p.replica.Promote()
}

func newLocker(t testing.TB, db *sql.DB) *holdfast.Locker {
	t.Helper()
	locks, err := holdfast.New(engine.New(t, db, sqlstore.Options{}), &holdfast.Options{TTL: 2 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

func newGuard(t testing.TB, db *sql.DB, d sqlfence.Dialect) *sqlfence.Guard {
	t.Helper()
	g, err := sqlfence.New(db, sqlfence.Options{Dialect: d})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.EnsureSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	return g
}

func release(t testing.TB, lease *holdfast.Lease) {
	t.Helper()
	if err := lease.Release(t.Context()); err != nil {
		t.Fatalf("Release: %v", err)
	}
}

// TestPromotedReplicaLostAGrant: a grant is answered and does not reach the replica, which is
// promoted and grants the key again. Two hold it at once. Their tokens grow all the same, and
// the guard keeps them apart, wherever it is; a counter would have given one number twice.
func TestPromotedReplicaLostAGrant(t *testing.T) {
	t.Parallel()
	last := fence.Token(0)
	for range kit.Count(2, 30) {
		last = lostGrant(t, last)
	}
}

// lostGrant answers the token of the last grant. last is that of an earlier failover.
func lostGrant(t *testing.T, last fence.Token) fence.Token {
	p := newPair(t)
	ctx := kit.Context(t, 5*time.Minute)
	a, b := openAny(t, p.primary, p.replica), openAny(t, p.primary, p.replica)
	locks, others := newLocker(t, a), newLocker(t, b)
	beside := newGuard(t, kit.OpenSQLite(t, t.TempDir()+"/resource.db"), sqlfence.SQLite)
	inside := newGuard(t, a, sqlfence.PostgreSQL)
	sqlrig.Exec(t, a, "CREATE TABLE counter (n bigint NOT NULL)")
	sqlrig.Exec(t, a, "INSERT INTO counter VALUES (0)")
	count := func(db *sql.DB) (n int64) {
		servertest.Eventually(t, patience, func() error {
			return db.QueryRowContext(ctx, "UPDATE counter SET n = n + 1 RETURNING n").Scan(&n)
		})
		return n
	}
	write := func(ctx context.Context, g *sqlfence.Guard, lease *holdfast.Lease) error {
		return g.Tx(ctx, "resource", lease.Token(), func(*sql.Tx) error { return nil })
	}

	before, err := locks.Acquire(ctx, "k")
	if err != nil {
		t.Fatal(err)
	}
	release(t, before)
	// A release is not waited for as a grant is, and would keep the key when it is lost.
	released := engine.DB(t, engine.DSN(p.replica, ""))
	servertest.Eventually(t, patience, func() error {
		if owner, token := row(t, released, "k"); owner != "" || token != int64(before.Token()) {
			return fmt.Errorf("the replica has token %d of %q, want %v released", token, owner, before.Token())
		}
		return nil
	})

	p.link.BlackHole()
	first, err := locks.Acquire(ctx, "k")
	if err != nil {
		t.Fatal(err)
	}
	counted := count(a)
	if err := write(ctx, beside, first); err != nil {
		t.Errorf("the first holder's write: %v", err)
	}
	type acquired struct {
		lease *holdfast.Lease
		err   error
	}
	waiting := make(chan acquired, 1)
	go func() {
		lease, err := others.Acquire(ctx, "k")
		waiting <- acquired{lease, err}
	}()
	select {
	case got := <-waiting:
		t.Fatalf("a held key is granted: %v", got.err)
	case <-time.After(300 * time.Millisecond):
	}
	p.failOver(t)
	got := <-waiting
	if got.err != nil {
		t.Fatal(got.err)
	}
	second := got.lease
	if first.Err() != nil || second.Err() != nil {
		t.Errorf("the two holders are told %v and %v: the fault did not happen", first.Err(), second.Err())
	}
	if before.Token() <= last || first.Token() <= before.Token() || second.Token() <= first.Token() {
		t.Errorf("tokens %v, %v, %v, %v do not grow", last, before.Token(), first.Token(), second.Token())
	}
	if n := count(b); n != counted {
		t.Errorf("a counter gave %d, and then %d: the promoted replica had not lost it", counted, n)
	}

	for _, g := range []*sqlfence.Guard{beside, inside} { // the latter in the database that was promoted
		if err := write(ctx, g, second); err != nil {
			t.Errorf("the second holder's write: %v", err)
		}
		var stale *fence.StaleError
		if err := write(ctx, g, first); !errors.As(err, &stale) || stale.Seen != second.Token() {
			t.Errorf("the first holder's write behind it: %v, want that %v has been seen", err, second.Token())
		}
		if err := write(ctx, g, second); err != nil {
			t.Errorf("the second holder's next write: %v", err)
		}
	}
	if err := first.Err(); err != nil {
		t.Errorf("the first holder knows before anybody tells it: %v", err)
	}
	if err := write(first.Context(ctx), beside, first); !errors.Is(err, fence.ErrStale) {
		t.Errorf("the first holder's write: %v", err)
	}
	if err := first.Err(); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("after the guard's refusal the first holder is told %v", err)
	}
	release(t, second)

	// The old primary comes back as one, with the first grant in its table.
	p.primary.Restart()
	if _, token := row(t, engine.DB(t, engine.DSN(p.primary, "")), "k"); token != int64(first.Token()) {
		t.Errorf("the old primary has token %d, want %v", token, first.Token())
	}
	return second.Token()
}

// TestSynchronousReplicaLosesNothing: where the primary waits for its replica, a grant that would
// be lost is not answered.
func TestSynchronousReplicaLosesNothing(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	admin := engine.DB(t, engine.DSN(p.primary, ""))
	sqlrig.Exec(t, admin, "ALTER SYSTEM SET synchronous_standby_names = '*'")
	sqlrig.Exec(t, admin, "SELECT pg_reload_conf()")
	servertest.Eventually(t, patience, func() error {
		var state string
		err := admin.QueryRowContext(t.Context(), "SELECT sync_state FROM pg_stat_replication").Scan(&state)
		if err != nil || state != "sync" {
			return fmt.Errorf("the replica is %q, %v", state, err)
		}
		return nil
	})
	s := engine.New(t, openAny(t, p.primary, p.replica), sqlstore.Options{})
	kept := claim(s, "kept", time.Hour)
	if _, err := kept.Try(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.link.BlackHole()
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if g, err := claim(s, "k", time.Hour).Try(short); !errors.Is(err, store.ErrUncertain) {
		t.Fatalf("a grant that the replica does not know of: %+v, %v", g, err)
	}
	p.failOver(t)
	sqlrig.Exec(t, engine.DB(t, engine.DSN(p.replica, "")), "ALTER SYSTEM SET synchronous_standby_names = ''")
	sqlrig.Exec(t, engine.DB(t, engine.DSN(p.replica, "")), "SELECT pg_reload_conf()")
	other := engine.New(t, openAny(t, p.primary, p.replica), sqlstore.Options{})
	sqlrig.Held(t, other, "kept")
	if _, err := kept.Extend(t.Context()); err != nil {
		t.Errorf("the grant that was answered: Extend: %v", err)
	}
	sqlrig.Free(t, other, "k")
}
