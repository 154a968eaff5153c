package servertest

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// pausable is a server of any kind.
type pausable interface {
	PID() int
	Stop()
}

// TestNoOrphans: servers end with the test process, however that ends, and so do the processes
// that they have started.
func TestNoOrphans(t *testing.T) {
	for program, start := range map[string]func(testing.TB) pausable{
		"redis-server": func(t testing.TB) pausable { return Redis(t) },
		"postgres":     func(t testing.TB) pausable { return PostgreSQL(t) },
		"mariadbd":     func(t testing.TB) pausable { return MariaDB(t) },
		"pgbouncer":    func(t testing.TB) pausable { return PgBouncer(t, PostgreSQL(t), "") },
	} {
		t.Run(program, func(t *testing.T) {
			if os.Getenv("SERVERTEST_CHILD") != "" {
				orphans(t, start(t), start(t))
				return
			}
			Need(t, program)
			noOrphans(t)
		})
	}
}

// orphans prints the ids of the servers and waits for its end.
func orphans(t *testing.T, s, stopped pausable) {
	pids := []int{s.PID(), stopped.PID()}
	for _, pid := range pids {
		kids, err := children(pid)
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, kids...)
	}
	stopped.Stop()
	fmt.Println("pids", pids)
	time.Sleep(time.Minute)
}

func noOrphans(t *testing.T) {
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), "SERVERTEST_CHILD=1", "TMPDIR="+serverDir(t))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pids []int
	for lines := bufio.NewScanner(out); len(pids) == 0 && lines.Scan(); {
		if _, list, ok := strings.Cut(lines.Text(), "pids ["); ok {
			for _, f := range strings.Fields(strings.TrimSuffix(list, "]")) {
				var pid int
				if _, err = fmt.Sscan(f, &pid); err != nil {
					t.Error(err)
				}
				pids = append(pids, pid)
			}
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	if len(pids) < 2 {
		t.Fatalf("no pids: %v", pids)
	}
	for _, pid := range pids {
		Eventually(t, long, func() error {
			if running(pid) {
				return fmt.Errorf("process %d of %v is left", pid, pids)
			}
			return nil
		})
	}
}

// running is true for a process that exists and has not ended; nobody may have collected it.
func running(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(stat), ") Z ")
}
