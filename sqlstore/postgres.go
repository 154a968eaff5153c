package sqlstore

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"strings"
	"time"
	"unicode"

	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

// postgres is the SQL of PostgreSQL. Times are read by clock_timestamp, which also moves while a
// statement waits for a row, and durations are whole microseconds.
type postgres struct{ notify bool }

// channel is where releases are notified, with the key in hexadecimal.
const channel = "holdfast_released"

const (
	// A grant and an extension must not be forgotten in a crash once they are answered,
	// whatever the database says for others; a release may, since its lease then ends by itself.
	// The setting is that of the one transaction, and is looked at when this commits.
	pgDurable = `, CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) ELSE '' END`
	pgRelaxed = `, set_config('synchronous_commit', 'off', true)`

	pgTTL   = ` * interval '1 microsecond'`
	pgToken = `greatest(l.token + 1, floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint)`
	pgLeft  = `floor(extract(epoch FROM l.expires_at - clock_timestamp()) * 1000000)::bigint`

	pgTake = `UPDATE holdfast_leases l SET owner = $2::text, label = $3::text,
		expires_at = clock_timestamp() + $4::bigint` + pgTTL + `, token = ` + pgToken + `
		WHERE l.key = $1::bytea AND (l.owner = '' OR l.expires_at <= clock_timestamp())
		RETURNING l.token` + pgDurable
	pgSeed = `INSERT INTO holdfast_leases (key, owner, token, expires_at, label)
		VALUES ($1::bytea, '', 0, 'epoch', '') ON CONFLICT (key) DO NOTHING`
	pgRefresh = `UPDATE holdfast_leases l SET expires_at = greatest(l.expires_at, clock_timestamp() + $3::bigint` + pgTTL + `)
		WHERE l.key = $1::bytea AND l.owner = $2::text AND l.expires_at > clock_timestamp()
		RETURNING l.token` + pgDurable
	pgExtend = `UPDATE holdfast_leases l SET expires_at = greatest(l.expires_at, clock_timestamp() + $4::bigint` + pgTTL + `)
		WHERE l.key = $1::bytea AND l.owner = $2::text AND l.token = $3::bigint AND l.expires_at > clock_timestamp()
		RETURNING l.token` + pgDurable
	pgExtendMany = `UPDATE holdfast_leases l SET expires_at = greatest(l.expires_at, clock_timestamp() + v.ttl` + pgTTL + `)
		FROM json_to_recordset($1::text::json) AS v(place int, key text, owner text, token bigint, ttl bigint)
		WHERE l.key = decode(v.key, 'hex') AND l.owner = v.owner AND l.token = v.token
			AND l.expires_at > clock_timestamp()
		RETURNING v.place` + pgDurable
	// The end of the lease stays in the row, so that the answer says whether it had come.
	pgRelease = `UPDATE holdfast_leases l SET owner = '', label = ''
		WHERE l.key = $1::bytea AND l.owner = $2::text RETURNING l.token, ` + pgLeft
	// An update passes over a row whose change to be like that is not committed yet. This waits for it.
	pgAwait  = `SELECT 1` + pgRelaxed + ` FROM holdfast_leases l WHERE l.key = $1::bytea FOR NO KEY UPDATE`
	pgNotify = `, coalesce(pg_notify('` + channel + `', encode(l.key, 'hex'))::text, '')`
	pgBreak  = `UPDATE holdfast_leases l SET owner = $3::text, label = $4::text, token = ` + pgToken + `
		WHERE l.key = $1::bytea AND l.owner = $2::text AND l.expires_at > clock_timestamp()
		RETURNING l.token` + pgDurable

	pgRead = `SELECT l.key IS NOT NULL, coalesce(l.owner, ''), coalesce(l.token, 0), coalesce(` + pgLeft + `, 0),
		coalesce(l.label, ''), pg_is_in_recovery()
		FROM (SELECT 1) one LEFT JOIN holdfast_leases l ON l.key = $1::bytea`
	pgList = `SELECT l.key, l.owner, l.token, ` + pgLeft + `, l.label, pg_is_in_recovery() FROM holdfast_leases l
		WHERE l.key > $1::bytea AND l.key >= $2::bytea AND l.owner <> '' ORDER BY l.key LIMIT $3::int`
	pgCheck = `SELECT coalesce((SELECT value FROM holdfast_meta WHERE name = 'version'), ''), pg_is_in_recovery()
		WHERE NOT EXISTS (SELECT 1 FROM holdfast_leases WHERE false)`
)

