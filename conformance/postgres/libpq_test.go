package postgres

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	_ "github.com/lib/pq"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// libpq is the other driver, as it must be set behind a pooler, so that a statement is one message.
var libpq = func() sqlrig.Engine {
	e := engine.With("&binary_parameters=yes")
	e.Driver = "postgres"
	return e
}()

func TestLibPQ(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	pooler := servertest.PgBouncer(t, server, "", servertest.Setting("default_pool_size", "2"))
	for name, s := range map[string]*sqlstore.Store{"plain": libpq.Open(t, server, ""), "pooler": libpq.New(t, libpq.DB(t, strings.Replace(pooler.DSN(""), "&default_query_exec_mode=exec", "", 1)+libpq.Params), sqlstore.Options{}),
		"defaults": libpq.With("").Open(t, server, "")} {
		t.Run(name, func(t *testing.T) { libpq.EveryCallTest(t, s) })
	}
}

// lib/pq says that it has sent nothing also when the connection ends before the answer. Of what was
// executed nothing is left all the same, and what was released is not told lost.
func TestLibPQLostReplies(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	p := servertest.NewProxy(t, server.Addr())
	s, other := libpq.Open(t, server, p.Addr()), engine.Open(t, server, "")
	update := servertest.Containing("update holdfast_leases")
	for i := range kit.Count(10, 200) {
		key := fmt.Sprint("k", i)
		sqlrig.Free(t, s, key)
		c := sqlrig.Claim(s, key)
		d := p.DropReplyTo(func(b []byte) bool {
			if update(b) {
				p.Refuse()
			}
			return update(b)
		})
		g, err := c.Try(t.Context())
		d.Stop()
		p.Heal()
		if !errors.Is(err, store.ErrUncertain) || d.Count() == 0 {
			t.Errorf("Try whose reply is lost (%d), and then the server: %+v, %v, want ErrUncertain", d.Count(), g, err)
		}
		sqlrig.Held(t, other, key) // it was executed
		servertest.Eventually(t, time.Minute, func() error { return c.Release(t.Context()) })
		sqlrig.Free(t, other, key)

		c = sqlrig.Claim(s, key)
		sqlrig.Grant(t, c)
		d = p.DropReplyTo(servertest.Only(1, update))
		err = c.Release(t.Context())
		d.Stop()
		if d.Count() == 0 || err != nil && !errors.Is(err, store.ErrUncertain) || errors.Is(err, store.ErrLost) {
			t.Errorf("Release whose reply is lost (%d): %v", d.Count(), err)
		}
		sqlrig.Free(t, other, key)
	}
}

// After a restart of the server all connections that are idle in the pool are dead, of which a call
// tells nothing.
func TestLibPQManyDeadConnections(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	db := libpq.DB(t, libpq.DSN(server, ""))
	db.SetMaxIdleConns(20)
	s := libpq.New(t, db, sqlstore.Options{})
	sqlrig.Free(t, s, "k")
	var conns []*sql.Conn
	for range 20 {
		c, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	for _, c := range conns {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n := db.Stats().Idle; n != 20 {
		t.Fatalf("%d connections are idle: the test shows nothing", n)
	}
	server.Restart()
	sqlrig.Free(t, s, "after") // the release of the other key may have been lost
}
