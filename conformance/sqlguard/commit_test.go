package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// layout is where the marks are, and how often a token may be used.
type layout struct {
	name   string
	column bool
	noSeq  bool
	mode   sqlfence.Mode
}

var layouts = []layout{
	{name: "table"},
	{name: "table, Sequenced", mode: sqlfence.Sequenced},
	{name: "column", column: true},
	{name: "column, Sequenced", column: true, mode: sqlfence.Sequenced},
}

// bank is a database with two accounts, of which one has all the money, a row that stands for
// the resource, and a list of the transfers that took effect.
type bank struct {
	*database
	admin *sql.DB
	made  *sync.Once // the guard's table
}

func newBank(t testing.TB, engine string) bank {
	t.Helper()
	d := newDatabase(t, engine)
	params := ""
	if engine == sqlite3 {
		params = "_pragma=journal_mode(WAL)"
	}
	b := bank{d, d.open("", params), new(sync.Once)}
	text := "text"
	if engine == mariadb {
		text = "varbinary(512)"
	}
	must(t, b.admin,
		"CREATE TABLE account (id "+text+" PRIMARY KEY, v bigint NOT NULL)",
		"INSERT INTO account VALUES ('from', 1000000), ('to', 0)",
		"CREATE TABLE resource (id "+text+" PRIMARY KEY, token bigint, seq bigint)",
		"CREATE TABLE transfer (id bigint NOT NULL)") // no key: what is done twice is there twice
	return b
}

// options are those of a guard in the layout; the resource's own row is made where it has one.
func (b bank) options(l layout, resource string) sqlfence.Options {
	b.t.Helper()
	o := sqlfence.Options{Dialect: dialects[b.engine], Mode: l.mode}
	if !l.column {
		return o
	}
	o.Column = &sqlfence.Column{Table: "resource", ID: "id", Token: "token", Seq: "seq"}
	if l.noSeq {
		o.Column.Seq = ""
	}
	if resource != "" {
		must(b.t, b.admin, fmt.Sprintf("INSERT INTO resource VALUES ('%s', NULL, NULL)", resource))
	}
	return o
}

// guard makes a guard over db, and its table where that is its own.
func (b bank) guard(db *sql.DB, o sqlfence.Options) *sqlfence.Guard {
	b.t.Helper()
	if o.Column == nil {
		b.made.Do(func() {
			if err := newGuard(b.t, b.admin, o).EnsureSchema(b.t.Context()); err != nil {
				b.t.Fatal(err)
			}
		})
	}
	return newGuard(b.t, db, o)
}

// transfer moves 1 from one account to the other.
func (b bank) transfer(ctx context.Context, g *sqlfence.Guard, mark sqlfence.Mark, id int64) error {
	_, err := b.transferRuns(ctx, g, mark, id)
	return err
}

// transferRuns also answers how often the work was tried.
func (b bank) transferRuns(ctx context.Context, g *sqlfence.Guard, mark sqlfence.Mark, id int64) (runs int, err error) {
	err = g.TxAll(ctx, []sqlfence.Mark{mark}, func(tx *sql.Tx) error {
		runs++
		for _, s := range []string{
			"UPDATE account SET v = v - 1 WHERE id = 'from'",
			"UPDATE account SET v = v + 1 WHERE id = 'to'",
			fmt.Sprintf("INSERT INTO transfer VALUES (%d)", id),
		} {
			if _, err := tx.ExecContext(ctx, s); err != nil {
				return err
			}
		}
		return nil
	})
	return runs, err
}

// done is how often the transfer took effect.
func (b bank) done(id int64) int64 {
	b.t.Helper()
	return number(b.t, b.admin, fmt.Sprintf("SELECT count(*) FROM transfer WHERE id = %d", id))
}

// balanced shows that n transfers took effect, each once.
func (b bank) balanced(n int64) {
	b.t.Helper()
	from := number(b.t, b.admin, "SELECT v FROM account WHERE id = 'from'")
	to := number(b.t, b.admin, "SELECT v FROM account WHERE id = 'to'")
	rows := number(b.t, b.admin, "SELECT count(*) FROM transfer")
	ids := number(b.t, b.admin, "SELECT count(DISTINCT id) FROM transfer")
	if from != 1000000-n || to != n || rows != n || ids != n {
		b.t.Errorf("accounts have %d and %d, %d transfers took effect %d times; want %d once each", from, to, ids, rows, n)
	}
}

// seqOf is the step of a mark where the mode has steps.
func (l layout) seqOf(n int) int64 {
	if l.mode == sqlfence.Sequenced {
		return int64(n)
	}
	return 0
}

