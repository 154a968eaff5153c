package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/servertest"
)

// process is a holdfast that runs in a test.
type process struct {
	*exec.Cmd
	t   *testing.T
	err output
}

// output is what a process wrote so far.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func launch(t *testing.T, dir string, args ...string) *process {
	t.Helper()
	return launchIn(t, nil, dir, args...)
}

// launchIn launches it in a changed environment.
func launchIn(t *testing.T, env []string, dir string, args ...string) *process {
	t.Helper()
	p := &process{Cmd: exec.Command("holdfast", args...), t: t}
	p.Dir, p.Env = dir, append(os.Environ(), env...)
	p.Stderr = &p.err
	p.WaitDelay = 10 * time.Second
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.ProcessState == nil {
			p.Process.Kill()
			p.Wait()
		}
	})
	return p
}

// code waits for the end of the process.
func (p *process) code() int {
	p.t.Helper()
	err := p.Wait()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		p.t.Fatal(err)
	}
	return p.ProcessState.ExitCode()
}

// eventually waits until f is true; the bound only ends a test that has failed.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for range 3000 {
		if f() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("it never came about: " + what)
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// A key that is deleted under a holder: the command gets TERM, then KILL, and the exit
// code is that of a lost lease, whatever the command made of it. TERM is the hook for what is
// to be done on a loss (CLI-12, etcd-io/etcd#7983).
func TestLost(t *testing.T) {
	server := servertest.Redis(t, aged)
	for name, c := range map[string]struct {
		script string
		args   []string
		code   int
		left   string // file that the handler leaves
	}{
		"handled": {script: `trap "touch term; exit 0" TERM; touch started; while :; do sleep 0.02; done`, code: 75, left: "term"},
		"deaf":    {script: `trap "" TERM; touch started; while :; do sleep 0.02; done`, code: 75},
		"code":    {script: `touch started; while :; do sleep 0.02; done`, args: []string{"--lost-exit-code", "9"}, code: 9},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			args := append([]string{"run", "--store", "redis://" + server.Addr(), "--ttl", "2s", "--grace", "300ms"}, c.args...)
			p := launch(t, dir, append(args, "lost-"+name, "--", "sh", "-c", c.script)...)
			eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
			if n, err := server.Do("DEL", "lost-"+name); err != nil || n != int64(1) {
				t.Fatalf("DEL: %v, %v", n, err)
			}
			if code := p.code(); code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			if text := p.err.String(); !strings.Contains(text, "lease lost: gone from the store; ending sh") {
				t.Errorf("stderr: %q", text)
			}
			if c.left != "" && !exists(filepath.Join(dir, c.left)) {
				t.Error("the command did not get TERM")
			}
			if n, err := server.Do("EXISTS", "lost-"+name); err != nil || n != int64(0) {
				t.Errorf("EXISTS: %v, %v; a lost key must not come back", n, err)
			}
		})
	}
}

// A stderr that nobody reads holds up nothing: neither the end of the command whose lease
// is lost nor our own.
func TestStderrThatNobodyReads(t *testing.T) {
	server := servertest.Redis(t, aged)
	unread, full, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer unread.Close()
	full.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
	for err == nil {
		_, err = full.Write(make([]byte, 512))
	}
	dir := t.TempDir()
	p := exec.Command("holdfast", "run", "--store", "redis://"+server.Addr(), "--ttl", "2s", "k", "--",
		"sh", "-c", "touch started; while [ ! -e stop ]; do sleep 0.02; done")
	p.Dir, p.Stderr = dir, full
	child := servertest.Start(t, p)
	full.Close()
	defer os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600)
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
	if n, err := server.Do("DEL", "k"); err != nil || n != int64(1) {
		t.Fatalf("DEL: %v, %v", n, err)
	}
	select {
	case <-child.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the command runs on without its lease")
	}
	if code := p.ProcessState.ExitCode(); code != exitLost {
		t.Errorf("exit code %d, want %d", code, exitLost)
	}
}

