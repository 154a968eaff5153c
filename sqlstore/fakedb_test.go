package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// fakeServer answers the statements of the PostgreSQL dialect as ask says.
type fakeServer struct {
	mu   sync.Mutex
	down bool
	sent []string
	ask  func(ctx context.Context, query string) ([]driver.Value, error) // nil values: no row
}

var errDown = errors.New("dial tcp: connection refused")

func (f *fakeServer) open(t *testing.T) *Store {
	t.Helper()
	db := sql.OpenDB(f)
	t.Cleanup(func() { db.Close() })
	s, err := New(db, Options{Dialect: PostgreSQL, Database: "fake"})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (f *fakeServer) isDown() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.down
}

func (f *fakeServer) set(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = down
}

// count is how many statements with the words were sent.
func (f *fakeServer) count(words string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.sent {
		if strings.Contains(q, words) {
			n++
		}
	}
	return n
}

func (f *fakeServer) Driver() driver.Driver { return nil }
func (f *fakeServer) Connect(context.Context) (driver.Conn, error) {
	if f.isDown() {
		return nil, errDown
	}
	return fakeConn{f}, nil
}

type fakeConn struct{ f *fakeServer }

func (fakeConn) Prepare(string) (driver.Stmt, error) { return nil, errors.New("prepares") }
func (fakeConn) Begin() (driver.Tx, error)           { return nil, errors.New("begins") }
func (fakeConn) Close() error                        { return nil }
func (c fakeConn) IsValid() bool                     { return !c.f.isDown() }

func (c fakeConn) ExecContext(ctx context.Context, query string, _ []driver.NamedValue) (driver.Result, error) {
	_, err := c.QueryContext(ctx, query, nil)
	return driver.RowsAffected(0), err
}

func (c fakeConn) QueryContext(ctx context.Context, query string, _ []driver.NamedValue) (driver.Rows, error) {
	c.f.mu.Lock()
	c.f.sent = append(c.f.sent, query)
	c.f.mu.Unlock()
	if query == pgCheck {
		return &fakeRows{row: []driver.Value{"1", false}}, nil
	}
	row, err := c.f.ask(ctx, query)
	if err != nil {
		return nil, err
	}
	return &fakeRows{row: row}, nil
}

type fakeRows struct{ row []driver.Value }

func (r *fakeRows) Columns() []string { return make([]string, len(r.row)) }
func (r *fakeRows) Close() error      { return nil }
func (r *fakeRows) Next(into []driver.Value) error {
	if r.row == nil {
		return io.EOF
	}
	copy(into, r.row)
	r.row = nil
	return nil
}

// A driver that says that it has sent nothing is not believed, where the server cannot be asked any
// more: lib/pq says so when the connection ends before the answer. The claim is released then.
func TestBadConnectionAfterTheFact(t *testing.T) {
	f := &fakeServer{}
	f.ask = func(_ context.Context, query string) ([]driver.Value, error) {
		if strings.HasPrefix(query, pgTake) {
			f.set(true)
			return nil, driver.ErrBadConn
		}
		return []driver.Value{int64(7), int64(1000), ""}, nil
	}
	c := f.open(t).Claim("k", store.ClaimOptions{TTL: time.Minute})
	if g, err := c.Try(t.Context()); !errors.Is(err, store.ErrUncertain) || !errors.Is(err, errDown) {
		t.Errorf("Try: %+v, %v, want ErrUncertain", g, err)
	}
	f.set(false)
	if err := c.Release(t.Context()); err != nil || f.count("SET owner = ''") == 0 {
		t.Errorf("Release: %v, having sent %q", err, f.sent)
	}
}

// A release that is sent again, since the driver has said so, finds nothing to release.
func TestReleaseSentTwice(t *testing.T) {
	f := &fakeServer{}
	f.ask = func(_ context.Context, query string) ([]driver.Value, error) {
		switch {
		case strings.HasPrefix(query, pgTake):
			return []driver.Value{int64(7), ""}, nil
		case strings.HasPrefix(query, pgRelease) && f.count(pgRelease) == 1:
			return nil, driver.ErrBadConn
		case query == pgRead:
			return []driver.Value{true, "", int64(7), int64(1000), "", false}, nil
		}
		return nil, nil
	}
	c := f.open(t).Claim("k", store.ClaimOptions{TTL: time.Minute})
	if _, err := c.Try(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Release(t.Context()); err != nil || f.count(pgRelease) < 2 {
		t.Errorf("Release: %v, having sent %q", err, f.sent)
	}
}

// A lease that is found in the row is not lost, whatever the statement before has said.
func TestExtendBesideAnother(t *testing.T) {
	f := &fakeServer{}
	var owner string
	f.ask = func(_ context.Context, query string) ([]driver.Value, error) {
		switch {
		case strings.HasPrefix(query, pgTake):
			return []driver.Value{int64(7), ""}, nil
		case query == pgRead:
			return []driver.Value{true, owner, int64(7), int64(1000000), "", false}, nil
		}
		return nil, nil
	}
	c := f.open(t).Claim("k", store.ClaimOptions{TTL: time.Minute})
	g, err := c.Try(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	owner = g.Owner
	if _, err := c.Extend(t.Context()); !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrLost) {
		t.Errorf("Extend: %v", err)
	}
}

// A notification is a hint: where the server has no room for it, the key is released all the same.
func TestReleaseThatCannotNotify(t *testing.T) {
	f := &fakeServer{}
	f.ask = func(_ context.Context, query string) ([]driver.Value, error) {
		switch {
		case strings.HasPrefix(query, pgTake):
			return []driver.Value{int64(7), ""}, nil
		case strings.Contains(query, "pg_notify"):
			return nil, state("54000")
		}
		return []driver.Value{int64(7), int64(1000), ""}, nil
	}
	db := sql.OpenDB(f)
	defer db.Close()
	s, err := New(db, Options{Dialect: PostgreSQL, Database: "fake", Listener: &fakeListener{}})
	if err != nil {
		t.Fatal(err)
	}
	c := s.Claim("k", store.ClaimOptions{TTL: time.Minute})
	if _, err := c.Try(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Release(t.Context()); err != nil || f.count("pg_notify") != 1 {
		t.Errorf("Release: %v, having sent %q", err, f.sent)
	}
}

// A read cannot have changed anything, also where the driver hangs in it.
func TestReadsAreNeverUncertain(t *testing.T) {
	hang := make(chan struct{})
	f := &fakeServer{}
	f.ask = func(context.Context, string) ([]driver.Value, error) {
		<-hang
		return nil, io.EOF
	}
	defer close(hang)
	s := f.open(t)
	if err := s.EnsureSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	check := func(op string, err error) {
		t.Helper()
		if !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUncertain) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want ErrUnavailable", op, err)
		}
	}
	_, err := s.Inspect(ctx, "k")
	check("Inspect", err)
	list, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	for _, err := range s.List(list, "") {
		check("List", err)
	}
}
