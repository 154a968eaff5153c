package servertest

import (
	_ "embed"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"
)

//go:embed shim/clock.c
var shimSource []byte

// Clock is the wall clock of one server: the machine's and an offset. It stays with the
// server over restarts. Safe for concurrent use.
type Clock struct {
	t    testing.TB
	f    *os.File
	mu   sync.Mutex
	last time.Duration
}

func newClock(t testing.TB, path string) *Clock {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	c := &Clock{t: t, f: f}
	c.Set(0)
	return c
}

// Set makes the clock differ from the machine's by offset, from now on. The server's TIME
// follows at once; what it reads from its cached time, such as the uptime, within 100 ms.
func (c *Clock) Set(offset time.Duration) {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	// One aligned write of 8 bytes: the server never sees half of it.
	if _, err := c.f.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(offset)), 0); err != nil {
		c.t.Fatal(err)
	}
	c.last = offset
}

// Offset is what was set last.
func (c *Clock) Offset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

// env is what a child process needs to run by this clock.
func (c *Clock) env(shim string) []string {
	return []string{"LD_PRELOAD=" + shim, "HOLDFAST_CLOCK=" + c.f.Name()}
}

// shim is the compiled library: once in the life of a test process. No file stays behind:
// it is loaded through the descriptor that is held here.
var shim struct {
	once sync.Once
	file *os.File
	err  error
}

// clockShim returns the path of the compiled library. Needs Linux and a C compiler.
func clockShim(t testing.TB) string {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the clock of a server can be set on Linux only")
	}
	cc := Need(t, "cc")
	shim.once.Do(func() { shim.file, shim.err = compileShim(cc) })
	if shim.err != nil {
		missing(t, "cc", shim.err.Error())
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), shim.file.Fd())
}

func compileShim(cc string) (*os.File, error) {
	dir, err := os.MkdirTemp("", "clockshim")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	src, lib := filepath.Join(dir, "clock.c"), filepath.Join(dir, "clock.so")
	if err := os.WriteFile(src, shimSource, 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.Command(cc, "-O2", "-shared", "-fPIC", "-o", lib, src).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("cc cannot build the clock library (Debian packages gcc, libc6-dev): %w\n%s", err, out)
	}
	return os.Open(lib)
}
