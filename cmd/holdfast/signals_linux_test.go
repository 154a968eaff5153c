package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdfast-go/holdfast/servertest"
)

func init() {
	programs["listen"] = listen
	programs["regroup"] = regroup
}

// regroup leaves its process group for that of its parent, and goes on as a shell: regroup SCRIPT.
func regroup() {
	group, err := syscall.Getpgid(os.Getppid())
	if err == nil {
		err = syscall.Setpgid(0, group)
	}
	if err == nil {
		err = syscall.Exec("/bin/sh", []string{"sh", "-c", os.Args[1]}, os.Environ())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// A command that leaves its process group is still ours: it hears signals, and is ended.
func TestCommandInAnotherGroup(t *testing.T) {
	t.Parallel()
	const loop = "touch started; while :; do sleep 0.02; done"
	for name, c := range map[string]struct {
		args   []string
		script string
		signal os.Signal
		code   int
	}{
		"signal": {nil, `trap "exit 7" USR1; ` + loop, syscall.SIGUSR1, 7},
		"TERM":   {[]string{"--max-hold", "2s"}, loop, nil, exitLost},
		"KILL":   {[]string{"--max-hold", "2s", "--grace", "200ms"}, `trap "" TERM; ` + loop, nil, exitLost},
		"alone":  {nil, "touch started; exit 3", nil, 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			p := launch(t, dir, append(append([]string{"run", "--store", "sqlite:locks.db"}, c.args...), "k", "--", "regroup", c.script)...)
			eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
			if c.signal != nil {
				if err := p.Process.Signal(c.signal); err != nil {
					t.Fatal(err)
				}
			}
			if code := p.code(); code != c.code || strings.Contains(p.err.String(), "does not end") {
				t.Errorf("exit code %d, want %d; %s", code, c.code, p.err.String())
			}
		})
	}
}

// listen notes the first of these signals that it hears, and ends with 5: listen FILE NUMBER...
func listen() {
	heard := make(chan os.Signal, 1)
	for _, n := range os.Args[2:] {
		n, _ := strconv.Atoi(n)
		signal.Notify(heard, syscall.Signal(n))
	}
	_ = os.WriteFile(os.Args[1]+".ready", nil, 0o600)
	s := <-heard
	_ = os.WriteFile(os.Args[1], []byte(strconv.Itoa(int(s.(syscall.Signal)))), 0o600)
	os.Exit(5)
}

// Each signal that can be caught reaches the command, none ends us, and the exit code is the
// command's.
//
// CLI-02 (hashicorp/consul#1210, #2489)
func TestForward(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var wg sync.WaitGroup
	running := make(chan struct{}, 4)
	for n := 1; n <= 64; n++ {
		switch syscall.Signal(n) {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGPIPE, unix.SIGCHLD, unix.SIGURG, unix.SIGPROF, unix.SIGTTOU:
			continue
		}
		if n < 32 || n == 64 || soak() && n > 34 { // the real-time signals are alike; the first ones are the C library's
			wg.Go(func() {
				running <- struct{}{}
				defer func() { <-running }()
				forward(t, dir, n)
			})
		}
	}
	wg.Wait()
}

func forward(t *testing.T, dir string, n int) {
	heard := filepath.Join(dir, strconv.Itoa(n))
	p := exec.Command("holdfast", "run", "--store", "sqlite:"+filepath.Join(dir, "locks.db"), fmt.Sprint("k", n), "--", "listen", heard, strconv.Itoa(n))
	p.Env = append(os.Environ(), "GOTRACEBACK=none")
	if err := p.Start(); err != nil {
		t.Error(err)
		return
	}
	defer p.Process.Kill()
	for try := 0; !exists(heard+".ready") && try < 3000; try++ {
		time.Sleep(10 * time.Millisecond)
	}
	// Neither these end us, nor are they of interest to the command.
	for _, s := range []syscall.Signal{unix.SIGPIPE, unix.SIGCHLD, unix.SIGURG, unix.SIGPROF} {
		_ = p.Process.Signal(s)
	}
	_ = p.Process.Signal(syscall.Signal(n))
	err := p.Wait()
	text, _ := os.ReadFile(heard)
	if p.ProcessState.ExitCode() != 5 || string(text) != strconv.Itoa(n) {
		t.Errorf("signal %d: the command heard %q; %v", n, text, err)
	}
}

// The terminal of a command that runs goes away: it ends by HUP, and nothing is left.
//
// CLI-02
func TestHangup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p, keyboard, screen := terminal(t, dir, "run", "--store", "sqlite:"+filepath.Join(dir, "locks.db"), "k", "--",
		"sh", "-c", "trap 'touch hup; exit 5' HUP; touch started; while :; do sleep 0.02; done")
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
	keyboard.Close()
	if code := p.code(); code != 5 || !exists(filepath.Join(dir, "hup")) {
		t.Errorf("exit code %d, HUP heard: %v; %s", code, exists(filepath.Join(dir, "hup")), screen.String())
	}
	next := launch(t, dir, "run", "--store", "sqlite:"+filepath.Join(dir, "locks.db"), "-n", "k", "--", "true")
	if code := next.code(); code != 0 {
		t.Errorf("the next one: exit code %d; %s", code, next.err.String())
	}
}

