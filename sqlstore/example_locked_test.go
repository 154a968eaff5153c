package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"log"

	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// The program that opens db is the user's.
var (
	db  *sql.DB
	ctx context.Context
)

// Everything that the lock protects is in the database: no lease, no ttl and no token.
func ExampleLocked() {
	o := sqlstore.LockedOptions{Dialect: sqlstore.PostgreSQL}
	err := sqlstore.Locked(ctx, db, o, "account/123", func(tx *sql.Tx) error {
		var balance int
		if err := tx.QueryRowContext(ctx, "SELECT balance FROM account WHERE id = 123").Scan(&balance); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "UPDATE account SET balance = $1 WHERE id = 123", balance-10)
		return err
	})
	switch {
	case errors.Is(err, store.ErrHeld):
		log.Print("another has the lock: nothing was written")
	case errors.Is(err, store.ErrUncertain):
		log.Print("the database went away while it committed: look whether it has")
	}
}
