package servertest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// programs says under which name HOLDFAST_REQUIRE asks for a program, and which Debian
// package has it.
var programs = map[string]struct{ name, pkg string }{
	"redis-server": {"redis", "redis-server"},
	"cc":           {"cc", "gcc"},
}

// Need returns the path of a program. Where it is not installed, the test fails if the
// environment has CI=true or names the program in HOLDFAST_REQUIRE (a list with commas, such
// as "redis,cc"), and is skipped otherwise.
func Need(t testing.TB, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
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
