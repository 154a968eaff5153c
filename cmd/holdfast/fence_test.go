package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func TestFileMarksConform(t *testing.T) {
	fencetest.Run(t, fencetest.Harness{
		New: func(t testing.TB) fence.Guard {
			return fileMarks{filepath.Join(t.TempDir(), "marks"), time.Minute}
		},
		Reopen: func(_ testing.TB, g fence.Guard) fence.Guard { return g.(fileMarks) },
	})
}

func TestMarksConform(t *testing.T) {
	fencetest.Run(t, fencetest.Harness{
		New: func(t testing.TB) fence.Guard {
			return mustOpenMarks(t, filepath.Join(t.TempDir(), "marks"), marksOptions{shared: true})
		},
	})
}

func marksAt(scheme string, r redisSpec) marksSpec {
	return marksSpec{storeSpec: storeSpec{scheme: scheme, field: "marks", redisSpec: r}}
}

func TestParseMarks(t *testing.T) {
	file := func(scheme, path string) marksSpec {
		return marksSpec{storeSpec: storeSpec{scheme: scheme, field: "marks", path: path}}
	}
	for _, c := range []struct {
		raw   string
		want  marksSpec
		shown string
	}{
		{"file:/var/lib/marks", file("file", "/var/lib/marks"), ""},
		{"file:my marks%3F", file("file", "my marks?"), ""},
		{"file:///var/lib/marks", file("file", "/var/lib/marks"), "file:/var/lib/marks"},
		{"sqlite:/x.db", file("sqlite", "/x.db"), ""},
		{"sqlite:/x%3F.db?table=t", func() marksSpec { s := file("sqlite", "/x?.db"); s.table = "t"; return s }(), "sqlite:/x%3F.db"},
		{"sqlite:/x.db?column=doc.id.last", func() marksSpec { s := file("sqlite", "/x.db"); s.column = &columnRef{"doc", "id", "last"}; return s }(), "sqlite:/x.db"},
		{"postgres://h/d", marksAt("postgres", redisSpec{addrs: "h:5432", database: "d"}), "postgres://h:5432/d"},
		{"postgresql://bob:p%40w@h:7/d?column=app.doc.id.last&sslmode=require", func() marksSpec {
			s := marksAt("postgres", redisSpec{addrs: "h:7", database: "d", user: "bob", password: "p@w"})
			s.column, s.query = &columnRef{"app.doc", "id", "last"}, url.Values{"sslmode": {"require"}}
			return s
		}(), "postgres://h:7/d"},
		{"postgres://bob@a,b:7/d?password-file=/pw", marksAt("postgres", redisSpec{addrs: "a:5432,b:7", database: "d", user: "bob", passwordFile: "/pw"}), "postgres://a:5432,b:7/d"},
		{"postgres:///d", marksAt("postgres", redisSpec{database: "d"}), ""},
		{"mysql://bob:pw@[::1]/d", marksAt("mysql", redisSpec{addrs: "[::1]:3306", database: "d", user: "bob", password: "pw"}), "mysql://[::1]:3306/d"},
		{"mysql://h/d?tls=skip-verify&table=s.t", func() marksSpec {
			s := marksAt("mysql", redisSpec{addrs: "h:3306", database: "d"})
			s.tls, s.table = "skip-verify", "s.t"
			return s
		}(), "mysql://h:3306/d"},
		{"mysql://h/d?tls-ca=/ca&tls-cert=/c&tls-key=/k&tls-server-name=n", marksAt("mysql", redisSpec{addrs: "h:3306", database: "d", ca: "/ca", cert: "/c", key: "/k", serverName: "n"}), "mysql://h:3306/d"},
		{"redis://u:pw@h/3", marksAt("redis", redisSpec{addrs: "h:6379", user: "u", password: "pw", db: 3}), "redis://h:6379/3"},
		{"rediss+cluster://a,b?prefix=x%3A&tls-ca=/ca", func() marksSpec {
			s := marksAt("rediss+cluster", redisSpec{addrs: "a:6379,b:6379", ca: "/ca"})
			s.prefix = "x:"
			return s
		}(), "rediss+cluster://a:6379,b:6379"},
	} {
		got, err := parseMarks(c.raw)
		if err != nil {
			t.Errorf("%s: %v", c.raw, err)
			continue
		}
		if len(got.query) == 0 {
			got.query = nil
		}
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s:\n got %+v\nwant %+v", c.raw, got, c.want)
		}
		if want := c.shown; want != "" && got.shown() != want {
			t.Errorf("%s is shown as %s, want %s", c.raw, got.shown(), want)
		}
	}
}

