package sqlfence

import (
	"context"
	"database/sql"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

// strength says how a row is locked when it is read.
type strength int

const (
	unlocked  strength = iota
	shared             // others may do the same, and none may claim
	exclusive          // as a claim does
)

// engine is what differs between the databases. Its statements are run in a transaction,
// but those that read without a lock.
type engine interface {
	// claim locks the row of c, raises its mark where it may, and says what was there: with
	// ok its seq at least, as far as it is known, and else all of it. keep leaves the
	// session's settings as they were, and is for the caller's own transaction.
	claim(ctx context.Context, h Handle, c *claim, keep bool) (r row, ok bool, err error)
	read(ctx context.Context, h Handle, resource string, s strength, keep bool) (row, error)
	// seed makes the row of a resource in the own table, where it is missing. It needs no
	// transaction.
	seed(ctx context.Context, h Handle, resource string) error

	// count adds one to the token of a row of the own table, and returns it; ok is false where
	// there is no row. It needs no transaction.
	count(ctx context.Context, h Handle, key string) (n int64, ok bool, err error)

	// learn finds out what the other methods need to know of the server. It reads no table, so
	// that what the transaction reads later is not old. Pools that do not commit are refused.
	learn(ctx context.Context, h Handle) error
	// columns lists the columns of the table; none where there is no such table. It learns, too.
	columns(ctx context.Context, h Handle) ([]column, error)
	create() []string // the own table; harmless where it exists
	// inTx reports whether the handle is in a transaction.
	inTx(ctx context.Context, h Handle) (bool, error)

	fault(err error) sqlerr.Kind
	server() string // as package sqlerr calls it
	// bounds reports whether the server ends a wait for a lock after LockWait by itself.
	bounds() bool
}

// column is a column of a table, as the database describes it.
type column struct {
	name, typ string
	wide      bool // holds every int64
	unique    bool
	// trouble is what makes the whole table unfit; empty where there is none.
	trouble string
}

func newEngine(d Dialect, l layout, lockWait time.Duration) engine {
	switch d {
	case PostgreSQL:
		return newPostgres(l, lockWait)
	case MySQL:
		return &mysql{l: l, lockWait: lockWait}
	}
	return newSQLite(l, lockWait)
}

// readColumns are the columns of a row in the order in which scan takes them.
func (l *layout) readColumns() string {
	list := []string{"COALESCE(" + l.token + ", 0)"}
	for _, name := range []string{l.seq, l.prevToken, l.prevSeq} {
		if name == "" {
			list = append(list, "0")
		} else {
			list = append(list, "COALESCE("+name+", 0)")
		}
	}
	return strings.Join(list, ", ")
}

// scan reads the only row of the answer to a query, and the other columns behind it.
func scan(ctx context.Context, h Handle, query string, args []any, more ...any) (r row, err error) {
	err = h.QueryRowContext(ctx, query, args...).Scan(append([]any{&r.token, &r.seq, &r.prevToken, &r.prevSeq}, more...)...)
	if err == sql.ErrNoRows {
		return row{}, nil
	}
	r.exists = err == nil
	return r, err
}

// tryClaim is claim by a statement that raises the mark where it may, and else says nothing:
// try makes it, and read looks at the row, and locks it.
func tryClaim(c *claim, try func() (row, bool, error), read func() (row, error)) (r row, ok bool, err error) {
	for range 3 {
		if r, ok, err = try(); ok || err != nil {
			return r, ok, err
		}
		if r, err = read(); err != nil || !r.exists || !c.passes(r) {
			return r, false, err
		}
		// The row was made, or changed, in between. Now it is locked.
	}
	return r, false, nil
}

// countReturning is count for databases that have RETURNING, whose statement takes the key.
func countReturning(ctx context.Context, h Handle, statement, key string) (n int64, ok bool, err error) {
	err = h.QueryRowContext(ctx, statement+" RETURNING token", key).Scan(&n)
	if err == sql.ErrNoRows {
		return 0, false, nil
	}
	return n, err == nil, err
}

// set is the list of assignments that raise a mark. The token comes last: MySQL assigns
// from left to right.
func (l *layout) set(prefix, token, seq, keepToken string) string {
	var list []string
	if l.prevToken != "" {
		for _, p := range [][2]string{{l.prevToken, l.token}, {l.prevSeq, l.seq}} {
			list = append(list, p[0]+" = CASE WHEN "+prefix+l.token+" < "+token+" THEN "+prefix+p[1]+" ELSE "+prefix+p[0]+" END")
		}
	}
	if l.seq != "" {
		list = append(list, l.seq+" = "+seq)
	}
	return strings.Join(append(list, l.token+" = "+keepToken), ", ")
}
