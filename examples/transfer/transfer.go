package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
)

// order is a transfer that is to be made exactly once.
type order struct{ id, from, to, amount int64 }

// orderOf makes up an order: the same one in every process that asks.
func orderOf(id, accounts int64) order {
	r := rand.New(rand.NewPCG(1, uint64(id)))
	o := order{id: id, from: r.Int64N(accounts), amount: 1 + r.Int64N(100)}
	o.to = (o.from + 1 + r.Int64N(accounts-1)) % accounts
	return o
}

// key names an account, for the lock and for the guard.
func key(account int64) string { return fmt.Sprintf("account/%d", account) }

// bank is what a transfer needs.
type bank struct {
	locks *holdfast.Locker
	db    *database
	guard *sqlfence.Guard // nil: the tokens are not shown to the database
	think time.Duration
	heed  bool // the end of a lease

	staleWrites int // refused by the guard
}

// transfer makes an order. After any error it may be called again for the same order, also by
// another process: it makes it once.
func (b *bank) transfer(ctx context.Context, o order) error {
	// 1. Acquire: nobody else works on the two accounts, for as long as the leases last.
	leases, err := b.locks.AcquireAll(ctx, key(o.from), key(o.to))
	if err != nil {
		return err
	}
	defer leases.Release(ctx) // where it fails, the leases end by their ttl
	var marks []sqlfence.Mark
	for _, l := range leases {
		marks = append(marks, sqlfence.Mark{Resource: l.Key(), Token: l.Token()})
	}

	// The work should end with the leases, and this context carries the tokens, so that the
	// leases end when the database refuses one. Many holders that wake up late notice it here.
	// Many, not all: each may be stopped after it has looked. To see what the guard does, this
	// program by default lets all of them write.
	ctx = leases.Context(ctx)
	if !b.heed {
		ctx = context.WithoutCancel(ctx)
	}

	// 2. Claim, then read. From the claim on the database refuses the former holders, so
	// that what is read stays true until we write, or until a later holder claims.
	var made bool
	var from, to int64
	err = b.tx(ctx, marks, func(tx *sql.Tx) (err error) {
		made, from, to, err = b.db.read(ctx, tx, o)
		return err
	})
	if err != nil || made { // made: the reply to an earlier attempt was lost
		return err
	}

	// 3. Think: ask the fraud department. No transaction is open meanwhile, so a process
	// that is stopped here holds nobody up for longer than its leases last.
	time.Sleep(b.think/2 + rand.N(b.think))

	// 4. Write what follows from what was read. The tokens decide whether it is still true.
	err = b.tx(ctx, marks, func(tx *sql.Tx) error {
		return b.db.write(ctx, tx, o, from-o.amount, to+o.amount, marks[0].Token)
	})
	if errors.Is(err, fence.ErrStale) {
		b.staleWrites++
	}
	return err
}

// tx runs fn in a transaction whose first statement shows the tokens to the database, or,
// with the guard off, in a plain one.
func (b *bank) tx(ctx context.Context, marks []sqlfence.Mark, fn func(*sql.Tx) error) error {
	if b.guard != nil {
		return b.guard.TxAll(ctx, marks, fn)
	}
	tx, err := b.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit()
}
