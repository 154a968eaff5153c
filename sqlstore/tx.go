package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/store"
)

const (
	callLimit    = 5 * time.Second        // of a call, and of a clean-up behind one
	answerGrace  = 100 * time.Millisecond // for the driver to return after its context is done
	minBusyPause = time.Millisecond
	maxBusyPause = 20 * time.Millisecond
)

var errNoAnswer = errors.New("no answer from the database within " + callLimit.String())

// race runs op under ctx and callLimit, and returns soon after they end whatever the
// driver does; the outcome is then uncertain. settle, where given, is called when op has
// returned, before race does unless the caller has left.
func race[T any](ctx context.Context, op func(context.Context) (T, error), settle func(left bool, err error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, errNoAnswer)
	defer cancel()
	answers := make(chan answer, 1)
	var decided atomic.Bool // by op, that it answers, or by the caller, that it leaves
	go func() {
		v, err := op(ctx)
		left := !decided.CompareAndSwap(false, true)
		if settle != nil {
			settle(left, err)
		}
		answers <- answer{v, err}
	}()
	select {
	case a := <-answers:
		return a.v, a.err
	case <-ctx.Done():
	}
	grace := time.NewTimer(answerGrace)
	defer grace.Stop()
	select {
	case a := <-answers:
		return a.v, a.err
	case <-grace.C:
	}
	if decided.CompareAndSwap(false, true) {
		var none T
		return none, uncertain(context.Cause(ctx))
	}
	a := <-answers
	return a.v, a.err
}

// tx is a running BEGIN IMMEDIATE transaction: nobody else writes until it ends.
type tx struct {
	ctx  context.Context
	conn *sql.Conn
	s    *Store
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
func (s *Store) write(ctx context.Context, fn func(*tx) error) error {
	return s.retry(ctx, func() error { return s.writeOnce(ctx, fn) })
}

// retry runs f while the database is busy, with random pauses that grow, until ctx ends.
func (s *Store) retry(ctx context.Context, f func() error) error {
	var locked error
	for pause := minBusyPause; ; pause = min(2*pause, maxBusyPause) {
		err := f()
		switch {
		case err == nil:
			return nil
		case hasKind(err):
			return err
		case sqlerr.SQLiteBusyNow(err):
			locked = err
			if sleep(ctx, time.Duration(rand.Int64N(int64(pause)))) {
				continue
			}
		case ctx.Err() == nil:
			return classify(err)
		}
		// The context has ended, and nothing has been committed.
		switch end := context.Cause(ctx); {
		case locked != nil:
			return unavailable(lockedText+": "+end.Error(), errors.Join(ctx.Err(), locked))
		case end == errNoAnswer:
			return unavailable(end.Error(), err)
		}
		return ctx.Err()
	}
}

// sleep reports false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return ctx.Err() == nil
	}
}

func (s *Store) writeOnce(ctx context.Context, fn func(*tx) error) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	t := &tx{ctx: ctx, conn: conn, s: s, sent: s.clock.Now()}
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		if !sqlerr.SQLiteBusyNow(err) {
			t.end("ROLLBACK") // it may have begun all the same
		}
		return err
	}
	t.now = s.clock.now()
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
	s.remember(t)
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
	if v, err := strconv.Atoi(version); err != nil || v != schemaVersion || t.id == "" {
		return badDatabase("has tables of version "+strconv.Quote(version)+", this program knows "+strconv.Itoa(schemaVersion)+"; use a later program", nil)
	}
	return t.same()
}

// same refuses a database that is not the one that the store began with, or whose file
// another process would no longer find.
func (t *tx) same() error {
	known := t.s.known()
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

func (s *Store) known() database {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.database
}

// remember keeps the database of the first transaction that was committed.
func (s *Store) remember(t *tx) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.database.id == "" {
		s.database = t.database
	}
}

// checked makes sure that the database has been checked once by this store.
func (s *Store) checked(ctx context.Context) error {
	if s.known().id != "" {
		return nil
	}
	return s.ensure(ctx)
}

// ensure checks the database, and makes its tables where they are missing.
func (s *Store) ensure(ctx context.Context) error {
	err := s.write(ctx, func(*tx) error { return nil })
	var f *fault
	if errors.As(err, &f) && f.kind == store.ErrUncertain {
		return unavailable(f.text, f.cause) // no grant is at stake
	}
	return err
}
