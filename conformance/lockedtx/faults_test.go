package lockedtx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

func insert(ctx context.Context, tx *sql.Tx, id int64) error {
	_, err := tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO made VALUES (%d)", id))
	return err
}

// made is how often the write took effect.
func (d *database) made(id int64) int64 {
	d.t.Helper()
	return number(d.t, d.admin, fmt.Sprintf("SELECT count(*) FROM made WHERE id = %d", id))
}

func (d *database) wantMade(id, want int64) {
	d.t.Helper()
	if n := d.made(id); n != want {
		d.t.Errorf("write %d took effect %d times, want %d", id, n, want)
	}
}

// holderChild takes the lock, says so, and commits when there is a certain file.
func holderChild() {
	args := kit.Args() // driver, data source, dialect, file to wait for
	db, err := sql.Open(args[0], args[1])
	if err != nil {
		kit.Say("failed", err)
		return
	}
	defer db.Close()
	dialect, _ := strconv.Atoi(args[2])
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	d := &database{engine: engine{dialect: sqlstore.Dialect(dialect)}}
	err = sqlstore.Locked(ctx, db, sqlstore.LockedOptions{Dialect: d.dialect}, "k", func(tx *sql.Tx) error {
		if err := insert(ctx, tx, 1); err != nil {
			return err
		}
		id, err := d.backend(ctx, tx)
		if err != nil {
			return err
		}
		kit.Say("inside", id)
		for ctx.Err() == nil {
			if _, err := os.Stat(args[3]); err == nil {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		return errors.New("given up") // a second run must not take effect either
	})
	kit.Say("ended", err)
}

// TestStoppedHolder: a holder is stopped inside its transaction. The next one is told within its
// lock wait that another has the lock, comes through when the connection of the stopped one is
// ended, and nothing of the stopped one is written when that runs on.
func TestStoppedHolder(t *testing.T) {
	servertest.CanPause(t)
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		d.table("made (id bigint NOT NULL)")
		const wait = time.Second
		o := d.options(d.levels[0])
		o.LockWait = wait
		goOn := t.TempDir() + "/go"
		driver, dsn := d.dsn("", d.levels[0].params)
		child := kit.Child(t, "holder", driver, dsn, fmt.Sprint(int(d.dialect)), goOn)
		backend, err := strconv.ParseInt(child.Expect(t, "inside", time.Minute), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		child.Stop()
		db := d.open("", d.levels[0].params)
		ctx := kit.Context(t, time.Minute)
		next := func() error {
			return sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 2) })
		}
		began := time.Now()
		if err, took := next(), time.Since(began); !errors.Is(err, store.ErrHeld) || took < wait/2 || took > 10*wait {
			t.Fatalf("after %v of lock wait: %v, want %v after about one", float64(took)/float64(wait), err, store.ErrHeld)
		}
		if d.server == nil {
			child.Kill()
		} else {
			d.end(backend)
		}
		for err = next(); errors.Is(err, store.ErrHeld); err = next() { // as its caller would
		}
		if err != nil {
			t.Errorf("once the connection was ended: %v", err)
		}
		if d.server != nil {
			if err := os.WriteFile(goOn, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			child.Cont()
			if got := child.Expect(t, "ended", time.Minute); got == "<nil>" {
				t.Error("the stopped holder is told that it has written")
			}
		}
		d.wantMade(1, 0)
		d.wantMade(2, 1)
	})
}

// TestKilledConnection: the server ends the connection of the holder. What it wrote is undone.
// Where nobody else had the lock, that is known, and the whole is run again.
func TestKilledConnection(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		if !d.networked(t) {
			return
		}
		d.table("made (id bigint NOT NULL)")
		db, other := d.open("", ""), d.open("", "")
		ctx := kit.Context(t, 2*time.Minute)
		o := d.options(d.levels[0])
		if err := sqlstore.Locked(ctx, other, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 0) }); err != nil {
			t.Fatal(err)
		}
		// killed ends the connection of its first run, and calls then.
		killed := func(id int64, then func()) (runs int, err error) {
			err = sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error {
				runs++
				if err := insert(ctx, tx, id); err != nil || runs > 1 {
					return err
				}
				backend, err := d.backend(ctx, tx)
				if err != nil {
					return err
				}
				d.end(backend)
				then()
				return nil
			})
			return runs, err
		}
		if runs, err := killed(1, func() {}); err != nil || runs != 2 {
			t.Errorf("%v after %d runs, want two", err, runs)
		}
		d.wantMade(1, 1)
		runs, err := killed(2, func() {
			if err := sqlstore.Locked(ctx, other, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 3) }); err != nil {
				t.Errorf("the next one: %v", err)
			}
		})
		// On MySQL the connection is found broken before the commit is sent.
		if d.dialect == sqlstore.MySQL && (err != nil || runs != 2) ||
			d.dialect == sqlstore.PostgreSQL && (!errors.Is(err, store.ErrUncertain) || runs != 1) {
			t.Errorf("where others have had the lock: %v after %d runs", err, runs)
		}
		d.wantMade(2, int64(runs-1))
		d.wantMade(3, 1)
	})
}

