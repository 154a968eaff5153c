package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

func TestParseStore(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		raw  string
		want storeSpec
	}{
		{"sqlite:locks.db", storeSpec{scheme: "sqlite", path: "locks.db"}},
		{"sqlite:/var/my locks/%20.db", storeSpec{scheme: "sqlite", path: "/var/my locks/%20.db"}},
		{"sqlite:///var/locks.db", storeSpec{scheme: "sqlite", path: "/var/locks.db"}},
		{"redis://localhost", storeSpec{scheme: "redis", addr: "localhost:6379"}},
		{"redis://localhost/", storeSpec{scheme: "redis", addr: "localhost:6379"}},
		{"redis://10.0.0.1:7000/2", storeSpec{scheme: "redis", addr: "10.0.0.1:7000", db: 2}},
		{"redis://[::1]:6380", storeSpec{scheme: "redis", addr: "[::1]:6380"}},
		{"redis://[::1]", storeSpec{scheme: "redis", addr: "[::1]:6379"}},
		{"rediss://h:06380", storeSpec{scheme: "rediss", addr: "h:6380"}},
		{"redis://:s%40c%2Fret@h", storeSpec{scheme: "redis", addr: "h:6379", password: "s@c/ret"}},
		{"redis://bob:pw@h", storeSpec{scheme: "redis", addr: "h:6379", user: "bob", password: "pw"}},
		{"redis://h?max-ttl=45s&trust-restarts=1", storeSpec{scheme: "redis", addr: "h:6379", maxTTL: 45 * time.Second, trustRestarts: &yes}},
		{"redis://h/?trust-restarts=false", storeSpec{scheme: "redis", addr: "h:6379", trustRestarts: &no}},
	} {
		got, err := parseStore(c.raw)
		if err != nil {
			t.Errorf("%s: %v", c.raw, err)
			continue
		}
		if (got.trustRestarts == nil) != (c.want.trustRestarts == nil) || got.trustRestarts != nil && *got.trustRestarts != *c.want.trustRestarts {
			t.Errorf("%s: trustRestarts %v, want %v", c.raw, got.trustRestarts, c.want.trustRestarts)
		}
		got.trustRestarts, c.want.trustRestarts = nil, nil
		if got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", c.raw, got, c.want)
		}
	}
}

func TestParseStoreRefuses(t *testing.T) {
	for _, c := range []struct{ raw, value, rule string }{
		{"", `invalid store`, "must be a URL"},
		{"localhost", `"localhost"`, "must be a URL"},
		{"localhost:6379", `"localhost:6379"`, "unknown scheme"},
		{"memcached://h", `"memcached://h"`, "unknown scheme"},
		{"REDIS://h", `"REDIS://h"`, "unknown scheme"},
		{"user:hunter2@h:1", `"***@h:1"`, "unknown scheme"},
		{"redis:h", `"redis:h"`, "names no host"},
		{"redis://", `"redis://"`, "names no host"},
		{"redis://:6379", `"redis://:6379"`, "names no host"},
		{"redis://h:", `"redis://h:"`, "port is missing"},
		{"redis://h:0", `"redis://h:0"`, "1 to 65535"},
		{"redis://h:65536", `"redis://h:65536"`, "1 to 65535"},
		{"redis://h:x", `"redis://h:x"`, "check the port"},
		{"redis://h:-1", `"redis://h:-1"`, "check the port"},
		{"redis://h/x", `"redis://h/x"`, "number of a database"},
		{"redis://h/-1", `"redis://h/-1"`, "number of a database"},
		{"redis://h/0/1", `"redis://h/0/1"`, "number of a database"},
		{"redis://h#hunter2", `"redis://h"`, "fragment"},
		{"redis://hunter2@h", `"redis://***@h"`, "user without a password"},
		{"redis://hunter2:@h", `"redis://***@h"`, "user without a password"},
		{"redis://u:hunter2/x@h", `"redis://***@h"`, "%XX"},
		{"redis://u:hunter2@h:99999", `"redis://***@h:99999"`, "1 to 65535"},
		{"redis://u:hunter2@h:1:2", `"redis://***@h:1:2"`, "more than one port"},
		{"redis://h?password=hunter2", `"redis://h"`, `no parameter "password"`},
		{"redis://h?max-ttl=30", `"redis://h"`, "max-ttl must be"},
		{"redis://h?max-ttl=-1s", `"redis://h"`, "max-ttl must be"},
		{"redis://h?max-ttl=1s&max-ttl=2s", `"redis://h"`, "more than once"},
		{"redis://h?trust-restarts=perhaps", `"redis://h"`, "0 or 1"},
		{"redis://h?trust-restarts=%zz", `"redis://h"`, "cannot be read"},
		{"sqlite:", `"sqlite:"`, "names no file"},
		{"sqlite://h/x", `"sqlite://h/x"`, "no host"},
		{"sqlite:x?mode=ro", `"sqlite:x?mode=ro"`, "no parameters"},
		{"sqlite:x\x00y", `"sqlite:x\x00y"`, "no NUL"},
	} {
		_, err := parseStore(c.raw)
		if err == nil {
			t.Errorf("%q is taken", c.raw)
			continue
		}
		text := err.Error()
		if !errors.Is(err, store.ErrInvalid) || !strings.Contains(text, c.value) || !strings.Contains(text, c.rule) {
			t.Errorf("%q: %v; want an invalid store that says %s and %s", c.raw, err, c.value, c.rule)
		}
		if strings.Contains(text, "hunter2") || strings.Contains(text, "\n") {
			t.Errorf("%q: shows the password, or more than a line: %s", c.raw, text)
		}
	}
}

