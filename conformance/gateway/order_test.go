package gateway_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// service knows nothing of fencing but what it needs to find requests out of order. It works on
// each request for a while.
type service struct {
	mu        sync.Mutex
	resources map[string]*seen

	requests, running, late, beside atomic.Int64
}

// seen is what came for a resource.
type seen struct {
	highest fence.Token
	running map[fence.Token]int
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.ParseInt(r.Header.Get(httpfence.Header), 10, 64)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	end := s.begin(r.URL.Path, fence.Token(n))
	defer end()
	if rand.IntN(50) == 0 {
		time.Sleep(100 * time.Millisecond)
	} else {
		time.Sleep(rand.N(10 * time.Millisecond))
	}
}

// begin judges a request when its work begins: late comes after one of a higher token, beside
// comes while one of a lower token is at work.
func (s *service) begin(resource string, t fence.Token) (end func()) {
	s.requests.Add(1)
	s.running.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.resources == nil {
		s.resources = map[string]*seen{}
	}
	at := s.resources[resource]
	if at == nil {
		at = &seen{running: map[fence.Token]int{}}
		s.resources[resource] = at
	}
	if t < at.highest {
		s.late.Add(1)
	}
	for other := range at.running {
		if other < t {
			s.beside.Add(1)
			break
		}
	}
	at.highest = max(at.highest, t)
	at.running[t]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.running.Add(-1)
		if at.running[t]--; at.running[t] == 0 {
			delete(at.running, t)
		}
	}
}

// load is many clients that write to few resources. Each takes the lock of a resource from
// whoever has it, and writes until it learns that another has done the same: most of the time
// most of them hold tokens that are old, as holders do that were paused.
type load struct {
	addr   atomic.Pointer[string] // of the gateway
	tokens []atomic.Int64         // of each resource, the last that was granted
	client *http.Client

	writes, stale, cut, refused atomic.Int64
	unexpected                  atomic.Pointer[error]

	stop context.CancelFunc
	done sync.WaitGroup
}

func startLoad(t *testing.T, addr string, clients, resources int) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{tokens: make([]atomic.Int64, resources), client: newClient(t), stop: cancel}
	l.addr.Store(&addr)
	pause := time.Duration(clients) * time.Millisecond // so that all together ask about a thousand times a second at most
	for i := range clients {
		l.done.Go(func() {
			for ctx.Err() == nil {
				l.hold(ctx, i%resources, pause)
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) end() {
	l.stop()
	l.done.Wait()
}

// hold writes until the token is stale.
func (l *load) hold(ctx context.Context, resource int, pause time.Duration) {
	sleep(ctx, 5*pause)
	tok := fence.Token(l.tokens[resource].Add(1))
	for ctx.Err() == nil {
		_, err := put(ctx, l.client, *l.addr.Load()+fmt.Sprintf("/r/%d", resource), tok)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, fence.ErrStale):
			l.stale.Add(1)
			return
		case errors.Is(err, fence.ErrBusy), errors.Is(err, fence.ErrUnavailable):
			l.refused.Add(1)
		case err == nil:
			l.writes.Add(1)
		default:
			if _, ok := errors.AsType[*url.Error](err); !ok {
				l.unexpected.CompareAndSwap(nil, &err)
			}
			l.cut.Add(1) // the gateway was killed: the same again
		}
		sleep(ctx, pause)
	}
}

func sleep(ctx context.Context, most time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(rand.N(most)):
	}
}

// await waits until f is true while the load goes on.
func (l *load) await(t *testing.T, what string, f func() bool) {
	t.Helper()
	for limit := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("it never came about: %s (%d writes, %d stale, %d cut, %d refused)", what, l.writes.Load(), l.stale.Load(), l.cut.Load(), l.refused.Load())
		}
	}
}

// settle is how long a higher token waits after each start. What a gateway had sent when it was
// killed must have begun at the service by then, and what had begun must have ended, on a
// machine that has other work.
const settle = 2 * time.Second

