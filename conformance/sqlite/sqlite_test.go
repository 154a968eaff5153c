// Package sqlite tests sqlstore against a real SQLite driver.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"path/filepath"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// dsn is the recommended data source name of the file at path.
func dsn(t testing.TB, path string) string {
	t.Helper()
	dsn, err := sqlstore.SQLiteDSN(path)
	if err != nil {
		t.Fatal(err)
	}
	return dsn
}

// open opens the database at path with the recommended settings.
func open(t testing.TB, path string) (*sqlstore.Store, *sql.DB) {
	t.Helper()
	return openDSN(t, path, dsn(t, path))
}

func openDSN(t testing.TB, path, dsn string) (*sqlstore.Store, *sql.DB) {
	t.Helper()
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	return newStore(t, path, db), db
}

func newStore(t testing.TB, path string, db *sql.DB) *sqlstore.Store {
	t.Helper()
	t.Cleanup(func() { db.Close() })
	s, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.SQLite, Database: path})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func lockFile(t testing.TB) string { return filepath.Join(t.TempDir(), "locks.db") }

func claim(s store.Store, key string, ttl time.Duration) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: ttl, Label: "test"})
}

func grant(t testing.TB, c store.Claim) store.Grant {
	t.Helper()
	g, err := c.Try(context.Background())
	if err != nil {
		t.Fatalf("Try: %v", err)
	}
	return g
}

func release(t testing.TB, c store.Claim) {
	t.Helper()
	if err := c.Release(context.Background()); err != nil {
		t.Fatalf("Release: %v", err)
	}
}

func mustBeHeld(t testing.TB, s store.Store, key string) {
	t.Helper()
	if g, err := claim(s, key, time.Minute).Try(context.Background()); !errors.Is(err, store.ErrHeld) {
		t.Errorf("Try of key %q, which is held = %+v, %v", key, g, err)
	}
}

func exec(t testing.TB, db *sql.DB, statement string, args ...any) {
	t.Helper()
	if _, err := db.Exec(statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func query[T any](t testing.TB, db *sql.DB, statement string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRow(statement, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
	return v
}
