package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// slow is a service whose requests end when the test says so. It tells the order of their
// beginnings and ends.
type slow struct {
	mu    sync.Mutex
	order []string
	hold  map[string]chan struct{} // by token; others end at once
	begun chan string
}

func newSlow(tokens ...string) *slow {
	s := &slow{hold: map[string]chan struct{}{}, begun: make(chan string, 100)}
	for _, t := range tokens {
		s.hold[t] = make(chan struct{})
	}
	return s
}

func (s *slow) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.order = append(s.order, what)
}

func (s *slow) told() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.order, " ")
}

func (s *slow) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	tok := r.Header.Get(httpfence.Header)
	s.note("+" + tok)
	s.begun <- tok
	if hold := s.hold[tok]; hold != nil {
		<-hold
	}
	s.note("-" + tok)
}

// answer is what became of a request.
type answer struct {
	status int
	err    error
}

// send sends a request in the background.
func send(ctx context.Context, c *http.Client, url string, tok fence.Token) <-chan answer {
	got := make(chan answer, 1)
	go func() {
		status, err := put(ctx, c, url, tok)
		got <- answer{status, err}
	}()
	return got
}

func (a answer) want(t *testing.T, what string, status int, kind error) {
	t.Helper()
	if a.status != status || !errors.Is(a.err, kind) || kind == nil && a.err != nil {
		t.Errorf("%s: %d, %v; want %d, %v", what, a.status, a.err, status, kind)
	}
}

// waiting waits until the gateway says that n requests wait.
func (g *gateway) waiting(c *http.Client, n int) {
	g.t.Helper()
	var admin string
	g.await("listening", func(e event) bool { admin = e.Admin; return true })
	want := fmt.Sprintf("\nholdfast_gateway_waiting %d\n", n)
	for limit := time.Now().Add(patience); time.Now().Before(limit); time.Sleep(5 * time.Millisecond) {
		resp, err := c.Get(admin + "/metrics")
		if err != nil {
			g.t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			g.t.Fatal(err)
		}
		if strings.Contains(string(text), want) {
			return
		}
	}
	g.t.Fatalf("there are never %d requests that wait", n)
}

func setup(t *testing.T, svc http.Handler, flags ...string) (*gateway, *http.Client) {
	t.Helper()
	flags = append([]string{"--refuse-unknown", "0", "--settle", "0", "--admin", "127.0.0.1:0"}, flags...)
	return start(t, served(t, svc).URL, filepath.Join(t.TempDir(), "marks"), flags...), newClient(t)
}

// A higher token waits for the requests of lower ones, which get no company meanwhile.
func TestDrain(t *testing.T) {
	svc := newSlow("5")
	g, c := setup(t, svc, "--drain", "1m")
	first := send(t.Context(), c, g.addr+"/r", 5)
	<-svc.begun
	newer := send(t.Context(), c, g.addr+"/r", 6)
	g.waiting(c, 1)
	late := send(t.Context(), c, g.addr+"/r", 5)
	g.waiting(c, 2)
	(<-send(t.Context(), c, g.addr+"/other", 4)).want(t, "another resource", 200, nil)
	<-svc.begun
	close(svc.hold["5"])
	(<-first).want(t, "the one at work", 200, nil)
	(<-newer).want(t, "the newer one", 200, nil)
	(<-late).want(t, "the late one", 412, fence.ErrStale)
	if got := svc.told(); got != "+5 +4 -4 -5 +6 -6" {
		t.Errorf("the service got %s", got)
	}
}

