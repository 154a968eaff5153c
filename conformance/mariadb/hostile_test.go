package mariadb

import (
	"errors"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

func TestOneKeyTwice(t *testing.T)  { parallel(t, engine.OneKeyTwiceTest) }
func TestMissingTable(t *testing.T) { parallel(t, engine.MissingTableTest) }
func TestManyBegin(t *testing.T)    { t.Parallel(); engine.ManyBeginTest(t) }

// Sessions are as their owners want them.
func TestSessions(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	for _, params := range []string{
		"?sql_mode=%27EMPTY_STRING_IS_NULL,STRICT_ALL_TABLES%27", "?sql_mode=%27ORACLE%27", "?sql_mode=%27ANSI,HIGH_NOT_PRECEDENCE%27",
		"?sql_mode=%27SIMULTANEOUS_ASSIGNMENT,NO_UNSIGNED_SUBTRACTION,PAD_CHAR_TO_FULL_LENGTH%27", "?sql_mode=%27TRADITIONAL%27",
		"?innodb_snapshot_isolation=1", "?tx_isolation=%27READ-UNCOMMITTED%27", "?tx_isolation=%27SERIALIZABLE%27",
		"?query_cache_type=0", "?collation=utf8mb4_general_ci", "?completion_type=1", "?sql_select_limit=1", "?sql_safe_updates=1",
	} {
		t.Run(params, func(t *testing.T) {
			e := engine.With(params)
			e.EveryCallTest(t, e.Open(t, server, ""))
		})
	}
}

// Somebody has changed a session of the pool so that what is written there is not committed. Nothing
// is granted, extended or released by it, nor is anything told lost, and the error says why.
func TestSessionThatDoesNotCommit(t *testing.T) {
	t.Parallel()
	server := engine.Start(t, servertest.Setting("innodb_lock_wait_timeout", "1"))
	other := engine.Open(t, server, "")
	for _, way := range [][2]string{{"SET autocommit = 0", "SET autocommit = 1"}, {"START TRANSACTION", "ROLLBACK"}} {
		db := engine.DB(t, engine.DSN(server, ""))
		db.SetMaxOpenConns(1)
		s := engine.New(t, db, sqlstore.Options{})
		key := way[0]
		a, b := sqlrig.Claim(s, key+"a"), sqlrig.Claim(s, key+"b")
		sqlrig.Grant(t, a)
		sqlrig.Grant(t, b)
		sqlrig.Free(t, s, key)
		sqlrig.Exec(t, db, way[0])
		for _, k := range []string{key, key + " new"} {
			if g, err := sqlrig.Claim(s, k).Try(t.Context()); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "autocommit") {
				t.Errorf("%s: Try: %+v, %v", way[0], g, err)
			}
			sqlrig.Free(t, other, k)
		}
		if g, err := a.Extend(t.Context()); !errors.Is(err, store.ErrInvalid) || errors.Is(err, store.ErrLost) {
			t.Errorf("%s: Extend: %+v, %v", way[0], g, err)
		}
		for _, r := range s.ExtendMany(t.Context(), []store.Claim{a, b}) {
			if !errors.Is(r.Err, store.ErrInvalid) || errors.Is(r.Err, store.ErrLost) {
				t.Errorf("%s: ExtendMany: %+v", way[0], r)
			}
		}
		if err := a.Release(t.Context()); !errors.Is(err, store.ErrUncertain) || errors.Is(err, store.ErrLost) {
			t.Errorf("%s: Release: %v", way[0], err)
		}
		sqlrig.Held(t, other, key+"a")
		sqlrig.Exec(t, db, way[1])
		if _, err := b.Extend(t.Context()); err != nil {
			t.Errorf("%s: Extend afterwards: %v", way[0], err)
		}
		sqlrig.Release(t, a)
		sqlrig.Free(t, other, key+"a")
	}
}

// A row that somebody keeps locked is no reason to lose the leases of other keys.
func TestLockedNeighbour(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	s := engine.Open(t, server, "")
	sqlrig.Free(t, s, "locked")
	var claims []store.Claim
	for _, key := range []string{"a", "m", "z"} {
		c := sqlrig.Claim(s, key)
		sqlrig.Grant(t, c)
		claims = append(claims, c)
	}
	tx, err := engine.DB(t, engine.DSN(server, "")).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("SELECT 1 FROM holdfast_leases WHERE `key` = 'locked' FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	for i, r := range s.ExtendMany(t.Context(), claims) {
		if r.Err != nil {
			t.Errorf("lease %d: %v", i, r.Err)
		}
	}
}
