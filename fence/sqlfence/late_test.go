package sqlfence

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// A process that was stopped finds a transaction that has begun, and that it has given up.
func TestLateBegin(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		late := 0
		f.before = func(_ context.Context, verb string) error {
			if verb == "BEGIN" && late == 0 {
				late++
				time.Sleep(defaultLockWait + patience/2)
			}
			return nil
		}
		if err := g.Tx(t.Context(), "r", 34, nothing); err != nil || late != 1 {
			t.Errorf("%v, %d late", err, late)
		}
	})
}

// A commit that the guard has given up before it was sent is none that fn has made.
func TestLateCommit(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		cs, err := g.claims([]Mark{{Resource: "r", Token: 34}}, monotonic)
		if err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			g.lockWait = defaultLockWait
			tx, err := g.begin(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			tx.Tx.Rollback() // as its context does
			g.lockWait = -1
			// Either the answer is first, and is that to fn; or what became of it is asked.
			if _, err := g.commit(t.Context(), tx, cs); errors.Is(err, errSlow) {
				return
			}
		}
		t.Error("no commit was given up")
	})
}

// A claim whose commit was not answered is made again; where that fails, the mark may have been
// raised all the same.
func TestDoubtfulClaim(t *testing.T) {
	for _, cancelled := range []bool{false, true} {
		onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			f.lost = func() (bool, error) {
				f.lost = nil
				f.mu.Lock()
				defer f.mu.Unlock()
				f.before = func(context.Context, string) error {
					if cancelled {
						cancel()
					}
					return io.ErrClosedPipe
				}
				return true, io.ErrUnexpectedEOF
			}
			err := g.Claim(ctx, "r", 34)
			if !errors.Is(err, fence.ErrUncertain) || errors.Is(err, fence.ErrUnavailable) || errors.Is(err, context.Canceled) != cancelled {
				t.Errorf("cancelled %v: %v", cancelled, err)
			}
			if r := f.get("r"); r.token != 34 {
				t.Errorf("the mark is %d", r.token)
			}
		})
	}
}

// Nobody means by a wait of 292 years that nothing may be waited for.
func TestLongLockWait(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, _ *Guard) {
		for _, d := range []Dialect{PostgreSQL, MySQL, SQLite} {
			_, db := openFake(t)
			g, err := New(db, Options{Dialect: d, LockWait: 1<<63 - 1})
			if err != nil {
				t.Fatal(err)
			}
			if wait := g.answerWait(); wait < maxLockWait {
				t.Errorf("%v: %v", d, wait)
			}
			if p, ok := g.e.(*postgres); ok && p.wait != "2073600000" {
				t.Errorf("lock_timeout is %s", p.wait)
			}
			db.Close()
		}
	})
}

// Rows of new resources are made together, and not one for each transaction.
func TestManyNewResources(t *testing.T) {
	onFake(t, func(t *testing.T, f *fakeDB, g *Guard) {
		var marks []Mark
		for i := range 100 {
			marks = append(marks, Mark{Resource: fmt.Sprint("new ", i), Token: 5})
		}
		f.set("new 50", row{token: 4})
		if err := g.TxAll(t.Context(), marks, nothing); err != nil {
			t.Fatal(err)
		}
		begun := 0
		for _, verb := range f.log {
			if verb == "BEGIN" {
				begun++
			}
		}
		if begun != 2 {
			t.Errorf("%d transactions", begun)
		}
		for _, m := range marks {
			if r := f.get(m.Resource); r.token != 5 {
				t.Errorf("%s: %d", m.Resource, r.token)
			}
		}
	})
}
