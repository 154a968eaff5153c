package deploy_test

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"net"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
)

func TestMain(m *testing.M) {
	goredis.SetLogger(quiet{}) // it tells of every connection that fails
	flag.Parse()
	_ = flag.Set("test.parallel", "12") // the tests wait most of the time
	kit.Main(m, nil)
}

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

const (
	nodeTimeout = 500 * time.Millisecond
	ttl         = 10 * time.Second
	quarantine  = 31 * time.Second
	// patience is how long a client may take to find what has been mended: it asks a node that
	// refuses it again after 2 s, and its library reconnects in its own time.
	patience = 30 * time.Second
	// callLimit is when a call has hung: it takes a round at the node timeout, one more after an
	// admission, and the release of what it has begun.
	callLimit = 6 * nodeTimeout
)

// way is how a deployment is reached.
type way struct {
	addrs                    []string
	user, password           string
	db                       int
	tls                      *tls.Config
	master, sentinelPassword string // of a Sentinel deployment
	cluster                  bool
	replicaReads             bool // the client prefers replicas, as far as it can
}

func to(s *servertest.RedisServer) way { return way{addrs: []string{s.Addr()}} }

// client is one of the two client libraries.
type client struct {
	name string
	node func(t testing.TB, w way) redlock.Node
}

var clients = []client{{"go-redis", goRedis}, {"rueidis", rueidisDial}}

func goRedis(t testing.TB, w way) redlock.Node {
	t.Helper()
	var n redlock.Node
	var err error
	switch {
	case w.master != "":
		c := goredis.NewFailoverClient(&goredis.FailoverOptions{MasterName: w.master, SentinelAddrs: w.addrs, SentinelPassword: w.sentinelPassword,
			Username: w.user, Password: w.password, DB: w.db, TLSConfig: w.tls, ReplicaOnly: w.replicaReads})
		t.Cleanup(func() { c.Close() })
		n, err = goredisnode.NewNamed(w.master, c)
	case w.cluster:
		c := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: w.addrs, Username: w.user, Password: w.password, TLSConfig: w.tls, ReadOnly: w.replicaReads})
		t.Cleanup(func() { c.Close() })
		n, err = goredisnode.New(c)
	default:
		c := goredis.NewClient(&goredis.Options{Addr: w.addrs[0], Username: w.user, Password: w.password, DB: w.db, TLSConfig: w.tls})
		t.Cleanup(func() { c.Close() })
		n, err = goredisnode.New(c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func rueidisDial(t testing.TB, w way) redlock.Node {
	t.Helper()
	o := rueidis.ClientOption{InitAddress: w.addrs, Username: w.user, Password: w.password, SelectDB: w.db, TLSConfig: w.tls}
	o.Sentinel = rueidis.SentinelOption{MasterSet: w.master, Password: w.sentinelPassword}
	switch {
	case w.replicaReads && w.cluster:
		o.SendToReplicas = func(rueidis.Completed) bool { return true }
	case w.replicaReads:
		o.ReplicaOnly = true
	}
	n, err := rueidisnode.Dial(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// each runs f for both clients.
func each(t *testing.T, f func(t *testing.T, c client)) {
	t.Helper()
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f(t, c)
		})
	}
}

// locker is a process of its own that uses one deployment.
func (c client) locker(t testing.TB, w way) *holdfast.Locker {
	t.Helper()
	return c.lockerOf(t, redlock.Options{NodeTimeout: nodeTimeout}, w)
}

func (c client) lockerOf(t testing.TB, o redlock.Options, ways ...way) *holdfast.Locker {
	t.Helper()
	var nodes []redlock.Node
	for _, w := range ways {
		nodes = append(nodes, c.node(t, w))
	}
	return kit.Locker(t, rig.Store(t, o, nodes...), holdfast.Options{TTL: ttl})
}

func old(t testing.TB, opts ...servertest.RedisOption) *servertest.RedisServer {
	t.Helper()
	return servertest.Redis(t, append([]servertest.RedisOption{kit.Old()}, opts...)...)
}

