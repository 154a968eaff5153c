package servertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// programs says under which name HOLDFAST_REQUIRE asks for a program, and which Debian
// package has it.
var programs = map[string]struct{ name, pkg string }{
	"redis-server": {"redis", "redis-server"},
	"cc":           {"cc", "gcc"},
	"java":         {"zookeeper", "zookeeper"},
	"postgres":     {"postgres", "postgresql"},
	"mariadbd":     {"mariadb", "mariadb-server"},
	"pgbouncer":    {"pgbouncer", "pgbouncer"},
}

// places are where packages put programs that they keep out of the path of most users.
var places = map[string][]string{
	"postgres": {"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin"},
	"mariadbd": {"/usr/sbin", "/usr/libexec"},
	// Debian keeps it there, out of the path of all but root.
	"pgbouncer": {"/usr/sbin"},
}

// find is [exec.LookPath] that knows [places], of which it takes the last that has the program.
func find(program string) (string, error) {
	path, err := exec.LookPath(program)
	for _, place := range places[program] {
		if err == nil {
			break
		}
		found, _ := filepath.Glob(filepath.Join(place, program))
		if len(found) > 0 {
			path, err = found[len(found)-1], nil
		}
	}
	return path, err
}

// Need returns the path of a program. Where it is not installed, the test fails if the
// environment has CI=true or names the program in HOLDFAST_REQUIRE (a list with commas, such
// as "redis,postgres"), and is skipped otherwise.
func Need(t testing.TB, program string) string {
	t.Helper()
	path, err := find(program)
	if err == nil {
		return path
	}
	p, ok := programs[program]
	if !ok {
		p.name, p.pkg = program, program
	}
	missing(t, p.name, program+" is not installed (Debian package "+p.pkg+")")
	return ""
}

// missing ends the test: in failure where the thing is required.
func missing(t testing.TB, name, msg string) {
	t.Helper()
	if required(name) {
		t.Fatalf("%s, and CI or HOLDFAST_REQUIRE asks for it", msg)
	}
	t.Skipf("%s; HOLDFAST_REQUIRE=%s makes this a failure", msg, name)
}

func required(name string) bool {
	if os.Getenv("CI") == "true" {
		return true
	}
	for s := range strings.SplitSeq(os.Getenv("HOLDFAST_REQUIRE"), ",") {
		if s = strings.TrimSpace(s); s == name || s == "all" {
			return true
		}
	}
	return false
}
