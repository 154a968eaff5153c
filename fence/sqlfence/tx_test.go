package sqlfence

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// onFake runs a test on a fake database, with a guard whose resource "r" has the mark 33, in
// a bubble: what hangs costs no time.
func onFake(t *testing.T, test func(t *testing.T, f *fakeDB, g *Guard)) {
	synctest.Test(t, func(t *testing.T) {
		f, db := openFake(t)
		g, err := New(db, Options{Dialect: SQLite})
		if err != nil {
			t.Fatal(err)
		}
		f.set("r", row{token: 33, seq: 7})
		test(t, f, g)
		f.mu.Lock()
		writer := f.writer
		f.mu.Unlock()
		if writer != nil {
			t.Error("a transaction is left open")
		}
		if len(g.turns.m) != 0 {
			t.Errorf("%d turns are left", len(g.turns.m))
		}
		db.Close()
	})
}

func wantStale(t *testing.T, err error, seen fence.Token) {
	t.Helper()
	var stale *fence.StaleError
	if !errors.As(err, &stale) || stale.Seen != seen {
		t.Errorf("%v, want that %v has been seen", err, seen)
	}
}

func nothing(*sql.Tx) error { return nil }

// Cases SQL-01 and SQL-03.
func TestCountsDecideNothing(t *testing.T) {
	for _, n := range []int64{0, 1, 2} {
		onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
			f.affected = n
			for i, token := range []fence.Token{33, 33, 34, 34} {
				if err := g.Tx(t.Context(), "r", token, nothing); err != nil {
					t.Errorf("%d rows: write %d: %v", n, i, err)
				}
			}
			if err := g.Tx(t.Context(), "new", 1, nothing); err != nil {
				t.Errorf("%d rows: the first write: %v", n, err)
			}
			wantStale(t, g.Tx(t.Context(), "r", 33, nothing), 34)
		})
	}
}

func TestUnchecked(t *testing.T) {
	for unchecked, want := range map[bool]int{false: 1, true: 0} {
		f, db := openFake(t)
		g, err := New(db, Options{Dialect: SQLite, Unchecked: unchecked})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := g.Tx(t.Context(), "r", 1, nothing); err != nil {
				t.Error(err)
			}
		}
		if f.checks != want {
			t.Errorf("unchecked %v: the table is looked at %d times, want %d", unchecked, f.checks, want)
		}
	}
}

// Case SQL-07.
func TestRefusedCommitClaimsAgain(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		runs := 0
		f.lost = func() (bool, error) {
			f.lost = nil
			f.rows["r"] = row{exists: true, token: 34, seq: 9, prevToken: 33, prevSeq: 7}
			return false, fakeError(517)
		}
		err := g.Tx(t.Context(), "r", 33, func(*sql.Tx) error { runs++; return nil })
		wantStale(t, err, 34)
		if runs != 1 {
			t.Errorf("fn ran %d times", runs)
		}
	})
}

func TestLostCommit(t *testing.T) {
	broken := []error{io.ErrUnexpectedEOF, driver.ErrBadConn, errors.New("invalid connection"), errors.New("conn closed")}
	for _, applied := range []bool{true, false} {
		for _, lost := range broken {
			onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
				runs := 0
				f.lost = func() (bool, error) { f.lost = nil; return applied, lost }
				err := g.Tx(t.Context(), "r", 34, func(*sql.Tx) error { runs++; return nil })
				if want := map[bool]int{true: 1, false: 2}[applied]; err != nil || runs != want {
					t.Errorf("%v, applied %v: %v after %d runs, want %d", lost, applied, err, runs, want)
				}
			})
		}
	}
}

// What cannot be found out is uncertain, never a guess.
func TestLostCommitUncertain(t *testing.T) {
	for name, then := range map[string]func(f *fakeDB){
		"the database is away": func(f *fakeDB) {
			f.before = func(_ context.Context, verb string) error { return io.ErrUnexpectedEOF }
		},
		"others used the token": func(f *fakeDB) { f.rows["r"] = row{exists: true, token: 34, seq: 99, prevToken: 33, prevSeq: 7} },
		"two newer tokens":      func(f *fakeDB) { f.rows["r"] = row{exists: true, token: 36, seq: 99, prevToken: 35, prevSeq: 98} },
		"the row is gone":       func(f *fakeDB) { delete(f.rows, "r") },
	} {
		onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
			f.lost = func() (bool, error) {
				f.lost = nil
				f.mu.Lock()
				defer f.mu.Unlock()
				then(f)
				return false, io.ErrUnexpectedEOF
			}
			runs := 0
			err := g.Tx(t.Context(), "r", 34, func(*sql.Tx) error { runs++; return nil })
			if !errors.Is(err, fence.ErrUncertain) || !errors.Is(err, io.ErrUnexpectedEOF) || runs != 1 {
				t.Errorf("%s: %v after %d runs", name, err, runs)
			}
		})
	}
}

