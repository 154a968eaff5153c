package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// gatewayProcess is a gateway that runs in a test.
type gatewayProcess struct {
	*process
	address, admin string
	client         *http.Client
}

// launchGateway starts a gateway before upstream, with marks in dir, and waits until it serves.
func launchGateway(t *testing.T, dir, upstream string, flags ...string) *gatewayProcess {
	t.Helper()
	args := []string{"gateway", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--upstream", upstream, "--marks", "marks", "--resource", "/{id}", "--json"}
	g := &gatewayProcess{process: launch(t, dir, append(args, flags...)...), client: &http.Client{Timeout: time.Minute}}
	eventually(t, "the gateway serves", func() bool {
		for _, r := range complete(t, g.err.String()) {
			if r["event"] == "listening" {
				g.address, g.admin = r["address"].(string), r["admin"].(string)
			}
			if r["event"] == "failed" {
				t.Fatal(r)
			}
		}
		return g.address != ""
	})
	t.Cleanup(g.client.CloseIdleConnections)
	return g
}

// complete are the records of the lines that are whole.
func complete(t *testing.T, text string) []map[string]any {
	return records(t, text[:strings.LastIndexByte(text, '\n')+1])
}

func (g *gatewayProcess) kill() {
	g.t.Helper()
	if err := g.Process.Kill(); err != nil {
		g.t.Fatal(err)
	}
	g.Wait()
}

// ask sends a request and answers its status and what the gateway says, if that is what answers.
// An empty token is none.
func (g *gatewayProcess) ask(method, path, token string) (int, error) {
	g.t.Helper()
	r, err := http.NewRequest(method, g.address+path, nil)
	if err != nil {
		g.t.Fatal(err)
	}
	if token != "" {
		r.Header.Set(httpfence.Header, token)
	}
	resp, err := g.client.Do(r)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	err = httpfence.ReadError(resp)
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

func (g *gatewayProcess) want(method, path, token string, status int, kind error) {
	g.t.Helper()
	got, err := g.ask(method, path, token)
	wantErr(g.t, fmt.Sprintf("%s %s with token %q", method, path, token), err, kind)
	if got != status {
		g.t.Errorf("%s %s with token %q: status %d, want %d", method, path, token, got, status)
	}
}

// look asks the admin address.
func (g *gatewayProcess) look(path string) (int, string) {
	g.t.Helper()
	resp, err := g.client.Get(g.admin + path)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// metric is the value of a line of /metrics.
func (g *gatewayProcess) metric(name string) string {
	g.t.Helper()
	_, text := g.look("/metrics")
	m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(name) + ` (.*)$`).FindStringSubmatch(text)
	if m == nil {
		g.t.Fatalf("no metric %s in\n%s", name, text)
	}
	return m[1]
}

func TestGateway(t *testing.T) {
	var got atomic.Int64
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got.Add(1)
		if r.URL.Path == "/precondition" {
			w.WriteHeader(http.StatusPreconditionFailed)
		}
	}))
	defer service.Close()
	dir := t.TempDir()
	g := launchGateway(t, dir, service.URL, "--refuse-unknown", "0", "--settle", "0", "--access-log")
	g.want("PUT", "/a/x", "5", 200, nil)
	g.want("PUT", "/a/y", "5", 200, nil)
	g.want("PUT", "/b", "1", 200, nil)
	g.want("PUT", "/a", "6", 200, nil)
	g.want("PUT", "/a", "5", 412, fence.ErrStale)
	g.want("DELETE", "/a", "", 428, httpfence.ErrMissing)
	g.want("PUT", "/a", "07", 400, fence.ErrInvalid)
	g.want("PUT", "/", "7", 400, fence.ErrInvalid)
	g.want("GET", "/a", "", 200, nil)
	g.want("GET", "/a", "5", 412, fence.ErrStale)
	g.want("PUT", "/precondition", "1", 412, nil) // the service's own
	if n := got.Load(); n != 6 {
		t.Errorf("the service got %d requests", n)
	}
	for name, want := range map[string]string{
		`holdfast_gateway_requests_total{outcome="passed"}`:         "6",
		`holdfast_gateway_requests_total{outcome="stale"}`:          "2",
		`holdfast_gateway_requests_total{outcome="missing"}`:        "1",
		`holdfast_gateway_requests_total{outcome="invalid"}`:        "2",
		`holdfast_gateway_requests_total{outcome="busy"}`:           "0",
		`holdfast_gateway_requests_total{outcome="unavailable"}`:    "0",
		`holdfast_gateway_requests_total{outcome="upstream_error"}`: "0",
		`holdfast_gateway_in_flight`:                                "0",
		`holdfast_gateway_waiting`:                                  "0",
		`holdfast_gateway_resources`:                                "3",
		`holdfast_gateway_claims_total`:                             "4",
		`holdfast_gateway_wait_seconds_count`:                       "6",
	} {
		if got := g.metric(name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if g.metric("holdfast_gateway_marks_commit_seconds_count") == "0" {
		t.Error("no commit is counted")
	}
	lines := 0
	for _, r := range complete(t, g.err.String()) {
		if r["event"] != "request" {
			continue
		}
		if lines++; r["path"] == "/a/x" && (r["resource"] != "/a" || r["token"] != 5.0 || r["status"] != 200.0 || r["outcome"] != "passed" || r["method"] != "PUT") {
			t.Errorf("access log: %v", r)
		}
	}
	if lines != 11 {
		t.Errorf("%d lines in the access log", lines)
	}

	// Marks outlive SIGKILL; the file is complete, so that unknown resources pass.
	g.kill()
	g = launchGateway(t, dir, service.URL, "--refuse-unknown", "1h", "--settle", "0")
	g.want("PUT", "/a", "5", 412, fence.ErrStale)
	g.want("PUT", "/a", "6", 200, nil)
	g.want("PUT", "/a", "7", 200, nil)
	g.want("PUT", "/new", "1", 200, nil)
	if got := g.metric("holdfast_gateway_resources"); got != "4" {
		t.Errorf("%s resources are known", got)
	}

	// Nobody else may use the marks.
	second := launch(t, dir, "fence", "claim", "--wait", "100ms", "--marks", "file:marks", "a", "9")
	if code := second.code(); code != exitFailed || !strings.Contains(second.err.String(), "has the marks file marks open") {
		t.Errorf("a second user: %d, %s", code, &second.err)
	}
}

// What broke off is counted and logged too, and says nothing good of the service.
func TestGatewayCountsWhatBreaksOff(t *testing.T) {
	arrived := make(chan struct{}, 1)
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/breaks":
			io.WriteString(w, "a part")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case "/hangs":
			arrived <- struct{}{}
			<-r.Context().Done()
		}
	}))
	defer service.Close()
	g := launchGateway(t, t.TempDir(), service.URL, "--refuse-unknown", "0", "--settle", "0", "--access-log")
	g.ask("PUT", "/breaks", "5")
	eventually(t, "the answer that broke off to be counted", func() bool {
		return g.metric(`holdfast_gateway_requests_total{outcome="upstream_error"}`) == "1"
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-arrived
		cancel()
	}()
	r, err := http.NewRequestWithContext(ctx, "GET", g.address+"/hangs", nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := g.client.Do(r); err == nil {
		resp.Body.Close()
		t.Error("an answer came")
	}
	eventually(t, "the client that went away to be counted", func() bool {
		return g.metric(`holdfast_gateway_requests_total{outcome="abandoned"}`) == "1"
	})
	if _, text := g.look("/healthz"); !strings.Contains(text, "EOF") {
		t.Errorf("healthz: %s", text)
	}
	lines := map[any]any{}
	eventually(t, "both to be logged", func() bool {
		for _, r := range complete(t, g.err.String()) {
			if r["event"] == "upstream-answers" {
				t.Fatalf("the service has not answered: %v", r)
			}
			if r["event"] == "request" {
				lines[r["path"]] = r["outcome"]
			}
		}
		return len(lines) == 2
	})
	if lines["/breaks"] != failed || lines["/hangs"] != abandoned {
		t.Errorf("access log: %v", lines)
	}
}

// Where marks may be lost, what is unknown is refused until the time is over, also across a
// restart in its midst.
func TestGatewayRefusesUnknown(t *testing.T) {
	service := httptest.NewServer(http.NotFoundHandler())
	defer service.Close()
	dir := t.TempDir()
	start := func(period string) *gatewayProcess {
		t.Helper()
		return launchGateway(t, dir, service.URL, "--refuse-unknown", period, "--settle", "0")
	}
	g := start("1h")
	g.want("PUT", "/a", "5", 503, fence.ErrUnavailable)
	if first := complete(t, g.err.String())[0]; first["refuse_unknown"] != 3600.0 || !strings.Contains(first["reason"].(string), "is new") {
		t.Errorf("says %v", first)
	}
	g.kill()
	g = start("1h")
	g.want("PUT", "/a", "5", 503, fence.ErrUnavailable)
	if first := complete(t, g.err.String())[0]; first["refuse_unknown"] != 3600.0 || !strings.Contains(first["reason"].(string), "for as long yet") {
		t.Errorf("says %v", first)
	}
	if got := g.metric(`holdfast_gateway_requests_total{outcome="unavailable"}`); got != "1" {
		t.Errorf("%s requests are counted", got)
	}
	g.kill()
	g = start("300ms")
	eventually(t, "the time is over", func() bool { return strings.Contains(g.err.String(), `"event":"complete"`) })
	g.want("PUT", "/a", "5", 404, nil)
	g.kill()
	g = start("1h")
	g.want("PUT", "/b", "5", 404, nil)
	if first := complete(t, g.err.String())[0]; first["refuse_unknown"] != 0.0 || first["resources"] != 1.0 {
		t.Errorf("says %v", first)
	}
}

func TestGatewayText(t *testing.T) {
	dir := t.TempDir()
	run := func(period string, words ...string) {
		t.Helper()
		p := launch(t, dir, "gateway", "--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--marks", "file:marks", "--resource", "header:X", "--refuse-unknown", period)
		for _, w := range words {
			eventually(t, w, func() bool { return strings.Contains(p.err.String(), w) })
		}
		if err := p.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if code := p.code(); code != 0 || !strings.Contains(p.err.String(), "ends when the requests at work are done") {
			t.Errorf("exit code %d, %s", code, &p.err)
		}
	}
	if runtime.GOOS == "windows" { // has no such signals
		return
	}
	run("1m", "guards http://127.0.0.1:1 by header:X; marks of 0 resources in marks", "resources without a mark are refused for 1m0s: the marks file is new, so that marks may be lost. Where this service is new, --refuse-unknown 0")
	run("300ms", "no gateway has used the marks file for as long yet", "resources without a mark are taken from now on")
	run("1m", "marks of 0 resources in marks")
}

func TestGatewayHealth(t *testing.T) {
	var broken atomic.Bool
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if broken.Load() {
			panic(http.ErrAbortHandler)
		}
	}))
	defer service.Close()
	dir := t.TempDir()
	g := launchGateway(t, dir, service.URL, "--refuse-unknown", "0", "--settle", "0")
	health := func(status int, marks, upstream string) {
		t.Helper()
		got, text := g.look("/healthz")
		var j healthJSON
		if err := json.Unmarshal([]byte(text), &j); err != nil || got != status || j.OK != (status == 200) || !strings.Contains(j.Marks, marks) || !strings.Contains(j.Upstream, upstream) {
			t.Errorf("health %d %s, %v; want %d, %q, %q", got, text, err, status, marks, upstream)
		}
	}
	health(200, "ok", "not asked yet")
	g.want("PUT", "/a", "5", 200, nil)
	health(200, "ok", "answers")
	broken.Store(true)
	g.want("PUT", "/a", "5", 502, fence.ErrUncertain)
	health(200, "ok", "EOF") // the service is none of the gateway's health
	if got := g.metric(`holdfast_gateway_requests_total{outcome="upstream_error"}`); got != "1" {
		t.Errorf("%s requests are counted", got)
	}
	broken.Store(false)
	g.want("PUT", "/a", "5", 200, nil)
	health(200, "ok", "answers")
	if told := events(complete(t, g.err.String())); fmt.Sprint(told) != "[listening upstream-fails upstream-answers]" {
		t.Errorf("told %v", told)
	}
	if status, _ := g.look("/"); status != 404 {
		t.Errorf("status %d for /", status)
	}
	if runtime.GOOS == "windows" { // an open file stays
		return
	}
	if err := os.Remove(filepath.Join(dir, "marks")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the health says that the marks are gone", func() bool {
		status, text := g.look("/healthz")
		return status == 503 && strings.Contains(text, "the marks file is gone")
	})
}

