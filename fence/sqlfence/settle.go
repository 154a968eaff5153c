package sqlfence

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

// minSettle is the least time in which an outcome is looked for.
const minSettle = 2 * time.Second

// settle finds out what became of a transaction whose commit was not answered, and says
// what follows. It goes on when ctx has ended.
func (g *Guard) settle(ctx context.Context, cs []*claim, lost error) (next, error) {
	if cs[0].how == raise && ctx.Err() == nil {
		cs[0].lost = lost
		return redial, uncertain(ctx, cs[0], lost)
	}
	o, err := g.ask(ctx, cs)
	switch {
	case o == applied:
		return finish, nil
	case o == notApplied && ctx.Err() != nil:
		return finish, ended(ctx, lost)
	case o == notApplied && g.fault(lost) == sqlerr.Connection:
		return repeat, lost
	case o == notApplied:
		return finish, &fence.Error{Kind: fence.ErrUnavailable, Resource: cs[0].resource, Err: lost}
	case err != nil:
		lost = fmt.Errorf("%w; then: %w", lost, err)
	}
	return finish, uncertain(ctx, cs[0], lost)
}

func uncertain(ctx context.Context, c *claim, lost error) error {
	if ctx.Err() != nil {
		lost = fmt.Errorf("%w: %w", ctx.Err(), lost)
	}
	return &fence.Error{Kind: fence.ErrUncertain, Resource: c.resource, Err: lost}
}

// doubted is the answer to a claim that was made again since its commit was not answered:
// where the second time fails, the first may have raised the mark.
func (c *claim) doubted(ctx context.Context, err error) error {
	var stale *seenError
	if c.lost == nil || err == nil || errors.As(err, &stale) || errors.Is(err, fence.ErrUncertain) {
		return err
	}
	return uncertain(ctx, c, fmt.Errorf("%w; then: %v", c.lost, err))
}

// ask looks at the rows on another connection, for LockWait while the database does not
// answer. Reading with a lock waits until the transaction in doubt has ended.
func (g *Guard) ask(ctx context.Context, cs []*claim) (o outcome, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(g.lockWait, minSettle))
	defer cancel()
	for n := 0; ; n++ {
		if o, err = g.askOnce(ctx, cs); err == nil || !pause(ctx, n) {
			return o, err
		}
	}
}

func (g *Guard) askOnce(ctx context.Context, cs []*claim) (outcome, error) {
	tx, err := g.begin(ctx, g.lookOptions)
	if err != nil {
		return unsure, err
	}
	defer tx.rollback(ctx)
	for _, c := range cs { // all or nothing, so that any of them tells
		r, err := g.look(ctx, tx.Tx, c.resource, exclusive, false)
		if err != nil {
			return unsure, err
		}
		if o := c.outcome(r, &g.l); o != unsure {
			return o, nil
		}
	}
	return unsure, nil
}
