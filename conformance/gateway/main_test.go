// Package gateway_test shows on the real command that a service behind holdfast gateway gets no
// request of an older holder after one of a newer one: the service itself keeps the order and
// finds what breaks it. Gateways are ended by SIGKILL in the midst of their work.
package gateway_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// command is the program, built from the working tree.
var command string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "holdfast-gateway")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := run(m, dir)
	os.RemoveAll(dir)
	os.Exit(code)
}

func run(m *testing.M, dir string) int {
	command = filepath.Join(dir, "holdfast")
	if runtime.GOOS == "windows" {
		command += ".exe"
	}
	build := exec.Command("go", "build", "-o", command, ".")
	build.Dir = filepath.FromSlash("../../cmd/holdfast")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "the command cannot be built: %v\n%s", err, out)
		return 1
	}
	if code := m.Run(); code != 0 {
		return code
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// gateway is a gateway process.
type gateway struct {
	*servertest.Process
	t    *testing.T
	addr string // http://HOST:PORT
}

// patience bounds what never takes long on a machine that works.
const patience = time.Minute

// start starts a gateway before the service and waits until it serves.
func start(t *testing.T, service, marks string, flags ...string) *gateway {
	t.Helper()
	args := []string{"gateway", "--listen", "127.0.0.1:0", "--upstream", service, "--marks", marks, "--resource", "path", "--json"}
	g := &gateway{Process: servertest.Start(t, exec.Command(command, append(args, flags...)...)), t: t}
	g.await("listening", func(e event) bool {
		g.addr = e.Address
		return true
	})
	return g
}

// event is a line of --json.
type event struct{ Event, Address, Admin, Error string }

// await waits until the gateway says something.
func (g *gateway) await(name string, is func(event) bool) {
	g.t.Helper()
	for limit := time.Now().Add(patience); time.Now().Before(limit); time.Sleep(5 * time.Millisecond) {
		for line := range strings.Lines(g.Log()) {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Event == name && is(e) {
				return
			}
		}
		select {
		case <-g.Done():
			g.t.Fatalf("the gateway ended before it said %q:\n%s", name, g.Log())
		default:
		}
	}
	g.t.Fatalf("the gateway did not say %q:\n%s", name, g.Log())
}

func newClient(t *testing.T) *http.Client {
	tr := &http.Transport{MaxIdleConnsPerHost: 1024}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// put sends a write, and returns the status and, where the gateway refused it, its refusal.
func put(ctx context.Context, c *http.Client, url string, tok fence.Token) (int, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPut, url, nil)
	if err != nil {
		return 0, err
	}
	r.Header.Set(httpfence.Header, tok.String())
	resp, err := c.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	err = httpfence.ReadError(resp)
	if _, e := io.Copy(io.Discard, resp.Body); err == nil {
		err = e
	}
	return resp.StatusCode, err
}

// served makes a service that ends with the test.
func served(t *testing.T, h http.Handler) *httptest.Server {
	s := httptest.NewServer(h)
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}
