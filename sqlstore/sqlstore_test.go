package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/store"
)

func TestSQLiteDSN(t *testing.T) {
	const settings = "?_pragma=busy_timeout(10)&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"
	for path, want := range map[string]string{
		"/var/lib/locks.db":  "file:/var/lib/locks.db",
		"/a b/c?d#e%20&f=g":  "file:/a%20b/c%3Fd%23e%2520%26f%3Dg",
		"/é/\xff":            "file:/%C3%A9/%FF",
		"//host/share/../db": "file:/host/db",
	} {
		if got, err := SQLiteDSN(path); err != nil || got != want+settings {
			t.Errorf("SQLiteDSN(%q) = %q, %v, want %q", path, got, err, want+settings)
		}
	}
	for _, path := range []string{"", "a\x00b"} {
		if got, err := SQLiteDSN(path); !errors.Is(err, store.ErrInvalid) {
			t.Errorf("SQLiteDSN(%q) = %q, %v, want ErrInvalid", path, got, err)
		}
	}
	abs, err := filepath.Abs(":memory:")
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := SQLiteDSN(":memory:"); !strings.HasPrefix(got, "file:"+filepath.ToSlash(abs)) {
		t.Errorf("SQLiteDSN(%q) = %q, want a file of that name", ":memory:", got)
	}
	if got := escapePath("C:/locks.db"); got != "/C:/locks.db" {
		t.Errorf("escapePath of a drive = %q", got)
	}
}

func TestNewRefuses(t *testing.T) {
	db := new(sql.DB)
	good := Options{Dialect: SQLite, Database: "locks.db"}
	if _, err := New(db, good); err != nil {
		t.Errorf("New: %v", err)
	}
	for _, o := range []Options{{Dialect: PostgreSQL}, {Dialect: MySQL}, {Dialect: 9, Database: "h/d"}, {Dialect: PostgreSQL, Database: "u:secret@h/d"}} {
		if _, err := New(db, o); !errors.Is(err, store.ErrInvalid) || strings.Contains(err.Error(), "secret") {
			t.Errorf("New with %+v: %v", o, err)
		}
	}
	for field, test := range map[string]struct {
		db *sql.DB
		o  Options
	}{
		"database": {nil, good},
		"Dialect":  {db, Options{Database: "locks.db"}},
		"Database": {db, Options{Dialect: SQLite}},
		"Listener": {db, Options{Dialect: MySQL, Database: "h/d", Listener: noListener{}}},
	} {
		var invalid *store.InvalidError
		if _, err := New(test.db, test.o); !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("New with a bad %s: %v", field, err)
		}
	}
}

type noListener struct{ Listener }

func TestSplitBoot(t *testing.T) {
	for name, want := range map[string]leaseClock{
		"id":          {boot: "id"},
		"id+100.0":    {boot: "id", offset: 100 * time.Second},
		"id+-100.500": {boot: "id", offset: -100*time.Second + 500},
		"id+x.0":      {boot: "id+x.0"},
	} {
		if boot, offset := splitBoot(name); boot != want.boot || offset != want.offset {
			t.Errorf("splitBoot(%q) = %q, %v", name, boot, offset)
		}
	}
}

// The processes of all time namespaces of a machine read the same clock.
func TestLeaseClockOfATimeNamespace(t *testing.T) {
	host := leaseClock{Clock: clock.Clock{Boot: func() time.Duration { return time.Hour }}}
	inside := leaseClock{Clock: clock.Clock{Boot: func() time.Duration { return 3 * time.Hour }}, offset: 2 * time.Hour}
	if host.now() != inside.now() {
		t.Errorf("the host reads %v, a time namespace %v", host.now(), inside.now())
	}
}

// Where leases depend on the wall clock, Info says so, and there are no tickets.
func TestWallClock(t *testing.T) {
	s := newSQLiteStore(new(sql.DB), "locks.db", leaseClock{boot: wallBoot, wall: true})
	if name := s.Info().Name; name != "sqlite-wallclock" {
		t.Errorf("Info.Name = %q", name)
	}
	c := s.Claim("k", store.ClaimOptions{TTL: time.Minute}).(*claim)
	c.token = 1
	if _, err := s.Ticket(c); !errors.Is(err, store.ErrUnsupported) {
		t.Errorf("Ticket: %v, want ErrUnsupported", err)
	}
	ticket := store.Ticket{Store: s.Info().Fingerprint, Key: []byte("k"), Owner: "o", Token: 1, TTL: time.Minute, Boot: wallBoot, Until: 1}
	if _, _, err := s.Adopt(t.Context(), ticket.String()); !errors.Is(err, store.ErrUnsupported) {
		t.Errorf("Adopt: %v, want ErrUnsupported", err)
	}
}

