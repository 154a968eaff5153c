package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// waiters are the lines of a status that tell of the queue.
func waiters(status string) (all []string) {
	for line := range strings.Lines(status) {
		if w, is := strings.CutPrefix(line, "waiter  "); is {
			all = append(all, strings.TrimSuffix(w, "\n"))
		}
	}
	return all
}

func TestStatusTextOfQueue(t *testing.T) {
	many := make([]store.Queued, 100)
	for i := range many {
		many[i] = store.Queued{Owner: fmt.Sprint("o", i), Label: fmt.Sprint("host:", i), Waited: time.Duration(200-i) * time.Second}
	}
	for name, c := range map[string]struct {
		h     store.Holder
		lines []string
	}{
		"none":         {store.Holder{Key: "k"}, nil},
		"unknown":      {store.Holder{Key: "k", Owner: "o", TTL: time.Second}, nil},
		"one":          {store.Holder{Key: "k", Owner: "o", Waiting: 1, Queue: many[:1]}, []string{"1  host:0, for 3m20s"}},
		"no holder":    {store.Holder{Key: "k", Waiting: 1, Queue: []store.Queued{{Owner: "o", Waited: 1600 * time.Millisecond}}}, []string{"1  unknown, for 2s"}},
		"odd label":    {store.Holder{Key: "k", Waiting: 1, Queue: []store.Queued{{Owner: "o", Label: "a\nwaiter  2"}}}, []string{`1  "a\nwaiter  2", for 0s`}},
		"only a count": {store.Holder{Key: "k", Waiting: 3}, []string{"... and 3 more"}},
	} {
		if got := waiters(statusText(c.h, nil)); !slices.Equal(got, c.lines) {
			t.Errorf("%s: %q, want %q", name, got, c.lines)
		}
	}
	for _, n := range []int{20, 21, 57, 100, 250} {
		got := waiters(statusText(store.Holder{Key: "k", Waiting: n, Queue: many[:min(n, 100)]}, nil))
		last := "20  host:19, for 3m1s"
		if n > 20 {
			last = fmt.Sprintf("... and %d more", n-20)
		}
		if len(got) != min(n, 21) || got[len(got)-1] != last || got[19] != "20  host:19, for 3m1s" {
			t.Errorf("of %d: %q", n, got)
		}
	}
}

func TestJSONOfQueue(t *testing.T) {
	text, err := json.Marshal(jsonHolder(store.Holder{Key: "k", Waiting: 700, Queue: []store.Queued{
		{Owner: "o1", Label: "host", Waited: 1500 * time.Millisecond}, {Owner: "o2"}}}, nil))
	want := `{"key":"k","state":"free","waiting":700,"queue":[{"label":"host","owner":"o1","waited":1.5},{"owner":"o2","waited":0}]}`
	if err != nil || string(text) != want {
		t.Errorf("%s, %v; want %s", text, err, want)
	}
}

// parked is the owner of a claim with that birth, in us, as Redis has it.
func parked(birth int64, label string) string {
	return fmt.Sprintf("h1.%016d.00000000000000aa.%032x.%s", birth, birth, label)
}

