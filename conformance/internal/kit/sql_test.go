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

// TestCommitsAreDropped: the proxy knows the drivers' commits.
func TestCommitsAreDropped(t *testing.T) {
	postgres, mariadb := servertest.PostgreSQL(t), servertest.MariaDB(t)
	for name, open := range map[string]func(addr string) (*sql.DB, *servertest.SQLServer){
		"PostgreSQL": func(addr string) (*sql.DB, *servertest.SQLServer) { return OpenPostgreSQL(t, postgres, addr), postgres },
		"MariaDB":    func(addr string) (*sql.DB, *servertest.SQLServer) { return OpenMariaDB(t, mariadb, addr), mariadb },
	} {
		direct, s := open("")
		if _, err := direct.Exec("CREATE TABLE a (n bigint)"); err != nil {
			t.Fatal(err)
		}
		p := servertest.NewProxy(t, s.Addr())
		db, _ := open(p.Addr())
		commit := servertest.Containing("commit")
		for i, drop := range []func(func([]byte) bool) *servertest.Dropped{p.DropReplyTo, p.DropRequest, p.DropReplyTo, p.DropRequest} {
			d := drop(servertest.Only(1, commit))
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := tx.Exec("INSERT INTO a VALUES (1)"); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if err := tx.Commit(); err == nil || d.Count() != 1 {
				t.Errorf("%s: commit %d answers %v, %d dropped", name, i, err, d.Count())
			}
			d.Stop()
		}
		var n int
		if err := direct.QueryRow("SELECT count(*) FROM a").Scan(&n); err != nil || n != 2 {
			t.Errorf("%s: %d rows, %v; want the 2 whose reply was dropped", name, n, err)
		}
	}
}
