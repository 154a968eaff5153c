package sqlfence

import (
	"context"
	"database/sql"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// Dialect is the kind of the database. The zero value is none.
type Dialect int

const (
	PostgreSQL Dialect = iota + 1 // from 10 on
	MySQL                         // MySQL from 8.0 on, MariaDB from 10.5 on, on InnoDB
	SQLite                        // from 3.37 on
)

// Mode says how often a token may be used.
type Mode int

const (
	// Monotonic lets a holder write many times: a token passes unless a larger one was seen.
	Monotonic Mode = iota
	// Once lets each token write once. [fence.ErrApplied] answers the second time, also
	// where the first answer was lost: for jobs that must run once for each grant. A
	// [Guard.Claim] before does not use the token up, but in a [Column] without Seq.
	Once
	// Sequenced lets each step (token, [Mark].Seq) write once, with growing Seq within a
	// token. [fence.ErrApplied] answers a step that was taken, or overtaken.
	Sequenced
)

// Column puts the marks into the user's own table. Names are quoted, so they are given as
// the database has them, in its case; Table may be qualified by one schema.
type Column struct {
	Table string
	// ID is the column whose text is the name of the resource. It must be unique. A
	// transaction for a row that is not there answers [fence.ErrNoResource].
	ID string
	// Token is a BIGINT (SQLite: INTEGER) column. NULL is lower than any token.
	Token string
	// Seq is a column of the same type, which identifies the last transaction. Without it a
	// commit whose reply was lost often ends in [fence.ErrUncertain], and there is no
	// Sequenced.
	Seq string
}

// Options are the settings of a guard.
type Options struct {
	Dialect Dialect // required
	Table   string  // name of the guard's own table, may be qualified by one schema; "" is "holdfast_fence"
	Column  *Column // marks in the user's table instead; excludes Table
	Mode    Mode
	// LockWait bounds each wait for another's transaction, for a connection and for a reply
	// of the database; 0 is 5 s, and no more than 24 days count. On PostgreSQL, and there
	// alone, the statements of fn too wait for locks no longer. It is not the bound of a call:
	// failures that ask for another try are retried until the context ends.
	LockWait time.Duration
	// TxOptions are those of the transactions of Tx and TxAll. Guards are right at every
	// isolation level. nil is READ COMMITTED on PostgreSQL, and else the database's default.
	TxOptions *sql.TxOptions
	// Unchecked leaves the check of the table to [Guard.EnsureSchema], for a guard that lives for
	// a few transactions only: the check takes as long as many of them. What is missing is refused
	// all the same. That an ID is not unique, that a column is too narrow, or that the table is of
	// a later version, is not noticed.
	Unchecked bool
	// Classify is for drivers whose errors cannot be read. Where it answers FaultUnread
	// the error is read as usual.
	Classify func(error) Fault
}

// Fault is what an error of a driver means, as far as guards need to know.
type Fault int

const (
	FaultUnread     Fault = iota // not known
	FaultRetry                   // serialization failure or deadlock: nothing was written, and another try may succeed
	FaultLockWait                // a lock was not to be had in time; nothing was written
	FaultConnection              // the connection broke, so that the reply is lost
	FaultRefused                 // the database refused; nothing was written
)

// Mark is what a transaction claims.
type Mark struct {
	Resource string
	Token    fence.Token
	Seq      int64 // the step within the token, from 1 on; in mode Sequenced only
}

// Handle is a [*sql.Tx], or a [*sql.Conn] on which a transaction was begun.
type Handle interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}
