package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/label"
	"github.com/holdfast-go/holdfast/store"
)

// sqlite is the engine of a file that the processes of one machine share.
type sqlite struct {
	db    *sql.DB
	path  string // as the options name it
	clock leaseClock

	mu       sync.Mutex
	database database
}

// Expires is a reading of the lease clock in nanoseconds, and
// means nothing in another boot.
var schemaSQL = []string{
	`CREATE TABLE IF NOT EXISTS holdfast_meta (
		name TEXT NOT NULL PRIMARY KEY, value TEXT NOT NULL
	) STRICT, WITHOUT ROWID`,
	`CREATE TABLE IF NOT EXISTS holdfast_leases (
		key BLOB NOT NULL PRIMARY KEY, owner TEXT NOT NULL, token INTEGER NOT NULL,
		boot TEXT NOT NULL, expires INTEGER NOT NULL, label TEXT NOT NULL
	) STRICT, WITHOUT ROWID`,
	`INSERT OR IGNORE INTO holdfast_meta (name, value) VALUES ('version', '1')`,
}

const (
	idSQL    = `INSERT OR IGNORE INTO holdfast_meta (name, value) VALUES ('id', ?)`
	checkSQL = `SELECT (SELECT journal_mode FROM pragma_journal_mode), (SELECT synchronous FROM pragma_synchronous),
		coalesce((SELECT value FROM holdfast_meta WHERE name = 'version'), ''),
		coalesce((SELECT value FROM holdfast_meta WHERE name = 'id'), '')`
	settingsSQL = `SELECT (SELECT journal_mode FROM pragma_journal_mode), (SELECT synchronous FROM pragma_synchronous)`
	fileSQL     = `SELECT file FROM pragma_database_list WHERE name = 'main'`

	readSQL  = `SELECT owner, token, boot, expires, label FROM holdfast_leases WHERE key = ?`
	grantSQL = `INSERT INTO holdfast_leases (key, owner, token, boot, expires, label) VALUES (?, ?, ?, ?, ?, ?)
		ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, token = excluded.token, boot = excluded.boot,
			expires = excluded.expires, label = excluded.label`
	extendSQL = `UPDATE holdfast_leases SET expires = max(expires, ?)
		WHERE key = ? AND owner = ? AND token = ? AND boot = ? AND expires > ?`
	releaseSQL = `UPDATE holdfast_leases SET owner = '', expires = 0, label = '' WHERE key = ? AND owner = ?`
	breakSQL   = `UPDATE holdfast_leases SET owner = ?, token = ?, label = ? WHERE key = ? AND owner = ?`
	listSQL    = `SELECT key, owner, token, boot, expires, label FROM holdfast_leases
		WHERE key > ? AND key >= ? AND owner <> '' ORDER BY key LIMIT ?`
)

// checkSettings refuses a connection that would break exclusion or lose a grant. WAL needs
// working file locks and shared memory, so that it also rules out nolock, odd VFSs, databases in
// memory and most network file systems.
func checkSettings(journal, synchronous string) error {
	if journal != "wal" {
		return badDatabase("must be in journal mode wal, is in "+journal+"; open it as SQLiteDSN says, on a local disk", nil)
	}
	if synchronous != "2" && synchronous != "3" {
		return badDatabase("must have synchronous FULL on every connection, has "+synchronous+"; open it as SQLiteDSN says", nil)
	}
	return nil
}

func (t *tx) checkSettings() error {
	var journal, synchronous string
	if err := t.conn.QueryRowContext(t.ctx, settingsSQL).Scan(&journal, &synchronous); err != nil {
		return err
	}
	return checkSettings(journal, synchronous)
}

func (t *tx) makeTables() error {
	for _, statement := range schemaSQL {
		if _, err := t.conn.ExecContext(t.ctx, statement); err != nil {
			return err
		}
	}
	_, err := t.conn.ExecContext(t.ctx, idSQL, randomID())
	return err
}

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func (e *sqlite) readRow(ctx context.Context, q queryer, key string, now func() time.Duration) (row, error) {
	r := row{key: key}
	var boot string
	var expires time.Duration
	err := q.QueryRowContext(ctx, readSQL, []byte(key)).Scan(&r.owner, &r.token, &boot, &expires, &r.label)
	if errors.Is(err, sql.ErrNoRows) {
		return row{key: key}, nil
	}
	r.exists, r.left = true, e.left(boot, expires, now())
	return r, err
}

func (t *tx) row(key string) (row, error) {
	return t.e.readRow(t.ctx, t.conn, key, func() time.Duration { return t.now })
}