func TestParseMarksRefuses(t *testing.T) {
	for _, c := range []struct{ raw, value, rule string }{
		{"", "invalid marks", "must be a URL"},
		{"/var/lib/marks", `"/var/lib/marks"`, "must be a URL: file:PATH"},
		{"etcd://h", `"etcd://h"`, "unknown scheme"},
		{"host=h password=hunter2", `"host=h ***"`, "must be a URL"},
		{"sqlite:/x?Password=hunter2", `"sqlite:/x?***"`, "does not exist"},
		{"file:", `"file:"`, "names no file"},
		{"file://h/x", `"file://h/x"`, "write file:PATH"},
		{"file:/x?table=t", `"file:/x?table=t"`, "no parameters"},
		{"file:100%", `"file:100%"`, "%25"},
		{"sqlite:x%00y", `"sqlite:x%00y"`, "no NUL"},
		{"sqlite:/x?tabel=t", "sqlite:/x", "there are table and column"},
		{"sqlite:/x?tls=true", "sqlite:/x", "there are table and column"},
		{"sqlite:/x?table=a&table=b", "sqlite:/x", "more than once"},
		{"sqlite:/x?table=", "sqlite:/x", "is empty"},
		{"sqlite:/x?table=a%00", "sqlite:/x", "NUL"},
		{"sqlite:/x?table=a&column=b.c.d", "sqlite:/x", "give one"},
		{"sqlite:/x?column=b.c", "sqlite:/x", "TABLE.ID.TOKEN"},
		{"sqlite:/x?column=b..d", "sqlite:/x", "TABLE.ID.TOKEN"},
		{"sqlite:/x?column=%zz", "sqlite:/x", "cannot be read"},
		{"postgres:h", `"postgres:h"`, "names no host"},
		{"postgres://u:hunter2@h:x/d", `"postgres://***@h:x/d"`, "not a valid URL"},
		{"postgres://u:hunter2@h:99999/d", `"postgres://***@h:99999/d"`, "1 to 65535"},
		{"postgres://u:12/hunter2@h/d", `"postgres://***@h/d"`, "%2F"},
		{"postgres://u:12#hunter2@h/d", `"postgres://***"`, "%23"},
		{"postgres://h/d#hunter2", `"postgres://h/d"`, "fragment"},
		{"postgres://h/a/b", `"postgres://h/a/b"`, "name of a database"},
		{"postgres://u:hunter2@h/d?password-file=x", `"postgres://***@h/d"`, "give one"},
		{"postgres://h/d?tls-ca=x", `"postgres://h/d"`, "sslrootcert"},
		{"mysql://h", `"mysql://h"`, "names no database"},
		{"mysql:///d", `"mysql:///d"`, "names no host"},
		{"mysql://a,b/d", `"mysql://a,b/d"`, "comma"},
		{"mysql://u:hunter2@h/d?allowAllFiles=true", `"mysql://***@h/d"`, "does not exist"},
		{"mysql://h/d?tls=maybe", `"mysql://h/d"`, "tls must be"},
		{"mysql://h/d?tls-cert=x", `"mysql://h/d"`, "belong together"},
		{"mysql://h/d?tls=false&tls-ca=x", `"mysql://h/d"`, "tls=false"},
		{"mysql://h/d?tls=skip-verify&tls-ca=x", `"mysql://h/d"`, "leave tls=skip-verify out"},
		{"redis://u:hunter2@h:x", `"redis://***@h:x"`, "not a valid URL"},
		{"redis://h?max-ttl=5s", `"redis://h"`, "belong to locks"},
		{"redis://h?table=x", `"redis://h"`, `no parameter "table"`},
		{"redis://h?prefix=", `"redis://h"`, "prefix must be"},
		{"redis://h?prefix=a&prefix=b", `"redis://h"`, "prefix must be"},
		{"redis://h?prefix", `"redis://h"`, "prefix must be"},
	} {
		_, err := parseMarks(c.raw)
		if err == nil {
			t.Errorf("%q is taken", c.raw)
			continue
		}
		text := err.Error()
		if !errors.Is(err, store.ErrInvalid) || !strings.Contains(text, c.value) || !strings.Contains(text, c.rule) {
			t.Errorf("%q: %v; want invalid marks that say %s and %s", c.raw, err, c.value, c.rule)
		}
		if strings.Contains(text, "hunter2") || strings.Contains(text, "\n") {
			t.Errorf("%q: shows the password, or more than a line: %s", c.raw, text)
		}
	}
}

