package sqlerr

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
)

// The shapes of drivers' errors: pgx and lib/pq, go-sql-driver/mysql, modernc.org/sqlite, and
// mattn/go-sqlite3, whose errors are values.
type (
	pgError    struct{ Code string }
	mysqlError struct {
		Number   uint16
		SQLState [5]byte
		Message  string
	}
	modernError int
	errNo       int
	mattnError  struct {
		Code         errNo
		ExtendedCode errNo
		err          string
	}
)

func (e *pgError) Error() string     { return "ERROR: pg (SQLSTATE " + e.Code + ")" }
func (e *pgError) SQLState() string  { return e.Code }
func (e *mysqlError) Error() string  { return fmt.Sprintf("Error %d", e.Number) }
func (e modernError) Error() string  { return fmt.Sprintf("SQL logic error (%d)", int(e)) }
func (e modernError) Code() int      { return int(e) }
func (e mattnError) Error() string   { return e.err }
func my(n uint16) error              { return &mysqlError{Number: n} }
func pg(code string) error           { return &pgError{code} }
func mattn(code int, s string) error { return mattnError{errNo(code & 0xff), errNo(code), s} }
func wrapped(err error) error        { return fmt.Errorf("a layer: %w", err) }
func joined(err error) error         { return errors.Join(errors.New("another"), wrapped(err)) }
func text(s string) error            { return errors.New(s) }
func refused() error                 { return &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED} }

func TestKinds(t *testing.T) {
	for i, tt := range []struct {
		kind func(error) Kind
		err  error
		want Kind
	}{
		{PostgreSQL, pg("40001"), Retry}, {PostgreSQL, pg("40P01"), Retry}, {PostgreSQL, pg("55P03"), LockWait},
		{PostgreSQL, pg("42P01"), NoTable}, {PostgreSQL, pg("42703"), NoColumn}, {PostgreSQL, pg("22003"), OutOfRange},
		{PostgreSQL, pg("22P02"), BadValue}, {PostgreSQL, pg("25P01"), NoTx}, {PostgreSQL, pg("23505"), Raced}, {PostgreSQL, pg("42710"), Raced},
		{PostgreSQL, pg("57P01"), Connection}, {PostgreSQL, pg("08006"), Connection}, {PostgreSQL, pg("25P03"), Connection},
		{PostgreSQL, pg("25006"), Unavailable}, {PostgreSQL, pg("53000"), Unavailable}, {PostgreSQL, pg("53400"), Unavailable}, {PostgreSQL, pg("57P03"), Unavailable}, {PostgreSQL, pg("23503"), Refused},
		{PostgreSQL, pg("XX000"), Connection}, {PostgreSQL, pg("40003"), Connection}, {PostgreSQL, pg(""), Unknown},
		{PostgreSQL, text("conn closed"), Connection}, {PostgreSQL, text("what"), Unknown},

		{MySQL, my(1213), Retry}, {MySQL, my(1020), Retry}, {MySQL, my(1205), LockWait}, {MySQL, my(1146), NoTable},
		{MySQL, my(1054), NoColumn}, {MySQL, my(1264), OutOfRange}, {MySQL, my(1292), BadValue}, {MySQL, my(1568), InTx},
		{MySQL, my(1050), Raced}, {MySQL, my(1053), Connection}, {MySQL, my(1180), Connection}, {MySQL, my(1062), Refused},
		{MySQL, my(1969), Connection}, {MySQL, my(1047), Connection}, {MySQL, my(2013), Connection}, {MySQL, my(9001), Connection},
		{MySQL, my(1036), Unavailable}, {MySQL, my(1135), Unavailable}, {MySQL, my(1206), Unavailable}, {MySQL, my(1030), Connection}, {MySQL, my(3100), Connection},
		{MySQL, my(3101), Retry}, {MySQL, my(1226), Unavailable}, {MySQL, my(1999), Refused},
		{MySQL, my(1290), Unavailable}, {MySQL, text("invalid connection"), Connection}, {MySQL, text("what"), Unknown},

		{SQLite, modernError(5), LockWait}, {SQLite, modernError(517), Retry}, {SQLite, modernError(261), LockWait},
		{SQLite, modernError(787), Refused}, {SQLite, modernError(10), Connection}, {SQLite, modernError(3338), Connection},
		{SQLite, modernError(8), Unavailable}, {SQLite, modernError(13), Unavailable}, {SQLite, modernError(1), Refused},
		{SQLite, mattn(5, "database is locked"), LockWait}, {SQLite, mattn(517, "database is locked"), Retry},
		{SQLite, mattn(1, "no such table: x"), NoTable}, {SQLite, mattn(1, "no such column: x"), NoColumn},
		{SQLite, mattn(1, "cannot start a transaction within a transaction"), InTx},
		{SQLite, mattn(1, "cannot commit - no transaction is active"), NoTx},
		{SQLite, text("sqlite3: database is locked"), LockWait}, {SQLite, text("no such table: x"), NoTable},
		{SQLite, text("what"), Unknown},
	} {
		for _, err := range []error{tt.err, wrapped(tt.err), joined(tt.err)} {
			if got := tt.kind(err); got != tt.want {
				t.Errorf("%d: %v is %v, want %v", i, err, got, tt.want)
			}
		}
	}
	for name, kind := range map[string]func(error) Kind{"PostgreSQL": PostgreSQL, "MySQL": MySQL, "SQLite": SQLite} {
		for _, err := range []error{driver.ErrBadConn, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, refused(), context.DeadlineExceeded} {
			if got := kind(wrapped(err)); got != Connection {
				t.Errorf("%s: %v is %v, want %v", name, err, got, Connection)
			}
		}
		if got := kind(context.Canceled); got != Unknown {
			t.Errorf("%s: %v is %v, want %v", name, context.Canceled, got, Unknown)
		}
	}
}

