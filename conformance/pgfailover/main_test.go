// Package pgfailover shows what sqlstore keeps on PostgreSQL, and what it does not, when a replica
// is promoted, when the server dies, and behind a pooler.
package pgfailover

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

func TestMain(m *testing.M) { kit.Main(m, nil) }

var engine = sqlrig.PostgreSQL

// patience is how long a test waits for what must come.
const patience = time.Minute

// openAny opens a pool as an application does that knows all servers, and wants the one that
// takes writes.
func openAny(t testing.TB, servers ...*servertest.SQLServer) *sql.DB {
	t.Helper()
	hosts := ""
	for i, s := range servers {
		if i > 0 {
			hosts += ","
		}
		hosts += s.Addr()
	}
	return engine.DB(t, "postgres://postgres@"+hosts+"/holdfast?sslmode=disable&connect_timeout=5&target_session_attrs=read-write"+engine.Params)
}

func claim(s store.Store, key string, ttl time.Duration) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: ttl, Label: "test"})
}

// row is what the table has for a key.
func row(t testing.TB, db *sql.DB, key string) (owner string, token int64) {
	t.Helper()
	servertest.Eventually(t, patience, func() error { // the pool may have to find out that its connections ended
		return db.QueryRowContext(t.Context(), "SELECT owner, token FROM holdfast_leases WHERE key = $1", []byte(key)).Scan(&owner, &token)
	})
	return owner, token
}

// The suite of all stores passes where each statement gets another connection.
func TestStoreThroughPgBouncer(t *testing.T) {
	pooled := engine.With("") // PgBouncer's data source name says the same
	pooled.Start = func(t testing.TB, opts ...servertest.SQLOption) *servertest.SQLServer {
		server := servertest.PostgreSQL(t, opts...)
		return servertest.PgBouncer(t, server, "", servertest.Setting("default_pool_size", "4"))
	}
	pooled.Suite(t, sqlstore.Options{})
}

// While the server behind a PgBouncer is away, the store is unavailable, and waiting goes on
// until it is back.
func TestServerAwayBehindPgBouncer(t *testing.T) {
	t.Parallel()
	server := servertest.PostgreSQL(t)
	pooler := servertest.PgBouncer(t, server, "")
	db := engine.DB(t, pooler.DSN(""))
	open := func() *sqlstore.Store { return engine.New(t, db, sqlstore.Options{}) }
	if err := open().EnsureSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	server.Kill()
	said := false // by PgBouncer; before that it waits
	servertest.Eventually(t, patience, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		s := open()
		_, tried := claim(s, "k", time.Second).Try(ctx) // it may be granted behind our back
		_, inspected := s.Inspect(ctx, "k")
		locked := sqlstore.Locked(ctx, db, sqlstore.LockedOptions{Dialect: sqlstore.PostgreSQL}, "k", func(*sql.Tx) error { return nil })
		for _, err := range []error{tried, inspected, locked} {
			if !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("while the server is away: %v", err)
			}
			said = said || sqlState(err) == "08P01"
		}
		if !said {
			return errors.New("PgBouncer has not said yet that its server is away")
		}
		return nil
	})
	acquired := make(chan error, 1)
	go func() {
		_, err := newLocker(t, db).Acquire(kit.Context(t, patience), "k")
		acquired <- err
	}()
	time.Sleep(500 * time.Millisecond)
	server.Restart()
	if err := <-acquired; err != nil {
		t.Errorf("Acquire over the time without a server: %v", err)
	}
}

func sqlState(err error) string {
	var coded interface{ SQLState() string }
	if errors.As(err, &coded) {
		return coded.SQLState()
	}
	return ""
}

// pgx prepares statements where nobody tells it not to, which this PgBouncer mixes up. What is
// answered then says what to do, and nothing is written.
func TestPreparedStatementsBehindPgBouncer(t *testing.T) {
	t.Parallel()
	server := servertest.PostgreSQL(t)
	pooler := servertest.PgBouncer(t, server, "")
	o := sqlstore.LockedOptions{Dialect: sqlstore.PostgreSQL}
	good := engine.DB(t, pooler.DSN(""))
	if err := sqlstore.Locked(t.Context(), good, o, "k", func(*sql.Tx) error { return nil }); err != nil {
		t.Fatal(err)
	}
	bad := sqlrig.PostgreSQL.DB(t, server.DSN(pooler.Addr())) // as for a server itself
	mixed := make(chan error, 100)
	for mixedUp := false; !mixedUp; {
		if t.Context().Err() != nil {
			return
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				mixed <- sqlstore.Locked(t.Context(), bad, o, "k", func(*sql.Tx) error { return nil })
			})
		}
		wg.Wait()
		for range 8 {
			if err := <-mixed; err != nil {
				mixedUp = true
				if !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "default_query_exec_mode=exec") {
					t.Errorf("%v, want what to do", err)
				}
			}
		}
	}
}

// A role that may not make the table is told who may, and uses it once it is there.
func TestLockedOfAPoorRole(t *testing.T) {
	t.Parallel()
	server := servertest.PostgreSQL(t)
	admin := engine.DB(t, engine.DSN(server, ""))
	sqlrig.Exec(t, admin, "CREATE ROLE poor LOGIN")
	poor := engine.DB(t, strings.Replace(engine.DSN(server, ""), "postgres@", "poor@", 1))
	o := sqlstore.LockedOptions{Dialect: sqlstore.PostgreSQL}
	locked := func(db *sql.DB) error {
		return sqlstore.Locked(t.Context(), db, o, "k", func(*sql.Tx) error { return nil })
	}
	wantAdvice := func(err error) {
		t.Helper()
		if !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "read and write the table holdfast_locked") {
			t.Errorf("%v, want what to do", err)
		}
	}
	wantAdvice(locked(poor))
	if err := locked(admin); err != nil {
		t.Fatal(err)
	}
	wantAdvice(locked(poor))
	sqlrig.Exec(t, admin, "GRANT SELECT, INSERT, UPDATE ON holdfast_locked TO poor")
	if err := locked(poor); err != nil {
		t.Errorf("a role that may read and write: %v", err)
	}
}
