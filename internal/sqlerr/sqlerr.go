// Package sqlerr reads the errors of database drivers without importing one: by the methods
// and fields that pgx, lib/pq, go-sql-driver/mysql, modernc.org/sqlite and mattn/go-sqlite3
// have, and by the words of SQLite where there is no code.
package sqlerr

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"reflect"
	"strings"
)

// Kind is what an error means.
type Kind int

const (
	Unknown     Kind = iota // no database said so, or one that did not say more
	Refused                 // the database refused, for a reason that is none of the others
	Retry                   // serialization failure or deadlock: the transaction may be run again
	LockWait                // a lock was not to be had in time
	Connection              // the connection broke or could not be made, or the server gave no definite answer
	NoTable                 // no such table
	NoColumn                // no such column, or one of another type
	OutOfRange              // a number that the column cannot hold
	BadValue                // a text that the type of the column does not take
	NoTx                    // a transaction is needed, and none is open
	InTx                    // a transaction is open already
	Raced                   // another has just made the same table
	Unavailable             // the server cannot write now: read-only, full, too many connections
)

// SQLState returns the code of PostgreSQL, and "" for other errors.
func SQLState(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// The servers, as people know them.
const (
	PostgreSQLServer = "PostgreSQL"
	MySQLServer      = "MySQL or MariaDB"
	NoServer         = "SQLite"
)

// Entry returns the rule that a database breaks which does not let the client in, or is another kind
// of server than the one that is meant, and what to do; empty for other errors.
func Entry(err error, server string) (rule string) {
	state, number := SQLState(err), MySQLNumber(err)
	switch {
	case state != "" && server != PostgreSQLServer:
		return "is " + PostgreSQLServer + " and not " + server + "; set the Dialect to what it is"
	case number != 0 && server != MySQLServer:
		return "is " + MySQLServer + " and not " + server + "; set the Dialect to what it is"
	case state == "28P01", state == "28000", number == 1045, number == 1698, number == 1130:
		return "refuses the user or its password; the server must know both, and let that user in from here"
	case state == "3D000", number == 1049:
		return "does not exist on the server; create it, or name another one"
	case number == 1044: // also for one that is missing, where the user may not see which there are
		return "does not exist, or its user has no grants on it; create it, and grant SELECT, INSERT and UPDATE, with CREATE where its tables are yet to be made"
	}
	return ""
}

// Plain is an error that people see: where a server of PostgreSQL has answered, in its words alone,
// since drivers put before them what all they have tried.
func Plain(err error) error {
	var said interface {
		error
		SQLState() string
	}
	if errors.As(err, &said) && said.SQLState() != "" {
		return &plain{said.Error(), err}
	}
	return err
}

type plain struct {
	text string
	err  error
}

func (e *plain) Error() string { return e.text }
func (e *plain) Unwrap() error { return e.err }

// PostgreSQL returns the kind of an error of a PostgreSQL driver.
func PostgreSQL(err error) Kind {
	if MySQLNumber(err) != 0 {
		return Refused
	}
	state := SQLState(err)
	if len(state) != 5 {
		return connection(err)
	}
	switch state {
	case "40001", "40P01":
		return Retry
	case "55P03":
		return LockWait
	case "42P01", "3F000":
		return NoTable
	case "42703", "42804", "42883":
		return NoColumn
	case "22003":
		return OutOfRange
	case "22P02", "22007", "22008", "22P05", "22021":
		return BadValue
	case "25P01":
		return NoTx
	case "42P07", "42P06", "42710", "23505": // a table is a type, too
		return Raced
	case "25006", "57P03":
		return Unavailable
	case "25P03", "25P04", "40003":
		return Connection
	}
	switch state[:2] {
	case "53": // out of disk, memory, connections
		return Unavailable
	case "08", "57", "58", "XX":
		return Connection
	}
	return Refused
}

// MySQLNumber returns the number of an error of MySQL or MariaDB, and 0 for other errors.
func MySQLNumber(err error) int {
	v, ok := field(err, "Number")
	if !ok || !v.CanUint() {
		return 0
	}
	return int(v.Uint())
}

// MySQL returns the kind of an error of a driver for MySQL or MariaDB.
func MySQL(err error) Kind {
	if SQLState(err) != "" {
		return Refused
	}
	switch n := MySQLNumber(err); n {
	case 0:
		return connection(err)
	case 1213, 1020, 1412, 3101: // 3101: a group's certification
		return Retry
	case 1205, 3572: // lock wait timeout, NOWAIT
		return LockWait
	case 1146, 1049, 1051:
		return NoTable
	case 1054:
		return NoColumn
	case 1264, 1690, 167:
		return OutOfRange
	case 1292, 1366, 1267:
		return BadValue
	case 1568:
		return InTx
	case 1050:
		return Raced
	case 1040, 1203, 1226, 1290, 1792, 1836, 1036, 1021, 1041, 1114,
		1037, 1038, 1135, 1206: // out of memory, threads, room for locks
		return Unavailable
	case 1030, 3100, // an error of the storage engine; a group's plugin has failed
		1053, 1080, 1105, 1152, 1158, 1159, 1160, 1161, 1180, 1184, 1194, 1317, 1927, 3024, 3169, 4031,
		1047, 1969: // not ready, which a cluster says; out of time, of MariaDB
		return Connection
	default:
		if n >= 2000 && n < 3000 || n >= 9000 && n < 10000 { // of a client, or a proxy
			return Connection
		}
	}
	return Refused
}

// StatementTimeout reports whether a server of PostgreSQL or MySQL has cancelled the statement,
// as for a limit on its time, so that it has written nothing.
func StatementTimeout(err error) bool {
	switch MySQLNumber(err) {
	case 1317, 1969, 3024:
		return true
	}
	return SQLState(err) == "57014"
}

// Result codes of SQLite, see https://www.sqlite.org/rescode.html
const (
	SQLiteError        = 1
	SQLitePerm         = 3
	SQLiteBusy         = 5
	SQLiteLocked       = 6
	SQLiteNoMem        = 7
	SQLiteReadonly     = 8
	SQLiteInterrupt    = 9
	SQLiteIOErr        = 10
	SQLiteCorrupt      = 11
	SQLiteFull         = 13
	SQLiteCantOpen     = 14
	SQLiteProtocol     = 15
	SQLiteSchema       = 17
	SQLiteMismatch     = 20
	SQLiteAuth         = 23
	SQLiteNotADB       = 26
	sqliteBusySnapshot = 517
)

var sqliteWords = []struct {
	text string
	code int
}{
	{"no such table", SQLiteError},
	{"no such column", SQLiteError},
	{"syntax error", SQLiteError},
	{"within a transaction", SQLiteError},
	{"database is locked", SQLiteBusy},
	{"database table is locked", SQLiteLocked},
	{"readonly database", SQLiteReadonly},
	{"disk i/o error", SQLiteIOErr},
	{"disk image is malformed", SQLiteCorrupt},
	{"disk is full", SQLiteFull},
	{"unable to open database", SQLiteCantOpen},
	{"locking protocol", SQLiteProtocol},
	{"not a database", SQLiteNotADB},
}

// SQLiteCode returns the primary result code of an error of SQLite, and 0 for other errors.
func SQLiteCode(err error) int { return sqliteExtended(err) & 0xff }

func sqliteExtended(err error) int {
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		return coded.Code()
	}
	if v, ok := field(err, "ExtendedCode"); ok && v.CanInt() {
		return int(v.Int())
	}
	text := strings.ToLower(err.Error())
	for _, w := range sqliteWords {
		if strings.Contains(text, w.text) {
			return w.code
		}
	}
	return 0
}

