// Package sqlstore keeps locks in a table of an SQL database, through database/sql. It
// imports no driver: the caller opens the database and closes it. It speaks PostgreSQL, MySQL,
// MariaDB and SQLite.
//
// In each of them a lock is a row with an end, not a lock of the database: it does not depend on
// a connection, and a connection that is closed, or kept by a pooler, neither frees it nor keeps
// it. Rows are never deleted, since the token in it is the memory of the key; a key that was
// used once costs about a hundred bytes for ever.
//
// The fencing token of a grant is the greater one of the last token of the key + 1 and the wall
// clock in microseconds. So tokens grow when the clock goes back, and also when the last grants
// were lost in a failover or by a restored backup, unless the clocks of the servers were further
// apart than the failover took. But two may hold then: the one whose grant was lost, until its
// ttl ends, and the next one. Only a guard at the resource, such as package
// [github.com/holdfast-go/holdfast/fence/sqlfence], keeps these apart; synchronous replication
// closes the gap.
//
// Where all that the lock protects is in that same database, no lease is needed: see [Locked].
//
// # PostgreSQL and MySQL
//
//	db, err := sql.Open("pgx", "postgres://db.example/app?default_query_exec_mode=exec")
//	s, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.PostgreSQL, Database: "db.example/app"})
//
// Leases end by the clock of the server, which PostgreSQL reads anew where a statement has waited,
// and MySQL when the statement begins. When somebody sets it forward, leases end early while their
// holders still trust them; back, they last longer. Clients' clocks are never compared with it.
//
// Every step is one statement that commits by itself and leaves nothing in its session. So the
// store works through a pooler that gives each transaction another connection, such as PgBouncer;
// pgx then needs default_query_exec_mode=exec or simple_protocol, unless the pooler knows
// prepared statements, lib/pq needs binary_parameters=yes, and go-sql-driver needs nothing. Any
// default isolation level is right: what that refuses is tried again. A refused Try writes
// nothing.
//
// Where a pool is shared with other code, transactions must be begun by its BeginTx: a BEGIN that
// is sent as a statement stays open in whichever session ran it, and a lease that is granted there
// is gone when somebody rolls back. pgx drops such a session; lib/pq and go-sql-driver do not. On
// MySQL autocommit must be on besides, and a session where it is off is refused by
// [store.ErrInvalid] each time; and nobody may set the variable timestamp of a session of the pool,
// which stops the clock there.
//
// On PostgreSQL a grant and an extension wait until they are on disk also where
// synchronous_commit is off for the database, and a release never does, since its lease would
// end anyway. MySQL can lose what it has answered in a crash of the machine where
// innodb_flush_log_at_trx_commit is not 1.
//
// A server that is a standby, or read-only, answers [store.ErrUnavailable]; name the primary in
// the data source name, for several hosts of PostgreSQL with target_session_attrs=read-write.
//
// All processes must see the same tables, which the search path of PostgreSQL decides. They are
// made by the first process that is allowed to; [Schema] has the statements for others.
//
// Waiters poll, so there is no queue and no order among processes. On PostgreSQL a [Listener]
// can make hand-overs quicker. Each release then sends a NOTIFY, which takes a lock of the whole
// database server for the moment of its commit.
//
// # SQLite
//
// All processes of one machine that open the same file exclude each other. Nothing has
// to be started.
//
//	dsn, err := sqlstore.SQLiteDSN("/var/lib/app/locks.db")
//	db, err := sql.Open("sqlite", dsn) // modernc.org/sqlite
//	s, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.SQLite, Database: "/var/lib/app/locks.db"})
//
// The file must be on a local disk of the machine: SQLite's locks do not work on NFS or
// SMB, and the processes of two machines have no clock in common. Do not delete, replace
// or restore the file while it is in use: a store that finds another file at its path
// refuses to go on. Whoever opens a file that was restored from an old copy cannot tell: a lease
// that was granted since the copy is not in it, so that two may hold until its end. The tokens
// are larger still, by the wall clock, unless that was set back meanwhile.
//
// A lease ends by CLOCK_BOOTTIME, which nobody can set and which counts suspend, together
// with the id of the boot: setting the wall clock changes nothing, and after a reboot no
// lease is left. Where the system has no such clock (macOS, Windows) the wall clock is
// used, and Info.Name says so: there a step of the wall clock forward ends leases early
// while their holders still trust them, and a step back keeps dead ones for longer. Fencing
// tokens grow all the same, for as long as the file lives, because every grant is synced to
// disk before it is answered.
//
// Every write is one short BEGIN IMMEDIATE transaction. A database that is locked by
// another process is tried again after a short random pause, because SQLite's own busy
// handler is unfair and does not help a transaction that read first; after five seconds,
// or when the context ends, the call answers [store.ErrUnavailable].
package sqlstore

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// Dialect is the SQL that a database speaks. The zero value is none.
type Dialect int

