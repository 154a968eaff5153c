package httpfence

import (
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"
)

// GatewayOptions describe a [Gateway].
type GatewayOptions struct {
	Upstream        *url.URL                            // the service; required: http or https, with a host
	Gate            *Gate                               // required
	Resource        func(*http.Request) (string, error) // as in [Options]
	Guarded         func(*http.Request) bool            // as in [Options]
	UpstreamTimeout time.Duration                       // 0 = 1 min
	Transport       http.RoundTripper                   // nil: an own *http.Transport

	// Failed is told of each request whose answer from the service did not come, or not whole.
	// The resource is empty for a request that was not guarded. It must not block. nil: nobody.
	Failed func(r *http.Request, resource string, err error)
}

// Gateway is a reverse proxy before a service that knows nothing of tokens.
type Gateway struct {
	proxy *httputil.ReverseProxy
}

// NewGateway returns a gateway.
func NewGateway(o GatewayOptions) (*Gateway, error) { return &Gateway{}, nil }

// ServeHTTP implements [http.Handler].
func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) { g.proxy.ServeHTTP(w, r) }
