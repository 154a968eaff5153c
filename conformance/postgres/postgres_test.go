package postgres

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// listener is a [sqlstore.Listener] by pgx.
type listener struct{ dsn string }

func (l listener) Listen(ctx context.Context, channel string, deliver func(payload string)) error {
	conn, err := pgx.Connect(ctx, l.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
		return err
	}
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		deliver(n.Payload)
	}
}

// Every call works with a listener, whose releases notify; in a soak run the whole suite passes.
func TestStoreWithListener(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	for _, topic := range []string{"one", "two"} { // connections come and go
		t.Run(topic, func(t *testing.T) {
			s := engine.New(t, engine.DB(t, engine.DSN(server, "")), sqlstore.Options{Listener: listener{server.DSN("")}})
			engine.EveryCallTest(t, s)
		})
	}
	if kit.Soak() {
		e := engine
		e.Start = func(testing.TB, ...servertest.SQLOption) *servertest.SQLServer { return server }
		e.Suite(t, sqlstore.Options{Listener: listener{server.DSN("")}})
	}
}

// A release notifies of its key, and one that releases nothing, or a store without a listener,
// does not.
func TestReleaseNotifies(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	heard := make(chan string, 100)
	ended := make(chan error, 1)
	go func() {
		ended <- listener{server.DSN("")}.Listen(ctx, "holdfast_released", func(p string) { heard <- p })
	}()
	db := engine.DB(t, engine.DSN(server, ""))
	servertest.Eventually(t, time.Minute, func() error {
		if sqlrig.Query[int](t, db, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'") == 0 {
			return errors.New("nobody listens")
		}
		return nil
	})
	loud := engine.New(t, db, sqlstore.Options{Listener: listener{server.DSN("")}})
	quiet := engine.Open(t, server, "")
	const key = "k\xff'\\"
	sqlrig.Free(t, quiet, key)
	c := sqlrig.Claim(loud, key)
	g := sqlrig.Grant(t, c)
	if err := quiet.Break(ctx, store.Holder{Key: key, Owner: g.Owner}); err != nil {
		t.Fatal(err)
	}
	if err := c.Release(ctx); !errors.Is(err, store.ErrLost) {
		t.Fatalf("Release of a broken lease: %v", err)
	}
	sqlrig.Free(t, loud, "last")
	if got := <-heard; got != hex.EncodeToString([]byte("last")) {
		t.Errorf("heard %q first", got)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("Listen ended without an error")
	}
}

// Each way in which pgx sends a statement does.
func TestModes(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			e := engine.With("&default_query_exec_mode=" + mode)
			e.EveryCallTest(t, e.Open(t, server, ""))
		})
	}
}

// PGS-02, PGS-03: a client that is killed behind a pooler leaves its server connection to others,
// and the lock with nobody.
func TestPooler(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	pooler := servertest.PgBouncer(t, server, "", servertest.Setting("default_pool_size", "2"))
	s := engine.Open(t, pooler, "")
	engine.EveryCallTest(t, s)
	child := kit.Child(t, "hold "+engine.Name, engine.DSN(pooler, ""), "k")
	child.Expect(t, "held", time.Minute)
	sqlrig.Held(t, s, "k")
	child.Kill()
	if _, err := sqlrig.Acquire(kit.Context(t, time.Minute), sqlrig.Claim(s, "k")); err != nil {
		t.Errorf("the key of a holder that was killed behind the pooler: %v", err)
	}
}

// What a standby knows is old, and it grants nothing. A role whose transactions are read-only
// cannot use the store either. Both are said.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	s := engine.Open(t, server, "")
	sqlrig.Free(t, s, "k")
	standby := server.Replica("")
	servertest.Eventually(t, time.Minute, func() error {
		_, err := engine.DB(t, engine.DSN(standby, "")).Exec("SELECT 1 FROM holdfast_leases")
		return err
	})
	sqlrig.Refuses(t, engine.Open(t, standby, ""), store.ErrUnavailable, "standby")
	if _, err := s.Inspect(t.Context(), "k"); err != nil {
		t.Errorf("Inspect of the primary: %v", err)
	}
	both := engine.With(engine.Params + "&target_session_attrs=read-write")
	dsn := strings.Replace(both.DSN(server, ""), server.Addr(), standby.Addr()+","+server.Addr(), 1)
	sqlrig.Free(t, both.New(t, both.DB(t, dsn), sqlstore.Options{}), "k")

	db := engine.DB(t, engine.DSN(server, ""))
	sqlrig.Exec(t, db, "CREATE ROLE reader LOGIN SUPERUSER")
	sqlrig.Exec(t, db, "ALTER ROLE reader SET default_transaction_read_only = on")
	r := engine.New(t, engine.DB(t, strings.Replace(engine.DSN(server, ""), "postgres@", "reader@", 1)), sqlstore.Options{})
	if _, err := sqlrig.Claim(r, "k").Try(t.Context()); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("Try by a role that may only read: %v", err)
	}
}

