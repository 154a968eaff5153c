package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

var faultKinds = map[Fault]sqlerr.Kind{FaultRetry: sqlerr.Retry, FaultLockWait: sqlerr.LockWait,
	FaultConnection: sqlerr.Connection, FaultRefused: sqlerr.Refused}

func (g *Guard) fault(err error) sqlerr.Kind {
	if g.o.Classify != nil {
		if kind, ok := faultKinds[g.o.Classify(err)]; ok {
			return kind
		}
	}
	if errors.Is(err, errSlow) || errors.Is(err, errLate) {
		return sqlerr.Connection
	}
	return g.e.fault(err)
}

// meaning gives an error of the database its meaning, where nothing was written.
func (g *Guard) meaning(resource string, err error) error {
	if typed(err) {
		return err
	}
	wrap := func(kind error) error { return &fence.Error{Kind: kind, Resource: resource, Err: sqlerr.Plain(err)} }
	if rule := sqlerr.Entry(err, g.e.server()); rule != "" {
		return wrap(&fence.InvalidError{Field: "database", Rule: rule})
	}
	switch g.fault(err) {
	case sqlerr.Retry:
		return &fence.Error{Kind: fence.ErrBusy, Resource: resource,
			Err: fmt.Errorf("roll the transaction back and run it again: %w", err)}
	case sqlerr.LockWait:
		return wrap(fence.ErrBusy)
	case sqlerr.NoTable:
		return wrap(g.noTable())
	case sqlerr.NoColumn:
		return wrap(&fence.InvalidError{Field: "table", Value: g.l.table.given, Rule: "needs the " + g.l.needs()})
	case sqlerr.OutOfRange, sqlerr.BadValue:
		return wrap(&fence.InvalidError{Field: "resource", Value: resource,
			Rule: "does not fit the type of column " + g.l.idName + ", or the token that of column " + g.l.tokName})
	case sqlerr.Refused:
		return wrap(&fence.InvalidError{Field: "table", Value: g.l.table.given, Rule: "the database refuses a statement; look at its grants for this user, and at its triggers"})
	}
	if strings.Contains(err.Error(), "Scan error") {
		return wrap(&fence.InvalidError{Field: "column", Value: g.l.tokName, Rule: "holds something that is no integer"})
	}
	return wrap(fence.ErrUnavailable)
}

// typed reports whether err has its meaning already.
func typed(err error) bool {
	var failed *fence.Error
	return errors.As(err, &failed) || errors.Is(err, fence.ErrInvalid)
}

func (g *Guard) noTable() *fence.InvalidError {
	rule := "there is no such table; name it as the database has it, with its schema where that is not the default one"
	if g.l.own {
		rule = "there is no such table; EnsureSchema makes it"
	}
	return &fence.InvalidError{Field: "table", Value: g.l.table.given, Rule: rule}
}

// ended is the answer where ctx ended before anything was written. last is what failed last.
func ended(ctx context.Context, last error) error {
	err := ctx.Err()
	if cause := context.Cause(ctx); !errors.Is(cause, err) {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	if last == nil || errors.Is(last, context.Canceled) || errors.Is(last, context.DeadlineExceeded) || errors.Is(last, sql.ErrTxDone) {
		return fmt.Errorf("sqlfence: %w: nothing was written", err)
	}
	return fmt.Errorf("sqlfence: %w: nothing was written; last: %w", err, last)
}

// seenError is a stale answer before the holder is told, which is done with nothing held.
type seenError struct {
	c    *claim
	seen int64
}

func (e *seenError) Error() string { return "stale" }

// tell makes the answer of what is refused as stale.
func tell(ctx context.Context, err error) error {
	if e, ok := err.(*seenError); ok {
		return fence.Stale(ctx, e.c.resource, fence.Token(e.c.token), fence.Token(e.seen))
	}
	return err
}

// refusal is the answer to a claim that does not pass r, nil where there is nothing to do.
func refusal(c *claim, r row) error {
	switch {
	case !r.exists:
		return &fence.Error{Kind: fence.ErrNoResource, Resource: c.resource}
	case r.token > c.token:
		return &seenError{c, r.token}
	case c.standing(r):
		return nil
	case r.token == c.token:
		return &fence.Error{Kind: fence.ErrApplied, Resource: c.resource}
	}
	return &fence.Error{Kind: fence.ErrBusy, Resource: c.resource, Err: errors.New("the row changes at every look")}
}
