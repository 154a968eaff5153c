// Package rig wires stores to servers through either client: as any user, through names that
// lead elsewhere later, and with an ear on the wire.
package rig

import (
	"context"
	"crypto/tls"
	"net"
	"strings"
	"sync"
	"testing"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
)

// Client is how a node is reached. The zero value is go-redis at its defaults.
type Client struct {
	Rueidis        bool
	User, Password string
	Dial           func(ctx context.Context) (net.Conn, error) // instead of the address
}

// GoRedis and Rueidis are the two clients at their defaults.
var GoRedis, Rueidis = Client{}, Client{Rueidis: true}

// Clients are both.
var Clients = []Client{GoRedis, Rueidis}

func (c Client) String() string {
	if c.Rueidis {
		return "rueidis"
	}
	return "go-redis"
}

// Node is a node of the server at addr. Its client is closed at the end of the test.
func (c Client) Node(t testing.TB, addr string) redlock.Node {
	t.Helper()
	if c.Rueidis {
		o := rueidis.ClientOption{InitAddress: []string{addr}, Username: c.User, Password: c.Password}
		if c.Dial != nil {
			o.DialCtxFn = func(ctx context.Context, _ string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) {
				return c.Dial(ctx)
			}
		}
		n, err := rueidisnode.Dial(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		return n
	}
	o := &goredis.Options{Addr: addr, Username: c.User, Password: c.Password}
	if c.Dial != nil {
		o.Dialer = func(ctx context.Context, _, _ string) (net.Conn, error) { return c.Dial(ctx) }
	}
	client := goredis.NewClient(o)
	t.Cleanup(func() { client.Close() })
	n, err := goredisnode.New(client)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Nodes are nodes of all that have an address: servers or proxies.
func Nodes[S interface{ Addr() string }](t testing.TB, c Client, servers ...S) []redlock.Node {
	t.Helper()
	var nodes []redlock.Node
	for _, s := range servers {
		nodes = append(nodes, c.Node(t, s.Addr()))
	}
	return nodes
}

// Store is a store of nodes.
func Store(t testing.TB, o redlock.Options, nodes ...redlock.Node) *redlock.Store {
	t.Helper()
	s, err := redlock.New(o, nodes...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// OneLine checks that an error for people is one line, and has each of the parts.
func OneLine(t testing.TB, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	text := err.Error()
	if strings.ContainsAny(text, "\r\n") {
		t.Errorf("more than one line: %q", text)
	}
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q does not say %q", text, p)
		}
	}
}

// Must is the value of a command.
func Must(t testing.TB, s *servertest.RedisServer, args ...string) any {
	t.Helper()
	v, err := s.Do(args...)
	if err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return v
}

// Switch is a name that leads to one server and later to another, as a Sentinel or DNS does.
// Its Dial is for a [Client].
type Switch struct {
	mu     sync.Mutex
	target string
	conns  []net.Conn
}

// NewSwitch leads to the server at addr.
func NewSwitch(addr string) *Switch { return &Switch{target: addr} }

// To leads to another server from now on. Connections to the former one are closed.
func (s *Switch) To(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.target = addr
	for _, c := range s.conns {
		c.Close()
	}
	s.conns = nil
}

// Dial connects to the present server.
func (s *Switch) Dial(ctx context.Context) (net.Conn, error) {
	s.mu.Lock()
	target := s.target
	s.mu.Unlock()
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", target)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns = append(s.conns, c)
	return c, nil
}
