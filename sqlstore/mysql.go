package sqlstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/internal/sqltext"
)

// mysql is the SQL of MySQL and MariaDB. Values are written into the statements, so that they
// need not be prepared, which would double the round trips: numbers in decimal and texts in
// hexadecimal. Whether a row was found is told by the statement's insert id: how many rows it
// counts depends on the client's flags and on proxies.
type mysql struct{}

// mysqlNow is the server's clock in microseconds, in UTC, when the statement began: local times
// are ambiguous for an hour each year. A statement that waits for a row is late by the wait,
// which can only keep others away for longer.
const mysqlNow = `TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))`

const (
	mysqlToken = `LAST_INSERT_ID(GREATEST(token + 1, ` + mysqlNow + `))`
	mysqlLeft  = `expires - ` + mysqlNow
	// Some versions say OFF, and others 0.
	mysqlStandby = `@@GLOBAL.read_only NOT IN ('0', 'OFF')`
	mysqlCheck   = `SELECT COALESCE((SELECT value FROM holdfast_meta WHERE name = 'version'), X''), ` + mysqlStandby + `, ` + mysqlCommits + `,
		COALESCE((SELECT MAX(engine) FROM information_schema.tables
			WHERE table_schema = DATABASE() AND table_name = 'holdfast_leases'), X''), (SELECT COUNT(*) FROM holdfast_leases WHERE 0)`
)

func (mysql) name() string   { return "mysql" }
func (mysql) server() string { return sqlerr.MySQLServer }

// schema: texts are bytes, which no collation makes equal.
func (mysql) schema() []string {
	return []string{
		"CREATE TABLE IF NOT EXISTS holdfast_leases (\n" +
			"\t`key` VARBINARY(512) NOT NULL PRIMARY KEY,\n" +
			`	owner VARBINARY(128) NOT NULL,
	token BIGINT NOT NULL,
	expires BIGINT NOT NULL, -- in microseconds since 1970, UTC
	label VARBINARY(64) NOT NULL,
	batch BIGINT NOT NULL -- of the last extension
) ENGINE = InnoDB`,
		`CREATE TABLE IF NOT EXISTS holdfast_meta (name VARBINARY(64) NOT NULL PRIMARY KEY, value VARBINARY(255) NOT NULL) ENGINE = InnoDB`,
		`INSERT IGNORE INTO holdfast_meta (name, value) VALUES ('version', '1')`,
	}
}

// mysqlCommits is true where a statement commits by itself. Somebody may have changed that in a
// session of the pool: what is written then is not committed, and may be rolled back while its lease
// is trusted. No statement writes there, and read tells of it. A replica that executes the statements
// has the session's value. (It has another one of MariaDB's in_transaction.)
const mysqlCommits = `@@autocommit`

func mysqlWhere(key string) string {
	return " WHERE `key` = " + sqltext.Binary(key) + " AND " + mysqlCommits
}

func errNoCommit() error {
	return badDatabase("must have autocommit on in all connections of the pool; set autocommit=1 where they are configured, and begin transactions by BeginTx", nil)
}

// id runs a statement that answers by its insert id.
func (mysql) id(ctx context.Context, c handle, statement string) (int64, bool, error) {
	result, err := c.ExecContext(ctx, statement)
	if err != nil {
		return 0, false, err
	}
	id, err := result.LastInsertId()
	return id, err == nil && id != 0, err
}

// The token is assigned first, since each assignment is seen by those after it.
func (m mysql) take(ctx context.Context, c handle, key, owner, label string, ttl time.Duration) (int64, bool, error) {
	return m.id(ctx, c, fmt.Sprintf("UPDATE holdfast_leases SET token = %s, owner = %s, label = %s, expires = %s + %d%s AND (owner = X'' OR expires <= %s)",
		mysqlToken, sqltext.Binary(owner), sqltext.Binary(label), mysqlNow, micros(ttl), mysqlWhere(key), mysqlNow))
}

func (mysql) seed(ctx context.Context, c handle, key string) error {
	_, err := c.ExecContext(ctx, "INSERT IGNORE INTO holdfast_leases (`key`, owner, token, expires, label, batch) SELECT "+sqltext.Binary(key)+", X'', 0, 0, X'', 0 FROM DUAL WHERE "+mysqlCommits)
	return err
}

func (m mysql) refresh(ctx context.Context, c handle, key, owner string, ttl time.Duration) (int64, bool, error) {
	return m.id(ctx, c, fmt.Sprintf("UPDATE holdfast_leases SET token = LAST_INSERT_ID(token), expires = GREATEST(expires, %s + %d)%s AND owner = %s AND expires > %s",
		mysqlNow, micros(ttl), mysqlWhere(key), sqltext.Binary(owner), mysqlNow))
}

func (m mysql) extend(ctx context.Context, c handle, leases []lease) ([]bool, error) {
	if len(leases) > 1 {
		return m.extendMany(ctx, c, leases)
	}
	l := leases[0]
	_, ok, err := m.id(ctx, c, fmt.Sprintf("UPDATE holdfast_leases SET token = LAST_INSERT_ID(token), expires = GREATEST(expires, %s + %d)%s AND owner = %s AND token = %d AND expires > %s",
		mysqlNow, micros(l.ttl), mysqlWhere(l.key), sqltext.Binary(l.owner), l.token, mysqlNow))
	return []bool{ok}, err
}

