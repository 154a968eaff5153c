package httpfence_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// failures takes what Gateway.Failed is told.
type failures struct {
	mu   sync.Mutex
	all  []string
	last error
}

func (f *failures) add(_ *http.Request, resource string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all, f.last = append(f.all, fmt.Sprintf("%s: %v", resource, err)), err
}

func (f *failures) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.all)
}

// bed is a gateway before a service.
type bed struct {
	t        *testing.T
	gate     *httpfence.Gate
	upstream *httptest.Server
	front    *httptest.Server
	failed   *failures
}

func newBed(t *testing.T, g httpfence.GateOptions, o httpfence.GatewayOptions, service http.HandlerFunc) *bed {
	b := &bed{t: t, gate: newGate(t, new(fence.Memory), g), failed: new(failures)}
	b.upstream = serve(t, service)
	o.Upstream, _ = url.Parse(b.upstream.URL)
	o.Gate, o.Failed = b.gate, b.failed.add
	gw, err := httpfence.NewGateway(o)
	if err != nil {
		t.Fatal(err)
	}
	b.front = serve(t, gw)
	t.Cleanup(gw.CloseIdleConnections)
	return b
}

func (b *bed) send(method, path, token string, headers ...string) answered {
	b.t.Helper()
	if token != "" {
		headers = append(headers, httpfence.Header, token)
	}
	return send(b.t, b.front.Client(), method, b.front.URL+path, "the body", headers...)
}

func (b *bed) empty() {
	b.t.Helper()
	eventually(b.t, "the gate to be empty", func() bool { s := b.gate.Stats(); return s.InFlight == 0 && s.Waiting == 0 && s.Resources == 0 })
}

func TestGatewayOptions(t *testing.T) {
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	at := func(s string) *url.URL {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	for field, o := range map[string]httpfence.GatewayOptions{
		"Upstream":                 {Gate: g},
		"Upstream scheme":          {Gate: g, Upstream: at("ftp://x")},
		"Upstream host":            {Gate: g, Upstream: at("http:///x")},
		"Upstream of path":         {Gate: g, Upstream: at("x")},
		"Upstream user":            {Gate: g, Upstream: at("http://me:hunter2@x")},
		"Upstream query":           {Gate: g, Upstream: at("http://x?a=b")},
		"Gate":                     {Upstream: at("http://x")},
		"UpstreamTimeout negative": {Gate: g, Upstream: at("http://x"), UpstreamTimeout: -1},
	} {
		want, _, _ := strings.Cut(field, " ")
		var invalid *fence.InvalidError
		if gw, err := httpfence.NewGateway(o); gw != nil || !errors.As(err, &invalid) || invalid.Field != want || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func TestGatewayPassesOn(t *testing.T) {
	var got *http.Request
	var body string
	b := newBed(t, httpfence.GateOptions{}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		got, body = r, string(text)
		w.Header().Set("Trailer", "Sum")
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("X-Hop", "1")
		w.Header().Set("X-Mine", "2")
		w.Header().Set("Link", "</style>")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusCreated)
		io.WriteString(w, "made")
		w.Header().Set("Sum", "42")
	})
	for _, name := range []string{httpfence.Header, alt} {
		hints := 0
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error {
			hints++
			return nil
		}})
		r, err := http.NewRequestWithContext(ctx, "PATCH", b.front.URL+"/a%20b?c=d%26e&f", strings.NewReader("the body"))
		if err != nil {
			t.Fatal(err)
		}
		r.Host = "public.example"
		r.Header = http.Header{name: {"5"}, "Connection": {"X-Hop, Fencing-Token, Keep-Alive"}, "X-Hop": {"1"}, "Keep-Alive": {"x"}, "X-Mine": {"1"},
			"X-Forwarded-For": {"6.6.6.6"}, "X-Forwarded-Host": {"evil"}, "Forwarded": {"for=6.6.6.6"}, "Te": {"trailers"}}
		resp, err := b.front.Client().Do(r)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != 201 || string(answer) != "made" || resp.Header.Get("X-Mine") != "2" || resp.Header.Get("X-Hop") != "" || resp.Trailer.Get("Sum") != "42" || hints != 1 {
			t.Errorf("the answer: %s %q, %v, %v, %v, %d hints", resp.Status, answer, err, resp.Header, resp.Trailer, hints)
		}
		if got.Method != "PATCH" || got.RequestURI != "/a%20b?c=d%26e&f" || body != "the body" || got.Host != b.upstream.Listener.Addr().String() {
			t.Errorf("the request: %s %s %q to %s", got.Method, got.RequestURI, body, got.Host)
		}
		h := got.Header
		for key, want := range map[string]string{httpfence.Header: "5", alt: "", "X-Mine": "1", "X-Hop": "", "Keep-Alive": "", "Forwarded": "",
			"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "public.example", "X-Forwarded-Proto": "http", "Te": "trailers"} {
			if got := strings.Join(h.Values(key), "+"); got != want {
				t.Errorf("by %s: %s is %q, want %q", name, key, got, want)
			}
		}
	}
	b.empty()
	if a := b.send("PATCH", "/a%20b", "4"); a.status != 412 || !errors.Is(a.err, fence.ErrStale) {
		t.Errorf("4 after 5: %d %s", a.status, a.body)
	}
	if a := b.send("POST", "/x", ""); a.status != 428 || !errors.Is(a.err, httpfence.ErrMissing) {
		t.Errorf("no token: %d %s", a.status, a.body)
	}
	if a := b.send("POST", "/x", "0"); a.status != 400 || !errors.Is(a.err, fence.ErrInvalid) {
		t.Errorf("token 0: %d %s", a.status, a.body)
	}
	if a := b.send("GET", "/x//y", ""); a.status != 201 || got.Header.Get(httpfence.Header) != "" {
		t.Errorf("a request that is not guarded: %d %s", a.status, a.body)
	}
	if n := b.failed.count(); n != 0 {
		t.Errorf("failures: %v", b.failed.all)
	}
}