// pass lets time pass for servers without waiting.
func pass(d time.Duration, servers ...*servertest.RedisServer) {
	for _, s := range servers {
		s.Clock().Set(s.Clock().Offset() + d)
	}
}

// inTime runs a call that must not hang.
func inTime(t testing.TB, limit time.Duration, what string, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- f() }()
	select {
	case err := <-done:
		if d := time.Since(began); d > limit {
			t.Errorf("%s took %v, more than %v: %v", what, d, limit, err)
		}
		return err
	case <-time.After(2 * limit):
		t.Fatalf("%s hangs", what)
		return nil
	}
}

// try makes one attempt, bounded, with a context that does not help.
func try(t testing.TB, locks *holdfast.Locker, key string) (lease *holdfast.Lease, err error) {
	t.Helper()
	err = inTime(t, callLimit, "TryAcquire", func() (err error) {
		lease, err = locks.TryAcquire(context.Background(), key)
		return err
	})
	return lease, err
}

// told is try, again where a busy machine made an answer late: what is expected is another one.
func told(t testing.TB, locks *holdfast.Locker, key string) (lease *holdfast.Lease, err error) {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		lease, err = try(t, locks, key)
		if !contains(err, "no answer within") && !contains(err, "i/o timeout") && !contains(err, "not waited for") || time.Now().After(end) {
			return lease, err
		}
	}
}

func contains(err error, part string) bool {
	return err != nil && strings.Contains(err.Error(), part)
}

// extend extends, in spite of a busy machine.
func extend(t testing.TB, lease *holdfast.Lease) {
	t.Helper()
	servertest.Eventually(t, ttl, func() error {
		if err := lease.Extend(t.Context()); err != nil && lease.Err() == nil {
			return err
		}
		return nil
	})
	if err := lease.Err(); err != nil {
		t.Error(err)
	}
}

// release releases, in spite of a busy machine.
func release(t testing.TB, lease *holdfast.Lease) {
	t.Helper()
	servertest.Eventually(t, patience, func() error { return lease.Release(t.Context()) })
}

// check says whether err is of the kind, on one line, for the node, with each of the parts.
func check(t testing.TB, what string, err error, kind error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("%s succeeded", what)
	}
	for _, other := range []error{holdfast.ErrInvalid, holdfast.ErrUnavailable, holdfast.ErrHeld, holdfast.ErrLost} {
		if errors.Is(err, other) != (other == kind) {
			t.Errorf("%s: answers %q: %t; want %q: %v", what, other, other != kind, kind, err)
		}
	}
	var e *holdfast.Error
	if !errors.As(err, &e) || e.Store != "redlock" || e.Key == "" {
		t.Errorf("%s: no *Error with store and key: %v", what, err)
	}
	rig.OneLine(t, err, parts...)
	for _, secret := range []string{"hunter", "pass="} {
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%s shows a password: %v", what, err)
		}
	}
}

// comesBack waits until a key can be acquired, and releases it.
func comesBack(t testing.TB, locks *holdfast.Locker, key string) holdfast.Token {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var lease *holdfast.Lease
	servertest.Eventually(t, patience, func() (err error) { // Acquire returns what was refused a moment ago
		lease, err = locks.Acquire(ctx, key)
		return err
	})
	release(t, lease)
	return lease.Token()
}

// idle are connections that do nothing, closed with the test.
func idle(t testing.TB, addr string, n int) (closeAll func()) {
	t.Helper()
	var conns []net.Conn
	closeAll = func() {
		for _, c := range conns {
			c.Close()
		}
	}
	t.Cleanup(closeAll)
	for range n {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	return closeAll
}

func rigStore(t testing.TB, c client, w way) *redlock.Store {
	t.Helper()
	return rig.Store(t, redlock.Options{NodeTimeout: nodeTimeout}, c.node(t, w))
}

func splitPort(s *servertest.RedisServer) (host, port string) {
	host, port, _ = net.SplitHostPort(s.Addr())
	return host, port
}
