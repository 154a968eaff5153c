package httpfence_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// Of a connection that was upgraded nobody can tell when the service has done what came last.
func TestGatewaySettlesUpgrade(t *testing.T) {
	const settle = time.Second
	b := newBed(t, httpfence.GateOptions{Drain: patience, Settle: settle}, httpfence.GatewayOptions{}, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
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
		io.Copy(io.Discard, rw)
	})
	time.Sleep(settle) // that of the start
	conn, _ := upgrade(t, b.front.Listener.Addr().String(), "/r", "5")
	io.WriteString(conn, "the last message")
	began := time.Now()
	conn.Close()
	if a := b.send("PUT", "/r", "6"); a.status != 200 {
		t.Errorf("6: %d %s", a.status, a.body)
	}
	if took := time.Since(began); took < settle {
		t.Errorf("6 was passed on %v after the end of the connection", took)
	}
	b.empty()
}

// A writer that is wrapped, as by other middleware, and knows nothing of hijacking itself.
type plainWriter struct{ inner http.ResponseWriter }

func (w plainWriter) Header() http.Header         { return w.inner.Header() }
func (w plainWriter) Write(p []byte) (int, error) { return w.inner.Write(p) }
func (w plainWriter) WriteHeader(status int)      { w.inner.WriteHeader(status) }
func (w plainWriter) Unwrap() http.ResponseWriter { return w.inner }

func TestMiddlewareHijackOfWrapped(t *testing.T) {
	gate := newGate(t, new(fence.Memory), httpfence.GateOptions{})
	finish := make(chan struct{})
	guarded := httpfence.Middleware(gate, httpfence.Options{})(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
		rw.Flush()
		go func() {
			<-finish
			conn.Close()
		}()
	}))
	s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { guarded.ServeHTTP(plainWriter{w}, r) }))
	_, answers := upgrade(t, s.Listener.Addr().String(), "/r", "5")
	time.Sleep(100 * time.Millisecond) // for the handler to return
	if s := gate.Stats(); s.InFlight != 1 {
		t.Errorf("beside a hijacked connection: %+v", s)
	}
	close(finish)
	io.Copy(io.Discard, answers)
	eventually(t, "the gate to be empty", func() bool { return gate.Stats().Resources == 0 })
}

// Clients such as Java's ask for h2c with every request; the gateway drops that.
func TestGatewayReadsOfClientsThatOfferH2C(t *testing.T) {
	b := newBed(t, httpfence.GateOptions{}, httpfence.GatewayOptions{}, ok)
	if a := b.send("GET", "/r", "", "Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c", "HTTP2-Settings", "AAMAAABkAARAAAAAAAIAAAAA"); a.status != 200 {
		t.Errorf("a read that offers h2c: %d %s", a.status, a.body)
	}
	for _, other := range []string{"websocket", "h2c, websocket"} {
		if a := b.send("GET", "/r", "", "Connection", "Upgrade", "Upgrade", other); a.status != 428 {
			t.Errorf("a read that asks for %s: %d %s", other, a.status, a.body)
		}
	}
}

// A header that the client declares to be the connection's own does not reach the service, so that
// it would act on another resource.
func TestByHeaderOfTheConnection(t *testing.T) {
	by := httpfence.ByHeader("account")
	for connection, valid := range map[string]bool{"": true, "keep-alive": true, "accounts": true, "account": false, "close, ACCOUNT": false, "close ,\tAccount ,x": false} {
		r := &http.Request{Header: http.Header{"Account": {"7"}}}
		if connection != "" {
			r.Header["Connection"] = []string{"te", connection}
		}
		if name, err := by(r); valid != (err == nil) || !valid && !errors.Is(err, fence.ErrInvalid) {
			t.Errorf("Connection: %s: %q, %v", connection, name, err)
		}
	}
}

// What a service says cannot break the lines of a log.
func TestReadErrorIsOneLine(t *testing.T) {
	for _, name := range []string{"invalid", "busy"} {
		body := fmt.Sprintf(`{"type":"urn:holdfast:%s","field":"a\nb","detail":"c\r\nd\u001b[2Je","resource":"f\ng"}`, name)
		err := httpfence.ReadError(&http.Response{StatusCode: 400, Header: http.Header{"Content-Type": {"application/problem+json"}}, Body: io.NopCloser(strings.NewReader(body))})
		if err == nil || strings.ContainsAny(err.Error(), "\r\n\x1b") {
			t.Errorf("%s: %q", name, err)
		}
	}
}