func TestStatementTimeout(t *testing.T) {
	for _, err := range []error{pg("57014"), wrapped(my(1969)), joined(my(3024)), my(1317)} {
		if !StatementTimeout(err) {
			t.Errorf("%v is none", err)
		}
	}
	for _, err := range []error{pg("57P01"), pg("55P03"), my(1205), modernError(9), text("what")} {
		if StatementTimeout(err) {
			t.Errorf("%v is one", err)
		}
	}
}

// A database that lets nobody in, or is another one than is meant, breaks a rule that says what to do.
func TestEntry(t *testing.T) {
	for _, c := range []struct {
		err    error
		server string
		kind   func(error) Kind
		says   string // empty: it is no such error
	}{
		{pg("28P01"), PostgreSQLServer, PostgreSQL, "user or its password"}, {my(1045), MySQLServer, MySQL, "user or its password"},
		{my(1698), MySQLServer, MySQL, "user or its password"}, {my(1130), MySQLServer, MySQL, "let that user in"},
		{pg("3D000"), PostgreSQLServer, PostgreSQL, "create it"}, {my(1049), MySQLServer, nil, "create it"}, {my(1044), MySQLServer, MySQL, "grant SELECT"},
		{pg("42703"), MySQLServer, MySQL, "is PostgreSQL and not MySQL or MariaDB; set the Dialect"},
		{pg("42601"), NoServer, SQLite, "is PostgreSQL and not SQLite"}, {my(1064), NoServer, SQLite, "is MySQL or MariaDB and not SQLite"},
		{my(1064), PostgreSQLServer, PostgreSQL, "is MySQL or MariaDB and not PostgreSQL"},
		{pg("42703"), PostgreSQLServer, nil, ""}, {my(1064), MySQLServer, nil, ""}, {modernError(5), NoServer, nil, ""}, {text("x"), MySQLServer, nil, ""},
	} {
		for _, err := range []error{c.err, wrapped(c.err), joined(c.err)} {
			if got := Entry(err, c.server); (got == "") != (c.says == "") || !strings.Contains(got, c.says) {
				t.Errorf("%v, where %s is meant: %q, want %q", err, c.server, got, c.says)
			}
			if c.kind != nil && c.kind(err) != Refused {
				t.Errorf("%v, where %s is meant: kind %v", err, c.server, c.kind(err))
			}
		}
	}
}

// What a driver says of the attempts before is left out, what the error is stays.
func TestPlain(t *testing.T) {
	err := Plain(fmt.Errorf("tried TLS, then: %w", pg("28P01")))
	if err.Error() != pg("28P01").Error() || SQLState(err) != "28P01" {
		t.Errorf("%v", err)
	}
	for _, err := range []error{wrapped(my(1045)), text("x")} {
		if Plain(err) != err {
			t.Errorf("%v became %v", err, Plain(err))
		}
	}
}
