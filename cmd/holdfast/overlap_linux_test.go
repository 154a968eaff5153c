package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/holdfast-go/holdfast/servertest"
)

func init() {
	programs["tick"] = tick
	programs["succeed"] = succeed
}

// bootTime is one clock for all processes of the machine.
func bootTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err)
	}
	return t.Nano()
}

// tick notes, over and over, that it lives: tick FILE [deaf].
func tick() {
	if len(os.Args) > 2 {
		signal.Ignore(syscall.SIGTERM)
	}
	f, err := os.OpenFile(os.Args[1], os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		fmt.Fprintln(os.Stderr, "tick:", err)
		os.Exit(9)
	}
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		fmt.Fprintln(f, os.Getpid(), bootTime())
	}
}

// succeed notes when it began, and which of those that ticked still live: succeed FILE TICKS.
func succeed() {
	began := bootTime()
	var left []string
	for pid := range ticks(os.Args[2]) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if _, state, ok := strings.Cut(string(stat), ") "); err == nil && ok && strings.HasPrefix(string(stat[strings.IndexByte(string(stat), '('):]), "(tick)") && !strings.HasPrefix(state, "Z") && !strings.HasPrefix(state, "X") {
			left = append(left, strconv.Itoa(pid))
		}
	}
	if err := os.WriteFile(os.Args[1], fmt.Appendf(nil, "%d %s", began, strings.Join(left, ",")), 0o600); err != nil {
		os.Exit(9)
	}
}

// ticks reads the last sign of life of each process that ticked.
func ticks(name string) map[int]int64 {
	text, _ := os.ReadFile(name)
	last := map[int]int64{}
	for line := range strings.Lines(string(text)) {
		var pid int
		var at int64
		if n, _ := fmt.Sscan(line, &pid, &at); n == 2 {
			last[pid] = at
		}
	}
	return last
}

// What a cut-off holder has started is gone before the next holder's command starts: the
// command, what that has started, and what does not hear TERM.
//
// CLI-04 (hashicorp/consul#9788, #18271), LOS-04 (etcd-io/etcd#10811) with a Redis store
// and the kill in place of the guard.
func TestBlackHole(t *testing.T) {
	rounds := 1
	if soak() {
		rounds = 50
	}
	for _, n := range []int{1, 3} {
		servers := servertest.RedisN(t, n, aged)
		for _, c := range []blackHole{
			{name: "shell", script: `sh -c "tick ticks & wait" & tick ticks; true`, processes: 2},
			{name: "deaf", script: `trap "" TERM; tick ticks deaf & tick ticks deaf; true`, processes: 2},
			{name: "pipeline", script: `tick ticks | tick ticks | tick ticks`, processes: 3},
		} {
			t.Run(fmt.Sprintf("%d nodes, %s", n, c.name), func(t *testing.T) {
				t.Parallel()
				gone := 0
				for range rounds {
					if c.run(t, servers) {
						gone++
					}
				}
				t.Logf("gone before the next one began: %d of %d; closest %v, %d chunks swallowed", gone, rounds, c.closest.Round(time.Millisecond), c.hits)
			})
		}
	}
}

// blackHole is a command whose holdfast is cut off, and what came of it.
type blackHole struct {
	name, script string
	processes    int // that tick

	closest time.Duration // from the last sign of life to the next holder
	hits    int64
}

func (b *blackHole) run(t *testing.T, servers []*servertest.RedisServer) (gone bool) {
	dir := t.TempDir()
	alive, next := filepath.Join(dir, "ticks"), filepath.Join(dir, "next")
	key := "hole-" + b.name
	args := []string{"run", "--ttl", "2s"}
	var proxies []*servertest.Proxy
	for _, s := range servers {
		p := servertest.NewProxy(t, s.Addr())
		defer p.Close()
		proxies = append(proxies, p)
		args = append(args, "--store", "redis://"+p.Addr())
	}
	p := launch(t, dir, append(args, key, "--", "sh", "-c", b.script)...)
	eventually(t, "all processes run", func() bool { return len(ticks(alive)) == b.processes })
	for _, p := range proxies {
		p.BlackHole()
	}
	direct := []string{"run", "--ttl", "2s"}
	for _, u := range redisURLs(servers) {
		direct = append(direct, "--store", u)
	}
	other := launch(t, dir, append(direct, key, "--", "succeed", next, alive)...)
	if code := other.code(); code != 0 {
		t.Fatalf("the next holder ends with %d: %s", code, other.err.String())
	}
	if code := p.code(); code != exitLost {
		t.Errorf("exit code %d, want %d; %s", code, exitLost, p.err.String())
	}
	if text := p.err.String(); !strings.Contains(text, "cannot extend") || !strings.Contains(text, "lease lost") {
		t.Errorf("stderr: %s", text)
	}
	for _, p := range proxies {
		b.hits += p.Counts().BlackHoled
	}
	if b.hits == 0 {
		t.Error("the black hole swallowed nothing")
	}
	return b.verdict(t, alive, next)
}

