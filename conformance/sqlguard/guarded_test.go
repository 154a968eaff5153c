package sqlguard_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
)

// dialects are the guard's words for the engines.
var dialects = map[string]sqlfence.Dialect{
	postgres: sqlfence.PostgreSQL, mariadb: sqlfence.MySQL, sqlite3: sqlfence.SQLite,
}

// way is how the sessions use the guard.
type way struct {
	name   string
	column bool // the marks are in the rows, not in a table of the guard's
	tx     bool // the guard makes the transactions
	check  bool // the holder claims once, by itself, and its transactions only check
}

var ways = []way{
	{name: "Tx", tx: true},
	{name: "Tx, column", tx: true, column: true},
	{name: "ClaimIn"},
	{name: "ClaimIn, column", column: true},
	{name: "CheckIn", check: true},
	{name: "CheckIn, column", check: true, column: true},
}

// byGuard are sessions that use the guard. In their steps, a look is a claim: the guard has no
// check that locks nothing.
type byGuard struct {
	way
	o      sqlfence.Options
	admin  *sqlfence.Guard
	guards map[string]*sqlfence.Guard // by session
	marks  map[string][]sqlfence.Mark // what the session ever claims
}

// newByGuard makes a guard for each session, and one that puts the marks to 32.
func newByGuard(t testing.TB, d *database, c config, x tables, pools map[string]pool, w way) *byGuard {
	t.Helper()
	b := &byGuard{way: w, guards: map[string]*sqlfence.Guard{}, marks: map[string][]sqlfence.Mark{}}
	b.o = sqlfence.Options{Dialect: dialects[d.engine], Table: "fence" + x.suffix, TxOptions: &sql.TxOptions{Isolation: c.level}}
	if w.column {
		b.o.Table, b.o.Column = "", &sqlfence.Column{Table: x.doc, ID: "id", Token: "token", Seq: "seq"}
	}
	for name, p := range pools {
		b.guards[name] = newGuard(t, p.db, b.o)
	}
	b.admin = newGuard(t, x.admin, b.o)
	if err := b.admin.EnsureSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	return b
}

// reset puts the tables and the marks to where each schedule begins.
func (b *byGuard) reset(t testing.TB, x tables, missing bool) {
	t.Helper()
	x.reset(t, missing)
	if !b.column {
		must(t, x.admin, "DELETE FROM "+b.o.Table+" WHERE resource <> ''") // that one is the version
	}
	if missing {
		must(t, x.admin, "UPDATE "+x.doc+" SET token = NULL, seq = NULL")
		return
	}
	for _, resource := range []string{"1", "2"} {
		if err := b.admin.Claim(t.Context(), resource, 32); err != nil {
			t.Fatal(err)
		}
	}
}

