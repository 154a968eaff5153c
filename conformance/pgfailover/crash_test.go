package pgfailover

import (
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// user is one key's only user.
type user struct {
	key     string
	s       *sqlstore.Store
	db      *sql.DB
	plain   int64       // the last commit of its own that was answered
	held    store.Claim // not nil where the last answer was a grant or an extension
	granted store.Grant // the last that was answered
}

// work takes and gives back the key, and makes a commit of its own after each grant, until
// the server dies.
func (u *user) work(t *testing.T) {
	ctx := t.Context()
	for {
		c := claim(u.s, u.key, time.Hour)
		g, err := c.Try(ctx)
		if err != nil {
			return
		}
		if g.Token <= u.granted.Token {
			t.Errorf("%s: token %v after %v", u.key, g.Token, u.granted.Token)
		}
		u.granted, u.held = g, c
		if rand.N(2) == 0 {
			if _, err := c.Extend(ctx); err != nil {
				return
			}
		}
		if err := u.db.QueryRowContext(ctx, "UPDATE plain SET n = n + 1 WHERE key = $1 RETURNING n", u.key).Scan(&u.plain); err != nil {
			return
		}
		u.held = nil
		if err := c.Release(ctx); err != nil {
			return
		}
	}
}

// survived wants what was answered before the crash, and answers whether a commit of the user's
// own was lost.
func (u *user) survived(t *testing.T) (lost bool) {
	t.Helper()
	owner, token := row(t, u.db, u.key)
	if token < int64(u.granted.Token) {
		t.Errorf("%s: the table has token %d, %v had been granted", u.key, token, u.granted.Token)
	}
	if u.held != nil {
		if owner != u.granted.Owner || token != int64(u.granted.Token) {
			t.Errorf("%s: the table has token %d of %q, %v had been granted to %q", u.key, token, owner, u.granted.Token, u.granted.Owner)
		}
		if _, err := u.held.Extend(t.Context()); err != nil {
			t.Errorf("%s: Extend of what had been granted: %v", u.key, err)
		}
	}
	n := sqlrig.Query[int64](t, u.db, "SELECT n FROM plain WHERE key = $1", u.key)
	lost = n < u.plain
	u.plain, u.held = n, nil
	// Whoever holds it now was asked for before the crash, and not told.
	sqlrig.Exec(t, u.db, "UPDATE holdfast_leases SET owner = '' WHERE key = $1", []byte(u.key))
	return lost
}

// TestCrashKeepsAcknowledgedTokens: the server dies by SIGKILL while it commits, with
// synchronous_commit off for the whole database. Every token and extension that was answered is
// there afterwards; of the ordinary commits some are not.
func TestCrashKeepsAcknowledgedTokens(t *testing.T) {
	servertest.CanPause(t)
	t.Parallel()
	// The background writer of the log comes seldom, so that commits do get lost.
	server := servertest.PostgreSQL(t, servertest.Setting("wal_writer_delay", "10s"), servertest.Setting("wal_writer_flush_after", "0"))
	admin := engine.DB(t, engine.DSN(server, ""))
	sqlrig.Exec(t, admin, "ALTER DATABASE holdfast SET synchronous_commit = off")
	sqlrig.Exec(t, admin, "CREATE TABLE plain (key text PRIMARY KEY, n bigint NOT NULL)")
	users := make([]*user, 2)
	for i := range users {
		db := engine.DB(t, engine.DSN(server, ""))
		users[i] = &user{key: fmt.Sprint("k", i), db: db, s: engine.New(t, db, sqlstore.Options{})}
		sqlrig.Exec(t, admin, "INSERT INTO plain VALUES ($1, 0)", users[i].key)
		sqlrig.Free(t, users[i].s, users[i].key)
	}
	if off := sqlrig.Query[string](t, users[0].db, "SHOW synchronous_commit"); off != "off" {
		t.Fatalf("synchronous_commit is %s", off)
	}
	sqlrig.Exec(t, admin, "CHECKPOINT") // what was made so far is on disk
	lost, runs := 0, kit.Count(12, 300)
	for range runs {
		var wg sync.WaitGroup
		for _, u := range users {
			wg.Go(func() { u.work(t) })
		}
		time.Sleep(rand.N(50 * time.Millisecond))
		server.Kill()
		wg.Wait()
		server.Restart()
		for _, u := range users {
			if u.survived(t) {
				lost++
			}
		}
	}
	if lost == 0 {
		t.Error("no ordinary commit was lost: the crashes show nothing")
	}
	t.Logf("%d crashes lost ordinary commits of %d users, and no token", runs, lost)
}

// TestCrashRightAfterTheGrant is about the grant alone: the server dies right after the answer.
func TestCrashRightAfterTheGrant(t *testing.T) {
	servertest.CanPause(t)
	t.Parallel()
	server := servertest.PostgreSQL(t, servertest.Setting("wal_writer_delay", "10s"), servertest.Setting("wal_writer_flush_after", "0"),
		servertest.Setting("synchronous_commit", "off"))
	db := engine.DB(t, engine.DSN(server, ""))
	s := engine.New(t, db, sqlstore.Options{})
	sqlrig.Free(t, s, "k")
	for range kit.Count(5, 100) {
		c := claim(s, "k", time.Hour)
		g, err := c.Try(t.Context())
		for errors.Is(err, store.ErrUnavailable) { // the pool's connections died
			g, err = c.Try(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		server.Kill()
		server.Restart()
		if owner, token := row(t, db, "k"); owner != g.Owner || token != int64(g.Token) {
			t.Fatalf("the table has token %d of %q, %v had been granted to %q", token, owner, g.Token, g.Owner)
		}
		sqlrig.Release(t, c)
	}
}