// read reads the row of key without a lock.
func (e *sqlite) read(ctx context.Context, key string) (r row, err error) {
	if err := e.checked(ctx); err != nil {
		return row{}, err
	}
	err = e.retry(ctx, func() (err error) {
		r, err = e.readRow(ctx, e.db, key, e.clock.now)
		return err
	})
	return r, err
}

// list reads the rows with an owner that follow after, from prefix on.
func (e *sqlite) list(ctx context.Context, after, prefix string) (page []row, err error) {
	if err := e.checked(ctx); err != nil {
		return nil, err
	}
	err = e.retry(ctx, func() error {
		rows, err := e.db.QueryContext(ctx, listSQL, []byte(after), []byte(prefix), pageSize)
		if err != nil {
			return err
		}
		now := e.clock.now()
		page, err = scanPage(rows, func(scan func(...any) error) (row, error) {
			var r row
			var boot string
			var expires time.Duration
			err := scan(&r.key, &r.owner, &r.token, &boot, &expires, &r.label)
			r.left = e.left(boot, expires, now)
			return r, err
		})
		return err
	})
	return page, err
}

// left is what remains until expires. Nothing is left of a lease of another boot.
func (e *sqlite) left(boot string, expires, now time.Duration) time.Duration {
	if boot != e.clock.boot {
		return 0
	}
	return expires - now
}

// grant reads before it locks, so that a refusal costs a read and no lock.
func (e *sqlite) grant(ctx context.Context, key, owner string, o store.ClaimOptions) (g granted, err error) {
	r, err := e.read(ctx, key)
	if err != nil {
		return granted{}, err
	}
	if r.live() && r.owner != owner {
		return granted{}, r.held()
	}
	err = e.write(ctx, func(t *tx) error {
		r, err := t.grant(key, owner, o)
		g = granted{r.token, t.sent, t.now + r.left}
		return err
	})
	return g, err
}

// grant gives key to owner. A grant that owner still has is refreshed.
func (t *tx) grant(key, owner string, o store.ClaimOptions) (row, error) {
	r, err := t.row(key)
	if err != nil {
		return row{}, err
	}
	if r.live() {
		if r.owner != owner {
			return row{}, r.held()
		}
		r.left = max(r.left, o.TTL)
	} else {
		token, err := r.nextToken()
		if err != nil {
			return row{}, err
		}
		r = row{key: key, owner: owner, token: token, left: o.TTL, label: cutLabel(o.Label)}
	}
	_, err = t.conn.ExecContext(t.ctx, grantSQL, []byte(key), r.owner, r.token, t.e.clock.boot, int64(t.now+r.left), r.label)
	return r, err
}

// extend extends all in one transaction.
func (e *sqlite) extend(ctx context.Context, leases []lease) (x extended, err error) {
	err = e.write(ctx, func(t *tx) error {
		x = extended{make([]error, len(leases)), t.sent, t.now}
		for i, l := range leases {
			x.errs[i] = t.extend(l)
			if err := x.errs[i]; err != nil && !hasKind(err) {
				return err
			}
		}
		return nil
	})
	return x, err
}

// extend moves the end of a grant, never back. A grant that has ended is lost, also when
// nobody else has taken the key.
func (t *tx) extend(l lease) error {
	result, err := t.conn.ExecContext(t.ctx, extendSQL, int64(t.now+l.ttl), []byte(l.key), l.owner, int64(l.token), t.e.clock.boot, int64(t.now))
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n == 1 {
		return err
	}
	r, err := t.row(l.key)
	if err != nil {
		return err
	}
	return r.gone(l.owner)
}

// release takes key from owner, if it has it, and returns the row as it was before.
func (e *sqlite) release(ctx context.Context, key, owner string) (r row, err error) {
	err = e.write(ctx, func(t *tx) error {
		if r, err = t.row(key); err == nil && r.owner == owner {
			_, err = t.conn.ExecContext(t.ctx, releaseSQL, []byte(key), owner)
		}
		return err
	})
	return r, err
}

func (e *sqlite) breakOff(ctx context.Context, key, owner string) error {
	return e.write(ctx, func(t *tx) error {
		r, err := t.row(key)
		if err != nil {
			return err
		}
		if done, err := r.broken(owner); done || err != nil {
			return err
		}
		token, err := r.nextToken()
		if err != nil {
			return err
		}
		_, err = t.conn.ExecContext(t.ctx, breakSQL, brokenOwner(owner), token, label.BrokenBy(), []byte(key), owner)
		return err
	})
}
