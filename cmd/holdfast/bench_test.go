package main

import (
	"context"
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func TestPercentile(t *testing.T) {
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, c := range []struct {
		of    []time.Duration
		share float64
		want  time.Duration
	}{
		{hundred, 0.5, 50}, {hundred, 0.99, 99}, {hundred, 1, 100}, {hundred, 0, 1}, {hundred[:3], 0.5, 2}, {hundred[:1], 0.99, 1},
	} {
		if got := percentile(c.of, c.share); got != c.want {
			t.Errorf("%v of %d: %d, want %d", c.share, len(c.of), got, c.want)
		}
	}
}

// votes are the keys of a bench that somebody holds on the server.
func votes(t *testing.T, s *servertest.RedisServer) []string {
	t.Helper()
	v, err := s.Do("KEYS", "holdfast-bench:*")
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, k := range v.([]any) {
		keys = append(keys, k.(string))
	}
	return keys
}

// runBench runs a bench with --json and returns its object and exit code.
func runBench(t *testing.T, during func(p *process), args ...string) (r benchReport, p *process, code int) {
	t.Helper()
	var out output
	p = &process{Cmd: exec.Command("holdfast", append([]string{"bench", "--json"}, args...)...), t: t}
	p.Stdout, p.Stderr, p.WaitDelay = &out, &p.err, 10*time.Second
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.ProcessState == nil {
			p.Process.Kill()
			p.Wait()
		}
	})
	if during != nil {
		during(p)
	}
	code = p.code()
	if text := out.String(); text != "" {
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatalf("%v in:\n%s", err, text)
		}
	}
	return r, p, code
}

// Of three servers one is down: all operations are measured, the votes are counted for each
// server, and no key is left.
func TestBench(t *testing.T) {
	servers := servertest.RedisN(t, 3, aged)
	args := serverFlags(servers)
	servers[2].Kill()
	r, p, code := runBench(t, nil, append(args, "--duration", "500ms", "--parallel", "4", "--clients", "2")...)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, p.err.String())
	}
	if r.Kind != "redlock" || r.Quorum != 2 || r.Interrupted || !slices.Equal(r.Stores, redisURLs(servers)) {
		t.Errorf("%+v", r)
	}
	for _, o := range r.Operations {
		if o.Count == 0 || o.Failed > 0 || o.P50 <= 0 || o.P50 > o.P90 || o.P90 > o.P99 || o.P99 > o.Max {
			t.Errorf("%+v", o)
		}
		if single := o.Name == "acquire" || o.Name == "release" || o.Name == "acquire and release" || o.Name == "extend"; single != (o.Pings > 0) {
			t.Errorf("%s is %v pings", o.Name, o.Pings)
		}
		if (o.Name == "in parallel") != (o.PerSecond > 0) {
			t.Errorf("%s: %v per second", o.Name, o.PerSecond)
		}
	}
	// A stamp below the mark, after the clock's correction has gone back, costs one more vote.
	rounds := r.Operations[0].Count
	for i, n := range r.Nodes {
		up := i < 2
		if n.Name != servers[i].Addr() || up != (n.Given > 0) || up != (n.Vote.P50 > 0) || up != (n.Ping.P50 > 0) || n.Given+n.Refused+n.Missing < rounds {
			t.Errorf("%d rounds, %+v", rounds, n)
		}
	}
	if notes := strings.Join(r.Notes, "\n"); !strings.Contains(notes, servers[2].Addr()+" gave no vote") || strings.Contains(notes, servers[0].Addr()) {
		t.Errorf("notes: %s", notes)
	}
	if text := p.err.String(); text != "" {
		t.Errorf("stderr is no terminal, and gets %q", text)
	}
	for _, s := range servers[:2] {
		if keys := votes(t, s); len(keys) > 0 {
			t.Errorf("left on %s: %v", s.Addr(), keys)
		}
	}
}

// A signal ends the bench in whatever phase; what was measured is shown, and nothing is left.
func TestBenchInterrupted(t *testing.T) {
	server := servertest.Redis(t, aged)
	for name, c := range map[string]struct {
		args   []string
		reason string // the key of the phase
		signal syscall.Signal
	}{
		"one at a time": {[]string{"--duration", "1m", "--parallel", "3"}, ":2", syscall.SIGINT},
		"hand-over":     {[]string{"--duration", "1m", "--parallel", "3", "--max-ops", "500"}, ":3", syscall.SIGTERM},
	} {
		t.Run(name, func(t *testing.T) {
			for range 3 { // what is to be left may depend on the moment
				during := func(p *process) {
					eventually(t, "a key of this phase", func() bool {
						return slices.ContainsFunc(votes(t, server), func(k string) bool { return strings.HasSuffix(k, c.reason) })
					})
					if err := p.Process.Signal(c.signal); err != nil {
						t.Fatal(err)
					}
				}
				r, p, code := runBench(t, during, append(c.args, "--store", "redis://"+server.Addr())...)
				if code != exitSignal+int(c.signal) || !r.Interrupted || r.Operations[0].Count == 0 {
					t.Errorf("exit code %d, %+v, %s", code, r, p.err.String())
				}
				if keys := votes(t, server); len(keys) > 0 {
					t.Errorf("left: %v", keys)
				}
			}
		})
	}
}

func TestBenchYoung(t *testing.T) {
	t.Run("not waited for", func(t *testing.T) {
		server := servertest.Redis(t)
		_, p, code := runBench(t, nil, "--wait", "1s", "--store", "redis://"+server.Addr())
		if text := p.err.String(); code != exitFailed || !strings.Contains(text, "votes in") || !strings.Contains(text, "--wait ") || !strings.Contains(text, "--trust-restarts") {
			t.Errorf("exit code %d: %s", code, text)
		}
	})
	t.Run("waited for", func(t *testing.T) {
		server := servertest.Redis(t, servertest.Aged(28*time.Second))
		r, p, code := runBench(t, nil, "--max-ops", "20", "--store", "redis://"+server.Addr())
		if text := p.err.String(); code != 0 || r.Operations[0].Count == 0 || !strings.Contains(text, "waiting until the servers vote, at most 1m0s more") {
			t.Errorf("exit code %d, %+v: %s", code, r, text)
		}
	})
}

func TestBenchSQLite(t *testing.T) {
	url := "sqlite:" + filepath.Join(t.TempDir(), "locks.db")
	r, p, code := runBench(t, nil, "--duration", "10s", "--max-ops", "40", "--parallel", "2", "--clients", "2", "--store", url)
	if code != 0 || r.Kind != "sqlite" || len(r.Nodes) > 0 || r.Operations[0].Count != 40 {
		t.Errorf("exit code %d, %+v: %s", code, r, p.err.String())
	}
	st, err := storeFlags{urls: []string{url}}.open()
	if err != nil {
		t.Fatal(err)
	}
	defer st.close()
	for h, err := range st.Store.(store.Inspector).List(context.Background(), "") {
		t.Errorf("left: %+v, %v", h, err)
	}
}
