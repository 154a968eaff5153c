package sqlfencex

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// chaos makes many transactions that each write a row of their own, while things break.
type chaos struct {
	t      *testing.T
	e      *engine
	guards []*sqlfence.Guard
	seqs   bool
	ids    atomic.Int64
	token  atomic.Int64

	mu      sync.Mutex
	answers map[int64]error // by row
	kinds   map[string]int
}

// work makes one transaction, whose context may end at any time.
func (c *chaos) work(ctx context.Context, worker int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if rand.N(3) == 0 {
		defer time.AfterFunc(rand.N(20*time.Millisecond), cancel).Stop()
	}
	id, token := c.ids.Add(1), c.token.Load()
	if rand.N(20) == 0 {
		token = c.token.Add(1)
	}
	m := sqlfence.Mark{Resource: fmt.Sprint("r", rand.N(2)), Token: fence.Token(token)}
	if c.seqs {
		m.Seq = id
	}
	err := c.guards[worker%len(c.guards)].TxAll(ctx, []sqlfence.Mark{m}, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, fmt.Sprintf("INSERT INTO made VALUES (%d)", id))
		return err
	})
	kind := "nil"
	for _, k := range []error{fence.ErrUncertain, fence.ErrStale, fence.ErrApplied, fence.ErrBusy, fence.ErrUnavailable, context.Canceled} {
		if errors.Is(err, k) {
			kind = k.Error()
			break
		}
	}
	if err != nil && kind == "nil" {
		kind = err.Error()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.answers[id] = err
	c.kinds[kind]++
}

// cut ends the connections of the others, in whatever they do.
func (c *chaos) cut(ctx context.Context, db *sql.DB) (n int) {
	if c.e.dialect == sqlfence.PostgreSQL {
		db.QueryRowContext(ctx, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend' AND random() < 0.3").Scan(&n)
		return n
	}
	rows, err := db.QueryContext(ctx, "SELECT id FROM information_schema.processlist WHERE id <> connection_id() AND user = 'root' AND rand() < 0.3")
	if err != nil {
		return 0
	}
	defer rows.Close()
	var ids []int64
	for rows.Next() {
		var id int64
		if rows.Scan(&id) == nil {
			ids = append(ids, id)
		}
	}
	for _, id := range ids {
		if _, err := db.ExecContext(ctx, fmt.Sprintf("KILL %s %d", []string{"CONNECTION", "QUERY"}[rand.N(2)], id)); err == nil {
			n++
		}
	}
	return n
}

// Connections are ended, contexts end, the server stops, dies and comes back, and the same
// tokens are used by two guards at once. Every answer is true all the same.
func TestEverythingBreaks(t *testing.T) {
	breakable := func(t *testing.T, e *engine) {
		for name, options := range layouts {
			for _, mode := range []sqlfence.Mode{sqlfence.Monotonic, sqlfence.Once, sqlfence.Sequenced} {
				o := options()
				o.Mode, o.LockWait = mode, time.Second
				few := name == "table" && mode != sqlfence.Sequenced || name == "column" && mode == sqlfence.Sequenced
				if !few && !kit.Soak() {
					continue
				}
				if mode == sqlfence.Sequenced && o.Column != nil && o.Column.Seq == "" {
					continue
				}
				t.Run(fmt.Sprint(name, " ", mode), func(t *testing.T) { e.breakAll(t, o) })
			}
		}
	}
	t.Run("PostgreSQL", func(t *testing.T) {
		breakable(t, &engine{"PostgreSQL", sqlfence.PostgreSQL, servertest.PostgreSQL(t), ""})
	})
	t.Run("MariaDB", func(t *testing.T) {
		breakable(t, &engine{"MariaDB", sqlfence.MySQL, servertest.MariaDB(t), ""})
	})
}

func (e *engine) breakAll(t *testing.T, o sqlfence.Options) {
	db := e.open(t, "")
	must(t, db, "DROP TABLE IF EXISTS doc", "DROP TABLE IF EXISTS holdfast_fence", "DROP TABLE IF EXISTS made", "CREATE TABLE made (id bigint NOT NULL)")
	e.makeDoc(t, db)
	e.addDoc(t, db, "r0")
	e.addDoc(t, db, "r1")
	c := &chaos{t: t, e: e, seqs: o.Mode == sqlfence.Sequenced, answers: map[int64]error{}, kinds: map[string]int{}}
	for range 2 {
		c.guards = append(c.guards, e.ready(t, e.open(t, ""), o))
	}
	c.token.Store(1)
	ctx := kit.Context(t, 2*time.Minute)
	end := time.Now().Add(time.Duration(kit.Count(2500, 15000)) * time.Millisecond)
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Go(func() {
			for time.Now().Before(end) {
				if o.Mode == sqlfence.Once {
					c.token.Add(rand.N(int64(2)))
				}
				c.work(ctx, w)
			}
		})
	}
	cuts, deaths := 0, 0
	for i := 1; time.Now().Before(end); i++ {
		time.Sleep(rand.N(40 * time.Millisecond))
		switch {
		case i%12 == 0:
			e.server.Kill()
			time.Sleep(rand.N(200 * time.Millisecond))
			e.server.Restart()
			deaths++
		case i%7 == 0:
			e.server.Stop()
			time.Sleep(rand.N(1500 * time.Millisecond))
			e.server.Cont()
		default:
			cuts += c.cut(ctx, db)
		}
	}
	wg.Wait()
	rows, err := db.QueryContext(ctx, "SELECT id, count(*) FROM made GROUP BY id")
	for i := 0; err != nil && i < 5; i++ { // the pool's connections were cut, too
		rows, err = db.QueryContext(ctx, "SELECT id, count(*) FROM made GROUP BY id")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	made := map[int64]int{}
	for rows.Next() {
		var id int64
		var n int
		if err := rows.Scan(&id, &n); err != nil {
			t.Fatal(err)
		}
		made[id] = n
	}
	for id, err := range c.answers {
		n := made[id]
		if n > 1 || err == nil && n != 1 || err != nil && !errors.Is(err, fence.ErrUncertain) && n != 0 {
			t.Errorf("made %d times, answer: %v", n, err)
		}
	}
	if c.kinds["nil"] == 0 || cuts == 0 {
		t.Errorf("%d connections were cut, %d transactions succeeded", cuts, c.kinds["nil"])
	}
	t.Logf("%d cut, %d deaths, answers %v", cuts, deaths, c.kinds)
}
