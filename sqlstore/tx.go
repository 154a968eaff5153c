package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"os"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/store"
)

// tx is a running BEGIN IMMEDIATE transaction: nobody else writes until it ends.
type tx struct {
	ctx  context.Context
	conn *sql.Conn
	e    *sqlite
	// sent is when BEGIN was sent, and now the reading of the lease clock after it had
	// been granted.
	sent clock.Instant
	now  time.Duration
	database
}

// database is what a store knows of its database once a transaction has been committed.
type database struct {
	id   string      // in the database
	file string      // its path
	stat os.FileInfo // of that file; nil where the system has none of that name
}

// write runs fn in a transaction, and runs the whole anew while the database is busy,
// until ctx ends. An error of fn rolls back and is returned. An error that leaves the
// outcome open is store.ErrUncertain.
func (e *sqlite) write(ctx context.Context, fn func(*tx) error) error {
	return e.retry(ctx, func() error { return e.writeOnce(ctx, fn) })
}

func (e *sqlite) retry(ctx context.Context, f func() error) error {
	return retry(ctx, attempts{sqlerr.SQLiteBusyNow, lockedText, e.meaning, e.db}, f)
}

// meaning is that of classify, which names the file that is refused.
func (e *sqlite) meaning(err error) error {
	err = classify(err)
	var refused *store.InvalidError
	if errors.As(err, &refused) { // classify has just made it
		refused.Value = e.path
	}
	return err
}

func (e *sqlite) writeOnce(ctx context.Context, fn func(*tx) error) error {
	conn, err := e.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	t := &tx{ctx: ctx, conn: conn, e: e, sent: e.clock.Now()}
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		if !sqlerr.SQLiteBusyNow(err) && sqlerr.SQLite(err) != sqlerr.InTx {
			t.end("ROLLBACK") // it may have begun all the same, but not inside somebody else's
		}
		return err
	}
	t.now = e.clock.now()
	if err := t.check(); err != nil {
		t.end("ROLLBACK")
		return err
	}
	if err := fn(t); err != nil {
		t.end("ROLLBACK")
		return err
	}
	if err := t.end("COMMIT"); err != nil {
		t.end("ROLLBACK")
		if sqlerr.SQLiteBusyNow(err) {
			return err
		}
		return uncertain(err)
	}
	e.remember(t)
	return nil
}

// end runs COMMIT or ROLLBACK, which no context interrupts, so that their outcome is
// known. A connection that cannot be brought out of its transaction is given up.
func (t *tx) end(statement string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), callLimit)
	defer cancel()
	_, err := t.conn.ExecContext(ctx, statement)
	if err != nil && statement == "ROLLBACK" && sqlerr.SQLiteCode(err) != sqlerr.SQLiteError { // it is where none was active
		t.conn.Raw(func(any) error { return driver.ErrBadConn })
	}
	return err
}

// check reads what the connection and the database are, in every transaction, since a
// setting belongs to a connection and the pool opens new ones. It makes missing tables.
func (t *tx) check() error {
	var journal, synchronous, version string
	read := func() error {
		return t.conn.QueryRowContext(t.ctx, checkSQL).Scan(&journal, &synchronous, &version, &t.id)
	}
	err := read()
	if err != nil && sqlerr.SQLiteNoTable(err) {
		if err = t.checkSettings(); err == nil {
			err = t.makeTables()
		}
		if err == nil {
			err = read()
		}
	}
	if err != nil {
		return err
	}
	if err := checkSettings(journal, synchronous); err != nil {
		return err
	}
	if t.id == "" {
		version = ""
	}
	if err := checkVersion(version); err != nil {
		return err
	}
	return t.same()
}

// same refuses a database that is not the one that the store began with, or whose file
// another process would no longer find.
func (t *tx) same() error {
	known := t.e.known()
	if known.id == "" {
		if err := t.conn.QueryRowContext(t.ctx, fileSQL).Scan(&t.file); err != nil {
			return err
		}
		if t.file == "" {
			return badDatabase("must be a file, which other processes can open; it is in memory", nil)
		}
		t.stat, _ = os.Stat(t.file)
		return nil
	}
	if t.id != known.id || known.moved() {
		return badDatabase("was replaced or deleted while in use; restart the programs that use it", nil)
	}
	return nil
}

// moved reports whether the path no longer leads to the file.
func (d database) moved() bool {
	if d.stat == nil {
		return false
	}
	now, err := os.Stat(d.file)
	return errors.Is(err, os.ErrNotExist) || err == nil && !os.SameFile(d.stat, now)
}

func (e *sqlite) known() database {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.database
}

// remember keeps the database of the first transaction that was committed.
func (e *sqlite) remember(t *tx) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.database.id == "" {
		e.database = t.database
	}
}

// checked makes sure that the database has been checked once by this store.
func (e *sqlite) checked(ctx context.Context) error {
	if e.known().id != "" {
		return nil
	}
	return e.ensure(ctx)
}

// ensure checks the database, and makes its tables where they are missing.
func (e *sqlite) ensure(ctx context.Context) error {
	return noGrant(e.write(ctx, func(*tx) error { return nil }))
}