// While it waits on a terminal, one line says so, rewritten in place and gone when the
// command begins.
func TestProgress(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run := []string{"run", "--store", "sqlite:" + filepath.Join(dir, "locks.db")}
	holder := launch(t, dir, append(run, "--label", "nightly\n\x1b[2J on db1", "k", "--", "sh", "-c", "touch started; while [ ! -e stop ]; do sleep 0.02; done")...)
	eventually(t, "the holder runs", func() bool { return exists(filepath.Join(dir, "started")) })
	p, _, screen := terminal(t, dir, append(run, "k", "--", "echo", "done")...)
	eventually(t, "it waits for a while", func() bool { return strings.Contains(screen.String(), `since 3s: `) })
	waited := screen.String()
	const want = `holdfast: waiting for "k" since 3s: held by "nightly\n\x1b[2J on db1" since `
	if !strings.Contains(waited, want) || strings.ContainsAny(waited, "\n\x1b") || strings.Count(waited, "\r") < 2 {
		t.Errorf("the screen: %q, want one line like %q", waited, want)
	}
	if err := os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code := p.code(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	eventually(t, "the command speaks", func() bool { return strings.HasSuffix(screen.String(), "done\r\n") })
	if shown := screen.String(); !strings.HasSuffix(shown, " \rdone\r\n") {
		t.Errorf("the line of progress is still there: %q", shown[max(0, len(shown)-300):])
	}
	if code := holder.code(); code != 0 {
		t.Errorf("the holder ends with %d", code)
	}
}

// A signal from the keyboard ends a wait and takes the line away.
func TestProgressInterrupted(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	run := []string{"run", "--store", "sqlite:" + filepath.Join(dir, "locks.db"), strings.Repeat("k", 500), "--"}
	holder := launch(t, dir, append(run, "sh", "-c", "touch started; exec sleep 60")...)
	eventually(t, "the holder runs", func() bool { return exists(filepath.Join(dir, "started")) })
	p, keyboard, screen := terminal(t, dir, append(run, "touch", "ran")...)
	eventually(t, "it waits for a while", func() bool { return strings.Contains(screen.String(), `since 2s: `) })
	for line := range strings.SplitSeq(screen.String(), "\r") {
		if len(line) >= 80 {
			t.Errorf("a line of %d columns: %q", len(line), line)
		}
	}
	typeIn(t, keyboard, "\x03")
	if code := p.code(); code != 130 || exists(filepath.Join(dir, "ran")) {
		t.Errorf("exit code %d, the command ran: %v", code, exists(filepath.Join(dir, "ran")))
	}
	eventually(t, "the line is gone", func() bool { return strings.HasSuffix(screen.String(), " \r") })
	_ = holder.Process.Signal(syscall.SIGTERM)
	if code := holder.code(); code != 143 {
		t.Errorf("the holder ends with %d", code)
	}
}

// Another process of our job, as a pager at the end of a pipeline, may read the terminal, and
// then the command may.
func TestPager(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const script = `set -m
		holdfast run -v k -- sh -c 'read first </dev/tty; echo "[first $first]"; while [ ! -e paged ]; do sleep 0.02; done; read last </dev/tty; echo "[last $last]"' |
		{ read line; echo "$line"; read key </dev/tty; echo "[key $key]"; touch paged; cat; }`
	cmd := exec.Command("sh", "-c", script)
	cmd.Env = append(os.Environ(), "HOLDFAST_STORE=sqlite:"+filepath.Join(dir, "locks.db"))
	p, keyboard, screen := terminalFor(t, dir, cmd)
	shows := func(text string) {
		t.Helper()
		eventually(t, text+" is shown", func() bool { return strings.Contains(screen.String(), text) })
	}
	shows("acquired")
	typeIn(t, keyboard, "a\n")
	shows("[first a]")
	typeIn(t, keyboard, "b\n")
	shows("[key b]")
	typeIn(t, keyboard, "c\n")
	shows("[last c]")
	shows("sh ended with exit code 0")
	shows("released")
	p.code() // a shell that was told of the stop and not of its end may take the pager for stopped
}

// A signal ends the watch also while the store does not answer, and not the lease.
func TestWhilePIDUnanswered(t *testing.T) {
	t.Parallel()
	server := servertest.Redis(t, aged)
	proxy := servertest.NewProxy(t, server.Addr())
	url, dir := "redis://"+proxy.Addr(), t.TempDir()
	if code, _, errs := verb(t, "acquire", "--store", url, "--ttl", "30s", "--ticket-file", filepath.Join(dir, "ticket"), "k"); code != 0 {
		t.Fatal(errs)
	}
	proxy.BlackHole()
	p := launch(t, dir, "extend", "--store", url, "--ticket-file", "ticket", "--while-pid", strconv.Itoa(os.Getpid()))
	eventually(t, "the black hole swallows a request", func() bool { return proxy.Counts().BlackHoled > 0 })
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := p.code(); code != exitSignal+int(syscall.SIGTERM) || !strings.Contains(p.err.String(), "the ticket stays good until its ttl ends") {
		t.Errorf("%d, %s", code, p.err.String())
	}
	proxy.Heal()
	if code, _, errs := verb(t, "release", "--store", url, "--ticket-file", filepath.Join(dir, "ticket")); code != 0 {
		t.Errorf("the ticket is of no use any more: %s", errs)
	}
}
