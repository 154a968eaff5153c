package sqlfence

import (
	"context"
	"database/sql"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/internal/sqltext"
)

// mysql writes values into its statements, so that they need not be prepared, which would
// double the round trips: numbers in decimal, and names of resources in hexadecimal.
type mysql struct {
	l        layout
	lockWait time.Duration
	// mariadb is set by learn. MySQL has no way to bound the wait of one statement that
	// leaves the session as it was; the guard's own timer ends it there.
	mariadb atomic.Bool
}

func number(n int64) string { return strconv.FormatInt(n, 10) }
func unicodeText(s string) string {
	return "_utf8mb4 " + sqltext.Binary(s)
}

// where finds the row of a resource. In the user's table the column's type decides how it
// is found, by an index therefore, and then the text must be the same byte by byte: MySQL
// would find the row 12 by the text "12 monkeys", and "Job" by "job".
func (m *mysql) where(resource string) string {
	if m.l.own {
		return " WHERE " + m.l.id + " = " + sqltext.Binary(resource)
	}
	return " WHERE " + m.l.id + " = " + unicodeText(resource) +
		" AND CAST(CONVERT(" + m.l.id + " USING utf8mb4) AS BINARY) = " + sqltext.Binary(resource)
}

func (m *mysql) bounded(statement string) string {
	if !m.mariadb.Load() {
		return statement
	}
	seconds := (m.lockWait + time.Second - 1) / time.Second
	return "SET STATEMENT innodb_lock_wait_timeout = " + number(int64(seconds)) + " FOR " + statement
}

// claimSQL tells by the statement's insert id that it has found the row, and by its other
// bits the seq that was there.
func (m *mysql) claimSQL(c *claim) string {
	token, seq := number(c.token), number(c.seq)
	set, keep := seq, token+" + 0 * LAST_INSERT_ID(1 + ("+m.l.token+" IS NULL))"
	if m.l.seq != "" {
		set, keep = seq+" + 0 * LAST_INSERT_ID(COALESCE("+m.l.seq+", 0) ^ 0x8000000000000000)", token
	}
	return m.bounded("UPDATE " + m.l.table.quoted + " SET " + m.l.set("", token, set, keep) + m.where(c.resource) +
		" AND " + c.condition("COALESCE("+m.l.token+", 0)", "COALESCE("+m.l.seq+", 0)", token, seq))
}

// claim takes nothing from the number of rows that the statement counts: depending on the
// client's flags and on proxies, rows count that were not changed, or do not.
func (m *mysql) claim(ctx context.Context, h Handle, c *claim, _ bool) (row, bool, error) {
	return tryClaim(c, func() (row, bool, error) {
		result, err := h.ExecContext(ctx, m.claimSQL(c))
		if err != nil {
			return row{}, false, err
		}
		id, err := result.LastInsertId()
		return row{exists: true, seq: id ^ math.MinInt64}, err == nil && id != 0, err
	}, func() (row, error) { return m.read(ctx, h, c.resource, exclusive, false) })
}

func (m *mysql) read(ctx context.Context, h Handle, resource string, s strength, _ bool) (row, error) {
	query := "SELECT " + m.l.readColumns() + " FROM " + m.l.table.quoted + m.where(resource)
	switch s {
	case shared:
		query = m.bounded(query + " LOCK IN SHARE MODE")
	case exclusive:
		query = m.bounded(query + " FOR UPDATE")
	}
	return scan(ctx, h, query, nil)
}

func (m *mysql) seed(ctx context.Context, h Handle, resource string) error {
	_, err := h.ExecContext(ctx, m.bounded("INSERT IGNORE INTO "+m.l.table.quoted+
		" (resource, token, seq, prev_token, prev_seq) VALUES ("+sqltext.Binary(resource)+", 0, 0, 0, 0)"))
	return err
}

func (m *mysql) count(ctx context.Context, h Handle, key string) (int64, bool, error) {
	result, err := h.ExecContext(ctx, m.bounded("UPDATE "+m.l.table.quoted+" SET token = LAST_INSERT_ID(token + 1)"+m.where(key)))
	if err != nil {
		return 0, false, err
	}
	n, err := result.LastInsertId()
	return n, n != 0, err
}

const mysqlColumnsSQL = `SELECT c.column_name, c.data_type, EXISTS (SELECT 1 FROM information_schema.statistics s
		WHERE s.table_schema = c.table_schema AND s.table_name = c.table_name AND s.column_name = c.column_name
		AND s.non_unique = 0 AND s.sub_part IS NULL AND 1 = (SELECT COUNT(*) FROM information_schema.statistics o
			WHERE o.table_schema = s.table_schema AND o.table_name = s.table_name AND o.index_name = s.index_name)),
	COALESCE(t.engine, '')
	FROM information_schema.columns c JOIN information_schema.tables t
		ON t.table_schema = c.table_schema AND t.table_name = c.table_name
	WHERE c.table_name = %s AND c.table_schema = %s`

// learn refuses a pool with autocommit off: what runs there outside a transaction would open
// one, which stays open when the connection goes back, and is lost with it.
func (m *mysql) learn(ctx context.Context, h Handle) error {
	var version string
	var autocommit bool
	if err := h.QueryRowContext(ctx, "SELECT VERSION(), @@autocommit").Scan(&version, &autocommit); err != nil {
		return err
	}
	m.mariadb.Store(strings.Contains(strings.ToLower(version), "mariadb"))
	if _, pool := h.(*sql.DB); pool && !autocommit {
		return &fence.InvalidError{Field: "db", Value: "autocommit=0", Rule: "must have autocommit on; set autocommit=1 where its connections are configured"}
	}
	return nil
}

func (m *mysql) columns(ctx context.Context, h Handle) ([]column, error) {
	if err := m.learn(ctx, h); err != nil {
		return nil, err
	}
	schema := "DATABASE()"
	if m.l.table.schema != "" {
		schema = unicodeText(m.l.table.schema)
	}
	query := fmt.Sprintf(mysqlColumnsSQL, unicodeText(m.l.table.name), schema)
	return listColumns(ctx, h, query, nil, func(c *column, engine string) {
		c.wide = strings.EqualFold(c.typ, "bigint")
		if !strings.EqualFold(engine, "InnoDB") {
			c.trouble = "must be an InnoDB table, which has transactions, is " + engine
		}
	})
}

func (m *mysql) create() []string {
	return []string{"CREATE TABLE IF NOT EXISTS " + m.l.table.quoted + ` (resource VARBINARY(512) NOT NULL PRIMARY KEY,
		token BIGINT NOT NULL, seq BIGINT NOT NULL, prev_token BIGINT NOT NULL, prev_seq BIGINT NOT NULL) ENGINE = InnoDB`}
}

// inTx sets what the next transaction may do to what it is anyway, which is refused inside
// one. With autocommit off there is always a transaction.
func (m *mysql) inTx(ctx context.Context, h Handle) (bool, error) {
	_, err := h.ExecContext(ctx, "SET TRANSACTION READ WRITE")
	if err != nil {
		if m.fault(err) == sqlerr.InTx {
			return true, nil
		}
		return false, err
	}
	var autocommit bool
	err = h.QueryRowContext(ctx, "SELECT @@autocommit").Scan(&autocommit)
	return !autocommit, err
}

func (m *mysql) server() string { return sqlerr.MySQLServer }

func (m *mysql) fault(err error) sqlerr.Kind { return sqlerr.MySQL(err) }

// bounds is true where whole seconds say the same.
func (m *mysql) bounds() bool { return m.mariadb.Load() && m.lockWait%time.Second == 0 }
