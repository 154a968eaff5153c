package sqlite

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// faults stand between a store and its driver. They count how often they struck.
type faults struct {
	drv  driver.Driver
	dsn  string
	hook atomic.Pointer[fault]
	hits atomic.Int32
}

// fault happens to the statements that begin with prefix, or to all.
type fault struct {
	prefix string
	all    bool
	times  int32         // how often; 0 means always
	lose   bool          // the statement is executed, and its answer is lost
	refuse bool          // the statement is not executed, and there is an error
	hang   chan struct{} // the statement is executed when this is closed, whatever its context says
}

var errFault = errors.New("the connection broke")

func openFaulty(t testing.TB, path string) (*sqlstore.Store, *faults) {
	t.Helper()
	name := dsn(t, path)
	db, err := sql.Open("sqlite", name)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	f := &faults{drv: db.Driver(), dsn: name}
	f.hook.Store(&fault{})
	return newStore(t, path, sql.OpenDB(f)), f
}

// strike lets f happen from now on.
func (f *faults) strike(x fault) {
	f.hits.Store(0)
	f.hook.Store(&x)
}

// heal ends the fault, and reports how often it has struck. None is a failure of the test.
func (f *faults) heal(t *testing.T) {
	t.Helper()
	f.Heal()
	if f.hits.Load() == 0 {
		t.Error("the fault never struck")
	}
}

// As a [storetest.Link], faults lose what goes to the database, or the answers to its commits.
func (f *faults) LoseRequests() { f.hook.Store(&fault{all: true, refuse: true}) }
func (f *faults) LoseReplies()  { f.hook.Store(&fault{prefix: "COMMIT", lose: true}) }
func (f *faults) Heal()         { f.hook.Store(&fault{}) }
func (f *faults) Hits() int     { return int(f.hits.Load()) }

func (f *faults) Driver() driver.Driver { return f.drv }

func (f *faults) Connect(context.Context) (driver.Conn, error) {
	c, err := f.drv.Open(f.dsn)
	if err != nil {
		return nil, err
	}
	return &faultyConn{c.(conn), f}, nil
}

type conn interface {
	driver.Conn
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

type faultyConn struct {
	conn
	f *faults
}

// strikes answers the fault that happens to query, and counts it.
func (f *faults) strikes(query string) *fault {
	x := f.hook.Load()
	if !x.all && (x.prefix == "" || !strings.HasPrefix(query, x.prefix)) {
		return nil
	}
	if n := f.hits.Add(1); x.times > 0 && n > x.times {
		return nil
	}
	return x
}

func (c *faultyConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if x := c.f.strikes(query); x != nil && x.refuse {
		return nil, errFault
	}
	return c.conn.QueryContext(ctx, query, args)
}

func (c *faultyConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	x := c.f.strikes(query)
	if x == nil {
		return c.conn.ExecContext(ctx, query, args)
	}
	if x.refuse {
		return nil, errFault
	}
	if x.hang != nil {
		<-x.hang
		ctx = context.Background()
	}
	result, err := c.conn.ExecContext(ctx, query, args)
	if x.lose {
		return nil, errFault
	}
	return result, err
}

// soonFree complains unless another is granted the key long before a ttl of an hour ends.
func soonFree(t *testing.T, s store.Store, key string) store.Grant {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := claim(s, key, time.Hour)
	g, err := acquire(ctx, c)
	if err != nil {
		t.Fatalf("the key stays held: %v", err)
	}
	release(t, c)
	return g
}

// A Try whose caller has left gives back what it is granted afterwards.
func TestGrantBehindTheCallersBack(t *testing.T) {
	for _, released := range []bool{false, true} {
		path := lockFile(t)
		s, f := openFaulty(t, path)
		other, _ := open(t, path)
		before := grant(t, claim(s, "warm-up", time.Hour))
		hang := make(chan struct{})
		f.strike(fault{prefix: "COMMIT", times: 1, hang: hang})
		c := claim(s, "k", time.Hour)
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		_, err := c.Try(ctx)
		if !errors.Is(err, store.ErrUncertain) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Try whose COMMIT hangs: %v, want ErrUncertain", err)
		}
		if released {
			if err := c.Release(ctx); !errors.Is(err, store.ErrUncertain) {
				t.Errorf("Release while a COMMIT hangs: %v, want ErrUncertain", err)
			}
		}
		cancel()
		close(hang)
		f.heal(t)
		if g := soonFree(t, other, "k"); g.Token <= before.Token {
			t.Errorf("token %v after %v", g.Token, before.Token)
		}
		switch g, err := c.Try(context.Background()); {
		case released && !errors.Is(err, store.ErrReleased):
			t.Errorf("Try after Release = %+v, %v", g, err)
		case !released && err != nil:
			t.Errorf("Try again: %v", err)
		}
		release(t, c)
		soonFree(t, other, "k")
	}
}

