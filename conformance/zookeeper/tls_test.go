package zookeeper

import (
	"crypto/tls"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/zkstore"
)

// The store speaks TLS, with credentials and over reconnections; who does not trust the server, or does
// not speak TLS where the server does, is told so.
func TestTLS(t *testing.T) {
	t.Parallel()
	certs := servertest.TLS(t)
	server := servertest.ZooKeeper(t, servertest.ZooKeeperTLS(t, certs), ticks())
	addr, pool := server.SecureAddr(), certs.Config(t).RootCAs
	proxy := servertest.NewProxy(t, addr)
	o := zkstore.Options{Servers: []string{proxy.Addr()}, SessionTimeout: sessionTimeout, TLS: &tls.Config{RootCAs: pool},
		User: "shop", Password: "secret", Chroot: "/apps"}
	s := open(t, o)
	servertest.Eventually(t, 20*time.Second, func() error { _, err := s.Inspect(t.Context(), "k"); return err })
	lease := kit.Acquire(t, kit.Locker(t, s, holdfast.Options{TTL: sessionTimeout / 2}), "k")
	if proxy.Counts().Connections == 0 {
		t.Error("nothing went through the proxy")
	}
	if proxy.Reset() == 0 {
		t.Error("no connection was there to be cut")
	}
	servertest.Eventually(t, sessionTimeout, func() error { return lease.Extend(t.Context()) })
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	for _, c := range []struct {
		name, addr, says string
		tls              *tls.Config
	}{
		{"a server that is not trusted", addr, "certificate", &tls.Config{}},
		{"a name that is not the server's", addr, "certificate", &tls.Config{RootCAs: pool, ServerName: "zk1"}},
		{"TLS to the plain port", server.Addr(), server.Addr(), &tls.Config{RootCAs: pool}},
		{"no TLS to the secure port", addr, addr, nil},
	} {
		o := zkstore.Options{Servers: []string{c.addr}, SessionTimeout: sessionTimeout, TLS: c.tls}
		_, err := open(t, o).Inspect(t.Context(), "k")
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("with %s, Inspect answers %v, want ErrUnavailable and %q", c.name, err, c.says)
		}
	}
}