func (postgres) name() string   { return "postgresql" }
func (postgres) server() string { return sqlerr.PostgreSQLServer }

// schema leaves room in each page, so that an update need not touch the index.
func (postgres) schema() []string {
	return []string{
		`CREATE TABLE IF NOT EXISTS holdfast_leases (
	key bytea NOT NULL PRIMARY KEY,
	owner text COLLATE "C" NOT NULL,
	token bigint NOT NULL,
	expires_at timestamptz NOT NULL,
	label text NOT NULL
) WITH (fillfactor = 50)`,
		`CREATE TABLE IF NOT EXISTS holdfast_meta (name text NOT NULL PRIMARY KEY, value text NOT NULL)`,
		`INSERT INTO holdfast_meta (name, value) VALUES ('version', '1') ON CONFLICT (name) DO NOTHING`,
	}
}

// found reads the only row of an answer, of which there may be none. The last column is the
// setting that the statement has made.
func found(r *sql.Row, into ...any) (ok bool, err error) {
	var setting string
	err = r.Scan(append(into, &setting)...)
	if err == sql.ErrNoRows {
		return false, nil
	}
	return err == nil, err
}

func (postgres) take(ctx context.Context, c handle, key, owner, label string, ttl time.Duration) (token int64, ok bool, err error) {
	take := func(label string) (bool, error) {
		return found(c.QueryRowContext(ctx, pgTake, []byte(key), owner, label, micros(ttl)), &token)
	}
	ok, err = take(label)
	switch sqlerr.SQLState(err) {
	case "22P05", "22021": // the encoding of the database lacks a character
		ok, err = take(asciiOnly(label))
	}
	return token, ok, err
}

func asciiOnly(label string) string {
	return strings.Map(func(r rune) rune {
		if r > unicode.MaxASCII {
			return '?'
		}
		return r
	}, label)
}

func (postgres) seed(ctx context.Context, c handle, key string) error {
	_, err := c.ExecContext(ctx, pgSeed, []byte(key))
	return err
}

func (postgres) refresh(ctx context.Context, c handle, key, owner string, ttl time.Duration) (token int64, ok bool, err error) {
	ok, err = found(c.QueryRowContext(ctx, pgRefresh, []byte(key), owner, micros(ttl)), &token)
	return token, ok, err
}

func (postgres) extend(ctx context.Context, c handle, leases []lease) ([]bool, error) {
	done := make([]bool, len(leases))
	if len(leases) == 1 {
		l, token := leases[0], int64(0)
		ok, err := found(c.QueryRowContext(ctx, pgExtend, []byte(l.key), l.owner, int64(l.token), micros(l.ttl)), &token)
		done[0] = ok
		return done, err
	}
	rows, err := c.QueryContext(ctx, pgExtendMany, leaseList(leases))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var place int
		var setting string
		if err := rows.Scan(&place, &setting); err != nil {
			return nil, err
		}
		done[place] = true
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	return done, rows.Close()
}

