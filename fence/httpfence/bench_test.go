package httpfence_test

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// BenchmarkGateway measures a gateway and a plain reverse proxy with an equal transport and a pool
// of buffers, in turns, before one service, and reports the median of each and their ratio.
func BenchmarkGateway(b *testing.B) {
	for _, clients := range []int{1, 32} {
		b.Run(fmt.Sprintf("clients=%d", clients), func(b *testing.B) { benchGateway(b, clients) })
	}
}

func benchGateway(b *testing.B, clients int) {
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, "done")
	}))
	defer service.Close()
	upstream, _ := url.Parse(service.URL)
	transport := func() *http.Transport {
		return &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}
	}
	gate := newGate(b, new(fence.Memory), httpfence.GateOptions{})
	gw, err := httpfence.NewGateway(httpfence.GatewayOptions{Upstream: upstream, Gate: gate, Transport: transport()})
	if err != nil {
		b.Fatal(err)
	}
	plain := &httputil.ReverseProxy{
		Rewrite:    func(pr *httputil.ProxyRequest) { pr.SetURL(upstream); pr.SetXForwarded() },
		Transport:  transport(),
		BufferPool: new(pool),
		ErrorLog:   log.New(io.Discard, "", 0),
	}
	front := map[string]*httptest.Server{"plain": httptest.NewServer(plain), "gateway": httptest.NewServer(gw)}
	c := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024}}
	took := map[string][]time.Duration{}
	for b.Loop() {
		for name, s := range front {
			took[name] = append(took[name], load(b, c, s.URL, clients, 40)...)
		}
	}
	c.CloseIdleConnections()
	for _, s := range front {
		s.Close()
	}
	p50 := func(name string) float64 {
		slices.Sort(took[name])
		return float64(took[name][len(took[name])/2]) / float64(time.Microsecond)
	}
	b.ReportMetric(p50("plain"), "plain-p50-µs")
	b.ReportMetric(p50("gateway"), "gateway-p50-µs")
	b.ReportMetric(p50("gateway")/p50("plain"), "ratio")
	b.ReportMetric(0, "ns/op")
}

type pool struct{ sync.Pool }

func (p *pool) Get() []byte {
	if buf, ok := p.Pool.Get().(*[32 << 10]byte); ok {
		return buf[:]
	}
	return make([]byte, 32<<10)
}

func (p *pool) Put(buf []byte) { p.Pool.Put((*[32 << 10]byte)(buf)) }

// load makes n requests by each client, and returns how long they took.
func load(b *testing.B, c *http.Client, url string, clients, n int) []time.Duration {
	all := make([]time.Duration, clients*n)
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for j := range n {
				r, _ := http.NewRequestWithContext(b.Context(), "PUT", fmt.Sprintf("%s/r%d", url, (i+j)%100), strings.NewReader("body"))
				r.Header.Set(httpfence.Header, "5")
				began := time.Now()
				resp, err := c.Do(r)
				if err != nil {
					b.Error(err)
					return
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				all[i*n+j] = time.Since(began)
			}
		})
	}
	wg.Wait()
	return all
}

// BenchmarkEnter is the cost of the gate alone: of a resource that nobody is in, and of one that
// has others with the same token inside.
func BenchmarkEnter(b *testing.B) {
	g := newGate(b, new(fence.Memory), httpfence.GateOptions{})
	enter := func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			leave, err := g.Enter(b.Context(), "r", 5)
			if err != nil {
				b.Fatal(err)
			}
			leave()
		}
	}
	b.Run("empty", enter)
	b.Run("beside", func(b *testing.B) {
		leave, err := g.Enter(b.Context(), "r", 5)
		if err != nil {
			b.Fatal(err)
		}
		defer leave()
		enter(b)
	})
}
