package servertest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Process is a child process of the test. Its methods are safe for concurrent use.
type Process struct {
	t    testing.TB
	cmd  *exec.Cmd
	log  *tail
	done chan struct{}
}

// Start starts cmd as a child process that is killed when the test ends. Output that cmd
// sends nowhere goes to [Process.Log].
func Start(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	p, err := start(t, cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

func start(t testing.TB, cmd *exec.Cmd) (*Process, error) {
	p := &Process{t: t, cmd: cmd, log: &tail{}, done: make(chan struct{})}
	if cmd.Stdout == nil {
		cmd.Stdout = p.log
	}
	if cmd.Stderr == nil {
		cmd.Stderr = p.log
	}
	cmd.WaitDelay = time.Second // a grandchild may hold the pipe open
	dieWithParent(cmd)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("servertest: %w", err)
	}
	go func() {
		_ = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// PID is the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Log is the last of what the process wrote.
func (p *Process) Log() string { return p.log.String() }

// Kill ends the process at once, also a stopped one, and waits for its end.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

// Stop pauses the process by SIGSTOP and returns when it stands still.
func (p *Process) Stop() {
	p.t.Helper()
	if err := Pause(p.PID()); err != nil {
		p.t.Fatal(err)
	}
}

// Cont lets the process run on after Stop.
func (p *Process) Cont() {
	p.t.Helper()
	if err := Resume(p.PID()); err != nil {
		p.t.Fatal(err)
	}
}

func (p *Process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// ErrNoPause says that processes cannot be paused on this system.
var ErrNoPause = errors.New("servertest: processes cannot be paused on this system")

// Pause stops a process by SIGSTOP and returns when all its threads stand still.
func Pause(pid int) error {
	if err := sendStop(pid); err != nil {
		return err
	}
	for range 2000 {
		stopped, err := isStopped(pid)
		if err != nil {
			return fmt.Errorf("servertest: pause process %d: %w", pid, err)
		}
		if stopped {
			return nil
		}
		time.Sleep(time.Millisecond)
	}
	return fmt.Errorf("servertest: process %d did not stop", pid)
}

// Resume lets a process run on after [Pause].
func Resume(pid int) error { return sendCont(pid) }

// tail keeps the end of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailSize = 64 << 10

func (l *tail) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buf = append(l.buf, b...)
	if n := len(l.buf) - tailSize; n > tailSize {
		l.buf = bytes.Clone(l.buf[n:])
	}
	return len(b), nil
}

func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.buf[max(0, len(l.buf)-tailSize):])
}

// The ports lie below those that the system gives to outgoing connections (Linux: from
// 32768). Otherwise a client that dials a server which is down could take the server's port
// for its own end, or even connect to itself.
const minPort, maxPort = 11000, 32000

// listenFree listens on a free loopback port.
func listenFree() (net.Listener, error) {
	for range 200 {
		port := minPort + rand.IntN(maxPort-minPort)
		if l, err := net.Listen("tcp", loopback(port)); err == nil {
			return l, nil
		}
	}
	return nil, errors.New("servertest: no free port")
}

// freePort answers a port that was free a moment ago.
func freePort() (int, error) {
	l, err := listenFree()
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func loopback(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }

// eventually polls f until it answers nil, for at most d, and returns its last error.
func eventually(d time.Duration, f func() error) error {
	for end := time.Now().Add(d); ; time.Sleep(5 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// InfoField finds the value of a "name:value" line, the form of INFO and CLUSTER INFO.
func InfoField(info, name string) string {
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}
