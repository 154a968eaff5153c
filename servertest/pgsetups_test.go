package servertest

import (
	"fmt"
	"strings"
	"testing"
)

// eventuallyIs waits until the statement answers want.
func eventuallyIs(t *testing.T, s *SQLServer, statement, want string) {
	t.Helper()
	Eventually(t, long, func() error {
		out, err := sqlClient(t, s, statement).CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			return fmt.Errorf("%s: %q, %v, want %q", statement, got, err, want)
		}
		return nil
	})
}

func TestReplicaFollowsAndIsPromoted(t *testing.T) {
	s := PostgreSQL(t)
	query(t, s, "CREATE TABLE a (n int); INSERT INTO a VALUES (1)")
	link := NewProxy(t, s.Addr())
	r := s.Replica(link.Addr())
	if got := query(t, r, "SELECT n FROM a"); got != "1" {
		t.Errorf("the replica has %q of what was there before it", got)
	}
	query(t, s, "INSERT INTO a VALUES (2)")
	eventuallyIs(t, r, "SELECT sum(n) FROM a", "3")
	if out, err := sqlClient(t, r, "INSERT INTO a VALUES (9)").CombinedOutput(); err == nil || !strings.Contains(string(out), "read-only") {
		t.Errorf("a replica took a write: %s", out)
	}
	r.Restart() // it stays a replica
	query(t, s, "INSERT INTO a VALUES (4)")
	eventuallyIs(t, r, "SELECT sum(n) FROM a", "7")

	link.BlackHole()
	query(t, s, "INSERT INTO a VALUES (8)") // answered, and lost
	s.Kill()
	r.Promote()
	if got := query(t, r, "SELECT sum(n) FROM a"); got != "7" {
		t.Errorf("the promoted replica has %s, want 7: what was written during the cut is lost", got)
	}
	query(t, r, "INSERT INTO a VALUES (16)")
	r.Restart() // it stays promoted
	if got := query(t, r, "SELECT sum(n) FROM a"); got != "23" {
		t.Errorf("after a restart it has %s, want 23", got)
	}
	s.Restart()
	if got := query(t, s, "SELECT sum(n) FROM a"); got != "15" {
		t.Errorf("the old primary has %s, want 15", got)
	}
}

func TestReplicaCatchesUpAfterACut(t *testing.T) {
	s := PostgreSQL(t)
	link := NewProxy(t, s.Addr())
	r := s.Replica(link.Addr())
	query(t, s, "CREATE TABLE a (n int)")
	eventuallyIs(t, r, "SELECT count(*) FROM a", "0")
	link.Refuse()
	if link.Reset() == 0 {
		t.Error("nothing was cut")
	}
	query(t, s, "INSERT INTO a VALUES (1)")
	if got := query(t, r, "SELECT count(*) FROM a"); got != "0" {
		t.Errorf("through a cut link %s rows have come", got)
	}
	link.Heal()
	eventuallyIs(t, r, "SELECT count(*) FROM a", "1")
}

func TestPgBouncerLosesSessions(t *testing.T) {
	s := PostgreSQL(t)
	b := PgBouncer(t, s, "", Setting("default_pool_size", "2"))
	query(t, b, "CREATE TABLE a (n int); INSERT INTO a VALUES (7)")
	if got := query(t, s, "SELECT n FROM a"); got != "7" {
		t.Errorf("the server has %q of what went through PgBouncer", got)
	}
	if !strings.Contains(b.DSN(""), b.Addr()) || b.Addr() == s.Addr() {
		t.Errorf("%s is in front of %s", b.DSN(""), s.Addr())
	}
	// One transaction holds a connection; another client gets the other one.
	one, two := newSession(t, b), newSession(t, b)
	one.want(short, "BEGIN;", "")
	one.want(long, "SELECT pg_backend_pid() > 0;", "t")
	two.want(long, "SELECT count(*) FROM pg_stat_activity WHERE datname = 'holdfast' AND backend_type = 'client backend';", "2")
	one.want(short, "COMMIT;", "")
	// The connection of a client changes, and with it what belongs to a session.
	two.want(short, "BEGIN;", "")
	pid := two.ask("SELECT pg_backend_pid();")
	one.want(short, "BEGIN;", "")
	if other := one.ask("SELECT pg_backend_pid();"); other == pid {
		t.Errorf("two open transactions have the same connection %s", pid)
	}
	one.want(short, "COMMIT;", "")
	two.want(short, "COMMIT;", "")

	b.Kill()
	if out, err := sqlClient(t, b, "SELECT 1").CombinedOutput(); err == nil {
		t.Errorf("a killed PgBouncer answers: %s", out)
	}
	b.Restart()
	s.Kill()
	s.Restart()
	eventuallyIs(t, b, "SELECT n FROM a", "7")
}

func TestPgBouncerStops(t *testing.T) {
	CanPause(t)
	b := PgBouncer(t, PostgreSQL(t), "")
	c := newSession(t, b)
	c.want(long, "SELECT 7;", "7")
	b.Stop()
	c.want(5*short, "SELECT 8;", "")
	b.Cont()
	c.want(long, "", "8")
}