type coded int

func (c coded) Code() int   { return int(c) }
func (coded) Error() string { return "words that say nothing" }

// Errors are known by their code, or by SQLite's words where the driver tells no code.
func TestClassify(t *testing.T) {
	for _, test := range []struct {
		err  error
		want error
		busy bool
	}{
		{coded(5), store.ErrUnavailable, true},
		{coded(517), store.ErrUnavailable, true}, // BUSY_SNAPSHOT
		{coded(6), store.ErrUnavailable, true},
		{fmt.Errorf("exec: %w", coded(261)), store.ErrUnavailable, true}, // BUSY_RECOVERY
		{coded(8), store.ErrInvalid, false},
		{coded(1032), store.ErrInvalid, false}, // READONLY_DBMOVED
		{coded(10), store.ErrUnavailable, false},
		{coded(13), store.ErrUnavailable, false},
		{coded(14), store.ErrInvalid, false},
		{coded(26), store.ErrInvalid, false},
		{coded(11), store.ErrInvalid, false},
		{errors.New("database is locked"), store.ErrUnavailable, true},
		{errors.New("attempt to write a readonly database"), store.ErrInvalid, false},
		{errors.New("unable to open database file: no such file or directory"), store.ErrInvalid, false},
		{errors.New("file is not a database"), store.ErrInvalid, false},
		{errors.New("sql: database is closed"), store.ErrUnavailable, false},
	} {
		got := classify(test.err)
		if !errors.Is(got, test.want) || sqlerr.SQLiteBusyNow(test.err) != test.busy {
			t.Errorf("%v (%v): classify = %v, busy = %v", test.err, sqlerr.SQLiteCode(test.err), got, sqlerr.SQLiteBusyNow(test.err))
		}
		if strings.ContainsAny(got.Error(), "\n/") {
			t.Errorf("classify(%v) = %q, want one line without paths", test.err, got)
		}
		if !errors.Is(got, test.err) {
			t.Errorf("classify(%v) hides its cause", test.err)
		}
	}
}

// A call comes back soon after its context, also when the driver does not; what becomes of
// it is told afterwards.
func TestRaceWithDriverThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		begun := time.Now()
		settled := make(chan bool, 1)
		_, err := race(ctx, func(context.Context) (int, error) {
			time.Sleep(time.Hour)
			return 1, nil
		}, func(left bool, err error) { settled <- left && err == nil })
		if !errors.Is(err, store.ErrUncertain) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("race = %v, want ErrUncertain", err)
		}
		if took := time.Since(begun); took != time.Second+answerGrace {
			t.Errorf("race returned after %v", took)
		}
		if !<-settled {
			t.Error("settle was not told that the caller had left")
		}
	})
}

// Without a deadline a call has our own limit.
func TestRaceHasALimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		_, err := race(t.Context(), func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, context.Cause(ctx)
		}, nil)
		if err != errNoAnswer || time.Since(begun) != callLimit {
			t.Errorf("race = %v after %v", err, time.Since(begun))
		}
	})
}

func TestRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sqlite{}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		calls := 0
		err := s.retry(ctx, func() error {
			if calls++; calls < 10 {
				return coded(sqlerr.SQLiteBusy)
			}
			return nil
		})
		if err != nil || calls != 10 {
			t.Errorf("retry = %v after %d calls", err, calls)
		}
		err = s.retry(ctx, func() error { return coded(sqlerr.SQLiteBusy) })
		if !errors.Is(err, store.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) || ctx.Err() == nil {
			t.Errorf("retry of a database that stays busy = %v", err)
		}
		if err := s.retry(ctx, func() error { return errors.New("interrupted") }); err != context.DeadlineExceeded {
			t.Errorf("retry after the context = %v", err)
		}
	})
}

func TestCutLabel(t *testing.T) {
	long := strings.Repeat("é", 40)
	if got := cutLabel("x" + long); len(got) > 64 || got != "x"+strings.Repeat("é", 31) {
		t.Errorf("cutLabel = %q", got)
	}
	if got := cutLabel("a\xffb"); got != "ab" {
		t.Errorf("cutLabel of invalid UTF-8 = %q", got)
	}
}
