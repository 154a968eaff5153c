package httpfence_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// patience bounds what would otherwise hang.
const patience = time.Minute

// serve starts a server that ends, and has left no goroutine behind, with the test.
func serve(t testing.TB, h http.Handler) *httptest.Server {
	before := runtime.NumGoroutine()
	s := httptest.NewServer(h)
	t.Cleanup(func() {
		s.Client().CloseIdleConnections()
		s.Close()
		eventually(t, "the goroutines of the server to end", func() bool { return runtime.NumGoroutine() <= before })
	})
	return s
}

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("waited in vain for %s\n%s", what, stacks[:runtime.Stack(stacks, true)])
		}
	}
}

// answered is a response that has been read.
type answered struct {
	status int
	header http.Header
	body   string
	err    error // of ReadError
}

// send makes a request; headers are pairs of name and value.
func send(t testing.TB, c *http.Client, method, url, body string, headers ...string) answered {
	t.Helper()
	a, err := trySend(t.Context(), c, method, url, body, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func trySend(ctx context.Context, c *http.Client, method, url, body string, headers ...string) (answered, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answered{}, err
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	resp, err := c.Do(r)
	if err != nil {
		return answered{}, err
	}
	defer resp.Body.Close()
	a := answered{status: resp.StatusCode, header: resp.Header, err: httpfence.ReadError(resp)}
	text, err := io.ReadAll(resp.Body)
	a.body = string(text)
	return a, err
}

func ok(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "done") }

// guarding is a server whose handler is behind the middleware.
func guarding(t testing.TB, g *httpfence.Gate, o httpfence.Options, h http.HandlerFunc) *httptest.Server {
	return serve(t, httpfence.Middleware(g, o)(h))
}

func TestMiddleware(t *testing.T) {
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	pattern, err := httpfence.ByPattern("/accounts/{id}")
	if err != nil {
		t.Fatal(err)
	}
	var token fence.Token
	var inside int
	s := guarding(t, g, httpfence.Options{Resource: pattern}, func(w http.ResponseWriter, r *http.Request) {
		token, _ = fence.FromContext(r.Context(), "/accounts/7")
		inside = g.Stats().InFlight
		ok(w, r)
	})
	for _, tt := range []struct {
		method, path, token string
		status, inside      int
		problem             string
	}{
		{"POST", "/accounts/7", "", 428, 0, `"urn:holdfast:missing-token"`},
		{"POST", "/accounts/7", "5", 200, 1, ""},
		{"DELETE", "/accounts/7/", "5", 200, 1, ""},
		{"GET", "/accounts/7/transfers", "", 200, 0, ""},
		{"GET", "/elsewhere", "", 200, 0, ""},
		{"GET", "/accounts/7/transfers", "6", 200, 1, ""},
		{"PUT", "/accounts/7/transfers/3", "5", 412, 0, `"resource":"/accounts/7","token":"5","seen":"6"`},
		{"HEAD", "/accounts/7", "5", 412, 0, ""},
		{"PUT", "/accounts/8", "5", 200, 1, ""},
		{"PUT", "/accounts/7", "05", 400, 0, `"field":"token"`},
		{"GET", "/accounts/7", "-5", 400, 0, `"urn:holdfast:invalid"`},
		{"PUT", "/elsewhere", "7", 400, 0, `"field":"resource"`},
		{"PUT", "/elsewhere", "", 400, 0, `"field":"resource"`},
		{"PUT", "/accounts/7%2F8", "7", 400, 0, `"field":"resource"`},
		{"PUT", "/accounts/" + strings.Repeat("7", 513), "7", 400, 0, "at most 512 bytes"},
	} {
		token, inside = 0, 0
		var headers []string
		if tt.token != "" {
			headers = []string{"X-Fencing-Token", tt.token}
		}
		a := send(t, s.Client(), tt.method, s.URL+tt.path, "", headers...)
		if a.status != tt.status || inside != tt.inside || !strings.Contains(a.body, tt.problem) {
			t.Errorf("%s %s, token %q: %d, %d inside: %s", tt.method, tt.path, tt.token, a.status, inside, a.body)
		}
		if strings.HasPrefix(tt.path, "/accounts/7") && inside == 1 && token.String() != tt.token {
			t.Errorf("%s %s, token %q: the handler found %v", tt.method, tt.path, tt.token, token)
		}
		if a.status >= 400 && a.header.Get("Content-Type") != "application/problem+json" {
			t.Errorf("%s %s: %v", tt.method, tt.path, a.header)
		}
	}
	if s := g.Stats(); s.InFlight != 0 || s.Resources != 0 {
		t.Errorf("the gate keeps %+v", s)
	}
}

// Without a gate the handler checks.
func TestMiddlewareWithoutGate(t *testing.T) {
	var marks fence.Memory
	s := guarding(t, nil, httpfence.Options{}, func(w http.ResponseWriter, r *http.Request) {
		token, _ := fence.FromContext(r.Context(), "/a")
		if err := marks.Claim(r.Context(), "/a", token); err != nil {
			if !httpfence.WriteError(w, err) {
				t.Errorf("WriteError did not take %v", err)
			}
			return
		}
		ok(w, r)
	})
	for _, tt := range []struct {
		token  string
		status int
	}{{"", 428}, {"5", 200}, {"4", 412}, {"6", 200}} {
		var headers []string
		if tt.token != "" {
			headers = []string{httpfence.Header, tt.token}
		}
		if a := send(t, s.Client(), "PUT", s.URL+"/a", "", headers...); a.status != tt.status {
			t.Errorf("token %q: %d %s", tt.token, a.status, a.body)
		}
	}
}

func TestMiddlewareErrorsOfResource(t *testing.T) {
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	o := httpfence.Options{
		Resource: func(*http.Request) (string, error) { return "", errors.New("password of db.internal is hunter2") },
		Guarded:  func(r *http.Request) bool { return r.URL.Path != "/login" },
	}
	s := guarding(t, g, o, ok)
	a := send(t, s.Client(), "GET", s.URL+"/x", "")
	if a.status != 503 || strings.Contains(a.body, "hunter2") || !errors.Is(a.err, fence.ErrUnavailable) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := send(t, s.Client(), "POST", s.URL+"/login", ""); a.status != 200 {
		t.Errorf("a request that is not guarded: %d %s", a.status, a.body)
	}
}

func TestMiddlewarePanic(t *testing.T) {
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	s := guarding(t, g, httpfence.Options{}, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	if _, err := trySend(t.Context(), s.Client(), "PUT", s.URL+"/a", "", httpfence.Header, "5"); err == nil {
		t.Error("a handler that panicked has answered")
	}
	eventually(t, "the handler to leave", func() bool { return g.Stats().InFlight == 0 })
	if n := g.Stats().Entered; n != 1 {
		t.Errorf("%d entered", n)
	}
}

// A request is inside until the connection that its handler took is closed.
func TestMiddlewareHijack(t *testing.T) {
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	taken := make(chan net.Conn, 1)
	s := guarding(t, g, httpfence.Options{}, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "PUT" {
			ok(w, r)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
		rw.Flush()
		taken <- conn
	})
	r, err := http.NewRequestWithContext(t.Context(), "GET", s.URL+"/a", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {"test"}}
	resp, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != 428 {
		t.Errorf("an upgrade without a token: %s", resp.Status)
	}
	r.Header.Set(httpfence.Header, "5")
	if resp, err = s.Client().Do(r); err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	conn := <-taken
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := g.Enter(short, "/a", 6); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("6 beside a hijacked connection of 5: %v", err)
	}
	conn.Close()
	conn.Close()
	if a := send(t, s.Client(), "PUT", s.URL+"/a", "", httpfence.Header, "6"); a.status != 200 {
		t.Errorf("6 after the connection of 5 was closed: %d %s", a.status, a.body)
	}
}

// Handlers may stream behind the middleware, and send files and trailers.
func TestMiddlewareStreams(t *testing.T) {
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	next := make(chan struct{})
	s := guarding(t, g, httpfence.Options{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Sum")
		if _, err := io.Copy(w, r.Body); err != nil {
			t.Error(err)
		}
		w.(http.Flusher).Flush()
		<-next
		n, err := w.(io.ReaderFrom).ReadFrom(strings.NewReader(" and more"))
		if n != 9 || err != nil {
			t.Errorf("ReadFrom: %d, %v", n, err)
		}
		w.Header().Set("Sum", "42")
	})
	r, err := http.NewRequestWithContext(t.Context(), "PUT", s.URL+"/a", strings.NewReader("first"))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(httpfence.Header, "5")
	resp, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "first" {
		t.Fatalf("%q, %v", first, err)
	}
	if s := g.Stats(); s.InFlight != 1 {
		t.Errorf("while the answer streams: %+v", s)
	}
	close(next)
	rest, err := io.ReadAll(resp.Body)
	if string(rest) != " and more" || err != nil || resp.Trailer.Get("Sum") != "42" {
		t.Errorf("%q, %v, trailer %v", rest, err, resp.Trailer)
	}
}

// Two hundred requests with tokens 1 to 200 in any order, on each of four resources: handlers
// run in the order of their tokens, and what came too late was refused (case HTP-03).
func TestConcurrentRequestsRunInOrder(t *testing.T) {
	const tokens, resources = 200, 4
	type run struct {
		begin bool
		token fence.Token
	}
	var mu sync.Mutex
	history := map[string][]run{}
	record := func(resource string, r run) {
		mu.Lock()
		defer mu.Unlock()
		history[resource] = append(history[resource], r)
	}
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{Drain: patience})
	s := guarding(t, g, httpfence.Options{}, func(w http.ResponseWriter, r *http.Request) {
		token, _ := fence.FromContext(r.Context(), r.URL.Path)
		record(r.URL.Path, run{true, token})
		runtime.Gosched()
		if token%10 == 0 {
			time.Sleep(time.Millisecond)
		}
		record(r.URL.Path, run{false, token})
	})
	var requests []string
	for i := range tokens * resources {
		requests = append(requests, fmt.Sprintf("/r%d %d", i%resources, i/resources+1))
	}
	rand.Shuffle(len(requests), func(i, j int) { requests[i], requests[j] = requests[j], requests[i] })
	var wg sync.WaitGroup
	statuses := map[int]int{}
	for _, r := range requests {
		path, token, _ := strings.Cut(r, " ")
		wg.Go(func() {
			a, err := trySend(t.Context(), s.Client(), "POST", s.URL+path, "", httpfence.Header, token)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			statuses[a.status]++
		})
	}
	wg.Wait()
	ran := 0
	for resource, h := range history {
		var highest fence.Token
		open := map[fence.Token]int{}
		for _, r := range h {
			if !r.begin {
				if open[r.token]--; open[r.token] == 0 {
					delete(open, r.token)
				}
				continue
			}
			ran++
			if r.token < highest {
				t.Errorf("%s: %v ran after %v", resource, r.token, highest)
			}
			highest = r.token
			if open[r.token]++; len(open) > 1 {
				t.Errorf("%s: handlers run side by side: %v", resource, open)
			}
		}
		if highest != tokens {
			t.Errorf("%s: the highest token that ran is %v", resource, highest)
		}
	}
	if statuses[200] != ran || statuses[412] == 0 || statuses[200]+statuses[412] != tokens*resources {
		t.Errorf("%d ran, answers %v", ran, statuses)
	}
	if s := g.Stats(); s.Resources != 0 || s.InFlight != 0 || s.Waiting != 0 || int(s.Entered) != ran {
		t.Errorf("the gate keeps %+v", s)
	}
}

