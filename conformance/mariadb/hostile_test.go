package mariadb

import (
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

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
	db := engine.DB(t, engine.DSN(server, ""))
	db.SetMaxOpenConns(1)
	s := engine.New(t, db, sqlstore.Options{})
	const key = "k"
	a, b := sqlrig.Claim(s, key+"a"), sqlrig.Claim(s, key+"b")
	sqlrig.Grant(t, a)
	sqlrig.Grant(t, b)
	sqlrig.Free(t, s, key)
	sqlrig.Exec(t, db, "SET autocommit = 0")
	for _, k := range []string{key, key + " new"} {
		if g, err := sqlrig.Claim(s, k).Try(t.Context()); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "autocommit") {
			t.Errorf("Try: %+v, %v", g, err)
		}
		sqlrig.Free(t, other, k)
	}
	if g, err := a.Extend(t.Context()); !errors.Is(err, store.ErrInvalid) || errors.Is(err, store.ErrLost) {
		t.Errorf("Extend: %+v, %v", g, err)
	}
	for _, r := range s.ExtendMany(t.Context(), []store.Claim{a, b}) {
		if !errors.Is(r.Err, store.ErrInvalid) || errors.Is(r.Err, store.ErrLost) {
			t.Errorf("ExtendMany: %+v", r)
		}
	}
	if err := a.Release(t.Context()); !errors.Is(err, store.ErrUncertain) || errors.Is(err, store.ErrLost) {
		t.Errorf("Release: %v", err)
	}
	sqlrig.Held(t, other, key+"a")
	sqlrig.Exec(t, db, "SET autocommit = 1")
	if _, err := b.Extend(t.Context()); err != nil {
		t.Errorf("Extend afterwards: %v", err)
	}
	sqlrig.Release(t, a)
	sqlrig.Free(t, other, key+"a")
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

func TestCancelledCalls(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	engine.CancelTest(t, server, engine.Open(t, server, ""))
}

func TestTinyTimeouts(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	sqlrig.Free(t, engine.Open(t, server, ""), "k") // the tables are there
	e := engine.With("?max_statement_time=0.002&innodb_lock_wait_timeout=1")
	e.TinyTimeoutsTest(t, server)
}

func TestWaitingStatement(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	engine.WaitingStatementTest(t, server, engine.Open(t, server, ""))
}

// A replica that executes the statements, where binlog_format is STATEMENT, has the same rows.
func TestReplicaOfStatements(t *testing.T) {
	t.Parallel()
	for _, format := range []string{"STATEMENT", "MIXED"} {
		server := engine.Start(t, servertest.Setting("log_bin", "binlog"), servertest.Setting("server_id", "1"), servertest.Setting("binlog_format", format))
		replica := engine.DB(t, engine.DSN(engine.Start(t, servertest.Setting("server_id", "2")), ""))
		host, port, _ := strings.Cut(server.Addr(), ":")
		sqlrig.Exec(t, replica, "CHANGE MASTER TO MASTER_HOST='"+host+"', MASTER_PORT="+port+", MASTER_USER='root', MASTER_LOG_FILE='binlog.000001', MASTER_LOG_POS=4")
		sqlrig.Exec(t, replica, "START SLAVE")
		s := engine.Open(t, server, "")
		engine.EveryCallTest(t, s)
		var claims []store.Claim
		for _, key := range []string{"a", "b", "c"} {
			claims = append(claims, sqlrig.Claim(s, key))
			sqlrig.Grant(t, claims[len(claims)-1])
		}
		for _, r := range s.ExtendMany(t.Context(), claims) {
			if r.Err != nil {
				t.Error(r.Err)
			}
		}
		sqlrig.Release(t, claims[0])
		const rows = "SELECT GROUP_CONCAT(CONCAT_WS(' ', HEX(`key`), owner, token, expires, label, batch) ORDER BY `key` SEPARATOR '\\n') FROM holdfast_leases"
		want := sqlrig.Query[string](t, engine.DB(t, engine.DSN(server, "")), rows)
		servertest.Eventually(t, 20*time.Second, func() error {
			var got sql.NullString
			if err := replica.QueryRow(rows).Scan(&got); err != nil || got.String != want {
				return fmt.Errorf("%s: the replica has\n%s\nof\n%s\n%v", format, got.String, want, err)
			}
			return nil
		})
		sqlrig.Exec(t, replica, "STOP SLAVE")
	}
}