// No refusal, nor what is shown of marks, has the password in it, whatever its characters; and
// what is opened by no I/O says no more.
func FuzzMarksURL(f *testing.F) {
	for _, s := range []string{
		"file:/a b", "sqlite:///x?table=t", "sqlite:/a%3Fb?column=a.b.c", "postgres://u:p%40w@h:1/d?sslmode=disable&table=a", "postgresql://a,[::1]:7/d",
		"mysql://u:pw@h/d?tls-ca=%2Fx&column=s.t.id.tok", "redis://u:p@h/3?prefix=f%3A", "rediss+sentinel://h,i/m?sentinel-password=x&prefix=y", "postgres:///d",
		"mysql://u:p@[fe80::1%25eth0]/d", "postgres://h?user=a&password=b",
	} {
		f.Add(s, "hunter2")
	}
	const mark = "S3cr3t~"
	f.Fuzz(func(t *testing.T, raw, password string) {
		s, err := parseMarks(raw)
		switch {
		case err != nil && (!errors.Is(err, store.ErrInvalid) || strings.Contains(err.Error(), "\n")):
			t.Errorf("%q: %v is no one-line invalid error", raw, err)
		case err == nil:
			again, err := parseMarks(s.shown())
			if err != nil || again.shown() != s.shown() {
				t.Errorf("%q is shown as %q, which is %q, %v", raw, s.shown(), again.shown(), err)
			}
		}
		for _, form := range []string{"postgres://u:%s@h/d", "postgresql://:%s@h:1,i/d?table=x", "mysql://u:%s@h/d", "mysql://u:%s@h/d?tls=true", "redis://u:%s@h?prefix=a",
			"postgres://h/d?password=%s", "sqlite:u:%s@h", "u:%s@h"} {
			written := fmt.Sprintf(form, password+mark)
			s, err := parseMarks(written)
			if err == nil && strings.Contains(form, "%s@") {
				if s.scheme != "sqlite" && strings.Contains(s.shown(), mark) {
					t.Errorf("%q: is shown as %q", written, s.shown())
				}
				if s.scheme == "postgres" {
					_, err = s.openPostgres()
				}
			}
			if err != nil && strings.Contains(err.Error(), mark) {
				t.Errorf("%q: the refusal shows the password: %v", written, err)
			}
		}
	})
}

// fenceOn runs claim and check on the marks of a URL, which has no mark of the resource yet.
func fenceOn(t *testing.T, marks, resource string) {
	t.Helper()
	t.Setenv(marksVariable, marks)
	for _, c := range []struct {
		verb, token string
		code        int
		says        string
	}{
		{"claim", "9007199254740993", 0, ""},
		{"check", "9007199254740993", 0, ""},
		{"check", "9007199254740994", 125, "not claimed; holdfast fence claim comes first"},
		{"check", "9007199254740992", 1, "stale fencing token 9007199254740992"},
		{"claim", "9007199254740992", 1, "9007199254740993 has been seen"},
		{"claim", "9007199254740993", 0, ""},
		{"claim", "9223372036854775807", 0, ""},
		{"claim", "9007199254740993", 1, "9223372036854775807 has been seen"},
	} {
		code, stdout, stderr := verb(t, "fence", c.verb, resource, c.token)
		if code != c.code || stdout != "" || !strings.Contains(stderr, c.says) || c.says == "" && stderr != "" || strings.Count(stderr, "\n") > 1 {
			t.Errorf("%s: fence %s %s: exit code %d, %q%q; want %d, %q", hideSecrets(marks), c.verb, c.token, code, stdout, stderr, c.code, c.says)
		}
		if strings.Contains(stderr, odd) || strings.Contains(stderr, oddEscaped) {
			t.Errorf("shows the password: %s", stderr)
		}
	}
}