// SQLiteBusyNow reports whether others keep SQLite from running the statement now.
func SQLiteBusyNow(err error) bool {
	switch SQLiteCode(err) {
	case SQLiteBusy, SQLiteLocked, SQLiteProtocol, SQLiteSchema:
		return true
	}
	return false
}

// SQLiteNoTable reports whether err says that a table is missing.
func SQLiteNoTable(err error) bool {
	return SQLiteCode(err) == SQLiteError && strings.Contains(err.Error(), "no such table")
}

// SQLite returns the kind of an error of a driver for SQLite.
func SQLite(err error) Kind {
	if SQLState(err) != "" || MySQLNumber(err) != 0 {
		return Refused
	}
	code := sqliteExtended(err)
	if code == sqliteBusySnapshot {
		return Retry
	}
	if SQLiteBusyNow(err) {
		return LockWait
	}
	switch code & 0xff {
	case 0:
		return connection(err)
	case SQLiteError:
		return sqliteRefusal(err)
	case SQLiteMismatch:
		return BadValue
	case SQLiteIOErr, SQLiteInterrupt:
		return Connection
	case SQLiteFull, SQLiteReadonly, SQLiteCantOpen, SQLiteNoMem:
		return Unavailable
	}
	if strings.Contains(err.Error(), "cannot store REAL value") {
		return OutOfRange
	}
	return Refused
}

// sqliteRefusal reads the words of an error that has the most general code.
func sqliteRefusal(err error) Kind {
	text := err.Error()
	switch {
	case strings.Contains(text, "no such table"), strings.Contains(text, "unknown database"):
		return NoTable
	case strings.Contains(text, "no such column"):
		return NoColumn
	case strings.Contains(text, "within a transaction"):
		return InTx
	case strings.Contains(text, "no transaction is active"):
		return NoTx
	case strings.Contains(text, "already exists"):
		return Raced
	case strings.Contains(text, "integer overflow"):
		return OutOfRange
	}
	return Refused
}

// connection knows what drivers say of a connection that has ended: pgx, and go-sql-driver.
func connection(err error) Kind {
	var network net.Error
	if text := err.Error(); strings.Contains(text, "conn closed") || strings.Contains(text, "invalid connection") {
		return Connection
	}
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) || errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) || errors.As(err, &network) {
		return Connection
	}
	return Unknown
}

// field returns the field of the first struct in the tree of err that has it.
func field(err error, name string) (v reflect.Value, ok bool) {
	for err != nil {
		if v := reflect.Indirect(reflect.ValueOf(err)); v.Kind() == reflect.Struct {
			if f := v.FieldByName(name); f.IsValid() {
				return f, true
			}
		}
		switch u := err.(type) {
		case interface{ Unwrap() error }:
			err = u.Unwrap()
		case interface{ Unwrap() []error }:
			for _, e := range u.Unwrap() {
				if v, ok := field(e, name); ok {
					return v, true
				}
			}
			return reflect.Value{}, false
		default:
			return reflect.Value{}, false
		}
	}
	return reflect.Value{}, false
}
