package sqlfencex

import (
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// A deadlock on MySQL rolls the whole transaction back, and what fn writes after it commits by
// itself. An fn that keeps the error to itself is found out before the commit.
func TestDeadlockKeptByFn(t *testing.T) {
	e := &engine{"MariaDB", sqlfence.MySQL, servertest.MariaDB(t), ""}
	db := e.open(t, "")
	must(t, db, "CREATE TABLE late (v INT)", "CREATE TABLE d (id INT PRIMARY KEY, v INT NOT NULL)", "INSERT INTO d SELECT seq, 0 FROM seq_1_to_1000")
	g := e.ready(t, db, sqlfence.Options{})
	ctx := kit.Context(t, time.Minute)
	other, err := db.BeginTx(ctx, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Rollback()
	// The other one has written more, so that the guard's transaction is the victim.
	if _, err := other.ExecContext(ctx, "UPDATE d SET v = v + 1 WHERE id > 1"); err != nil {
		t.Fatal(err)
	}
	runs, waited := 0, make(chan error, 1)
	err = g.Tx(ctx, "r", 5, func(tx *sql.Tx) error {
		runs++
		if _, err := tx.ExecContext(ctx, "UPDATE d SET v = v + 10 WHERE id = 1"); err != nil {
			return err
		}
		go func() {
			_, err := other.ExecContext(ctx, "UPDATE d SET v = v + 1 WHERE id = 1")
			waited <- err
		}()
		_, dead := tx.ExecContext(ctx, "UPDATE d SET v = v + 10 WHERE id = 2") // nobody looks at it
		if dead == nil {
			t.Error("no deadlock")
		}
		_, err := tx.ExecContext(ctx, "INSERT INTO late VALUES (9)")
		return err
	})
	if err := <-waited; err != nil {
		t.Errorf("the other transaction was the victim: %v", err)
	}
	if !errors.Is(err, fence.ErrUncertain) || runs != 1 {
		t.Errorf("Tx = %v after %d runs of fn, want uncertain after one", err, runs)
	}
	if n := number(t, db, "SELECT COUNT(*) FROM late"); n != 1 {
		t.Errorf("the write after the deadlock is there %d times: the fault did not happen", n)
	}
	if err := g.Tx(ctx, "r", 5, func(tx *sql.Tx) error { return nil }); err != nil {
		t.Errorf("the next transaction: %v", err)
	}
}