// What a nested holdfast reads is the same store.
func FuzzStoreURL(f *testing.F) {
	for _, s := range []string{
		"redis://u:p%40w@h:1/3?max-ttl=1m&trust-restarts=1", "rediss://[fe80::1%25eth0]:7", "sqlite:/a b", "sqlite:///x", "redis://h:06379//",
		"redis://user:hunter2@h:x", "sqlite:a@b", "redis://%41:1@h", "redis://[::%25\xe8]", "redis://[::1]", "redis://[v1.x]:1",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		s, err := parseStore(raw)
		if err != nil {
			if !errors.Is(err, store.ErrInvalid) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%q: %v is no one-line invalid error", raw, err)
			}
			return
		}
		if s.password != "" && len(s.password) > 3 && strings.Contains(s.shown(), s.password) && !strings.Contains(s.addr, s.password) {
			t.Errorf("%q is shown with its password", raw)
		}
		again, err := parseStore(s.url(s.maxTTL, s.trustRestarts != nil && *s.trustRestarts))
		if err != nil {
			t.Fatalf("%q is written as %q: %v", raw, s.url(s.maxTTL, false), err)
		}
		if s.trustRestarts != nil && !*s.trustRestarts {
			s.trustRestarts = nil // the default is not written
		}
		if (s.trustRestarts == nil) != (again.trustRestarts == nil) {
			t.Errorf("%q: trust-restarts is lost", raw)
		}
		s.trustRestarts, again.trustRestarts = nil, nil
		if s != again {
			t.Errorf("%q is read as %+v, and written and read again as %+v", raw, s, again)
		}
	})
}

func TestSplitStores(t *testing.T) {
	for raw, want := range map[string]string{
		"":                        "",
		"  ":                      "",
		"redis://a":               "redis://a",
		" redis://a  redis://b\n": "redis://a|redis://b",
		"sqlite:/my locks/a.db":   "sqlite:/my locks/a.db",
	} {
		if got := strings.Join(splitStores(raw), "|"); got != want {
			t.Errorf("%q: %q, want %q", raw, got, want)
		}
	}
}

func TestStateDir(t *testing.T) {
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ xdg, home, user, root string }{
		{"/x/state", "/h", "/x/state", "/x/state"},
		{"relative", "/h", "/h/.local/state", "/var/lib"},
		{"", "/h", "/h/.local/state", "/var/lib"},
		{"", "", filepath.Join(home, ".local/state"), "/var/lib"},
	} {
		t.Setenv("XDG_STATE_HOME", c.xdg)
		t.Setenv("HOME", c.home)
		want := c.user
		if os.Geteuid() == 0 {
			want = c.root
		}
		if got, err := stateDir(); err != nil || got != want {
			t.Errorf("XDG_STATE_HOME=%q HOME=%q: %q, %v; want %q", c.xdg, c.home, got, err, want)
		}
	}
}
