package bench

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"strings"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// engine is a database and how a user reaches it.
type engine struct {
	name, driver, params string
	dialect              sqlfence.Dialect
	start                func(testing.TB, ...servertest.SQLOption) *servertest.SQLServer
}

// By default the driver of MariaDB prepares each statement anew, so that it takes two round
// trips; with interpolateParams it takes one.
var engines = []engine{
	{"PostgreSQL", "pgx", "", sqlfence.PostgreSQL, servertest.PostgreSQL},
	{"MariaDB", "mysql", "", sqlfence.MySQL, servertest.MariaDB},
	{"MariaDB1", "mysql", "?interpolateParams=true", sqlfence.MySQL, servertest.MariaDB},
}

// statements are those of one transaction, on accounts of a table.
type statements func(tx *sql.Tx, from, to string) error

// transaction runs fn in a transaction, for the holder of a lock on an account.
type transaction func(ctx context.Context, account string, t fence.Token, fn func(*sql.Tx) error) error

// accounts is how many a table has.
const accounts = 128

func account(n int) string { return "account/" + strconv.Itoa(n%accounts) }

// BenchmarkGuard compares fenced transactions with bare ones of the same statements. Every
// commit reaches the disk, and every transaction is the first of a new token.
func BenchmarkGuard(b *testing.B) {
	for _, e := range engines {
		b.Run(e.name, func(b *testing.B) {
			db, err := sql.Open(e.driver, e.start(b, servertest.Durable()).DSN("")+e.params)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { db.Close() })
			b.Run("Transfer", func(b *testing.B) { once(b, func() { guarded(b, e, db, "transfer", e.transfer) }) })
			b.Run("Update", func(b *testing.B) { once(b, func() { guarded(b, e, db, "update", e.update) }) })
		})
	}
}

// guarded measures one kind of work: bare, and under the guard in both of its layouts.
func guarded(b *testing.B, e engine, db *sql.DB, work string, do func(table string) statements) {
	tables := map[string]string{}
	for _, name := range []string{"bare", "column", "table"} {
		tables[name] = work + "_" + name
		newAccounts(b, db, tables[name])
	}
	column := &sqlfence.Column{Table: tables["column"], ID: "id", Token: "token", Seq: "seq"}
	s := sequential(b, []contender{
		e.contender("bare", bare(e, db), do(tables["bare"])),
		e.contender("column", newGuard(b, db, sqlfence.Options{Dialect: e.dialect, Column: column}).Tx, do(tables["column"])),
		e.contender("table", newGuard(b, db, sqlfence.Options{Dialect: e.dialect, Table: work + "_fence"}).Tx, do(tables["table"])),
	})
	line := "Guard/" + e.name + "/" + work
	for _, name := range []string{"column", "table"} {
		figure(b, line+"/"+name, "p50/bare", s.ratios(name, "bare", cycleTime)...)
		figure(b, line+"/"+name, "p50-us", s.values(name, cycleTime)...)
	}
	figure(b, line+"/bare", "p50-us", s.values("bare", cycleTime)...)
}

func (e engine) contender(name string, run transaction, do statements) contender {
	n := 0
	return pair(name, func(string) (func() error, error) {
		n++
		from, to := account(n), account(n+1)
		err := run(background, from, fence.Token(n), func(tx *sql.Tx) error { return do(tx, from, to) })
		return func() error { return nil }, err
	})
}

// bare is how the transaction is written without a guard.
func bare(e engine, db *sql.DB) transaction {
	var o *sql.TxOptions
	if e.dialect == sqlfence.PostgreSQL {
		o = &sql.TxOptions{Isolation: sql.LevelReadCommitted} // as the guard's
	}
	return func(ctx context.Context, _ string, _ fence.Token, fn func(*sql.Tx) error) error {
		tx, err := db.BeginTx(ctx, o)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := fn(tx); err != nil {
			return err
		}
		return tx.Commit()
	}
}

// transfer moves money: it reads two balances and writes two.
func (e engine) transfer(table string) statements {
	read, write := e.sql("SELECT balance FROM %s WHERE id = ?", table), e.sql("UPDATE %s SET balance = ? WHERE id = ?", table)
	return func(tx *sql.Tx, from, to string) error {
		var a, b int64
		if err := tx.QueryRowContext(background, read, from).Scan(&a); err != nil {
			return err
		}
		if err := tx.QueryRowContext(background, read, to).Scan(&b); err != nil {
			return err
		}
		if _, err := tx.ExecContext(background, write, a-1, from); err != nil {
			return err
		}
		_, err := tx.ExecContext(background, write, b+1, to)
		return err
	}
}

// update is the smallest work: one statement.
func (e engine) update(table string) statements {
	write := e.sql("UPDATE %s SET balance = balance + ? WHERE id = ?", table)
	return func(tx *sql.Tx, from, _ string) error {
		_, err := tx.ExecContext(background, write, 1, from)
		return err
	}
}

// sql writes a statement with the parameters of the engine.
func (e engine) sql(format, table string) string {
	s := fmt.Sprintf(format, table)
	if e.dialect != sqlfence.PostgreSQL {
		return s
	}
	for i := 1; strings.Contains(s, "?"); i++ {
		s = strings.Replace(s, "?", "$"+strconv.Itoa(i), 1)
	}
	return s
}

func newGuard(b *testing.B, db *sql.DB, o sqlfence.Options) *sqlfence.Guard {
	b.Helper()
	g, err := sqlfence.New(db, o)
	if err == nil {
		err = g.EnsureSchema(background)
	}
	if err != nil {
		b.Fatal(err)
	}
	return g
}

// newAccounts makes the table, all of them with the columns of a guard.
func newAccounts(b *testing.B, db *sql.DB, table string) {
	b.Helper()
	statements := []string{"CREATE TABLE " + table + " (id varchar(64) PRIMARY KEY, balance bigint NOT NULL, token bigint, seq bigint)"}
	for i := range accounts {
		statements = append(statements, fmt.Sprintf("INSERT INTO %s (id, balance) VALUES ('%s', 1000)", table, account(i)))
	}
	for _, s := range statements {
		if _, err := db.Exec(s); err != nil {
			b.Fatalf("%s: %v", s, err)
		}
	}
}
