package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// terminal runs a holdfast in the foreground of a terminal of its own, as its session's
// leader, and collects what the terminal shows.
func terminal(t *testing.T, dir string, args ...string) (p *process, keyboard *os.File, screen *output) {
	t.Helper()
	return terminalFor(t, dir, exec.Command("holdfast", args...))
}

func terminalFor(t *testing.T, dir string, cmd *exec.Cmd) (p *process, keyboard *os.File, screen *output) {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	check(err)
	t.Cleanup(func() { master.Close() })
	conn, err := master.SyscallConn() // Fd would make it impossible to close it while it is read
	check(err)
	var n int
	var nerr error
	check(conn.Control(func(fd uintptr) {
		if nerr = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0); nerr == nil {
			n, nerr = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
		}
	}))
	check(nerr)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	check(err)
	defer tty.Close()

	p = &process{Cmd: cmd, t: t}
	p.Dir = dir
	p.Stdin, p.Stdout, p.Stderr = tty, tty, tty
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	check(p.Start())
	t.Cleanup(func() {
		if p.ProcessState == nil {
			p.Process.Kill()
			p.Wait()
		}
	})
	screen = &output{}
	go func() {
		b := make([]byte, 1024)
		for {
			n, err := master.Read(b)
			screen.Write(b[:n])
			if err != nil {
				return
			}
		}
	}()
	return p, master, screen
}

func typeIn(t *testing.T, keyboard *os.File, text string) {
	t.Helper()
	if _, err := keyboard.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

func stopped(pid int) bool {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, state, _ := strings.Cut(string(text), ") ")
	return strings.HasPrefix(state, "T")
}

// The command owns the terminal while it runs: it may read, Ctrl-C reaches it, and
// Ctrl-Z stops holdfast with it.
func TestTerminal(t *testing.T) {
	dir := t.TempDir()
	run := func(ttl, script string) []string {
		return []string{"run", "--store", "sqlite:" + filepath.Join(dir, "locks.db"), "--ttl", ttl, "k", "--", "sh", "-c", script}
	}
	const ask = `echo ready; read x; echo "[got $x]"`

	t.Run("read", func(t *testing.T) {
		p, keyboard, screen := terminal(t, dir, run("15s", ask)...)
		eventually(t, "the command asks", func() bool { return strings.Contains(screen.String(), "ready") })
		typeIn(t, keyboard, "a word\n")
		if code := p.code(); code != 0 {
			t.Errorf("exit code %d; %s", code, screen.String())
		}
		eventually(t, "the command answers", func() bool { return strings.Contains(screen.String(), "[got a word]") })
	})
	t.Run("interrupt", func(t *testing.T) {
		p, keyboard, screen := terminal(t, dir, run("15s", `trap "echo trapped; exit 5" INT; echo ready; while :; do sleep 0.02; done`)...)
		eventually(t, "the command runs", func() bool { return strings.Contains(screen.String(), "ready") })
		typeIn(t, keyboard, "\x03")
		if code := p.code(); code != 5 {
			t.Errorf("exit code %d, want 5; %s", code, screen.String())
		}
	})
	// The commands that are stopped start no others: Linux cannot stop a shell that has
	// just begun to start one.
	t.Run("stop and go on", func(t *testing.T) {
		p, keyboard, screen := terminal(t, dir, run("60s", ask)...)
		eventually(t, "the command asks", func() bool { return strings.Contains(screen.String(), "ready") })
		typeIn(t, keyboard, "\x1a")
		eventually(t, "holdfast stops with the command", func() bool { return stopped(p.Process.Pid) })
		if err := p.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		typeIn(t, keyboard, "more\n")
		if code := p.code(); code != 0 {
			t.Errorf("exit code %d; %s", code, screen.String())
		}
		eventually(t, "the command answers", func() bool { return strings.Contains(screen.String(), "[got more]") })
	})
	t.Run("stop for longer than the lease", func(t *testing.T) {
		p, keyboard, screen := terminal(t, dir, run("400ms", `trap "echo WENT-ON" CONT TERM; echo ready; read x; echo WENT-ON`)...)
		eventually(t, "the command runs", func() bool { return strings.Contains(screen.String(), "ready") })
		typeIn(t, keyboard, "\x1a")
		eventually(t, "holdfast stops with the command", func() bool { return stopped(p.Process.Pid) })
		next := launch(t, dir, run("5s", "true")...)
		if code := next.code(); code != 0 {
			t.Fatalf("the next holder: exit code %d; %s", code, next.err.String())
		}
		if err := p.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if code := p.code(); code != exitLost {
			t.Errorf("exit code %d, want %d; %s", code, exitLost, screen.String())
		}
		if strings.Contains(screen.String(), "WENT-ON") {
			t.Errorf("the command went on after another had held the key: %s", screen.String())
		}
	})
}