// A commit that the database refuses is none in doubt.
func TestRefusedCommit(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		f.lost = func() (bool, error) { return false, fakeError(787) } // a foreign key
		if err := g.Tx(t.Context(), "r", 34, nothing); err != fakeError(787) {
			t.Errorf("%v, want what the database said", err)
		}
		if r := f.get("r"); r.token != 33 {
			t.Errorf("the mark is %d", r.token)
		}
	})
}

// hang lets statements with the verb hang until it is called. With deaf they do not look at
// their context.
func (f *fakeDB) hang(deaf bool, verbs ...string) (release func()) {
	released := make(chan struct{})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = func(ctx context.Context, verb string) error {
		if !slices.Contains(verbs, verb) {
			return nil
		}
		if deaf {
			ctx = context.Background()
		}
		select {
		case <-released:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return func() { close(released) }
}

// In real time: database/sql waits for a statement that hangs on a mutex, which keeps a
// bubble's clock from moving.
func TestHangingDriver(t *testing.T) {
	want := map[string]error{"BEGIN": fence.ErrUnavailable, "UPDATE": fence.ErrBusy, "SELECT": fence.ErrBusy, "COMMIT": fence.ErrUncertain}
	for _, verb := range []string{"BEGIN", "UPDATE", "SELECT", "ROLLBACK", "COMMIT"} {
		for _, deaf := range []bool{true, false} {
			t.Run(fmt.Sprint(verb, deaf), func(t *testing.T) {
				t.Parallel()
				f, db := openFake(t)
				g, err := New(db, Options{Dialect: SQLite, LockWait: 200 * time.Millisecond})
				if err != nil {
					t.Fatal(err)
				}
				f.set("r", row{token: 33, seq: 7})
				release := f.hang(deaf, verb)
				fail := errors.New("of fn")
				answer := make(chan error, 1)
				go func() {
					answer <- g.Tx(t.Context(), "r", 34, func(*sql.Tx) error {
						if verb == "ROLLBACK" {
							return fail
						}
						return nil
					})
				}()
				select {
				case err = <-answer:
				case <-time.After(30 * time.Second):
					release()
					t.Fatal("no answer")
				}
				if verb == "ROLLBACK" && err != fail || verb != "ROLLBACK" && !errors.Is(err, want[verb]) {
					t.Errorf("%v", err)
				}
				release()
				// What was left behind ends its transaction.
				for deadline := time.Now().Add(30 * time.Second); db.Stats().InUse > 0; time.Sleep(time.Millisecond) {
					if time.Now().After(deadline) {
						t.Fatalf("%d connections are still in use", db.Stats().InUse)
					}
				}
			})
		}
	}
}

// A commit that hangs while its effect is there, or not, is found out once its lock is gone.
func TestHangingCommitIsSettled(t *testing.T) {
	for _, applied := range []bool{true, false} {
		for _, cancelled := range []bool{true, false} {
			onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				f.lost = func() (bool, error) {
					f.mu.Lock()
					f.lost = nil
					f.mu.Unlock()
					hang := defaultLockWait + time.Second
					if cancelled {
						cancel()
						hang = time.Second // longer than anyone waits for the answer
					}
					time.Sleep(hang)
					return applied, nil
				}
				runs := 0
				err := g.Tx(ctx, "r", 34, func(*sql.Tx) error { runs++; return nil })
				switch {
				case applied && (err != nil || runs != 1):
					t.Errorf("cancelled %v: %v after %d runs of a commit that took effect", cancelled, err, runs)
				case !applied && !cancelled && (err != nil || runs != 2):
					t.Errorf("%v after %d runs, want none after 2", err, runs)
				case !applied && cancelled && !errors.Is(err, context.Canceled):
					t.Errorf("%v of a commit that took no effect", err)
				}
				time.Sleep(time.Minute)
			})
		}
	}
}