// extendMany marks the rows that it extends by a number of its own, and asks then which ones
// have it. Rows are found by the index, in the order of their keys: where the server may choose, it
// reads a small table from its beginning, and locks and waits for every row on the way. The keys
// differ.
func (mysql) extendMany(ctx context.Context, c handle, leases []lease) ([]bool, error) {
	batch := 1 + rand.Int64N(1<<62)
	var keys, grants, ttls []string
	place := make(map[string]int, len(leases))
	for i, l := range leases {
		place[l.key] = i
		key := sqltext.Binary(l.key)
		keys = append(keys, key)
		grants = append(grants, fmt.Sprintf("(%s, %s, %d)", key, sqltext.Binary(l.owner), l.token))
		ttls = append(ttls, fmt.Sprintf("WHEN %s THEN %d", key, micros(l.ttl)))
	}
	ofKeys := " WHERE `key` IN (" + strings.Join(keys, ", ") + ")"
	_, err := c.ExecContext(ctx, fmt.Sprintf("UPDATE holdfast_leases FORCE INDEX (PRIMARY) SET expires = GREATEST(expires, %s + CASE `key` %s END), batch = %d%s AND (`key`, owner, token) IN (%s) AND expires > %s AND %s",
		mysqlNow, strings.Join(ttls, " "), batch, ofKeys, strings.Join(grants, ", "), mysqlNow, mysqlCommits))
	if err != nil {
		return nil, err
	}
	// With a limit of its own, since sql_select_limit is the default.
	rows, err := c.QueryContext(ctx, fmt.Sprintf("SELECT `key` FROM holdfast_leases%s AND batch = %d LIMIT %d", ofKeys, batch, len(keys)))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	done := make([]bool, len(leases))
	for rows.Next() {
		var key []byte
		if err := rows.Scan(&key); err != nil {
			return nil, err
		}
		done[place[string(key)]] = true
	}
	return done, rows.Err()
}

// release says by its insert id whether the lease had ended: 1, and else 2 and what was left.
func (m mysql) release(ctx context.Context, c handle, key, owner string) (row, bool, error) {
	id, ok, err := m.id(ctx, c, fmt.Sprintf("UPDATE holdfast_leases SET token = token + 0 * LAST_INSERT_ID(2 + GREATEST(-1, %s)), owner = X'', label = X''%s AND owner = %s",
		mysqlLeft, mysqlWhere(key), sqltext.Binary(owner)))
	return row{left: time.Duration(id-2) * time.Microsecond}, ok, err
}

func (m mysql) breakOff(ctx context.Context, c handle, key, owner, broken, label string) (bool, error) {
	_, ok, err := m.id(ctx, c, fmt.Sprintf("UPDATE holdfast_leases SET token = %s, owner = %s, label = %s%s AND owner = %s AND expires > %s",
		mysqlToken, sqltext.Binary(broken), sqltext.Binary(label), mysqlWhere(key), sqltext.Binary(owner), mysqlNow))
	return ok, err
}

func (mysql) read(ctx context.Context, c handle, key string) (r row, standby bool, err error) {
	var left int64
	var commits bool
	err = c.QueryRowContext(ctx, "SELECT l.`key` IS NOT NULL, COALESCE(l.owner, X''), COALESCE(l.token, 0), COALESCE(l."+mysqlLeft+", 0), COALESCE(l.label, X''), "+
		mysqlStandby+", "+mysqlCommits+" FROM (SELECT 1) one LEFT JOIN holdfast_leases l ON l.`key` = "+sqltext.Binary(key)).
		Scan(&r.exists, &r.owner, &r.token, &left, &r.label, &standby, &commits)
	r.left = time.Duration(left) * time.Microsecond
	if err == nil && !commits {
		err = errNoCommit()
	}
	return r, standby, err
}

func (mysql) list(ctx context.Context, c handle, after, prefix string) (page []row, standby bool, err error) {
	rows, err := c.QueryContext(ctx, fmt.Sprintf("SELECT `key`, owner, token, %s, label, %s FROM holdfast_leases "+
		"WHERE `key` > %s AND `key` >= %s AND owner <> X'' ORDER BY `key` LIMIT %d", mysqlLeft, mysqlStandby, sqltext.Binary(after), sqltext.Binary(prefix), pageSize))
	if err != nil {
		return nil, false, err
	}
	return scanServerPage(rows)
}

// check refuses a pool with autocommit off, where a statement would leave a transaction open.
func (mysql) check(ctx context.Context, c handle) (version string, standby bool, err error) {
	var commits bool
	var engine string
	var none int
	err = c.QueryRowContext(ctx, mysqlCheck).Scan(&version, &standby, &commits, &engine, &none)
	switch {
	case err != nil:
	case !commits:
		err = errNoCommit()
	case !strings.EqualFold(engine, "InnoDB"):
		err = badDatabase("must keep holdfast_leases in InnoDB, has it in "+engine, nil)
	}
	return version, standby, err
}

func (mysql) fault(err error) sqlerr.Kind { return sqlerr.MySQL(err) }

func (mysql) advice(err error) string {
	switch sqlerr.MySQLNumber(err) {
	case 1142, 1143:
		return "must let this user SELECT, INSERT and UPDATE in the tables holdfast_leases and holdfast_meta; another user may make them by EnsureSchema"
	}
	return ""
}
