// Package sqlite tests sqlstore against a real SQLite driver.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// open opens the database at path with the recommended settings.
func open(t testing.TB, path string) (*sqlstore.Store, *sql.DB) {
	t.Helper()
	dsn, err := sqlstore.SQLiteDSN(path)
	if err != nil {
		t.Fatal(err)
	}
	return openDSN(t, dsn)
}

func openDSN(t testing.TB, dsn string) (*sqlstore.Store, *sql.DB) {
	t.Helper()
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	s, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.SQLite})
	if err != nil {
		t.Fatal(err)
	}
	return s, db
}

func lockFile(t testing.TB) string { return filepath.Join(t.TempDir(), "locks.db") }

func claim(s store.Store, key string, ttl time.Duration) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: ttl, Label: "test"})
}

func TestGrantExtendRelease(t *testing.T) {
	s, _ := open(t, lockFile(t))
	ctx := context.Background()
	a, b := claim(s, "k", time.Minute), claim(s, "k", time.Minute)
	g, err := a.Try(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := a.Try(ctx); err != nil || again.Token != g.Token || again.Owner != g.Owner {
		t.Fatalf("Try again = %+v, %v, want %+v", again, err, g)
	}
	var held *store.HeldError
	if _, err := b.Try(ctx); !errors.As(err, &held) || held.Holder.Owner != g.Owner || held.Holder.Label != "test" || held.Holder.TTL <= 0 {
		t.Fatalf("second Try: %v", err)
	}
	if e, err := a.Extend(ctx); err != nil || e.Token != g.Token {
		t.Fatalf("Extend = %+v, %v", e, err)
	}
	if err := a.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Try(ctx); !errors.Is(err, store.ErrReleased) {
		t.Fatalf("Try after Release: %v", err)
	}
	h, err := b.Try(ctx)
	if err != nil || h.Token <= g.Token || h.Owner == g.Owner {
		t.Fatalf("next grant = %+v, %v after %+v", h, err, g)
	}
	if err := a.Release(ctx); err != nil {
		t.Fatalf("Release again: %v", err)
	}
	if _, err := b.Extend(ctx); err != nil {
		t.Fatalf("Extend after a's second Release: %v", err)
	}
}

func TestMain(m *testing.M) { os.Exit(m.Run()) }