func newGuard(t testing.TB, db *sql.DB, o sqlfence.Options) *sqlfence.Guard {
	t.Helper()
	g, err := sqlfence.New(db, o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// learn notes what each session will claim.
func (b *byGuard) learn(r *run, steps []op) {
	clear(b.marks)
	for _, o := range steps {
		for _, m := range marksOf(r.sessions[o.who], o) {
			if !slices.Contains(b.marks[o.who], m) {
				b.marks[o.who] = append(b.marks[o.who], m)
			}
		}
	}
}

// claims reports whether a session that uses the guard claims at this step.
func claims(o op) bool { return slices.Contains([]string{"look", "claim", "cas", "again"}, o.do) }

// marksOf is what a step claims.
func marksOf(s *session, o op) (marks []sqlfence.Mark) {
	if !claims(o) && o.do != "acquire" {
		return nil
	}
	if o.do == "look" {
		o.row = "1"
	}
	for resource := range strings.SplitSeq(o.row, ",") {
		marks = append(marks, sqlfence.Mark{Resource: resource, Token: s.token})
	}
	return marks
}

func (b *byGuard) do(ctx context.Context, s *session, o op) (known bool, err error) {
	g := b.guards[s.name]
	switch {
	case o.do == "acquire":
		return true, b.acquire(ctx, s)
	case o.do == "begin" && b.check:
		return false, b.acquire(ctx, s)
	case claims(o):
		switch marks := marksOf(s, o); {
		case b.tx: // Tx has done it
		case b.check:
			err = g.CheckIn(ctx, s.tx, marks...)
		default:
			err = g.ClaimIn(ctx, s.tx, marks...)
		}
		if err == nil && o.do == "cas" {
			err = s.exec(ctx, "UPDATE {doc} SET v = v + ? WHERE id = ?", s.number, o.row)
		}
		if err == nil && o.do == "again" {
			err = s.exec(ctx, "UPDATE {doc} SET v = v WHERE id = ?", o.row)
		}
		return true, err
	}
	return false, nil
}

// acquire claims in transactions of the guard's own.
func (b *byGuard) acquire(ctx context.Context, s *session) error {
	for _, m := range b.marks[s.name] {
		if err := b.guards[s.name].Claim(ctx, m.Resource, m.Token); err != nil {
			return err
		}
	}
	return nil
}

// inTx is sqlfence's Tx.
func (b *byGuard) inTx(ctx context.Context, s *session, fn func(*sql.Tx) error) error {
	if marks := b.marks[s.name]; len(marks) > 1 {
		return b.guards[s.name].TxAll(ctx, marks, fn)
	}
	return b.guards[s.name].Tx(ctx, b.marks[s.name][0].Resource, s.token, fn)
}

// With the guard no schedule is BAD, in any configuration. With Tx, more than that: the
// database's own failures are repeated, so that New always comes through, and Old does or is
// told that it is stale.
func TestSchedulesByGuard(t *testing.T) {
	var m matrix
	eachConfig(t, func(t *testing.T, i int, d *database, c config, _ tables) {
		for n, w := range ways {
			if !kit.Soak() && w.check && w.column && c.engine != postgres {
				continue
			}
			t.Run(w.name, func(t *testing.T) {
				if d.engine != mariadb {
					t.Parallel()
				}
				d := d
				if d.engine == sqlite3 {
					d = newDatabase(t, d.engine)
				}
				x := newTables(d, c, fmt.Sprintf("_%d_%d", i, n))
				pools := newPools(d, c, x)
				b := newByGuard(t, d, c, x, pools, w)
				for _, s := range schedules {
					r := newRun(t, d, c, x, pools)
					b.reset(t, x, s.missing)
					r.checker = b
					if w.tx {
						r.inTx = b.inTx
					}
					steps := s.steps
					if s.guarded != "" {
						steps = s.guarded
					}
					b.learn(r, ops(steps))
					got := r.play(ops(steps))
					m.put(s.name+" "+w.name, i, got.String())
					if problem := w.problem(r, s, i, got); problem != "" {
						t.Errorf("%s (%s): %v %s, want %s; %s", s.name, s.what, got, got.bad, problem, r.told())
					}
				}
			})
		}
	})
	t.Log(&m)
}

// problem is what else the outcome should have been; "" where it is right.
func (w way) problem(r *run, s schedule, i int, got outcome) string {
	old, new := r.sessions["O"].end, r.sessions["N"].end
	switch {
	case w.tx && (got.bad != "" || got.codes != nil):
		return "that both come through or are stale"
	case w.tx && new != committed && !strings.Contains(s.steps, "N rollback"):
		return "that New commits"
	case w.tx && old != committed && old != refused && old != open:
		return "that Old commits or is stale"
	case s.name == "S2e" && !w.tx:
		return "" // see TestClaimAfterARead
	case got.bad != "":
		return "no BAD"
	case got.codes != nil && r.c.level == sql.LevelReadCommitted && !w.check:
		return "that nobody is ended by the database at READ COMMITTED"
	}
	return ""
}

// What the guard cannot mend: a claim in the caller's own transaction that has read before. In
// MariaDB at REPEATABLE READ, and in MySQL, what is read after the claim is as old as that, where
// the mark is in the guard's table; a row that holds its own mark is read anew, since the claim
// has written it. The other databases and levels wait, or end the transaction. The guard itself
// reads nothing before its claim.
func TestClaimAfterARead(t *testing.T) {
	want := map[string]string{
		"ClaimIn":         "ok abort abort  ok BAD abort abort  abort abort  stale stale",
		"ClaimIn, column": "ok abort abort  ok ok abort abort  abort abort  stale stale",
	}
	var trap schedule
	for _, s := range schedules {
		if s.name == "S2e" {
			trap = s
		}
	}
	eachConfig(t, func(t *testing.T, i int, d *database, c config, x tables) {
		for _, w := range ways {
			if want[w.name] == "" {
				continue
			}
			pools := newPools(d, c, x)
			b := newByGuard(t, d, c, x, pools, w)
			play := func(steps, want string) {
				t.Helper()
				r := newRun(t, d, c, x, pools)
				r.checker = b
				b.reset(t, x, false)
				b.learn(r, ops(steps))
				if got := r.play(ops(steps)); got.class() != want {
					t.Errorf("%s, %s: %v, want %s; %s", w.name, steps, got, want, r.told())
				}
			}
			// The first claim of a guard, which has yet to look whether its table is fit, reads
			// nothing before: New's read is after Old's commit.
			first := "ok"
			if c.level == sql.LevelRepeatableRead && c.engine == postgres || c.level == sql.LevelSerializable && c.engine == postgres {
				first = "abort"
			}
			play("O begin; O claim 1; O add 1; N begin; N claim 1; N read 1; N set 1; N commit; O commit", first)
			play(trap.steps, strings.Fields(want[w.name])[i])
		}
	})
}

var _ fence.Guard = (*sqlfence.Guard)(nil)
