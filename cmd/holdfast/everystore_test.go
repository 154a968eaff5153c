package main

import (
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
)

// everyTTL is one that each store takes; etcd has none below 2 s.
const everyTTL = "3s"

// everyStore are the stores of the command's table: how to start each, and its URLs, with spaces
// between them. A lock that is broken is free after [everyTTL] at the latest.
var everyStore = map[string]func(t *testing.T) string{
	"sqlite": func(t *testing.T) string { return "sqlite:" + t.TempDir() + "/locks.db" },
	"redis": func(t *testing.T) string {
		return redisURLs(servertest.RedisN(t, 1, aged))[0] + "?max-ttl=" + everyTTL
	},
	"redis, three of them": func(t *testing.T) string {
		return strings.Join(redisURLs(servertest.RedisN(t, 3, aged)), "?max-ttl="+everyTTL+" ") + "?max-ttl=" + everyTTL
	},
	"rediss": func(t *testing.T) string {
		certs := servertest.TLS(t)
		return "rediss://" + servertest.Redis(t, aged, servertest.WithTLS(certs)).TLSAddr() + "?max-ttl=" + everyTTL + "&tls-ca=" + param(certs.CA)
	},
	"redis+sentinel": func(t *testing.T) string {
		sentinel := servertest.Sentinel(t, "main", servertest.Redis(t, aged))
		return "redis+sentinel://" + sentinel.Addr() + "/main?max-ttl=" + everyTTL
	},
	"redis+cluster": func(t *testing.T) string {
		return "redis+cluster://" + servertest.RedisCluster(t, 3, aged)[0].Addr() + "?max-ttl=" + everyTTL
	},
	"etcd": func(t *testing.T) string {
		return "etcd://" + servertest.Etcd(t, "../../conformance/etcdserver").Addr() + "/jobs/"
	},
	"etcds": func(t *testing.T) string {
		certs := servertest.TLS(t)
		server := servertest.Etcd(t, "../../conformance/etcdserver", servertest.EtcdTLS(certs))
		return "etcds://" + server.Addr() + "?tls-ca=" + param(certs.CA)
	},
	"zk": func(t *testing.T) string {
		return "zk://bob:hunter2@" + servertest.ZooKeeper(t, servertest.ZooKeeperConfig("tickTime", "500")).Addr() + "/apps?session-timeout=6s"
	},
	"zks": func(t *testing.T) string {
		certs := servertest.TLS(t)
		server := servertest.ZooKeeper(t, servertest.ZooKeeperTLS(t, certs), servertest.ZooKeeperConfig("tickTime", "500"))
		return "zks://" + server.SecureAddr() + "?session-timeout=6s&tls-ca=" + param(certs.CA)
	},
	"postgres": func(t *testing.T) string { return servertest.PostgreSQL(t).URL("") + "&notify=1" },
	"mysql":    func(t *testing.T) string { return servertest.MariaDB(t).URL("") },
}

// All verbs work with every store, which is named by its URL alone; what a store does not have is
// refused by a line that says so.
func TestEveryStore(t *testing.T) {
	for _, k := range storeKinds {
		for _, scheme := range k.schemes {
			variant := strings.HasPrefix(scheme, "rediss+") || scheme == "postgresql" // the same in other words
			if _, ok := everyStore[scheme]; !ok && !variant {
				t.Errorf("%s is not tested", scheme)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(everyStore)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := &everyVerb{T: t, session: strings.HasPrefix(name, "zk"), env: []string{"HOLDFAST_STORE=" + everyStore[name](t), "HOLDFAST_CONFIG=/dev/null"}}
			e.run()
			if strings.HasPrefix(name, "zk") {
				e.noTickets()
			} else {
				e.tickets()
			}
			e.ends()
			e.list(name == "redis+cluster")
			e.bench()
		})
	}
}

// A store that cannot be reached is told of by a line that says what to do and shows no password.
func TestStoresAway(t *testing.T) {
	for _, u := range []string{"redis://:hunter2@%", "etcds://%", "etcd://u:hunter2@%", "zk://u:hunter2@%", "postgres://u:hunter2@%/d", "mysql://u:hunter2@%/d"} {
		u = strings.Replace(u, "%", "127.0.0.1:1", 1)
		t.Run(strings.ReplaceAll(u, "/", "_"), func(t *testing.T) {
			t.Parallel()
			code, out, errs := verb(t, "run", "--store", u, "--nonblock", "k", "--", "echo", "ran")
			lines := strings.Split(strings.TrimSpace(errs), "\n")
			if code != exitFailed || out != "" || !strings.Contains(lines[len(lines)-1], "; check that "+theURL+" names servers that run") || strings.Contains(errs, "hunter2") {
				t.Errorf("code %d: %s", code, errs)
			}
		})
	}
}

