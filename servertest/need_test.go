package servertest

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// fakeTB tells how a test would have ended.
type fakeTB struct {
	testing.TB
	ended string
}

func (f *fakeTB) Helper() {}

func (f *fakeTB) Fatalf(format string, args ...any) {
	f.ended = "failed: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func (f *fakeTB) Skipf(format string, args ...any) {
	f.ended = "skipped: " + fmt.Sprintf(format, args...)
	runtime.Goexit()
}

func TestNeed(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, tt := range []struct{ ci, require, program, want string }{
		{"", "", "redis-server", "skipped: redis-server is not installed (Debian package redis-server)"},
		{"", "cc", "redis-server", "skipped: "},
		{"", "cc, redis", "redis-server", "failed: redis-server is not installed (Debian package redis-server)"},
		{"true", "", "redis-server", "failed: "},
		{"", "all", "cc", "failed: cc is not installed (Debian package gcc)"},
		{"", "", "cc", "skipped: "},
		{"", "zk", "zk", "failed: zk is not installed (Debian package zk)"},
	} {
		t.Setenv("CI", tt.ci)
		t.Setenv("HOLDFAST_REQUIRE", tt.require)
		f := &fakeTB{}
		done := make(chan struct{})
		go func() {
			defer close(done)
			Need(f, tt.program)
			f.ended = "went on"
		}()
		<-done
		if !strings.HasPrefix(f.ended, tt.want) {
			t.Errorf("%+v: %s", tt, f.ended)
		}
	}
}

func TestFindsWhatIsNotInThePath(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", filepath.Join(dir, "none"))
	places["prog"] = []string{filepath.Join(dir, "none"), filepath.Join(dir, "*", "bin")}
	t.Cleanup(func() { delete(places, "prog") })
	if path, err := find("prog"); err == nil {
		t.Errorf("found at %s", path)
	}
	var want string
	for _, version := range []string{"14", "15"} {
		want = filepath.Join(dir, version, "bin", "prog")
		if err := os.MkdirAll(filepath.Dir(want), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(want, nil, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if path, err := find("prog"); err != nil || path != want {
		t.Errorf("found %s, %v; want %s", path, err, want)
	}
}
