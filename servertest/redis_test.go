package servertest

import (
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

func mustDo(t *testing.T, s *RedisServer, args ...string) any {
	t.Helper()
	v, err := s.Do(args...)
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return v
}

func TestRedisReplies(t *testing.T) {
	s := Redis(t)
	mustDo(t, s, "SET", "a", "x\r\ny")
	if v := mustDo(t, s, "GET", "a"); v != "x\r\ny" {
		t.Errorf("GET = %q", v)
	}
	if v := mustDo(t, s, "GET", "none"); v != nil {
		t.Errorf("GET of nothing = %v", v)
	}
	if v := mustDo(t, s, "INCR", "n"); v != int64(1) {
		t.Errorf("INCR = %v", v)
	}
	if v := mustDo(t, s, "MGET", "a", "none").([]any); len(v) != 2 || v[1] != nil {
		t.Errorf("MGET = %v", v)
	}
	_, err := s.Do("INCR", "a")
	if e, ok := err.(ReplyError); !ok || !strings.HasPrefix(string(e), "ERR ") {
		t.Errorf("INCR of text: %v", err)
	}
}

func TestRedisNAtOnce(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range RedisN(t, 5) {
		seen[s.Info("server", "run_id")] = true
	}
	if len(seen) != 5 {
		t.Errorf("%d different servers, want 5", len(seen))
	}
}

func TestRestartKeepsWhatIsOnDisk(t *testing.T) {
	s := Redis(t, AppendOnly("always"))
	mustDo(t, s, "SET", "a", "1")
	old := s.SaveSnapshot()
	mustDo(t, s, "SET", "a", "2")
	id, pid := s.Info("server", "run_id"), s.PID()

	s.Kill()
	s.Restart()
	if s.PID() == pid || s.Info("server", "run_id") == id {
		t.Error("the process is the same")
	}
	if v := mustDo(t, s, "GET", "a"); v != "2" {
		t.Errorf("after a kill: %v, want 2", v)
	}
	s.Shutdown()
	s.RestoreSnapshot(old)
	s.Restart()
	if v := mustDo(t, s, "GET", "a"); v != "1" {
		t.Errorf("from an older copy: %v, want 1", v)
	}
	s.Kill()
	s.Wipe()
	s.Restart()
	if v := mustDo(t, s, "GET", "a"); v != nil {
		t.Errorf("after a wipe: %v, want nothing", v)
	}
}

func TestSnapshotWithoutAppendOnlyFile(t *testing.T) {
	s := Redis(t)
	mustDo(t, s, "SET", "a", "1")
	old := s.SaveSnapshot()
	s.Restart()
	s.Kill()
	s.Wipe()
	s.RestoreSnapshot(old)
	s.Restart()
	if v := mustDo(t, s, "GET", "a"); v != "1" {
		t.Errorf("GET = %v, want 1", v)
	}
}

func TestStopAndCont(t *testing.T) {
	CanPause(t)
	s := Redis(t)
	s.Stop()
	c, err := dialRESP(s.Addr(), 200*time.Millisecond)
	if err != nil {
		t.Fatal(err) // the kernel accepts for it
	}
	defer c.Close()
	if v, err := c.do("PING"); err == nil {
		t.Errorf("a stopped server answered %v", v)
	}
	s.Cont()
	mustDo(t, s, "PING")
	s.Stop() // and is killed so
}

func TestStopOfAnyProcess(t *testing.T) {
	CanPause(t)
	p := Start(t, exec.Command("sleep", "60"))
	p.Stop()
	p.Cont()
	p.Kill()
	if err := Pause(p.PID()); err == nil {
		t.Error("a process that has ended was paused")
	}
}

func TestPassword(t *testing.T) {
	s := Redis(t, Config("requirepass", "secret"), As("", "secret"))
	mustDo(t, s, "PING")
	s.Restart()
	mustDo(t, s, "PING")
}

func TestReplica(t *testing.T) {
	primary := Redis(t)
	replica := Redis(t, ReplicaOf(primary))
	replica.WaitLinked()
	mustDo(t, primary, "SET", "a", "1")
	err := eventually(startTimeout, func() error {
		if v := mustDo(t, replica, "GET", "a"); v != "1" {
			return fmt.Errorf("replica has %v", v)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestBadDirectiveIsReported(t *testing.T) {
	s := prepare(t, []RedisOption{Config("no-such-directive", "1")})
	if err := s.first(); err == nil || !strings.Contains(err.Error(), "no-such-directive") {
		t.Errorf("error = %v", err)
	}
}

func TestAnotherServerOnThePort(t *testing.T) {
	a := Redis(t)
	b := prepare(t, nil)
	b.port = a.port
	if err := b.start(b.base); err == nil || !portTaken(err) {
		t.Errorf("error = %v", err)
	}
}

// serverTime is the server's wall clock less the machine's.
func serverTime(t *testing.T, s *RedisServer) time.Duration {
	t.Helper()
	v := mustDo(t, s, "TIME").([]any)
	sec, _ := strconv.ParseInt(v[0].(string), 10, 64)
	usec, _ := strconv.ParseInt(v[1].(string), 10, 64)
	return time.Until(time.Unix(sec, usec*1000))
}

func uptime(t *testing.T, s *RedisServer) time.Duration {
	t.Helper()
	n, err := strconv.Atoi(s.Info("server", "uptime_in_seconds"))
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(n) * time.Second
}

func about(d, want time.Duration) bool { return (d - want).Abs() < 5*time.Second }

func TestAgedServerIsOldAndOnTime(t *testing.T) {
	s := Redis(t, Aged(time.Hour))
	if up := uptime(t, s); !about(up, time.Hour) {
		t.Errorf("uptime %v, want an hour", up)
	}
	if d := serverTime(t, s); !about(d, 0) {
		t.Errorf("clock is off by %v", d)
	}
	us, err := strconv.ParseInt(s.Info("server", "server_time_usec"), 10, 64)
	if err != nil || !about(time.Since(time.UnixMicro(us)), 0) {
		t.Errorf("server_time_usec = %d (%v)", us, err)
	}
	s.Restart()
	if up := uptime(t, s); !about(up, 0) {
		t.Errorf("uptime %v after a restart, want young", up)
	}
	s.Restart(Aged(time.Hour))
	if up := uptime(t, s); !about(up, time.Hour) {
		t.Errorf("uptime %v after a restart, want an hour", up)
	}
}

func TestClockFollowsItsOffset(t *testing.T) {
	s := Redis(t, WithClock(), AppendOnly("always"))
	mustDo(t, s, "SET", "short", "x", "PX", "30000")
	mustDo(t, s, "SET", "long", "x", "PX", "7200000")
	s.Clock().Set(time.Hour)
	if d := serverTime(t, s); !about(d, time.Hour) {
		t.Errorf("TIME is off by %v, want an hour", d)
	}
	if v := mustDo(t, s, "EXISTS", "short", "long"); v != int64(1) {
		t.Errorf("%v of two keys left, want the long one", v)
	}
	mustDo(t, s, "SET", "now", "x", "PX", "30000")
	if v := mustDo(t, s, "PTTL", "now").(int64); v < 25000 || v > 30000 {
		t.Errorf("PTTL = %d", v)
	}
	if err := s.waitAge(time.Hour); err != nil {
		t.Errorf("uptime did not follow: %v", err)
	}
	s.Restart()
	if d := serverTime(t, s); !about(d, time.Hour) {
		t.Errorf("TIME is off by %v after a restart, want an hour", d)
	}
	s.Clock().Set(-time.Hour)
	if d := serverTime(t, s); !about(d, -time.Hour) {
		t.Errorf("TIME is off by %v, want an hour back", d)
	}
}
