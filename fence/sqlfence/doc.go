// Package sqlfence is the guard for what is in a SQL database: PostgreSQL, MySQL, MariaDB and
// SQLite, over database/sql. It imports no driver.
//
// [Guard.Tx] runs a transaction whose first statement locks the mark of a resource, refuses
// a fencing token that is smaller, and raises the mark; the lock is kept until the commit.
// All such transactions of a resource are in order therefore, and once a newer holder's has
// begun no older holder's can commit: at every isolation level, under any pause. A plain read
// of the mark gives no such order, not even under SERIALIZABLE.
//
//	guard, err := sqlfence.New(db, sqlfence.Options{Dialect: sqlfence.PostgreSQL})
//	err = guard.EnsureSchema(ctx) // once, or when the program starts
//	err = locks.Do(ctx, "account/123", func(ctx context.Context, lease *holdfast.Lease) error {
//		return guard.Tx(ctx, "account/123", lease.Token(), func(tx *sql.Tx) error {
//			_, err := tx.ExecContext(ctx, "UPDATE ...")
//			return err
//		})
//	})
//
// # Where marks are
//
// In a table of their own (the default), with a row for each resource that was ever named, or
// in a column of the user's table ([Options].Column), whose rows are the resources. NULL in
// that column is lower than any token. The own table guards whatever its transactions write,
// in whichever tables. A column does too, as long as every transaction claims a row first.
//
// # Rules for holders
//
//   - Claim, then read. What was read before the first claim may be old: the former holder
//     could still write. [Guard.Tx] claims first; [Guard.ClaimIn] leaves it to the caller.
//   - All writes to the resource go through a guard. One that does not is not fenced.
//   - fn has no effects but those of its transaction, since it may run several times; it
//     returns the errors of its statements, and neither commits nor rolls back. On MySQL it
//     runs no statement that commits by itself, such as CREATE TABLE.
//   - Transactions are short. A holder that stops inside one keeps the next one out
//     ([fence.ErrBusy]) until the server ends its connection: set
//     idle_in_transaction_session_timeout (PostgreSQL), idle_transaction_timeout (MariaDB) or
//     wait_timeout (MySQL).
//
// A mark is as durable as the transactions of the database, and is lost with them: after a
// failover that lost commits, older tokens may pass until the newer holder claims again.
package sqlfence