// The service has written, and the client does not learn of it: the same token passes again, and
// with an id of the operation it is carried out once (case HTP-04).
func TestRetryAfterLostAnswer(t *testing.T) {
	var mu sync.Mutex
	done := map[string]bool{}
	balance, dropped := 0, 0
	g := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	s := guarding(t, g, httpfence.Options{}, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if id := r.Header.Get("Idempotency-Key"); !done[id] {
			done[id] = true
			balance += 10
		}
		if dropped == 0 {
			dropped++
			panic(http.ErrAbortHandler)
		}
		ok(w, r)
	})
	operation := []string{httpfence.Header, "5", "Idempotency-Key", "account-7/5/1"}
	if _, err := trySend(t.Context(), s.Client(), "POST", s.URL+"/a", "body", operation...); err == nil {
		t.Fatal("the answer was not lost")
	}
	a := send(t, s.Client(), "POST", s.URL+"/a", "body", operation...)
	if a.status != 200 || balance != 10 || dropped != 1 {
		t.Errorf("the retry: %d %s; the balance is %d, want 10; %d answers dropped", a.status, a.body, balance, dropped)
	}
}

// remote is a guard at the other end of the transport: a claim is a request that enters.
type remote struct {
	client *http.Client
	url    string
}

func (r *remote) ask(ctx context.Context, op, resource string, t fence.Token) error {
	if err := errors.Join(fence.CheckResource(resource), fence.CheckToken(t)); err != nil {
		var invalid *fence.InvalidError
		errors.As(err, &invalid)
		return invalid
	}
	// The client sees the token in a context of its own, and of the caller's only the holder.
	q, err := http.NewRequestWithContext(fence.WithToken(ctx, "as sent", t), op, r.url, nil)
	if err != nil {
		return err
	}
	q.Header.Set("Resource", fmt.Sprintf("%x", resource))
	resp, err := r.client.Do(q)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: err}
	}
	defer resp.Body.Close()
	return httpfence.ReadError(resp)
}

