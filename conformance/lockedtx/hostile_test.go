package lockedtx

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// Many take the first lock of an empty database at once, of one key and of their own.
func TestManyBegin(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		o := d.options(d.levels[0])
		ctx := kit.Context(t, 2*time.Minute)
		inside := 0
		var wg sync.WaitGroup
		for i := range 20 {
			db := d.open("", d.levels[0].params)
			wg.Go(func() {
				err := sqlstore.Locked(ctx, db, o, "k", func(*sql.Tx) error {
					if inside++; inside != 1 { // also a race, where it is wrong
						t.Errorf("%d are inside", inside)
					}
					inside--
					return nil
				})
				if err == nil {
					err = sqlstore.Locked(ctx, db, o, string(rune('a'+i)), func(*sql.Tx) error { return nil })
				}
				if err != nil {
					t.Errorf("Locked: %v", err)
				}
			})
		}
		wg.Wait()
	})
}

// fn ends the transaction by itself, which it must not. It is told nil only where all is written, and the
// next one comes through; but PostgreSQL commits nothing without a word, where fn has sent ROLLBACK.
func TestFnEndsTheTransaction(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		d.table("made (id bigint NOT NULL)")
		db := d.open("", d.levels[0].params)
		ctx := kit.Context(t, time.Minute)
		o := d.options(d.levels[0])
		id := int64(0)
		for _, way := range []func(*sql.Tx) error{
			func(tx *sql.Tx) error { return tx.Commit() },
			func(tx *sql.Tx) error { return tx.Rollback() },
			func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, "COMMIT"); return err },
			func(tx *sql.Tx) error { _, err := tx.ExecContext(ctx, "ROLLBACK"); return err },
		} {
			id++
			runs := 0
			err := sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error {
				runs++
				return errors.Join(insert(ctx, tx, id), way(tx))
			})
			n := d.made(id)
			if err == nil && n != 1 && (d.dialect != sqlstore.PostgreSQL || id != 4) || err != nil && !errors.Is(err, store.ErrUncertain) && n != 0 || runs != 1 {
				t.Errorf("way %d: %v after %d runs, which have written %d", id, err, runs, n)
			}
			if err := sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, -id) }); err != nil {
				t.Errorf("way %d: the next one: %v", id, err)
			}
			d.wantMade(-id, 1)
			if n := db.Stats().InUse; n != 0 {
				t.Errorf("way %d: %d connections are still in use", id, n)
			}
		}
	})
}

// A time-out that rolls the whole transaction back, and which fn passes over, takes the lock with it:
// that is no success.
func TestRollbackOnTimeout(t *testing.T) {
	t.Parallel()
	for _, e := range engines {
		if e.dialect != sqlstore.MySQL {
			continue
		}
		d := e.with(t, servertest.Setting("innodb_rollback_on_timeout", "1"), servertest.Setting("innodb_lock_wait_timeout", "1"))
		d.table("made (id bigint NOT NULL PRIMARY KEY)")
		db := d.open("", "")
		ctx := kit.Context(t, time.Minute)
		must(t, d.admin, "INSERT INTO made VALUES (7)")
		other, err := d.admin.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		must(t, other, "SELECT id FROM made WHERE id = 7 FOR UPDATE")
		passed := false
		err = sqlstore.Locked(ctx, db, d.options(d.levels[0]), "k", func(tx *sql.Tx) error {
			if err := insert(ctx, tx, 1); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, "DELETE FROM made WHERE id = 7")
			passed = err != nil
			return insert(ctx, tx, 2)
		})
		if !passed {
			t.Fatal("nothing timed out: the test shows nothing")
		}
		if err := other.Rollback(); err != nil {
			t.Fatal(err)
		}
		if n := d.made(1); err == nil && n != 1 || err != nil && !errors.Is(err, store.ErrUncertain) {
			t.Errorf("%v, and what came before the time-out was written %d times", err, n)
		}
	}
}

// What keeps Locked from its work is told with what to do about it.
func TestAdvice(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		if !d.networked(t) {
			return
		}
		db := d.open("", "")
		ctx := kit.Context(t, 2*time.Minute)
		o := d.options(d.levels[0])
		o.LockWait = time.Second
		nop := func(*sql.Tx) error { return nil }
		if err := sqlstore.Locked(ctx, db, o, "k", nop); err != nil {
			t.Fatal(err)
		}
		tells := func(what string, err, want error, word string) {
			t.Helper()
			if !errors.Is(err, want) || !strings.Contains(err.Error(), word) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s: %v, want %v in one line with %q", what, err, want, word)
			}
		}
		db.SetMaxOpenConns(1)
		err := sqlstore.Locked(ctx, db, o, "k", func(*sql.Tx) error {
			tells("another key inside, with one connection", sqlstore.Locked(ctx, db, o, "other", nop), store.ErrUnavailable, "SetMaxOpenConns")
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		readOnly := "default_transaction_read_only=on"
		if d.dialect == sqlstore.MySQL {
			readOnly = "tx_read_only=1"
		}
		if d.pooler == d.server { // which takes no such parameter
			ro := d.open("", readOnly)
			tells("a session that may only read", sqlstore.Locked(context.WithoutCancel(ctx), ro, o, "k", nop), store.ErrUnavailable, "primary")
		}
	})
}
