package sqlfence_test

import (
	"context"
	"database/sql"
	"errors"
	"log"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
)

// The programs that open db, and the token of a lease on the account, are the user's.
var (
	db    *sql.DB
	ctx   context.Context
	token fence.Token
)

// Marks in a table of their own guard what the transaction writes, in whichever tables.
func ExampleGuard_Tx() {
	guard, err := sqlfence.New(db, sqlfence.Options{Dialect: sqlfence.PostgreSQL})
	if err != nil {
		log.Fatal(err)
	}
	if err := guard.EnsureSchema(ctx); err != nil {
		log.Fatal(err)
	}
	err = guard.Tx(ctx, "account/123", token, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE account SET balance = balance - 10 WHERE id = 123")
		return err
	})
	if errors.Is(err, fence.ErrStale) {
		log.Print("another has been granted the lock since: nothing was written, and there is nothing to do")
	}
}

// Marks in a column of the user's table: the resource is the row.
func ExampleColumn() {
	guard, err := sqlfence.New(db, sqlfence.Options{
		Dialect: sqlfence.MySQL,
		Column:  &sqlfence.Column{Table: "account", ID: "id", Token: "last_token", Seq: "last_seq"},
	})
	if err != nil {
		log.Fatal(err)
	}
	err = guard.Tx(ctx, "123", token, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE account SET balance = balance - 10 WHERE id = 123")
		return err
	})
	if err != nil {
		log.Print(err)
	}
}

// The claim as the first statement of the caller's own transaction.
func ExampleGuard_ClaimIn() {
	guard, err := sqlfence.New(db, sqlfence.Options{Dialect: sqlfence.SQLite})
	if err != nil {
		log.Fatal(err)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	if err := guard.ClaimIn(ctx, tx, sqlfence.Mark{Resource: "report", Token: token}); err != nil {
		log.Fatal(err)
	}
	// Read and write here.
	if err := tx.Commit(); err != nil {
		log.Fatal(err)
	}
}

// Each step of a holder's work once, also where the holder asks again because an answer was
// lost.
func ExampleMark_sequenced() {
	guard, err := sqlfence.New(db, sqlfence.Options{Dialect: sqlfence.PostgreSQL, Mode: sqlfence.Sequenced})
	if err != nil {
		log.Fatal(err)
	}
	step := sqlfence.Mark{Resource: "import", Token: token, Seq: 7}
	err = guard.TxAll(ctx, []sqlfence.Mark{step}, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE progress SET rows = rows + 1000")
		return err
	})
	if err != nil && !errors.Is(err, fence.ErrApplied) {
		log.Print(err)
	}
}

// Tokens for a lock that mints none: asked for while it is held.
func ExampleSequence() {
	tokens, err := sqlfence.NewSequence(db, sqlfence.PostgreSQL, "")
	if err != nil {
		log.Fatal(err)
	}
	token, err := tokens.Next(ctx, "account/123")
	if err != nil {
		log.Fatal(err)
	}
	log.Print(token)
}
