// Package sqlstore keeps locks in a table of an SQL database, through database/sql. It
// imports no driver: the caller opens the database and closes it. It speaks SQLite.
//
// # SQLite
//
// All processes of one machine that open the same file exclude each other. Nothing has
// to be started, and a lock is a row, not a lock of the operating system: closing the
// file, or another handle of it, releases nothing.
//
//	dsn, err := sqlstore.SQLiteDSN("/var/lib/app/locks.db")
//	db, err := sql.Open("sqlite", dsn) // modernc.org/sqlite
//	s, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.SQLite, Database: "/var/lib/app/locks.db"})
//
// The file must be on a local disk of the machine: SQLite's locks do not work on NFS or
// SMB, and the processes of two machines have no clock in common. Do not delete, replace
// or restore the file while it is in use: a store that finds another file at its path
// refuses to go on.
//
// A lease ends by CLOCK_BOOTTIME, which nobody can set and which counts suspend, together
// with the id of the boot: setting the wall clock changes nothing, and after a reboot no
// lease is left. Where the system has no such clock (macOS, Windows) the wall clock is
// used, and Info.Name says so: there a step of the wall clock forward ends leases early
// while their holders still trust them, and a step back keeps dead ones for longer. Fencing
// tokens grow all the same.
//
// The fencing token of a grant is the greater one of the last token of the key + 1 and
// the wall clock in microseconds. Every grant is synced to disk before it is answered, and
// rows are never deleted, so tokens grow for as long as the file lives. A key that was used
// once costs about a hundred bytes for ever.
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

	// Database must name the database, for SQLite by the path of its file: it tells the
	// stores of one database, in whatever process, from those of another. It is made
	// absolute, and is not opened.
	Database string
}

// Store is a [store.Store] on a table of a database. It is safe for concurrent use. It also
// implements [store.BatchExtender], [store.Adopter] and [store.Inspector], and its claims
// implement [store.Waiter].
type Store struct {
	db    *sql.DB
	info  store.Info
	clock leaseClock

	mu       sync.Mutex
	database database
	freed    map[string]*freed // of the keys that somebody waits for
}

// New returns a store on db, without I/O on it. Tables are made when they are first needed,
// or by [Store.EnsureSchema]. The caller keeps db open while the store is in use.
func New(db *sql.DB, o Options) (*Store, error) {
	if db == nil {
		return nil, &store.InvalidError{Field: "database", Rule: "must not be nil"}
	}
	if o.Dialect != SQLite {
		return nil, &store.InvalidError{Field: "Dialect", Rule: "must be SQLite"}
	}
	if o.Database == "" {
		return nil, &store.InvalidError{Field: "Database", Rule: "must name the database: the path of its file"}
	}
	path, err := filepath.Abs(o.Database)
	if err != nil {
		return nil, &store.InvalidError{Field: "Database", Value: o.Database, Rule: "cannot be made absolute: " + err.Error()}
	}
	clock, err := newLeaseClock()
	if err != nil {
		return nil, err
	}
	return newStore(db, path, clock), nil
}

func newStore(db *sql.DB, path string, clock leaseClock) *Store {
	name := "sqlite"
	if clock.wall {
		name = "sqlite-wallclock"
	}
	return &Store{
		db:    db,
		clock: clock,
		info: store.Info{
			Name:        name,
			Fingerprint: "sqlite:" + path,
			Fencing:     store.FencingDurable,
			MinTTL:      store.MinTTL,
			MaxTTL:      maxTTL,
		},
		freed: make(map[string]*freed),
	}
}

// Info describes the store. Its Name is "sqlite", and "sqlite-wallclock" where leases
// depend on the wall clock.
func (s *Store) Info() store.Info { return s.info }

// Claim returns a fresh claim on key.
func (s *Store) Claim(key string, o store.ClaimOptions) store.Claim {
	return &claim{s: s, key: key, o: o, owner: randomID(), slot: make(chan struct{}, 1)}
}

// EnsureSchema makes the tables where they are missing and checks the database. It is
// optional, idempotent and safe in many processes at once. A database that would break
// the promises of the store is [store.ErrInvalid]: one in memory, not in WAL mode, without
// synchronous FULL, read-only, damaged, or with the tables of a later version.
func (s *Store) EnsureSchema(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := race(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.ensure(ctx)
	}, nil)
	return err
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