func (b *blackHole) verdict(t *testing.T, alive, next string) bool {
	text, err := os.ReadFile(next)
	if err != nil {
		t.Fatal(err)
	}
	began, left, _ := strings.Cut(string(text), " ")
	at, err := strconv.ParseInt(began, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	last := int64(0)
	for _, sign := range ticks(alive) {
		last = max(last, sign)
	}
	ahead := time.Duration(at - last)
	if b.closest == 0 || ahead < b.closest {
		b.closest = ahead
	}
	if ahead <= 0 || left != "" {
		t.Errorf("the cut-off command lived %v into the next lease; processes left: [%s]", -ahead, left)
		return false
	}
	return true
}

// A holdfast that stands still for longer than its lease ends its command when it goes on,
// tells of one loss, and can start anew. Meanwhile nobody ends the command: the token is for
// that.
//
// LOS-08 (sibson/redbeat#218 and others)
func TestStoodStill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	args := []string{"run", "--store", "sqlite:" + filepath.Join(dir, "locks.db"), "--ttl", "1s", "--json", "k", "--"}
	p := launch(t, dir, append(args, "sh", "-c", "touch started; while :; do sleep 0.02; done")...)
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
	if err := servertest.Pause(p.Process.Pid); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	if err := servertest.Resume(p.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if code := p.code(); code != exitLost {
		t.Errorf("exit code %d, want %d; %s", code, exitLost, p.err.String())
	}
	if n := strings.Count(p.err.String(), `"event":"lost"`); n != 1 {
		t.Errorf("%d losses are told: %s", n, p.err.String())
	}
	next := launch(t, dir, append(args, "true")...)
	if code := next.code(); code != 0 {
		t.Errorf("afterwards: exit code %d; %s", code, next.err.String())
	}
}

// What runs as another user cannot be ended by a holdfast that is not root: that is told, the
// key is not given back before it has ended, and the exit code is that of a lost lease.
func TestOtherUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make a program that runs as another user")
	}
	t.Parallel()
	server := servertest.Redis(t, aged)
	dir := t.TempDir()
	for d := dir; strings.HasPrefix(d, os.TempDir()+"/"); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	holdfast, sudo := filepath.Join(dir, "holdfast"), filepath.Join(dir, "sudo")
	copyProgram(t, holdfast, "/proc/self/exe", 0o755)
	setpriv, err := exec.LookPath("setpriv")
	if err != nil {
		t.Skip(err)
	}
	copyProgram(t, sudo, setpriv, 0o755|os.ModeSetuid)
	nobody := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	try := exec.Command(sudo, "--reuid=0", "true")
	try.SysProcAttr = nobody
	if out, err := try.CombinedOutput(); err != nil {
		t.Skipf("this system lets no program run as another user: %v: %s", err, out)
	}

	p := &process{Cmd: exec.Command(holdfast, "run", "--store", "redis://"+server.Addr(), "--ttl", "1s", "--grace", "100ms", "k", "--", sudo, "--reuid=0", "sleep", "4"), t: t}
	p.Dir, p.Stderr, p.Env = dir, &p.err, append(os.Environ(), "HOME="+dir)
	p.SysProcAttr = nobody
	child := servertest.Start(t, p.Cmd)
	eventually(t, "the key is held", func() bool { n, err := server.Do("EXISTS", "k"); return err == nil && n == int64(1) })
	eventually(t, "the command runs as root: "+p.err.String(), func() bool {
		for _, pid := range childrenOf(p.Process.Pid) {
			status, _ := os.ReadFile(fmt.Sprintf("/proc/%s/status", pid))
			if strings.HasPrefix(string(status), "Name:\tsleep\n") && strings.Contains(string(status), "\nUid:\t0\t0\t") {
				return true
			}
		}
		return false
	})
	began := time.Now()
	if n, err := server.Do("DEL", "k"); err != nil || n != int64(1) {
		t.Fatalf("DEL: %v, %v", n, err)
	}
	eventually(t, "holdfast says that it cannot end it", func() bool { return strings.Contains(p.err.String(), "runs as another user") })
	<-child.Done()
	if code := p.ProcessState.ExitCode(); code != exitLost {
		t.Errorf("exit code %d, want %d", code, exitLost)
	}
	t.Logf("ended %v after the loss: %s", time.Since(began).Round(time.Millisecond), p.err.String())
}

func childrenOf(pid int) (children []string) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, list := range lists {
		text, _ := os.ReadFile(list)
		children = append(children, strings.Fields(string(text))...)
	}
	return children
}

func copyProgram(t *testing.T, to, from string, mode os.FileMode) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, text, 0o755)
	}
	if err == nil {
		err = os.Chmod(to, mode)
	}
	if err != nil {
		t.Fatal(err)
	}
}
