package httpfence

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

const (
	defaultUpstreamTimeout = time.Minute
	partingLimit           = time.Second // to tell the client that UpstreamTimeout has ended
)

// GatewayOptions describe a [Gateway].
type GatewayOptions struct {
	Upstream *url.URL                            // the service: http or https, a host, perhaps a path that goes before that of the request; required
	Gate     *Gate                               // required
	Resource func(*http.Request) (string, error) // as in [Options]
	Guarded  func(*http.Request) bool            // as in [Options]; nil does not count the offer of h2c, which goes no further

	// UpstreamTimeout bounds each guarded request, from its entry to the end of the answer, and
	// also a connection that it has upgraded. A client that does not read its answer by then, nor
	// in the second after it, is cut off. It should be larger than what the service allows
	// itself, since a request that is cut off may still be at work. 0 = 1 min.
	UpstreamTimeout time.Duration

	// Transport makes the requests to the service. nil: a transport of the gateway's own that
	// uses no proxy and keeps enough idle connections.
	Transport http.RoundTripper

	// Failed is told of each request whose answer did not come from the service, or not whole:
	// the error answers fence.ErrUnavailable where nothing was sent, and else fence.ErrUncertain.
	// The resource is empty where the request was not guarded. It must not block. nil: nobody.
	Failed func(r *http.Request, resource string, err error)
}

// Gateway is a reverse proxy before a service that knows nothing of tokens. A guarded request
// enters the gate before it is passed on, and leaves when the service has answered it to the
// end: no request of a lower token is passed on after one of a higher, and not before those of
// lower ones that are on their way have been answered. A client that goes away does not end its
// request at the service: the gateway waits for the answer, within UpstreamTimeout, and discards
// it. The service sees the token as the header [Header], and X-Forwarded-For, -Host and -Proto
// as the gateway sees them; the Host header is that of Upstream.
//
// Where the service cannot be reached, does not answer in time, or breaks off, the client gets
// 502 or 504 as problem+json, which [ReadError] reads: [fence.ErrUncertain], or
// [fence.ErrUnavailable] where the request was not sent. An answer that breaks off in its middle
// ends the client's connection.
//
// What a gateway cannot know: whether a request is still at work in the service after its answer
// did not come, because the connection broke, UpstreamTimeout ended or the gateway was killed,
// nor with what came last over a connection that was upgraded. It keeps the place of such a
// request for GateOptions.Settle longer; a service that works on for longer than that writes
// after the next holder has begun. Nor does it know of a way to the
// service that goes around it, or of what the service starts and does not wait for. Run one
// gateway before a service: see [Gate].
type Gateway struct {
	proxy *httputil.ReverseProxy
	gate  *Gate
	which Options
	limit time.Duration
	fail  func(*http.Request, string, error)
}

// NewGateway returns a gateway, and does no I/O. Options that cannot serve are refused by a
// [*fence.InvalidError].
func NewGateway(o GatewayOptions) (*Gateway, error) {
	switch u := o.Upstream; {
	case u == nil:
		return nil, &fence.InvalidError{Field: "Upstream", Rule: "must not be nil"}
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return nil, &fence.InvalidError{Field: "Upstream", Value: u.Redacted(), Rule: "must be an http or https URL with a host"}
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return nil, &fence.InvalidError{Field: "Upstream", Value: u.Redacted(), Rule: "must have no user, query or fragment"}
	case o.Gate == nil:
		return nil, &fence.InvalidError{Field: "Gate", Rule: "must not be nil"}
	case o.UpstreamTimeout < 0:
		return nil, &fence.InvalidError{Field: "UpstreamTimeout", Value: o.UpstreamTimeout.String(), Rule: "must not be negative"}
	}
	g := &Gateway{gate: o.Gate, which: Options{Resource: o.Resource, Guarded: o.Guarded}, limit: o.UpstreamTimeout, fail: o.Failed}
	if g.which.Guarded == nil {
		g.which.Guarded = func(r *http.Request) bool { return !safe(r) || r.Header["Upgrade"] != nil && !offersH2C(r) }
	}
	g.which.setDefaults()
	if g.limit == 0 {
		g.limit = defaultUpstreamTimeout
	}
	if o.Transport == nil {
		o.Transport = newTransport()
	}
	upstream := *o.Upstream
	g.proxy = &httputil.ReverseProxy{
		Rewrite:      func(pr *httputil.ProxyRequest) { rewrite(pr, &upstream) },
		Transport:    &carrier{o.Transport},
		BufferPool:   &buffers{},
		ErrorLog:     log.New(io.Discard, "", 0), // Failed is told instead
		ErrorHandler: answerFailure,
	}
	return g, nil
}

func newTransport() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Proxy = nil // a proxy in between would keep the order to itself
	t.DisableCompression = true
	t.MaxIdleConns, t.MaxIdleConnsPerHost = 0, 1024
	return t
}

// CloseIdleConnections does what its name says to the transport, where that can.
func (g *Gateway) CloseIdleConnections() {
	if c, ok := g.proxy.Transport.(*carrier).RoundTripper.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// ServeHTTP implements [http.Handler].
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, t, err := g.which.identify(r)
	if err != nil {
		refuse(w, err)
		return
	}
	p := &passage{resource: resource, token: t}
	ctx := r.Context()
	defer g.tell(r, p)
	if t != 0 {
		leave, err := g.gate.Enter(ctx, resource, t)
		if err != nil {
			refuse(w, err)
			return
		}
		defer g.leave(p, leave)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), g.limit)
		defer cancel()
		defer cutAfter(ctx, w)()
	}
	g.proxy.ServeHTTP(w, r.WithContext(context.WithValue(ctx, passageKey{}, p)))
}

