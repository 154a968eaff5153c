package main

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func TestParseSQLStore(t *testing.T) {
	for raw, want := range map[string]struct{ url, shown string }{
		"postgres://h/d": {"postgres://h:5432/d", "postgres://h:5432/d"},
		"postgresql://bob:p%40w@h:7/d?notify=1&sslmode=require": {"postgres://bob:p%40w@h:7/d?notify=1&sslmode=require", "postgres://h:7/d"},
		"postgres://bob@a,b:7/d?notify=0&password-file=/pw":     {"postgres://bob@a:5432,b:7/d?password-file=%2Fpw", "postgres://a:5432,b:7/d"},
		"postgres:///d":                                              {"postgres:///d", "postgres:///d"},
		"mysql://bob:pw@[::1]/d":                                     {"mysql://bob:pw@[::1]:3306/d", "mysql://[::1]:3306/d"},
		"mysql://h/d?tls=skip-verify":                                {"mysql://h:3306/d?tls=skip-verify", "mysql://h:3306/d"},
		"mysql://h/d?tls-ca=/ca&tls-cert=/c&tls-key=/k":              {"mysql://h:3306/d?tls-ca=%2Fca&tls-cert=%2Fc&tls-key=%2Fk", "mysql://h:3306/d"},
		"mysql://u@h/a%20b?tls-server-name=n&password-file=%2Fa%20b": {"mysql://u@h:3306/a%20b?password-file=%2Fa+b&tls-server-name=n", "mysql://h:3306/a%20b"},
	} {
		s, err := parseSQLStore(raw)
		if err != nil {
			t.Errorf("%s: %v", raw, err)
			continue
		}
		if s.url() != want.url || s.shown() != want.shown {
			t.Errorf("%s is %s, shown as %s, want %s and %s", raw, s.url(), s.shown(), want.url, want.shown)
		}
		again, err := parseSQLStore(s.url())
		if err != nil || again.url() != s.url() || again.notify != s.notify {
			t.Errorf("%s is written as %s, which is %+v, %v", raw, s.url(), again, err)
		}
	}
}

func TestParseSQLStoreRefuses(t *testing.T) {
	for _, c := range []struct{ raw, rule string }{
		{"postgres:h/d", "names no host"},
		{"postgres://u:hunter2@h/d?table=t", "for marks"},
		{"mysql://u:hunter2@h/d?column=a.b.c", "for marks"},
		{"mysql://u:hunter2@h/d?notify=1", "only PostgreSQL"},
		{"postgres://u:hunter2@h/d?notify=yes", "notify must be"},
		{"postgres://u:hunter2@h/d?notify=1&notify=1", "notify must be"},
		{"mysql://u:hunter2@h/d?parseTime=true", "there are password-file"},
		{"mysql://u:hunter2@h", "names no database"},
		{"mysql://u:hunter2@a,b/d", "comma"},
		{"postgres://u:hun@ter2/3@h/d", "%2F"},
		{"mysql://u:hunter2@h/d?password-file=x", "give one"},
		{"mysql://u:hunter2@h/d#x", "%23"},
	} {
		_, err := parseSQLStore(c.raw)
		if err == nil {
			t.Errorf("%q is taken", c.raw)
			continue
		}
		if text := err.Error(); !errors.Is(err, store.ErrInvalid) || !strings.Contains(text, c.rule) || !strings.Contains(text, "store") ||
			strings.Contains(text, "hunter2") || strings.Contains(text, "\n") {
			t.Errorf("%q: %v; want one line on an invalid store that says %s, without the password", c.raw, err, c.rule)
		}
	}
}

