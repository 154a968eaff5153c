package sqlite

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Somebody has left a transaction open on a connection of the pool. Nothing is granted in it, nor is it
// rolled back behind his back, and the error says what to do.
func TestOpenTransactionInPool(t *testing.T) {
	path := lockFile(t)
	s, db := open(t, path)
	db.SetMaxOpenConns(1)
	release(t, func() store.Claim { c := claim(s, "k", time.Hour); grant(t, c); return c }())
	exec(t, db, "CREATE TABLE made (id INTEGER)")
	exec(t, db, "BEGIN")
	exec(t, db, "INSERT INTO made VALUES (1)")
	c := claim(s, "k", time.Hour)
	if g, err := c.Try(t.Context()); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "BeginTx") {
		t.Errorf("Try: %+v, %v", g, err)
	}
	exec(t, db, "COMMIT")
	if n := query[int](t, db, "SELECT count(*) FROM made"); n != 1 {
		t.Errorf("the transaction that was open has written %d rows", n)
	}
	other, _ := open(t, path)
	grant(t, c)
	mustBeHeld(t, other, "k")
	release(t, c)
}
