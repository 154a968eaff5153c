package sqlfencex

import (
	"database/sql"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
)

func openDSN(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// Where nothing is committed by itself, counters would be rolled back, rows that were made
// would vanish, and marks be read from the past.
func TestAutocommitOff(t *testing.T) {
	e := &engine{"MariaDB", sqlfence.MySQL, servertest.MariaDB(t), ""}
	e.ready(t, e.open(t, ""), sqlfence.Options{})
	db := openDSN(t, "mysql", e.server.DSN("")+"?autocommit=0")
	ctx, m := kit.Context(t, time.Minute), sqlfence.Mark{Resource: "r", Token: 5}
	g := e.guard(t, db, sqlfence.Options{})
	s, err := sqlfence.NewSequence(db, e.dialect, "")
	if err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.ClaimIn(ctx, tx, m); err != nil { // which the caller commits
		t.Error(err)
	}
	if err := tx.Commit(); err != nil {
		t.Error(err)
	}
	wantInvalid(t, "Claim", g.Claim(ctx, "r", 5), "autocommit")
	wantInvalid(t, "Check", g.Check(ctx, "r", 5), "autocommit")
	wantInvalid(t, "EnsureSchema", g.EnsureSchema(ctx), "autocommit")
	wantInvalid(t, "Sequence.EnsureSchema", s.EnsureSchema(ctx), "autocommit")
	_, err = s.Next(ctx, "k")
	wantInvalid(t, "Sequence.Next", err, "autocommit")
}

// The first claim of all leaves the caller's connection alive when it has to give up.
func TestFirstClaimWaits(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db, ctx := e.open(t, ""), kit.Context(t, time.Minute)
		other := e.ready(t, db, sqlfence.Options{})
		if err := other.Claim(ctx, "r", 1); err != nil {
			t.Fatal(err)
		}
		err := other.Tx(ctx, "r", 2, func(*sql.Tx) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			first := e.guard(t, db, sqlfence.Options{LockWait: time.Second})
			if err := first.ClaimIn(ctx, tx, sqlfence.Mark{Resource: "r", Token: 3}); !errors.Is(err, fence.ErrBusy) {
				t.Errorf("%v, want that it is busy", err)
			}
			if e.dialect == sqlfence.MySQL { // its own wait is 50 s
				must(t, tx, "SELECT 1")
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// A unique index that could not be made is there, and lets two rows have one name.
func TestInvalidIndex(t *testing.T) {
	e := &engine{"PostgreSQL", sqlfence.PostgreSQL, servertest.PostgreSQL(t), ""}
	db := e.open(t, "")
	must(t, db, "CREATE TABLE doc (id text, last_token bigint, last_seq bigint)", "INSERT INTO doc (id) VALUES ('a'), ('a')")
	if _, err := db.ExecContext(t.Context(), "CREATE UNIQUE INDEX CONCURRENTLY doc_id ON doc (id)"); err == nil {
		t.Fatal("the index was made")
	}
	g := e.guard(t, db, sqlfence.Options{Column: column()})
	wantInvalid(t, "EnsureSchema", g.EnsureSchema(t.Context()), "unique")
	wantInvalid(t, "Claim", g.Claim(t.Context(), "a", 5), "unique")
}

// The collation of a column does not decide which row a name means.
func TestNamesAreBytes(t *testing.T) {
	e := &engine{"SQLite", sqlfence.SQLite, nil, t.TempDir() + "/x.db"}
	db := e.open(t, "")
	must(t, db, "CREATE TABLE doc (id TEXT COLLATE NOCASE, last_token INTEGER, last_seq INTEGER)",
		"CREATE UNIQUE INDEX doc_id ON doc (id COLLATE BINARY)", "INSERT INTO doc VALUES ('A', 3, 1), ('a', 50, 1)")
	g, ctx := e.ready(t, db, sqlfence.Options{Column: column()}), t.Context()
	if err := g.Claim(ctx, "a", 7); !errors.Is(err, fence.ErrStale) {
		t.Errorf("%v, want that it is stale", err)
	}
	if err := g.Claim(ctx, "A", 7); err != nil {
		t.Error(err)
	}
	if n := number(t, db, "SELECT max(last_token) FROM doc"); n != 50 {
		t.Errorf("the mark of another row is %d", n)
	}
	must(t, db, "CREATE TABLE n (id INTEGER PRIMARY KEY, last_token INTEGER)", "INSERT INTO n VALUES (7, NULL)")
	g = e.ready(t, db, sqlfence.Options{Column: &sqlfence.Column{Table: "n", ID: "id", Token: "last_token"}})
	for name, want := range map[string]error{"7": nil, "007": fence.ErrNoResource, " 7": fence.ErrNoResource, "7.0": fence.ErrNoResource} {
		if err := g.Claim(ctx, name, 5); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", name, err, want)
		}
	}
}

func TestEndlessLockWait(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		g := e.ready(t, e.open(t, ""), sqlfence.Options{LockWait: math.MaxInt64})
		if err := g.Claim(kit.Context(t, time.Minute), "r", 1); err != nil {
			t.Error(err)
		}
	})
}

// Limits of the server's are no mistakes of the caller's.
func TestServerLimits(t *testing.T) {
	for name, e := range map[string]*engine{
		"statement_timeout":  {"PostgreSQL", sqlfence.PostgreSQL, servertest.PostgreSQL(t), ""},
		"max_statement_time": {"MariaDB", sqlfence.MySQL, servertest.MariaDB(t), ""},
	} {
		db, ctx := e.open(t, ""), kit.Context(t, time.Minute)
		g := e.ready(t, db, sqlfence.Options{})
		limited := openDSN(t, "pgx", e.server.DSN("")+"&statement_timeout=300")
		if e.dialect == sqlfence.MySQL {
			limited = openDSN(t, "mysql", e.server.DSN("")+"?max_statement_time=0.3")
		}
		err := g.Tx(ctx, "r", 1, func(*sql.Tx) error {
			if err := e.guard(t, limited, sqlfence.Options{}).Claim(ctx, "r", 2); !errors.Is(err, fence.ErrBusy) || errors.Is(err, fence.ErrInvalid) {
				t.Errorf("%s: %v, want that it is busy", name, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
