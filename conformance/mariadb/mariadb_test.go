package mariadb

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// A pool whose statements would open transactions is refused.
func TestAutocommitOff(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	sqlrig.Free(t, engine.Open(t, server, ""), "k")
	sqlrig.Refuses(t, engine.With("?autocommit=0").Open(t, server, ""), store.ErrInvalid, "autocommit")
}

// A replica is refused, also where the user may write to it.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	s := engine.Open(t, server, "")
	sqlrig.Free(t, s, "k")
	db := engine.DB(t, engine.DSN(server, ""))
	sqlrig.Exec(t, db, "CREATE USER app@'%'")
	sqlrig.Exec(t, db, "GRANT SELECT, INSERT, UPDATE ON holdfast.* TO app@'%'")
	app := engine.New(t, engine.DB(t, strings.Replace(engine.DSN(server, ""), "root@", "app@", 1)), sqlstore.Options{})
	engine.EveryCallTest(t, app) // a user that may make no tables
	sqlrig.Exec(t, db, "SET GLOBAL read_only = 1")
	sqlrig.Refuses(t, engine.Open(t, server, ""), store.ErrUnavailable, "read-only")
	if g, err := sqlrig.Claim(app, "k").Try(t.Context()); !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("Try on a server that has become a replica: %+v, %v", g, err)
	}
	sqlrig.Exec(t, db, "SET GLOBAL read_only = 0")
	sqlrig.Free(t, app, "k")
}

// A table of another engine has no transactions.
func TestOtherEngine(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	sqlrig.Free(t, engine.Open(t, server, ""), "k")
	sqlrig.Exec(t, engine.DB(t, engine.DSN(server, "")), "ALTER TABLE holdfast_leases ENGINE = MyISAM")
	sqlrig.Refuses(t, engine.Open(t, server, ""), store.ErrInvalid, "InnoDB")
}

// A row that somebody keeps locked makes the store unavailable in time, and takes nothing.
func TestLockedRow(t *testing.T) {
	t.Parallel()
	server := engine.Start(t, servertest.Setting("innodb_lock_wait_timeout", "1"))
	s := engine.Open(t, server, "")
	sqlrig.Free(t, s, "k")
	tx, err := engine.DB(t, engine.DSN(server, "")).Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec("SELECT 1 FROM holdfast_leases FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	if g, err := sqlrig.Claim(s, "k").Try(kit.Context(t, time.Minute)); !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) {
		t.Errorf("Try of a row that is locked: %+v, %v", g, err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	sqlrig.SoonFree(t, s, "k")
}