// The service behind the gateway sees tokens in order, and never two at once.
func TestGatewayOrder(t *testing.T) {
	type state struct {
		highest fence.Token
		open    map[fence.Token]int
	}
	var mu sync.Mutex
	seen := map[string]*state{}
	served := 0
	b := newBed(t, httpfence.GateOptions{Drain: patience}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		token, err := httpfence.ParseHeader(r.Header)
		mu.Lock()
		s := seen[r.URL.Path]
		if s == nil {
			s = &state{open: map[fence.Token]int{}}
			seen[r.URL.Path] = s
		}
		s.open[token]++
		served++
		if err != nil || token < s.highest || len(s.open) > 1 {
			t.Errorf("%s: %v came after %v, and side by side are %v: %v", r.URL.Path, token, s.highest, s.open, err)
		}
		s.highest = token
		mu.Unlock()
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		mu.Lock()
		defer mu.Unlock()
		if s.open[token]--; s.open[token] == 0 {
			delete(s.open, token)
		}
	})
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	defer c.CloseIdleConnections()
	var wg sync.WaitGroup
	outcomes := map[string]int{}
	for i := range 32 {
		wg.Go(func() {
			for n := range 40 {
				ctx, cancel := t.Context(), context.CancelFunc(func() {})
				if rand.IntN(8) == 0 { // some clients go away
					ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(3000))*time.Microsecond)
				}
				a, err := trySend(ctx, c, "PUT", fmt.Sprintf("%s/r%d", b.front.URL, i%4), "x", httpfence.Header, fmt.Sprint(1+n+rand.IntN(4)))
				cancel()
				mu.Lock()
				if err != nil {
					outcomes["gone"]++
				} else {
					outcomes[fmt.Sprint(a.status)]++
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	b.empty()
	if outcomes["200"] == 0 || outcomes["412"] == 0 || outcomes["gone"] == 0 || outcomes["200"]+outcomes["412"]+outcomes["gone"] != 32*40 {
		t.Errorf("answers %v", outcomes)
	}
	if n := b.failed.count(); n != 0 {
		t.Errorf("failures: %v", b.failed.all)
	}
}

// A client that goes away neither ends its request at the service nor gives its place away.
func TestGatewayClientGone(t *testing.T) {
	arrived, finish := make(chan struct{}), make(chan struct{})
	var end error
	b := newBed(t, httpfence.GateOptions{Drain: patience}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(httpfence.Header) == "6" {
			return
		}
		arrived <- struct{}{}
		<-finish
		end = r.Context().Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, err := trySend(ctx, b.front.Client(), "PUT", b.front.URL+"/r", "x", httpfence.Header, "5")
		gone <- err
	}()
	<-arrived
	cancel()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	next := make(chan answered, 1)
	go func() { next <- b.send("PUT", "/r", "6") }()
	eventually(t, "6 to wait", func() bool { return b.gate.Stats().Waiting == 1 })
	time.Sleep(50 * time.Millisecond) // for the server to notice that the client has gone
	if s := b.gate.Stats(); s.InFlight != 1 || s.Waiting != 1 {
		t.Errorf("the client of 5 has gone, its request has not: %+v", s)
	}
	close(finish)
	if a := <-next; a.status != 200 {
		t.Errorf("6: %d %s", a.status, a.body)
	}
	if end != nil {
		t.Errorf("the request of 5 ended at the service: %v", end)
	}
	b.empty()
}

// An answer that its client does not read to the end is read by the gateway.
func TestGatewayClientGoneInTheAnswer(t *testing.T) {
	finish := make(chan struct{})
	written := make(chan error, 1)
	b := newBed(t, httpfence.GateOptions{Drain: patience}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(httpfence.Header) == "6" {
			return
		}
		chunk := make([]byte, 64<<10)
		w.Write(chunk)
		w.(http.Flusher).Flush()
		<-finish
		for range 64 {
			if _, err := w.Write(chunk); err != nil {
				written <- err
				return
			}
		}
		written <- nil
	})
	conn, err := net.Dial("tcp", b.front.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "PUT /r HTTP/1.1\r\nHost: x\r\n%s: 5\r\nContent-Length: 0\r\n\r\n", httpfence.Header)
	if _, err := io.ReadFull(conn, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	next := make(chan answered, 1)
	go func() { next <- b.send("PUT", "/r", "6") }()
	eventually(t, "6 to wait", func() bool { return b.gate.Stats().Waiting == 1 })
	close(finish)
	if err := <-written; err != nil {
		t.Errorf("the service could not write its answer: %v", err)
	}
	if a := <-next; a.status != 200 {
		t.Errorf("6: %d %s", a.status, a.body)
	}
	b.empty()
	if n := b.failed.count(); n != 0 {
		t.Errorf("failures: %v", b.failed.all)
	}
}

// Requests that are not guarded end with their client.
func TestGatewayUnguardedClientGone(t *testing.T) {
	arrived, ended := make(chan struct{}), make(chan struct{})
	b := newBed(t, httpfence.GateOptions{}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done()
		close(ended)
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-arrived
		cancel()
	}()
	if _, err := trySend(ctx, b.front.Client(), "GET", b.front.URL+"/r", ""); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	<-ended
	if n := b.failed.count(); n != 0 {
		t.Errorf("failures: %v", b.failed.all)
	}
}

// How a service can fail, and what the client is told.
func TestGatewayFailures(t *testing.T) {
	const settle = 300 * time.Millisecond
	drop := func(w http.ResponseWriter) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			conn.Close()
		}
	}
	service := func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/drop":
			drop(w)
		case "/hang":
			io.Copy(io.Discard, r.Body)
			<-r.Context().Done() // the gateway hangs up
		case "/half":
			w.Header().Set("Content-Length", "1000")
			io.WriteString(w, "some")
			w.(http.Flusher).Flush()
			drop(w)
		default:
			ok(w, r)
		}
	}
	for _, tt := range []struct {
		name, method, path string
		status             int // 0: the connection breaks
		kind               error
		held, gone         bool
	}{
		{"the connection breaks", "PUT", "/drop", 502, fence.ErrUncertain, true, false},
		{"no answer in time", "PUT", "/hang", 504, fence.ErrUncertain, true, false},
		{"half an answer", "PUT", "/half", 0, nil, true, false},
		{"a read whose connection breaks", "GET", "/drop", 502, fence.ErrUnavailable, true, false},
		{"the service is not there", "PUT", "/r", 502, fence.ErrUnavailable, false, true},
		{"the service is not there for a read", "GET", "/r", 502, fence.ErrUnavailable, true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			limit := patience
			if tt.status == 504 {
				limit = 100 * time.Millisecond
			}
			b := newBed(t, httpfence.GateOptions{Settle: settle}, httpfence.GatewayOptions{UpstreamTimeout: limit}, service)
			if tt.gone {
				b.upstream.Listener.Close()
			}
			a, err := trySend(t.Context(), b.front.Client(), tt.method, b.front.URL+tt.path, "", httpfence.Header, "5")
			answered := time.Now()
			if tt.status == 0 {
				if err == nil {
					t.Errorf("half an answer looks whole: %d %q", a.status, a.body)
				}
			} else if err != nil || a.status != tt.status || !errors.Is(a.err, tt.kind) || strings.Contains(a.body, "127.0.0.1") {
				t.Errorf("%d %s, %v, want %d, %v", a.status, a.body, err, tt.status, tt.kind)
			}
			eventually(t, "Failed to be told", func() bool { return b.failed.count() == 1 })
			if b.failed.all[0] == "" || !strings.HasPrefix(b.failed.all[0], tt.path+": ") {
				t.Errorf("Failed was told %q", b.failed.all)
			}
			sent := fence.ErrUncertain
			if !tt.held {
				sent = fence.ErrUnavailable
			}
			if !errors.Is(b.failed.last, sent) {
				t.Errorf("Failed was told %v, want %v", b.failed.last, sent)
			}
			if tt.kind == fence.ErrUnavailable && !strings.Contains(a.body, "The service behind the gateway") {
				t.Errorf("the client is not told that it is the service: %s", a.body)
			}
			if inside := b.gate.Stats().InFlight == 1; inside != tt.held && time.Since(answered) < settle/2 {
				t.Errorf("the place is kept: %v, want %v", inside, tt.held)
			}
			b.empty()
		})
	}
}

