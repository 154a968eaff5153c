package sqlfencex

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// engine is a database that is empty at first.
type engine struct {
	name    string
	dialect sqlfence.Dialect
	server  *servertest.SQLServer // nil for SQLite
	path    string                // of SQLite
}

// eachEngine runs a test on an empty database of each kind.
func eachEngine(t *testing.T, test func(t *testing.T, e *engine)) {
	t.Run("PostgreSQL", func(t *testing.T) {
		test(t, &engine{"PostgreSQL", sqlfence.PostgreSQL, servertest.PostgreSQL(t), ""})
	})
	t.Run("MariaDB", func(t *testing.T) {
		test(t, &engine{"MariaDB", sqlfence.MySQL, servertest.MariaDB(t), ""})
	})
	t.Run("SQLite", func(t *testing.T) {
		test(t, &engine{"SQLite", sqlfence.SQLite, nil, filepath.Join(t.TempDir(), "x.db")})
	})
}

// open opens a pool. addr is that of a proxy, or empty.
func (e *engine) open(t testing.TB, addr string) *sql.DB {
	switch e.dialect {
	case sqlfence.PostgreSQL:
		return kit.OpenPostgreSQL(t, e.server, addr)
	case sqlfence.MySQL:
		return kit.OpenMariaDB(t, e.server, addr)
	}
	return kit.OpenSQLite(t, e.path)
}

func (e *engine) bind(n int) string {
	if e.dialect == sqlfence.PostgreSQL {
		return fmt.Sprintf("$%d", n)
	}
	return "?"
}

func must(t testing.TB, h sqlfence.Handle, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := h.ExecContext(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

func number(t testing.TB, h sqlfence.Handle, query string) int64 {
	t.Helper()
	var n sql.NullInt64
	if err := h.QueryRowContext(t.Context(), query).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n.Int64
}

// layouts are where marks can be. Column uses the table doc, which makeDoc makes.
var layouts = map[string]func() sqlfence.Options{
	"table":  func() sqlfence.Options { return sqlfence.Options{} },
	"column": func() sqlfence.Options { return sqlfence.Options{Column: column()} },
	"column without Seq": func() sqlfence.Options {
		c := column()
		c.Seq = ""
		return sqlfence.Options{Column: c}
	},
}

func column() *sqlfence.Column {
	return &sqlfence.Column{Table: "doc", ID: "id", Token: "last_token", Seq: "last_seq"}
}

func (e *engine) makeDoc(t testing.TB, db *sql.DB) {
	t.Helper()
	id := "text"
	if e.dialect == sqlfence.MySQL {
		id = "varchar(512) character set utf8mb4 collate utf8mb4_nopad_bin"
	}
	must(t, db, "CREATE TABLE doc (id "+id+" PRIMARY KEY, last_token bigint, last_seq bigint, v bigint)")
}

func (e *engine) addDoc(t testing.TB, db *sql.DB, id string) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), "INSERT INTO doc (id, v) VALUES ("+e.bind(1)+", 0)", id); err != nil {
		t.Fatal(err)
	}
}

func (e *engine) guard(t testing.TB, db *sql.DB, o sqlfence.Options) *sqlfence.Guard {
	t.Helper()
	o.Dialect = e.dialect
	g, err := sqlfence.New(db, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func (e *engine) ready(t testing.TB, db *sql.DB, o sqlfence.Options) *sqlfence.Guard {
	t.Helper()
	g := e.guard(t, db, o)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := g.EnsureSchema(ctx); err != nil {
		t.Fatal(err)
	}
	return g
}