const (
	SQLite     Dialect = iota + 1 // from 3.37 on, in WAL mode
	PostgreSQL                    // from 10 on
	MySQL                         // MySQL from 8.0 on, MariaDB from 10.5 on, on InnoDB
)

// maxTTL keeps sums of times far from the end of their range.
const maxTTL = 10 * 365 * 24 * time.Hour

// Options say what kind of database a [Store] works on.
type Options struct {
	// Dialect must be set.
	Dialect Dialect

	// Database must name the database, in the same words in every process: it tells the
	// stores of one database from those of another, in tickets and where a lock is asked for
	// inside itself. For SQLite it is the path of the file, which is made absolute; for a
	// server host and name, such as "db.example:5432/app". It is not opened, and holds no
	// credentials.
	Database string

	// Listener lets releases wake the waiters of other processes that have one, too. It is for
	// PostgreSQL only. nil: waiters look at the row every 50 to 500 ms, and that is all. One by
	// pgx is in examples/stores/listener.go.
	Listener Listener
}

// Store is a [store.Store] on a table of a database. It is safe for concurrent use. It also
// implements [store.BatchExtender], [store.Adopter] and [store.Inspector], and its claims
// implement [store.Waiter].
type Store struct {
	engine   engine
	info     store.Info
	clock    leaseClock // of this machine; only SQLite's leases end by it
	minPoll  time.Duration
	listener Listener

	mu        sync.Mutex
	freed     map[string]*freed  // of the keys that somebody waits for
	waiting   int                // claims
	listening context.CancelFunc // ends the listener; nil while there is none
	idle      *time.Timer        // will end it, when no claim has waited for a while
}

// engine is what differs between the databases. Its methods may run beyond their context for a
// moment, where that ends while the database works, and answer what came of it.
type engine interface {
	read(ctx context.Context, key string) (row, error)
	// list reads at most pageSize rows with an owner, by their keys, which follow after and are
	// not before prefix.
	list(ctx context.Context, after, prefix string) ([]row, error)

	// grant gives key to owner, whose grant is refreshed where it has the key already.
	grant(ctx context.Context, key, owner string, o store.ClaimOptions) (granted, error)
	extend(ctx context.Context, leases []lease) (extended, error)
	// release takes key from owner, if it has it, and answers the row as it was before.
	release(ctx context.Context, key, owner string) (row, error)
	breakOff(ctx context.Context, key, owner string) error

	// ensure checks the database, and makes its tables where they are missing.
	ensure(ctx context.Context) error
}

// granted is a grant whose ttl was asked for at sent, and ends at until by the clock of this
// machine.
type granted struct {
	token int64
	sent  clock.Instant
	until time.Duration
}

// lease is a grant to be extended.
type lease struct {
	key, owner string
	token      fence.Token
	ttl        time.Duration
}

// extended are the answers to leases, in their order, whose ttl was asked for at sent, which is
// now by the clock of this machine.
type extended struct {
	errs []error
	sent clock.Instant
	now  time.Duration
}

