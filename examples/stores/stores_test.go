package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

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
	} {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), programVariable+"=1", "HOLDFAST_STORE="+c.url)
		out, _ := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != c.code || !strings.Contains(string(out), c.text) || strings.Contains(string(out), "hunter2") {
			t.Errorf("%q: %v, %s", c.url, cmd.ProcessState, out)
		}
	}
}
