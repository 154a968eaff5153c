package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
)

// byHand are the statements that people write when they have no guard: a look at the mark in a
// transaction, a row of marks that is written first, or a condition on the row itself.
type byHand struct{}

func (byHand) do(ctx context.Context, s *session, o op) (bool, error) {
	r := s.run
	switch o.do {
	case "look":
		var mark sql.NullInt64
		err := s.tx.QueryRowContext(ctx, r.sql("SELECT token FROM {mark} WHERE resource = '1'")).Scan(&mark)
		if err != nil && !errors.Is(err, sql.ErrNoRows) {
			return true, err
		}
		return true, s.compare(mark.Int64)
	case "claim":
		return true, s.claimByHand(ctx, o.row)
	case "cas":
		return true, s.cas(ctx, "UPDATE {doc} SET v = v + ?, token = ? WHERE id = ? AND token <= ?", s.number, s.token, o.row, s.token)
	case "again":
		return true, s.cas(ctx, "UPDATE {doc} SET v = v, token = ? WHERE id = ? AND token <= ?", s.token, o.row, s.token)
	}
	return false, nil
}

func (s *session) compare(mark int64) error {
	if mark > int64(s.token) {
		return errStale
	}
	return nil
}

func (s *session) claimByHand(ctx context.Context, resource string) error {
	if s.run.d.engine != mariadb {
		return s.cas(ctx, `INSERT INTO {mark} AS m (resource, token) VALUES (?, ?)
			ON CONFLICT (resource) DO UPDATE SET token = EXCLUDED.token WHERE m.token <= EXCLUDED.token`, resource, s.token)
	}
	if err := s.exec(ctx, `INSERT INTO {mark} (resource, token) VALUES (?, ?)
		ON DUPLICATE KEY UPDATE token = GREATEST(token, VALUES(token))`, resource, s.token); err != nil {
		return err
	}
	var mark int64
	err := s.tx.QueryRowContext(ctx, s.run.sql("SELECT token FROM {mark} WHERE resource = ? FOR UPDATE"), resource).Scan(&mark)
	if err != nil {
		return err
	}
	return s.compare(mark)
}

// cas executes a statement that changes nothing where a larger token has been seen.
func (s *session) cas(ctx context.Context, statement string, args ...any) error {
	result, err := s.tx.ExecContext(ctx, s.run.sql(statement), args...)
	if err != nil {
		return err
	}
	n, err := result.RowsAffected()
	if err == nil && n == 0 {
		return errStale
	}
	return err
}

// newTables makes the tables of one configuration.
func newTables(d *database, c config, suffix string) tables {
	x := tables{admin: d.open("", c.params), doc: "doc" + suffix, mark: "mark" + suffix, log: "log" + suffix, suffix: suffix}
	text := "text"
	if d.engine == mariadb {
		text = "varbinary(512)"
	}
	must(d.t, x.admin,
		fmt.Sprintf("CREATE TABLE %s (id %s PRIMARY KEY, v bigint NOT NULL, token bigint, seq bigint)", x.doc, text),
		fmt.Sprintf("CREATE TABLE %s (id %s PRIMARY KEY, v bigint NOT NULL)", x.log, text),
		fmt.Sprintf("CREATE TABLE %s (resource %s PRIMARY KEY, token bigint NOT NULL)", x.mark, text))
	return x
}

// reset puts the tables back to where each schedule begins: the mark is 32, and each row has
// the value 100.
func (x tables) reset(t testing.TB, missing bool) {
	t.Helper()
	must(t, x.admin, "DELETE FROM "+x.doc, "DELETE FROM "+x.mark, "DELETE FROM "+x.log,
		"INSERT INTO "+x.doc+" (id, v, token) VALUES ('1', 100, 32), ('2', 100, 32)")
	if !missing {
		must(t, x.admin, "INSERT INTO "+x.mark+" VALUES ('1', 32), ('2', 32)")
	}
}

// pool is a session's connections, and how often SQLite told them that it is locked.
type pool struct {
	db   *sql.DB
	busy func() int64
}

// newPools makes one for each session, by name.
func newPools(d *database, c config, x tables) map[string]pool {
	pools := map[string]pool{}
	for _, name := range []string{"O", "N"} {
		switch d.engine {
		case postgres:
			pools[name] = pool{db: d.open("", "application_name="+name+x.suffix)}
		case mariadb:
			pools[name] = pool{db: d.open("", c.params)}
		case sqlite3:
			db, l := d.openLossy(c.params + "&_pragma=busy_timeout(0)")
			pools[name] = pool{db, l.busy.Load}
		}
	}
	return pools
}

// newRun puts the two sessions together.
func newRun(t testing.TB, d *database, c config, x tables, pools map[string]pool) *run {
	r := &run{t: t, d: d, c: c, tables: x, sessions: map[string]*session{}}
	for _, s := range []*session{{name: "O", token: 33, number: 10}, {name: "N", token: 34, number: 1}} {
		s.run, s.db, s.busy = r, pools[s.name].db, pools[s.name].busy
		r.sessions[s.name] = s
	}
	return r
}