// SIGTERM lets requests finish; what does not finish is cut off and told; a second signal waits
// for nothing.
func TestGatewayStops(t *testing.T) {
	if runtime.GOOS == "windows" { // has no such signals
		return
	}
	working := make(chan struct{}, 1)
	release := make(chan struct{})
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		working <- struct{}{}
		<-release
		fmt.Fprint(w, "done")
	}))
	defer service.Close()
	// begin starts a gateway with a request at work, and signals it.
	begin := func(drain string) (*gatewayProcess, <-chan string) {
		t.Helper()
		g := launchGateway(t, t.TempDir(), service.URL, "--refuse-unknown", "0", "--drain", drain)
		answer := make(chan string, 1)
		go func() {
			r, _ := http.NewRequest("PUT", g.address+"/a", nil)
			r.Header.Set(httpfence.Header, "5")
			resp, err := g.client.Do(r)
			if err != nil {
				answer <- err.Error()
				return
			}
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			answer <- string(text)
		}()
		<-working
		if err := g.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		eventually(t, "it stops", func() bool { return strings.Contains(g.err.String(), `"event":"stopping"`) })
		return g, answer
	}
	g, answer := begin("1m")
	eventually(t, "no new connection is taken", func() bool {
		c, err := net.Dial("tcp", strings.TrimPrefix(g.address, "http://"))
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	if status, text := g.look("/healthz"); status != 503 || !strings.Contains(text, `"stopping":true`) {
		t.Errorf("health %d %s", status, text)
	}
	close(release)
	if text := <-answer; text != "done" {
		t.Errorf("the request at work got %q", text)
	}
	if code := g.code(); code != 0 {
		t.Errorf("exit code %d: %s", code, &g.err)
	}

	release = make(chan struct{})
	defer close(release)
	g, _ = begin("200ms")
	if code := g.code(); code != exitFailed || !strings.Contains(g.err.String(), "were cut off; whether the service has obeyed them is not known") {
		t.Errorf("exit code %d: %s", code, &g.err)
	}
	g, _ = begin("1m")
	if err := g.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if code := g.code(); code != exitSignal+2 {
		t.Errorf("exit code %d: %s", code, &g.err)
	}
}

func TestGatewayTLS(t *testing.T) {
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Header.Get("X-Forwarded-Proto"))
	}))
	defer service.Close()
	certs := servertest.TLS(t)
	cert, key := certs.Server()
	g := launchGateway(t, t.TempDir(), service.URL, "--refuse-unknown", "0", "--tls-cert", cert, "--tls-key", key)
	if !strings.HasPrefix(g.address, "https://") {
		t.Errorf("serves %s", g.address)
	}
	g.client.Transport = &http.Transport{TLSClientConfig: certs.Config(t), ForceAttemptHTTP2: true}
	r, _ := http.NewRequest("PUT", g.address+"/a", nil)
	r.Header.Set(httpfence.Header, "5")
	resp, err := g.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || resp.StatusCode != 200 || resp.ProtoMajor != 2 || string(text) != "https" {
		t.Errorf("%s %s %q, %v", resp.Proto, resp.Status, text, err)
	}
	g.client.CloseIdleConnections()
}
