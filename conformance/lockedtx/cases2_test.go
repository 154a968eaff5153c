package lockedtx

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// with makes an empty database on a server with the settings.
func (e engine) with(t testing.TB, settings ...servertest.SQLOption) *database {
	switch e.dialect {
	case sqlstore.MySQL:
		e.start = func(t testing.TB) (server, pooler *servertest.SQLServer) {
			return servertest.MariaDB(t, settings...), nil
		}
	case sqlstore.PostgreSQL:
		e.start = func(t testing.TB) (server, pooler *servertest.SQLServer) {
			if server = servertest.PostgreSQL(t, settings...); e.name == "PgBouncer" {
				pooler = servertest.PgBouncer(t, server, "", servertest.Setting("default_pool_size", "4"))
			}
			return server, pooler
		}
	}
	return e.database(t)
}

// PGS-06: fn hands the transaction to several goroutines. Whatever the driver makes of it, all of
// it is written or nothing, and neither the lock nor a connection stays behind. A goroutine that
// outlives fn can do nothing any more.
func TestSeveralGoroutines(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		d.table("made (id bigint NOT NULL)")
		db := d.open("", d.levels[0].params)
		ctx := kit.Context(t, 2*time.Minute)
		o := d.options(d.levels[0])
		const goroutines, inserts = 4, 5
		kinds := map[string]int{}
		for round := range int64(kit.Count(6, 200)) {
			var late *sql.Tx
			reading := round%2 == 1 // one of them has a result open meanwhile
			err := sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error {
				late = tx
				errs := make([]error, goroutines+1)
				var wg sync.WaitGroup
				for i := range goroutines {
					wg.Go(func() {
						for range inserts {
							errs[i] = errors.Join(errs[i], insert(ctx, tx, round))
						}
					})
				}
				if reading {
					wg.Go(func() { errs[goroutines] = read(ctx, tx) })
				}
				wg.Wait()
				return errors.Join(errs...)
			})
			want := int64(0)
			if err == nil {
				want = goroutines * inserts
			}
			if !reading && err != nil {
				t.Errorf("goroutines that take turns: %v", err)
			}
			kinds[fmt.Sprint(reading, " ", err == nil)]++
			d.wantMade(round, want)
			if err := insert(ctx, late, -1); !errors.Is(err, sql.ErrTxDone) {
				t.Errorf("a goroutine that outlives fn is answered %v, want ErrTxDone", err)
			}
			if n := db.Stats().InUse; n != 0 {
				t.Errorf("%d connections are still in use", n)
			}
			quick := o
			quick.LockWait = 5 * time.Second
			if err := sqlstore.Locked(ctx, d.admin, quick, "k", func(*sql.Tx) error { return nil }); err != nil {
				t.Errorf("the next holder, %v after %v: %v", quick.LockWait, err, err)
			}
		}
		d.wantMade(-1, 0)
		t.Logf("with a result open, and without an error: %v", kinds)
	})
}

// read reads slowly, while the others want the connection.
func read(ctx context.Context, tx *sql.Tx) error {
	rows, err := tx.QueryContext(ctx, "SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3")
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		time.Sleep(5 * time.Millisecond)
	}
	return rows.Err()
}

// PGS-07: the server ends the transaction of a holder that idles in it, and the next one begins.
// Nothing of the first one is written, unless it is run again after the other, and it is told.
func TestIdleHolderIsEnded(t *testing.T) {
	t.Parallel()
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			idle := servertest.Setting("idle_in_transaction_session_timeout", "500ms")
			if e.dialect == sqlstore.MySQL {
				idle = servertest.Setting("idle_transaction_timeout", "1")
			}
			d := e.with(t, idle)
			if !d.networked(t) {
				return
			}
			d.table("made (id bigint NOT NULL)")
			ctx := kit.Context(t, time.Minute)
			o := d.options(d.levels[0])
			inside, next := make(chan struct{}), make(chan error, 1)
			go func() {
				<-inside
				db := d.open("", "")
				next <- sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 2) })
			}()
			runs := 0
			err := sqlstore.Locked(ctx, d.open("", ""), o, "k", func(tx *sql.Tx) error {
				runs++
				if err := insert(ctx, tx, 1); err != nil || runs > 1 {
					return err
				}
				close(inside)
				if err := <-next; err != nil { // the fault has happened when it comes through
					t.Errorf("the next holder: %v", err)
				}
				return nil
			})
			d.wantMade(2, 1)
			switch {
			case err == nil && runs > 1:
				d.wantMade(1, 1)
			case runs == 1 && errors.Is(err, store.ErrUncertain): // which a commit that was sent is
				d.wantMade(1, 0)
			default:
				t.Errorf("the holder whose transaction was ended: %v after %d runs", err, runs)
			}
		})
	}
}

