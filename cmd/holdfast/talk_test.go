package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
)

// records reads the lines of --json. There must be nothing else.
func records(t *testing.T, text string) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(text) {
		var r map[string]any
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v in %q", err, line)
		}
		if at, _ := r["time"].(float64); time.Since(time.UnixMilli(int64(at*1000))).Abs() > time.Hour {
			t.Errorf("time %v in %s", r["time"], line)
		}
		all = append(all, r)
	}
	return all
}

func events(all []map[string]any) (names []string) {
	for _, r := range all {
		names = append(names, fmt.Sprint(r["event"]))
	}
	return slices.Compact(names)
}

// The whole story of a run as JSON.
func TestJSON(t *testing.T) {
	t.Parallel()
	server := servertest.Redis(t, aged)
	proxy := servertest.NewProxy(t, server.Addr())
	dir := t.TempDir()
	run := []string{"run", "--json", "--ttl", "2s", "--store", "redis://" + proxy.Addr()}
	const forever = "touch $0; while [ ! -e stop ]; do sleep 0.02; done"

	holder := launch(t, dir, append(run, "--label", "first", "k", "--", "sh", "-c", forever, "first")...)
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "first")) })
	waiter := launch(t, dir, append(run, "k", "--", "sh", "-c", "echo $HOLDFAST_TOKEN $HOLDFAST_OWNER $HOLDFAST_DEADLINE >words; exec sh -c '"+forever+"' second")...)
	eventually(t, "the waiter waits", func() bool { return strings.Contains(waiter.err.String(), `"waiting"`) })
	if err := os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code := holder.code(); code != 0 {
		t.Errorf("exit code %d", code)
	}
	os.Remove(filepath.Join(dir, "stop"))
	told := records(t, holder.err.String())
	if got := strings.Join(events(told), " "); got != "acquired ended released" {
		t.Errorf("the first one tells of %s: %s", got, holder.err.String())
	}

	eventually(t, "the second command runs", func() bool { return exists(filepath.Join(dir, "second")) })
	proxy.BlackHole()
	if code := waiter.code(); code != exitLost {
		t.Errorf("exit code %d", code)
	}
	proxy.Heal()
	told = records(t, waiter.err.String())
	if got := strings.Join(events(told), " "); got != "waiting acquired at-risk lost ended released" {
		t.Errorf("the second one tells of %s: %s", got, waiter.err.String())
	}
	words, err := os.ReadFile(filepath.Join(dir, "words"))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range told {
		if r["key"] != "k" {
			t.Errorf("key %v", r["key"])
		}
		switch r["event"] {
		case "waiting":
			if h, _ := r["holder"].(map[string]any); h["label"] != "first" || h["owner"] != nil {
				t.Errorf("holder %v", r["holder"])
			}
		case "acquired":
			deadline, _ := r["deadline"].(float64)
			token, _ := r["token"].(float64)
			want := strings.Fields(string(words))
			if got := strconv.FormatInt(int64(token), 10); got != want[0] || r["owner"] != want[1] {
				t.Errorf("token %v, owner %v; the command has %q", got, r["owner"], want)
			}
			if at, _ := strconv.ParseInt(want[2], 10, 64); time.Duration(int64(deadline)-at).Abs() > 1 {
				t.Errorf("deadline %v; the command has %d", deadline, at)
			}
		case "lost":
			if r["cause"] != "expired" {
				t.Errorf("cause %v", r["cause"])
			}
		case "ended":
			if r["code"] != 143.0 {
				t.Errorf("code %v", r["code"])
			}
		}
	}
	if proxy.Counts().BlackHoled == 0 {
		t.Error("the black hole swallowed nothing")
	}
}

// A hole of two fifths of the ttl changes nothing, whenever it begins; the whole story of a
// longer one is TestBlackHole.
//
// LOS-13 (tox-dev/filelock#661)
func TestShortBlackHole(t *testing.T) {
	t.Parallel()
	server := servertest.Redis(t, aged)
	const ttl = 8 * time.Second
	var wg sync.WaitGroup
	for i := range 4 {
		proxy := servertest.NewProxy(t, server.Addr())
		dir := t.TempDir()
		p := launch(t, dir, "run", "--json", "--ttl", ttl.String(), "--store", "redis://"+proxy.Addr(), fmt.Sprint("k", i), "--",
			"sh", "-c", "touch started; while [ ! -e stop ]; do sleep 0.02; done")
		wg.Go(func() {
			eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
			time.Sleep(ttl * time.Duration(i) / 10)
			proxy.BlackHole()
			time.Sleep(2 * ttl / 5)
			proxy.Heal()
			time.Sleep(ttl / 4)
			_ = os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600)
		})
		defer func() {
			wg.Wait()
			if code := p.code(); code != 0 || strings.Contains(p.err.String(), `"lost"`) {
				t.Errorf("a hole after %d/10 of the ttl: exit code %d; %s", i, code, p.err.String())
			}
			if proxy.Counts().BlackHoled == 0 {
				t.Errorf("the black hole after %d/10 of the ttl swallowed nothing", i)
			}
		}()
	}
}

// A majority of the nodes goes away: the command is ended, without being asked to look.
//
// LOS-01 (samcook/RedLock.net#46)
func TestMajorityGone(t *testing.T) {
	t.Parallel()
	servers := servertest.RedisN(t, 3, aged)
	args := []string{"run", "--ttl", "2s"}
	for _, u := range redisURLs(servers) {
		args = append(args, "--store", u)
	}
	dir := t.TempDir()
	p := launch(t, dir, append(args, "k", "--", "sh", "-c", "touch started; trap 'touch term; exit 3' TERM; while :; do sleep 0.02; done")...)
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
	servers[0].Kill()
	servers[1].Kill()
	if code := p.code(); code != exitLost || !exists(filepath.Join(dir, "term")) {
		t.Errorf("exit code %d, TERM heard: %v; %s", code, exists(filepath.Join(dir, "term")), p.err.String())
	}
}

