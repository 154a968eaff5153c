// Package sqlrig puts sqlstore over a real PostgreSQL or MariaDB server together, and has the
// tests that both pass.
package sqlrig

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// Engine is a kind of server and a driver for it.
type Engine struct {
	Name    string
	Dialect sqlstore.Dialect
	Driver  string
	// Params are added to the data source name.
	Params string
	Start  func(testing.TB, ...servertest.SQLOption) *servertest.SQLServer
}

// PostgreSQL is pgx as it must be set behind a pooler, so that a statement is one message.
var PostgreSQL = Engine{"PostgreSQL", sqlstore.PostgreSQL, "pgx", "&default_query_exec_mode=exec", servertest.PostgreSQL}

// MariaDB is go-sql-driver/mysql at its defaults.
var MariaDB = Engine{"MariaDB", sqlstore.MySQL, "mysql", "", servertest.MariaDB}

// With is the engine with other parameters.
func (e Engine) With(params string) Engine {
	e.Params = params
	return e
}

// DSN is the data source name of the server, or of the way to it at addr.
func (e Engine) DSN(s *servertest.SQLServer, addr string) string { return s.DSN(addr) + e.Params }

// DB opens a pool of connections of its own, which is closed with the test.
func (e Engine) DB(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(e.Driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxIdleConns(8)
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

// New makes a store over a pool.
func (e Engine) New(t testing.TB, db *sql.DB, o sqlstore.Options) *sqlstore.Store {
	t.Helper()
	o.Dialect = e.Dialect
	if o.Database == "" {
		o.Database = "server/holdfast"
	}
	s, err := sqlstore.New(db, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Open opens a store as another process would. addr is where to connect; empty means the
// server itself.
func (e Engine) Open(t testing.TB, s *servertest.SQLServer, addr string) *sqlstore.Store {
	t.Helper()
	return e.New(t, e.DB(t, e.DSN(s, addr)), sqlstore.Options{})
}

// link loses what goes through a proxy.
type link struct{ *servertest.Proxy }

func (l link) LoseRequests() { l.DropRequest(func([]byte) bool { return true }) }

// LoseReplies cuts the connection where the answer to a statement arrives, which has been
// executed then.
func (l link) LoseReplies() { l.DropReplyTo(servertest.Containing("holdfast_leases")) }

func (l link) Hits() int {
	c := l.Counts()
	return int(c.CutRequests + c.CutReplies)
}

// Suite runs the suite of all stores.
func (e Engine) Suite(t *testing.T, o sqlstore.Options) {
	server := e.Start(t)
	storetest.Run(t, storetest.Config{New: func(t testing.TB) storetest.Harness {
		return storetest.Harness{
			Open: func() store.Store { return e.New(t, e.DB(t, e.DSN(server, "")), o) },
			OpenFaulty: func() (store.Store, storetest.Link) {
				p := servertest.NewProxy(t, server.Addr())
				s := e.New(t, e.DB(t, e.DSN(server, p.Addr())), o)
				if err := s.EnsureSchema(t.Context()); err != nil {
					t.Fatal(err)
				}
				return s, link{p}
			},
		}
	}})
}

// Claim is a claim that does not end in a test.
func Claim(s store.Store, key string) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: time.Hour, Label: "test"})
}

// Grant tries and must be granted.
func Grant(t testing.TB, c store.Claim) store.Grant {
	t.Helper()
	g, err := c.Try(t.Context())
	if err != nil {
		t.Fatalf("Try: %v", err)
	}
	return g
}

// Free must be granted the key, and releases it.
func Free(t testing.TB, s store.Store, key string) store.Grant {
	t.Helper()
	c := Claim(s, key)
	g := Grant(t, c)
	Release(t, c)
	return g
}

// SoonFree must be granted the key long before a lease of an hour ends, and releases it.
func SoonFree(t testing.TB, s store.Store, key string) {
	t.Helper()
	servertest.Eventually(t, time.Minute, func() error {
		c := Claim(s, key)
		_, err := c.Try(t.Context())
		if err == nil {
			err = c.Release(t.Context())
		}
		return err
	})
}

// Release releases and must succeed.
func Release(t testing.TB, c store.Claim) {
	t.Helper()
	if err := c.Release(t.Context()); err != nil {
		t.Fatalf("Release: %v", err)
	}
}

// Held must find the key held.
func Held(t testing.TB, s store.Store, key string) {
	t.Helper()
	if g, err := Claim(s, key).Try(t.Context()); !errors.Is(err, store.ErrHeld) {
		t.Errorf("Try of key %q, which is held = %+v, %v", key, g, err)
	}
}

// Exec runs a statement.
func Exec(t testing.TB, db *sql.DB, statement string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(t.Context(), statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

// Query answers the only value of a query.
func Query[T any](t testing.TB, db *sql.DB, query string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), query, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return v
}

// Refuses complains unless every way into the store answers want, in one line with a word on why.
func Refuses(t testing.TB, s *sqlstore.Store, want error, why string) {
	t.Helper()
	_, tried := Claim(s, "k").Try(t.Context())
	_, inspected := s.Inspect(t.Context(), "k")
	for _, err := range []error{tried, inspected, s.EnsureSchema(t.Context())} {
		switch {
		case !errors.Is(err, want):
			t.Errorf("answers %v, want %v", err, want)
		case !strings.Contains(err.Error(), why), strings.Contains(err.Error(), "\n"):
			t.Errorf("answers %q, want one line with %q", err, why)
		}
	}
}

// Acquire does what a Locker does. An error other than that the key is held is an error.
func Acquire(ctx context.Context, c store.Claim) (store.Grant, error) {
	for {
		g, err := c.Try(ctx)
		var held *store.HeldError
		if !errors.As(err, &held) {
			return g, err
		}
		if err := c.(store.Waiter).Wait(ctx, held); err != nil {
			return g, err
		}
	}
}