// A resource that may have been forgotten is refused with the reason and the time.
func TestGatewayTellsOfUnknownResources(t *testing.T) {
	b := newBed(t, httpfence.GateOptions{RefuseUnknown: time.Hour}, httpfence.GatewayOptions{}, ok)
	a := b.send("PUT", "/r", "5")
	if a.status != 503 || !strings.Contains(a.body, "marks may have been lost") || !strings.Contains(a.body, "refused for ") || !errors.Is(a.err, fence.ErrUnavailable) {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// A client that does not send its body whole, or too much of it, is not the service's failure.
func TestGatewayBrokenBody(t *testing.T) {
	gate := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	upstream := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }))
	at, _ := url.Parse(upstream.URL)
	gw, err := httpfence.NewGateway(httpfence.GatewayOptions{Upstream: at, Gate: gate})
	if err != nil {
		t.Fatal(err)
	}
	front := serve(t, http.MaxBytesHandler(gw, 1000))
	t.Cleanup(gw.CloseIdleConnections)
	a := send(t, front.Client(), "PUT", front.URL+"/r", strings.Repeat("x", 100000), httpfence.Header, "5")
	if a.status != 413 || !errors.Is(a.err, fence.ErrUncertain) {
		t.Errorf("too long a body: %d %s", a.status, a.body)
	}
	conn, err := net.Dial("tcp", front.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "PUT /r HTTP/1.1\r\nHost: x\r\n%s: 5\r\nContent-Length: 100\r\n\r\nhalf", httpfence.Header)
	conn.(*net.TCPConn).CloseWrite()
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 400 ") || !strings.Contains(string(answer), "urn:holdfast:uncertain") {
		t.Errorf("half a body: %q, %v", answer, err)
	}
	eventually(t, "the gate to be empty", func() bool { return gate.Stats().Resources == 0 })
}

