package sqlite

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// refuses complains unless every way into the store answers want, in one line that does
// not name the folder, and says why.
func refuses(t *testing.T, s store.Store, path string, want error, why string) {
	t.Helper()
	ctx := context.Background()
	_, tried := claim(s, "k", time.Hour).Try(ctx)
	_, inspected := s.(store.Inspector).Inspect(ctx, "k")
	for _, err := range []error{tried, inspected} {
		switch {
		case !errors.Is(err, want):
			t.Errorf("answers %v, want %v", err, want)
		case !strings.Contains(err.Error(), why):
			t.Errorf("answers %q, want a word on %q", err, why)
		case strings.Count(err.Error(), path) > 1, strings.Contains(err.Error(), "\n"):
			t.Errorf("answers %q, want one line that names the file once at the most", err)
		}
	}
}

// A database that would let two hold, or lose a grant, is refused before anything is granted.
func TestDatabasesThatBreakPromises(t *testing.T) {
	const wal = "?_pragma=journal_mode(WAL)"
	for name, test := range map[string]struct {
		settings string // of the file
		dsn      string // in place of the file
		why      string
	}{
		"memory":          {dsn: ":memory:", why: "wal"},
		"memory, as WAL":  {dsn: "file::memory:" + wal, why: "wal"},
		"shared memory":   {dsn: "file:x?mode=memory&cache=shared", why: "wal"},
		"temporary":       {dsn: "file:" + wal, why: "wal"},
		"defaults":        {settings: "?", why: "delete"},
		"rollback":        {settings: "?_pragma=journal_mode(TRUNCATE)", why: "truncate"},
		"journal memory":  {settings: "?_pragma=journal_mode(MEMORY)", why: "memory"},
		"journal off":     {settings: "?_pragma=journal_mode(OFF)", why: "off"},
		"no sync":         {settings: wal + "&_pragma=synchronous(OFF)", why: "synchronous"},
		"not every sync":  {settings: wal + "&_pragma=synchronous(NORMAL)", why: "synchronous"},
		"no file locks":   {settings: wal + "&nolock=1", why: "database"},
		"other locks":     {settings: wal + "&vfs=unix-dotfile", why: "wal"},
		"no locks at all": {settings: wal + "&vfs=unix-none", why: "wal"},
	} {
		t.Run(name, func(t *testing.T) {
			path := lockFile(t)
			name := test.dsn
			if name == "" {
				name = "file:" + path + test.settings
			}
			s, db := openDSN(t, path, name)
			db.SetMaxOpenConns(1)
			refuses(t, s, path, store.ErrInvalid, test.why)
		})
	}
}

// The same for settings of a file that is in use already.
func TestConnectionsThatBreakPromises(t *testing.T) {
	const wal = "?_pragma=journal_mode(WAL)"
	for name, test := range map[string]struct{ settings, why string }{
		"no file locks": {wal + "&nolock=1", "database"},
		"immutable":     {wal + "&immutable=1", "database"},
		"read-only":     {"?mode=ro", "read-only"},
		"query only":    {wal + "&_pragma=query_only(1)", "read-only"},
		"no sync":       {wal + "&_pragma=synchronous(OFF)", "synchronous"},
	} {
		t.Run(name, func(t *testing.T) {
			path := lockFile(t)
			good, _ := open(t, path)
			grant(t, claim(good, "k", time.Hour))
			s, _ := openDSN(t, path, "file:"+path+test.settings)
			if _, err := claim(s, "free", time.Hour).Try(context.Background()); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), test.why) {
				t.Errorf("Try = %v, want ErrInvalid with a word on %q", err, test.why)
			}
		})
	}
}

// Settings are looked at on every connection, since they belong to one.
func TestSettingsOfOneConnection(t *testing.T) {
	s, db := open(t, lockFile(t))
	db.SetMaxOpenConns(1)
	c := claim(s, "k", time.Hour)
	grant(t, c)
	exec(t, db, `PRAGMA synchronous = OFF`)
	if _, err := c.Extend(context.Background()); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Extend on a connection that does not sync: %v", err)
	}
	exec(t, db, `PRAGMA synchronous = EXTRA`)
	if _, err := c.Extend(context.Background()); err != nil {
		t.Errorf("Extend: %v", err)
	}
}