// TestLostCommit: the reply to the commit is lost, or the commit. What became of it is found out.
func TestLostCommit(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		if !d.networked(t) {
			return
		}
		d.table("made (id bigint NOT NULL)")
		p := servertest.NewProxy(t, d.pooler.Addr())
		db := d.open(p.Addr(), "")
		ctx := kit.Context(t, 2*time.Minute)
		o := d.options(d.levels[0])
		locked := func(id int64, before func()) (runs int, err error) {
			err = sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error {
				if runs++; runs == 1 {
					before()
				}
				return insert(ctx, tx, id)
			})
			return runs, err
		}
		id := int64(0)
		for _, reply := range []bool{true, false} {
			want := 2
			if reply {
				want = 1
			}
			for range kit.Count(5, 100) {
				id++
				var lost *servertest.Dropped
				runs, err := locked(id, func() {
					match := servertest.Only(1, servertest.Containing("commit"))
					if reply {
						lost = p.DropReplyTo(match)
					} else {
						lost = p.DropRequest(match)
					}
				})
				lost.Stop()
				if err != nil || runs != want || lost.Count() != 1 {
					t.Fatalf("reply lost %v: %v after %d runs, want %d; %d lost", reply, err, runs, want, lost.Count())
				}
				d.wantMade(id, 1)
			}
		}
		// Nobody can be asked.
		o.LockWait = time.Second
		id++
		var lost *servertest.Dropped
		runs, err := locked(id, func() {
			commit := servertest.Containing("commit")
			lost = p.DropReplyTo(func(b []byte) bool {
				if commit(b) {
					p.Refuse()
				}
				return commit(b)
			})
		})
		lost.Stop()
		if !errors.Is(err, store.ErrUncertain) || runs != 1 || lost.Count() != 1 {
			t.Errorf("with the server away: %v after %d runs, %d lost; want uncertain", err, runs, lost.Count())
		}
		p.Heal()
		d.wantMade(id, 1)
	})
}

// TestDeadlock: two that lock different keys write the same rows in opposite order, and both come
// through.
func TestDeadlock(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		if !d.networked(t) {
			return
		}
		for _, l := range d.levels {
			d.table("made (id bigint NOT NULL PRIMARY KEY, v bigint NOT NULL)")
			must(t, d.admin, "INSERT INTO made VALUES (0, 0)", "INSERT INTO made VALUES (1, 0)")
			db := d.open("", l.params)
			ctx := kit.Context(t, time.Minute)
			var runs atomic.Int64
			var met, wg sync.WaitGroup
			met.Add(2)
			for first := range 2 {
				wg.Go(func() {
					mine := 0
					err := sqlstore.Locked(ctx, db, d.options(l), fmt.Sprint("k", first), func(tx *sql.Tx) error {
						runs.Add(1)
						mine++
						for i := range 2 {
							if _, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE made SET v = v + 1 WHERE id = %d", (first+i)%2)); err != nil {
								return err
							}
							if mine == 1 && i == 0 {
								met.Done()
								met.Wait()
							}
						}
						return nil
					})
					if err != nil {
						t.Errorf("%s: %v", l.name, err)
					}
				})
			}
			wg.Wait()
			if n := number(t, d.admin, "SELECT sum(v) FROM made"); n != 4 || runs.Load() < 3 {
				t.Errorf("%s: %d writes took effect, want 4; %d runs, want 3 at least", l.name, n, runs.Load())
			}
		}
	})
}

