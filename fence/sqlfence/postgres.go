package sqlfence

import (
	"context"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

type postgres struct {
	l      layout
	wait   string         // lock_timeout, in milliseconds
	claims map[how]string // says all, and can put the former setting back
	raises map[how]string // says what it has raised only, and is quicker
	reads  [exclusive + 1][2]string
}

// Each statement that locks a row sets lock_timeout before, by being unable to reach the row
// without the setting's value: that saves a round trip. The index 1 of a pair is the
// statement that puts the former value back.
func newPostgres(l layout, lockWait time.Duration) *postgres {
	p := &postgres{l: l, wait: strconv.FormatInt(max(1, lockWait.Milliseconds()), 10), claims: map[how]string{}, raises: map[how]string{}}
	for _, h := range []how{raise, monotonic, once, sequenced} {
		p.claims[h], p.raises[h] = p.claimSQL(h), p.raiseSQL(h)
	}
	p.reads[unlocked][0] = "SELECT " + l.readColumns() + " FROM " + l.table.quoted + " WHERE " + l.id + " = $1"
	p.reads[unlocked][1] = p.reads[unlocked][0]
	p.reads[shared] = [2]string{p.readSQL("SHARE", false), p.readSQL("SHARE", true)}
	p.reads[exclusive] = [2]string{p.readSQL("NO KEY UPDATE", false), p.readSQL("NO KEY UPDATE", true)}
	return p
}

const cfgSQL = "cfg AS (SELECT current_setting('lock_timeout') AS old, set_config('lock_timeout', $2, true) AS new)"

// $1 is the resource, $2 the bound of the wait.
func (p *postgres) lockSQL(lock string) string {
	return "WITH " + cfgSQL + ", cur (token, seq, prev_token, prev_seq) AS (SELECT " + p.l.readColumns() + " FROM cfg, " + p.l.table.quoted + " t " +
		"WHERE t." + p.l.id + " = $1 AND cfg.new <> '' FOR " + lock + " OF t)"
}

// answerSQL reads cur, and has a row also where that has none, so that the setting goes back
// in any case.
func answerSQL(keep bool, raised string) string {
	restore := "''"
	if keep {
		restore = "set_config('lock_timeout', cfg.old, true)"
	}
	return " SELECT COALESCE(token, 0), COALESCE(seq, 0), COALESCE(prev_token, 0), COALESCE(prev_seq, 0), token IS NOT NULL, " +
		raised + ", " + restore + " FROM cfg LEFT JOIN cur ON true"
}

func (p *postgres) readSQL(lock string, keep bool) string {
	return p.lockSQL(lock) + answerSQL(keep, "0")
}

// $3 is the token and $4 the seq. UPDATE takes the newest version of the row, as FOR NO KEY
// UPDATE does, which nobody can change in between.
func (p *postgres) claimSQL(h how) string {
	c := claim{how: h, hasSeq: p.l.seq != ""}
	return p.lockSQL("NO KEY UPDATE") + ", upd AS (UPDATE " + p.l.table.quoted + " t SET " +
		p.l.set("t.", "$3::bigint", "$4::bigint", "$3::bigint") +
		" FROM cur WHERE t." + p.l.id + " = $1 AND " + c.condition("cur.token", "cur.seq", "$3::bigint", "$4::bigint") +
		" AND $4::bigint IS NOT NULL RETURNING 1)" + answerSQL(true, "(SELECT count(*) FROM upd)")
}

func (p *postgres) raiseSQL(h how) string {
	c := claim{how: h, hasSeq: p.l.seq != ""}
	return "UPDATE " + p.l.table.quoted + " t SET " + p.l.set("t.", "$3::bigint", "$4::bigint", "$3::bigint") +
		" FROM (SELECT " + p.l.readColumns() + " FROM (SELECT set_config('lock_timeout', $2, true) AS new) cfg, " + p.l.table.quoted +
		" t WHERE t." + p.l.id + " = $1 AND cfg.new <> '' FOR NO KEY UPDATE OF t) cur (token, seq, prev_token, prev_seq)" +
		" WHERE t." + p.l.id + " = $1 AND " + c.condition("cur.token", "cur.seq", "$3::bigint", "$4::bigint") +
		" AND $4::bigint IS NOT NULL RETURNING cur.token, cur.seq, cur.prev_token, cur.prev_seq"
}

func (p *postgres) claim(ctx context.Context, h Handle, c *claim, keep bool) (row, bool, error) {
	args := []any{c.resource, p.wait, c.token, c.seq}
	if keep {
		return p.answer(ctx, h, p.claims[c.how], args...)
	}
	return tryClaim(c, func() (row, bool, error) {
		r, err := scan(ctx, h, p.raises[c.how], args)
		return r, r.exists, err
	}, func() (row, error) { return p.read(ctx, h, c.resource, exclusive, false) })
}

func (p *postgres) read(ctx context.Context, h Handle, resource string, s strength, keep bool) (row, error) {
	if s == unlocked {
		return scan(ctx, h, p.reads[s][0], []any{resource})
	}
	r, _, err := p.answer(ctx, h, pick(p.reads[s], keep), resource, p.wait)
	return r, err
}

func (p *postgres) answer(ctx context.Context, h Handle, query string, args ...any) (row, bool, error) {
	var exists bool
	var raised int
	var setting string
	r, err := scan(ctx, h, query, args, &exists, &raised, &setting)
	r.exists = r.exists && exists
	return r, raised > 0, err
}

func pick(pair [2]string, second bool) string {
	if second {
		return pair[1]
	}
	return pair[0]
}

func (p *postgres) seed(ctx context.Context, h Handle, resource string) error {
	var old string
	return h.QueryRowContext(ctx, "WITH "+cfgSQL+", made AS (INSERT INTO "+p.l.table.quoted+
		" (resource, token, seq, prev_token, prev_seq) SELECT $1, 0, 0, 0, 0 FROM cfg WHERE new <> '' "+
		"ON CONFLICT (resource) DO NOTHING RETURNING 1) "+
		"SELECT set_config('lock_timeout', cfg.old, true) FROM cfg, (SELECT count(*) FROM made) n", resource, p.wait).Scan(&old)
}

func (p *postgres) count(ctx context.Context, h Handle, key string) (int64, bool, error) {
	return countReturning(ctx, h, "UPDATE "+p.l.table.quoted+" SET token = token + 1 WHERE resource = $1", key)
}

const postgresColumnsSQL = `SELECT a.attname::text, format_type(COALESCE(NULLIF(t.typbasetype, 0), t.oid), NULL),
	EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
		AND i.indnkeyatts = 1 AND i.indkey[0] = a.attnum), c.relkind::text
	FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
	JOIN pg_type t ON t.oid = a.atttypid WHERE c.oid = to_regclass($1::text)`

func (p *postgres) learn(context.Context, Handle) error { return nil }

func (p *postgres) columns(ctx context.Context, h Handle) ([]column, error) {
	return listColumns(ctx, h, postgresColumnsSQL, []any{p.l.table.quoted}, func(c *column, relkind string) {
		c.wide = c.typ == "bigint"
		if relkind != "r" && relkind != "p" {
			c.trouble = "must be a table, not a view"
		}
	})
}

func (p *postgres) create() []string {
	return []string{"CREATE TABLE IF NOT EXISTS " + p.l.table.quoted + ` (resource text COLLATE "C" NOT NULL PRIMARY KEY,
		token bigint NOT NULL, seq bigint NOT NULL, prev_token bigint NOT NULL, prev_seq bigint NOT NULL)`}
}

// inTx sets a savepoint, which needs a transaction, and takes it away.
func (p *postgres) inTx(ctx context.Context, h Handle) (bool, error) {
	_, err := h.ExecContext(ctx, "SAVEPOINT holdfast")
	if err == nil {
		_, err = h.ExecContext(ctx, "RELEASE SAVEPOINT holdfast")
		return true, err
	}
	if p.fault(err) == sqlerr.NoTx {
		return false, nil
	}
	return false, err
}

func (p *postgres) server() string { return sqlerr.PostgreSQLServer }

func (p *postgres) fault(err error) sqlerr.Kind { return sqlerr.PostgreSQL(err) }
func (p *postgres) bounds() bool                { return true }