// A ctx that ends leaves nothing, and tells its cause.
func TestContextEnds(t *testing.T) {
	why := errors.New("the lease is lost")
	for name, test := range map[string]func(f *fakeDB, cancel func()) func(*sql.Tx) error{
		"before the claim": func(f *fakeDB, cancel func()) func(*sql.Tx) error {
			f.before = func(_ context.Context, verb string) error {
				if verb == "UPDATE" {
					cancel()
				}
				return nil
			}
			return nothing
		},
		"in fn": func(_ *fakeDB, cancel func()) func(*sql.Tx) error {
			return func(*sql.Tx) error { cancel(); return nil }
		},
		"while others hold the lock": func(f *fakeDB, cancel func()) func(*sql.Tx) error {
			n := 0
			f.before = func(_ context.Context, verb string) error {
				if n++; n > 5 {
					cancel()
				}
				return fakeError(517)
			}
			return nothing
		},
	} {
		onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
			ctx, cancel := context.WithCancelCause(t.Context())
			err := g.Tx(ctx, "r", 34, test(f, func() { cancel(why) }))
			if !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
				t.Errorf("%s: %v", name, err)
			}
			synctest.Wait()
			if r := f.get("r"); r.token != 33 {
				t.Errorf("%s: the mark is %d", name, r.token)
			}
		})
	}
}

// A ctx that ends during the commit leaves the commit's answer as it is.
func TestContextEndsDuringCommit(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		ctx, cancel := context.WithCancel(t.Context())
		f.lost = func() (bool, error) { cancel(); return true, nil }
		if err := g.Tx(ctx, "r", 34, nothing); err != nil {
			t.Error(err)
		}
	})
}

func TestErrorsOfFn(t *testing.T) {
	mine := errors.New("mine")
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		if err := g.Tx(t.Context(), "r", 34, func(*sql.Tx) error { return mine }); err != mine {
			t.Errorf("%v, want the error itself", err)
		}
		runs := 0
		err := g.Tx(t.Context(), "r", 34, func(*sql.Tx) error {
			if runs++; runs < 4 {
				return fmt.Errorf("wrapped: %w", fakeError(517))
			}
			return nil
		})
		if err != nil || runs != 4 {
			t.Errorf("%v after %d runs, want none after 4", err, runs)
		}
		start := time.Now()
		err = g.Tx(t.Context(), "r", 34, func(*sql.Tx) error { return fakeError(5) })
		if took := time.Since(start); !errors.Is(err, fence.ErrBusy) || !errors.Is(err, fakeError(5)) || took < defaultLockWait {
			t.Errorf("%v after %v", err, took)
		}
		err = g.Tx(t.Context(), "r", 34, func(tx *sql.Tx) error { return tx.Commit() })
		if !errors.Is(err, fence.ErrUncertain) {
			t.Errorf("fn commits: %v", err)
		}
	})
}

func TestPanicsOfFn(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		func() {
			defer func() {
				if got := recover(); got != "of fn" {
					t.Errorf("recovered %v", got)
				}
			}()
			g.Tx(t.Context(), "r", 34, func(*sql.Tx) error { panic("of fn") })
		}()
		done := make(chan struct{})
		go func() {
			defer close(done)
			g.Tx(t.Context(), "r", 34, func(*sql.Tx) error { runtime.Goexit(); return nil })
		}()
		<-done
		if r := f.get("r"); r.token != 33 {
			t.Errorf("the mark is %d", r.token)
		}
		if err := g.Tx(t.Context(), "r", 33, nothing); err != nil {
			t.Errorf("the resource is not free: %v", err)
		}
	})
}

// Within a process too, one transaction of a resource runs at a time.
func TestTxWithinTx(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		var inner error
		err := g.Tx(t.Context(), "r", 34, func(*sql.Tx) error {
			inner = g.Tx(t.Context(), "r", 34, nothing)
			return nil
		})
		if err != nil || !errors.Is(inner, fence.ErrBusy) {
			t.Errorf("%v, and %v inside", err, inner)
		}
	})
}

func TestBrokenPool(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		broken := 2
		f.before = func(_ context.Context, verb string) error {
			if broken--; broken >= 0 {
				return io.ErrUnexpectedEOF
			}
			return nil
		}
		if err := g.Tx(t.Context(), "r", 34, nothing); err != nil {
			t.Errorf("two dead connections in the pool: %v", err)
		}
		broken = 100
		if err := g.Tx(t.Context(), "r", 34, nothing); !errors.Is(err, fence.ErrUnavailable) {
			t.Errorf("the database is away: %v", err)
		}
	})
}

