package main

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast/servertest"
)

const programVariable = "STORES_TEST_PROGRAM"

// TestMain is the program, or the tests.
func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// program runs it as a process of its own and returns the tokens that it prints, by the names of
// the stores.
func program(t *testing.T, store string, args ...string) map[string][]int64 {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), programVariable+"=1", "HOLDFAST_STORE="+store)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s%s", err, out, stderr.String())
	}
	t.Logf("\n%s", out)
	all := map[string][]int64{}
	for line := range strings.Lines(string(out)) {
		name, list, _ := strings.Cut(strings.TrimSpace(line), ":")
		for word := range strings.FieldsSeq(list) {
			n, err := strconv.ParseInt(word, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			all[name] = append(all[name], n)
		}
	}
	return all
}

// One program, and nothing but the URL says which store it uses: its tokens grow on each of them,
// over processes as well.
func TestTokensGrowOnEveryStore(t *testing.T) {
	urls := []string{
		"sqlite:" + filepath.Join(t.TempDir(), "locks.db"),
		"redis://" + servertest.Redis(t, servertest.Aged(time.Minute)).Addr(),
		"etcd://" + servertest.Etcd(t, "../../conformance/etcdserver").Addr(),
		"zk://" + servertest.ZooKeeper(t, servertest.ZooKeeperConfig("tickTime", "2000")).Addr() + "/apps",
		servertest.PostgreSQL(t).URL(""),
		servertest.MariaDB(t).URL(""),
	}
	times := 5
	if os.Getenv("HOLDFAST_SOAK") == "1" {
		times = 100
	}
	first := program(t, strings.Join(urls, " "), "-times", strconv.Itoa(times))
	second := program(t, "redis://none.invalid", append([]string{"-times", strconv.Itoa(times)}, urls...)...)
	if len(first) != len(urls) || len(second) != len(urls) {
		t.Errorf("%d and %d stores of %d", len(first), len(second), len(urls))
	}
	for name, list := range first {
		list = append(list, second[name]...)
		growing := slices.IsSortedFunc(list, func(a, b int64) int { // the same one twice does not count
			if a < b {
				return -1
			}
			return 1
		})
		if len(list) != 2*times || list[0] <= 0 || !growing {
			t.Errorf("%s: %v are not %d growing tokens", name, list, 2*times)
		}
	}
}

func TestRefuses(t *testing.T) {
	for _, c := range []struct {
		url, text string
		code      int
	}{
		{"", "name stores", 2},
		{"ftp://u:hunter2@h", "unknown scheme", 1},
		{"redis://u:hunter2@h:port", "cannot be read", 1},
		// What it would not heed.
		{"etcd:///jobs/", "names no host", 1},
		{"etcd:h", "names no host", 1},
		{"etcd://h?prefix=hunter2", "parameter prefix", 1},
		{"etcd://h?epoch=x", "parameter epoch", 1},
		{"etcd://h?epoch=1&epoch=2", "parameter epoch", 1},
		{"etcd://h?epoch=-1", "Epoch", 1},
		{"etcd://u:hunter2@h?password-file=f", "password-file", 1},
		{"postgres://u:hunter2@h/d?password-file=f", "password-file", 1},
		{"postgres://u:hunter2@h/d?notify=yes", "parameter notify", 1},
		{"postgres://u:hunter2@h/d?sslmode=nonsense", "look at its parameters", 1},
		{"mysql://u:hunter2@h/d?tls=true", "parameter tls", 1},
		{"mysql://h1,h2/d", "several hosts", 1},
		{"redis://u:hunter2@h?max-ttl=10s", "parameter max-ttl", 1},
		{"redis://u:hunter2@h/x", "number of a database", 1},
		{"redis://h1,h2", "several hosts", 1},
		{"zk://h#x", "has a #", 1},
		{"zk://h?session-timeout=10s", "parameter session-timeout", 1},
		{"zk://h?%zz", "cannot be read", 1},
		{"sqlite:a%20b", "without %", 1},
		{"sqlite:///tmp/x", "without %", 1},
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), programVariable+"=1", "HOLDFAST_STORE="+c.url)
		out, _ := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != c.code || !strings.Contains(string(out), c.text) || strings.Contains(string(out), "hunter2") {
			t.Errorf("%q: %v, %s", c.url, cmd.ProcessState, out)
		}
	}
}

// The path and the epoch of an etcd URL are those of the store, and members have a port.
func TestEtcdURL(t *testing.T) {
	for url, want := range map[string]string{
		"etcd://h":                    "etcd:http://h:2379/holdfast/",
		"etcd://h/":                   "etcd:http://h:2379/holdfast/",
		"etcd://[::1]":                "etcd:http://[::1]:2379/holdfast/",
		"etcd://h,g:1/jobs/a?epoch=7": "etcd:http://g:1,http://h:2379/jobs/a/",
	} {
		s, done, err := open(url)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Info().Fingerprint; got != want {
			t.Errorf("%s is %s, want %s", url, got, want)
		}
		done()
	}
}

// A listener hears of releases.
func TestListener(t *testing.T) {
	server := servertest.PostgreSQL(t)
	config, err := pgx.ParseConfig(server.URL(""))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	heard, ended := make(chan string, 1000), make(chan error, 1)
	go func() {
		ended <- listener{config}.Listen(ctx, "holdfast_released", func(payload string) {
			select {
			case heard <- payload:
			default:
			}
		})
	}()
	key := hex.EncodeToString([]byte("k"))
	servertest.Eventually(t, time.Minute, func() error { // it may not listen yet
		if err := tokens(ctx, server.URL("")+"&notify=1", "k", 1, io.Discard); err != nil {
			return err
		}
		select {
		case got := <-heard:
			if got != key {
				t.Errorf("heard %q, want %q", got, key)
			}
			return nil
		case <-time.After(time.Second):
			return errors.New("nothing was heard")
		}
	})
	stop()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("Listen ended without an error")
		}
	case <-time.After(time.Minute):
		t.Error("Listen goes on though its context has ended")
	}
}
