package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

// next says what follows a try.
type next int

const (
	finish  next = iota // the error, or success, is the answer
	repeat              // until ctx ends: a serialization failure
	unlock              // for LockWait: the database is locked
	redial              // a few times: the connection broke, and nothing was written
	reenter             // at once, after the row was made
)

// redials is how often a try is repeated whose connection broke, since pools keep dead ones.
const redials = 3

// loop runs try until it has an answer, about resource where it is about one.
func (g *Guard) loop(ctx context.Context, resource string, try func() (next, error)) error {
	started, dialed := time.Now(), 0
	for n := 0; ; n++ {
		what, err := try()
		switch what {
		case finish:
			return err
		case unlock:
			if time.Since(started) >= g.lockWait {
				return g.meaning(resource, err)
			}
		case redial:
			if dialed++; dialed > redials {
				return g.meaning(resource, err)
			}
		case reenter:
			if n < 10 && ctx.Err() == nil {
				continue
			}
		}
		if !pause(ctx, n) {
			return ended(ctx, err)
		}
	}
}

// early says what follows an error that came before fn was called.
func (g *Guard) early(ctx context.Context, resource string, err error) (next, error) {
	if ctx.Err() != nil {
		return finish, ended(ctx, err)
	}
	switch g.fault(err) {
	case sqlerr.Retry:
		return repeat, err
	case sqlerr.LockWait:
		if g.o.Dialect == SQLite {
			return unlock, err
		}
	case sqlerr.Connection:
		switch {
		case errors.Is(err, errSlow):
		case errors.Is(err, fence.ErrBusy):
			return unlock, err
		default:
			return redial, err
		}
	}
	return finish, g.meaning(resource, err)
}

// transaction is a *sql.Tx with a life of its own, which ends with ctx until the commit.
type transaction struct {
	*sql.Tx
	end   context.CancelFunc
	stop  func() bool // lets the transaction outlive ctx; false where that has ended it
	ended bool
}

func (g *Guard) begin(ctx context.Context, o *sql.TxOptions) (*transaction, error) {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, end)
	tx, err := race(ctx, g.lockWait, end,
		func(context.Context) (*sql.Tx, error) { return g.db.BeginTx(life, o) },
		func(tx *sql.Tx, err error) {
			if err == nil {
				tx.Rollback()
			}
		})
	if err == nil && life.Err() != nil { // it came late, and ends by itself
		tx.Rollback()
		if err = ctx.Err(); err == nil {
			err = errLate
		}
	}
	if err != nil {
		stop()
		end()
		return nil, err
	}
	return &transaction{Tx: tx, end: end, stop: stop}, nil
}

// rollback ends the transaction, unless that was done.
func (t *transaction) rollback(ctx context.Context) {
	if t.ended {
		return
	}
	t.ended = true
	t.stop()
	race(context.WithoutCancel(ctx), time.Second, t.end,
		func(context.Context) (none struct{}, err error) { return none, t.Rollback() }, nil)
	t.end()
}

// raise makes one claim on h.
func (g *Guard) raise(ctx context.Context, h Handle, c *claim, keep bool) (row, bool, error) {
	type found struct {
		row
		ok bool
	}
	f, err := race(ctx, g.answerWait(), nil, func(ctx context.Context) (f found, err error) {
		f.row, f.ok, err = g.e.claim(ctx, h, c, keep)
		return f, err
	}, nil)
	return f.row, f.ok, g.lockError(ctx, err)
}

func (g *Guard) look(ctx context.Context, h Handle, resource string, s strength, keep bool) (row, error) {
	r, err := race(ctx, g.answerWait(), nil, func(ctx context.Context) (row, error) {
		return g.e.read(ctx, h, resource, s, keep)
	}, nil)
	if s != unlocked {
		err = g.lockError(ctx, err)
	}
	return r, err
}

// answerWait bounds a statement that waits for a lock: LockWait, and some time for the
// answer where the server ends the wait.
func (g *Guard) answerWait() time.Duration {
	if g.e.bounds() {
		return g.lockWait + time.Second
	}
	return g.lockWait
}

// lockError makes a lock wait of what the guard's own timer ended, where that timer is what
// bounds the wait, and of what a time-out for statements did.
func (g *Guard) lockError(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	if errors.Is(err, errSlow) && !g.e.bounds() || sqlerr.StatementTimeout(err) {
		return &fence.Error{Kind: fence.ErrBusy, Err: err}
	}
	return err
}

