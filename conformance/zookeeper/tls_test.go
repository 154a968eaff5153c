package zookeeper

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/zkstore"
)

// certificate writes a server's key and certificate, for 127.0.0.1 alone, and answers who trusts it.
func certificate(t testing.TB) (file string, pool *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "zk"}, // Java wants a name
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	text := append(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}),
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})...)
	file = filepath.Join(t.TempDir(), "server.pem")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	pool = x509.NewCertPool()
	pool.AppendCertsFromPEM(text)
	return file, pool
}

// secure starts a server with a port for TLS.
func secure(t testing.TB, file string) (plain *servertest.ZooKeeperServer, addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr = ln.Addr().String()
	ln.Close()
	_, port, _ := net.SplitHostPort(addr)
	var opts []servertest.ZooKeeperOption
	for name, value := range map[string]string{
		"secureClientPort": port, "secureClientPortAddress": "127.0.0.1",
		"serverCnxnFactory":     "org.apache.zookeeper.server.NettyServerCnxnFactory",
		"ssl.keyStore.location": file, "ssl.keyStore.type": "PEM", "ssl.clientAuth": "none",
	} {
		opts = append(opts, servertest.ZooKeeperConfig(name, value))
	}
	return servertest.ZooKeeper(t, append(opts, ticks())...), addr
}

// The store speaks TLS, with credentials and over reconnections; who does not trust the server, or does
// not speak TLS where the server does, is told so.
func TestTLS(t *testing.T) {
	t.Parallel()
	file, pool := certificate(t)
	server, addr := secure(t, file)
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