// PGS-08: the time-outs of the role end no wait for the lock before its own bound, as which they are
// told then; no setting of the wait is left behind.
func TestTimeoutsOfTheRole(t *testing.T) {
	t.Parallel()
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			t.Parallel()
			settings, show := []servertest.SQLOption{servertest.Setting("statement_timeout", "1s"), servertest.Setting("lock_timeout", "700ms")},
				"SELECT current_setting('statement_timeout') || ' ' || current_setting('lock_timeout')"
			if e.dialect == sqlstore.MySQL {
				settings, show = []servertest.SQLOption{servertest.Setting("max_statement_time", "1"), servertest.Setting("innodb_lock_wait_timeout", "1")},
					"SELECT concat(@@max_statement_time, ' ', @@innodb_lock_wait_timeout)"
			}
			d := e.with(t, settings...)
			if !d.networked(t) {
				return
			}
			d.table("made (id bigint NOT NULL)")
			ctx := kit.Context(t, 2*time.Minute)
			db := d.open("", "")
			db.SetMaxOpenConns(1)
			shown := func() (s string) {
				if err := db.QueryRowContext(ctx, show).Scan(&s); err != nil {
					t.Fatal(err)
				}
				return s
			}
			before := shown()
			inside, release := make(chan struct{}), make(chan struct{})
			held := make(chan error, 1)
			go func() {
				held <- sqlstore.Locked(ctx, d.open("", ""), d.options(d.levels[0]), "k", func(*sql.Tx) error {
					close(inside)
					<-release
					return nil
				})
			}()
			<-inside
			o := d.options(d.levels[0])
			o.LockWait = 2 * time.Second
			if err := sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 1) }); !errors.Is(err, store.ErrHeld) {
				t.Errorf("while another has the lock: %v, want ErrHeld", err)
			}
			time.AfterFunc(6*time.Second, func() { close(release) })
			o.LockWait = 30 * time.Second
			if err := sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 2) }); err != nil {
				t.Errorf("while another has the lock for 6 s: %v", err)
			}
			if err := <-held; err != nil {
				t.Error(err)
			}
			d.wantMade(1, 0)
			d.wantMade(2, 1)
			if after := shown(); after != before {
				t.Errorf("settings are %s afterwards, were %s", after, before)
			}
		})
	}
}

// sleeperChild takes the lock, says so, and has the server run a long statement in its transaction.
func sleeperChild() {
	args := kit.Args() // driver, data source, statement
	db, err := sql.Open(args[0], args[1])
	if err != nil {
		kit.Say("failed", err)
		return
	}
	defer db.Close()
	ctx := context.Background()
	err = sqlstore.Locked(ctx, db, sqlstore.LockedOptions{Dialect: sqlstore.PostgreSQL}, "k", func(tx *sql.Tx) error {
		if err := insert(ctx, tx, 1); err != nil {
			return err
		}
		kit.Say("inside")
		_, err := tx.ExecContext(ctx, args[2])
		return err
	})
	kit.Say("ended", err)
}

// PGS-03, PGS-09: a holder is killed, also behind a pooler, while the server runs a long statement of
// its transaction. The next one is told that another has the lock until the server looks at its
// client, and then gets it; nothing of the dead one is written.
func TestKilledHolder(t *testing.T) {
	t.Parallel()
	for _, e := range engines[:2] { // PostgreSQL
		t.Run(e.name, func(t *testing.T) {
			d := e.with(t)
			d.table("made (id bigint NOT NULL)")
			ctx := kit.Context(t, 2*time.Minute)
			db := d.open("", "")
			o := d.options(d.levels[0])
			next := func() error {
				return sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 2) })
			}
			driver, dsn := d.dsn("", "")
			for _, looks := range []bool{false, true} {
				set := "0"
				if looks {
					set = "200ms"
				}
				must(t, d.admin, "ALTER SYSTEM SET client_connection_check_interval = '"+set+"'", "SELECT pg_reload_conf()")
				child := kit.Child(t, "sleeper", driver, dsn, "SELECT pg_sleep(50)")
				child.Expect(t, "inside", time.Minute)
				servertest.Eventually(t, 20*time.Second, func() error {
					if number(t, d.admin, "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == 0 {
						return errors.New("the statement does not run yet")
					}
					return nil
				})
				child.Kill()
				o.LockWait = time.Second
				if looks {
					o.LockWait = 20 * time.Second
				}
				err := next()
				if looks && err != nil {
					t.Errorf("where the server looks at its clients: %v", err)
				}
				if !looks {
					if !errors.Is(err, store.ErrHeld) {
						t.Errorf("while the server runs a dead client's statement: %v, want ErrHeld", err)
					}
					must(t, d.admin, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
				}
			}
			d.wantMade(1, 0)
			d.wantMade(2, 1)
		})
	}
}

// PGS-13: two keys have one row, and two callers ask for them, inside another, in opposite order. Nobody
// waits for ever, and the ones that have both have them alone.
func TestKeysOfOneRow(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		if !d.networked(t) {
			return
		}
		const bytes = "\xff"
		text := fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(bytes)))
		db := d.open("", "")
		ctx := kit.Context(t, time.Minute)
		o := d.options(d.levels[0])
		o.LockWait = 2 * time.Second
		var met, wg sync.WaitGroup
		met.Add(2)
		for _, order := range [][2]string{{"a", bytes}, {text, "a"}} {
			wg.Go(func() {
				first := true
				err := sqlstore.Locked(ctx, db, o, order[0], func(*sql.Tx) error {
					if first {
						first = false
						met.Done()
						met.Wait()
					}
					return sqlstore.Locked(ctx, db, o, order[1], func(*sql.Tx) error { return nil })
				})
				if err != nil && !errors.Is(err, store.ErrHeld) {
					t.Errorf("%q: %v, want ErrHeld or nil", order, err)
				}
			})
		}
		wg.Wait()
		for _, key := range []string{"a", bytes, text} {
			if err := sqlstore.Locked(ctx, db, o, key, func(*sql.Tx) error { return nil }); err != nil {
				t.Errorf("key %q afterwards: %v", strings.ToValidUTF8(key, "?"), err)
			}
		}
	})
}
