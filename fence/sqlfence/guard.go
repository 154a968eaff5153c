package sqlfence

import (
	"context"
	"database/sql"
	"errors"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

const (
	defaultLockWait = 5 * time.Second
	maxLockWait     = 24 * 24 * time.Hour // PostgreSQL counts it in milliseconds, in 31 bits
)

// Guard is a guard over one database. It is safe for concurrent use.
type Guard struct {
	db          *sql.DB
	o           Options
	l           layout
	e           engine
	lockWait    time.Duration
	txOptions   *sql.TxOptions
	lookOptions *sql.TxOptions // to settle

	counts bool        // the table is that of a Sequence
	ok     atomic.Bool // the table, and the pool, were found to be fit
	okIn   atomic.Bool // the table was, on a handle of the caller
	turns  turns
}

var _ fence.Guard = (*Guard)(nil)

// New returns a guard over db, which the caller opens and closes. It does no I/O; options
// that make no sense are refused by a [*fence.InvalidError].
func New(db *sql.DB, o Options) (*Guard, error) {
	if db == nil {
		return nil, &fence.InvalidError{Field: "db", Rule: "must not be nil"}
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	l, err := newLayout(o)
	if err != nil {
		return nil, err
	}
	g := &Guard{db: db, o: o, l: l, lockWait: min(o.LockWait, maxLockWait)}
	if g.lockWait == 0 {
		g.lockWait = defaultLockWait
	}
	if o.Dialect == PostgreSQL {
		g.lookOptions = &sql.TxOptions{Isolation: sql.LevelReadCommitted}
	}
	g.txOptions = g.lookOptions
	if o.TxOptions != nil {
		given := *o.TxOptions
		g.txOptions = &given
	}
	g.e = newEngine(o.Dialect, l, g.lockWait)
	return g, nil
}

func (o *Options) check() error {
	switch {
	case o.Dialect < PostgreSQL || o.Dialect > SQLite:
		return &fence.InvalidError{Field: "Dialect", Rule: "must be PostgreSQL, MySQL or SQLite"}
	case o.Mode < Monotonic || o.Mode > Sequenced:
		return &fence.InvalidError{Field: "Mode", Rule: "must be Monotonic, Once or Sequenced"}
	case o.LockWait < 0:
		return &fence.InvalidError{Field: "LockWait", Value: o.LockWait.String(), Rule: "must not be negative; zero means 5 s"}
	case o.TxOptions != nil && o.TxOptions.ReadOnly:
		return &fence.InvalidError{Field: "TxOptions", Value: "ReadOnly", Rule: "a guard writes"}
	case o.Mode == Sequenced && o.Column != nil && o.Column.Seq == "":
		return &fence.InvalidError{Field: "Column.Seq", Rule: "must be given in mode Sequenced"}
	}
	return nil
}

// Tx runs fn in a transaction that is fenced by the token: its first statement locks the
// mark of the resource and raises it to the token, and the lock is kept until the commit. fn
// gets the transaction, leaves its commit and rollback to the guard, and returns the errors of
// its statements: some end the transaction, as a deadlock does on MySQL, and what fn writes
// after one is neither fenced nor undone. On MySQL, where COMMIT does not tell, that is looked
// for before the commit, by one round trip, and the answer is [fence.ErrUncertain].
//
// nil means that everything was written, and each other answer but [fence.ErrUncertain] that
// nothing was: a [*fence.StaleError] where a larger token was seen; [fence.ErrNoResource]
// where the user's table has no such row; [fence.ErrApplied] in mode Once; [fence.ErrBusy]
// where a lock was not to be had within LockWait; [fence.ErrUnavailable]; a
// [*fence.InvalidError]; the error of fn, as it is; or the error of ctx.
//
// Serialization failures and deadlocks, also those that fn returns, are retried until ctx
// ends, from the claim on: fn may run several times. Where the reply to the commit is lost,
// or ctx ends meanwhile, what became of it is read from the row. ErrUncertain is the answer
// where the database cannot be reached for LockWait (2 s at least), where others have used the
// same token meanwhile, and where the user's table has no column for Seq.
//
// One transaction of a resource runs at a time, also within the process. Calling Tx of the
// same resource inside fn therefore ends in ErrBusy.
func (g *Guard) Tx(ctx context.Context, resource string, t fence.Token, fn func(*sql.Tx) error) error {
	return g.TxAll(ctx, []Mark{{Resource: resource, Token: t}}, fn)
}

// TxAll is [Guard.Tx] for several resources, all or nothing, and for steps in mode
// Sequenced. It claims in the order of the names, whatever the order given, so that
// transactions do not wait for each other in a circle. A resource that is given twice is
// refused by a [*fence.InvalidError].
func (g *Guard) TxAll(ctx context.Context, marks []Mark, fn func(*sql.Tx) error) error {
	cs, err := g.claims(marks, hows[g.o.Mode])
	if err != nil {
		return err
	}
	if fn == nil {
		return &fence.InvalidError{Field: "fn", Rule: "must not be nil; Claim raises a mark alone"}
	}
	return g.run(ctx, cs, fn)
}

func (g *Guard) run(ctx context.Context, cs []*claim, fn func(*sql.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return tell(ctx, g.inTurn(ctx, cs, fn))
}

func (g *Guard) inTurn(ctx context.Context, cs []*claim, fn func(*sql.Tx) error) error {
	leave, err := g.turns.take(ctx, g.lockWait, cs)
	if err != nil {
		return err
	}
	defer leave()
	err = g.loop(ctx, cs[0].resource, func() (next, error) { return g.attempt(ctx, cs, fn) })
	return cs[0].doubted(ctx, err)
}

// Claim implements [fence.Guard], in a transaction of its own. It uses no token up, but in
// mode Once with a [Column] that has no Seq. What follows it is not fenced by it: write
// within [Guard.Tx], or after [Guard.ClaimIn] or [Guard.CheckIn] in the same transaction.
func (g *Guard) Claim(ctx context.Context, resource string, t fence.Token) error {
	h := raise
	if g.o.Mode == Once && g.l.seq == "" {
		h = once
	}
	cs, err := g.claims([]Mark{{Resource: resource, Token: t}}, h)
	if err != nil {
		return err
	}
	return g.run(ctx, cs, nil)
}

// Check implements [fence.Guard]: it reads what was committed last, and locks nothing.
func (g *Guard) Check(ctx context.Context, resource string, t fence.Token) error {
	if _, err := g.claims([]Mark{{Resource: resource, Token: t}}, raise); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	var r row
	err := g.loop(ctx, resource, func() (next, error) {
		err := g.checked(ctx, g.db)
		if err == nil {
			r, err = g.look(ctx, g.db, resource, unlocked, false)
		}
		if err != nil {
			return g.early(ctx, resource, err)
		}
		return finish, nil
	})
	if err != nil {
		return err
	}
	return fence.Compare(ctx, resource, t, fence.Token(max(0, r.token)))
}

// ClaimIn makes the claims of [Guard.TxAll] in the caller's own transaction, as its first
// statement: what the transaction has read before may be old, and at REPEATABLE READ stays
// so. The marks are raised, and locked until then, when the transaction commits. After any
// error the caller rolls back; [fence.ErrBusy] may be followed by another try of the whole.
// What becomes of the commit is for the caller to find out.
//
// A handle that is in no transaction, such as a [*sql.DB], is refused by a
// [*fence.InvalidError], and nothing is written; any but a [*sql.Tx] costs a round trip or
// two to find out.
func (g *Guard) ClaimIn(ctx context.Context, h Handle, marks ...Mark) error {
	return g.in(ctx, h, marks, hows[g.o.Mode], func(c *claim) error {
		for range 3 {
			c.renew()
			r, ok, err := g.raise(ctx, h, c, true)
			switch {
			case err != nil:
				return g.inside(ctx, c.resource, err)
			case ok:
				return nil
			case r.exists || !g.l.own:
				return refusal(c, r)
			}
			if what, err := g.seed(ctx, h, c.resource); what != reenter {
				return g.inside(ctx, c.resource, err)
			}
		}
		return refusal(c, row{})
	})
}

// CheckIn is [Guard.Check] in the caller's own transaction. Until that ends, the marks stay
// as they are: others may check them too, but on SQLite, and none can claim. Seq of the marks
// is not used. Handles are those of [Guard.ClaimIn].
func (g *Guard) CheckIn(ctx context.Context, h Handle, marks ...Mark) error {
	plain := make([]Mark, len(marks))
	for i, m := range marks {
		plain[i] = Mark{Resource: m.Resource, Token: m.Token}
	}
	return g.in(ctx, h, plain, raise, func(c *claim) error {
		r, err := g.look(ctx, h, c.resource, shared, true)
		if err != nil {
			return g.inside(ctx, c.resource, err)
		}
		return fence.Compare(ctx, c.resource, fence.Token(c.token), fence.Token(max(0, r.token)))
	})
}

// in runs do for each mark in the caller's transaction.
func (g *Guard) in(ctx context.Context, h Handle, marks []Mark, how how, do func(*claim) error) error {
	cs, err := g.claims(marks, how)
	if err != nil {
		return err
	}
	if err := checkHandle(h); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := g.transactional(ctx, h); err != nil {
		return err
	}
	if err := g.learn(ctx, h); err != nil {
		return g.inside(ctx, "", err)
	}
	for _, c := range cs {
		err := do(c)
		if errors.Is(err, fence.ErrNoResource) || errors.Is(err, fence.ErrInvalid) {
			// The table may be the reason, and the check says so better.
			if unfit := g.checked(ctx, h); errors.Is(unfit, fence.ErrInvalid) {
				return unfit
			}
		}
		if err != nil {
			return tell(ctx, err)
		}
	}
	// Not before: the check reads, and at REPEATABLE READ what is read later is as old as
	// the first read.
	if err := g.checked(ctx, h); err != nil {
		return g.inside(ctx, "", err)
	}
	return nil
}

// inside is the answer to an error in the caller's transaction.
func (g *Guard) inside(ctx context.Context, resource string, err error) error {
	if ctx.Err() != nil {
		return ended(ctx, err)
	}
	return g.meaning(resource, err)
}

func noTransaction(h Handle) error {
	return &fence.InvalidError{Field: "handle", Value: reflect.TypeOf(h).String(),
		Rule: "must be in a transaction; begin one, and claim first in it"}
}

func checkHandle(h Handle) error {
	if v := reflect.ValueOf(h); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return &fence.InvalidError{Field: "handle", Rule: "must not be nil"}
	}
	if _, ok := h.(*sql.DB); ok {
		return noTransaction(h)
	}
	return nil
}

// transactional refuses a handle that commits each statement by itself.
func (g *Guard) transactional(ctx context.Context, h Handle) error {
	if _, ok := h.(*sql.Tx); ok {
		return nil
	}
	in, err := race(ctx, g.lockWait, nil, func(ctx context.Context) (bool, error) { return g.e.inTx(ctx, h) }, nil)
	if err != nil {
		return g.inside(ctx, "", err)
	}
	if !in {
		return noTransaction(h)
	}
	return nil
}