// After a loss the end does not wait for a store that is away, beyond one bounded release.
//
// LOS-02 (mike-marcacci/node-redlock#309)
func TestLostEndsSoon(t *testing.T) {
	t.Parallel()
	servers := servertest.RedisN(t, 3, aged)
	const ttl = 2 * time.Second
	args := []string{"run", "--ttl", ttl.String()}
	for _, u := range redisURLs(servers) {
		args = append(args, "--store", u)
	}
	dir := t.TempDir()
	p := launch(t, dir, append(args, "k", "--", "sh", "-c", "touch started; trap 'touch term; exit 3' TERM; while :; do sleep 0.02; done")...)
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "started")) })
	for _, s := range servers {
		s.Stop()
	}
	eventually(t, "the command is told to end", func() bool { return exists(filepath.Join(dir, "term")) })
	began := time.Now()
	if code := p.code(); code != exitLost {
		t.Errorf("exit code %d; %s", code, p.err.String())
	}
	if took := time.Since(began); took > 3*ttl {
		t.Errorf("it took %v to end", took)
	}
	if text := p.err.String(); !strings.Contains(text, "lease lost: its validity ran out") {
		t.Errorf("stderr: %s", text)
	}
}

// Standard input and output are the command's, byte by byte.
func TestStdin(t *testing.T) {
	t.Parallel()
	const size = 100 << 20
	random := func() io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{1}), size) }
	want, got := sha256.New(), sha256.New()
	if _, err := io.Copy(want, random()); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("holdfast", "run", "--store", "sqlite:"+filepath.Join(t.TempDir(), "locks.db"), "k", "--", "cat")
	cmd.Stdin, cmd.Stdout = random(), got
	var stderr output
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil || stderr.String() != "" {
		t.Fatalf("%v: %s", err, stderr.String())
	}
	if !bytes.Equal(want.Sum(nil), got.Sum(nil)) {
		t.Errorf("what comes out of %d MB is not what went in", size>>20)
	}
}

// No password is seen: not in the command line of any process that we start, not in what is
// said, in no form; but in HOLDFAST_STORE, which is for a holdfast inside.
func TestPassword(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	server := servertest.Redis(t, aged, servertest.Config("requirepass", secret), servertest.As("", secret))
	dir := t.TempDir()
	held := "touch started; for i in /proc/[0-9]*; do tr '\\0' ' ' <$i/cmdline; echo; done >all 2>/dev/null; while [ ! -e stop ]; do sleep 0.02; done; echo $HOLDFAST_STORE >store"
	run := func(url string, args ...string) *process {
		p := &process{Cmd: exec.Command("holdfast", append([]string{"run"}, args...)...), t: t}
		p.Dir, p.Stdout, p.Stderr = dir, &p.err, &p.err
		p.Env = append(os.Environ(), "HOLDFAST_STORE="+url)
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Process.Kill() })
		return p
	}
	url := "redis://:" + secret + "@" + server.Addr()
	holder := run(url, "-v", "k", "--", "sh", "-c", held)
	eventually(t, "the command runs", func() bool { return exists(filepath.Join(dir, "all")) })
	said := []*process{
		run(url, "-n", "k", "--", "true"),
		run(url, "--json", "-w", "1200ms", "k", "--", "true"),
		run("redis://:"+secret+"x@"+server.Addr(), "-n", "k", "--", "true"),
		run("redis://:"+secret+"x@"+server.Addr(), "--json", "-w", "1200ms", "k", "--", "true"),
		run("redis://:"+secret+"@127.0.0.1:1", "-n", "--json", "k", "--", "true"),
		run("redis://:"+secret+"@"+server.Addr()+"/x", "--json", "k", "--", "true"),
		run("redis://:"+secret+"@%zz", "k", "--", "true"),
		run("rediss://:"+secret+"@"+server.Addr(), "-w", "1200ms", "k", "--", "true"),
	}
	for i, p := range said {
		if code := p.code(); code == 0 || p.err.String() == "" {
			t.Errorf("%d: exit code %d, says %q", i, code, p.err.String())
		}
		if strings.Contains(p.err.String(), secret) {
			t.Errorf("%d says %q", i, p.err.String())
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if code := holder.code(); code != 0 || strings.Contains(holder.err.String(), secret) {
		t.Errorf("exit code %d, says %q", code, holder.err.String())
	}
	all, _ := os.ReadFile(filepath.Join(dir, "all"))
	store, _ := os.ReadFile(filepath.Join(dir, "store"))
	if strings.Contains(string(all), secret) || !strings.Contains(string(store), secret) {
		t.Errorf("command lines:\n%s\nHOLDFAST_STORE=%s", all, store)
	}
}

// No two acquisitions have the same owner, also of processes that begin at the same time.
//
// FRK-02 (opentracing/basictracer-python#14)
func TestOwners(t *testing.T) {
	t.Parallel()
	n := 16
	if soak() {
		n = 64
	}
	store := "sqlite:" + filepath.Join(t.TempDir(), "locks.db")
	owners := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			out, err := exec.Command("holdfast", "run", "--store", store, fmt.Sprint("k", i%4), "--", "sh", "-c", "echo $HOLDFAST_OWNER").Output()
			if err != nil {
				t.Error(err)
			}
			owners[i] = string(out)
		})
	}
	wg.Wait()
	slices.Sort(owners)
	if len(slices.Compact(slices.Clone(owners))) != n || len(owners[0]) < 128/8*2 {
		t.Errorf("owners: %q", owners)
	}
}