// A lease that ended while we were paused, between its grant and the start of the command,
// runs nothing.
func TestLostBeforeTheStart(t *testing.T) {
	mem := memstore.New()
	f := runFlags{lostCode: exitLost, grace: time.Second}
	report := newReporter("k")
	locks, err := holdfast.New(mem, &holdfast.Options{Observer: report})
	if err != nil {
		t.Fatal(err)
	}
	lease, err := locks.Acquire(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	report.waited()
	if err := mem.Lose("k"); err != nil {
		t.Fatal(err)
	}
	_ = lease.Extend(t.Context())
	ran := filepath.Join(t.TempDir(), "ran")
	j := job{runFlags: &f, name: "touch", lease: lease, granted: time.Now(), report: report}
	code, err := j.supervise(exec.Command("touch", ran))
	e, ok := errors.AsType[*exit](j.finish(code, err))
	if !ok || e.code != exitLost || !errors.Is(e, holdfast.ErrLost) {
		t.Errorf("ends with %v", e)
	}
	if exists(ran) {
		t.Error("the command was run")
	}
}

// A node that may have forgotten locks: --nonblock says so and when it votes, a wait says
// so after a second.
func TestYoung(t *testing.T) {
	server := servertest.Redis(t)
	url := "redis://" + server.Addr()
	p := launch(t, t.TempDir(), "run", "--store", url, "-n", "k", "--", "true")
	if code := p.code(); code != exitFailed {
		t.Errorf("exit code %d, want %d", code, exitFailed)
	}
	if text := p.err.String(); !strings.Contains(text, server.Addr()) || !strings.Contains(text, "votes in") || strings.Count(text, "\n") != 1 {
		t.Errorf("stderr: %q", text)
	}
	p = launch(t, t.TempDir(), "run", "--store", url, "-w", "2500ms", "k", "--", "true")
	if code := p.code(); code != exitFailed {
		t.Errorf("exit code %d, want %d", code, exitFailed)
	}
	if text := p.err.String(); strings.Count(text, "waiting for \"k\"") != 1 {
		t.Errorf("the wait is told more or less than once: %q", text)
	}
	p = launch(t, t.TempDir(), "run", "--store", url+"?trust-restarts=1", "-n", "k", "--", "true")
	if code := p.code(); code != 0 {
		t.Errorf("with trust-restarts: exit code %d: %s", code, p.err.String())
	}
}

// A signal while waiting gives up at once, and leaves no claim, key or process behind, at
// whatever moment it comes.
func TestGiveUp(t *testing.T) {
	rounds := 2
	if soak() {
		rounds = 100
	}
	hearHangup(t)
	signals := []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}
	for name, nodes := range map[string]int{"sqlite": 0, "one node": 1, "three nodes": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newQuitters(t, nodes)
			for range rounds {
				for _, s := range signals {
					g.waiting(s)
					g.early(s)
				}
			}
			g.end()
			t.Logf("%d of %d waiters gave up by each of %v; %d more were hit while they started, %d of them before they could hear it",
				rounds, rounds, signals, g.hit, g.deaf)
		})
	}
}

// quitters are a key that is held, and waiters that give up.
type quitters struct {
	t         *testing.T
	dir       string
	servers   []*servertest.RedisServer
	run       []string
	holder    *process
	keys      string
	hit, deaf int
}

func newQuitters(t *testing.T, nodes int) *quitters {
	q := &quitters{t: t, dir: t.TempDir(), run: []string{"run"}}
	if nodes == 0 {
		q.run = append(q.run, "--store", "sqlite:"+filepath.Join(q.dir, "locks.db"))
	} else {
		q.servers = servertest.RedisN(t, nodes, aged)
		for _, u := range redisURLs(q.servers) {
			q.run = append(q.run, "--store", u)
		}
	}
	q.holder = launch(t, q.dir, append(q.run, "k", "--", "sh", "-c", "touch started; while [ ! -e stop ]; do sleep 0.02; done")...)
	eventually(t, "the holder runs", func() bool { return exists(filepath.Join(q.dir, "started")) })
	q.keys = q.records()
	return q
}

// records is what the servers hold of the key.
func (q *quitters) records() string {
	var all []string
	for _, s := range q.servers {
		holder, err := s.Do("GET", "k")
		if err != nil {
			q.t.Fatal(err)
		}
		keys, err := s.Do("KEYS", "*")
		if err != nil {
			q.t.Fatal(err)
		}
		names := []string{}
		for _, name := range keys.([]any) {
			if name := fmt.Sprint(name); !strings.HasPrefix(name, "{holdfast}:") { // not of this key
				names = append(names, name)
			}
		}
		slices.Sort(names)
		all = append(all, fmt.Sprint(holder, " ", names))
	}
	return strings.Join(all, "\n")
}

