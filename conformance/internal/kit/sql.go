package kit

import (
	"database/sql"
	"net/url"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/servertest"
)

// OpenPostgreSQL opens a pool of connections to the database of s by pgx. addr is where to
// connect, such as that of a proxy before s; empty means s itself. It is closed with the test.
func OpenPostgreSQL(t testing.TB, s *servertest.SQLServer, addr string) *sql.DB {
	t.Helper()
	return openSQL(t, "pgx", s.DSN(addr))
}

// OpenMariaDB is the same with go-sql-driver/mysql.
func OpenMariaDB(t testing.TB, s *servertest.SQLServer, addr string) *sql.DB {
	t.Helper()
	return openSQL(t, "mysql", s.DSN(addr))
}

// OpenSQLite opens the file by modernc.org/sqlite, in WAL mode, and makes it where there is
// none. Connections wait 5 s for each other's locks. Transactions begin deferred, as they do
// where nobody says otherwise.
func OpenSQLite(t testing.TB, path string) *sql.DB {
	t.Helper()
	return openSQL(t, "sqlite", (&url.URL{Scheme: "file", Path: path,
		RawQuery: "_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)"}).String())
}

func openSQL(t testing.TB, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}
