package sqlfence

import (
	"context"
	"database/sql"

	"github.com/holdfast-go/holdfast/fence"
)

// Sequence is a source of fencing tokens, for users of a lock that mints none: a counter for
// each key, in a table. It is safe for concurrent use.
//
// Ask for the token while the lock is held, and never before: the order of the tokens is
// that in which they were asked for, which else says nothing of the order of the holders.
// Even so it is a second system to ask, and whoever was paused between the lock's answer and
// this one gets a token that is larger than its successor's; the guard then refuses the
// successor, until that asks again. After a failover or a restore that lost commits, numbers
// repeat. Locks of this module mint their tokens with the grant, and have none of this.
type Sequence struct{ g *Guard }

// NewSequence returns the sequence whose counters are in the table, which may be qualified by
// one schema; "" is "holdfast_sequence". It does no I/O.
func NewSequence(db *sql.DB, d Dialect, table string) (*Sequence, error) {
	if table == "" {
		table = "holdfast_sequence"
	}
	g, err := New(db, Options{Dialect: d, Table: table})
	if err != nil {
		return nil, err
	}
	g.counts = true
	return &Sequence{g}, nil
}

// EnsureSchema makes the table where it is missing. It may be called at any time, by many
// processes at once.
func (s *Sequence) EnsureSchema(ctx context.Context) error { return s.g.EnsureSchema(ctx) }

// Next returns the next token of key, larger than all before; keys are as [fence.CheckResource]
// allows them. Where it fails, [fence.ErrUncertain] included, a number may have been used up,
// which harms nothing: call it again.
func (s *Sequence) Next(ctx context.Context, key string) (fence.Token, error) {
	if err := fence.CheckResource(key); err != nil {
		return 0, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	g := s.g
	type counted struct {
		n  int64
		ok bool
	}
	var c counted
	err := g.loop(ctx, key, func() (next, error) {
		err := g.checked(ctx, g.db)
		if err == nil {
			c, err = race(ctx, g.answerWait(), nil, func(ctx context.Context) (c counted, err error) {
				c.n, c.ok, err = g.e.count(ctx, g.db, key)
				return c, err
			}, nil)
			err = g.lockError(ctx, err)
		}
		switch {
		case err != nil:
			return g.early(ctx, key, err)
		case !c.ok:
			return g.seed(ctx, g.db, key)
		}
		return finish, nil
	})
	if err != nil {
		return 0, err
	}
	return fence.Token(c.n), nil
}