// leaseList writes leases as one text, which every driver can send.
func leaseList(leases []lease) string {
	type item struct {
		Place int    `json:"place"`
		Key   string `json:"key"`
		Owner string `json:"owner"`
		Token int64  `json:"token"`
		TTL   int64  `json:"ttl"`
	}
	list := make([]item, len(leases))
	for i, l := range leases {
		list[i] = item{i, hex.EncodeToString([]byte(l.key)), l.owner, int64(l.token), micros(l.ttl)}
	}
	text, err := json.Marshal(list)
	if err != nil {
		panic("sqlstore: a list of plain values failed to encode: " + err.Error())
	}
	return string(text)
}

func (p postgres) release(ctx context.Context, c handle, key, owner string) (r row, ok bool, err error) {
	var left int64
	var notified string
	send := func(query string, into ...any) (bool, error) {
		return found(c.QueryRowContext(ctx, query+pgRelaxed, []byte(key), owner), append([]any{&r.token, &left}, into...)...)
	}
	release := func() (bool, error) {
		if p.notify {
			ok, err := send(pgRelease+pgNotify, &notified)
			if sqlerr.SQLState(err) != "54000" { // the server's queue of notifications is full, since somebody does not listen
				return ok, err
			}
		}
		return send(pgRelease)
	}
	if ok, err = release(); err == nil && !ok { // the grant may not be committed yet, as while a replica is waited for
		if _, err = c.ExecContext(ctx, pgAwait, []byte(key)); err == nil {
			ok, err = release()
		}
	}
	r.left = time.Duration(left) * time.Microsecond
	return r, ok, err
}

func (postgres) breakOff(ctx context.Context, c handle, key, owner, broken, label string) (ok bool, err error) {
	var token int64
	return found(c.QueryRowContext(ctx, pgBreak, []byte(key), owner, broken, label), &token)
}

func (postgres) read(ctx context.Context, c handle, key string) (r row, standby bool, err error) {
	var left int64
	err = c.QueryRowContext(ctx, pgRead, []byte(key)).Scan(&r.exists, &r.owner, &r.token, &left, &r.label, &standby)
	r.left = time.Duration(left) * time.Microsecond
	return r, standby, err
}

func (postgres) list(ctx context.Context, c handle, after, prefix string) (page []row, standby bool, err error) {
	rows, err := c.QueryContext(ctx, pgList, []byte(after), []byte(prefix), pageSize)
	if err != nil {
		return nil, false, err
	}
	return scanServerPage(rows)
}

// scanServerPage reads key, owner, token, what is left in microseconds, label, and whether the
// server is a standby.
func scanServerPage(rows *sql.Rows) (page []row, standby bool, err error) {
	page, err = scanPage(rows, func(scan func(...any) error) (row, error) {
		var r row
		var key []byte
		var left int64
		err := scan(&key, &r.owner, &r.token, &left, &r.label, &standby)
		r.key, r.left = string(key), time.Duration(left)*time.Microsecond
		return r, err
	})
	return page, standby, err
}

func (postgres) check(ctx context.Context, c handle) (version string, standby bool, err error) {
	err = c.QueryRowContext(ctx, pgCheck).Scan(&version, &standby)
	return version, standby, err
}

// fault knows that a statement that was cancelled has written nothing.
func (postgres) fault(err error) sqlerr.Kind {
	if sqlerr.SQLState(err) == "57014" {
		return sqlerr.Unavailable
	}
	return sqlerr.PostgreSQL(err)
}

func (postgres) advice(err error) string {
	switch state := sqlerr.SQLState(err); state {
	case "26000", "42P05", "08P01":
		if state == "08P01" && !strings.Contains(err.Error(), "prepared statement") {
			return "" // PgBouncer says so of all that is wrong with its servers
		}
		return "is behind a pooler that mixes up prepared statements; with pgx set default_query_exec_mode=exec, with lib/pq binary_parameters=yes"
	case "42501":
		return "must let this role SELECT, INSERT and UPDATE in the tables holdfast_leases and holdfast_meta; another role may make them by EnsureSchema"
	}
	return ""
}

func micros(d time.Duration) int64 { return int64((d + time.Microsecond - 1) / time.Microsecond) }
