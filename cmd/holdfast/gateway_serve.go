package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// passage is one request on its way, and the writer of its answer. It travels in the request's
// context. What the gateway itself answers it reads.
type passage struct {
	http.ResponseWriter
	began  time.Time
	sent   atomic.Int64 // to the service, in nanoseconds since it began; zero: not
	begun  atomic.Bool  // the service's answer
	failed atomic.Bool
	status int
	own    []byte
}

type passageKey struct{}

// ServeHTTP passes a request to the gateway of httpfence, and counts what became of it, also
// where the answer breaks off, which is a panic.
func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p := &passage{ResponseWriter: w, began: time.Now()}
	defer g.count(r, p)
	g.proxy.ServeHTTP(p, r.WithContext(context.WithValue(r.Context(), passageKey{}, p)))
}

func (g *gateway) count(r *http.Request, p *passage) {
	outcome := p.outcome()
	g.meters.requests[outcome].Inc()
	if sent := p.sent.Load(); sent != 0 {
		g.meters.waits.Observe(time.Duration(sent).Seconds())
	}
	if outcome == passed {
		g.answersUpstream()
	}
	if g.accessLog {
		g.logRequest(r, p.status, outcome, time.Since(p.began))
	}
}

// Outcomes of a request.
const (
	passed      = "passed" // the service answered
	failed      = "upstream_error"
	abandoned   = "abandoned" // the client went away before the request was sent on, or an unguarded one was answered
	stale       = "stale"
	missing     = "missing"
	invalid     = "invalid"
	busy        = "busy"
	unavailable = "unavailable"
)

var outcomes = []string{passed, failed, abandoned, stale, missing, invalid, busy, unavailable}

// sending marks requests that go to the service.
type sending struct{ base http.RoundTripper }

func (s sending) RoundTrip(r *http.Request) (*http.Response, error) {
	p, ok := r.Context().Value(passageKey{}).(*passage)
	if ok {
		p.sent.Store(max(1, int64(time.Since(p.began))))
	}
	resp, err := s.base.RoundTrip(r)
	if ok && err == nil {
		p.begun.Store(true)
	}
	return resp, err
}

func (p *passage) Unwrap() http.ResponseWriter { return p.ResponseWriter }

func (p *passage) WriteHeader(status int) {
	if p.status < 200 { // not an informational one
		p.status = status
	}
	p.ResponseWriter.WriteHeader(status)
}

func (p *passage) Write(b []byte) (int, error) {
	if p.sent.Load() == 0 {
		p.own = append(p.own, b...)
	}
	return p.ResponseWriter.Write(b)
}

func (p *passage) Flush() { _ = http.NewResponseController(p.ResponseWriter).Flush() }

// Hijack is for connections that the service upgrades.
func (p *passage) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return http.NewResponseController(p.ResponseWriter).Hijack()
}

// outcome says what became of the request.
func (p *passage) outcome() string {
	switch {
	case p.failed.Load():
		return failed
	case p.begun.Load():
		return passed
	case p.sent.Load() != 0:
		return abandoned
	}
	err := httpfence.ReadError(&http.Response{StatusCode: p.status, Header: p.Header(), Body: io.NopCloser(bytes.NewReader(p.own))})
	for _, k := range []struct {
		kind error
		name string
	}{{fence.ErrStale, stale}, {httpfence.ErrMissing, missing}, {fence.ErrInvalid, invalid}, {fence.ErrBusy, busy}, {fence.ErrUnavailable, unavailable}} {
		if errors.Is(err, k.kind) {
			return k.name
		}
	}
	return abandoned
}

