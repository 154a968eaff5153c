package goredisnode_test

import (
	"context"
	"errors"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/redistest"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func open(t testing.TB, opt *redis.Options) redlock.Node {
	t.Helper()
	c := redis.NewClient(opt)
	t.Cleanup(func() { c.Close() })
	n, err := goredisnode.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestNode(t *testing.T) {
	for _, tt := range []struct {
		name string
		opt  redis.Options
	}{
		{"defaults", redis.Options{}},
		{"RESP2", redis.Options{Protocol: 2}},
		{"context timeouts", redis.Options{ContextTimeoutEnabled: true, MaxRetries: -1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			redistest.RunNode(t, func(t testing.TB, addr string) redlock.Node {
				opt := tt.opt
				opt.Addr = addr
				return open(t, &opt)
			})
		})
	}
}

func TestCluster(t *testing.T) {
	redistest.RunCluster(t, func(t testing.TB, addrs []string) redlock.Node {
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
		t.Cleanup(func() { c.Close() })
		n, err := goredisnode.New(c)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addrs {
			if !strings.Contains(n.Name(), a) {
				t.Errorf("name %q is without %s", n.Name(), a)
			}
		}
		return n
	})
}

func TestSentinel(t *testing.T) {
	redistest.RunSentinel(t, func(t testing.TB, sentinel, master string) redlock.Node {
		c := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: master, SentinelAddrs: []string{sentinel}})
		t.Cleanup(func() { c.Close() })
		var invalid *store.InvalidError
		if _, err := goredisnode.New(c); !errors.As(err, &invalid) || !strings.Contains(err.Error(), "NewNamed") {
			t.Errorf("New of a Sentinel client: %v", err)
		}
		n, err := goredisnode.NewNamed(master, c)
		if err != nil {
			t.Fatal(err)
		}
		return n
	})
}

func TestRefusedClients(t *testing.T) {
	for _, client := range []any{
		nil, "localhost:6379", (*redis.Client)(nil), (*redis.ClusterClient)(nil),
		redis.NewRing(&redis.RingOptions{}),
	} {
		for name, make := range map[string]func(any) (redlock.Node, error){
			"New":      goredisnode.New,
			"NewNamed": func(c any) (redlock.Node, error) { return goredisnode.NewNamed("x", c) },
		} {
			n, err := make(client)
			var invalid *store.InvalidError
			if n != nil || !errors.As(err, &invalid) || !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%s(%T): %v, %v", name, client, n, err)
			}
		}
		var invalid *store.InvalidError
		if eval, err := goredisnode.Eval(client); eval != nil || !errors.As(err, &invalid) {
			t.Errorf("Eval(%T): %v", client, err)
		}
	}
	c := redis.NewClient(&redis.Options{})
	defer c.Close()
	if _, err := goredisnode.NewNamed("", c); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("empty name: %v", err)
	}
}

func TestNameAndErrorsHoldNoCredentials(t *testing.T) {
	s := servertest.Redis(t, servertest.Config("requirepass", "s3cret"), servertest.As("", "s3cret"))
	opt, err := redis.ParseURL("redis://default:wr0ng@" + s.Addr() + "/3")
	if err != nil {
		t.Fatal(err)
	}
	n := open(t, opt)
	if n.Name() != s.Addr()+"/3" {
		t.Errorf("name %q", n.Name())
	}
	r := n.Run(t.Context(), redlock.Call{Script: redlock.NewScript("return 1")})
	var e *redlock.ServerError
	if !errors.As(r[0].Err, &e) || e.Code() != "WRONGPASS" {
		t.Errorf("error %v", r[0].Err)
	}
	sub := n.Subscribe(t.Context(), "channel", func(string) {}, func() {})
	if !errors.As(sub, &e) || e.Code() != "WRONGPASS" {
		t.Errorf("Subscribe: %v", sub)
	}
	pin := n.Pinned(t.Context(), "key", func(do func(...string) (any, error)) error {
		_, err := do("PING")
		return err
	})
	if err := errors.Join(r[0].Err, sub, pin); strings.Contains(err.Error(), "wr0ng") {
		t.Errorf("credentials in %v", err)
	}
	opt.Password = "s3cret"
	if r := open(t, opt).Run(t.Context(), redlock.Call{Script: redlock.NewScript("return 1")}); r[0].Err != nil {
		t.Errorf("with the password: %v", r[0].Err)
	}
}

func TestCallersClientKeepsItsTimeouts(t *testing.T) {
	s := servertest.Redis(t)
	c := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer c.Close()
	n, err := goredisnode.New(c)
	if err != nil {
		t.Fatal(err)
	}
	before := *c.Options()
	ctx, cancel := context.WithTimeout(t.Context(), 1e9)
	defer cancel()
	if r := n.Run(ctx, redlock.Call{Script: redlock.NewScript("return 1")}); r[0].Err != nil {
		t.Error(r[0].Err)
	}
	after := c.Options()
	if before.ReadTimeout != after.ReadTimeout || before.WriteTimeout != after.WriteTimeout || before.MaxRetries != after.MaxRetries {
		t.Error("the client's options have changed")
	}
}

// A server that cannot be reached is told as that, and not as one that does not answer.
func TestOneCallTellsWhyNothingAnswers(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	n := open(t, &redis.Options{Addr: addr, DialTimeout: 5 * time.Second, MaxRetries: 1000, DialerRetries: 1000})
	for range 3 {
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		r := n.(redlock.Single).RunOne(ctx, &redlock.Call{Script: redlock.NewScript("return 1")})
		cancel()
		if !errors.Is(r.Err, syscall.ECONNREFUSED) {
			t.Errorf("no server: %v", r.Err)
		}
	}
}

func BenchmarkSubscribe(b *testing.B) {
	redistest.BenchmarkSubscribe(b, func(t testing.TB, addr string) redlock.Node {
		return open(t, &redis.Options{Addr: addr})
	})
}
