package sqlfence

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"sync"
	"testing"
)

// fakeDB is a database that knows the statements of the SQLite engine on the own table. A
// writer has the whole of it until it ends; who comes meanwhile is answered that it is locked.
// Statements can be told to fail or hang; what a statement says of rows affected is a lie.
type fakeDB struct {
	affected int64

	mu     sync.Mutex
	rows   map[string]row
	writer *fakeConn
	opened int
	checks int      // looks at the table's columns
	log    []string // statements, without what the check of the table asks
	// before is called before a statement, with its first word; an error is its answer.
	before func(ctx context.Context, verb string) error
	// lost is called before a commit; where it returns an error, that is the answer, and
	// applied says whether the commit takes effect all the same.
	lost func() (applied bool, err error)
}

func openFake(t testing.TB) (*fakeDB, *sql.DB) {
	f := &fakeDB{rows: map[string]row{}}
	db := sql.OpenDB(f)
	t.Cleanup(func() { db.Close() })
	return f, db
}

func (f *fakeDB) Connect(context.Context) (driver.Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.opened++
	return &fakeConn{f: f}, nil
}

func (f *fakeDB) Driver() driver.Driver { return nil }

// set is what another process does.
func (f *fakeDB) set(resource string, r row) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r.exists = true
	f.rows[resource] = r
}

func (f *fakeDB) get(resource string) row {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rows[resource]
}

// fakeError is an error as drivers of SQLite have them.
type fakeError int

func (e fakeError) Error() string { return fmt.Sprintf("fake (%d)", int(e)) }
func (e fakeError) Code() int     { return int(e) }

type fakeConn struct {
	f     *fakeDB
	inTx  bool
	dirty map[string]row
}

func (c *fakeConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("not prepared") }
func (c *fakeConn) Close() error                        { return c.end() }
func (c *fakeConn) Begin() (driver.Tx, error)           { return nil, errors.New("not used") }

func (c *fakeConn) BeginTx(ctx context.Context, _ driver.TxOptions) (driver.Tx, error) {
	if err := c.hook(ctx, "BEGIN"); err != nil {
		return nil, err
	}
	c.inTx = true
	return c, nil
}

func (c *fakeConn) hook(ctx context.Context, statement string) error {
	verb, _, _ := strings.Cut(statement, " ")
	c.f.mu.Lock()
	c.f.log = append(c.f.log, verb)
	before := c.f.before
	c.f.mu.Unlock()
	if before != nil {
		return before(ctx, verb)
	}
	return nil
}

func (c *fakeConn) Commit() error {
	if err := c.hook(context.Background(), "COMMIT"); err != nil {
		c.end()
		return err
	}
	c.f.mu.Lock()
	lost := c.f.lost
	c.f.mu.Unlock()
	var err error
	applied := true
	if lost != nil {
		applied, err = lost()
	}
	if applied {
		c.f.mu.Lock()
		maps.Copy(c.f.rows, c.dirty)
		c.f.mu.Unlock()
	}
	c.end()
	return err
}

func (c *fakeConn) Rollback() error {
	if err := c.hook(context.Background(), "ROLLBACK"); err != nil {
		return err
	}
	return c.end()
}

func (c *fakeConn) end() error {
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if c.f.writer == c {
		c.f.writer = nil
	}
	c.inTx, c.dirty = false, nil
	return nil
}

func (c *fakeConn) ExecContext(ctx context.Context, statement string, args []driver.NamedValue) (driver.Result, error) {
	if err := c.hook(ctx, statement); err != nil {
		return nil, err
	}
	f := c.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.writer != nil && f.writer != c {
		return nil, fakeError(5)
	}
	switch {
	case statement == "BEGIN" && c.inTx:
		return nil, errors.New("cannot start a transaction within a transaction")
	case statement == "BEGIN":
		c.inTx = true
	case statement == "ROLLBACK":
		c.inTx = false
	case strings.HasSuffix(statement, "WHERE 0"):
		f.writer = c
	case strings.HasPrefix(statement, "INSERT"):
		c.write(args[0].Value.(string), func(r row) row { r.exists = true; return r })
	case strings.HasPrefix(statement, "UPDATE"):
		token, seq := args[0].Value.(int64), args[1].Value.(int64)
		c.write(args[2].Value.(string), func(r row) row {
			if r.token < token {
				r.prevToken, r.prevSeq = r.token, r.seq
			}
			r.token, r.seq = token, seq
			return r
		})
	default:
		return nil, fmt.Errorf("fake: %s", statement)
	}
	return fakeResult(f.affected), nil
}

func (c *fakeConn) write(resource string, change func(row) row) {
	r, ok := c.dirty[resource]
	if !ok {
		r = c.f.rows[resource]
	}
	r = change(r)
	if !c.inTx {
		c.f.rows[resource] = r
		return
	}
	if c.dirty == nil {
		c.dirty = map[string]row{}
	}
	c.f.writer = c
	c.dirty[resource] = r
}

type fakeResult int64

func (r fakeResult) LastInsertId() (int64, error) { return int64(r), nil }
func (r fakeResult) RowsAffected() (int64, error) { return int64(r), nil }

func (c *fakeConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if strings.Contains(query, "pragma_table_info") {
		c.f.mu.Lock()
		c.f.checks++
		c.f.mu.Unlock()
		rows := &fakeRows{width: 4}
		for _, name := range []string{"resource", "token", "seq", "prev_token", "prev_seq"} {
			rows.values = append(rows.values, []driver.Value{name, "INTEGER", name == "resource", ""})
		}
		return rows, nil
	}
	if args[0].Value == versionRow {
		return &fakeRows{width: 4}, nil
	}
	if err := c.hook(ctx, query); err != nil {
		return nil, err
	}
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	r, ok := c.dirty[args[0].Value.(string)]
	if !ok {
		r = c.f.rows[args[0].Value.(string)]
	}
	rows := &fakeRows{width: 4}
	if r.exists {
		rows.values = [][]driver.Value{{r.token, r.seq, r.prevToken, r.prevSeq}}
	}
	return rows, nil
}

type fakeRows struct {
	width  int
	values [][]driver.Value
}

func (r *fakeRows) Columns() []string { return make([]string, r.width) }
func (r *fakeRows) Close() error      { return nil }
func (r *fakeRows) Next(dest []driver.Value) error {
	if len(r.values) == 0 {
		return io.EOF
	}
	copy(dest, r.values[0])
	r.values = r.values[1:]
	return nil
}
