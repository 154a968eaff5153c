// Package kit puts stores over real Redis servers together, for tests that go through every
// client and play faults. Package rig is beneath it.
package kit

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// Soak reports whether the full counts are asked for.
func Soak() bool { return os.Getenv("HOLDFAST_SOAK") == "1" }

// Count is full under HOLDFAST_SOAK=1, and small otherwise.
func Count(small, full int) int {
	if Soak() {
		return full
	}
	return small
}

// Client is a client library under a node, at its defaults.
type Client struct {
	Name string
	open func(t testing.TB, addr string) redlock.Node
}

// GoRedis ignores the deadlines of contexts, waits for seconds and retries.
var GoRedis = Client{"goredis", rig.GoRedis.Node}

// Rueidis is rueidis by rueidisnode.Dial.
var Rueidis = Client{"rueidis", rig.Rueidis.Node}

// Clients are all of them.
var Clients = []Client{GoRedis, Rueidis}

// Each runs f once for each client and number of nodes.
func Each(t *testing.T, sizes []int, f func(t *testing.T, c Client, n int)) {
	for _, n := range sizes {
		for _, c := range Clients {
			t.Run(fmt.Sprintf("%dx%s", n, c.Name), func(t *testing.T) { f(t, c, n) })
		}
	}
}

// Old makes a server that votes at once.
func Old() servertest.RedisOption { return servertest.Aged(time.Hour) }

// Servers starts n servers that vote at once.
func Servers(t testing.TB, n int, opts ...servertest.RedisOption) []*servertest.RedisServer {
	t.Helper()
	return servertest.RedisN(t, n, append([]servertest.RedisOption{Old()}, opts...)...)
}

// Proxies puts a proxy in front of each server.
func Proxies(t testing.TB, servers []*servertest.RedisServer) []*servertest.Proxy {
	t.Helper()
	proxies := make([]*servertest.Proxy, len(servers))
	for i, s := range servers {
		proxies[i] = servertest.NewProxy(t, s.Addr())
	}
	return proxies
}

// Addrs are the addresses of servers or proxies, and the names of the nodes over them.
func Addrs[T interface{ Addr() string }](list []T) []string {
	addrs := make([]string, len(list))
	for i, x := range list {
		addrs[i] = x.Addr()
	}
	return addrs
}

// Store opens a store, with connections of its own, as another process would.
func Store(t testing.TB, c Client, o redlock.Options, addrs []string) *redlock.Store {
	t.Helper()
	var nodes []redlock.Node
	for _, addr := range addrs {
		nodes = append(nodes, c.open(t, addr))
	}
	return rig.Store(t, o, nodes...)
}

// Keys are the names that a server holds beside the records of the node and the marks of
// locks, which both stay on purpose.
func Keys(t testing.TB, s *servertest.RedisServer) []string {
	t.Helper()
	v, err := s.Do("KEYS", "*")
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, k := range v.([]any) {
		if name := k.(string); !strings.HasPrefix(name, "{holdfast}:") && !strings.HasSuffix(name, ":fence") {
			keys = append(keys, name)
		}
	}
	return keys
}

// NoKeys waits, for at most d, until no server holds a vote.
func NoKeys(t testing.TB, d time.Duration, servers []*servertest.RedisServer) {
	t.Helper()
	servertest.Eventually(t, d, func() error {
		for _, s := range servers {
			if keys := Keys(t, s); len(keys) > 0 {
				return fmt.Errorf("%s still holds %q", s.Addr(), keys)
			}
		}
		return nil
	})
}

// Endless are the keys, marks among them, that have no ttl, aside from the node's records.
func Endless(t testing.TB, s *servertest.RedisServer) []string {
	t.Helper()
	v, err := s.Do("EVAL", `local r = {}
		for _, k in ipairs(redis.call('KEYS', '*')) do
			if string.sub(k, 1, 11) ~= '{holdfast}:' and redis.call('PTTL', k) == -1 then r[#r+1] = k end
		end
		return r`, "0")
	if err != nil {
		t.Fatal(err)
	}
	var endless []string
	for _, k := range v.([]any) {
		endless = append(endless, k.(string))
	}
	return endless
}

// LibraryGoroutines are the goroutines in code of this project's library. Those of servers,
// proxies and pools of connections are no business of ours. buf is room for their stacks.
func LibraryGoroutines(buf []byte) (n int) {
	for g := range bytes.SplitSeq(buf[:runtime.Stack(buf, true)], []byte("\n\n")) {
		if bytes.Contains(g, []byte("/redlock.")) || bytes.Contains(g, []byte("holdfast/holdfast.")) {
			n++
		}
	}
	return n
}

// Settled waits, for at most d, until at most n goroutines run, and answers how many do.
func Settled(n int, d time.Duration) int {
	for end := time.Now().Add(d); ; time.Sleep(10 * time.Millisecond) {
		if now := runtime.NumGoroutine(); now <= n || time.Now().After(end) {
			return now
		}
	}
}

// Main runs a package's tests, and fails where goroutines are left a while after they have
// ended. Where the process was started by [Child], it runs that child instead.
func Main(m *testing.M, children map[string]func()) {
	if name := os.Getenv(childEnv); name != "" {
		if f := children[name]; f != nil {
			f()
			os.Exit(0)
		}
		fmt.Fprintln(os.Stderr, "no such child:", name)
		os.Exit(2)
	}
	code := m.Run()
	ended := time.Now()
	err := noLeaks(time.Minute)
	if d := time.Since(ended); d > time.Second {
		fmt.Fprintf(os.Stderr, "the last goroutine ended %v after the tests\n", d.Round(time.Millisecond))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// noLeaks waits until no goroutine is left. A RELEASE that a node does not answer is
// repeated for up to its ttl, so it takes that long.
func noLeaks(limit time.Duration) error {
	for end := time.Now().Add(limit); ; time.Sleep(50 * time.Millisecond) {
		err := goleak.Find()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// Median is the middle of list, which it sorts.
func Median(list []time.Duration) time.Duration { return Quantile(list, 0.5) }

// Quantile is the q-th part of list, which it sorts.
func Quantile(list []time.Duration, q float64) time.Duration {
	slices.Sort(list)
	return list[min(len(list)-1, int(q*float64(len(list))))]
}

// Context ends with the test, and after d.
func Context(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func unreachable(addr string) bool {
	c, err := net.DialTimeout("tcp", addr, time.Second)
	if err == nil {
		c.Close()
	}
	return err != nil
}

// Scripts is how many scripts a server has been asked to run so far: every request about a
// lock is one.
func Scripts(t testing.TB, s *servertest.RedisServer) (n int) {
	t.Helper()
	v, err := s.Do("INFO", "commandstats")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(v.(string)) {
		for _, command := range []string{"eval", "evalsha"} {
			if rest, ok := strings.CutPrefix(line, "cmdstat_"+command+":calls="); ok {
				calls, _, _ := strings.Cut(rest, ",")
				k, err := strconv.Atoi(calls)
				if err != nil {
					t.Fatal(err)
				}
				n += k
			}
		}
	}
	return n
}