// A role that may not use the tables is told which rights it needs, and one that may not make
// them needs only those.
func TestRights(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	db := engine.DB(t, engine.DSN(server, ""))
	sqlrig.Exec(t, db, "CREATE ROLE app LOGIN")
	sqlrig.Exec(t, db, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	dsn := strings.Replace(engine.DSN(server, ""), "postgres@", "app@", 1)
	s := engine.New(t, engine.DB(t, dsn), sqlstore.Options{})
	sqlrig.Refuses(t, s, store.ErrInvalid, "EnsureSchema")
	for _, statement := range sqlstore.Schema(sqlstore.PostgreSQL) {
		sqlrig.Exec(t, db, statement)
	}
	sqlrig.Refuses(t, s, store.ErrInvalid, "holdfast_leases")
	sqlrig.Exec(t, db, "GRANT SELECT, INSERT, UPDATE ON holdfast_leases TO app")
	sqlrig.Exec(t, db, "GRANT SELECT ON holdfast_meta TO app")
	engine.EveryCallTest(t, s)
	stranger := strings.Replace(engine.DSN(server, ""), "postgres@", "stranger@", 1)
	sqlrig.Refuses(t, engine.New(t, engine.DB(t, stranger), sqlstore.Options{}), store.ErrInvalid, "stranger")
}

// PGS-08: time-outs of the role end no wait for a lock, and waiting leaves no setting changed.
func TestTimeouts(t *testing.T) {
	t.Parallel()
	server := engine.Start(t, servertest.Setting("statement_timeout", "1s"), servertest.Setting("lock_timeout", "700ms"),
		servertest.Setting("synchronous_commit", "off"))
	db := engine.DB(t, engine.DSN(server, ""))
	db.SetMaxOpenConns(1)
	s := engine.New(t, db, sqlstore.Options{})
	other := engine.Open(t, server, "")
	c := sqlrig.Claim(other, "k")
	sqlrig.Grant(t, c)
	time.AfterFunc(3*time.Second, func() {
		if err := c.Release(context.Background()); err != nil {
			t.Error(err)
		}
	})
	locks := kit.Locker(t, s, holdfast.Options{})
	lease, err := locks.Acquire(kit.Context(t, time.Minute), "k")
	if err != nil {
		t.Fatalf("Acquire while another holds for 3 s: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := kit.Locker(t, other, holdfast.Options{}).Acquire(ctx, "k"); !errors.Is(err, store.ErrHeld) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Acquire of a held key until its deadline: %v, want ErrHeld and DeadlineExceeded", err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]string{"statement_timeout": "1s", "lock_timeout": "700ms", "synchronous_commit": "off"} {
		if got := sqlrig.Query[string](t, db, "SHOW "+name); got != want {
			t.Errorf("%s is %s afterwards, was %s", name, got, want)
		}
	}
	// Somebody keeps the row locked: the call ends in time, and nothing is taken.
	tx, err := engine.DB(t, engine.DSN(server, "")).Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec("SELECT 1 FROM holdfast_leases FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if g, err := sqlrig.Claim(s, "k").Try(kit.Context(t, time.Minute)); !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) {
		t.Errorf("Try of a row that is locked: %+v, %v, want ErrUnavailable or ErrUncertain", g, err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	sqlrig.SoonFree(t, s, "k")
}

// PGS-13: several keys asked for in any order, by two processes at once.
func TestKeysInAnyOrder(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	done := make(chan error)
	for _, keys := range [][]string{{"a", "b"}, {"b", "a", "b"}} {
		locks := kit.Locker(t, engine.Open(t, server, ""), holdfast.Options{})
		go func() {
			for range kit.Count(20, 1000) {
				leases, err := locks.AcquireAll(kit.Context(t, time.Minute), keys...)
				if err == nil && len(leases) != 2 {
					err = fmt.Errorf("%d leases", len(leases))
				}
				for _, l := range leases {
					err = errors.Join(err, l.Release(context.Background()))
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// A refused Try, and who waits, write nothing to disk.
func TestRefusalsWriteNothing(t *testing.T) {
	t.Parallel()
	server := engine.Start(t, servertest.Setting("autovacuum", "off"))
	s, db := engine.Open(t, server, ""), engine.DB(t, engine.DSN(server, ""))
	sqlrig.Grant(t, sqlrig.Claim(s, "k"))
	wal := func() int64 {
		return sqlrig.Query[int64](t, db, "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint")
	}
	sqlrig.Held(t, s, "k")
	const rounds = 200
	before := wal()
	for range rounds {
		sqlrig.Held(t, s, "k")
	}
	written := wal() - before
	t.Logf("%d bytes for %d refusals", written, rounds)
	if written > 10*rounds { // the server writes some by itself
		t.Errorf("%d refusals wrote %d bytes", rounds, written)
	}
}

// Another search path leads to the tables that are there, not to new ones.
func TestSearchPath(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	s := engine.Open(t, server, "")
	sqlrig.Grant(t, sqlrig.Claim(s, "k"))
	db := engine.DB(t, engine.DSN(server, ""))
	sqlrig.Exec(t, db, "CREATE SCHEMA app")
	e := engine.With(engine.Params + "&search_path=app,public")
	sqlrig.Held(t, e.Open(t, server, ""), "k")
}
