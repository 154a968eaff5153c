package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/sqlstore"
)

// Each account begins with this.
const initial = 1_000_000

// The statements fit all three databases. The ledger does not insist that each transfer be
// there once, so that the audit can find one that was made twice; a real one should.
var (
	drop = []string{
		`DROP TABLE IF EXISTS transfer_accounts`,
		`DROP TABLE IF EXISTS transfer_ledger`,
		`DROP TABLE IF EXISTS ` + fenceTable,
	}
	create = []string{
		`CREATE TABLE transfer_accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL)`,
		`CREATE TABLE transfer_ledger (id BIGINT, token BIGINT, source BIGINT NOT NULL,
			target BIGINT NOT NULL, amount BIGINT NOT NULL, PRIMARY KEY (id, token))`,
	}
)

const fenceTable = "transfer_fence"

// database is the bank's database.
type database struct {
	*sql.DB
	dialect sqlfence.Dialect
}

// openDatabase opens a postgres:// or mysql:// URL, or the SQLite file at a path.
func openDatabase(at string) (*database, error) {
	scheme, _, _ := strings.Cut(at, "://")
	switch scheme {
	case "postgres", "postgresql":
		db, err := sql.Open("pgx", at)
		return &database{db, sqlfence.PostgreSQL}, err
	case "mysql":
		u, err := url.Parse(at)
		if err == nil && u.RawQuery != "" {
			err = fmt.Errorf("%s: parameters are not understood", u.Redacted())
		}
		if err != nil {
			return nil, err
		}
		c := mysql.NewConfig()
		c.User, c.Net, c.Addr, c.DBName = u.User.Username(), "tcp", u.Host, strings.TrimPrefix(u.Path, "/")
		c.Passwd, _ = u.User.Password()
		db, err := sql.Open("mysql", c.FormatDSN())
		return &database{db, sqlfence.MySQL}, err
	}
	dsn, err := sqlstore.SQLiteDSN(at)
	if err != nil {
		return nil, err
	}
	db, err := sql.Open("sqlite", dsn)
	return &database{db, sqlfence.SQLite}, err
}

// bind writes the parameters as PostgreSQL wants them: $1, $2 instead of ?.
func (d *database) bind(query string) string {
	for n := 1; d.dialect == sqlfence.PostgreSQL && strings.Contains(query, "?"); n++ {
		query = strings.Replace(query, "?", "$"+strconv.Itoa(n), 1)
	}
	return query
}

// reset makes the tables anew, with so many accounts.
func (d *database) reset(ctx context.Context, accounts int64) error {
	for _, query := range append(drop, create...) {
		if _, err := d.ExecContext(ctx, query); err != nil {
			return err
		}
	}
	for id := range accounts {
		query := d.bind(`INSERT INTO transfer_accounts (id, balance) VALUES (?, ?)`)
		if _, err := d.ExecContext(ctx, query, id, initial); err != nil {
			return err
		}
	}
	return nil
}

// read reports whether the ledger has the order already, and else what is on its accounts.
func (d *database) read(ctx context.Context, tx *sql.Tx, o order) (made bool, from, to int64, err error) {
	err = tx.QueryRowContext(ctx, d.bind(`SELECT
		(SELECT count(*) FROM transfer_ledger WHERE id = ?) > 0,
		(SELECT balance FROM transfer_accounts WHERE id = ?),
		(SELECT balance FROM transfer_accounts WHERE id = ?)`), o.id, o.from, o.to).Scan(&made, &from, &to)
	return made, from, to, err
}

// write sets both balances and puts the order into the ledger.
func (d *database) write(ctx context.Context, tx *sql.Tx, o order, from, to int64, token fence.Token) error {
	const update = `UPDATE transfer_accounts SET balance = ? WHERE id = ?`
	if _, err := tx.ExecContext(ctx, d.bind(update), from, o.from); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, d.bind(update), to, o.to); err != nil {
		return err
	}
	const insert = `INSERT INTO transfer_ledger (id, token, source, target, amount) VALUES (?, ?, ?, ?, ?)`
	_, err := tx.ExecContext(ctx, d.bind(insert), o.id, int64(token), o.from, o.to, o.amount)
	return err
}

// audit is what the books say when all is over.
type audit struct {
	sum, expected int64
	missing       int // transfers that are not in the ledger
	doubled       int // transfers that are there more than once
	wrong         int // accounts whose balance does not follow from the ledger
}

func (a audit) ok() bool { return a == audit{sum: a.expected, expected: a.expected} }

// audit compares the accounts with the ledger, and the ledger with the orders.
func (d *database) audit(ctx context.Context, accounts, transfers int64) (a audit, err error) {
	times := make([]int, transfers)
	want := make([]int64, accounts)
	for id := range want {
		want[id] = initial
	}
	var o order
	err = d.each(ctx, `SELECT id, source, target, amount FROM transfer_ledger`, func() error {
		if o != orderOf(o.id, accounts) {
			return fmt.Errorf("the ledger has a transfer that nobody ordered: %+v", o)
		}
		times[o.id]++
		want[o.from] -= o.amount
		want[o.to] += o.amount
		return nil
	}, &o.id, &o.from, &o.to, &o.amount)
	if err != nil {
		return a, err
	}
	for _, n := range times {
		if n == 0 {
			a.missing++
		} else if n > 1 {
			a.doubled++
		}
	}
	a.expected = initial * accounts
	var id, balance int64
	err = d.each(ctx, `SELECT id, balance FROM transfer_accounts`, func() error {
		a.sum += balance
		if balance != want[id] {
			a.wrong++
		}
		return nil
	}, &id, &balance)
	return a, err
}

// each scans every row of a query and calls fn for it.
func (d *database) each(ctx context.Context, query string, fn func() error, columns ...any) error {
	rows, err := d.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(columns...); err != nil {
			return err
		}
		if err := fn(); err != nil {
			return err
		}
	}
	return rows.Err()
}
