package rueidisnode_test

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/redistest"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// options are those of a client with short waits for servers that hang.
func options(addrs ...string) rueidis.ClientOption {
	o := rueidis.ClientOption{InitAddress: addrs, DisableCache: true, ConnWriteTimeout: 2 * time.Second}
	o.Dialer.Timeout, o.Dialer.KeepAlive = time.Second, time.Second
	return o
}

func newClient(t testing.TB, opt rueidis.ClientOption) rueidis.Client {
	t.Helper()
	c, err := rueidis.NewClient(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func dial(t testing.TB, opt rueidis.ClientOption) *rueidisnode.Conn {
	t.Helper()
	n, err := rueidisnode.Dial(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func TestNode(t *testing.T) {
	redistest.RunNode(t, func(t testing.TB, addr string) redlock.Node {
		n, err := rueidisnode.New(newClient(t, options(addr)))
		if err != nil {
			t.Fatal(err)
		}
		if n.Name() != addr {
			t.Errorf("name %q, want %q", n.Name(), addr)
		}
		return n
	})
}

func TestNodeVariants(t *testing.T) {
	variants := map[string]func(*rueidis.ClientOption){
		"RESP2": func(o *rueidis.ClientOption) { o.AlwaysRESP2 = true },
	}
	if os.Getenv("HOLDFAST_SOAK") == "1" {
		variants["without retry"] = func(o *rueidis.ClientOption) { o.DisableRetry = true }
		variants["always pipelining"] = func(o *rueidis.ClientOption) { o.AlwaysPipelining = true }
	}
	for name, change := range variants {
		t.Run(name, func(t *testing.T) {
			redistest.RunNode(t, func(t testing.TB, addr string) redlock.Node {
				opt := options(addr)
				change(&opt)
				n, err := rueidisnode.New(newClient(t, opt))
				if err != nil {
					t.Fatal(err)
				}
				return n
			})
		})
	}
}

func TestDialedNode(t *testing.T) {
	redistest.RunNode(t, func(t testing.TB, addr string) redlock.Node {
		opt := options(addr)
		opt.DisableCache = false
		return dial(t, opt)
	})
}

func TestCluster(t *testing.T) {
	redistest.RunCluster(t, func(t testing.TB, addrs []string) redlock.Node {
		n, err := rueidisnode.New(newClient(t, options(addrs...)))
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

func sentinel(addr, master string) rueidis.ClientOption {
	opt := options(addr)
	opt.Sentinel.MasterSet = master
	return opt
}

func TestSentinel(t *testing.T) {
	redistest.RunSentinel(t, func(t testing.TB, addr, master string) redlock.Node {
		c := newClient(t, sentinel(addr, master))
		var invalid *store.InvalidError
		if _, err := rueidisnode.New(c); !errors.As(err, &invalid) || !strings.Contains(err.Error(), "NewNamed") {
			t.Errorf("New of a Sentinel client: %v", err)
		}
		n, err := rueidisnode.NewNamed(master, c)
		if err != nil {
			t.Fatal(err)
		}
		return n
	})
}

func TestDialedSentinel(t *testing.T) {
	redistest.RunSentinel(t, func(t testing.TB, addr, master string) redlock.Node {
		n := dial(t, sentinel(addr, master))
		if n.Name() != master {
			t.Errorf("name %q, want %q", n.Name(), master)
		}
		return n
	})
}

func TestRefused(t *testing.T) {
	_, errNil := rueidisnode.New(nil)
	_, errNamedNil := rueidisnode.NewNamed("x", nil)
	_, errNoAddr := rueidisnode.Dial(rueidis.ClientOption{})
	_, errNoName := rueidisnode.NewNamed("", newClient(t, options(servertest.Redis(t).Addr())))
	_, errNoClient := rueidisnode.Eval(nil)
	for _, err := range []error{errNil, errNamedNil, errNoAddr, errNoName, errNoClient} {
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || !errors.Is(err, store.ErrInvalid) {
			t.Errorf("error %v", err)
		}
	}
}

var one = redlock.Call{Script: redlock.NewScript("return 1")}

func TestDialedNodeThatComesLater(t *testing.T) {
	s := servertest.Redis(t)
	s.Kill()
	n := dial(t, options(s.Addr()))
	for range 3 {
		if r := n.Run(t.Context(), one); r[0].Err == nil {
			t.Fatal("an answer of a server that is away")
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := n.Subscribe(ctx, "channel", func(string) {}, func() {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Subscribe: %v", err)
	}
	s.Restart()
	servertest.Eventually(t, 30*time.Second, func() error { return n.Run(t.Context(), one)[0].Err })
}

func TestDialedNodeThatHangs(t *testing.T) {
	servertest.CanPause(t)
	s := servertest.Redis(t)
	s.Stop()
	n := dial(t, options(s.Addr()))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	if r := n.Run(ctx, one); !errors.Is(r[0].Err, context.DeadlineExceeded) {
		t.Errorf("error %v", r[0].Err)
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("came back after %v, the deadline was 50 ms", d)
	}
	s.Cont()
	servertest.Eventually(t, 30*time.Second, func() error { return n.Run(t.Context(), one)[0].Err })
}

func TestClosedNode(t *testing.T) {
	s := servertest.Redis(t)
	n := dial(t, options(s.Addr()))
	if r := n.Run(t.Context(), one); r[0].Err != nil {
		t.Fatal(r[0].Err)
	}
	n.Close()
	n.Close()
	if r := n.Run(t.Context(), one); r[0].Err == nil {
		t.Error("a closed node answers")
	}
}

func TestNameAndErrorsHoldNoCredentials(t *testing.T) {
	s := servertest.Redis(t, servertest.Config("requirepass", "s3cret"), servertest.As("", "s3cret"))
	opt, err := rueidis.ParseURL("redis://default:wr0ng@" + s.Addr() + "/3")
	if err != nil {
		t.Fatal(err)
	}
	n := dial(t, opt)
	if n.Name() != s.Addr()+"/3" {
		t.Errorf("name %q", n.Name())
	}
	run := n.Run(t.Context(), one)[0].Err
	sub := n.Subscribe(t.Context(), "channel", func(string) {}, func() {})
	pin := n.Pinned(t.Context(), "key", func(func(...string) (any, error)) error { return nil })
	for _, err := range []error{run, sub, pin} {
		var e *redlock.ServerError
		if !errors.As(err, &e) || e.Code() != "WRONGPASS" {
			t.Errorf("error %v", err)
		}
		if err != nil && strings.Contains(err.Error(), "wr0ng") {
			t.Errorf("credentials in %v", err)
		}
	}
	opt.Password = "s3cret"
	if r := dial(t, opt).Run(t.Context(), one); r[0].Err != nil {
		t.Errorf("with the password: %v", r[0].Err)
	}
}

func TestAllocations(t *testing.T) {
	s := servertest.Redis(t)
	n := dial(t, options(s.Addr()))
	call := redlock.Call{
		Script: redlock.NewScript("return {'OK', 1790000000000001, 1790000000000002}"),
		Keys:   []string{"key", "{key}:fence", "{key}:queue"}, Args: []string{"owner", "15000", "1790000000000001"},
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	got := testing.AllocsPerRun(200, func() {
		if r := n.Run(ctx, call); r[0].Err != nil {
			t.Fatal(r[0].Err)
		}
	})
	// 3 of rueidis, 1 for the replies, 4 for the value; the race detector adds some.
	if got > 10 {
		t.Errorf("%v allocations for a call, want at most 10", got)
	}
}

func BenchmarkSubscribe(b *testing.B) {
	redistest.BenchmarkSubscribe(b, func(t testing.TB, addr string) redlock.Node { return dial(t, options(addr)) })
}
