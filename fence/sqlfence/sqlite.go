package sqlfence

import (
	"context"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

type sqlite struct {
	l         layout
	lockWait  time.Duration
	lockSQL   string
	readSQL   string
	updateSQL string
}

func newSQLite(l layout, lockWait time.Duration) *sqlite {
	s := &sqlite{l: l, lockWait: lockWait}
	// It changes nothing, and begins to write, so that it takes the lock of the database.
	s.lockSQL = "UPDATE " + l.table.quoted + " SET " + l.token + " = " + l.token + " WHERE 0"
	where := func(resource string) string {
		w := " WHERE " + l.id + " = " + resource
		if !l.own { // Whatever its collation and its type, the text is the same byte by byte.
			w += " AND CAST(" + l.id + " AS BLOB) = CAST(" + resource + " AS BLOB)"
		}
		return w
	}
	s.readSQL = "SELECT " + l.readColumns() + " FROM " + l.table.quoted + where("?1")
	s.updateSQL = "UPDATE " + l.table.quoted + " SET " + l.set("", "?1", "?2", "?1") + where("?3") + " AND ?2 IS NOT NULL"
	return s
}

// lock waits in pauses of random length, since SQLite's own wait may be switched off, is
// unfair, and is of no use where the transaction has read before: then the error is final.
func (s *sqlite) lock(ctx context.Context, h Handle) error {
	deadline := time.Now().Add(s.lockWait)
	for n := 0; ; n++ {
		_, err := h.ExecContext(ctx, s.lockSQL)
		if err == nil || s.fault(err) != sqlerr.LockWait || time.Now().After(deadline) || !pause(ctx, n) {
			return err
		}
	}
}

func (s *sqlite) claim(ctx context.Context, h Handle, c *claim, _ bool) (row, bool, error) {
	r, err := s.read(ctx, h, c.resource, exclusive, false)
	if err != nil || !r.exists || !c.passes(r) {
		return r, false, err
	}
	_, err = h.ExecContext(ctx, s.updateSQL, c.token, c.seq, c.resource)
	return r, err == nil, err
}

// read has one kind of lock, which is that of the database. A plain read would answer from
// the past, where the transaction has read before.
func (s *sqlite) read(ctx context.Context, h Handle, resource string, how strength, _ bool) (row, error) {
	if how != unlocked {
		if err := s.lock(ctx, h); err != nil {
			return row{}, err
		}
	}
	return scan(ctx, h, s.readSQL, []any{resource})
}

func (s *sqlite) seed(ctx context.Context, h Handle, resource string) error {
	_, err := h.ExecContext(ctx, "INSERT INTO "+s.l.table.quoted+" (resource, token, seq, prev_token, prev_seq) "+
		"VALUES (?, 0, 0, 0, 0) ON CONFLICT DO NOTHING", resource)
	return err
}

func (s *sqlite) count(ctx context.Context, h Handle, key string) (int64, bool, error) {
	return countReturning(ctx, h, "UPDATE "+s.l.table.quoted+" SET token = token + 1 WHERE resource = ?", key)
}

// ?1 is the table and ?2 its schema.
const sqliteColumnsSQL = `SELECT c.name, c.type,
	(c.pk = 1 AND 1 = (SELECT count(*) FROM pragma_table_info(?1, ?2) k WHERE k.pk > 0))
	OR EXISTS (SELECT 1 FROM pragma_index_list(?1, ?2) l WHERE l."unique" AND NOT l.partial
		AND c.name = (SELECT max(i.name) FROM pragma_index_info(l.name, ?2) i HAVING count(*) = 1)), ''
	FROM pragma_table_info(?1, ?2) c`

func (s *sqlite) learn(context.Context, Handle) error { return nil }

func (s *sqlite) columns(ctx context.Context, h Handle) ([]column, error) {
	query, args := sqliteColumnsSQL, []any{s.l.table.name, s.l.table.schema}
	if s.l.table.schema == "" {
		query, args = strings.ReplaceAll(query, ", ?2)", ")"), args[:1]
	}
	return listColumns(ctx, h, query, args, func(c *column, _ string) {
		c.wide = strings.Contains(strings.ToUpper(c.typ), "INT")
	})
}

func (s *sqlite) create() []string {
	return []string{"CREATE TABLE IF NOT EXISTS " + s.l.table.quoted + ` (resource TEXT NOT NULL PRIMARY KEY,
		token INTEGER NOT NULL, seq INTEGER NOT NULL, prev_token INTEGER NOT NULL, prev_seq INTEGER NOT NULL
	) STRICT, WITHOUT ROWID`}
}

// inTx begins a transaction, which is refused inside one, and takes it back.
func (s *sqlite) inTx(ctx context.Context, h Handle) (bool, error) {
	_, err := h.ExecContext(ctx, "BEGIN")
	if err == nil {
		_, err = h.ExecContext(ctx, "ROLLBACK")
		return false, err
	}
	if s.fault(err) == sqlerr.InTx {
		return true, nil
	}
	return false, err
}

func (s *sqlite) server() string { return sqlerr.NoServer }

func (s *sqlite) fault(err error) sqlerr.Kind { return sqlerr.SQLite(err) }

// bounds is false: the driver may have its own, longer wait.
func (s *sqlite) bounds() bool { return false }