func mustExec(t *testing.T, db *sql.DB, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := db.ExecContext(t.Context(), s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

func openDB(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func TestFencePostgres(t *testing.T) {
	s := servertest.PostgreSQL(t)
	db := openDB(t, "pgx", s.DSN(""))
	mustExec(t, db, "CREATE SCHEMA app", "CREATE TABLE app.doc (id text PRIMARY KEY, last bigint)", "INSERT INTO app.doc VALUES ('d', NULL)",
		"CREATE ROLE bob LOGIN SUPERUSER PASSWORD '"+strings.ReplaceAll(odd, "'", "''")+"'")
	fenceOn(t, s.URL(""), "r")
	fenceOn(t, s.URL("")+"&table=app.mine", "r")
	fenceOn(t, s.URL("")+"&column=app.doc.id.last", "d")
	fenceOn(t, fmt.Sprintf("postgresql://bob:%s@%s/holdfast?sslmode=disable", oddEscaped, s.Addr()), "s")
	fenceOn(t, fmt.Sprintf("postgres://bob@%s/holdfast?sslmode=disable&password-file=%s", s.Addr(), param(written(t, odd+"\n"))), "u")
	fenceFails(t, s.URL("")+"&column=app.doc.id.last", "none", 125, "no such resource")
	fenceFails(t, s.URL("")+"&column=app.doc.id.gone", "d", 125, "gone")
	fenceFails(t, strings.Replace(s.URL(""), "/holdfast", "/nobody", 1), "r", 125, "nobody")
}

func TestFenceMariaDB(t *testing.T) {
	s := servertest.MariaDB(t)
	db := openDB(t, "mysql", s.DSN(""))
	mustExec(t, db, "CREATE TABLE doc (id varbinary(64) PRIMARY KEY, last bigint)", "INSERT INTO doc VALUES ('d', NULL)",
		"CREATE USER bob IDENTIFIED BY '"+strings.ReplaceAll(odd, "'", "''")+"'", "GRANT ALL ON *.* TO bob")
	fenceOn(t, s.URL(""), "r")
	fenceOn(t, s.URL("")+"?column=doc.id.last", "d")
	fenceOn(t, s.URL("")+"?table=mine&tls=preferred", "r")
	fenceOn(t, fmt.Sprintf("mysql://bob:%s@%s/holdfast", oddEscaped, s.Addr()), "s")
	fenceOn(t, fmt.Sprintf("mysql://bob@%s/holdfast?password-file=%s", s.Addr(), param(written(t, odd))), "u")
	fenceFails(t, s.URL("")+"?tls=true", "r", 125, "TLS")
	fenceFails(t, fmt.Sprintf("mysql://bob:hunter2@%s/holdfast", s.Addr()), "r", 125, "Access denied")
}

func TestFenceRedis(t *testing.T) {
	certs := servertest.TLS(t)
	s := servertest.Redis(t, servertest.WithTLS(certs))
	withUser(t, s)
	fenceOn(t, "redis://"+s.Addr(), "r")
	fenceOn(t, "redis://"+s.Addr()+"/3?prefix=mine%3A", "r")
	fenceOn(t, fmt.Sprintf("redis://bob:%s@%s", oddEscaped, s.Addr()), "s")
	fenceOn(t, fmt.Sprintf("rediss://%s?tls-ca=%s", s.TLSAddr(), param(certs.CA)), "t")
	fenceFails(t, fmt.Sprintf("redis://bob:hunter2@%s", s.Addr()), "r", 125, "WRONGPASS")
	fenceFails(t, "redis://127.0.0.1:1", "r", 125, "check that --marks (or HOLDFAST_MARKS) names servers")
	g, err := redisfence.New(func(context.Context, string, []string, []string) (any, error) { return nil, nil }, redisfence.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Do("SET", g.MarkKey("bad"), "08"); err != nil {
		t.Fatal(err)
	}
	fenceFails(t, "redis://"+s.Addr(), "bad", 125, "invalid")
}

// fenceFails claims a token of marks that cannot serve.
func fenceFails(t *testing.T, marks, resource string, want int, says string) {
	t.Helper()
	code, stdout, stderr := verb(t, "fence", "claim", "-w", "2s", "--marks", marks, resource, "5")
	if code != want || stdout != "" || !strings.Contains(stderr, says) || strings.Count(stderr, "\n") != 1 {
		t.Errorf("%s: exit code %d, %q%q; want %d, %q", hideSecrets(marks), code, stdout, stderr, want, says)
	}
	if strings.Contains(stderr, "hunter2") {
		t.Errorf("shows the password: %s", stderr)
	}
}