// attempt runs fn once in a transaction that makes the claims.
func (g *Guard) attempt(ctx context.Context, cs []*claim, fn func(*sql.Tx) error) (next, error) {
	if err := g.checked(ctx, g.db); err != nil {
		return g.early(ctx, "", err)
	}
	tx, err := g.begin(ctx, g.txOptions)
	if err != nil {
		return g.early(ctx, cs[0].resource, err)
	}
	defer tx.rollback(ctx) // also where fn panics
	for i, c := range cs {
		c.renew()
		r, ok, err := g.raise(ctx, tx.Tx, c, false)
		switch {
		case err != nil:
			tx.rollback(ctx)
			return g.early(ctx, c.resource, err)
		case ok:
			c.before = r.seq
		case !r.exists && g.l.own:
			tx.rollback(ctx)
			return g.seedAll(ctx, cs[i:])
		case !c.standing(r):
			tx.rollback(ctx)
			return finish, refusal(c, r)
		}
	}
	if fn != nil {
		if err := fn(tx.Tx); err != nil {
			tx.rollback(ctx)
			return g.failed(ctx, cs, err)
		}
		if what, err := g.standing(ctx, tx, cs); err != nil {
			tx.rollback(ctx)
			return what, err
		}
	}
	return g.commit(ctx, tx, cs)
}

var errEnded = errors.New("fn has ended the transaction, or went on after an error that did, such as a deadlock")

// standing makes sure that fn has left the transaction as it was, where COMMIT would not tell:
// on MySQL a deadlock rolls it back, and what fn writes after that commits by itself.
func (g *Guard) standing(ctx context.Context, tx *transaction, cs []*claim) (next, error) {
	if g.o.Dialect != MySQL {
		return finish, nil
	}
	in, err := race(ctx, g.answerWait(), nil, func(ctx context.Context) (bool, error) { return g.e.inTx(ctx, tx.Tx) }, nil)
	switch {
	case errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil, err == nil && !in:
		return finish, &fence.Error{Kind: fence.ErrUncertain, Resource: cs[0].resource, Err: errEnded}
	case err != nil:
		return g.early(ctx, cs[0].resource, err)
	}
	return finish, nil
}

// seed makes the row of a resource that the own table does not know.
func (g *Guard) seed(ctx context.Context, h Handle, resource string) (next, error) {
	_, err := race(ctx, g.answerWait(), nil, func(ctx context.Context) (none struct{}, err error) {
		return none, g.e.seed(ctx, h, resource)
	}, nil)
	if err != nil {
		return g.early(ctx, resource, g.lockError(ctx, err))
	}
	return reenter, nil
}

// seedAll makes the rows of those claims that have none, so that many new resources do not
// cost as many transactions. The first has none.
func (g *Guard) seedAll(ctx context.Context, cs []*claim) (what next, err error) {
	for i, c := range cs {
		var r row
		if i > 0 {
			if r, err = g.look(ctx, g.db, c.resource, unlocked, false); err != nil {
				return g.early(ctx, c.resource, err)
			}
		}
		if r.exists {
			continue
		}
		if what, err = g.seed(ctx, g.db, c.resource); what != reenter {
			return what, err
		}
	}
	return reenter, nil
}

// failed says what follows an error of fn.
func (g *Guard) failed(ctx context.Context, cs []*claim, err error) (next, error) {
	if ctx.Err() != nil {
		if errors.Is(err, ctx.Err()) {
			return finish, err
		}
		return finish, ended(ctx, err)
	}
	switch g.fault(err) {
	case sqlerr.Retry:
		return repeat, err
	case sqlerr.LockWait:
		if g.o.Dialect == SQLite {
			return unlock, err
		}
		return finish, &fence.Error{Kind: fence.ErrBusy, Resource: cs[0].resource, Err: err}
	}
	return finish, err
}

// commit ends the transaction. From here on ctx bounds nothing but the patience with the
// database, since what was sent cannot be taken back.
func (g *Guard) commit(ctx context.Context, tx *transaction, cs []*claim) (next, error) {
	if !tx.stop() || ctx.Err() != nil {
		tx.rollback(ctx)
		return finish, ended(ctx, nil)
	}
	tx.ended = true
	defer tx.end()
	outlive, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(patience, end) })()
	_, err := race(outlive, g.lockWait, tx.end,
		func(context.Context) (none struct{}, err error) { return none, tx.Commit() }, nil)
	if err == nil {
		return finish, nil
	}
	if errors.Is(err, sql.ErrTxDone) && outlive.Err() == nil && !errors.Is(err, errSlow) {
		return finish, &fence.Error{Kind: fence.ErrUncertain, Resource: cs[0].resource,
			Err: errEnded}
	}
	if outlive.Err() == nil && !errors.Is(err, errSlow) {
		switch g.fault(err) {
		case sqlerr.Unknown, sqlerr.Connection:
		case sqlerr.NoTx: // fn, or an error that it went on after, has ended it
			return finish, &fence.Error{Kind: fence.ErrUncertain, Resource: cs[0].resource, Err: fmt.Errorf("%w: %w", errEnded, err)}
		case sqlerr.Unavailable:
			return finish, g.meaning(cs[0].resource, err)
		default: // refused, so that nothing was written
			return g.failed(ctx, cs, err)
		}
	}
	return g.settle(ctx, cs, err)
}