func TestFilesThatCannotBeUsed(t *testing.T) {
	for name, test := range map[string]struct {
		path  string
		setUp func(t *testing.T, path string)
		dsn   string // added
		want  error
		why   string
	}{
		"no folder":   {path: "missing/locks.db", want: store.ErrInvalid, why: "cannot be opened"},
		"is a folder": {path: "", want: store.ErrInvalid, why: "cannot be opened"},
		"text": {path: "locks.db", want: store.ErrInvalid, why: "must be an SQLite database", setUp: func(t *testing.T, path string) {
			writeFile(t, path, bytes.Repeat([]byte("not a database\n"), 500))
		}},
		"later version": {path: "locks.db", want: store.ErrInvalid, why: `version "2"`, setUp: func(t *testing.T, path string) {
			s, db := open(t, path)
			if err := s.EnsureSchema(context.Background()); err != nil {
				t.Fatal(err)
			}
			exec(t, db, `UPDATE holdfast_meta SET value = '2' WHERE name = 'version'`)
		}},
		"another's meta": {path: "locks.db", want: store.ErrInvalid, why: `version ""`, setUp: func(t *testing.T, path string) {
			_, db := open(t, path)
			exec(t, db, `CREATE TABLE holdfast_meta (name TEXT, value TEXT)`)
		}},
		"another's table": {path: "locks.db", want: store.ErrInvalid, why: "no such column", setUp: func(t *testing.T, path string) {
			_, db := open(t, path)
			exec(t, db, `CREATE TABLE holdfast_leases (name TEXT)`)
		}},
		"full disk": {path: "locks.db", dsn: "&_pragma=max_page_count(2)", want: store.ErrUnavailable, why: "disk is full"},
		"damaged": {path: "locks.db", want: store.ErrInvalid, why: "damaged", setUp: func(t *testing.T, path string) {
			s, db := open(t, path)
			grant(t, claim(s, "k", time.Hour))
			exec(t, db, `PRAGMA wal_checkpoint(TRUNCATE)`)
			db.Close()
			file, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for i := 4096; i < len(file); i++ {
				file[i] = 0xa5
			}
			writeFile(t, path, file)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), test.path)
			if test.setUp != nil {
				test.setUp(t, path)
			}
			s, _ := openDSN(t, path, dsn(t, path)+test.dsn)
			refuses(t, s, path, test.want, test.why)
		})
	}
}

func writeFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestClosedDatabase(t *testing.T) {
	path := lockFile(t)
	s, db := open(t, path)
	db.Close()
	refuses(t, s, path, store.ErrUnavailable, "closed")
}

// A store whose file was deleted or replaced goes on no more: another process would
// take the same keys in the new file.
func TestReplacedFile(t *testing.T) {
	for _, replaced := range []bool{false, true} {
		path := lockFile(t)
		s, _ := open(t, path)
		c := claim(s, "k", time.Hour)
		grant(t, c)
		for _, name := range []string{path, path + "-wal", path + "-shm"} {
			if err := os.Rename(name, name+".away"); err != nil {
				t.Fatal(err)
			}
		}
		if replaced {
			other, _ := open(t, path)
			grant(t, claim(other, "k", time.Hour))
		}
		ctx := context.Background()
		if _, err := c.Extend(ctx); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "replaced") {
			t.Errorf("replaced=%v: Extend = %v, want ErrInvalid", replaced, err)
		}
		if _, err := claim(s, "free", time.Hour).Try(ctx); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("replaced=%v: Try = %v, want ErrInvalid", replaced, err)
		}
	}
}

// A file that was put back from a copy is not told from any other by those who open it then: a lease
// that was granted since the copy is not in it. Tokens follow the clock all the same.
func TestRestoredCopy(t *testing.T) {
	path := lockFile(t)
	s, db := open(t, path)
	c := claim(s, "k", time.Hour)
	first := grant(t, c)
	release(t, c)
	db.Close() // which leaves no -wal
	copied, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s, db = open(t, path)
	since := grant(t, claim(s, "k", time.Hour))
	db.Close()
	if err := os.WriteFile(path, copied, 0o600); err != nil {
		t.Fatal(err)
	}
	s, _ = open(t, path)
	second := grant(t, claim(s, "k", time.Hour)) // beside the holder of since
	if first.Token >= since.Token || since.Token >= second.Token {
		t.Errorf("tokens are %v, %v, and after the restore %v", first.Token, since.Token, second.Token)
	}
}

// Paths may hold any character.
func TestOddPaths(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a b", "a?b", "a#b", "a%20b", "a%b", "a&b=c", "é", "a'b", `a"b`, "a;b", ":memory:", "a+b", "file:x", "\xff"} {
		path := filepath.Join(dir, name)
		s, db := open(t, path)
		grant(t, claim(s, "k", time.Hour))
		db.Close()
		if _, err := os.Stat(path); err != nil {
			t.Errorf("the database is not at %q: %v", name, err)
		}
	}
	t.Chdir(dir)
	s, _ := open(t, ":memory:")
	mustBeHeld(t, s, "k")
}
