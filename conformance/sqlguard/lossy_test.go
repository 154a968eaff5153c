package sqlguard_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/go-sql-driver/mysql"
	"modernc.org/sqlite"
)

// lossy is a driver in front of an engine's own that loses commits, as a connection does that
// breaks at that very moment. It works where there is no network, lets others act in between,
// and can count rows wrongly, as a proxy does that has its own flags.
type lossy struct {
	driver driver.Driver
	dsn    string

	busy atomic.Int64 // answers that the database is locked

	mu       sync.Mutex
	next     *lostCommit
	hits     map[bool]int // by applied
	affected *int64       // what every statement is said to have changed
}

// lostCommit is what happens to the next commit.
type lostCommit struct {
	applied bool   // it takes effect
	then    func() // what happens before the caller is told
	err     error  // what the caller is told; the connection is broken where it is nil
}

// brokenErrors are how drivers tell that a connection broke.
var brokenErrors = []error{
	io.ErrUnexpectedEOF, driver.ErrBadConn, mysql.ErrInvalidConn,
	&net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ECONNRESET)},
}

// openLossy is [database.open] through such a driver.
func (d *database) openLossy(params string) (*sql.DB, *lossy) {
	d.t.Helper()
	plain := d.open("", params)
	_, dsn := d.dsn("", params)
	l := &lossy{driver: plain.Driver(), dsn: dsn, hits: map[bool]int{}}
	db := sql.OpenDB(l)
	d.t.Cleanup(func() { db.Close() })
	return db, l
}

// lose lets the next commit be lost.
func (l *lossy) lose(c lostCommit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.next = &c
}

// lost is how many commits were.
func (l *lossy) lost() (applied, not int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.hits[true], l.hits[false]
}

// Connect implements [driver.Connector].
func (l *lossy) Connect(context.Context) (driver.Conn, error) {
	c, err := l.driver.Open(l.dsn)
	if err != nil {
		return nil, err
	}
	return &lossyConn{fullConn: c.(fullConn), l: l}, nil
}

// Driver implements [driver.Connector].
func (l *lossy) Driver() driver.Driver { return l.driver }

// commit does a commit, or loses it.
func (l *lossy) commit(c *lossyConn, commit, rollback func() error) error {
	l.mu.Lock()
	lost := l.next
	l.next = nil
	if lost != nil {
		l.hits[lost.applied]++
	}
	l.mu.Unlock()
	if lost == nil {
		return commit()
	}
	end := rollback
	if lost.applied {
		end = commit
	}
	if err := end(); err != nil {
		return err
	}
	if lost.then != nil {
		lost.then()
	}
	if lost.err != nil {
		return lost.err
	}
	c.broken = true
	return brokenErrors[rand.IntN(len(brokenErrors))]
}

// count lets every statement say from now on that it changed n rows.
func (l *lossy) count(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.affected = &n
}

// note counts err where it says that the database is locked, for now.
func (l *lossy) note(err error) error {
	if isBusy(err) {
		l.busy.Add(1)
	}
	return err
}

// isBusy reports whether SQLite says so. Another code is for what no waiting helps.
func isBusy(err error) bool {
	var coded interface{ Code() int }
	return errors.As(err, &coded) && coded.Code() == 5
}

// counted is a result that may lie.
type counted struct {
	driver.Result
	l *lossy
}

func (r counted) RowsAffected() (int64, error) {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if r.l.affected == nil {
		return r.Result.RowsAffected()
	}
	return *r.l.affected, nil
}

// fullConn is what all three drivers have.
type fullConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
}

type lossyConn struct {
	fullConn
	l      *lossy
	broken bool
}

func (c *lossyConn) BeginTx(ctx context.Context, o driver.TxOptions) (driver.Tx, error) {
	if c.broken {
		return nil, driver.ErrBadConn
	}
	tx, err := c.fullConn.BeginTx(ctx, o)
	if err != nil {
		return nil, c.l.note(err)
	}
	return &lossyTx{tx, c}, nil
}

func (c *lossyConn) ExecContext(ctx context.Context, q string, args []driver.NamedValue) (r driver.Result, err error) {
	if c.broken {
		return nil, driver.ErrBadConn
	}
	if strings.HasPrefix(strings.ToUpper(strings.TrimSpace(q)), "COMMIT") {
		err := c.l.commit(c, func() error {
			r, err = c.fullConn.ExecContext(ctx, q, args)
			return err
		}, func() error {
			_, err := c.fullConn.ExecContext(ctx, "ROLLBACK", nil)
			return err
		})
		return r, err
	}
	r, err = c.fullConn.ExecContext(ctx, q, args)
	if err != nil {
		return nil, c.l.note(err)
	}
	return counted{r, c.l}, nil
}

func (c *lossyConn) QueryContext(ctx context.Context, q string, args []driver.NamedValue) (driver.Rows, error) {
	if c.broken {
		return nil, driver.ErrBadConn
	}
	rows, err := c.fullConn.QueryContext(ctx, q, args)
	return rows, c.l.note(err)
}

// CheckNamedValue implements [driver.NamedValueChecker].
func (c *lossyConn) CheckNamedValue(v *driver.NamedValue) error {
	if checker, ok := c.fullConn.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

// IsValid implements [driver.Validator].
func (c *lossyConn) IsValid() bool { return !c.broken }

func (c *lossyConn) ResetSession(ctx context.Context) error {
	if c.broken {
		return driver.ErrBadConn
	}
	return c.fullConn.ResetSession(ctx)
}

type lossyTx struct {
	driver.Tx
	c *lossyConn
}

func (t *lossyTx) Commit() error {
	if _, ok := t.c.l.driver.(*sqlite.Driver); ok {
		return t.c.l.commit(t.c, t.commitSQLite, t.Tx.Rollback)
	}
	return t.c.l.commit(t.c, t.Tx.Commit, t.Tx.Rollback)
}

// commitSQLite waits as a connection does that has a time-out, so that it is seen to wait. The
// driver rolls back what it cannot commit at once.
func (t *lossyTx) commitSQLite() error {
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		_, err := t.c.fullConn.ExecContext(context.Background(), "COMMIT", nil)
		if t.c.l.note(err); err == nil {
			return nil
		}
		if !isBusy(err) || time.Now().After(deadline) {
			t.Tx.Rollback()
			return err
		}
	}
}
