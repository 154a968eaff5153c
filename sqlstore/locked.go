package sqlstore

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/store"
)

// LockedOptions are the settings of [Locked].
type LockedOptions struct {
	Dialect Dialect // required

	// LockWait bounds each wait for another's transaction, for a connection and for a reply of
	// the database; 0 is 5 s. On PostgreSQL, and there alone, the statements of fn too wait for
	// locks no longer.
	LockWait time.Duration

	// TxOptions are those of the transaction. The lock excludes at every isolation level, and
	// fn sees what the holder before it has written. nil is READ COMMITTED on PostgreSQL, which
	// waits for the lock in its queue, and else the database's default. REPEATABLE READ and
	// SERIALIZABLE of PostgreSQL refuse whoever has waited, so that the transaction is run again.
	TxOptions *sql.TxOptions
}

// Locked runs fn in a transaction of db that holds the lock of key from its first statement to
// its commit. The lock is a row in the same database as what fn writes, so that there is no ttl
// which could run out, no token, and no moment at which the lock is lost and the write is not:
// whoever loses the lock, by a pause, a broken connection or a failover, cannot commit any more.
// It is the first choice where everything that the lock protects is in that one database. It
// protects nothing else, and does not exclude the leases of a [Store].
//
// fn gets the transaction, leaves its commit and rollback to Locked, and returns the errors of
// its statements: one that fails may have ended the transaction, and so the lock. It sends no
// ROLLBACK or COMMIT as a statement either, of which PostgreSQL does not tell at the end. It has no
// effects but those of the transaction, since it may run several times: serialization failures
// and deadlocks, also those that fn returns, are retried as a whole until ctx ends. Locked of the
// same key inside fn waits for itself, and ends in [store.ErrHeld].
//
// nil means that everything was written, and each other answer but [store.ErrUncertain] that
// nothing was: [store.ErrHeld] where another held the lock, or what fn wanted to write, for longer
// than LockWait; [store.ErrUnavailable]; a [*store.InvalidError]; the error of fn, as it is; or
// the error of ctx. Where the reply to the commit is lost, or ctx ends meanwhile, what became of
// it is read from the row. ErrUncertain is the answer where that does not tell, since others have
// had the lock meanwhile, or where the database cannot be reached for LockWait (2 s at least);
// and on MySQL where fn went on after an error that had ended the transaction.
//
// A holder that stops inside fn keeps the others out until the server ends its connection: set
// idle_in_transaction_session_timeout (PostgreSQL), idle_transaction_timeout (MariaDB) or
// wait_timeout (MySQL). One that dies while the server runs a long statement of fn keeps them out
// until that ends: set client_connection_check_interval (PostgreSQL). On SQLite the lock is that of
// the whole database.
//
// Locked may be called by any number of goroutines and processes at once, also through a pooler
// that keeps a connection for a transaction only, such as PgBouncer in transaction mode. Rows are
// in the table holdfast_locked, which the first call makes; a key that was used once keeps its
// row. Keys are those of [store.CheckKey].
func Locked(ctx context.Context, db *sql.DB, o LockedOptions, key string, fn func(*sql.Tx) error) error {
	g, err := o.guard(db)
	if err != nil {
		return err
	}
	if err := store.CheckKey(key); err != nil {
		return err
	}
	if fn == nil {
		return &store.InvalidError{Field: "fn", Rule: "must not be nil"}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	run := func() error {
		return g.Tx(ctx, lockedRow(key), lockedToken, func(tx *sql.Tx) error {
			if err := fn(tx); err != nil {
				return &fnError{err}
			}
			return nil
		})
	}
	err = run()
	if unfitTable(err) { // which may be missing
		if err = g.EnsureSchema(ctx); err == nil {
			err = run()
		}
	}
	return lockedError(ctx, db, err)
}

// fnError is an error of fn on its way through the guard.
type fnError struct{ error }

func (e *fnError) Unwrap() error { return e.error }

// The lock is the row of a guard whose token never changes. What tells its transactions apart,
// when the reply to a commit is lost, is the mark that each of them leaves.
const (
	lockedTable             = "holdfast_locked"
	lockedToken fence.Token = 1
)

func (o LockedOptions) guard(db *sql.DB) (*sqlfence.Guard, error) {
	dialects := map[Dialect]sqlfence.Dialect{PostgreSQL: sqlfence.PostgreSQL, MySQL: sqlfence.MySQL, SQLite: sqlfence.SQLite}
	d, ok := dialects[o.Dialect]
	if !ok {
		return nil, &store.InvalidError{Field: "Dialect", Rule: "must be PostgreSQL, MySQL or SQLite"}
	}
	return sqlfence.New(db, sqlfence.Options{Dialect: d, Table: lockedTable, LockWait: o.LockWait, TxOptions: o.TxOptions, Unchecked: true})
}

// lockedRow is the name of the row of key: of other characters than ASCII a driver and a database
// may make different texts. Two keys may share a row, which costs a wait.
func lockedRow(key string) string {
	if key == asciiOnly(key) {
		return key
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(key)))
}

// unfitTable reports whether the guard says that its table is not as it should be.
func unfitTable(err error) bool {
	var own *fnError
	var invalid *store.InvalidError
	return !errors.As(err, &own) && errors.As(err, &invalid) && invalid.Field == "table"
}

// lockedError says what an error of the guard means for a lock.
func lockedError(ctx context.Context, db *sql.DB, err error) error {
	if own, ok := err.(*fnError); ok {
		return own.error
	}
	if err == nil {
		return nil
	}
	if end := ctx.Err(); end != nil && errors.Is(err, end) && !errors.Is(err, fence.ErrUncertain) {
		return &fault{end, strings.TrimPrefix(oneLine(err), "sqlfence: "+end.Error()+": "), err}
	}
	text := oneLine(err)
	var failed *fence.Error
	if errors.As(err, &failed) && failed.Err != nil {
		text = oneLine(failed.Err)
	}
	switch {
	case errors.Is(err, fence.ErrUncertain):
		return &fault{store.ErrUncertain, text, err}
	case errors.Is(err, fence.ErrBusy):
		return &fault{store.ErrHeld, strings.TrimPrefix(text, store.ErrHeld.Error()+": "), err} // which an inner Locked has said
	case errors.Is(err, fence.ErrUnavailable) && readOnly(err):
		return errStandby(err)
	case errors.Is(err, fence.ErrUnavailable):
		return &fault{store.ErrUnavailable, text + poolHint(db), err}
	}
	if advice := lockedAdvice(err); advice != "" {
		return badDatabase(advice+": "+text, err)
	}
	return err
}

// lockedAdvice is what to do about an error that the server answered; empty where that is not
// known.
func lockedAdvice(err error) string {
	if sqlerr.SQLState(err) == "42501" {
		return "must let this role read and write the table " + lockedTable + "; any call of Locked by a role that may make it does so"
	}
	return postgres{}.advice(err)
}
