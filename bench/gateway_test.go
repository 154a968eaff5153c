package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence/httpfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// proxyVariable names the service before which this program is a plain proxy, and no benchmark.
const proxyVariable = "HOLDFAST_BENCH_PROXY"

func init() {
	if upstream := os.Getenv(proxyVariable); upstream != "" {
		fmt.Fprintln(os.Stderr, plainProxy(upstream))
		os.Exit(1)
	}
}

// plainProxy is what the gateway is compared with: it orders nothing, and keeps connections to
// the service, and buffers, as the gateway does.
func plainProxy(upstream string) error {
	target, err := url.Parse(upstream)
	if err != nil {
		return err
	}
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConns, t.MaxIdleConnsPerHost, t.DisableCompression = 0, 1024, true
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stderr).Encode(listening{"listening", "http://" + l.Addr().String()}); err != nil {
		return err
	}
	return http.Serve(l, &httputil.ReverseProxy{Transport: t, BufferPool: &buffers{}, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.SetXForwarded()
	}})
}

type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if buf, ok := b.pool.Get().(*[]byte); ok {
		return *buf
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(buf []byte) { b.pool.Put(&buf) }

// listening is the line of a proxy that serves.
type listening struct{ Event, Address string }

// BenchmarkGateway compares writes through the command's gateway, in a process of its own, with
// those through a plain proxy in such a process. Each write is the holder's next one: its token
// is the mark already, and is looked up in the file of marks.
func BenchmarkGateway(b *testing.B) {
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(w, r.Body)
	}))
	b.Cleanup(service.Close)
	command := filepath.Join(b.TempDir(), "holdfast")
	build := exec.Command("go", "build", "-o", command, ".")
	build.Dir = filepath.FromSlash("../cmd/holdfast")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	gateway := exec.Command(command, "gateway", "--listen", "127.0.0.1:0", "--upstream", service.URL, "--resource", "path",
		"--marks", filepath.Join(b.TempDir(), "marks"), "--refuse-unknown", "0", "--settle", "0", "--json")
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	plain := exec.Command(exe)
	plain.Env = append(os.Environ(), proxyVariable+"="+service.URL)
	proxies := []*proxy{startProxy(b, "plain", plain), startProxy(b, "gateway", gateway)}
	for _, clients := range []int{16, 64} {
		b.Run(fmt.Sprintf("Parallel%d", clients), func(b *testing.B) {
			once(b, func() {
				s := throughProxies(b, proxies, clients)
				line := fmt.Sprintf("Gateway/Parallel%d", clients)
				figure(b, line, "p50/plain", s.ratios("gateway", "plain", cycleTime)...)
				figure(b, line, "p50-us", s.values("gateway", cycleTime)...)
				figure(b, line+"/plain", "p50-us", s.values("plain", cycleTime)...)
			})
		})
	}
}

// proxy is a proxy in a process of its own.
type proxy struct {
	name, addr string
	client     *http.Client
}

func startProxy(b *testing.B, name string, cmd *exec.Cmd) *proxy {
	b.Helper()
	p := servertest.Start(b, cmd)
	t := &http.Transport{MaxIdleConnsPerHost: 1024, DisableCompression: true}
	b.Cleanup(t.CloseIdleConnections)
	for range 1000 {
		for line := range strings.Lines(p.Log()) {
			var l listening
			if json.Unmarshal([]byte(line), &l) == nil && l.Event == "listening" {
				return &proxy{name, l.Address, &http.Client{Transport: t}}
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.Fatalf("%s does not serve:\n%s", name, p.Log())
	return nil
}

// write sends a write of a holder and says how long it took.
func (p *proxy) write(resource int) (time.Duration, error) {
	r, err := http.NewRequest(http.MethodPut, fmt.Sprintf("%s/r/%d", p.addr, resource), strings.NewReader("0123456789"))
	if err != nil {
		return 0, err
	}
	r.Header.Set(httpfence.Header, "1795972895835210")
	began := time.Now()
	resp, err := p.client.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return 0, err
	}
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: %s", p.name, resp.Status)
	}
	return time.Since(began), nil
}

// throughProxies measures writes of many clients, each to a resource of its own: in each
// repetition a number of rounds, in each round a burst through every proxy.
func throughProxies(b *testing.B, proxies []*proxy, clients int) samples {
	const rounds, writes = 10, 2560 // a burst is long beside what the collector or the disk may do in it
	all := samples{}
	for repetition := range repetitions() + 1 {
		times := map[string][]time.Duration{}
		for round := range rounds {
			for i := range proxies {
				p := proxies[(i+round)%len(proxies)]
				times[p.name] = append(times[p.name], p.burst(b, clients, writes/clients)...)
			}
		}
		if repetition == 0 {
			continue // connections were opened and tokens claimed
		}
		for _, p := range proxies {
			all[p.name] = append(all[p.name], sample{cycle: median(times[p.name])})
		}
	}
	return all
}

func (p *proxy) burst(b *testing.B, clients, writes int) (times []time.Duration) {
	var mu sync.Mutex
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for range writes {
				took, err := p.write(c)
				if err != nil {
					b.Error(err)
					return
				}
				mu.Lock()
				times = append(times, took)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return times
}
