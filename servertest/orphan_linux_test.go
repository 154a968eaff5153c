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

// TestNoOrphans: servers end with the test process, however that ends.
func TestNoOrphans(t *testing.T) {
	if os.Getenv("SERVERTEST_CHILD") != "" {
		s, stopped := Redis(t), Redis(t)
		stopped.Stop()
		fmt.Println("pids", s.PID(), stopped.PID())
		time.Sleep(time.Minute)
		return
	}
	Need(t, "redis-server")
	cmd := exec.Command(os.Args[0], "-test.run=^TestNoOrphans$", "-test.v")
	cmd.Env = append(os.Environ(), "SERVERTEST_CHILD=1", "TMPDIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var a, b int
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if _, pids, ok := strings.Cut(lines.Text(), "pids "); ok {
			_, err = fmt.Sscan(pids, &a, &b)
			break
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
	if err != nil || a == 0 || b == 0 {
		t.Fatalf("no pids: %d, %d, %v", a, b, err)
	}
	for _, pid := range []int{a, b} {
		Eventually(t, long, func() error {
			if running(pid) {
				return fmt.Errorf("process %d is left", pid)
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
