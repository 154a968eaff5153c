package lockedtx

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/sqlstore"
)

const workers = 8

// keys share one table, and exclude nobody but themselves. None is like a key of the other ones.
var keys = []string{"a", "A", "\xff"}

// ledger is a table of entries, which have a row of sums: what is read before it is written must
// be what the one before has left.
type ledger struct{ *database }

func newLedger(d *database) ledger {
	d.table("sum (k int NOT NULL PRIMARY KEY, v bigint NOT NULL)")
	d.table("entry (k int NOT NULL, v bigint NOT NULL)")
	for k := range keys {
		must(d.t, d.admin, fmt.Sprintf("INSERT INTO sum VALUES (%d, 0)", k))
	}
	return ledger{d}
}

// post reads the sum and the entries of a key without a lock, and adds an entry.
func post(ctx context.Context, tx *sql.Tx, k int) error {
	var sum, entries int64
	if err := tx.QueryRowContext(ctx, fmt.Sprintf("SELECT v FROM sum WHERE k = %d", k)).Scan(&sum); err != nil {
		return err
	}
	time.Sleep(rand.N(time.Millisecond))
	if err := tx.QueryRowContext(ctx, fmt.Sprintf("SELECT count(*) FROM entry WHERE k = %d", k)).Scan(&entries); err != nil {
		return err
	}
	if sum != entries {
		return fmt.Errorf("the sum says %d, there are %d entries", sum, entries)
	}
	if _, err := tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO entry VALUES (%d, %d)", k, entries+1)); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, fmt.Sprintf("UPDATE sum SET v = %d WHERE k = %d", sum+1, k))
	return err
}

// check wants that want posts took effect, one after the other.
func (l ledger) check(want int64) {
	l.t.Helper()
	var posted, lost int64
	for k := range keys {
		n := number(l.t, l.admin, fmt.Sprintf("SELECT count(*) FROM entry WHERE k = %d", k))
		distinct := number(l.t, l.admin, fmt.Sprintf("SELECT count(DISTINCT v) FROM entry WHERE k = %d", k))
		sum := number(l.t, l.admin, fmt.Sprintf("SELECT v FROM sum WHERE k = %d", k))
		posted += n
		lost += n - min(distinct, sum)
	}
	if posted != want || lost != 0 {
		l.t.Errorf("%d posts took effect, %d of them on what was not the last state; %d were answered", posted, lost, want)
	}
}

// inside knows who is between the first statement of a transaction and its end.
type inside struct {
	mu    sync.Mutex
	now   map[*visit]bool
	pairs [][2]*visit // that were inside at once
}

// visit is one run of fn. A transaction that fails loses the lock before it is told so.
type visit struct {
	k    int
	good bool
}

func (i *inside) enter(k int) *visit {
	i.mu.Lock()
	defer i.mu.Unlock()
	v := &visit{k: k}
	for other := range i.now {
		if other.k == k {
			i.pairs = append(i.pairs, [2]*visit{v, other})
		}
	}
	i.now[v] = true
	return v
}

func (i *inside) leave(v *visit, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	v.good = err == nil
	delete(i.now, v)
}

// both is how often two were inside at once whose transactions had not failed.
func (i *inside) both() (n int) {
	for _, p := range i.pairs {
		if p[0].good && p[1].good {
			n++
		}
	}
	return n
}

// TestExclusion runs many posts at every isolation level.
func TestExclusion(t *testing.T) {
	t.Parallel()
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			d := e.database(t)
			for _, l := range e.levels {
				t.Run(l.name, func(t *testing.T) {
					if d.server == nil { // a file has one journal mode
						d = e.database(t, l.params)
					}
					exclusion(t, d, l)
				})
			}
		})
	}
}

func exclusion(t *testing.T, d *database, lv level) {
	l := newLedger(d)
	ctx := kit.Context(t, 5*time.Minute)
	o := d.options(lv)
	in := inside{now: map[*visit]bool{}}
	var runs, posted atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		db := d.open("", lv.params)
		wg.Go(func() {
			for range kit.Count(10, 250) {
				k := rand.N(4) % len(keys) // the first one more often
				err := sqlstore.Locked(ctx, db, o, keys[k], func(tx *sql.Tx) error {
					runs.Add(1)
					v := in.enter(k)
					err := post(ctx, tx, k)
					in.leave(v, err)
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
				posted.Add(1)
			}
		})
	}
	wg.Wait()
	l.check(posted.Load())
	if n := in.both(); n != 0 {
		t.Errorf("two had the lock at once %d times", n)
	}
	t.Logf("%d posts by %d runs", posted.Load(), runs.Load())
}

// TestLoadFindsWhatIsNotLocked shows that the load of TestExclusion notices where nobody locks.
func TestLoadFindsWhatIsNotLocked(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		if !d.networked(t) { // and it has one writer only
			return
		}
		newLedger(d)
		ctx := kit.Context(t, time.Minute)
		bad := func() int64 {
			return number(t, d.admin, "SELECT count(*) - count(DISTINCT v) FROM entry WHERE k = 0")
		}
		for end := time.Now().Add(30 * time.Second); bad() == 0 && time.Now().Before(end); {
			var wg sync.WaitGroup
			for range workers {
				wg.Go(func() {
					tx, err := d.admin.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
					if err != nil {
						return
					}
					defer tx.Rollback()
					if post(ctx, tx, 0) == nil {
						tx.Commit()
					}
				})
			}
			wg.Wait()
		}
		if bad() == 0 {
			t.Error("nothing went wrong without a lock: the load is too light")
		}
	})
}

// workerChild posts a number of times.
func workerChild() {
	args := kit.Args() // driver, data source, dialect, count
	db, err := sql.Open(args[0], args[1])
	if err != nil {
		kit.Say("failed", err)
		return
	}
	defer db.Close()
	dialect, _ := strconv.Atoi(args[2])
	count, _ := strconv.Atoi(args[3])
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	o := sqlstore.LockedOptions{Dialect: sqlstore.Dialect(dialect), LockWait: 30 * time.Second}
	for range count {
		err := sqlstore.Locked(ctx, db, o, keys[0], func(tx *sql.Tx) error { return post(ctx, tx, 0) })
		if err != nil {
			kit.Say("failed", err)
			return
		}
	}
	kit.Say("posted", count)
}

// TestExclusionOfProcesses is the same with processes. The first calls of all, which make the
// table, come at once.
func TestExclusionOfProcesses(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, d *database) {
		l := newLedger(d)
		count := kit.Count(8, 200)
		driver, dsn := d.dsn("", d.levels[0].params)
		var children []*kit.Process
		for range workers {
			children = append(children, kit.Child(t, "worker", driver, dsn, fmt.Sprint(int(d.dialect)), fmt.Sprint(count)))
		}
		for _, c := range children {
			c.Expect(t, "posted", 5*time.Minute)
		}
		l.check(int64(workers * count))
	})
}
