package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// odd is a password with what URLs make something of.
const (
	odd        = "@:/?#[]%=&+ $'ü"
	oddEscaped = "%40%3A%2F%3F%23%5B%5D%25%3D%26%2B%20%24%27%C3%BC"
)

// withUser makes a user that may do all, with an odd password.
func withUser(t *testing.T, servers ...*servertest.RedisServer) {
	t.Helper()
	for _, s := range servers {
		if _, err := s.Do("ACL", "SETUSER", "bob", "on", ">"+odd, "~*", "&*", "+@all"); err != nil {
			t.Fatal(err)
		}
	}
}

func written(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func param(path string) string { return strings.ReplaceAll(path, " ", "%20") }

// openURL opens a store as --store does.
func openURL(t *testing.T, urls ...string) (*opened, *holdfast.Locker) {
	t.Helper()
	st, err := storeFlags{urls: urls}.open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.close)
	locks, err := holdfast.New(st, nil)
	if err != nil {
		t.Fatal(err)
	}
	return st, locks
}

// Every kind of URL reaches its deployment, and what a nested holdfast is given reaches the
// same one. (RED-16)
func TestRedisURLs(t *testing.T) {
	old := servertest.Aged(time.Hour)
	certs := servertest.TLS(t)
	for _, c := range []struct {
		name string
		urls func(t *testing.T) []string
	}{
		{"user and database", func(t *testing.T) []string {
			s := servertest.Redis(t, old)
			withUser(t, s)
			return []string{"redis://bob:" + oddEscaped + "@" + s.Addr() + "/3"}
		}},
		{"password only", func(t *testing.T) []string {
			s := servertest.Redis(t, old, servertest.Config("requirepass", odd), servertest.As("", odd))
			return []string{"redis://:" + oddEscaped + "@" + s.Addr()}
		}},
		{"password in a file", func(t *testing.T) []string {
			s := servertest.Redis(t, old)
			withUser(t, s)
			return []string{"redis://bob@" + s.Addr() + "?password-file=" + param(written(t, odd+"\r\n"))}
		}},
		{"Redlock", func(t *testing.T) []string {
			servers := servertest.RedisN(t, 3, old)
			withUser(t, servers...)
			var urls []string
			for _, s := range servers {
				urls = append(urls, "redis://bob:"+oddEscaped+"@"+s.Addr()+"?max-ttl=20s")
			}
			return urls
		}},
		{"TLS", func(t *testing.T) []string {
			s := servertest.Redis(t, old, servertest.WithTLS(certs))
			return []string{"rediss://" + s.TLSAddr() + "?tls-ca=" + param(certs.CA)}
		}},
		{"TLS with a client's certificate", func(t *testing.T) []string {
			s := servertest.Redis(t, old, servertest.WithTLS(certs), servertest.Config("tls-auth-clients", "yes"))
			return []string{"rediss://" + s.TLSAddr() + "?tls-ca=" + param(certs.CA) + "&tls-cert=" + param(certs.Cert) + "&tls-key=" + param(certs.Key)}
		}},
		{"TLS with a name", func(t *testing.T) []string {
			s := servertest.Redis(t, old, servertest.WithTLS(certs))
			return []string{"rediss://" + s.TLSAddr() + "?tls-server-name=cache.test&tls-ca=" + param(certs.CA)}
		}},
		{"Sentinel", func(t *testing.T) []string {
			s := servertest.Redis(t, old, servertest.As("", odd), servertest.Config("requirepass", odd))
			sentinel := servertest.Sentinel(t, "main", s, servertest.Config("requirepass", "sentry"), servertest.As("", "sentry"),
				servertest.Config("sentinel auth-pass", "main", odd))
			return []string{"redis+sentinel://:" + oddEscaped + "@127.0.0.1:1," + sentinel.Addr() + "/main/2?sentinel-password=sentry"}
		}},
		{"Cluster", func(t *testing.T) []string {
			servers := servertest.RedisCluster(t, 3, old)
			withUser(t, servers...)
			return []string{"redis+cluster://bob:" + oddEscaped + "@" + servers[0].Addr() + "," + servers[1].Addr()}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			st, locks := openURL(t, c.urls(t)...)
			lease, err := locks.Acquire(ctx, "k")
			if err != nil {
				t.Fatal(err)
			}
			nested, nestedLocks := openURL(t, splitStores(st.spec)...)
			if nested.Info() != st.Info() || nested.spec != st.spec {
				t.Errorf("%q leads to %+v, not %+v", nested.spec, nested.Info(), st.Info())
			}
			if _, err := nestedLocks.TryAcquire(ctx, "k"); !errors.Is(err, holdfast.ErrHeld) {
				t.Errorf("the nested store answers %v", err)
			}
			if err := lease.Release(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}

// What does not work says why, and shows no password. (RED-16)
func TestRedisURLsThatFail(t *testing.T) {
	old := servertest.Aged(time.Hour)
	plain := servertest.Redis(t, old, servertest.Config("requirepass", "hunter2"), servertest.As("", "hunter2"))
	certs, others := servertest.TLS(t), servertest.TLS(t)
	secure := servertest.Redis(t, old, servertest.WithTLS(certs), servertest.Config("tls-auth-clients", "yes"))
	host, port := "127.0.0.1", secure.TLSAddr()[len("127.0.0.1:"):]
	client := "&tls-cert=" + certs.Cert + "&tls-key=" + certs.Key
	for _, c := range []struct {
		name, url string
		kind      error
		text      string
	}{
		{"wrong password", "redis://:hunter3@" + plain.Addr(), store.ErrInvalid, "credentials"},
		{"no password", "redis://" + plain.Addr(), store.ErrInvalid, "wants a password"},
		{"no such database", "redis://:hunter2@" + plain.Addr() + "/99", store.ErrInvalid, "database"},
		{"unknown authority", "rediss://" + secure.TLSAddr() + "?tls-ca=" + others.CA + client, store.ErrInvalid, "authority (CA)"},
		{"system's authorities", "rediss://" + secure.TLSAddr(), store.ErrInvalid, "authority"},
		{"wrong name", "rediss://" + host + ":" + port + "?tls-server-name=elsewhere.test&tls-ca=" + certs.CA + client, store.ErrInvalid, "elsewhere.test"},
		{"no client certificate", "rediss://" + secure.TLSAddr() + "?tls-ca=" + certs.CA, store.ErrUnavailable, "certificate"},
		{"TLS to a plain port", "rediss://:hunter2@" + plain.Addr(), store.ErrUnavailable, "no answer within"},
		{"plain to a TLS port", "redis://" + secure.TLSAddr(), store.ErrUnavailable, "wants TLS"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, locks := openURL(t, c.url)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := locks.TryAcquire(ctx, "k")
			if err == nil || ctx.Err() != nil {
				t.Fatalf("%v, %v", err, ctx.Err())
			}
			if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) || strings.Contains(err.Error(), "hunter") || strings.Contains(err.Error(), "\n") {
				t.Errorf("%v; want %v and %q", err, c.kind, c.text)
			}
			untrusted := c.kind == store.ErrInvalid && strings.HasPrefix(c.url, "rediss")
			if told := strings.Contains(refusal(err).Error(), "tls-ca= and tls-server-name= in the URL"); told != untrusted {
				t.Errorf("tells of the parameters of TLS: %v; %v", told, refusal(err))
			}
			t.Log(err)
		})
	}
}
