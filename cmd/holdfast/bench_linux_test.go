package main

import (
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// On a terminal there is a bar for each phase.
func TestBenchBars(t *testing.T) {
	dir := t.TempDir()
	p, keyboard, screen := terminal(t, dir, "bench", "--max-ops", "100", "--parallel", "2", "--clients", "2", "--store", "sqlite:"+filepath.Join(dir, "locks.db"))
	if err := unix.IoctlSetWinsize(int(keyboard.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 100}); err != nil {
		t.Fatal(err)
	}
	if code := p.code(); code != 0 {
		t.Fatalf("exit code %d:\n%s", code, screen.String())
	}
	eventually(t, "the table on the screen", func() bool { return strings.Contains(screen.String(), "note: not seen from here") })
	text := screen.String()
	for _, want := range []string{"one at a time", "extend", "in parallel", "hand-over", "p50", "[=", "by 2 in parallel"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q on the screen:\n%s", want, text)
		}
	}
}