// The queue of a key is shown in its order, whoever else has written to it, and list tells how
// long it is.
func TestStatusOfQueue(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			t.Parallel()
			servers := servertest.RedisN(t, n, aged)
			flags := serverFlags(servers)
			on := func(want int, args ...string) string {
				t.Helper()
				code, out, errs := verb(t, slices.Insert(args, 1, flags...)...)
				if code != want || errs != "" {
					t.Errorf("%v: %d, %s%s", args, code, out, errs)
				}
				return out
			}
			do := func(s *servertest.RedisServer, args ...string) {
				t.Helper()
				if _, err := s.Do(args...); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now().UnixMicro()
			for i := range int64(57) {
				birth := began - (100-i)*1e6
				do(servers[i%int64(n)], "ZADD", "{k}:queue", fmt.Sprint(birth), parked(birth, fmt.Sprint("host%3A", i+1)))
			}
			do(servers[0], "ZADD", "{k}:queue", "1", "somebody's", "inf", "data")

			out := on(exitFree, "status", "k") // nobody holds it yet
			lines := waiters(out)
			place := regexp.MustCompile(`^(\d+)  host:(\d+), for 1m\d+s$`)
			for i, l := range lines[:min(len(lines), 20)] {
				if m := place.FindStringSubmatch(l); m == nil || m[1] != m[2] || m[1] != fmt.Sprint(i+1) {
					t.Errorf("place %d: %q", i+1, l)
				}
			}
			if len(lines) != 21 || lines[20] != "... and 37 more" || !strings.Contains(out, "state   free\n") {
				t.Errorf("status of a free key: %s", out)
			}
			if out := on(0, "list"); out != "" {
				t.Errorf("list of nothing that is held: %s", out)
			}

			holder := parked(began-200e6, "holder")
			for _, s := range servers {
				do(s, "SET", "k", holder, "PX", "600000")
			}
			do(servers[0], "ZADD", "{k}:queue", fmt.Sprint(began-200e6), holder) // left there by its last round
			if out = on(0, "status", "k"); len(waiters(out)) != 21 || waiters(out)[20] != "... and 37 more" || !strings.Contains(out, "holder  holder\n") {
				t.Errorf("status: %s", out)
			}
			var j holderJSON
			out = on(0, "status", "--json", "k")
			if err := json.Unmarshal([]byte(out), &j); err != nil || j.Label != "holder" || j.Waiting != 57 || len(j.Queue) != 57 {
				t.Fatalf("status --json: %v, %s", err, out)
			}
			for i, q := range j.Queue {
				if q.Label != fmt.Sprint("host:", i+1) || !strings.HasPrefix(q.Owner, "h1.") || q.Waited < float64(100-i) || q.Waited > 1000 {
					t.Errorf("place %d: %+v", i+1, q)
				}
			}
			longest := 57/n + 3 // with the others' members and the holder's: list looks at no member
			if out = on(0, "list"); !strings.Contains(out, fmt.Sprint("  ", longest, " waiting\n")) {
				t.Errorf("list: %s", out)
			}
			j = holderJSON{}
			if out = on(0, "list", "--json"); json.Unmarshal([]byte(out), &j) != nil || j.Waiting != longest || j.Queue != nil {
				t.Errorf("list --json: %s", out)
			}
			for _, s := range servers { // a queue that is none hides nothing else
				do(s, "SET", "{k}:queue", "data")
			}
			if out = on(0, "status", "k"); len(waiters(out)) != 0 || !strings.Contains(out, "holder  holder\n") {
				t.Errorf("status beside another kind of queue: %s", out)
			}
			if out = on(0, "list"); !strings.HasSuffix(out, "-\n") {
				t.Errorf("list beside another kind of queue: %s", out)
			}
		})
	}
}

// Processes that wait are shown in the order in which they came, until it is their turn.
func TestStatusOfWaiters(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 3} {
		t.Run(fmt.Sprint(n, " nodes"), func(t *testing.T) {
			t.Parallel()
			servers := servertest.RedisN(t, n, aged)
			flags := serverFlags(servers)
			dir := t.TempDir()
			defer os.WriteFile(filepath.Join(dir, "stop-all"), nil, 0o600)
			run := func(label string) *process {
				args := slices.Concat([]string{"run", "--ttl", "20s", "--wait", "5m", "--label", label}, flags,
					[]string{"k", "--", "sh", "-c", "while [ ! -e stop-all ] && [ ! -e stop-" + label + " ]; do sleep 0.05; done"})
				return launch(t, dir, args...)
			}
			var last string
			shows := func(holder string, labels ...string) func() bool {
				return func() bool {
					var out string
					_, out, _ = verb(t, slices.Concat([]string{"status"}, flags, []string{"k"})...)
					last = out
					lines := waiters(out)
					for i, l := range labels {
						if i >= len(lines) || !strings.HasPrefix(lines[i], fmt.Sprintf("%d  %s, for ", i+1, l)) {
							return false
						}
					}
					return len(lines) == len(labels) && strings.Contains(out, "holder  "+holder+"\n")
				}
			}
			defer func() {
				if t.Failed() {
					t.Logf("the last status:\n%s", last)
				}
			}()
			first := run("first")
			eventually(t, "somebody holds the key", shows("first"))
			queue := []string{"second", "third", "fourth"}
			for i, label := range queue {
				run(label)
				eventually(t, label+" is the last of the queue", shows("first", queue[:i+1]...))
			}
			if code, out, errs := verb(t, slices.Concat([]string{"list"}, flags)...); code != 0 || !strings.Contains(out, " 3 waiting\n") {
				t.Errorf("list: %d, %s%s", code, out, errs)
			}
			os.WriteFile(filepath.Join(dir, "stop-first"), nil, 0o600)
			if code := first.code(); code != 0 {
				t.Errorf("the first ends with %d: %s", code, first.err.String())
			}
			eventually(t, "the second holds the key, and two wait", shows("second", queue[1:]...))
		})
	}
}