// What is taken is written so that it is read the same, and nothing shows the password.
func FuzzSQLStoreURL(f *testing.F) {
	for _, s := range []string{"postgres://u:p%40w@h:1/d?sslmode=disable&notify=1", "postgresql://a,[::1]:7/d", "postgres:///d?host=x", "mysql://u:pw@h/d?tls-ca=%2Fx", "mysql://h/a%2Fb"} {
		f.Add(s, "hunter2")
	}
	const mark = "S3cr3t~"
	f.Fuzz(func(t *testing.T, raw, password string) {
		s, err := parseSQLStore(raw)
		switch {
		case err != nil && (!errors.Is(err, store.ErrInvalid) || strings.Contains(err.Error(), "\n")):
			t.Errorf("%q: %v is no one-line invalid error", raw, err)
		case err == nil:
			again, err := parseSQLStore(s.url())
			if len(s.query) == 0 {
				s.query = nil
			}
			if len(again.query) == 0 {
				again.query = nil
			}
			if err != nil || !reflect.DeepEqual(again, s) {
				t.Errorf("%q is written as %q, which is %+v, %v, and not %+v", raw, s.url(), again, err, s)
			}
		}
		for _, form := range []string{"postgres://u:%s@h/d", "postgres://:%s@h:1,i/d?notify=x", "mysql://u:%s@h/d?tls=x", "mysql://u:%s@h/d"} {
			written := fmt.Sprintf(form, password+mark)
			s, err := parseSQLStore(written)
			if err == nil && strings.Contains(s.shown(), mark) {
				t.Errorf("%q: is shown as %q", written, s.shown())
			}
			if err == nil {
				var o *opened
				if o, err = s.open(); err == nil {
					if strings.Contains(o.Info().Fingerprint, mark) {
						t.Errorf("%q: the fingerprint is %q", written, o.Info().Fingerprint)
					}
					o.close()
				}
			}
			if err != nil && strings.Contains(err.Error(), mark) {
				t.Errorf("%q: the refusal shows the password: %v", written, err)
			}
		}
	})
}

// sqlStoreOn takes a key of the store at a URL, which a nested holdfast finds held, and lets a
// waiter have it.
func sqlStoreOn(t *testing.T, raw string) {
	t.Helper()
	open := func(raw string) *opened {
		s, err := parseSQLStore(raw)
		if err != nil {
			t.Fatal(err)
		}
		o, err := s.open()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(o.close)
		return o
	}
	first := open(raw)
	nested := open(first.spec)
	if first.Info() != nested.Info() {
		t.Errorf("%+v, and nested %+v", first.Info(), nested.Info())
	}
	locks := newLocks(t, first)
	lease, err := locks.Acquire(t.Context(), raw)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newLocks(t, nested).TryAcquire(t.Context(), raw); !errors.Is(err, holdfast.ErrHeld) {
		t.Errorf("%s: nested: %v, want ErrHeld", raw, err)
	}
	waited := make(chan error, 1)
	go func() {
		lease, err := newLocks(t, nested).Acquire(t.Context(), raw)
		if err == nil {
			err = lease.Release(t.Context())
		}
		waited <- err
	}()
	time.Sleep(300 * time.Millisecond)
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-waited; err != nil {
		t.Errorf("%s: who waits: %v", raw, err)
	}
}

func newLocks(t *testing.T, s store.Store) *holdfast.Locker {
	t.Helper()
	locks, err := holdfast.New(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

func TestSQLStores(t *testing.T) {
	t.Run("PostgreSQL", func(t *testing.T) {
		s := servertest.PostgreSQL(t)
		mustExec(t, openDB(t, "pgx", s.DSN("")), "CREATE ROLE bob LOGIN SUPERUSER PASSWORD '"+strings.ReplaceAll(odd, "'", "''")+"'")
		sqlStoreOn(t, s.URL(""))
		sqlStoreOn(t, s.URL("")+"&notify=1")
		sqlStoreOn(t, fmt.Sprintf("postgresql://bob:%s@%s/holdfast?sslmode=disable&default_query_exec_mode=cache_statement", oddEscaped, s.Addr()))
		sqlStoreOn(t, fmt.Sprintf("postgres://bob@%s,%s/holdfast?sslmode=disable&password-file=%s", s.Addr(), s.Addr(), param(written(t, odd+"\n"))))
	})
	t.Run("MariaDB", func(t *testing.T) {
		s := servertest.MariaDB(t)
		mustExec(t, openDB(t, "mysql", s.DSN("")), "CREATE USER bob IDENTIFIED BY '"+strings.ReplaceAll(odd, "'", "''")+"'", "GRANT ALL ON *.* TO bob")
		sqlStoreOn(t, s.URL(""))
		sqlStoreOn(t, s.URL("")+"?tls=preferred")
		sqlStoreOn(t, fmt.Sprintf("mysql://bob:%s@%s/holdfast", oddEscaped, s.Addr()))
		sqlStoreOn(t, fmt.Sprintf("mysql://bob@%s/holdfast?password-file=%s", s.Addr(), param(written(t, odd))))
	})
}
