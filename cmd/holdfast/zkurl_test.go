package main

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func zkAt(r redisSpec, chroot string, session time.Duration) zkSpec {
	return zkSpec{storeSpec: storeSpec{scheme: "zk", redisSpec: r}, chroot: chroot, session: session}
}

func TestParseZK(t *testing.T) {
	for raw, want := range map[string]zkSpec{
		"zk://h":                                 zkAt(redisSpec{addrs: "h:2181"}, "", 0),
		"zk://h/":                                zkAt(redisSpec{addrs: "h:2181"}, "", 0),
		"zk://a,b:7,[::1]":                       zkAt(redisSpec{addrs: "a:2181,b:7,[::1]:2181"}, "", 0),
		"zk://a,b/apps/shop":                     zkAt(redisSpec{addrs: "a:2181,b:2181"}, "/apps/shop", 0),
		"zk://h/apps/a%20b/":                     zkAt(redisSpec{addrs: "h:2181"}, "/apps/a b", 0),
		"zk://u:s%40c%2Fret@h/apps":              zkAt(redisSpec{addrs: "h:2181", user: "u", password: "s@c/ret"}, "/apps", 0),
		"zk://u@h?password-file=/f":              zkAt(redisSpec{addrs: "h:2181", user: "u", passwordFile: "/f"}, "", 0),
		"zk://h/apps?session-timeout=1m":         zkAt(redisSpec{addrs: "h:2181"}, "/apps", time.Minute),
		"zk://u@h?password-file=a%26b%3Fc%23d":   zkAt(redisSpec{addrs: "h:2181", user: "u", passwordFile: "a&b?c#d"}, "", 0),
		"zks://h?tls-ca=/ca&tls-server-name=zoo": {storeSpec: storeSpec{scheme: "zks", redisSpec: redisSpec{addrs: "h:2181", ca: "/ca", serverName: "zoo"}}},
		"zk://h?session-timeout=2500ms":          zkAt(redisSpec{addrs: "h:2181"}, "", 2500*time.Millisecond),
		"zk://u:p@[fe80::1%25eth0]:2182,z/x/y/":  zkAt(redisSpec{addrs: "[fe80::1%eth0]:2182,z:2181", user: "u", password: "p"}, "/x/y", 0),
	} {
		got, err := parseZK(raw)
		if err != nil || got != want {
			t.Errorf("%s:\n got %+v, %v\nwant %+v", raw, got, err, want)
			continue
		}
		if again, err := parseZK(got.url()); err != nil || again != got {
			t.Errorf("%s is written as %s, which reads as %+v, %v", raw, got.url(), again, err)
		}
		if shown := got.shown(); got.password != "" && (strings.Contains(shown, "ret") || strings.Contains(shown, "@")) {
			t.Errorf("%s is shown as %s", raw, shown)
		}
	}
}

func TestParseZKRefuses(t *testing.T) {
	for raw, part := range map[string]string{
		"zk:":                             "names no host",
		"zk://":                           "names no host",
		"zk:h":                            "names no host",
		"zk:///apps":                      "names no host",
		"zk://a,,b":                       "names no host",
		"zk://h:0":                        "port",
		"zk://h:x":                        "port",
		"zk://h:1:2":                      "port",
		"zk://h#f":                        "fragment",
		"zk://u:p/secret@h":               "%2F",
		"zk://u:secret%zz@h":              "valid URL",
		"zk://u@h":                        "without a password",
		"zk://:secret@h":                  "without a user",
		"zk://h?password-file=f":          "without a user",
		"zk://u:secret@h?password-file=f": "give one",
		"zk://h?session-timeout=5":        "duration",
		"zk://h?session-timeout=-5s":      "duration",
		"zk://h?session-timeout=":         "is empty",
		"zk://h?session-timeout=1s&session-timeout=2s": "more than once",
		"zk://h?max-ttl=30s":                           "no parameter",
		"zk://h?tls-ca=x":                              "TLS is zks://",
		"zks://h?tls-cert=x":                           "together",
		"zk://h?sentinel-user=x":                       "no parameter",
		"zk://h?password-file=%zz":                     "cannot be read",
	} {
		_, err := parseZK(raw)
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || !strings.Contains(invalid.Rule, part) {
			t.Errorf("%s answers %v, want a rule with %q", raw, err, part)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error shows the password: %v", raw, err)
		}
	}
	// What only the store knows.
	for raw, field := range map[string]string{
		"zk://h/a//b": "Chroot", "zk://h/a%00b": "Chroot", "zk://h/zookeeper/x": "Chroot",
		"zk://h?session-timeout=1ms": "SessionTimeout", "zk://a%3Ab:c@h": "User",
	} {
		s, err := parseZK(raw)
		if err != nil {
			t.Errorf("%s answers %v", raw, err)
			continue
		}
		o, err := s.open()
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != field {
			t.Errorf("%s opens with %v, want an error about %s", raw, err, field)
		}
		if err == nil {
			o.close()
		}
	}
}

// A store from a URL works, over TLS too.
func TestOpenZK(t *testing.T) {
	certs := servertest.TLS(t)
	server := servertest.ZooKeeper(t, servertest.ZooKeeperTLS(t, certs), servertest.ZooKeeperConfig("tickTime", "1000"))
	for _, raw := range []string{
		"zk://u:p@" + server.Addr() + "/apps?session-timeout=20s",
		"zks://u:p@" + server.SecureAddr() + "/apps?session-timeout=20s&tls-ca=" + filepath.ToSlash(certs.CA),
	} {
		s, err := parseZK(raw)
		if err != nil {
			t.Fatal(err)
		}
		o, err := s.open()
		if err != nil {
			t.Fatal(err)
		}
		defer o.close()
		c := o.Claim("k", store.ClaimOptions{TTL: 10 * time.Second})
		if _, err := c.Try(t.Context()); err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		if err := c.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if again, err := parseZK(o.spec); err != nil || again != s {
			t.Errorf("a nested command is given %s, which reads as %+v, %v", o.spec, again, err)
		}
	}
}

func FuzzParseZK(f *testing.F) {
	f.Add("zk://u:p@a,b:7/apps?session-timeout=30s")
	f.Add("zk://[::1]/%2e%2e")
	f.Fuzz(func(t *testing.T, raw string) {
		s, err := parseZK(raw)
		if err != nil {
			return
		}
		s.scheme = "zk"
		if again, err := parseZK(s.url()); err != nil || again != s {
			t.Errorf("%q is %+v, written as %q, which reads as %+v, %v", raw, s, s.url(), again, err)
		}
	})
}
