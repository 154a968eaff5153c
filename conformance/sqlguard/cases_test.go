package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/memstore"
)

// eachEngine runs f for each engine, with an empty bank.
func eachEngine(t *testing.T, f func(t *testing.T, b bank)) {
	t.Parallel()
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			f(t, newBank(t, engine))
		})
	}
}

// eachLayout runs f for the layouts in which a token may write many times.
func eachLayout(t *testing.T, b bank, f func(t *testing.T, l layout)) {
	for _, l := range []layout{{name: "table"}, {name: "column", column: true}, {name: "column without Seq", column: true, noSeq: true}} {
		t.Run(l.name, func(t *testing.T) { f(t, l) })
	}
}

// wantStale fails unless err says that seen has been seen.
func wantStale(t testing.TB, what string, err error, seen fence.Token) {
	t.Helper()
	var stale *fence.StaleError
	if !errors.As(err, &stale) || stale.Seen != seen {
		t.Errorf("%s: %v, want that %v has been seen", what, err, seen)
	}
}

// write is a fenced transaction that sets the account to a value.
func (b bank) write(ctx context.Context, g *sqlfence.Guard, resource string, t fence.Token, v int) error {
	return g.Tx(ctx, resource, t, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE account SET v = %d WHERE id = 'to'", v))
		return err
	})
}

// Cases SQL-01 and SQL-03. A database that counts changed rows, one that counts those found, and
// a proxy that says what it likes: the first write, a later one, and the same once more succeed,
// and a stale one is refused with the mark that was seen.
func TestCountsOfRowsDecideNothing(t *testing.T) {
	eachEngine(t, func(t *testing.T, b bank) {
		pools := map[string]*sql.DB{"as it is": b.admin}
		if b.engine == mariadb {
			pools["clientFoundRows"] = b.open("", "clientFoundRows=true")
			for _, n := range []int64{0, 1, 2} {
				db, l := b.openLossy("")
				l.count(n)
				pools[fmt.Sprint("always ", n)] = db
			}
		}
		for name, db := range pools {
			eachLayout(t, b, func(t *testing.T, l layout) {
				resource := name + l.name
				g := b.guard(db, b.options(l, resource))
				ctx := kit.Context(t, time.Minute)
				for step, write := range []struct {
					token fence.Token
					v     int
				}{{33, 1}, {33, 1}, {33, 2}, {34, 2}, {34, 2}} {
					if err := b.write(ctx, g, resource, write.token, write.v); err != nil {
						t.Errorf("%s: write %d: %v", name, step, err)
					}
					if err := g.Claim(ctx, resource, write.token); err != nil {
						t.Errorf("%s: claim %d: %v", name, step, err)
					}
				}
				wantStale(t, name, b.write(ctx, g, resource, 33, 9), 34)
				wantStale(t, name, g.Claim(ctx, resource, 33), 34)
				wantStale(t, name, g.Check(ctx, resource, 33), 34)
				if v := number(t, b.admin, "SELECT v FROM account WHERE id = 'to'"); v != 2 {
					t.Errorf("%s: the value is %d, want 2", name, v)
				}
			})
		}
	})
}