// TestAnswers: who waits in vain, and what fn says.
func TestAnswers(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		d.table("made (id bigint NOT NULL)")
		db := d.open("", d.levels[0].params)
		ctx := kit.Context(t, time.Minute)
		o := d.options(d.levels[0])
		o.LockWait = time.Second
		own := errors.New("own")
		err := sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error {
			// The same key waits for itself, in another spelling it does not.
			err := sqlstore.Locked(ctx, db, o, "k", func(*sql.Tx) error { t.Error("locked twice"); return nil })
			if !errors.Is(err, store.ErrHeld) {
				t.Errorf("the same key inside: %v", err)
			}
			if d.server != nil {
				if err := sqlstore.Locked(ctx, db, o, "K", func(*sql.Tx) error { return nil }); err != nil {
					t.Errorf("another key inside: %v", err)
				}
			}
			long := o
			long.LockWait = time.Hour
			short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			err = sqlstore.Locked(short, db, long, "k", func(*sql.Tx) error { t.Error("locked twice"); return nil })
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, store.ErrUncertain) {
				t.Errorf("a context that ends meanwhile: %v", err)
			}
			if err := insert(ctx, tx, 1); err != nil {
				t.Error(err)
			}
			return own
		})
		if err != own {
			t.Errorf("the error of fn becomes %v", err)
		}
		d.wantMade(1, 0)
		func() {
			defer func() {
				if r := recover(); r != own {
					t.Errorf("the panic of fn becomes %v", r)
				}
			}()
			sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error {
				insert(ctx, tx, 2)
				panic(own)
			})
		}()
		if err := sqlstore.Locked(ctx, db, o, "k", func(tx *sql.Tx) error { return insert(ctx, tx, 3) }); err != nil {
			t.Errorf("after a panic: %v", err)
		}
		d.wantMade(2, 0)
		d.wantMade(3, 1)
	})
}

// TestEverythingBreaks: connections are ended, contexts end, servers and poolers stop, die and
// come back. Every answer is true all the same.
func TestEverythingBreaks(t *testing.T) {
	servertest.CanPause(t)
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		if !d.networked(t) {
			return
		}
		d.table("made (id bigint NOT NULL)")
		var (
			ids     atomic.Int64
			mu      sync.Mutex
			answers = map[int64]error{}
			wg      sync.WaitGroup
		)
		ctx := kit.Context(t, 3*time.Minute)
		end := time.Now().Add(time.Duration(kit.Count(3, 30)) * time.Second)
		o := d.options(d.levels[0])
		o.LockWait = time.Second
		for range 6 {
			db := d.open("", "")
			wg.Go(func() {
				for time.Now().Before(end) {
					id := ids.Add(1)
					ctx, cancel := context.WithCancel(ctx)
					if rand.N(3) == 0 {
						time.AfterFunc(rand.N(20*time.Millisecond), cancel)
					}
					err := sqlstore.Locked(ctx, db, o, keys[rand.N(2)], func(tx *sql.Tx) error { return insert(ctx, tx, id) })
					cancel()
					mu.Lock()
					answers[id] = err
					mu.Unlock()
				}
			})
		}
		cuts, deaths := 0, 0
		for i := 1; time.Now().Before(end); i++ {
			time.Sleep(rand.N(40 * time.Millisecond))
			victim := []*servertest.SQLServer{d.server, d.pooler}[rand.N(2)]
			switch {
			case i%12 == 0:
				victim.Kill()
				time.Sleep(rand.N(200 * time.Millisecond))
				victim.Restart()
				deaths++
			case i%7 == 0:
				victim.Stop()
				time.Sleep(rand.N(1500 * time.Millisecond))
				victim.Cont()
			default:
				cuts += d.cut(ctx)
			}
		}
		wg.Wait()
		kinds := map[string]int{}
		for id, err := range answers {
			kinds[kind(err)]++
			n := d.made(id)
			if n > 1 || err == nil && n != 1 || err != nil && !errors.Is(err, store.ErrUncertain) && n != 0 {
				t.Errorf("made %d times, answer: %v", n, err)
			}
		}
		if kinds["nil"] == 0 || cuts+deaths == 0 {
			t.Errorf("%d connections were cut, %d deaths, answers %v", cuts, deaths, kinds)
		}
		t.Logf("%d cut, %d deaths, answers %v", cuts, deaths, kinds)
	})
}

func kind(err error) string {
	if err == nil {
		return "nil"
	}
	for _, k := range []error{store.ErrUncertain, store.ErrHeld, store.ErrUnavailable, context.Canceled} {
		if errors.Is(err, k) {
			return k.Error()
		}
	}
	return err.Error()
}

// cut ends some of the others' connections, in whatever they do.
func (d *database) cut(ctx context.Context) (n int) {
	if d.dialect == sqlstore.PostgreSQL {
		d.admin.QueryRowContext(ctx, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
			WHERE pid <> pg_backend_pid() AND backend_type = 'client backend' AND random() < 0.3`).Scan(&n)
		return n
	}
	var id int64
	d.admin.QueryRowContext(ctx, `SELECT id FROM information_schema.processlist
		WHERE id <> connection_id() AND user = 'root' ORDER BY rand() LIMIT 1`).Scan(&id)
	if _, err := d.admin.ExecContext(ctx, fmt.Sprintf("KILL %s %d", []string{"CONNECTION", "QUERY"}[rand.N(2)], id)); err == nil {
		n++
	}
	return n
}
