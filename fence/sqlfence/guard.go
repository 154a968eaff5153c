package sqlfence

import (
	"context"
	"database/sql"

	"github.com/holdfast-go/holdfast/fence"
)

// Guard is a guard over one database. It is safe for concurrent use.
type Guard struct {
	db *sql.DB
	o  Options
}

var _ fence.Guard = (*Guard)(nil)

var errSkeleton = &fence.Error{Kind: fence.ErrUnavailable}

// New returns a guard over db, which the caller opens and closes. It does no I/O; options
// that contradict each other are refused by a [*fence.InvalidError].
func New(db *sql.DB, o Options) (*Guard, error) { return &Guard{db: db, o: o}, nil }

// EnsureSchema makes the guard's own table, or checks the one that is there; with
// [Options].Column it makes nothing and checks the user's table. It may be called at any time
// and by many processes at once.
func (g *Guard) EnsureSchema(ctx context.Context) error { return errSkeleton }

// Tx runs fn in a transaction that is fenced by the token.
func (g *Guard) Tx(ctx context.Context, resource string, t fence.Token, fn func(*sql.Tx) error) error {
	return g.TxAll(ctx, []Mark{{Resource: resource, Token: t}}, fn)
}

// TxAll is [Guard.Tx] for several resources, all or nothing.
func (g *Guard) TxAll(ctx context.Context, marks []Mark, fn func(*sql.Tx) error) error {
	return errSkeleton
}

// Claim implements [fence.Guard], in a transaction of its own.
func (g *Guard) Claim(ctx context.Context, resource string, t fence.Token) error { return errSkeleton }

// Check implements [fence.Guard].
func (g *Guard) Check(ctx context.Context, resource string, t fence.Token) error { return errSkeleton }

// ClaimIn claims marks in the caller's transaction.
func (g *Guard) ClaimIn(ctx context.Context, h Handle, marks ...Mark) error { return errSkeleton }

// CheckIn reports whether each token is the mark, and keeps it so until the caller's
// transaction ends.
func (g *Guard) CheckIn(ctx context.Context, h Handle, marks ...Mark) error { return errSkeleton }