// isCommit reports whether a request of either driver is a commit: its text, in both protocols
// behind five bytes. That it has the word in it says less: there is also READ COMMITTED.
func isCommit(request []byte) bool {
	return len(request) > 5 && strings.EqualFold(strings.TrimRight(string(request[5:]), "\x00"), "commit")
}

// Each commit of the transfers is lost, by a connection that is cut at the reply, after the
// commit took effect, or at the request, before the server saw it. The guard tells the two
// apart: each transfer takes effect once.
func TestLostCommits(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{postgres, mariadb} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, engine)
			proxy := servertest.NewProxy(t, b.server.Addr())
			db := b.open(proxy.Addr(), "")
			total, replies, requests := 0, 0, 0
			for _, l := range layouts {
				r, a := b.lossyTransfers(t, l, db, &total, func(applied bool) func() int {
					fault := proxy.DropRequest
					if applied {
						fault = proxy.DropReplyTo
					}
					d := fault(servertest.Only(1, isCommit))
					return func() int { d.Stop(); return d.Count() }
				})
				replies, requests = replies+r, requests+a
			}
			b.balanced(int64(total))
			t.Logf("%d transfers: %d replies and %d requests of commits were lost", total, replies, requests)
		})
	}
	t.Run(sqlite3, func(t *testing.T) {
		t.Parallel()
		b := newBank(t, sqlite3)
		db, l := b.openLossy("_pragma=journal_mode(WAL)")
		total := 0
		for _, layout := range layouts {
			b.lossyTransfers(t, layout, db, &total, func(applied bool) func() int {
				before, _ := l.lost()
				_, beforeNot := l.lost()
				l.lose(lostCommit{applied: applied})
				return func() int { a, n := l.lost(); return a - before + n - beforeNot }
			})
		}
		b.balanced(int64(total))
		applied, not := l.lost()
		t.Logf("%d transfers: %d commits were lost after they took effect, %d before", total, applied, not)
	})
}

// lossyTransfers makes transfers whose commits are all lost. fault lets the next commit be lost,
// after or before it takes effect, and returns what tells how many were.
func (b bank) lossyTransfers(t *testing.T, l layout, db *sql.DB, total *int, fault func(applied bool) func() int) (applied, not int) {
	g := b.guard(db, b.options(l, "to "+l.name))
	ctx := kit.Context(t, 10*time.Minute)
	for n := range kit.Count(6, 500) {
		// Some are the first of their token, and raise the mark.
		mark := sqlfence.Mark{Resource: "to " + l.name, Token: fence.Token(33 + n/3), Seq: l.seqOf(n%3 + 1)}
		id := int64(*total)
		*total++
		lose := rand.IntN(2) == 0
		hits := fault(lose)
		runs, err := b.transferRuns(ctx, g, mark, id)
		if hit := hits(); hit != 1 {
			t.Fatalf("%s, transfer %d: the fault hit %d commits, want 1; %v", l.name, id, hit, err)
		}
		want := 1 // what took effect is not tried again
		if lose {
			applied++
		} else {
			not++
			want = 2
		}
		if times := b.done(id); err != nil || times != 1 || runs != want {
			t.Fatalf("%s, transfer %d (%v, commit applied: %v) was tried %d times, took effect %d times, and answered %v", l.name, id, mark, lose, runs, times, err)
		}
	}
	return applied, not
}

// The same with several goroutines that use one guard and one token, as an application's do.
func TestLostCommitsOfManyAtOnce(t *testing.T) {
	t.Parallel()
	for _, engine := range []string{postgres, mariadb} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, engine)
			proxy := servertest.NewProxy(t, b.server.Addr())
			o := b.options(layout{}, "")
			o.LockWait = time.Minute
			g := b.guard(b.open(proxy.Addr(), ""), o)
			ctx := kit.Context(t, 10*time.Minute)
			var commits atomic.Int64 // each third one is lost
			reply := proxy.DropReplyTo(func(q []byte) bool { return isCommit(q) && commits.Add(1)%3 == 0 })
			request := proxy.DropRequest(func(q []byte) bool { return isCommit(q) && commits.Load()%7 == 1 })
			var wg sync.WaitGroup
			rounds := kit.Count(5, 100)
			for w := range 4 {
				wg.Go(func() {
					for n := range rounds {
						id := int64(w*rounds + n)
						if err := b.transfer(ctx, g, sqlfence.Mark{Resource: "to", Token: 33}, id); err != nil {
							t.Errorf("transfer %d: %v", id, err)
						}
					}
				})
			}
			wg.Wait()
			reply.Stop()
			request.Stop()
			b.balanced(int64(4 * rounds))
			t.Logf("%d replies and %d requests of commits were lost", reply.Count(), request.Count())
			if reply.Count() == 0 || request.Count() == 0 {
				t.Error("a fault never struck")
			}
		})
	}
}