// Case SQL-04. Two clients add 1 by reading and writing, under a lock and in a fenced
// transaction, which has ended when the lock is released: no addition is lost.
func TestLockAndTransaction(t *testing.T) {
	eachEngine(t, func(t *testing.T, b bank) {
		store := memstore.New()
		g := b.guard(b.admin, b.options(layout{}, ""))
		rounds := kit.Count(100, 1000)
		var wg sync.WaitGroup
		for range 2 {
			locks, err := holdfast.New(store, nil)
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				for range rounds {
					err := locks.Do(t.Context(), "to", func(ctx context.Context, lease *holdfast.Lease) error {
						return g.Tx(ctx, "to", lease.Token(), func(tx *sql.Tx) error {
							var v int
							if err := tx.QueryRowContext(ctx, "SELECT v FROM account WHERE id = 'to'").Scan(&v); err != nil {
								return err
							}
							_, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE account SET v = %d WHERE id = 'to'", v+1))
							return err
						})
					})
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		if v := number(t, b.admin, "SELECT v FROM account WHERE id = 'to'"); v != int64(2*rounds) {
			t.Errorf("the counter is %d, want %d", v, 2*rounds)
		}
	})
}

// busyError is how SQLite's driver says that the database is busy.
type busyError int

func (e busyError) Error() string { return fmt.Sprintf("database is locked (%d)", int(e)) }
func (e busyError) Code() int     { return int(e) }

// Case SQL-07. The commit fails for the sake of order, and another takes the lock and claims before
// the transaction is tried again: the whole is tried again, claim and all, and is stale.
func TestRetryChecksAnew(t *testing.T) {
	failures := map[string][]error{
		postgres: {&pgconn.PgError{Code: "40001"}, &pgconn.PgError{Code: "40P01"}},
		mariadb:  {&mysql.MySQLError{Number: 1213, SQLState: [5]byte([]byte("40001"))}, &mysql.MySQLError{Number: 1020}},
		sqlite3:  {busyError(5), busyError(517)},
	}
	eachEngine(t, func(t *testing.T, b bank) {
		db, lossy := b.openLossy("")
		eachLayout(t, b, func(t *testing.T, l layout) {
			resource := "retry " + l.name
			o := b.options(l, resource)
			g, newer := b.guard(db, o), newGuard(t, b.admin, o)
			ctx := kit.Context(t, time.Minute)
			for n, failure := range failures[b.engine] {
				token, runs := fence.Token(10*n+10), 0
				work := func(tx *sql.Tx) error {
					runs++
					_, err := tx.ExecContext(ctx, "UPDATE account SET v = v + 1 WHERE id = 'to'")
					return err
				}
				before := number(t, b.admin, "SELECT v FROM account WHERE id = 'to'")
				lossy.lose(lostCommit{err: failure})
				if err := g.Tx(ctx, resource, token, work); err != nil || runs != 2 {
					t.Errorf("%v at the commit: %v after %d runs, want none after 2", failure, err, runs)
				}
				runs = 0
				lossy.lose(lostCommit{err: failure, then: func() {
					if err := newer.Claim(ctx, resource, token+1); err != nil {
						t.Error(err)
					}
				}})
				wantStale(t, failure.Error(), g.Tx(ctx, resource, token, work), token+1)
				if v := number(t, b.admin, "SELECT v FROM account WHERE id = 'to'"); runs != 1 || v != before+1 {
					t.Errorf("%v: fn ran %d times beside a newer holder and the value rose by %d, want 1 and 1", failure, runs, v-before)
				}
			}
			if _, n := lossy.lost(); n == 0 {
				t.Error("no commit failed")
			}
		})
	})
}

// Case SQL-10. A row that is missing, one without a mark, and one with a larger mark are three
// different answers.
func TestZeroRowsAreToldApart(t *testing.T) {
	eachEngine(t, func(t *testing.T, b bank) {
		for _, noSeq := range []bool{false, true} {
			o := b.options(layout{column: true, noSeq: noSeq}, fmt.Sprint("null ", noSeq))
			must(t, b.admin, fmt.Sprintf("INSERT INTO resource VALUES ('newer %v', 34, 7)", noSeq))
			g := b.guard(b.admin, o)
			ctx := kit.Context(t, time.Minute)
			in := func(call func(context.Context, sqlfence.Handle, ...sqlfence.Mark) error, m sqlfence.Mark) error {
				tx, err := b.admin.BeginTx(ctx, nil)
				if err != nil {
					t.Fatal(err)
				}
				defer tx.Rollback()
				return call(ctx, tx, m)
			}
			for op, call := range map[string]func(resource string) error{
				"Check":   func(r string) error { return g.Check(ctx, r, 33) },
				"CheckIn": func(r string) error { return in(g.CheckIn, sqlfence.Mark{Resource: r, Token: 33}) },
				"Claim":   func(r string) error { return g.Claim(ctx, r, 33) },
				"ClaimIn": func(r string) error { return in(g.ClaimIn, sqlfence.Mark{Resource: r, Token: 33}) },
				"Tx":      func(r string) error { return b.write(ctx, g, r, 33, 5) },
			} {
				must(t, b.admin, "UPDATE resource SET token = NULL WHERE id LIKE 'null %'")
				if err := call(fmt.Sprint("missing ", noSeq)); !errors.Is(err, fence.ErrNoResource) {
					t.Errorf("%s of a missing row: %v, want %v", op, err, fence.ErrNoResource)
				}
				wantStale(t, op, call(fmt.Sprint("newer ", noSeq)), 34)
				err := call(fmt.Sprint("null ", noSeq))
				if strings.HasPrefix(op, "Check") && !errors.Is(err, fence.ErrUnclaimed) && !errors.Is(err, fence.ErrNoResource) {
					t.Errorf("%s of a row without a mark: %v, want %v", op, err, fence.ErrUnclaimed)
				}
				if !strings.HasPrefix(op, "Check") && err != nil {
					t.Errorf("%s of a row without a mark: %v", op, err)
				}
			}
		}
	})
}

// Case SQL-11. The database's default is SERIALIZABLE, and a hundred clients work on twenty
// resources at once: all succeed, with the guard's own choice of a level and with that one.
func TestSerializableByDefault(t *testing.T) {
	eachEngine(t, func(t *testing.T, b bank) {
		switch b.engine {
		case postgres:
			must(t, b.admin, "ALTER DATABASE holdfast SET default_transaction_isolation = 'serializable'")
		case mariadb:
			must(t, b.admin, "SET GLOBAL tx_isolation = 'SERIALIZABLE'")
		}
		db := b.open("", "")
		db.SetMaxOpenConns(100)
		db.SetMaxIdleConns(100)
		for i, options := range []*sql.TxOptions{nil, {Isolation: sql.LevelSerializable}} {
			if i > 0 && b.engine == sqlite3 {
				continue // there is one level
			}
			o := b.options(layout{}, "")
			o.TxOptions, o.LockWait = options, time.Minute
			g := b.guard(db, o)
			ctx := kit.Context(t, 5*time.Minute)
			var wg sync.WaitGroup
			for n := range 100 {
				wg.Go(func() {
					resource, id := fmt.Sprint("to ", n%20), int64(100*i+n)
					if err := g.Claim(ctx, resource, fence.Token(i+1)); err != nil {
						t.Errorf("client %d: Claim: %v", n, err)
					}
					err := g.Tx(ctx, resource, fence.Token(i+1), func(tx *sql.Tx) error {
						_, err := tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO transfer VALUES (%d)", id))
						return err
					})
					if err != nil {
						t.Errorf("client %d: Tx: %v", n, err)
					}
					if err := g.Check(ctx, resource, fence.Token(i+1)); err != nil {
						t.Errorf("client %d: Check: %v", n, err)
					}
				})
			}
			wg.Wait()
			if n := number(t, b.admin, "SELECT count(DISTINCT id) FROM transfer"); n != int64(100*(i+1)) {
				t.Errorf("%d transactions took effect, want %d", n, 100*(i+1))
			}
		}
	})
}

// Case SQL-13. The user's own REPEATABLE READ transaction has read before a newer holder
// claimed. The guard asked beside it, or inside it, does not answer from that old snapshot. In
// SQLite the check inside does, but then the transaction cannot write any more.
func TestOldSnapshotAnswersNothing(t *testing.T) {
	levels := []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}
	eachEngine(t, func(t *testing.T, b bank) {
		if b.engine == sqlite3 {
			levels = []sql.IsolationLevel{sql.LevelDefault}
		}
		eachLayout(t, b, func(t *testing.T, l layout) {
			for _, level := range levels {
				for _, claim := range []bool{false, true} {
					b.askInOldSnapshot(t, l, level, claim)
				}
			}
		})
	})
}

func (b bank) askInOldSnapshot(t *testing.T, l layout, level sql.IsolationLevel, claim bool) {
	resource := fmt.Sprint("snapshot ", l.name, level, claim)
	g := b.guard(b.admin, b.options(l, resource))
	ctx := kit.Context(t, time.Minute)
	if err := g.Claim(ctx, resource, 33); err != nil {
		t.Fatal(err)
	}
	tx, err := b.admin.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	number(t, tx, "SELECT count(*) FROM account") // the snapshot is of now
	if err := g.Claim(ctx, resource, 34); err != nil {
		t.Errorf("the newer holder: %v", err)
	}
	wantStale(t, "Check beside the transaction", g.Check(ctx, resource, 33), 34)
	mark := sqlfence.Mark{Resource: resource, Token: 33}
	if claim {
		err = g.ClaimIn(ctx, tx, mark)
	} else {
		err = g.CheckIn(ctx, tx, mark)
	}
	switch {
	case err == nil && b.engine == sqlite3 && !claim:
		if _, err := tx.ExecContext(ctx, "UPDATE account SET v = 7"); err == nil {
			t.Error("a transaction that is as old as the former holder's mark writes")
		}
	case !errors.Is(err, fence.ErrStale) && (!errors.Is(err, fence.ErrBusy) || level <= sql.LevelReadCommitted && b.engine != sqlite3):
		t.Errorf("in a transaction at %v that has read before, with claim: %v: %v", level, claim, err)
	}
}

// Case SQL-13. The pool has one connection, which the user's own transaction has: the guard
// answers that it is busy or not available, and does not wait for ever.
func TestPoolOfOne(t *testing.T) {
	eachEngine(t, func(t *testing.T, b bank) {
		db := b.open("", "")
		db.SetMaxOpenConns(1)
		const wait = 500 * time.Millisecond
		o := b.options(layout{}, "")
		o.LockWait = wait
		g := b.guard(db, o)
		ctx := kit.Context(t, time.Minute)
		if err := g.Claim(ctx, "to", 33); err != nil {
			t.Fatal(err)
		}
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		for op, call := range map[string]func() error{
			"Claim": func() error { return g.Claim(ctx, "to", 34) },
			"Check": func() error { return g.Check(ctx, "to", 33) },
			"Tx":    func() error { return b.write(ctx, g, "to", 34, 5) },
		} {
			began := time.Now()
			err := call()
			if d := time.Since(began); d > 10*wait || !errors.Is(err, fence.ErrBusy) && !errors.Is(err, fence.ErrUnavailable) {
				t.Errorf("%s with no connection left answers after %v of lock wait: %v", op, float64(d)/float64(wait), err)
			}
		}
		if err := g.ClaimIn(ctx, tx, sqlfence.Mark{Resource: "to", Token: 33}); err != nil {
			t.Errorf("ClaimIn on the one connection: %v", err)
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
		if err := g.Check(ctx, "to", 33); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	})
}

// Case TOK-08, in SQL. Tokens where a double has no room for the difference are ordered right.
func TestTokensAreExact(t *testing.T) {
	ascending := []fence.Token{1, 1<<31 - 1, 1 << 31, 1<<53 - 1, 1 << 53, 1<<53 + 1, math.MaxInt64 - 1, math.MaxInt64}
	eachEngine(t, func(t *testing.T, b bank) {
		eachLayout(t, b, func(t *testing.T, l layout) {
			resource := "exact " + l.name
			g := b.guard(b.admin, b.options(l, resource))
			ctx := kit.Context(t, time.Minute)
			for i, token := range ascending {
				if i > 0 {
					if err := g.Check(ctx, resource, token); !errors.Is(err, fence.ErrUnclaimed) {
						t.Errorf("Check of %v before its claim: %v", token, err)
					}
				}
				if err := b.write(ctx, g, resource, token, i); err != nil {
					t.Errorf("Tx with %v: %v", token, err)
				}
				if err := errors.Join(g.Claim(ctx, resource, token), g.Check(ctx, resource, token)); err != nil {
					t.Errorf("Claim and Check of %v: %v", token, err)
				}
				for _, lower := range ascending[:i] {
					wantStale(t, "Tx", b.write(ctx, g, resource, lower, 99), token)
					wantStale(t, "Claim", g.Claim(ctx, resource, lower), token)
					wantStale(t, "Check", g.Check(ctx, resource, lower), token)
				}
			}
		})
	})
}
