package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
)

// increment adds one to the number in a file, in a way that only works under a lock, and
// notes its token: increment COUNTER LOG.
func increment() {
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "incr:", err)
			os.Exit(9)
		}
	}
	text, err := os.ReadFile(os.Args[1])
	check(err)
	n, err := strconv.Atoi(string(text))
	check(err)
	time.Sleep(2 * time.Millisecond) // so that another one would be in between
	log, err := os.OpenFile(os.Args[2], os.O_WRONLY|os.O_APPEND, 0)
	check(err)
	_, err = fmt.Fprintln(log, os.Getenv("HOLDFAST_TOKEN"))
	check(err)
	check(os.WriteFile(os.Args[1], []byte(strconv.Itoa(n+1)), 0o600))
}

// aged are servers old enough to vote.
var aged = servertest.Aged(40 * time.Second)

func redisURLs(servers []*servertest.RedisServer) []string {
	var urls []string
	for _, s := range servers {
		urls = append(urls, "redis://"+s.Addr())
	}
	return urls
}

// serverFlags name the servers to the command.
func serverFlags(servers []*servertest.RedisServer) (flags []string) {
	for _, u := range redisURLs(servers) {
		flags = append(flags, "--store", u)
	}
	return flags
}

func soak() bool { return os.Getenv("HOLDFAST_SOAK") != "" }

// Processes that increment a plain file under a lock lose no increment, and their tokens
// grow in the order in which they held the key.
func TestCounter(t *testing.T) {
	workers, rounds := 8, 5
	if soak() {
		workers, rounds = 20, 50
	}
	t.Run("sqlite", func(t *testing.T) {
		count(t, []string{"sqlite:" + filepath.Join(t.TempDir(), "locks.db")}, workers, rounds)
	})
	t.Run("redis", func(t *testing.T) {
		count(t, redisURLs(servertest.RedisN(t, 1, aged)), workers, rounds)
	})
	t.Run("redis5", func(t *testing.T) {
		count(t, redisURLs(servertest.RedisN(t, 5, aged)), workers, rounds)
	})
}

func count(t *testing.T, urls []string, workers, rounds int) {
	dir := t.TempDir()
	counter, log := filepath.Join(dir, "counter"), filepath.Join(dir, "log")
	for name, text := range map[string]string{counter: "0", log: ""} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"run"}
	for _, u := range urls {
		args = append(args, "--store", u)
	}
	args = append(args, "counter", "--", "incr", counter, log)
	began := time.Now()
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds {
				if out, err := exec.Command("holdfast", args...).CombinedOutput(); err != nil {
					t.Errorf("%v: %s", err, out)
					return
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(began)

	want := workers * rounds
	text, err := os.ReadFile(counter)
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != strconv.Itoa(want) {
		t.Errorf("the counter is %s, want %d", text, want)
	}
	lines, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	tokens := strings.Fields(string(lines))
	if len(tokens) != want {
		t.Errorf("%d tokens, want %d", len(tokens), want)
	}
	last := int64(0)
	for i, s := range tokens {
		token, err := strconv.ParseInt(s, 10, 64)
		if err != nil || token <= last {
			t.Errorf("token %d is %q, after %d: tokens must grow", i, s, last)
		}
		last = token
	}
	t.Logf("%d processes x %d increments: counter %s, tokens grow, %v, %.1f ms each", workers, rounds, text,
		took.Round(time.Millisecond), took.Seconds()*1000/float64(want))
}