func TestHandles(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		ctx, m := t.Context(), Mark{Resource: "r", Token: 34}
		conn, err := g.db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var none *sql.Tx
		for name, h := range map[string]Handle{"DB": g.db, "nil": nil, "a nil Tx": none, "Conn": conn} {
			for op, call := range map[string]func(context.Context, Handle, ...Mark) error{"ClaimIn": g.ClaimIn, "CheckIn": g.CheckIn} {
				if err := call(ctx, h, m); !errors.Is(err, fence.ErrInvalid) {
					t.Errorf("%s in %s: %v", op, name, err)
				}
			}
		}
		conn.Close()
		if r := f.get("r"); r.token != 33 {
			t.Errorf("the mark is %d", r.token)
		}
		tx, err := g.db.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := g.ClaimIn(ctx, tx, m); err != nil {
			t.Error(err)
		}
		if err := g.CheckIn(ctx, tx, m); err != nil {
			t.Error(err)
		}
		tx.Rollback()
	})
}

// Bad input reaches no database.
func TestBadInput(t *testing.T) {
	f, db := openFake(t)
	var invalid *fence.InvalidError
	for name, o := range map[string]Options{
		"no dialect":       {},
		"dialect":          {Dialect: 4},
		"mode":             {Dialect: SQLite, Mode: 3},
		"lock wait":        {Dialect: SQLite, LockWait: -1},
		"read only":        {Dialect: SQLite, TxOptions: &sql.TxOptions{ReadOnly: true}},
		"no Seq":           {Dialect: SQLite, Mode: Sequenced, Column: &Column{Table: "t", ID: "i", Token: "n"}},
		"table and column": {Dialect: SQLite, Table: "x", Column: &Column{Table: "t", ID: "i", Token: "n"}},
		"no ID":            {Dialect: SQLite, Column: &Column{Table: "t", Token: "n"}},
		"no Token":         {Dialect: SQLite, Column: &Column{Table: "t", ID: "i"}},
		"no table":         {Dialect: SQLite, Column: &Column{ID: "i", Token: "n"}},
		"NUL":              {Dialect: SQLite, Table: "a\x00b"},
		"two schemas":      {Dialect: SQLite, Table: "a.b.c"},
	} {
		if _, err := New(db, o); !errors.As(err, &invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := New(nil, Options{Dialect: SQLite}); !errors.As(err, &invalid) {
		t.Errorf("no db: %v", err)
	}
	ctx := t.Context()
	for _, mode := range []Mode{Monotonic, Sequenced} {
		g, err := New(db, Options{Dialect: SQLite, Mode: mode})
		if err != nil {
			t.Fatal(err)
		}
		seq := int64(mode) / 2
		for name, marks := range map[string][]Mark{
			"none":      {},
			"token 0":   {{"r", 0, seq}},
			"token -1":  {{"r", -1, seq}},
			"no name":   {{"", 1, seq}},
			"twice":     {{"r", 1, seq}, {"q", 1, seq}, {"r", 2, seq}},
			"wrong seq": {{"r", 1, 1 - seq}},
			"seq -1":    {{"r", 1, -1}},
		} {
			if err := g.TxAll(ctx, marks, nothing); !errors.As(err, &invalid) {
				t.Errorf("%v, %s: %v", mode, name, err)
			}
			if err := g.ClaimIn(ctx, new(sql.Tx), marks...); !errors.As(err, &invalid) {
				t.Errorf("%v, %s: ClaimIn: %v", mode, name, err)
			}
		}
		if err := g.TxAll(ctx, []Mark{{"r", 1, seq}}, nil); !errors.As(err, &invalid) {
			t.Errorf("%v: no fn: %v", mode, err)
		}
		done, cancel := context.WithCancel(ctx)
		cancel()
		for _, err := range []error{g.TxAll(done, []Mark{{"r", 1, seq}}, nothing), g.Claim(done, "r", 1), g.Check(done, "r", 1),
			g.EnsureSchema(done), g.ClaimIn(done, new(sql.Tx), Mark{"r", 1, seq})} {
			if !errors.Is(err, context.Canceled) {
				t.Errorf("a done ctx: %v", err)
			}
		}
	}
	if f.opened != 0 {
		t.Errorf("%d connections were opened", f.opened)
	}
}
