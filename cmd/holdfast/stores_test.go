package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

func redisAt(scheme string, r redisSpec) storeSpec { return storeSpec{scheme: scheme, redisSpec: r} }

func TestParseStore(t *testing.T) {
	yes, no := true, false
	for _, c := range []struct {
		raw  string
		want storeSpec
	}{
		{"sqlite:locks.db", storeSpec{scheme: "sqlite", path: "locks.db"}},
		{"sqlite:/var/my locks/%20.db", storeSpec{scheme: "sqlite", path: "/var/my locks/ .db"}},
		{"sqlite:/a%3Fb%23c%25", storeSpec{scheme: "sqlite", path: "/a?b#c%"}},
		{"sqlite:///var/locks.db", storeSpec{scheme: "sqlite", path: "/var/locks.db"}},
		{"redis://localhost", redisAt("redis", redisSpec{addrs: "localhost:6379"})},
		{"redis://localhost/", redisAt("redis", redisSpec{addrs: "localhost:6379"})},
		{"redis://10.0.0.1:7000/2", redisAt("redis", redisSpec{addrs: "10.0.0.1:7000", db: 2})},
		{"redis://[::1]:6380", redisAt("redis", redisSpec{addrs: "[::1]:6380"})},
		{"redis://[::1]", redisAt("redis", redisSpec{addrs: "[::1]:6379"})},
		{"rediss://h:06380", redisAt("rediss", redisSpec{addrs: "h:6380"})},
		{"redis://:s%40c%2Fret@h", redisAt("redis", redisSpec{addrs: "h:6379", password: "s@c/ret"})},
		{"redis://:%40%3A%2F%3F%23%5B%5D%25%3D%26%2B%20%24@h", redisAt("redis", redisSpec{addrs: "h:6379", password: "@:/?#[]%=&+ $"})},
		{"redis://bob:pw@h", redisAt("redis", redisSpec{addrs: "h:6379", user: "bob", password: "pw"})},
		{"redis://bob:a@b@h", redisAt("redis", redisSpec{addrs: "h:6379", user: "bob", password: "a@b"})},
		{"redis://bob@h?password-file=/run/secrets/pw", redisAt("redis", redisSpec{addrs: "h:6379", user: "bob", passwordFile: "/run/secrets/pw"})},
		{"redis://h?max-ttl=45s&trust-restarts=1", redisAt("redis", redisSpec{addrs: "h:6379", maxTTL: 45 * time.Second, trustRestarts: &yes})},
		{"redis://h/?trust-restarts=false", redisAt("redis", redisSpec{addrs: "h:6379", trustRestarts: &no})},
		{"rediss://h?tls-ca=ca.pem&tls-cert=c.pem&tls-key=k.pem&tls-server-name=cache", redisAt("rediss", redisSpec{addrs: "h:6379", ca: "ca.pem", cert: "c.pem", key: "k.pem", serverName: "cache"})},
		{"redis+sentinel://s1,s2:7,[::1]/main", redisAt("redis+sentinel", redisSpec{addrs: "s1:26379,s2:7,[::1]:26379", master: "main"})},
		{"redis+sentinel://u:p@s1/my%2Fmain/3?sentinel-user=su&sentinel-password=s%26p", redisAt("redis+sentinel", redisSpec{addrs: "s1:26379", user: "u", password: "p", master: "my/main", db: 3, sentinelUser: "su", sentinelPassword: "s&p"})},
		{"rediss+sentinel://s1/main?sentinel-password-file=/x", redisAt("rediss+sentinel", redisSpec{addrs: "s1:26379", master: "main", sentinelPasswordFile: "/x"})},
		{"redis+cluster://a:1,b:2,c", redisAt("redis+cluster", redisSpec{addrs: "a:1,b:2,c:6379"})},
		{"rediss+cluster://u:p@a/0", redisAt("rediss+cluster", redisSpec{addrs: "a:6379", user: "u", password: "p"})},
	} {
		read, err := parseStore(c.raw)
		if err != nil {
			t.Errorf("%s: %v", c.raw, err)
			continue
		}
		got := *read.(*storeSpec)
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
		{"mem:", `"mem:"`, "a process of its own"},
		{"mariadb://u:hunter2@h/d", `"mariadb://***@h/d"`, "mysql://HOST/DATABASE"},
		{"mysql://u:hunter2@tcp(h:3306)/d", `"mysql://***@tcp(h:3306)/d"`, "check the port"},
		{"etcd://u:hunter2@a:x", `"etcd://***@a:x"`, "check the port"},
		{"zk://u:hunter2@h?max-ttl=30s", `"zk://***@h"`, "no parameter"},
		{"postgres://u:hunter2@h/d?max-ttl=30s&notify=2", `"postgres://***@h/d"`, "notify must be"},
		{"redis:h", `"redis:h"`, "names no host"},
		{"redis://", `"redis://"`, "names no host"},
		{"redis://:6379", `"redis://:6379"`, "names no host"},
		{"redis://h:", `"redis://h:"`, "port is missing"},
		{"redis://h:0", `"redis://h:0"`, "1 to 65535"},
		{"redis://h:65536", `"redis://h:65536"`, "1 to 65535"},
		{"redis://h:x", `"redis://h:***"`, "check the port"},
		{"redis://h:-1", `"redis://h:***"`, "check the port"},
		{"redis://h/x", `"redis://h/x"`, "number of a database"},
		{"redis://h/-1", `"redis://h/-1"`, "number of a database"},
		{"redis://u:hunter2", `"redis://u:***"`, "check the port"}, // as far as a space in a password
		{"redis://h/0/1", `"redis://h/0/1"`, "number of a database"},
		{"redis://h#hunter2", `"redis://h"`, "fragment"},
		{"redis://hunter2@h", `"redis://***@h"`, "user without a password"},
		{"redis://hunter2:@h", `"redis://***@h"`, "user without a password"},
		{"redis://u:hunter2/x@h", `"redis://***@h"`, "%XX"},
		{"redis://u:hunter2@h:99999", `"redis://***@h:99999"`, "1 to 65535"},
		{"redis://u:hunter2@h:1:2", `"redis://***@h:1:2"`, "more than one port"},
		{"redis://u:12?hunter2@h", `"redis://***"`, "%3F"},
		{"redis://u:12#hunter2@h", `"redis://***"`, "%23"},
		{"redis+sentinel://u:12/hunter2@h", `"redis+sentinel://***@h"`, "%2F"},
		{"redis://a,b", `"redis://a,b"`, "redis+cluster://"},
		{"redis://u:hunter2@h?password-file=x", `"redis://***@h"`, "give one"},
		{"redis://h?tls-ca=x", `"redis://h"`, "rediss://"},
		{"rediss://h?tls-cert=x", `"rediss://h"`, "belong together"},
		{"rediss://h?tls-skip-verify=1", `"rediss://h"`, `no parameter "tls-skip-verify"`},
		{"redis://h?sentinel-password=hunter2", `"redis://h"`, "redis+sentinel://"},
		{"redis+sentinel://h", `"redis+sentinel://h"`, "names no master"},
		{"redis+sentinel://h/", `"redis+sentinel://h/"`, "names no master"},
		{"redis+sentinel://h//0", `"redis+sentinel://h//0"`, "names no master"},
		{"redis+sentinel://h/m/x", `"redis+sentinel://h/m/x"`, "number of a database"},
		{"redis+sentinel://h,/m", `"redis+sentinel://h,/m"`, "names no host"},
		{"redis+sentinel://h/m?sentinel-password=a&hunter2=b", `"redis+sentinel://h/m"`, "%26"},
		{"redis+sentinel://h/m?sentinel-user=a", `"redis+sentinel://h/m"`, "without a sentinel-password"},
		{"redis+sentinel://h/m?sentinel-password=hunter2&sentinel-password-file=a", `"redis+sentinel://h/m"`, "give one"},
		{"redis+cluster://h/1", `"redis+cluster://h/1"`, "database 0 only"},
		{"redis+unix://h", `"redis+unix://h"`, "unknown scheme"},
		{"redis://h?password-file=", `"redis://h"`, "is empty"},
		{"redis://h?password=hunter2", `"redis://h"`, `no parameter "password"`},
		{"redis://h?max-ttl=30", `"redis://h"`, "max-ttl must be"},
		{"redis://h?max-ttl=-1s", `"redis://h"`, "max-ttl must be"},
		{"redis://h?max-ttl=1s&max-ttl=2s", `"redis://h"`, "more than once"},
		{"redis://h?trust-restarts=perhaps", `"redis://h"`, "0 or 1"},
		{"redis://h?trust-restarts=%zz", `"redis://h"`, "cannot be read"},
		{"sqlite:", `"sqlite:"`, "names no file"},
		{"sqlite://h/x", `"sqlite://h/x"`, "no host"},
		{"sqlite:x?mode=ro", `"sqlite:x?mode=ro"`, "no parameters"},
		{"sqlite:100%", `"sqlite:100%"`, "%25"},
		{"sqlite:x%00y", `"sqlite:x%00y"`, "no NUL"},
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

// What a nested holdfast reads is the same store, and no refusal shows what a user may have
// meant as the password.
func FuzzStoreURL(f *testing.F) {
	for _, s := range []string{
		"redis://u:p%40w@h:1/3?max-ttl=1m&trust-restarts=1", "rediss://[fe80::1%25eth0]:7", "sqlite:/a b", "sqlite:///x", "redis://h:06379//",
		"redis://user:hunter2@h:x", "sqlite:a@b", "redis://%41:1@h", "redis://[::%25\xe8]", "redis://[::1]", "redis://[v1.x]:1", "sqlite:%2F%2Fx",
		"redis+sentinel://u:p@s1,s2:7,[::1]/my%2Fmain/3?sentinel-user=su&sentinel-password=s%26p", "rediss+cluster://a:1,b?tls-ca=/x+y&tls-server-name=q",
		"etcd://u:p%40w@a,b:7/x/?epoch=3&cluster=q", "etcds://h?tls-ca=/x+y", "zk://u:p%40w@a,b:7/x?session-timeout=9s",
		"postgres://u:p%40w@a,b:7/d?notify=1&sslmode=require", "postgresql:///d", "mysql://u:p@h/d?tls=preferred", "mysql://h/d?tls-ca=/x",
		"redis://u@h?password-file=%2Fx", "rediss://h?tls-cert=a&tls-key=b", "sqlite:/a%3Fb%23c%25",
	} {
		f.Add(s, "hunter2")
	}
	const mark = "S3cr3t~"
	f.Fuzz(func(t *testing.T, raw, password string) {
		roundTrip(t, raw)
		// A password that was not escaped, in every scheme.
		for _, form := range []string{"redis://u:%s@h", "rediss://:%s@h:1/2?max-ttl=1s", "redis+sentinel://u:%s@h/m",
			"redis+cluster://u:%s@h,i", "redis+sentinel://h/m?sentinel-password=%s", "redis:u:%s@h", "u:%s@h",
			"etcd://u:%s@h,i/x?epoch=1", "etcds://u:%s@h", "zk://u:%s@h,i/x", "zk:u:%s@h", "postgres://u:%s@h,i/d?notify=1",
			"mysql://u:%s@h/d", "mysql://u:%s@tcp(h:1)/d", "mariadb://u:%s@h/d", "mem:u:%s@h"} {
			written := fmt.Sprintf(form, password+mark)
			if s, err := parseStore(written); err != nil && strings.Contains(err.Error(), mark) {
				t.Errorf("%q: the refusal shows the password: %v", written, err)
			} else if err == nil && strings.Contains(s.shown(), mark) && strings.Contains(form, "%s@") {
				t.Errorf("%q: is shown as %q", written, s.shown())
			}
		}
	})
}

func roundTrip(t *testing.T, raw string) {
	t.Helper()
	s, err := parseStore(raw)
	if err != nil {
		if !errors.Is(err, store.ErrInvalid) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v is no one-line invalid error", raw, err)
		}
		return
	}
	written := s.url()
	again, err := parseStore(written)
	if err != nil {
		t.Fatalf("%q is written as %q: %v", raw, written, err)
	}
	if list := splitStores(written); len(list) != 1 || list[0] != written {
		t.Errorf("%q is written as %q, which HOLDFAST_STORE takes apart", raw, written)
	}
	if r, ok := s.(*storeSpec); ok && r.trustRestarts != nil && !*r.trustRestarts {
		r.trustRestarts = nil // the default is not written
	}
	if a, ok := again.(*sqlStoreSpec); ok && len(a.query) == 0 {
		a.query, s.(*sqlStoreSpec).query = nil, nil // or one without parameters
	}
	if !reflect.DeepEqual(s, again) {
		t.Errorf("%q is read as %+v, and written and read again as %+v", raw, s, again)
	}
}

func TestSplitStores(t *testing.T) {
	for raw, want := range map[string]string{
		"":                        "",
		"  ":                      "",
		"redis://a":               "redis://a",
		" redis://a  redis://b\n": "redis://a|redis://b",
		"sqlite:/my locks/a.db":   "sqlite:/my locks/a.db",
		" sqlite:/my locks/b\r\n": "sqlite:/my locks/b",
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

// Of the URLs of one store, all but those of Redis servers stand alone.
func TestJoinedStores(t *testing.T) {
	for _, k := range storeKinds {
		for _, scheme := range k.schemes {
			u := scheme + "://h/d"
			switch {
			case scheme == "sqlite":
				u = "sqlite:x"
			case isRedis(scheme) && !strings.Contains(scheme, "sentinel"):
				u = scheme + "://h"
			}
			if list, err := parseStores([]string{u}); err != nil || len(list) != 1 {
				t.Errorf("%s: %v", u, err)
			}
			_, err := parseStores([]string{"redis://h", u})
			if refused := errors.Is(err, store.ErrInvalid) && strings.Contains(err.Error(), "cannot be joined"); refused == isRedis(scheme) {
				t.Errorf("%s beside redis://: %v", u, err)
			}
		}
	}
}

// What belongs to Redis is refused elsewhere, before anything is opened, and by the words of people.
func TestTermsOfRedis(t *testing.T) {
	for _, u := range []string{"sqlite:x", "etcd://h", "etcds://h", "zk://h", "postgres://h/d", "mysql://h/d"} {
		for _, f := range []storeFlags{{urls: []string{u}, maxTTL: time.Minute}, {urls: []string{u}, trustRestarts: true}} {
			if _, err := f.open(); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "they belong to redis://") {
				t.Errorf("%s: %v", u, err)
			}
		}
		for _, terms := range []string{"max-ttl = '1m'", "trust-restarts = true"} {
			text := fmt.Sprintf("store = %q\n%s\n", strings.Replace(u, ":x", ":/x", 1), terms)
			if _, err := parseConfig("f", []byte(text)); err == nil || !strings.Contains(err.Error(), "they belong to redis://") {
				t.Errorf("%s: %v", text, err)
			}
		}
	}
}

// The help, and the refusal of what is no store, name every scheme.
func TestSchemesAreTold(t *testing.T) {
	_, err := parseStore("ftp://h")
	for _, k := range storeKinds {
		for i, scheme := range k.schemes {
			if scheme == "postgresql" {
				continue // another spelling
			}
			if !strings.Contains(runHelp(), scheme+":") {
				t.Errorf("the help does not tell of %s", scheme)
			}
			if i == 0 && !strings.Contains(err.Error(), scheme+":") {
				t.Errorf("%v: tells nothing of %s", err, scheme)
			}
		}
	}
}

// While a process is paused, it keeps nobody from the file of its store, whatever it is doing.
func TestPausedStoreIsInNobodysWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "locks.db")
	st, err := openSQLite(path)
	if err != nil {
		t.Fatal(err)
	}
	defer st.close()
	claim := st.Claim("k", store.ClaimOptions{TTL: time.Minute})
	if _, err := claim.Try(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	for range 4 {
		busy.Go(func() {
			for ctx.Err() == nil {
				_, _ = claim.Extend(ctx)
			}
		})
	}
	defer busy.Wait()
	defer stop()

	other, err := sql.Open("sqlite", "file:"+path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	other.SetMaxOpenConns(1)
	tries := func() (refused int) {
		for range 200 {
			if _, err := other.Exec("BEGIN IMMEDIATE"); err != nil {
				refused++
				continue
			}
			if _, err := other.Exec("ROLLBACK"); err != nil {
				t.Fatal(err)
			}
		}
		return refused
	}
	eventually(t, "the store writes", func() bool { return tries() > 0 })
	resume := st.pause()
	if n := tries(); n > 0 {
		t.Errorf("%d of 200 transactions are refused while the store is paused", n)
	}
	resume()
	eventually(t, "the store goes on", func() bool { return tries() > 0 })
}
