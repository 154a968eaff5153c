package kit

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
)

const (
	childEnv = "HOLDFAST_TEST_CHILD"
	argEnv   = "HOLDFAST_TEST_ARGS"
)

// Process is a child process that runs one of the functions given to [Main].
type Process struct {
	*servertest.Process
	lines chan string
}

// Child starts the test binary anew to run one function. It ends with the test.
func Child(t testing.TB, name string, args ...string) *Process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe()
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+name, argEnv+"="+strings.Join(args, "\x1f"))
	cmd.Stdout = w
	p := &Process{servertest.Start(t, cmd), make(chan string, 1024)}
	go func() {
		<-p.Done()
		w.Close()
	}()
	go func() {
		defer close(p.lines)
		for s := bufio.NewScanner(r); s.Scan(); {
			p.lines <- s.Text()
		}
	}()
	return p
}

// Args are those that a child was started with.
func Args() []string { return strings.Split(os.Getenv(argEnv), "\x1f") }

// Say tells the parent something, from a child: one line, which begins with word.
func Say(word string, values ...any) {
	fmt.Println(word, strings.TrimSpace(fmt.Sprintln(values...)))
}

// Expect reads what a child says until a line begins with word, and answers the rest of it.
func (p *Process) Expect(t testing.TB, word string, limit time.Duration) string {
	t.Helper()
	timeout := time.After(limit)
	for {
		select {
		case line, open := <-p.lines:
			if !open {
				t.Fatalf("the child ended before it said %q:\n%s", word, p.Log())
			}
			if rest, ok := strings.CutPrefix(line, word+" "); ok {
				return rest
			}
		case <-timeout:
			t.Fatalf("the child did not say %q within %v:\n%s", word, limit, p.Log())
		}
	}
}

// Lines are what a child says, for a parent that wants all of it. They end with the child.
func (p *Process) Lines() <-chan string { return p.lines }
