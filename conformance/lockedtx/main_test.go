// Package lockedtx tests sqlstore.Locked, the lock and the write in one transaction, against real
// databases.
package lockedtx

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
)

func TestMain(m *testing.M) {
	if err := mysql.SetLogger(&mysql.NopLogger{}); err != nil { // it tells of every lost connection
		panic(err)
	}
	kit.Main(m, map[string]func(){"worker": workerChild, "holder": holderChild, "sleeper": sleeperChild})
}

// engine is a kind of database, and how applications may have configured it.
type engine struct {
	name    string
	dialect sqlstore.Dialect
	start   func(t testing.TB) (server, pooler *servertest.SQLServer) // nil for SQLite
	levels  []level
}

type level struct {
	name      string
	isolation sql.IsolationLevel
	params    string // of the data source's name
}

var standard = []level{
	{"READ COMMITTED", sql.LevelReadCommitted, ""},
	{"REPEATABLE READ", sql.LevelRepeatableRead, ""},
	{"SERIALIZABLE", sql.LevelSerializable, ""},
	{"default", sql.LevelDefault, ""},
}

var engines = []engine{
	{"PostgreSQL", sqlstore.PostgreSQL, func(t testing.TB) (server, pooler *servertest.SQLServer) {
		return postgres(t), nil
	}, append(standard, level{"SERIALIZABLE by default", sql.LevelDefault, "default_transaction_isolation=serializable"})},
	{"PgBouncer", sqlstore.PostgreSQL, func(t testing.TB) (server, pooler *servertest.SQLServer) {
		server = postgres(t)
		// Fewer connections than the tests have workers.
		return server, servertest.PgBouncer(t, server, "", servertest.Setting("default_pool_size", "4"))
	}, standard},
	{"MariaDB", sqlstore.MySQL, func(t testing.TB) (server, pooler *servertest.SQLServer) {
		return servertest.MariaDB(t), nil
	}, append(standard,
		level{"READ UNCOMMITTED", sql.LevelReadUncommitted, ""},
		level{"REPEATABLE READ, snapshot isolation", sql.LevelRepeatableRead, "innodb_snapshot_isolation=1"})},
	{"SQLite", sqlstore.SQLite, func(testing.TB) (server, pooler *servertest.SQLServer) { return nil, nil }, []level{
		{"WAL, deferred", sql.LevelDefault, "_pragma=journal_mode(WAL)"},
		{"WAL, immediate", sql.LevelDefault, "_pragma=journal_mode(WAL)&_txlock=immediate"},
		{"DELETE, deferred", sql.LevelDefault, "_pragma=journal_mode(DELETE)"},
	}},
}

func postgres(t testing.TB) *servertest.SQLServer {
	return servertest.PostgreSQL(t, servertest.Setting("deadlock_timeout", "100ms"))
}

// each runs a test on an empty database of each engine.
func each(t *testing.T, test func(t *testing.T, d *database)) {
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) { test(t, e.database(t)) })
	}
}

// database makes an empty database. params are of the admin's data source.
func (e engine) database(t testing.TB, params ...string) *database {
	d := &database{t: t, engine: e, path: filepath.Join(t.TempDir(), "test.db")}
	if d.server, d.pooler = e.start(t); d.pooler == nil {
		d.pooler = d.server
	}
	d.admin = d.open("", append(params, e.levels[0].params)[0])
	return d
}

// database is an empty database of one engine.
type database struct {
	t testing.TB
	engine
	server *servertest.SQLServer // nil for SQLite
	pooler *servertest.SQLServer // where clients connect
	path   string                // of SQLite's file
	admin  *sql.DB
}

// open opens a pool, as another process would. addr is that of a proxy, or empty.
func (d *database) open(addr, params string) *sql.DB {
	d.t.Helper()
	driver, dsn := d.dsn(addr, params)
	db, err := sql.Open(driver, dsn)
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { db.Close() })
	return db
}

func (d *database) dsn(addr, params string) (driver, dsn string) {
	switch d.dialect {
	case sqlstore.PostgreSQL:
		return "pgx", d.pooler.DSN(addr) + "&" + params
	case sqlstore.MySQL:
		return "mysql", d.pooler.DSN(addr) + "?" + params
	}
	// The file outlives this process only; a sync would show nothing.
	query := "_pragma=synchronous(OFF)&_pragma=busy_timeout(100)&" + params
	return "sqlite", (&url.URL{Scheme: "file", Path: d.path, RawQuery: query}).String()
}

// networked skips what needs a connection that can break.
func (d *database) networked(t *testing.T) bool {
	if d.server == nil {
		t.Log("SQLite has no connection that could break")
	}
	return d.server != nil
}

// options have the isolation level of l.
func (d *database) options(l level) sqlstore.LockedOptions {
	o := sqlstore.LockedOptions{Dialect: d.dialect, LockWait: 20 * time.Second}
	if l.isolation != sql.LevelDefault {
		o.TxOptions = &sql.TxOptions{Isolation: l.isolation}
	}
	return o
}

// querier is what *sql.DB and *sql.Tx have in common.
type querier interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
	QueryRowContext(context.Context, string, ...any) *sql.Row
}

func must(t testing.TB, q querier, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := q.ExecContext(kit.Context(t, time.Minute), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

// number answers the one number that a query gives. The pool may have to find out that its
// connections were cut.
func number(t testing.TB, q querier, query string) (n int64) {
	t.Helper()
	var v sql.NullInt64
	servertest.Eventually(t, 20*time.Second, func() error {
		return q.QueryRowContext(t.Context(), query).Scan(&v)
	})
	return v.Int64
}

// backend is what the server calls the connection of q; the client's, where that is a pooler.
func (d *database) backend(ctx context.Context, q querier) (id int64, err error) {
	query := "SELECT pg_backend_pid()"
	switch d.dialect {
	case sqlstore.MySQL:
		query = "SELECT connection_id()"
	case sqlstore.SQLite:
		return 0, nil
	}
	err = q.QueryRowContext(ctx, query).Scan(&id)
	return id, err
}

// end ends a connection of the server.
func (d *database) end(id int64) {
	d.t.Helper()
	query := "SELECT pg_terminate_backend(%d)"
	if d.dialect == sqlstore.MySQL {
		query = "KILL %d"
	}
	must(d.t, d.admin, fmt.Sprintf(query, id))
	if d.dialect == sqlstore.PostgreSQL {
		servertest.Eventually(d.t, 20*time.Second, func() error {
			if n := number(d.t, d.admin, fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE pid = %d", id)); n != 0 {
				return fmt.Errorf("connection %d is still there", id)
			}
			return nil
		})
	}
}

// table makes an empty table.
func (d *database) table(columns string) {
	d.t.Helper()
	name, _, _ := strings.Cut(columns, " ")
	must(d.t, d.admin, "DROP TABLE IF EXISTS "+name, "CREATE TABLE "+columns)
}