func (q *quitters) launch() *process {
	return launch(q.t, q.dir, append(q.run, "--json", "k", "--", "touch", "ran")...)
}

// waiting hits a waiter that has been refused and waits.
func (q *quitters) waiting(s syscall.Signal) {
	p := q.launch()
	eventually(q.t, "the waiter says so", func() bool { return strings.Contains(p.err.String(), `"event":"waiting"`) })
	time.Sleep(rand.N(60 * time.Millisecond))
	q.signal(p, s)
	if code := p.code(); code != exitSignal+int(s) {
		q.t.Errorf("%v: exit code %d; %s", s, code, p.err.String())
	}
	q.check(s)
}

// early hits one at any moment of its start. Before it can catch a signal, that ends it.
func (q *quitters) early(s syscall.Signal) {
	p := q.launch()
	time.Sleep(rand.N(120 * time.Millisecond))
	q.signal(p, s)
	q.hit++
	code := p.code()
	if status := p.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() && status.Signal() == s || s == syscall.SIGQUIT && code == 2 {
		q.deaf++
	} else if code != exitSignal+int(s) {
		q.t.Errorf("%v: exit code %d; %s", s, code, p.err.String())
	}
	q.check(s)
}

func (q *quitters) signal(p *process, s syscall.Signal) {
	if err := p.Process.Signal(s); err != nil {
		q.t.Error(err)
	}
}

func (q *quitters) check(s syscall.Signal) {
	if now := q.records(); now != q.keys {
		q.t.Errorf("%v: the servers hold\n%s\nbefore it was\n%s", s, now, q.keys)
	}
}

// end lets the holder go: nobody must be in the way of the next one, which does not wait.
func (q *quitters) end() {
	if err := os.WriteFile(filepath.Join(q.dir, "stop"), nil, 0o600); err != nil {
		q.t.Fatal(err)
	}
	if code := q.holder.code(); code != 0 {
		q.t.Errorf("the holder ends with %d: %s", code, q.holder.err.String())
	}
	for _, s := range q.servers {
		if n, err := s.Do("EXISTS", "k"); err != nil || n != int64(0) {
			q.t.Errorf("%s: EXISTS %v, %v", s.Addr(), n, err)
		}
	}
	next := launch(q.t, q.dir, append(q.run, "-n", "k", "--", "true")...)
	if code := next.code(); code != 0 {
		q.t.Errorf("the next one ends with %d: %s", code, next.err.String())
	}
	if exists(filepath.Join(q.dir, "ran")) {
		q.t.Error("a waiter ran its command")
	}
}

// A release that fails is told, and does not make a failure of what the command did.
func TestReleaseFails(t *testing.T) {
	server := servertest.Redis(t, aged)
	proxy := servertest.NewProxy(t, server.Addr())
	dir := t.TempDir()
	p := launch(t, dir, "run", "--store", "redis://"+proxy.Addr(), "k", "--", "sh", "-c", "touch started; while [ ! -e stop ]; do sleep 0.02; done; exit 6")
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
	proxy.BlackHole()
	if err := os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code := p.code(); code != 6 {
		t.Errorf("exit code %d, want 6", code)
	}
	if text := p.err.String(); !strings.Contains(text, `release "k"`) || strings.Count(text, "\n") != 1 {
		t.Errorf("stderr: %q", text)
	}
	if proxy.Counts().BlackHoled == 0 {
		t.Error("the black hole swallowed nothing")
	}
}

// Servers that are away are named, each with its fault; their password is not.
func TestAway(t *testing.T) {
	servers := servertest.RedisN(t, 5, aged, servertest.Config("requirepass", "hunter2"), servertest.As("", "hunter2"))
	args := []string{"run", "-n"}
	for _, s := range servers {
		args = append(args, "--store", "redis://:hunter2@"+s.Addr())
	}
	for _, s := range servers[:3] {
		s.Kill()
	}
	p := launch(t, t.TempDir(), append(args, "k", "--", "true")...)
	if code := p.code(); code != exitFailed {
		t.Errorf("exit code %d, want %d", code, exitFailed)
	}
	text := p.err.String()
	for _, s := range servers[:3] {
		if !strings.Contains(text, s.Addr()+": ") {
			t.Errorf("stderr does not name %s: %q", s.Addr(), text)
		}
	}
	if strings.Contains(text, "hunter2") || strings.Count(text, "\n") != 1 {
		t.Errorf("stderr: %q", text)
	}
}