// failedUpstream is told of a request whose answer from the service did not come.
func (g *gateway) failedUpstream(r *http.Request, _ string, err error) {
	if p, ok := r.Context().Value(passageKey{}).(*passage); ok {
		p.failed.Store(true)
	}
	if r.Context().Err() != nil {
		return // the client has gone, and may be what broke it
	}
	text, words := err.Error(), "a request was not answered, and whether the service has obeyed it is not known"
	if reason := (*fence.Error)(nil); errors.As(err, &reason) {
		text = reason.Err.Error()
	}
	if errors.Is(err, fence.ErrUnavailable) {
		words = "the service cannot be reached, and nothing was sent"
	}
	if g.health.upstream.Swap(&text); g.health.failing.Swap(true) {
		return // told
	}
	g.log.tell(gatewayEvent{Event: "upstream-fails", Error: text}, words+": "+text)
}

// answersUpstream is told of each answer of the service.
func (g *gateway) answersUpstream() {
	if g.health.answered.Store(true); g.health.failing.Load() && g.health.failing.Swap(false) {
		g.log.tell(gatewayEvent{Event: "upstream-answers"}, "the service answers again")
	}
}

// health is what /healthz tells.
type health struct {
	marks    *marks
	stopping atomic.Bool
	answered atomic.Bool            // the service has, once
	failing  atomic.Bool            // the service has not answered the last request that failed or passed
	upstream atomic.Pointer[string] // why

	mu     sync.Mutex
	probed time.Time
	bad    error
}

// Limits of the probe of the marks: a commit each time would be work for the disk.
const (
	probeEvery = time.Second
	probeLimit = 2 * time.Second
)

// marksError says whether the marks can be written.
func (h *health) marksError(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if time.Since(h.probed) > probeEvery {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
		defer cancel()
		h.bad = h.marks.probe(ctx)
		h.probed = time.Now()
	}
	return h.bad
}

// healthJSON is the answer of /healthz.
type healthJSON struct {
	OK       bool   `json:"ok"`
	Stopping bool   `json:"stopping,omitempty"`
	Marks    string `json:"marks"`    // "ok", or what is wrong
	Upstream string `json:"upstream"` // "answers", "not asked yet", or why it does not answer; no part of ok
}

func (h *health) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	j := healthJSON{OK: true, Stopping: h.stopping.Load(), Marks: "ok", Upstream: "not asked yet"}
	switch why := h.upstream.Load(); {
	case h.failing.Load() && why != nil:
		j.Upstream = *why
	case h.answered.Load():
		j.Upstream = "answers"
	}
	if err := h.marksError(r.Context()); err != nil {
		j.OK, j.Marks = false, err.Error()
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if j.OK = j.OK && !j.Stopping; !j.OK {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(j)
}

func (g *gateway) adminHandler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /healthz", &g.health)
	mux.Handle("GET /metrics", promhttp.HandlerFor(g.meters.registry, promhttp.HandlerOpts{}))
	return mux
}

// meters are the metrics of a gateway.
type meters struct {
	registry *prometheus.Registry
	requests map[string]prometheus.Counter // by outcome
	waits    prometheus.Histogram
	commits  prometheus.Histogram
}

func newMeters() *meters {
	m := &meters{
		registry: prometheus.NewRegistry(),
		requests: map[string]prometheus.Counter{},
		waits: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "holdfast_gateway_wait_seconds",
			Help: "How long requests waited at the gateway before they were sent on: for others and for the marks.", Buckets: prometheus.ExponentialBuckets(0.0001, 4, 10)}),
		commits: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "holdfast_gateway_marks_commit_seconds",
			Help: "How long it took until marks were on the disk. One commit may be for many claims.", Buckets: prometheus.ExponentialBuckets(0.0001, 4, 10)}),
	}
	requests := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "holdfast_gateway_requests_total",
		Help: "Requests that are done, by what became of them."}, []string{"outcome"})
	for _, outcome := range outcomes {
		m.requests[outcome] = requests.WithLabelValues(outcome)
	}
	m.registry.MustRegister(requests, m.waits, m.commits, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *meters) committed(took time.Duration) { m.commits.Observe(took.Seconds()) }

