package etcd

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// ETC-10: the certificate of the server is replaced while a key is held. A holder that trusts the
// new one too keeps its lease over the connections that follow. One that does not is told so, and
// loses its lease in time; that is not "held".
func TestCertificateReplaced(t *testing.T) {
	t.Parallel()
	old, young := servertest.TLS(t), servertest.TLS(t)
	server := servertest.Etcd(t, module, servertest.EtcdTLS(old))
	trusts := func(authorities ...*servertest.Certs) (*holdfast.Locker, *servertest.Proxy) {
		pool := x509.NewCertPool()
		for _, c := range authorities {
			pem, err := os.ReadFile(c.CA)
			if err != nil || !pool.AppendCertsFromPEM(pem) {
				t.Fatal("no certificate:", err)
			}
		}
		p := servertest.NewProxy(t, server.Addr())
		cfg := config("https://" + p.Addr())
		cfg.TLS = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
		c, err := clientv3.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return kit.Locker(t, warm(t, openCold(t, c, etcdstore.Options{})), holdfast.Options{TTL: 2 * minTTL}), p
	}
	both, bothPath := trusts(old, young)
	one, onePath := trusts(old)
	kept, lost := kit.Acquire(t, both, "kept"), kit.Acquire(t, one, "lost")

	from, fromKey := young.Server()
	to, toKey := old.Server()
	for src, dst := range map[string]string{from: to, fromKey: toKey} {
		b, err := os.ReadFile(src)
		if err == nil {
			err = os.WriteFile(dst, b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if bothPath.Reset() == 0 || onePath.Reset() == 0 {
		t.Error("no connection was cut: the test shows nothing")
	}
	select {
	case <-lost.Done():
	case <-time.After(8 * minTTL):
		t.Fatal("a holder that cannot reach the server any more trusts its lease")
	}
	if err := lost.Err(); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("the holder that does not trust the certificate is told %v, want ErrLost", err)
	}
	_, err := one.TryAcquire(t.Context(), "other")
	if errors.Is(err, holdfast.ErrHeld) || !errors.Is(err, holdfast.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a client that does not trust the certificate is told %v, want ErrUnavailable, and why", err)
	}
	time.Sleep(2 * minTTL) // what is kept was extended since
	if err := kept.Err(); err != nil {
		t.Errorf("the holder that trusts it is told %v", err)
	}
	if err := kept.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := kit.Acquire(t, both, "lost").Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// KEY-05: stores with prefixes of their own share a cluster and a key, also where one prefix begins
// with another, and do not meet.
func TestPrefixesKeepStoresApart(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	client := connect(t, server.Addr())
	prefixes := []string{"/a/", "/a/locks/", "/a/b/", "/b/"}
	var stores []*etcdstore.Store
	var claims []store.Claim
	for _, prefix := range prefixes {
		s := warm(t, openCold(t, client, etcdstore.Options{Prefix: prefix}))
		c := s.Claim("k", store.ClaimOptions{TTL: 10 * minTTL, Label: prefix})
		if _, err := c.Try(t.Context()); err != nil {
			t.Errorf("prefix %q: Try: %v", prefix, err)
		}
		stores, claims = append(stores, s), append(claims, c)
	}
	listed := func(s *etcdstore.Store) (labels []string) {
		t.Helper()
		for h, err := range s.List(t.Context(), "") {
			if err != nil {
				t.Fatal(err)
			}
			labels = append(labels, h.Key+" of "+h.Label)
		}
		return labels
	}
	for i, s := range stores {
		if got, want := listed(s), []string{"k of " + prefixes[i]}; !slices.Equal(got, want) {
			t.Errorf("prefix %q: List answers %q, want %q", prefixes[i], got, want)
		}
	}
	if err := claims[0].Release(t.Context()); err != nil {
		t.Error(err)
	}
	for i, s := range stores[1:] {
		if _, err := s.Claim("k", store.ClaimOptions{TTL: minTTL}).Try(t.Context()); !errors.Is(err, store.ErrHeld) {
			t.Errorf("prefix %q: Try of a held key answers %v", prefixes[i+1], err)
		}
		if err := claims[i+1].Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
