package servertest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

// eachSQL runs f for both servers.
func eachSQL(t *testing.T, f func(t *testing.T, start func(testing.TB, ...SQLOption) *SQLServer)) {
	t.Run("PostgreSQL", func(t *testing.T) { f(t, PostgreSQL) })
	t.Run("MariaDB", func(t *testing.T) { f(t, MariaDB) })
}

// sqlClient is the command line client of a server.
func sqlClient(t *testing.T, s *SQLServer, statement string) *exec.Cmd {
	t.Helper()
	if s.kind != mariadb {
		return exec.Command(Need(t, "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", statement, s.URL(""))
	}
	host, port, err := net.SplitHostPort(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	return exec.Command(Need(t, "mariadb"), "--no-defaults", "--protocol=tcp", "-h", host, "-P", port, "-u", "root", "-NB", "-e", statement, "holdfast")
}

// query answers what the statement returns.
func query(t *testing.T, s *SQLServer, statement string) string {
	t.Helper()
	out, err := sqlClient(t, s, statement).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", statement, err, out)
	}
	return strings.TrimSpace(string(out))
}

func TestSQLServerKeepsCommitsOverAKill(t *testing.T) {
	eachSQL(t, func(t *testing.T, start func(testing.TB, ...SQLOption) *SQLServer) {
		s := start(t)
		query(t, s, "CREATE TABLE a (n int); INSERT INTO a VALUES (7)")
		pid, addr := s.PID(), s.Addr()
		s.Kill()
		if c, err := net.Dial("tcp", addr); err == nil {
			c.Close()
			t.Error("a killed server takes connections")
		}
		query(t, restarted(s), "INSERT INTO a VALUES (8)")
		s.Restart() // kills
		if got := query(t, s, "SELECT sum(n) FROM a"); got != "15" {
			t.Errorf("sum = %s, want 15", got)
		}
		if s.PID() == pid || s.Addr() != addr {
			t.Errorf("process %d at %s, was %d at %s", s.PID(), s.Addr(), pid, addr)
		}
	})
}

func restarted(s *SQLServer) *SQLServer { s.Restart(); return s }

func TestSQLServersAreApart(t *testing.T) {
	eachSQL(t, func(t *testing.T, start func(testing.TB, ...SQLOption) *SQLServer) {
		a, b := start(t), start(t)
		query(t, a, "CREATE TABLE only_a (n int)")
		if out, err := sqlClient(t, b, "SELECT * FROM only_a").CombinedOutput(); err == nil {
			t.Errorf("the other server has the table: %s", out)
		}
	})
}

func TestSQLServerStops(t *testing.T) {
	CanPause(t)
	eachSQL(t, func(t *testing.T, start func(testing.TB, ...SQLOption) *SQLServer) {
		s := start(t)
		c := newSession(t, s)
		c.want(long, "SELECT 7;", "7")
		s.Stop()
		c.want(5*short, "SELECT 8;", "")
		s.Cont()
		c.want(long, "", "8")
		s.Stop()
		s.Stop()
		s.Kill()
		s.Restart()
		if got := query(t, s, "SELECT 1"); got != "1" {
			t.Errorf("after a kill in a stop: %s", got)
		}
	})
}

// session is a client whose connection stays.
type session struct {
	t     *testing.T
	in    io.Writer
	lines chan string
}

func newSession(t *testing.T, s *SQLServer) *session {
	t.Helper()
	cmd := sqlClient(t, s, "")
	if s.kind != mariadb {
		cmd.Args = append(cmd.Args[:4:4], s.URL("")) // without the statement
	} else {
		i := slices.Index(cmd.Args, "-e")
		cmd.Args = append(slices.Delete(cmd.Args, i, i+2), "--unbuffered")
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe()
	cmd.Stdout = w
	c := &session{t, in, make(chan string, 10)}
	Start(t, cmd)
	go func() {
		for out := bufio.NewScanner(r); out.Scan(); {
			c.lines <- out.Text()
		}
	}()
	t.Cleanup(func() { in.Close(); w.Close() })
	return c
}

// ask answers the line that the statement gives.
func (c *session) ask(statement string) string {
	c.t.Helper()
	if _, err := io.WriteString(c.in, statement+"\n"); err != nil {
		c.t.Fatal(err)
	}
	select {
	case got := <-c.lines:
		return got
	case <-time.After(long):
		c.t.Fatalf("%s: nothing", statement)
		return ""
	}
}

// want sends the statement, and wants the line within d; empty means none.
func (c *session) want(d time.Duration, statement, line string) {
	c.t.Helper()
	if _, err := io.WriteString(c.in, statement+"\n"); err != nil {
		c.t.Fatal(err)
	}
	select {
	case got := <-c.lines:
		if got != line {
			c.t.Fatalf("%s: %q, want %q", statement, got, line)
		}
	case <-time.After(d):
		if line != "" {
			c.t.Fatalf("%s: nothing, want %q", statement, line)
		}
	}
}

func TestSQLSettings(t *testing.T) {
	eachSQL(t, func(t *testing.T, start func(testing.TB, ...SQLOption) *SQLServer) {
		s := start(t, Durable(), Setting("max_connections", "17"))
		show := func(name string) string {
			if s.kind == mariadb {
				return query(t, s, "SELECT @@"+name)
			}
			return query(t, s, "SHOW "+name)
		}
		durable, on, off := "fsync", "on", "off"
		if s.kind == mariadb {
			durable, on, off = "innodb_flush_log_at_trx_commit", "1", "2"
		}
		if v := show("max_connections"); v != "17" {
			t.Errorf("max_connections = %s", v)
		}
		if v := show(durable); v != on {
			t.Errorf("%s = %s, want %s", durable, v, on)
		}
		s.Restart(Setting(durable, off))
		if v := show(durable); v != off {
			t.Errorf("%s = %s, want %s", durable, v, off)
		}
		if want := fmt.Sprintf("@tcp(%s)/holdfast", s.Addr()); s.kind == mariadb && !strings.Contains(s.DSN(""), want) {
			t.Error(s.DSN(""))
		}
		if want := "@127.0.0.1:1/holdfast"; !strings.Contains(s.URL("127.0.0.1:1"), want) {
			t.Error(s.URL("127.0.0.1:1"))
		}
	})
}
