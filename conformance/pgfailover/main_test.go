// Package pgfailover shows what sqlstore keeps on PostgreSQL, and what it does not, when a replica
// is promoted, when the server dies, and behind a pooler.
package pgfailover

import (
	"database/sql"
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