// cutAfter bounds how long after the end of ctx the connection to the client is waited for: a
// client that is stopped would keep its place for as long as it is. stop ends that.
func cutAfter(ctx context.Context, w http.ResponseWriter) (stop func()) {
	done := make(chan struct{})
	after := context.AfterFunc(ctx, func() {
		defer close(done)
		conn, at := http.NewResponseController(w), time.Now().Add(partingLimit)
		_ = conn.SetWriteDeadline(at) // where there is none, there is no client to wait for
		_ = conn.SetReadDeadline(at)
	})
	return func() {
		if !after() {
			<-done // the connection's next request must not be cut
		}
	}
}

// leave gives the place of a request back, later where the service may still be at work on it.
func (g *Gateway) leave(p *passage, leave func()) {
	if p.over || g.gate.settle == 0 {
		leave()
		return
	}
	time.AfterFunc(g.gate.settle, leave)
}

// tell reports a failure of the service; a client that goes away is none.
func (g *Gateway) tell(r *http.Request, p *passage) {
	if g.fail == nil || p.err == nil || p.token == 0 && r.Context().Err() != nil {
		return
	}
	kind := fence.ErrUncertain
	if p.over {
		kind = fence.ErrUnavailable
	}
	g.fail(r, p.resource, &fence.Error{Kind: kind, Resource: p.resource, Err: p.err})
}

// passage is one request on its way.
type passage struct {
	resource string
	token    fence.Token // zero: not guarded
	sent     bool        // to the transport
	over     bool        // the service does no more about it
	err      error       // why not
}

type passageKey struct{}

func passageOf(r *http.Request) *passage { return r.Context().Value(passageKey{}).(*passage) }

func rewrite(pr *httputil.ProxyRequest, upstream *url.URL) {
	pr.SetURL(upstream)
	pr.SetXForwarded()
	h := pr.Out.Header
	if p := passageOf(pr.In); p.token != 0 {
		delete(h, altHeader)
		h[Header] = []string{p.token.String()}
	}
	if offersH2C(pr.In) { // through which requests would pass unseen
		h.Del("Upgrade")
		h.Del("Connection")
		h.Del("Http2-Settings")
	}
	if pr.Out.Body != nil {
		pr.Out.Body = &sent{ReadCloser: pr.Out.Body}
	}
}

// offersH2C reports whether the request would go on over HTTP/2, which many clients offer with
// each one; the gateway does not pass that on.
func offersH2C(r *http.Request) bool { return strings.EqualFold(r.Header.Get("Upgrade"), "h2c") }

// sent is the body of a request. It remembers that the client did not send it whole.
type sent struct {
	io.ReadCloser
	broken atomic.Bool
}

func (s *sent) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		s.broken.Store(true)
	}
	return n, err
}

// carrier passes requests on, and makes sure that answers are read to their end.
type carrier struct{ http.RoundTripper }

func (c *carrier) RoundTrip(r *http.Request) (*http.Response, error) {
	p := passageOf(r)
	p.sent = true
	resp, err := c.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols { // which has no end that the service tells
		resp.Body = &received{resp.Body, p}
	}
	return resp, nil
}

// received is the body of an answer.
type received struct {
	io.ReadCloser
	p *passage
}

func (b *received) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	switch {
	case err == io.EOF:
		b.p.over = true
	case err != nil && b.p.err == nil:
		b.p.err = err
	}
	return n, err
}

// Close reads what a client that has gone did not want: the service may be at work until it has
// said all. The context of the request bounds it.
func (b *received) Close() error {
	if b.p.token != 0 && !b.p.over && b.p.err == nil {
		_, _ = io.Copy(io.Discard, b)
	}
	return b.ReadCloser.Close()
}

// answerFailure answers a request that the service did not answer.
func answerFailure(w http.ResponseWriter, r *http.Request, err error) {
	p := passageOf(r)
	p.err, p.over = err, notSent(p, r, err)
	kind := fence.ErrUncertain
	if p.over || !guarded(r) {
		kind = fence.ErrUnavailable
	}
	answer := kindOf(kind).problem(p.resource)
	if kind == fence.ErrUnavailable {
		answer.Title = "service unavailable"
		answer.Detail = "The service behind the gateway could not be reached, or did not answer a request that changes nothing. Nothing was done."
	}
	answer.Status = failureStatus(p, r, err)
	write(w, answer)
}

func failureStatus(p *passage, r *http.Request, err error) int {
	var tooLarge *http.MaxBytesError
	var timeout net.Error
	body, _ := r.Body.(*sent)
	switch {
	case errors.As(err, &tooLarge):
		return http.StatusRequestEntityTooLarge
	case !p.sent || body != nil && body.broken.Load():
		return http.StatusBadRequest
	case errors.As(err, &timeout) && timeout.Timeout():
		return http.StatusGatewayTimeout
	}
	return http.StatusBadGateway
}

// notSent reports whether the request has not reached the service for certain: there was no
// connection. One that the transport may have sent before, on another connection, may have.
func notSent(p *passage, r *http.Request, err error) bool {
	var op *net.OpError
	again := safe(r) || r.Header["Idempotency-Key"] != nil || r.Header["X-Idempotency-Key"] != nil
	return !p.sent || !again && errors.As(err, &op) && op.Op == "dial"
}

// buffers are for the bodies of answers.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if buf, ok := b.pool.Get().(*[32 << 10]byte); ok {
		return buf[:]
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(buf []byte) { b.pool.Put((*[32 << 10]byte)(buf)) }
