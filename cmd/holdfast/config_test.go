package main

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

func TestParseConfig(t *testing.T) {
	c, err := parseConfig("f", []byte(`# a comment
store = ["redis://u:p@a", "rediss://b/2?tls-ca=/ca.pem"]
ttl = "20s"
max-ttl = "1m"
trust-restarts = true
label = "rack 7"
`))
	if err != nil {
		t.Fatal(err)
	}
	if c.ttl != 20*time.Second || c.label != "rack 7" || len(c.stores) != 2 {
		t.Errorf("%+v", c)
	}
	for i, want := range []string{"redis://a:6379", "rediss://b:6379/2"} {
		s := c.stores[i].(*storeSpec)
		if s.shown() != want || s.maxTTL != time.Minute || s.trustRestarts == nil || !*s.trustRestarts {
			t.Errorf("store %d: %+v", i, s)
		}
	}
	for text, want := range map[string]string{
		"":                             "",
		`store = "redis://a"`:          "redis://a:6379",
		`store = "sqlite:/a b%3F.db"`:  "sqlite:/a b%3F.db",
		`store = ["sqlite:/locks.db"]`: "sqlite:/locks.db",
		`store = "etcds://u@a,b/x?password-file=/p"`:           "etcds://a:2379,b:2379/x/",
		`store = "zk://a,b/x?session-timeout=9s"`:              "zk://a:2181,b:2181/x",
		`store = "postgres://a/d?sslrootcert=/ca"`:             "postgres://a:5432/d",
		`store = "mysql://a/d?tls-ca=/ca"`:                     "mysql://a:3306/d",
		"\ufeffstore = 'redis://a'":                            "redis://a:6379",
		`store = "redis+cluster://a,b"` + "\nmax-ttl=\"1s\"\n": "redis+cluster://a:6379,b:6379",
	} {
		c, err := parseConfig("f", []byte(text))
		got := ""
		for _, s := range c.stores {
			got += s.shown()
		}
		if err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

func TestParseConfigRefuses(t *testing.T) {
	for _, c := range []struct{ text, line, rule string }{
		{"store = 'redis://a'\nstor = 1", "line 2:", "stor is no key; there are store, ttl"},
		{"[store]\nurl = 'redis://a'", "line 1:", "store must be a URL"},
		{"a = 1\nb = 2", "line 1:", "a is no key"},
		{"\nttl = 15", "line 2:", "ttl must be a positive"},
		{"\n\nttl = '15'", "line 3:", "ttl must be a positive duration"},
		{"max-ttl = '-1s'\n", "line 1:", "max-ttl must be a positive duration"},
		{"trust-restarts = 'yes'", "line 1:", "trust-restarts must be true or false"},
		{"label = ''", "line 1:", "label must be a text"},
		{"store = 7", "line 1:", "store must be a URL"},
		{"store = ['redis://a',\n 7]", "line 1:", "a list of URLs"},
		{"store = ''", "line 1:", "must be a URL"},
		{"store = []", "line 1:", "a list of URLs"},
		{"ttl = '1s'\nstore = 'redis://u:hunter2@h:x'", "line 2:", "***@h"},
		{"store = ['redis://a',\n'redis://u:hunter2@h?x=1']", "line 1:", `no parameter "x"`},
		{"store = 'sqlite:locks.db'", "line 1:", "must be absolute"},
		{"store = 'rediss://h?tls-ca=ca.pem'", "line 1:", "must be absolute, ca.pem is not"},
		{"store = 'redis://h?password-file=pw'", "line 1:", "must be absolute"},
		{"store = 'etcds://h?tls-ca=ca.pem'", "line 1:", "must be absolute, ca.pem is not"},
		{"store = 'zk://u@h?password-file=pw'", "line 1:", "must be absolute, pw is not"},
		{"store = 'postgres://h/d?sslrootcert=ca.pem'", "line 1:", "must be absolute, ca.pem is not"},
		{"marks = 'postgres://h/d?sslrootcert=ca.pem'", "line 1:", "must be absolute, ca.pem is not"},
		{"store = ['etcd://a', 'etcd://b']", "line 1:", "cannot be joined"},
		{"store = ['redis://a', 'sqlite:/b']", "line 1:", "cannot be joined"},
		{"store = 'sqlite:/b'\nmax-ttl = '1s'", "line 1:", "belong to redis://"},
		{"trust-restarts = true", "", "store is missing"},
		{"store = 'redis://u:hunter2@h?max-ttl=1s'\nmax-ttl = '2s'", "line 1:", "another max-ttl"},
		{"store = 'redis://h?trust-restarts=0'\ntrust-restarts = true", "line 1:", "the contrary"},
		{"store = redis://u:hunter2@h", "line 1:", ""},
		{"store = \"redis://u:hunter2@h", "line 1:", ""},
		{"store = 'redis://a'\nstore = 'redis://b'", "line 2:", ""},
		{"store = \"\\xhunter2\"", "line 1:", ""},
	} {
		_, err := parseConfig("/etc/f.toml", []byte(c.text))
		if err == nil {
			t.Errorf("%q is taken", c.text)
			continue
		}
		text := err.Error()
		if !errors.Is(err, store.ErrInvalid) || !strings.Contains(text, `configuration file "/etc/f.toml": `+c.line) || !strings.Contains(text, c.rule) {
			t.Errorf("%q: %v; want %s and %s", c.text, err, c.line, c.rule)
		}
		if strings.Contains(text, "hunter2") || strings.Contains(text, "\n") {
			t.Errorf("%q: shows the password, or more than a line: %s", c.text, text)
		}
	}
}

// Whatever the text, it is a configuration or a one-line refusal without the password.
func FuzzConfig(f *testing.F) {
	for _, s := range []string{
		"store = 'redis://u:%s@h'", "store = [\"redis://a\", 'redis://u:%s@h:x']\nttl = '5s'\n", "store = redis://:%s@h", "store = \"redis://u:%s@h",
		"[store]\n'%s' = 1", "max-ttl = 1s\nstore = 'redis+sentinel://h/m?sentinel-password=%s'", "label = \"%s\"\nttl = 3", "store = '''\nredis://u:%s@h'''",
		"store = [[ 'redis://u:%s@h' ]]", "store = { a = 'redis://u:%s@h' }", "trust-restarts = true\nstore = \"sqlite:/a\\u0020b\"",
	} {
		f.Add(s, "hunter2")
	}
	const mark = "S3cr3t~"
	f.Fuzz(func(t *testing.T, form, password string) {
		text := strings.Replace(form, "%s", password+mark, 1)
		c, err := parseConfig("f", []byte(text))
		if err != nil {
			if !errors.Is(err, store.ErrInvalid) || strings.Contains(err.Error(), "\n") || len(err.Error()) > 4000 {
				t.Errorf("%q: %v is no one-line invalid error", text, err)
			}
			before, _, _ := strings.Cut(text, mark)
			if line := before[strings.LastIndexByte(before, '\n')+1:]; strings.Contains(line, "@") || !strings.Contains(line, "://") {
				return // no password stands there
			}
			if strings.Contains(text, mark+"@") && strings.Contains(err.Error(), mark) {
				t.Errorf("%q: the refusal shows the password: %v", text, err)
			}
			return
		}
		for _, s := range c.stores {
			roundTrip(t, s.url())
		}
	})
}

func TestConfigPath(t *testing.T) {
	dir := t.TempDir()
	home, xdg := filepath.Join(dir, "home"), filepath.Join(dir, "xdg")
	t.Setenv("HOME", home)
	t.Setenv("XDG_CONFIG_HOME", xdg)
	t.Setenv(configVariable, "")
	found := func(want string) {
		t.Helper()
		got, err := configPath()
		if want == "" && strings.HasPrefix(got, "/etc/") { // this machine has one
			got = ""
		}
		if err != nil || got != want {
			t.Errorf("%q, %v; want %q", got, err, want)
		}
	}
	found("")
	for _, d := range []string{xdg, filepath.Join(home, ".config")} {
		if err := os.MkdirAll(filepath.Join(d, "holdfast"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(d, "holdfast", "config.toml"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	found(filepath.Join(xdg, "holdfast", "config.toml"))
	t.Setenv("XDG_CONFIG_HOME", "relative")
	want := filepath.Join(home, ".config", "holdfast", "config.toml")
	if os.Geteuid() == 0 {
		want = "" // root's does not depend on HOME
	}
	found(want)
	t.Setenv(configVariable, "/no/such/file")
	found("/no/such/file")
	if _, err := loadConfig(); !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "/no/such/file") {
		t.Errorf("a missing file that is named: %v", err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(configVariable, "")
	t.Setenv("XDG_CONFIG_HOME", file) // no folder
	found("")
	t.Setenv(configVariable, os.DevNull)
	if c, err := loadConfig(); err != nil || len(c.stores) > 0 {
		t.Errorf("%s: %+v, %v", os.DevNull, c, err)
	}
	t.Setenv(configVariable, dir)
	if _, err := loadConfig(); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("a folder: %v", err)
	}
}

// A file that holds a password and that everybody can read.
func TestConfigWithPasswordForAll(t *testing.T) {
	if runtime.GOOS == "windows" {
		return // has no such modes
	}
	path := filepath.Join(t.TempDir(), "config.toml")
	t.Setenv(configVariable, path)
	for _, c := range []struct {
		mode os.FileMode
		text string
		ok   bool
	}{
		{0o644, "store = 'redis://u:hunter2@h'", false},
		{0o604, "store = 'redis+sentinel://h/m?sentinel-password=hunter2'", false},
		{0o640, "store = 'redis://u:hunter2@h'", true}, // a machine's file is shared with a group so
		{0o600, "store = 'redis://u:hunter2@h'", true},
		{0o644, "store = 'redis://u@h?password-file=/run/secrets/pw'", true},
		{0o644, "store = 'redis://h'", true},
	} {
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		_, err := loadConfig()
		if (err == nil) != c.ok || err != nil && (!errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "chmod o-r") || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%v %s: %v", c.mode, c.text, err)
		}
	}
}