// Where requests of a lower token do not end in time, the newcomer is told so.
func TestDrainRunsOut(t *testing.T) {
	svc := newSlow("5")
	g, c := setup(t, svc, "--drain", "200ms")
	first := send(t.Context(), c, g.addr+"/r", 5)
	<-svc.begun
	(<-send(t.Context(), c, g.addr+"/r", 6)).want(t, "the newer one", 503, fence.ErrBusy)
	close(svc.hold["5"])
	(<-first).want(t, "the one at work", 200, nil)
	(<-send(t.Context(), c, g.addr+"/r", 6)).want(t, "the newer one again", 200, nil)
	(<-send(t.Context(), c, g.addr+"/r", 5)).want(t, "the former", 412, fence.ErrStale)
	if got := svc.told(); got != "+5 -5 +6 -6" {
		t.Errorf("the service got %s", got)
	}
}

// A service that does not answer in time leaves an uncertain outcome. It is given the time of
// --settle to end its work; without that a newer holder's request comes beside it.
func TestSlowService(t *testing.T) {
	svc := newSlow("5")
	g, c := setup(t, svc, "--upstream-timeout", "200ms", "--settle", "3s", "--drain", "1m")
	(<-send(t.Context(), c, g.addr+"/r", 5)).want(t, "the slow one", 504, fence.ErrUncertain)
	newer := send(t.Context(), c, g.addr+"/r", 6)
	g.waiting(c, 1)
	close(svc.hold["5"])
	(<-newer).want(t, "the newer one", 200, nil)
	if got := svc.told(); got != "+5 -5 +6 -6" {
		t.Errorf("the service got %s", got)
	}

	svc = newSlow("5")
	g, c = setup(t, svc, "--upstream-timeout", "200ms")
	(<-send(t.Context(), c, g.addr+"/r", 5)).want(t, "the slow one", 504, fence.ErrUncertain)
	(<-send(t.Context(), c, g.addr+"/r", 6)).want(t, "the newer one", 200, nil)
	if got := svc.told(); got != "+5 +6 -6" {
		t.Errorf("without --settle the service got %s", got)
	}
	close(svc.hold["5"])
}

// A client that goes away does not end its request, for which others wait.
func TestClientGoesAway(t *testing.T) {
	svc := newSlow("5")
	g, c := setup(t, svc, "--drain", "1m")
	ctx, leave := context.WithCancel(t.Context())
	gone := send(ctx, c, g.addr+"/r", 5)
	<-svc.begun
	leave()
	if a := <-gone; !errors.Is(a.err, context.Canceled) {
		t.Errorf("the client that left: %v", a.err)
	}
	newer := send(t.Context(), c, g.addr+"/r", 6)
	g.waiting(c, 1)
	svc.note("gone")
	close(svc.hold["5"])
	(<-newer).want(t, "the newer one", 200, nil)
	if got := svc.told(); got != "+5 gone -5 +6 -6" {
		t.Errorf("the service got %s", got)
	}
}

// A connection that is upgraded is a request until it is closed.
func TestUpgrade(t *testing.T) {
	svc := newSlow()
	g, c := setup(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "echo" {
			svc.ServeHTTP(w, r)
			return
		}
		svc.note("+up")
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_, _ = io.Copy(conn, rw)
		svc.note("-up")
	}), "--drain", "1m")
	conn, err := net.Dial("tcp", strings.TrimPrefix(g.addr, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	fmt.Fprint(conn, "GET /r HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\nFencing-Token: 5\r\n\r\n")
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp, err)
	}
	fmt.Fprint(conn, "hello\n")
	if line, err := r.ReadString('\n'); line != "hello\n" {
		t.Errorf("%q, %v", line, err)
	}
	newer := send(t.Context(), c, g.addr+"/r", 6)
	g.waiting(c, 1)
	svc.note("closing")
	conn.Close()
	(<-newer).want(t, "the newer one", 200, nil)
	if got := svc.told(); got != "+up closing -up +6 -6" {
		t.Errorf("the service got %s", got)
	}
	// One without a token is refused, since anything could come through it.
	req, _ := http.NewRequest("GET", g.addr+"/r", nil)
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "echo")
	refused, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	refused.Body.Close()
	if refused.StatusCode != http.StatusPreconditionRequired {
		t.Errorf("an upgrade without a token: %s", refused.Status)
	}
}