func TestKilled(t *testing.T) {
	clients, resources, kills := kit.Count(100, 1000), kit.Count(20, 100), kit.Count(3, 20)
	svc := &service{}
	behind := served(t, svc)
	marks := filepath.Join(t.TempDir(), "marks")
	flags := []string{"--settle", settle.String(), "--drain", "20s", "--refuse-unknown"}
	g := start(t, behind.URL, marks, append(flags, "0")...)
	l := startLoad(t, g.addr, clients, resources)
	inFlight, killed := int64(0), 0
	for range kills {
		// Past the settling, and in the midst of work.
		writes, stale := l.writes.Load(), l.stale.Load()
		l.await(t, "writes and refusals after a start", func() bool {
			return l.writes.Load() >= writes+int64(clients) && l.stale.Load() >= stale+int64(resources)
		})
		atWork := int64(0)
		l.await(t, "a request at work", func() bool {
			atWork = svc.running.Load()
			return atWork > 0
		})
		g.Kill()
		inFlight += atWork
		killed++
		g = start(t, behind.URL, marks, append(flags, "1h")...) // what it knows is complete
		l.addr.Store(&g.addr)
	}
	writes, stale := l.writes.Load(), l.stale.Load()
	l.await(t, "writes and refusals after the last start", func() bool {
		return l.writes.Load() >= writes+int64(clients) && l.stale.Load() >= stale+int64(resources)
	})
	l.end()
	if svc.late.Load() > 0 || svc.beside.Load() > 0 {
		t.Errorf("of %d requests %d came after one of a higher token, and %d while one of a lower token was at work", svc.requests.Load(), svc.late.Load(), svc.beside.Load())
	}
	if err := l.unexpected.Load(); err != nil {
		t.Error(*err)
	}
	if l.stale.Load() == 0 || inFlight == 0 || l.cut.Load() == 0 {
		t.Errorf("the test shows nothing: %d stale, %d at work at %d kills, %d cut", l.stale.Load(), inFlight, killed, l.cut.Load())
	}
	t.Logf("%d clients, %d resources: %d requests at the service, %d stale, %d refused for a time; killed %d times with %d requests at work; %d connections cut",
		clients, resources, svc.requests.Load(), l.stale.Load(), l.refused.Load(), killed, inFlight, l.cut.Load())
}

// The same load finds a proxy out that does not order.
func TestLoadFindsAPlainProxy(t *testing.T) {
	svc := &service{}
	target, err := url.Parse(served(t, svc).URL)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.ErrorLog = log.New(io.Discard, "", 0) // of clients that end with the test
	l := startLoad(t, served(t, proxy).URL, 100, 20)
	l.await(t, "a violation of each kind", func() bool { return svc.late.Load() > 0 && svc.beside.Load() > 0 })
	l.end()
	t.Logf("%d requests: %d late, %d beside", svc.requests.Load(), svc.late.Load(), svc.beside.Load())
}

// Marks that are lost let an old holder pass, unless resources that are unknown are refused.
func TestMarksLost(t *testing.T) {
	svc := &service{}
	behind := served(t, svc)
	marks := filepath.Join(t.TempDir(), "marks")
	c := newClient(t)
	want := func(g *gateway, tok fence.Token, status int, kind error) {
		t.Helper()
		got, err := put(t.Context(), c, g.addr+"/r", tok)
		if got != status || !errors.Is(err, kind) || kind == nil && err != nil {
			t.Errorf("token %v: %d, %v; want %d, %v", tok, got, err, status, kind)
		}
	}
	lose := func(g *gateway) {
		t.Helper()
		g.Kill()
		if err := os.Remove(marks); err != nil {
			t.Fatal(err)
		}
	}
	g := start(t, behind.URL, marks, "--refuse-unknown", "0", "--settle", "0")
	want(g, 6, 200, nil)
	want(g, 5, 412, fence.ErrStale)

	lose(g)
	g = start(t, behind.URL, marks, "--refuse-unknown", "1h", "--settle", "0")
	want(g, 5, 503, fence.ErrUnavailable)
	want(g, 6, 503, fence.ErrUnavailable)
	g.Kill()
	g = start(t, behind.URL, marks, "--refuse-unknown", "1h", "--settle", "0") // the file is there now, the marks are not
	want(g, 5, 503, fence.ErrUnavailable)
	g.Kill()
	g = start(t, behind.URL, marks, "--refuse-unknown", "300ms", "--settle", "0")
	g.await("complete", func(event) bool { return true })
	want(g, 7, 200, nil)
	want(g, 5, 412, fence.ErrStale)
	want(g, 6, 412, fence.ErrStale)
	if svc.late.Load() != 0 || svc.requests.Load() != 2 {
		t.Errorf("%d requests, %d late", svc.requests.Load(), svc.late.Load())
	}

	lose(g)
	g = start(t, behind.URL, marks, "--refuse-unknown", "0", "--settle", "0")
	want(g, 5, 200, nil)
	if svc.late.Load() != 1 {
		t.Errorf("without the refusal %d requests were late; the service should have found one", svc.late.Load())
	}
}