// A grant whose answer was lost is found again by the next Try, and given back by Release.
func TestLostAnswerToCommit(t *testing.T) {
	path := lockFile(t)
	s, f := openFaulty(t, path)
	other, _ := open(t, path)
	grant(t, claim(s, "warm-up", time.Hour))
	ctx := context.Background()
	for _, again := range []bool{true, false} {
		c := claim(s, "k", time.Hour)
		f.strike(fault{prefix: "COMMIT", lose: true})
		if _, err := c.Try(ctx); !errors.Is(err, store.ErrUncertain) {
			t.Fatalf("Try: %v, want ErrUncertain", err)
		}
		f.heal(t)
		mustBeHeld(t, other, "k")
		if again {
			h, err := other.Inspect(ctx, "k")
			if g := grant(t, c); err != nil || g.Owner != h.Owner || g.Token != h.Token {
				t.Errorf("the grant was %+v, found again was %+v", h, g)
			}
			f.strike(fault{prefix: "COMMIT", lose: true})
			if _, err := c.Extend(ctx); !errors.Is(err, store.ErrUncertain) {
				t.Errorf("Extend: %v, want ErrUncertain", err)
			}
			f.heal(t)
			if _, err := c.Extend(ctx); err != nil {
				t.Errorf("Extend again: %v", err)
			}
		}
		f.strike(fault{prefix: "COMMIT", lose: true})
		if err := c.Release(ctx); !errors.Is(err, store.ErrUncertain) {
			t.Errorf("Release: %v, want ErrUncertain", err)
		}
		f.heal(t)
		next := claim(other, "k", time.Hour)
		grant(t, next) // the release had been done
		if err := c.Release(ctx); err != nil {
			t.Errorf("Release again: %v", err)
		}
		mustBeHeld(t, s, "k")
		release(t, next)
	}
}

// A statement that is refused takes nothing, and a BEGIN whose answer was lost, or a
// ROLLBACK that fails, leaves no transaction behind that would lock everybody out.
func TestBrokenStatements(t *testing.T) {
	path := lockFile(t)
	s, f := openFaulty(t, path)
	other, _ := open(t, path)
	ctx := context.Background()
	grant(t, claim(s, "warm-up", time.Hour))
	for _, x := range []fault{
		{prefix: "BEGIN", refuse: true},
		{prefix: "BEGIN", lose: true},
		{prefix: "INSERT", refuse: true},
		{prefix: "INSERT", lose: true},
		{prefix: "ROLLBACK", refuse: true},
		{prefix: "ROLLBACK", lose: true},
	} {
		c := claim(s, "k", time.Hour)
		f.strike(x)
		if x.prefix == "ROLLBACK" { // of a refusal
			if err := s.Break(ctx, store.Holder{Key: "k", Owner: "nobody"}); !errors.Is(err, store.ErrLost) {
				t.Errorf("%+v: Break: %v", x, err)
			}
		} else if _, err := c.Try(ctx); !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("%+v: Try: %v, want ErrUnavailable", x, err)
		}
		f.heal(t)
		soonFree(t, other, "k")
		release(t, c)
	}
}

// A first use that fails leaves nothing behind: neither in the file, nor in the store.
func TestFirstUseFails(t *testing.T) {
	for _, x := range []fault{
		{prefix: "COMMIT", times: 1, refuse: true},
		{prefix: "COMMIT", times: 1, lose: true},
		{prefix: "CREATE", times: 1, refuse: true},
		{prefix: "INSERT", times: 1, refuse: true},
	} {
		s, f := openFaulty(t, lockFile(t))
		f.strike(x)
		c := claim(s, "k", time.Hour)
		if _, err := c.Try(context.Background()); !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUncertain) {
			t.Errorf("%+v: Try: %v, want ErrUnavailable", x, err)
		}
		f.heal(t)
		grant(t, c)
		release(t, c)
	}
}

// A database that another locks for long is unavailable, when the caller's context ends
// and not before; nothing was taken.
func TestDatabaseLockedForLong(t *testing.T) {
	path := lockFile(t)
	s, _ := open(t, path)
	_, db := open(t, path)
	held := claim(s, "held", time.Hour)
	grant(t, held)
	lock, err := db.Begin() // immediate
	if err != nil {
		t.Fatal(err)
	}
	const limit = 300 * time.Millisecond
	bounded := func(op string, call func(context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		err := call(ctx)
		if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) || ctx.Err() == nil {
			t.Errorf("%s on a locked database: %v", op, err)
		}
	}
	c := claim(s, "k", time.Hour)
	bounded("Try", func(ctx context.Context) error { _, err := c.Try(ctx); return err })
	bounded("Extend", func(ctx context.Context) error { _, err := held.Extend(ctx); return err })
	bounded("ExtendMany", func(ctx context.Context) error { return s.ExtendMany(ctx, []store.Claim{held})[0].Err })
	bounded("Release", held.Release)
	if _, err := s.Inspect(context.Background(), "held"); err != nil {
		t.Errorf("Inspect on a locked database: %v", err)
	}
	mustBeHeld(t, s, "held") // known without a lock
	start := time.Now()
	if err := s.EnsureSchema(context.Background()); !errors.Is(err, store.ErrUnavailable) || errors.Is(err, context.DeadlineExceeded) && time.Since(start) < limit {
		t.Errorf("EnsureSchema without a deadline: %v", err)
	}
	done := make(chan error, 1)
	go func() { _, err := c.Try(context.Background()); done <- err }()
	time.Sleep(limit)
	if err := lock.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("Try of a database that was locked for a while: %v", err)
	}
	release(t, held)
	release(t, c)
}

// A done context takes nothing and gives nothing away.
func TestDoneContext(t *testing.T) {
	s, _ := open(t, lockFile(t))
	done, cancel := context.WithCancel(context.Background())
	cancel()
	c := claim(s, "k", time.Hour)
	if _, err := c.Try(done); !errors.Is(err, context.Canceled) {
		t.Errorf("Try: %v", err)
	}
	if h, err := s.Inspect(context.Background(), "k"); err != nil || h.Owner != "" {
		t.Errorf("Inspect = %+v, %v", h, err)
	}
	if err := s.EnsureSchema(done); !errors.Is(err, context.Canceled) {
		t.Errorf("EnsureSchema: %v", err)
	}
	for _, err := range s.List(done, "") {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("List: %v", err)
		}
	}
}
