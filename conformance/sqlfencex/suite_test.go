package sqlfencex

import (
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
)

func TestSuite(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		e.makeDoc(t, db)
		for name, options := range layouts {
			t.Run(name, func(t *testing.T) {
				h := fencetest.Harness{
					New:    func(t testing.TB) fence.Guard { return e.ready(t, db, options()) },
					Reopen: func(t testing.TB, _ fence.Guard) fence.Guard { return e.guard(t, e.open(t, ""), options()) },
				}
				if options().Column != nil {
					h.MissingIsError = true
					h.Resource = func(t testing.TB, id string) string {
						e.addDoc(t, db, id)
						return id
					}
				}
				fencetest.Run(t, h)
			})
		}
	})
}

// Holders with growing tokens each read a number and write it back larger. None is lost,
// whatever order they come in, and who comes late is stale.
func TestReadModifyWrite(t *testing.T) {
	const workers, rounds = 8, 25
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		e.makeDoc(t, db)
		for name, options := range layouts {
			for mode, seq := range map[sqlfence.Mode]int64{sqlfence.Monotonic: 0, sqlfence.Once: 0, sqlfence.Sequenced: 1} {
				o := options()
				o.Mode = mode
				if mode == sqlfence.Sequenced && o.Column != nil && o.Column.Seq == "" {
					continue
				}
				t.Run(fmt.Sprint(name, " ", mode), func(t *testing.T) {
					id := fmt.Sprint("sum ", name, mode)
					e.addDoc(t, db, id)
					guards := []*sqlfence.Guard{e.ready(t, db, o), e.guard(t, e.open(t, ""), o)}
					ctx := kit.Context(t, 2*time.Minute)
					var mu sync.Mutex
					var last fence.Token
					written, stale := int64(0), 0
					var wg sync.WaitGroup
					for w := range workers {
						wg.Go(func() {
							for range rounds {
								mu.Lock()
								last++
								token := last
								mu.Unlock()
								err := guards[w%2].TxAll(ctx, []sqlfence.Mark{{Resource: id, Token: token, Seq: seq}}, func(tx *sql.Tx) error {
									var v int64
									if err := tx.QueryRowContext(ctx, "SELECT v FROM doc WHERE id = "+e.bind(1), id).Scan(&v); err != nil {
										return err
									}
									_, err := tx.ExecContext(ctx, "UPDATE doc SET v = "+e.bind(1)+" WHERE id = "+e.bind(2), v+1, id)
									return err
								})
								mu.Lock()
								switch {
								case err == nil:
									written++
								case errors.Is(err, fence.ErrStale):
									stale++
								default:
									t.Error(err)
								}
								mu.Unlock()
							}
						})
					}
					wg.Wait()
					t.Logf("%d written, %d stale", written, stale)
					var v int64
					if err := db.QueryRowContext(ctx, "SELECT v FROM doc WHERE id = "+e.bind(1), id).Scan(&v); err != nil {
						t.Fatal(err)
					}
					if v != written || written == 0 {
						t.Errorf("the number is %d after %d transactions", v, written)
					}
				})
			}
		}
	})
}
