package postgres

import (
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

func TestOneKeyTwice(t *testing.T)  { parallel(t, engine.OneKeyTwiceTest) }
func TestMissingTable(t *testing.T) { parallel(t, engine.MissingTableTest) }
func TestManyBegin(t *testing.T)    { t.Parallel(); engine.ManyBeginTest(t) }

// A statement that has answered its row may still be refused when it commits, as at SERIALIZABLE. Then
// nothing was granted, extended or released, in whichever way pgx has sent it.
func TestRefusedCommit(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	plain := engine.Open(t, server, "")
	db := engine.DB(t, engine.DSN(server, ""))
	sqlrig.Free(t, plain, "k")
	sqlrig.Exec(t, db, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN IF current_setting('app.refuse', true) = 'on' THEN RAISE EXCEPTION 'refused' USING ERRCODE = 'P0001'; END IF; RETURN NULL; END $$`)
	sqlrig.Exec(t, db, `CREATE CONSTRAINT TRIGGER refuse AFTER INSERT OR UPDATE ON holdfast_leases
		DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`)
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		e := engine.With("&default_query_exec_mode=" + mode)
		ok, refused := e.Open(t, server, ""), e.New(t, e.DB(t, e.DSN(server, "")+"&options=-c%20app.refuse%3Don"), sqlstore.Options{})
		key := "k" + mode
		sqlrig.Free(t, ok, key)
		if g, err := sqlrig.Claim(refused, key).Try(t.Context()); err == nil {
			t.Errorf("%s: Try whose commit is refused: %+v", mode, g)
		}
		c := sqlrig.Claim(ok, key)
		sqlrig.Grant(t, c)
		ticket, err := ok.Ticket(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, g, err := refused.Adopt(t.Context(), ticket); err == nil || errors.Is(err, store.ErrLost) {
			t.Errorf("%s: Extend whose commit is refused: %+v, %v", mode, g, err)
		}
		h, err := ok.Inspect(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		if err := refused.Break(t.Context(), h); err == nil {
			t.Errorf("%s: Break whose commit is refused says that it was done", mode)
		}
		if _, err := c.Extend(t.Context()); err != nil {
			t.Errorf("%s: Extend: %v", mode, err)
		}
		sqlrig.Release(t, c)
	}
}

// A label is for people, and no reason to refuse a grant: what the encoding of the database lacks is
// left out. Keys are bytes in any case.
func TestOtherEncoding(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	for _, encoding := range []string{"LATIN1", "EUC_JP"} {
		sqlrig.Exec(t, engine.DB(t, engine.DSN(server, "")), "CREATE DATABASE "+encoding+" ENCODING '"+encoding+"' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
		for _, e := range []sqlrig.Engine{engine, libpq} { // which leaves the encoding to the server, and which does not
			t.Run(encoding+" "+e.Driver, func(t *testing.T) {
				db := e.DB(t, strings.Replace(e.DSN(server, ""), "/holdfast", "/"+strings.ToLower(encoding), 1))
				s := e.New(t, db, sqlstore.Options{})
				e.EveryCallTest(t, s)
				key := e.Driver + "键\xff"
				c := s.Claim(key, store.ClaimOptions{TTL: time.Hour, Label: "schlüssel 键"})
				sqlrig.Grant(t, c)
				if h, err := s.Inspect(t.Context(), key); err != nil || !strings.HasPrefix(h.Label, "schl") || h.Key != key {
					t.Errorf("Inspect: %+v, %v", h, err)
				}
				sqlrig.Release(t, c)
			})
		}
		e := []*sql.DB{engine.DB(t, strings.Replace(engine.DSN(server, ""), "/holdfast", "/"+strings.ToLower(encoding), 1)),
			libpq.DB(t, strings.Replace(libpq.DSN(server, ""), "/holdfast", "/"+strings.ToLower(encoding), 1))}
		// The lock of a key is one for both drivers.
		o := sqlstore.LockedOptions{Dialect: sqlstore.PostgreSQL, LockWait: 500 * time.Millisecond}
		for _, key := range []string{"é", "键"} {
			err := sqlstore.Locked(t.Context(), e[0], o, key, func(*sql.Tx) error {
				if err := sqlstore.Locked(t.Context(), e[1], o, key, func(*sql.Tx) error { return nil }); !errors.Is(err, store.ErrHeld) {
					t.Errorf("%s: the lock of %q, which another driver holds: %v", encoding, key, err)
				}
				return nil
			})
			if err != nil {
				t.Errorf("%s: the lock of %q: %v", encoding, key, err)
			}
		}
	}
}

// Somebody has left a transaction open on a connection of the pool. What is granted there must be
// committed all the same.
func TestOpenTransactionInPool(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	db := engine.DB(t, engine.DSN(server, ""))
	db.SetMaxOpenConns(1)
	s := engine.New(t, db, sqlstore.Options{})
	sqlrig.Free(t, s, "k")
	sqlrig.Exec(t, db, "BEGIN")
	sqlrig.Grant(t, sqlrig.Claim(s, "k"))
	sqlrig.Held(t, engine.Open(t, server, ""), "k")
}

// Where all connections of the pool are in use, the error says so.
func TestPoolInUse(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	db := engine.DB(t, engine.DSN(server, ""))
	db.SetMaxOpenConns(1)
	s := engine.New(t, db, sqlstore.Options{})
	sqlrig.Free(t, s, "k")
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if g, err := sqlrig.Claim(s, "k").Try(kit.Context(t, time.Minute)); !errors.Is(err, store.ErrUnavailable) ||
		errors.Is(err, store.ErrUncertain) || !strings.Contains(err.Error(), "SetMaxOpenConns") {
		t.Errorf("Try without a connection: %+v, %v", g, err)
	}
}

// A session that the server has ended as idle has executed nothing since: the statement is sent again
// by another one.
func TestIdleSessionsAreEnded(t *testing.T) {
	t.Parallel()
	server := engine.Start(t, servertest.Setting("idle_session_timeout", "50ms"))
	for _, e := range []sqlrig.Engine{engine, libpq} {
		db := e.DB(t, e.DSN(server, ""))
		db.SetMaxOpenConns(1)
		s := e.New(t, db, sqlstore.Options{})
		ended := sqlrig.Query[int](t, db, "SELECT pg_backend_pid()")
		for range 4 {
			time.Sleep(150 * time.Millisecond)
			c := sqlrig.Claim(s, e.Driver)
			sqlrig.Grant(t, c)
			time.Sleep(150 * time.Millisecond)
			sqlrig.Release(t, c)
		}
		time.Sleep(1500 * time.Millisecond) // so long that the drivers look
		if pid := sqlrig.Query[int](t, db, "SELECT pg_backend_pid()"); pid == ended {
			t.Error("no session was ended: the test shows nothing")
		}
	}
}

func TestCancelledCalls(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	pooler := servertest.PgBouncer(t, server, "", servertest.Setting("default_pool_size", "2"))
	other := engine.Open(t, server, "")
	t.Run("pgx", func(t *testing.T) { engine.CancelTest(t, server, other) })
	t.Run("lib/pq", func(t *testing.T) { libpq.CancelTest(t, server, other) })
	t.Run("PgBouncer", func(t *testing.T) { engine.With("").CancelTest(t, pooler, other) })
}

func TestTinyTimeouts(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	sqlrig.Free(t, engine.Open(t, server, ""), "k") // the tables are there
	db := engine.DB(t, engine.DSN(server, ""))
	for _, setting := range []string{"statement_timeout = '2ms'", "lock_timeout = '1ms'", "idle_in_transaction_session_timeout = '1ms'"} {
		sqlrig.Exec(t, db, "ALTER DATABASE holdfast SET "+setting)
	}
	engine.TinyTimeoutsTest(t, server)
}

func TestWaitingStatement(t *testing.T) {
	t.Parallel()
	for _, e := range []sqlrig.Engine{engine, libpq} {
		t.Run(e.Driver, func(t *testing.T) {
			server := engine.Start(t)
			e.WaitingStatementTest(t, server, engine.Open(t, server, ""))
		})
	}
}
