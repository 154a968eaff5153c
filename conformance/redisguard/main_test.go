// Package redisguard_test runs the guard of package redisfence against real Redis servers, through
// both clients.
package redisguard_test

import (
	"context"
	"errors"
	"flag"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
)

func TestMain(m *testing.M) {
	goredis.SetLogger(quiet{}) // it tells of every connection that fails
	flag.Parse()
	_ = flag.Set("test.parallel", "8") // the tests wait most of the time
	kit.Main(m, nil)
}

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// patience is for what a busy machine makes slow.
const patience = 30 * time.Second

// client is one of the two client libraries, at its defaults.
type client struct {
	name    string
	eval    func(t testing.TB, addr string) redisfence.Eval
	cluster func(t testing.TB, addrs []string) redisfence.Eval
}

var clients = []client{
	{
		name: "goredis",
		eval: func(t testing.TB, addr string) redisfence.Eval {
			return goRedis(t, &goredis.Options{Addr: addr})
		},
		cluster: func(t testing.TB, addrs []string) redisfence.Eval {
			c := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: addrs})
			t.Cleanup(func() { c.Close() })
			return made(t)(goredisnode.Eval(c))
		},
	},
	{
		name: "rueidis",
		eval: func(t testing.TB, addr string) redisfence.Eval {
			return dialed(t, rueidis.ClientOption{InitAddress: []string{addr}})
		},
		cluster: func(t testing.TB, addrs []string) redisfence.Eval {
			c, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: addrs, DisableCache: true})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(c.Close)
			return made(t)(rueidisnode.Eval(c))
		},
	},
}

func goRedis(t testing.TB, o *goredis.Options) redisfence.Eval {
	t.Helper()
	c := goredis.NewClient(o)
	t.Cleanup(func() { c.Close() })
	return made(t)(goredisnode.Eval(c))
}

func dialed(t testing.TB, o rueidis.ClientOption) redisfence.Eval {
	t.Helper()
	c, err := rueidisnode.Dial(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.Eval
}

func made(t testing.TB) func(redisfence.Eval, error) redisfence.Eval {
	return func(e redisfence.Eval, err error) redisfence.Eval {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
}

// guard makes a guard that waits for as long as a busy machine needs.
func guard(t testing.TB, e redisfence.Eval) *redisfence.Guard {
	t.Helper()
	return guardWith(t, e, patience)
}

func guardWith(t testing.TB, e redisfence.Eval, timeout time.Duration) *redisfence.Guard {
	t.Helper()
	g, err := redisfence.New(e, redisfence.Options{Timeout: timeout})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// each runs f for both clients, beside the other tests.
func each(t *testing.T, f func(t *testing.T, c client)) {
	t.Parallel()
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f(t, c)
		})
	}
}

// kinds are all that an error of a guard may answer.
var kinds = []error{fence.ErrStale, fence.ErrNoResource, fence.ErrUnclaimed, fence.ErrApplied, fence.ErrBusy, fence.ErrUncertain,
	fence.ErrUnavailable, fence.ErrInvalid}

// want says whether err is of that kind and of no other, on one line, with each of the parts.
func want(t testing.TB, what string, err, kind error, parts ...string) {
	t.Helper()
	if kind == nil {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		return
	}
	if err == nil {
		t.Errorf("%s passed, want %v", what, kind)
		return
	}
	for _, k := range kinds {
		if errors.Is(err, k) != (k == kind) {
			t.Errorf("%s: answers %q: %t: %v", what, k, k != kind, err)
		}
	}
	rig.OneLine(t, err, parts...)
}

// value is what a key holds.
func value(t testing.TB, s *servertest.RedisServer, key string) any {
	t.Helper()
	return rig.Must(t, s, "GET", key)
}

func TestSuite(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		fencetest.Run(t, fencetest.Harness{
			New:    func(t testing.TB) fence.Guard { return guard(t, c.eval(t, s.Addr())) },
			Reopen: func(t testing.TB, _ fence.Guard) fence.Guard { return guard(t, c.eval(t, s.Addr())) },
		})
		if t.Failed() {
			return
		}
		for _, key := range rig.Must(t, s, "KEYS", "*").([]any) {
			if ttl := rig.Must(t, s, "PTTL", key.(string)); ttl != int64(-1) || !strings.HasPrefix(key.(string), "fence:{") {
				t.Errorf("key %q has a ttl of %v ms", key, ttl)
			}
		}
	})
}

// kitClient is the same client for a store.
func kitClient(c client) kit.Client {
	if c.name == "goredis" {
		return kit.GoRedis
	}
	return kit.Rueidis
}
