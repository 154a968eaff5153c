package httpfence_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// A client that is stopped, with its connection whole, keeps the place of its request not much
// longer than UpstreamTimeout: it is the holder that the next one must be able to supersede.
func TestGatewayClientStalls(t *testing.T) {
	flood := func(w io.Writer) {
		for chunk := make([]byte, 1<<20); ; {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}
	services := map[string]http.HandlerFunc{
		"/reads-no-answer": func(w http.ResponseWriter, r *http.Request) { flood(w) },
		"/sends-no-body":   func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) },
		"/neither": func(w http.ResponseWriter, r *http.Request) {
			if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
				t.Error(err)
			}
			flood(w)
		},
		"/reads-nothing-upgraded": func(w http.ResponseWriter, r *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n")
			flood(conn)
		},
	}
	b := newBed(t, httpfence.GateOptions{Drain: patience}, httpfence.GatewayOptions{UpstreamTimeout: 2 * time.Second}, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get(httpfence.Header) == "5" {
			services[r.URL.Path](w, r)
		}
	})
	for path, more := range map[string]string{
		"/reads-no-answer":        "Content-Length: 0\r\n\r\n",
		"/sends-no-body":          "Content-Length: 1000\r\n\r\nbegin",
		"/neither":                "Content-Length: 1000\r\n\r\nbegin",
		"/reads-nothing-upgraded": "Connection: Upgrade\r\nUpgrade: test\r\n\r\n",
	} {
		conn, err := net.Dial("tcp", b.front.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\n%s: 5\r\n%s", path, httpfence.Header, more)
	}
	eventually(t, "all to enter", func() bool { return b.gate.Stats().Entered == uint64(len(services)) })
	for path := range services {
		if a := b.send("PUT", path, "6"); a.status != 200 {
			t.Errorf("%s: 6: %d %s", path, a.status, a.body)
		}
	}
	b.empty()
}

// A client that is told that the service is too slow can use its connection again.
func TestGatewayAfterTimeout(t *testing.T) {
	b := newBed(t, httpfence.GateOptions{}, httpfence.GatewayOptions{UpstreamTimeout: 200 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			io.Copy(io.Discard, r.Body) // else the end of the connection is not seen
			<-r.Context().Done()
		}
	})
	for range 2 {
		if a := b.send("PUT", "/slow", "5"); a.status != http.StatusGatewayTimeout {
			t.Errorf("%d %s", a.status, a.body)
		}
		if a := b.send("GET", "/", ""); a.status != 200 {
			t.Errorf("after it: %d %s", a.status, a.body)
		}
	}
	b.empty()
}
