package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	"modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
)

// The engines, by the names that tests and matrices have for them.
const (
	postgres = "PostgreSQL"
	mariadb  = "MariaDB"
	sqlite3  = "SQLite"
)

var engines = []string{postgres, mariadb, sqlite3}

// config is an engine as an application may have configured it.
type config struct {
	engine, name string
	level        sql.IsolationLevel
	params       string // of the data source's name
}

var configs = []config{
	{postgres, "READ COMMITTED", sql.LevelReadCommitted, ""},
	{postgres, "REPEATABLE READ", sql.LevelRepeatableRead, ""},
	{postgres, "SERIALIZABLE", sql.LevelSerializable, ""},
	{mariadb, "READ COMMITTED", sql.LevelReadCommitted, ""},
	{mariadb, "REPEATABLE READ", sql.LevelRepeatableRead, ""},
	{mariadb, "REPEATABLE READ, snapshot isolation", sql.LevelRepeatableRead, "innodb_snapshot_isolation=1"},
	{mariadb, "SERIALIZABLE", sql.LevelSerializable, ""},
	{sqlite3, "WAL, deferred", sql.LevelDefault, "_pragma=journal_mode(WAL)"},
	{sqlite3, "DELETE, deferred", sql.LevelDefault, "_pragma=journal_mode(DELETE)"},
	{sqlite3, "WAL, immediate", sql.LevelDefault, "_pragma=journal_mode(WAL)&_txlock=immediate"},
	{sqlite3, "DELETE, immediate", sql.LevelDefault, "_pragma=journal_mode(DELETE)&_txlock=immediate"},
}

// database is an empty database of one engine.
type database struct {
	t      testing.TB
	engine string
	server *servertest.SQLServer // nil for SQLite
	path   string                // of SQLite's file
}

// newDatabase starts a server, or names a file that is not there yet.
func newDatabase(t testing.TB, engine string) *database {
	t.Helper()
	d := &database{t: t, engine: engine}
	switch engine {
	case postgres:
		d.server = servertest.PostgreSQL(t, servertest.Setting("deadlock_timeout", "100ms"))
	case mariadb:
		d.server = servertest.MariaDB(t)
	case sqlite3:
		d.path = filepath.Join(t.TempDir(), "test.db")
	}
	return d
}

// open opens a pool with parameters of the engine's driver, as a query. addr is where to
// connect; "" means the server itself.
func (d *database) open(addr, params string) *sql.DB {
	d.t.Helper()
	driver, dsn := d.dsn(addr, params)
	db, err := sql.Open(driver, dsn)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() {
		if err := db.Close(); err != nil {
			d.t.Error(err)
		}
	})
	return db
}

func (d *database) dsn(addr, params string) (driver, dsn string) {
	switch d.engine {
	case postgres:
		return "pgx", d.server.DSN(addr) + "&" + params
	case mariadb:
		return "mysql", d.server.DSN(addr) + "?" + params
	}
	// The file outlives this process only; a sync would show nothing.
	query := "_pragma=synchronous(OFF)&" + params
	if !strings.Contains(params, "busy_timeout") { // the driver goes by the first one
		query += "&_pragma=busy_timeout(5000)"
	}
	return "sqlite", (&url.URL{Scheme: "file", Path: d.path, RawQuery: query}).String()
}

// querier is what *sql.DB, *sql.Conn and *sql.Tx have in common.
type querier interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

// bind writes the statement's question marks as the engine has parameters.
func bind(engine, statement string) string {
	if engine != postgres {
		return statement
	}
	parts := strings.Split(statement, "?")
	var b strings.Builder
	for i, part := range parts {
		b.WriteString(part)
		if i < len(parts)-1 {
			fmt.Fprintf(&b, "$%d", i+1)
		}
	}
	return b.String()
}

// must executes statements that cannot fail.
func must(t testing.TB, q querier, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := q.ExecContext(kit.Context(t, time.Minute), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// number answers the one number that a query gives.
func number(t testing.TB, q querier, query string) (n int64) {
	t.Helper()
	var v sql.NullInt64
	if err := q.QueryRowContext(kit.Context(t, time.Minute), query).Scan(&v); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v.Int64
}

// code is the engine's number or state of an error, for people.
func code(err error) string {
	var pg *pgconn.PgError
	var my *mysql.MySQLError
	var lite *sqlite.Error
	switch {
	case errors.As(err, &pg):
		return pg.Code
	case errors.As(err, &my):
		return fmt.Sprint(my.Number)
	case errors.As(err, &lite):
		return fmt.Sprint(lite.Code())
	}
	return "error"
}

// waits is how many connections wait for a lock. For SQLite nobody knows.
func (d *database) waits(q querier, name string) (n int, err error) {
	switch d.engine {
	case postgres:
		err = q.QueryRowContext(d.t.Context(), `SELECT count(*) FROM pg_stat_activity
			WHERE application_name = $1 AND cardinality(pg_blocking_pids(pid)) > 0`, name).Scan(&n)
	case mariadb:
		// information_schema.innodb_trx is a copy that is not renewed while somebody reads it often.
		err = q.QueryRowContext(d.t.Context(), `SELECT variable_value FROM information_schema.global_status
			WHERE variable_name = 'Innodb_row_lock_current_waits'`).Scan(&n)
	}
	return n, err
}
