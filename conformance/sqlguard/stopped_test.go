package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// children are what the test binary does when it is started as a child.
var children = map[string]func(){"holder": holderChild}

// holderChild opens a fenced transaction, says so, and commits it when there is a certain file.
func holderChild() {
	args := kit.Args() // driver, data source, dialect, file to wait for
	db, err := sql.Open(args[0], args[1])
	if err != nil {
		kit.Say("failed", err)
		return
	}
	defer db.Close()
	var dialect sqlfence.Dialect
	fmt.Sscan(args[2], &dialect)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	g, err := sqlfence.New(db, sqlfence.Options{Dialect: dialect})
	if err != nil {
		kit.Say("failed", err)
		return
	}
	ran := 0
	err = g.Tx(ctx, "to", 33, func(tx *sql.Tx) error {
		if ran++; ran > 1 {
			kit.Say("again")
		}
		if _, err := tx.ExecContext(ctx, "INSERT INTO transfer VALUES (33)"); err != nil {
			return err
		}
		if ran == 1 {
			kit.Say("inside", backend(ctx, tx, dialect))
			for ctx.Err() == nil {
				if _, err := os.Stat(args[3]); err == nil {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
		return ctx.Err()
	})
	if errors.Is(err, fence.ErrStale) {
		kit.Say("ended", "stale")
	} else {
		kit.Say("ended", err)
	}
}

// backend is what the server calls the connection of tx.
func backend(ctx context.Context, tx *sql.Tx, d sqlfence.Dialect) (id int64) {
	query := map[sqlfence.Dialect]string{
		sqlfence.PostgreSQL: "SELECT pg_backend_pid()", sqlfence.MySQL: "SELECT connection_id()", sqlfence.SQLite: "SELECT 0",
	}[d]
	if err := tx.QueryRowContext(ctx, query).Scan(&id); err != nil {
		kit.Say("failed", err)
	}
	return id
}

// A holder is stopped inside its transaction. The next one is told within its lock wait that
// the resource is busy, and comes through when the connection of the stopped one is ended; that
// one learns that it is stale when it runs on, and leaves no effect.
func TestStoppedHolder(t *testing.T) {
	servertest.CanPause(t)
	t.Parallel()
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, engine)
			const wait = time.Second
			o := b.options(layout{}, "")
			o.LockWait = wait
			next := b.guard(b.admin, o)
			goOn := t.TempDir() + "/go"
			driver, dsn := b.dsn("", "")
			child := kit.Child(t, "holder", driver, dsn, fmt.Sprint(int(dialects[engine])), goOn)
			backend := child.Expect(t, "inside", time.Minute)
			child.Stop()

			for name, claim := range map[string]func() error{
				"Tx":    func() error { return b.transfer(t.Context(), next, sqlfence.Mark{Resource: "to", Token: 34}, 34) },
				"Claim": func() error { return next.Claim(t.Context(), "to", 34) },
			} {
				began := time.Now()
				err := claim()
				if d := time.Since(began); !errors.Is(err, fence.ErrBusy) || d < wait/2 || d > 10*wait {
					t.Errorf("%s answers after %v of lock wait: %v; want %v after about one", name, float64(d)/float64(wait), err, fence.ErrBusy)
				}
			}
			if n := b.done(34); n != 0 {
				t.Fatalf("the busy transaction took effect %d times", n)
			}

			done := make(chan error, 1)
			ctx := kit.Context(t, time.Minute)
			go func() {
				for { // as its caller would
					err := b.transfer(ctx, next, sqlfence.Mark{Resource: "to", Token: 34}, 34)
					if !errors.Is(err, fence.ErrBusy) || ctx.Err() != nil {
						done <- err
						return
					}
				}
			}()
			switch engine {
			case postgres:
				must(t, b.admin, "SELECT pg_terminate_backend("+backend+")")
			case mariadb:
				must(t, b.admin, "KILL "+backend)
			case sqlite3:
				child.Kill()
			}
			if err := <-done; err != nil {
				t.Errorf("the next holder, once the connection is ended: %v", err)
			}
			if engine != sqlite3 {
				if err := os.WriteFile(goOn, nil, 0o600); err != nil {
					t.Fatal(err)
				}
				child.Cont()
				if got := child.Expect(t, "ended", time.Minute); got != "stale" {
					t.Errorf("the stopped holder is told %q, want that it is stale", got)
				}
			}
			if b.done(33) != 0 || b.done(34) != 1 {
				t.Errorf("the stopped holder's transaction took effect %d times, and the next one's %d", b.done(33), b.done(34))
			}
		})
	}
}

// The same with a session that idles in a transaction of its own, claimed by ClaimIn.
func TestIdleTransaction(t *testing.T) {
	t.Parallel()
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, engine)
			const wait = time.Second
			for _, l := range []layout{{name: "table"}, {name: "column", column: true}} {
				o := b.options(l, "to "+l.name)
				o.LockWait = wait
				next := b.guard(b.admin, o)
				idle := b.open("", "")
				ctx := kit.Context(t, time.Minute)
				tx, err := idle.BeginTx(ctx, nil)
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback()
				resource := "to " + l.name
				if err := newGuard(t, idle, o).ClaimIn(ctx, tx, sqlfence.Mark{Resource: resource, Token: 33}); err != nil {
					t.Fatal(err)
				}
				began := time.Now()
				err = next.Claim(ctx, resource, 34)
				if d := time.Since(began); !errors.Is(err, fence.ErrBusy) || d < wait/2 || d > 10*wait {
					t.Errorf("%s: after %v of lock wait: %v; want %v after about one", l.name, float64(d)/float64(wait), err, fence.ErrBusy)
				}
				if err := tx.Rollback(); err != nil {
					t.Fatal(err)
				}
				if err := next.Claim(ctx, resource, 34); err != nil {
					t.Errorf("%s: after its end: %v", l.name, err)
				}
			}
		})
	}
}