func (r *remote) Claim(ctx context.Context, resource string, t fence.Token) error {
	return r.ask(ctx, "PUT", resource, t)
}

func (r *remote) Check(ctx context.Context, resource string, t fence.Token) error {
	return r.ask(ctx, "GET", resource, t)
}

// The suite of guards, through Transport, Middleware, WriteError and ReadError.
func TestMiddlewareIsAGuard(t *testing.T) {
	byName := func(r *http.Request) (string, error) {
		var name []byte
		_, err := fmt.Sscanf(r.Header.Get("Resource"), "%x", &name)
		return string(name), err
	}
	open := func(t testing.TB, url string) fence.Guard {
		base := &http.Transport{MaxIdleConnsPerHost: 16}
		t.Cleanup(base.CloseIdleConnections)
		return &remote{&http.Client{Transport: &httpfence.Transport{Base: base}}, url}
	}
	fencetest.Run(t, fencetest.Harness{
		New: func(t testing.TB) fence.Guard {
			g := newGate(t, new(fence.Memory), httpfence.GateOptions{Drain: patience})
			claims := httpfence.Middleware(g, httpfence.Options{Resource: byName})(http.HandlerFunc(ok))
			s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method == "PUT" {
					claims.ServeHTTP(w, r)
					return
				}
				name, _ := byName(r)
				token, err := httpfence.ParseHeader(r.Header)
				if err == nil {
					err = g.Check(r.Context(), name, token)
				}
				if err != nil && !httpfence.WriteError(w, err) {
					t.Errorf("WriteError did not take %v", err)
				}
			}))
			return open(t, s.URL)
		},
		Reopen: func(t testing.TB, g fence.Guard) fence.Guard { return open(t, g.(*remote).url) },
	})
}

// upgrade opens an upgraded connection over a raw socket, so that it can be ended as one likes.
func upgrade(t testing.TB, address, path, token string) (net.Conn, *bufio.Reader) {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: test\r\n%s: %s\r\n\r\n", path, httpfence.Header, token)
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != 101 {
		t.Fatalf("upgrade: %v, %v", resp, err)
	}
	return conn, r
}
