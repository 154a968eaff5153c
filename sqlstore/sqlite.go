package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// schemaVersion is the version of the tables below.
const schemaVersion = 1

// A row stays for ever, because its token is the memory of the key. An empty owner means
// that nobody holds the key. Expires is a reading of the lease clock in nanoseconds, and
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

// row is what the table holds for a key. The zero row is one that is missing.
type row struct {
	key     string
	owner   string
	token   int64
	boot    string
	expires time.Duration
	label   string
}

// live reports whether somebody holds the key at now.
func (r row) live(c leaseClock, now time.Duration) bool {
	return r.owner != "" && r.boot == c.boot && r.expires > now
}

func (r row) holder(now time.Duration) store.Holder {
	return store.Holder{Key: r.key, Owner: r.owner, Label: r.label, Token: fence.Token(r.token), TTL: r.expires - now,
		Broken: strings.HasPrefix(r.owner, brokenBy),
		// The token is the wall clock at the grant, unless that had gone back.
		Held: max(0, time.Since(time.UnixMicro(r.token)))}
}

func (r row) held(now time.Duration) *store.HeldError {
	return &store.HeldError{Holder: r.holder(now)}
}

// loss is nil where owner holds the key, and else says who does.
func (r row) loss(c leaseClock, owner string, now time.Duration) error {
	switch live := r.live(c, now); {
	case live && r.owner == owner:
		return nil
	case live:
		return &store.LostError{By: r.held(now)}
	}
	return &store.LostError{}
}

// nextToken is larger than every token of the row, and as good as any clock where the
// row was lost.
func (r row) nextToken() (int64, error) {
	if r.token == math.MaxInt64 {
		return 0, badDatabase("has used up the tokens of the key", nil)
	}
	return max(r.token+1, time.Now().UnixMicro()), nil
}

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func readRow(ctx context.Context, q queryer, key string) (row, error) {
	r := row{key: key}
	err := q.QueryRowContext(ctx, readSQL, []byte(key)).Scan(&r.owner, &r.token, &r.boot, &r.expires, &r.label)
	if errors.Is(err, sql.ErrNoRows) {
		return row{key: key}, nil
	}
	return r, err
}

// peek reads the row of key without a lock.
func (s *Store) peek(ctx context.Context, key string) (r row, err error) {
	if err := s.checked(ctx); err != nil {
		return row{}, err
	}
	err = s.retry(ctx, func() (err error) {
		r, err = readRow(ctx, s.db, key)
		return err
	})
	return r, err
}

// grant gives key to owner. A grant that owner still has is refreshed.
func (t *tx) grant(key, owner string, o store.ClaimOptions) (row, error) {
	r, err := readRow(t.ctx, t.conn, key)
	if err != nil {
		return row{}, err
	}
	if r.live(t.s.clock, t.now) {
		if r.owner != owner {
			return row{}, r.held(t.now)
		}
		r.expires = max(r.expires, t.now+o.TTL)
	} else {
		token, err := r.nextToken()
		if err != nil {
			return row{}, err
		}
		r = row{key: key, owner: owner, token: token, boot: t.s.clock.boot, expires: t.now + o.TTL, label: cutLabel(o.Label)}
	}
	_, err = t.conn.ExecContext(t.ctx, grantSQL, []byte(key), r.owner, r.token, r.boot, int64(r.expires), r.label)
	return r, err
}

// extend moves the end of a grant, never back. A grant that has ended is lost, also when
// nobody else has taken the key.
func (t *tx) extend(key, owner string, token fence.Token, ttl time.Duration) error {
	result, err := t.conn.ExecContext(t.ctx, extendSQL, int64(t.now+ttl), []byte(key), owner, int64(token), t.s.clock.boot, int64(t.now))
	if err != nil {
		return err
	}
	if n, err := result.RowsAffected(); err != nil || n == 1 {
		return err
	}
	return t.lost(key, owner)
}

// lost says who has key instead of owner.
func (t *tx) lost(key, owner string) error {
	r, err := readRow(t.ctx, t.conn, key)
	if err != nil {
		return err
	}
	return cmp.Or(r.loss(t.s.clock, owner, t.now), error(&store.LostError{}))
}

// release takes key from owner, if it has it, and returns the row as it was before.
func (t *tx) release(key, owner string) (row, error) {
	r, err := readRow(t.ctx, t.conn, key)
	if err == nil && r.owner == owner {
		_, err = t.conn.ExecContext(t.ctx, releaseSQL, []byte(key), owner)
	}
	return r, err
}

// cutLabel cuts a label to 64 bytes of valid text.
func cutLabel(label string) string {
	return strings.ToValidUTF8(label[:min(len(label), 64)], "")
}
