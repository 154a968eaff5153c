package postgres

import (
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
)

// PGS-02, PGS-03: the pooler keeps the one connection to the server over the death of the client that
// held a key by it. Nothing about the key is in that session: the next client uses the same
// connection, waits for the ttl, and gets the key.
func TestConnectionOutlivesItsClient(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	pooler := servertest.PgBouncer(t, server, "", servertest.Setting("default_pool_size", "1"))
	admin := engine.DB(t, engine.DSN(server, ""))
	admin.SetMaxOpenConns(1)
	session := func() (pid, since string) {
		t.Helper()
		const query = "SELECT pid::text, backend_start::text FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
		if err := admin.QueryRowContext(t.Context(), query).Scan(&pid, &since); err != nil {
			t.Fatal(err)
		}
		if n := sqlrig.Query[int](t, admin, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"); n != 0 {
			t.Errorf("%d advisory locks", n)
		}
		return pid, since
	}
	s := engine.Open(t, pooler, "")
	for i := range 10 { // one that is killed while it extends takes the connection along
		key := fmt.Sprint("k", i)
		child := kit.Child(t, "hold "+engine.Name, engine.DSN(pooler, ""), key)
		child.Expect(t, "held", time.Minute)
		pid, since := session()
		child.Kill()
		sqlrig.Held(t, s, key)
		if _, err := sqlrig.Acquire(kit.Context(t, time.Minute), sqlrig.Claim(s, key)); err != nil {
			t.Errorf("the key of a killed holder: %v", err)
		}
		if p, b := session(); p == pid && b == since {
			return
		}
	}
	t.Error("the connection ended with its client each time: the test shows nothing")
}

// PGS-07: the session that made the grant is ended by the server, as idle, again and again. The lease
// goes on, and another is refused.
func TestLeaseOutlivesItsSessions(t *testing.T) {
	t.Parallel()
	server := engine.Start(t, servertest.Setting("idle_session_timeout", "200ms"),
		servertest.Setting("idle_in_transaction_session_timeout", "200ms"))
	db := engine.DB(t, engine.DSN(server, ""))
	db.SetMaxOpenConns(1)
	locks := kit.Locker(t, engine.New(t, db, sqlstore.Options{}), holdfast.Options{TTL: 3 * time.Second})
	lease := kit.Acquire(t, locks, "k")
	admin := engine.DB(t, engine.DSN(server, "")+"&options=-c%20idle_session_timeout%3D0")
	sessions := map[int]bool{}
	servertest.Eventually(t, time.Minute, func() error {
		pid := sqlrig.Query[int](t, admin, `SELECT coalesce(max(pid), 0) FROM pg_stat_activity
			WHERE query LIKE '%holdfast_leases%' AND pid <> pg_backend_pid()`)
		if pid != 0 {
			sessions[pid] = true
		}
		if len(sessions) < 4 {
			return fmt.Errorf("%d sessions so far", len(sessions))
		}
		return nil
	})
	if err := lease.Err(); err != nil {
		t.Errorf("the lease is lost: %v", err)
	}
	sqlrig.Held(t, engine.Open(t, server, ""), "k")
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