// New returns a store on db, without I/O on it. Tables are made when they are first needed,
// or by [Store.EnsureSchema]. The caller keeps db open while the store is in use.
func New(db *sql.DB, o Options) (*Store, error) {
	switch {
	case db == nil:
		return nil, &store.InvalidError{Field: "database", Rule: "must not be nil"}
	case o.Dialect != SQLite && o.Dialect != PostgreSQL && o.Dialect != MySQL:
		return nil, &store.InvalidError{Field: "Dialect", Rule: "must be SQLite, PostgreSQL or MySQL"}
	case o.Listener != nil && o.Dialect != PostgreSQL:
		return nil, &store.InvalidError{Field: "Listener", Rule: "is for PostgreSQL only: no other database notifies"}
	case o.Database == "" && o.Dialect == SQLite:
		return nil, &store.InvalidError{Field: "Database", Rule: "must name the database: the path of its file"}
	case o.Database == "":
		return nil, &store.InvalidError{Field: "Database", Rule: "must name the database: its host and name, such as db.example:5432/app"}
	case o.Dialect != SQLite && strings.Contains(o.Database, "@"):
		return nil, &store.InvalidError{Field: "Database", Rule: "must hold no user and no password: only host and name"}
	}
	lc, err := newLeaseClock()
	if o.Dialect != SQLite {
		if err != nil {
			lc = leaseClock{boot: wallBoot, wall: true} // for tickets, which are refused then
		}
		return newServerStore(db, o, lc), nil
	}
	if err != nil {
		return nil, err
	}
	path, err := filepath.Abs(o.Database)
	if err != nil {
		return nil, &store.InvalidError{Field: "Database", Value: o.Database, Rule: "cannot be made absolute: " + err.Error()}
	}
	return newSQLiteStore(db, path, lc), nil
}

func newSQLiteStore(db *sql.DB, path string, lc leaseClock) *Store {
	s := newStore(&sqlite{db: db, path: path, clock: lc}, lc, "sqlite", path)
	if lc.wall {
		s.info.Name = "sqlite-wallclock"
	}
	s.minPoll = 5 * time.Millisecond
	return s
}

func newStore(e engine, lc leaseClock, name, database string) *Store {
	return &Store{
		engine: e,
		clock:  lc,
		info: store.Info{
			Name:        name,
			Fingerprint: name + ":" + database,
			Fencing:     store.FencingDurable,
			MinTTL:      store.MinTTL,
			MaxTTL:      maxTTL,
		},
		minPoll: 50 * time.Millisecond,
		freed:   make(map[string]*freed),
	}
}

// Info describes the store. Its Name is "postgresql", "mysql" or "sqlite", and
// "sqlite-wallclock" where leases depend on the wall clock.
func (s *Store) Info() store.Info { return s.info }

// Claim returns a fresh claim on key.
func (s *Store) Claim(key string, o store.ClaimOptions) store.Claim {
	return &claim{s: s, key: key, o: o, owner: randomID(), slot: make(chan struct{}, 1)}
}

// EnsureSchema makes the tables where they are missing and checks the database. It is
// optional, idempotent and safe in many processes at once. A database that would break
// the promises of the store is [store.ErrInvalid]: for SQLite one in memory, not in WAL mode,
// without synchronous FULL, read-only or damaged; for MySQL a pool with autocommit off, and
// tables that are not InnoDB's; for all, tables of a later version. A server that is a standby
// or read-only is [store.ErrUnavailable].
func (s *Store) EnsureSchema(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := race(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.engine.ensure(ctx)
	}, nil)
	return noGrant(err)
}

// SQLiteDSN returns the recommended data source name of the file at path for
// modernc.org/sqlite: WAL, every commit synced, transactions that lock when they begin. The
// path is made absolute and may hold any character but NUL.
//
// Its busy timeout is short, since the store tries again by itself, at random times: SQLite
// alone favours some processes over others by a factor of twenty.
func SQLiteDSN(path string) (string, error) {
	if path == "" || strings.IndexByte(path, 0) >= 0 {
		return "", &store.InvalidError{Field: "path", Value: path, Rule: "must be the name of a file, without NUL"}
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", &store.InvalidError{Field: "path", Value: path, Rule: "cannot be made absolute: " + err.Error()}
	}
	return "file:" + escapePath(filepath.ToSlash(abs)) +
		"?_pragma=busy_timeout(10)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate", nil
}

// escapePath escapes what has a meaning in an SQLite URI. A path that does not begin with
// a slash has a drive letter.
func escapePath(path string) string {
	var b strings.Builder
	if !strings.HasPrefix(path, "/") {
		b.WriteByte('/')
	}
	for i := range len(path) {
		switch c := path[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte("/:-._~", c) >= 0:
			b.WriteByte(c)
		default:
			b.WriteString("%" + strings.ToUpper(hex.EncodeToString([]byte{c})))
		}
	}
	return b.String()
}

// randomID returns 128 random bits in hexadecimal.
func randomID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