// What docs/choosing-a-store.md says of the smallest and the largest ttl.
func TestTTLBounds(t *testing.T) {
	const whole = 10 * 365 * 24 * time.Hour
	for url, want := range map[string][2]time.Duration{
		"sqlite:" + t.TempDir() + "/x":        {100 * time.Millisecond, whole},
		"redis://127.0.0.1:1":                 {100 * time.Millisecond, 30 * time.Second},
		"redis://127.0.0.1:1?max-ttl=9s":      {100 * time.Millisecond, 9 * time.Second},
		"etcd://127.0.0.1:1":                  {2 * time.Second, whole},
		"zk://127.0.0.1:1":                    {100 * time.Millisecond, 15 * time.Second},
		"zk://127.0.0.1:1?session-timeout=1m": {100 * time.Millisecond, 30 * time.Second},
		"postgres://127.0.0.1:1/d":            {100 * time.Millisecond, whole},
		"mysql://127.0.0.1:1/d":               {100 * time.Millisecond, whole},
	} {
		st, _ := openURL(t, url)
		if i := st.Info(); i.MinTTL != want[0] || i.MaxTTL != want[1] {
			t.Errorf("%s: from %v to %v, want %v", url, i.MinTTL, i.MaxTTL, want)
		}
	}
}

// everyVerb runs the command with one store.
type everyVerb struct {
	*testing.T
	session bool // a dead holder keeps its key for as long as its session lasts
	env     []string
}

// verb runs holdfast, which ends with that code, and returns what it prints; where it fails, on
// stderr, which then is one line.
func (e *everyVerb) verb(want int, args ...string) string {
	e.Helper()
	code, out, errs := verbIn(e.T, e.env, args...)
	if code != want {
		e.Fatalf("holdfast %q: code %d, want %d; %s%s", args, code, want, out, errs)
	}
	if errs != "" && (strings.Count(errs, "\n") != 1 || strings.Contains(errs, "hunter2")) {
		e.Errorf("holdfast %q: stderr is not a line without a password: %s", args, errs)
	}
	if code != 0 {
		return out + errs
	}
	return out
}

// token is the one that run gives its command.
func (e *everyVerb) token(key string) int64 {
	e.Helper()
	text := strings.TrimSpace(e.verb(0, "run", "--ttl", everyTTL, "-w", "60s", key, "--", "sh", "-c", "echo $HOLDFAST_TOKEN"))
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		e.Fatalf("the token is %q", text)
	}
	return n
}

func (e *everyVerb) status(want int, key string) (h holderJSON) {
	e.Helper()
	if err := json.Unmarshal([]byte(e.verb(want, "status", "--json", key)), &h); err != nil {
		e.Fatal(err)
	}
	return h
}

// run gives growing tokens, and its command the store: a run inside it, and status, find the key
// held.
func (e *everyVerb) run() {
	e.Helper()
	var last int64
	for range 3 {
		n := e.token("k")
		if n <= last {
			e.Errorf("token %d after %d", n, last)
		}
		last = n
	}
	out := e.verb(0, "run", "--ttl", everyTTL, "-w", "60s", "--label", "me", "k", "--", "sh", "-c",
		"holdfast status --json k; holdfast run -n --ttl "+everyTTL+" k -- echo overlap 2>/dev/null; echo code $?")
	if !strings.Contains(out, `"state":"held","label":"me"`) || !strings.Contains(out, "code 1\n") || strings.Contains(out, "overlap") {
		e.Errorf("inside of run: %s", out)
	}
	if h := e.status(exitFree, "k"); h.State != "free" {
		e.Errorf("after run: %+v", h)
	}
}

func (e *everyVerb) tickets() {
	e.Helper()
	first := strings.TrimSpace(e.verb(0, "acquire", "--ttl", everyTTL, "-w", "60s", "--label", "holder", "k"))
	if h := e.status(0, "k"); h.State != "held" || h.Label != "holder" {
		e.Errorf("after acquire: %+v", h)
	}
	out := e.verb(exitConflict, "run", "-n", "--ttl", everyTTL, "k", "--", "echo", "overlap")
	if split := strings.Contains(out, "nodes must agree"); !split && !strings.Contains(out, "held") || strings.Contains(out, "overlap") {
		e.Errorf("run beside it: %s", out)
	}
	second := strings.TrimSpace(e.verb(0, "extend", first))
	e.verb(0, "release", second)
	if out := e.verb(exitLost, "extend", second); !strings.Contains(out, "lost") {
		e.Errorf("extend after release: %s", out)
	}
	e.status(exitFree, "k")
}

