package etcd

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// module is where the server is built.
const module = servertest.EtcdModule("../etcdserver")

// minTTL is the smallest ttl of the store, and the unit of most tests.
const minTTL = 2 * time.Second

func TestMain(m *testing.M) {
	// The tests mostly wait for leases to end: many can wait at once.
	_ = flag.Set("test.parallel", "16")
	kit.Main(m, children)
}

// connect opens a client on the endpoints, which ends with the test.
func connect(t testing.TB, addrs ...string) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(config(addrs...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func config(addrs ...string) clientv3.Config {
	return clientv3.Config{
		Endpoints:            addrs,
		DialTimeout:          5 * time.Second,
		DialKeepAliveTime:    time.Second,
		DialKeepAliveTimeout: time.Second,
		Logger:               zap.NewNop(),
	}
}

// open opens a store that has met its cluster, so that a fault, or a busy machine, meets a
// request about a lock.
func open(t testing.TB, o etcdstore.Options, addrs ...string) *etcdstore.Store {
	t.Helper()
	return warm(t, openCold(t, connect(t, addrs...), o))
}

func openCold(t testing.TB, c *clientv3.Client, o etcdstore.Options) *etcdstore.Store {
	t.Helper()
	if o.Cluster == "" {
		o.Cluster = "test"
	}
	s, err := etcdstore.New(c, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func warm(t testing.TB, s *etcdstore.Store) *etcdstore.Store {
	t.Helper()
	servertest.Eventually(t, time.Minute, func() error {
		c := s.Claim("warm-up/"+rand.Text(), store.ClaimOptions{TTL: minTTL})
		_, err := c.Try(t.Context())
		return errors.Join(err, c.Release(t.Context()))
	})
	return s
}

// dial opens a store in a child process.
func dial(o etcdstore.Options, addr string) (*etcdstore.Store, func(), error) {
	c, err := clientv3.New(config(addr))
	if err != nil {
		return nil, nil, err
	}
	o.Cluster = "test"
	s, err := etcdstore.New(c, o)
	return s, func() { c.Close() }, err
}

// keys counts what the cluster has under the prefix.
func keys(t testing.TB, c *clientv3.Client, prefix string) int64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	resp, err := c.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		t.Fatal(err)
	}
	return resp.Count
}
