package main

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/servertest"
)

// everyTTL is one that each store takes; etcd has none below 2 s.
const everyTTL = "4s"

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
		return "zk://bob:hunter2@" + servertest.ZooKeeper(t, servertest.ZooKeeperConfig("tickTime", "500")).Addr() + "/apps?session-timeout=8s"
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
			e := &everyVerb{T: t, env: []string{"HOLDFAST_STORE=" + everyStore[name](t), "HOLDFAST_CONFIG=/dev/null"}}
			e.run()
			if name == "zk" {
				e.noTickets()
			} else {
				e.tickets()
			}
			e.breaks()
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
			if code != exitFailed || out != "" || !strings.Contains(lines[len(lines)-1], reachAdvice) || strings.Contains(errs, "hunter2") {
				t.Errorf("code %d: %s", code, errs)
			}
		})
	}
}

// everyVerb runs the command with one store.
type everyVerb struct {
	*testing.T
	env []string
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
func (e *everyVerb) token(args ...string) int64 {
	e.Helper()
	args = append(append([]string{"run", "--ttl", everyTTL, "-w", "60s"}, args...), "k", "--", "sh", "-c", "echo $HOLDFAST_TOKEN")
	text := strings.TrimSpace(e.verb(0, args...))
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		e.Fatalf("the token is %q", text)
	}
	return n
}

func (e *everyVerb) status(want int) (h holderJSON) {
	e.Helper()
	if err := json.Unmarshal([]byte(e.verb(want, "status", "--json", "k")), &h); err != nil {
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
		n := e.token()
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
	if h := e.status(exitFree); h.State != "free" {
		e.Errorf("after run: %+v", h)
	}
}

func (e *everyVerb) tickets() {
	e.Helper()
	first := strings.TrimSpace(e.verb(0, "acquire", "--ttl", everyTTL, "-w", "60s", "--label", "holder", "k"))
	if h := e.status(0); h.State != "held" || h.Label != "holder" {
		e.Errorf("after acquire: %+v", h)
	}
	if out := e.verb(exitConflict, "run", "-n", "--ttl", everyTTL, "k", "--", "echo", "overlap"); !strings.Contains(out, "held") || strings.Contains(out, "overlap") {
		e.Errorf("run beside it: %s", out)
	}
	second := strings.TrimSpace(e.verb(0, "extend", first))
	e.verb(0, "release", second)
	if out := e.verb(exitLost, "extend", second); !strings.Contains(out, "lost") {
		e.Errorf("extend after release: %s", out)
	}
	e.status(exitFree)
}

func (e *everyVerb) noTickets() {
	e.Helper()
	out := e.verb(exitFailed, "acquire", "-n", "--ttl", everyTTL, "k")
	if !strings.Contains(out, "has no tickets") || !strings.Contains(out, "use holdfast run") {
		e.Errorf("acquire: %s", out)
	}
	e.status(exitFree)
}

// breaks takes the key from a run: its command is ended, and the next one has a larger token.
func (e *everyVerb) breaks() {
	e.Helper()
	dir := e.TempDir()
	before := e.token()
	p := launchIn(e.T, e.env, dir, "run", "--ttl", everyTTL, "-w", "60s", "--grace", "300ms", "k", "--", "sh", "-c", "touch started; exec sleep 600")
	eventually(e.T, "the command runs", func() bool { return exists(dir + "/started") })
	if out := e.verb(exitUsage, "break", "k"); !strings.Contains(out, "nothing was done") {
		e.Errorf("break without --owner: %s", out)
	}
	owner := e.status(0).Owner
	if out := e.verb(exitConflict, "break", "--owner", "another", "k"); !strings.Contains(out, "nothing was done") {
		e.Errorf("break of another: %s", out)
	}
	if out := e.verb(0, "break", "--owner", owner, "k"); !strings.Contains(out, "was held by") {
		e.Errorf("break: %s", out)
	}
	if code := p.code(); code != exitLost || !strings.Contains(p.err.String(), "lost") {
		e.Errorf("run ends with %d after break: %s", code, p.err.String())
	}
	if after := e.token(); after <= before {
		e.Errorf("token %d after %d", after, before)
	}
	if out := e.verb(exitFree, "break", "--force", "k"); !strings.Contains(out, "nobody holds") {
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
	if err := json.Unmarshal([]byte(e.verb(0, "bench", "--json", "-d", "200ms", "-p", "2", "-c", "2")), &r); err != nil {
		e.Fatal(err)
	}
	for _, o := range r.Operations {
		if o.Count == 0 && o.Name != "ping" {
			e.Errorf("bench: nothing of %q: %+v", o.Name, r)
		}
	}
	e.Logf("%s %v: %.1f ms", r.Kind, r.Stores, r.Operations[0].P50)
}