// An upgraded connection is in flight until it ends; h2c, in which requests could hide, is not
// passed on.
func TestGatewayUpgrade(t *testing.T) {
	var upgrades []string
	b := newBed(t, httpfence.GateOptions{Drain: patience}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		upgrades = append(upgrades, r.Header.Get("Upgrade"))
		if r.Header.Get("Upgrade") == "" {
			ok(w, r)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
		rw.Flush()
		io.Copy(conn, rw)
	})
	conn, answers := upgrade(t, b.front.Listener.Addr().String(), "/r", "5")
	io.WriteString(conn, "ping\n")
	if line, err := answers.ReadString('\n'); line != "ping\n" || err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	next := make(chan answered, 1)
	go func() { next <- b.send("PUT", "/r", "6") }()
	eventually(t, "6 to wait", func() bool { return b.gate.Stats().Waiting == 1 })
	if s := b.gate.Stats(); s.InFlight != 1 {
		t.Errorf("beside an upgraded connection: %+v", s)
	}
	conn.Close()
	if a := <-next; a.status != 200 {
		t.Errorf("6: %d %s", a.status, a.body)
	}
	if a := b.send("GET", "/r", "", "Connection", "Upgrade", "Upgrade", "test"); a.status != 428 {
		t.Errorf("an upgrade without a token: %d %s", a.status, a.body)
	}
	if a := b.send("GET", "/r", "6", "Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c", "HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"); a.status != 200 {
		t.Errorf("h2c: %d %s", a.status, a.body)
	}
	if got := fmt.Sprint(upgrades); got != "[test  ]" {
		t.Errorf("the service saw upgrades %q", got)
	}
	b.empty()
}

// Answers are passed on while they come.
func TestGatewayStreams(t *testing.T) {
	next := make(chan struct{})
	b := newBed(t, httpfence.GateOptions{}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		for range 3 {
			io.WriteString(w, "event\n")
			w.(http.Flusher).Flush()
			<-next
		}
	})
	r, err := http.NewRequestWithContext(t.Context(), "POST", b.front.URL+"/r", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(httpfence.Header, "5")
	resp, err := b.front.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for range 3 {
		line := make([]byte, 6)
		if _, err := io.ReadFull(resp.Body, line); err != nil || string(line) != "event\n" {
			t.Fatalf("%q, %v", line, err)
		}
		if s := b.gate.Stats(); s.InFlight != 1 {
			t.Errorf("while the answer comes: %+v", s)
		}
		next <- struct{}{}
	}
	if rest, err := io.ReadAll(resp.Body); len(rest) != 0 || err != nil {
		t.Errorf("%q, %v", rest, err)
	}
	b.empty()
}