func (e *everyVerb) noTickets() {
	e.Helper()
	out := e.verb(exitFailed, "acquire", "-n", "--ttl", everyTTL, "k")
	if !strings.Contains(out, "has no tickets") || !strings.Contains(out, "use holdfast run") {
		e.Errorf("acquire: %s", out)
	}
	e.status(exitFree, "k")
}

// hold has the key held by a run of the command, until the file stop is there, or dir is not.
func (e *everyVerb) hold(key string) (p *process, dir string) {
	e.Helper()
	dir = e.TempDir()
	p = launchIn(e.T, e.env, dir, "run", "--ttl", everyTTL, "-w", "60s", "--grace", "300ms", key, "--",
		"sh", "-c", "touch started; while [ -e started ] && [ ! -e stop ]; do sleep 0.1; done")
	eventually(e.T, "the command runs", func() bool { return exists(dir + "/started") })
	return p, dir
}

// ends breaks a key and kills the holder of another one. The next one has each of them when the
// former lease has ended, and a larger token.
func (e *everyVerb) ends() {
	e.Helper()
	broken, dead := e.token("broken"), e.token("dead")
	killed, dir := e.hold("dead")
	if err := killed.Process.Kill(); err != nil {
		e.Fatal(err)
	}
	if err := os.WriteFile(dir+"/stop", nil, 0o600); err != nil { // where the command outlives it
		e.Fatal(err)
	}
	if h := e.status(0, "dead"); h.State != "held" || h.Session != e.session {
		e.Errorf("after the holder's death: %+v", h)
	}
	bounded := "unless extended"
	if e.session {
		bounded = "session ends"
	}
	for _, args := range [][]string{{"status", "dead"}, {"run", "-n", "--ttl", everyTTL, "dead", "--", "true"}} {
		if code, out, errs := verbIn(e.T, e.env, args...); code == exitFailed || !strings.Contains(out+errs, bounded) {
			e.Errorf("after the holder's death: %s", out+errs)
		}
	}
	p, _ := e.hold("broken")
	if out := e.verb(exitUsage, "break", "broken"); !strings.Contains(out, "nothing was done") {
		e.Errorf("break without --owner: %s", out)
	}
	if out := e.verb(exitConflict, "break", "--owner", "another", "broken"); !strings.Contains(out, "nothing was done") {
		e.Errorf("break of another: %s", out)
	}
	owner := e.status(0, "broken").Owner
	if out := e.verb(0, "break", "--owner", owner, "broken"); !strings.Contains(out, "was held by") {
		e.Errorf("break: %s", out)
	}
	if code := p.code(); code != exitLost || !strings.Contains(p.err.String(), "lost") {
		e.Errorf("run ends with %d after break: %s", code, p.err.String())
	}
	for key, before := range map[string]int64{"broken": broken, "dead": dead} {
		if after := e.token(key); after <= before+1 {
			e.Errorf("token %d after the holder's of %s, which came after %d", after, key, before)
		}
	}
	if out := e.verb(exitFree, "break", "--force", "broken"); !strings.Contains(out, "nobody holds") {
		e.Errorf("break of a free key: %s", out)
	}
}

// list names what is held, by prefix.
func (e *everyVerb) list(cannot bool) {
	e.Helper()
	if cannot {
		if out := e.verb(exitFailed, "list", "a/"); !strings.Contains(out, "Cluster") {
			e.Errorf("list: %s", out)
		}
		return
	}
	script := "holdfast run --ttl " + everyTTL + " a/2 -- holdfast run --ttl " + everyTTL + " b/1 -- holdfast list --json a/ | sed 's/,.*//' | sort"
	out := e.verb(0, "run", "--ttl", everyTTL, "-w", "60s", "a/1", "--", "sh", "-c", script)
	if want := "{\"key\":\"a/1\"\n{\"key\":\"a/2\"\n"; out != want {
		e.Errorf("list prints %q, want %q", out, want)
	}
	if out := e.verb(0, "list"); out != "" {
		e.Errorf("list in the end: %s", out)
	}
}

func (e *everyVerb) bench() {
	e.Helper()
	var r benchReport
	if err := json.Unmarshal([]byte(e.verb(0, "bench", "--json", "-d", "100ms", "-p", "2", "-c", "2")), &r); err != nil {
		e.Fatal(err)
	}
	for _, o := range r.Operations {
		if o.Count == 0 && o.Name != "ping" {
			e.Errorf("bench: nothing of %q: %+v", o.Name, r)
		}
	}
	e.Logf("%s %v: %.1f ms", r.Kind, r.Stores, r.Operations[0].P50)
}
