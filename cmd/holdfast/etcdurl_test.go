package main

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func etcdAt(scheme string, r redisSpec, prefix string, epoch int, cluster string) etcdSpec {
	return etcdSpec{storeSpec: redisAt(scheme, r), prefix: prefix, epoch: epoch, cluster: cluster}
}

func TestParseEtcd(t *testing.T) {
	for raw, want := range map[string]etcdSpec{
		"etcd://h":                       etcdAt("etcd", redisSpec{addrs: "h:2379"}, "", 0, ""),
		"etcd://h/":                      etcdAt("etcd", redisSpec{addrs: "h:2379"}, "", 0, ""),
		"etcd://a,b:7,[::1]":             etcdAt("etcd", redisSpec{addrs: "a:2379,b:7,[::1]:2379"}, "", 0, ""),
		"etcd://h/jobs":                  etcdAt("etcd", redisSpec{addrs: "h:2379"}, "/jobs/", 0, ""),
		"etcd://h/jobs/a%20b/":           etcdAt("etcd", redisSpec{addrs: "h:2379"}, "/jobs/a b/", 0, ""),
		"etcd://u:s%40c%2Fret@h":         etcdAt("etcd", redisSpec{addrs: "h:2379", user: "u", password: "s@c/ret"}, "", 0, ""),
		"etcd://u@h?password-file=/f":    etcdAt("etcd", redisSpec{addrs: "h:2379", user: "u", passwordFile: "/f"}, "", 0, ""),
		"etcd://h?epoch=3&cluster=x%26y": etcdAt("etcd", redisSpec{addrs: "h:2379"}, "", 3, "x&y"),
		"etcds://h?tls-ca=ca.pem&tls-cert=c.pem&tls-key=k.pem&tls-server-name=etcd": etcdAt("etcds",
			redisSpec{addrs: "h:2379", ca: "ca.pem", cert: "c.pem", key: "k.pem", serverName: "etcd"}, "", 0, ""),
	} {
		got, err := parseEtcd(raw)
		if err != nil || got != want {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", raw, got, err, want)
			continue
		}
		if again, err := parseEtcd(got.url()); err != nil || again != got {
			t.Errorf("%s is written as %s, which reads as %+v, %v", raw, got.url(), again, err)
		}
		if shown := got.shown(); got.password != "" && strings.Contains(got.shown(), "ret") {
			t.Errorf("%s is shown as %s", raw, shown)
		}
	}
}

func TestParseEtcdRefuses(t *testing.T) {
	for raw, part := range map[string]string{
		"etcd:":                             "names no host",
		"etcd://":                           "names no host",
		"etcd:h":                            "names no host",
		"etcd://a,,b":                       "names no host",
		"etcd://h:0":                        "port",
		"etcd://h:x":                        "port",
		"etcd://h:1:2":                      "port",
		"etcd://h#f":                        "fragment",
		"etcd://u:p/secret@h":               "%2F",
		"etcd://u:secret%zz@h":              "valid URL",
		"etcd://u@h":                        "without a password",
		"etcd://:secret@h":                  "without a user",
		"etcd://u:secret@h?password-file=f": "give one",
		"etcd://h?tls-ca=x":                 "etcds://",
		"etcds://h?tls-cert=x":              "together",
		"etcd://h?epoch=-1":                 "epoch must be",
		"etcd://h?epoch=32768":              "epoch must be",
		"etcd://h?epoch=x":                  "epoch must be",
		"etcd://h?epoch=1&epoch=2":          "more than once",
		"etcd://h?cluster=":                 "is empty",
		"etcd://h?sentinel-user=x":          "no parameter",
		"etcd://h?max-ttl=30s":              "no parameter",
		"etcd://h/a%00b":                    "NUL",
		"etcd://h?cluster=%zz":              "cannot be read",
	} {
		_, err := parseEtcd(raw)
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || !strings.Contains(invalid.Rule, part) {
			t.Errorf("%s answers %v, want an *InvalidError with %q", raw, err, part)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error shows the password: %v", raw, err)
		}
	}
}

func FuzzParseEtcd(f *testing.F) {
	for _, raw := range []string{"etcd://h", "etcds://u:p@a,b:7/x/?epoch=1", "etcd://h?cluster=%26", "etcd:", "etcd://[::1%25x]", "/://0"} {
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		s, err := parseEtcd(raw)
		if err != nil {
			if !errors.Is(err, store.ErrInvalid) {
				t.Errorf("%q answers %v, want ErrInvalid", raw, err)
			}
			return
		}
		if again, err := parseEtcd(s.url()); err != nil || again != s {
			t.Errorf("%q is written as %q, which reads as %+v, %v; want %+v", raw, s.url(), again, err, s)
		}
	})
}

// A store from a URL works, over TLS too.
func TestOpenEtcd(t *testing.T) {
	certs := servertest.TLS(t)
	const module = "../../conformance/etcdserver"
	for _, c := range []struct {
		server *servertest.EtcdServer
		format string
	}{
		{servertest.Etcd(t, module), "etcd://%/jobs/?epoch=2"},
		{servertest.Etcd(t, module, servertest.EtcdTLS(certs)), "etcds://%/?tls-ca=" + filepath.ToSlash(certs.CA)},
	} {
		spec, err := parseEtcd(strings.ReplaceAll(c.format, "%", c.server.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		s, err := spec.open()
		if err != nil {
			t.Fatal(err)
		}
		claim := s.Claim("k", store.ClaimOptions{TTL: s.Info().MinTTL})
		g, err := claim.Try(t.Context())
		if err != nil {
			t.Errorf("%s: %v", spec.shown(), err)
		} else if int64(g.Token)>>48 != int64(spec.epoch) {
			t.Errorf("%s: token %v of epoch %d, want %d", spec.shown(), g.Token, int64(g.Token)>>48, spec.epoch)
		}
		if err := claim.Release(t.Context()); err != nil {
			t.Error(err)
		}
		s.close()
	}
}
