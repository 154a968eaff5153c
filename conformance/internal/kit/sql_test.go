package kit

import (
	"database/sql"
	"path/filepath"
	"testing"

	"github.com/holdfast-go/holdfast/servertest"
)

func TestOpen(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) *sql.DB{
		"PostgreSQL": func(t *testing.T) *sql.DB { return OpenPostgreSQL(t, servertest.PostgreSQL(t), "") },
		"PostgreSQL by a proxy": func(t *testing.T) *sql.DB {
			s := servertest.PostgreSQL(t)
			return OpenPostgreSQL(t, s, servertest.NewProxy(t, s.Addr()).Addr())
		},
		"MariaDB": func(t *testing.T) *sql.DB { return OpenMariaDB(t, servertest.MariaDB(t), "") },
		"MariaDB by a proxy": func(t *testing.T) *sql.DB {
			s := servertest.MariaDB(t)
			return OpenMariaDB(t, s, servertest.NewProxy(t, s.Addr()).Addr())
		},
		"SQLite": func(t *testing.T) *sql.DB { return OpenSQLite(t, filepath.Join(t.TempDir(), "a b?c#d%.db")) },
	} {
		t.Run(name, func(t *testing.T) {
			db := open(t)
			for _, q := range []string{"CREATE TABLE a (n bigint)", "INSERT INTO a VALUES (41), (1)"} {
				if _, err := db.Exec(q); err != nil {
					t.Fatalf("%s: %v", q, err)
				}
			}
			var n int
			if err := db.QueryRow("SELECT sum(n) FROM a").Scan(&n); err != nil || n != 42 {
				t.Errorf("sum is %d, %v; want 42", n, err)
			}
		})
	}
}