// watch adds what the gate and the marks know.
func (m *meters) watch(gate *httpfence.Gate, marks *marks) {
	gauge := func(name, help string, value func() float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "holdfast_gateway_" + name, Help: help}, value))
	}
	gauge("in_flight", "Guarded requests that the service works on.", func() float64 { return float64(gate.Stats().InFlight) })
	gauge("waiting", "Guarded requests that wait for others, or for the marks.", func() float64 { return float64(gate.Stats().Waiting) })
	gauge("resources", "Resources that have a mark.", func() float64 { return float64(marks.known.Load()) })
	m.registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "holdfast_gateway_claims_total",
		Help: "Marks that were raised."}, func() float64 { return float64(marks.claims.Load()) }))
}

// gatewayLog writes to stderr, in words or in JSON.
type gatewayLog struct{ json bool }

// gatewayEvent is one line of --json. Times are Unix times, and both they and durations are in
// seconds.
type gatewayEvent struct {
	Time          float64     `json:"time"`
	Event         string      `json:"event"`
	Address       string      `json:"address,omitempty"`
	Admin         string      `json:"admin,omitempty"`
	Upstream      string      `json:"upstream,omitempty"`
	Marks         string      `json:"marks,omitempty"`
	Resources     *int64      `json:"resources,omitempty"`
	RefuseUnknown *float64    `json:"refuse_unknown,omitempty"`
	Reason        string      `json:"reason,omitempty"`
	Method        string      `json:"method,omitempty"`
	Path          string      `json:"path,omitempty"`
	Resource      string      `json:"resource,omitempty"` // of a request; else what --resource says
	Token         fence.Token `json:"token,omitempty"`
	Status        int         `json:"status,omitempty"`
	Outcome       string      `json:"outcome,omitempty"`
	Took          float64     `json:"took,omitempty"`
	Code          *int        `json:"code,omitempty"`
	Error         string      `json:"error,omitempty"`
}

func (l gatewayLog) line(e gatewayEvent, text string) string {
	if !l.json {
		return text
	}
	e.Time = unixTime(time.Now())
	line, _ := json.Marshal(e) // it holds nothing that JSON cannot say
	return string(line)
}

// tell writes the event, or the text that says the same to people.
func (l gatewayLog) tell(e gatewayEvent, text string) {
	if l.json {
		stderr.say(l.line(e, ""))
		return
	}
	say("%s", text)
}

// failed tells why the gateway ends. What it returns has the code only where that is told.
func (l gatewayLog) failed(err error) error {
	e, ok := errors.AsType[*exit](err)
	if !l.json || !ok || e.err == nil {
		return err
	}
	l.tell(gatewayEvent{Event: "failed", Code: &e.code, Error: e.err.Error()}, "")
	return &exit{code: e.code}
}

// errors is for what net/http finds wrong with connections.
func (l gatewayLog) errors() *stdlog.Logger { return stdlog.New(httpErrors{l}, "", 0) }

type httpErrors struct{ log gatewayLog }

func (h httpErrors) Write(b []byte) (int, error) {
	text := strings.TrimSpace(string(b))
	h.log.tell(gatewayEvent{Event: "connection", Error: text}, text)
	return len(b), nil
}

// logRequest writes a line of the access log, and waits for it: none is left out.
func (g *gateway) logRequest(r *http.Request, status int, outcome string, took time.Duration) {
	e := gatewayEvent{Event: "request", Method: r.Method, Path: r.URL.Path, Status: status, Outcome: outcome, Took: took.Seconds()}
	e.Token, _ = httpfence.ParseHeader(r.Header) // zero where there is none
	if e.Token != 0 {
		e.Resource, _ = g.plan.resource(r)
	}
	fmt.Fprintln(os.Stderr, g.log.line(e, fmt.Sprintf("%s %s %q resource %q token %v status %d %s %v",
		time.Now().UTC().Format("2006-01-02T15:04:05.000Z"), e.Method, e.Path, e.Resource, e.Token, status, outcome, took.Round(time.Microsecond))))
}