// A column without a sequence does not identify transactions: where the mark was the token
// before, a lost commit is uncertain, both ways.
func TestLostCommitWithoutSeq(t *testing.T) {
	t.Parallel()
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, engine)
			db, lossy := b.openLossy("")
			g := b.guard(db, b.options(layout{column: true, noSeq: true}, "to"))
			ctx := kit.Context(t, time.Minute)
			for n := range kit.Count(4, 40) {
				id, applied := int64(n), n%2 == 0
				if n%4 > 1 { // the claim of this transaction raises the mark
					must(t, b.admin, "UPDATE resource SET token = 32")
				} else if err := g.Claim(ctx, "to", 33); err != nil {
					t.Fatal(err)
				}
				lossy.lose(lostCommit{applied: applied})
				err := b.transfer(ctx, g, sqlfence.Mark{Resource: "to", Token: 33}, id)
				times := b.done(id)
				switch {
				case errors.Is(err, fence.ErrUncertain) && (times == 1) == applied && times < 2:
				case n%4 > 1 && err == nil && times == 1: // the mark tells that nothing was written
				default:
					t.Errorf("commit applied: %v, mark raised: %v: took effect %d times, and answered %v", applied, n%4 > 1, times, err)
				}
			}
			if a, n := lossy.lost(); a == 0 || n == 0 {
				t.Errorf("%d and %d commits were lost", a, n)
			}
		})
	}
}

// A newer holder claims between the lost commit and its settlement. The former is told what
// became of its own, or that this is uncertain: never that it took effect when it did not, and
// never that nothing was written when it was.
func TestNewerHolderBeforeSettlement(t *testing.T) {
	t.Parallel()
	for _, engine := range engines {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, engine)
			db, lossy := b.openLossy("")
			ctx := kit.Context(t, 5*time.Minute)
			id, answers := int64(0), map[string]int{}
			for _, l := range append([]layout{{name: "column without Seq", column: true, noSeq: true}}, layouts...) {
				resource := "newer, " + l.name
				o := b.options(l, resource)
				g, newer := b.guard(db, o), newGuard(t, b.admin, o)
				for n := range kit.Count(8, 80) {
					// Of 4 rounds each: by a claim or a transaction, by one newer holder or two.
					token, applied := fence.Token(10*n+10), n%2 == 0
					byTx, twice := n%4 > 1, n%8 > 3
					if rand.IntN(2) == 0 {
						if err := g.Claim(ctx, resource, token); err != nil {
							t.Fatal(err)
						}
					}
					id++
					lossy.lose(lostCommit{applied: applied, then: func() {
						for next := token + 1; next == token+1 || twice && next == token+2; next++ {
							id++
							var err error
							if byTx {
								err = b.transfer(ctx, newer, sqlfence.Mark{Resource: resource, Token: next, Seq: l.seqOf(1)}, id)
							} else {
								err = newer.Claim(ctx, resource, next)
								id--
							}
							if err != nil {
								t.Errorf("the newer holder: %v", err)
							}
						}
					}})
					mine := id
					err := b.transfer(ctx, g, sqlfence.Mark{Resource: resource, Token: token, Seq: l.seqOf(1)}, mine)
					times := b.done(mine)
					right := errors.Is(err, fence.ErrUncertain)
					if applied {
						right = right || err == nil
					} else {
						right = right || errors.Is(err, fence.ErrStale)
					}
					if !l.column && !twice && errors.Is(err, fence.ErrUncertain) {
						right = false // the table knows the last transaction of the token before
					}
					if !right || (times == 1) != applied || times > 1 {
						t.Errorf("%s: commit applied: %v, newer by Tx: %v, two: %v: took effect %d times, and answered %v", l.name, applied, byTx, twice, times, err)
					}
					answer := "certain"
					if errors.Is(err, fence.ErrUncertain) {
						answer = "uncertain"
					}
					answers[fmt.Sprintf("%s, two: %v, by Tx: %v: %s", l.name, twice, byTx, answer)]++
				}
			}
			if a, n := lossy.lost(); a == 0 || n == 0 {
				t.Errorf("%d and %d commits were lost", a, n)
			}
			for _, line := range slices.Sorted(maps.Keys(answers)) {
				t.Logf("%s: %d", line, answers[line])
			}
		})
	}
}
