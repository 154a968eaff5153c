package httpfence

import (
	"errors"
	"net/http"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
)

// Transport adds the token of the request's context (see Lease.Context of package holdfast, and
// fence.WithToken) to each request as the header [Header], and ends the lease when the service
// answers that the token is stale: the context of the lease is then done, with the
// [*fence.StaleError] as its cause. The response is returned as it came, and can be read with
// [ReadError]. A Transport is safe for concurrent use.
//
// A request that has the header already, or whose context carries no token, goes out as it is.
// A request that follows a redirect gets the token only where it goes to the host name and port
// of the first one: another service has other marks, or none, and must not end the lease.
type Transport struct {
	// Base makes the requests. nil: http.DefaultTransport.
	Base http.RoundTripper

	// Key says the token of which lease a request carries, by the lease's key; "" is none. nil:
	// the lease that was put into the context last, whatever its key.
	Key func(*http.Request) string
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	out, home := r, sameHost(r)
	if token, ok := t.token(r); ok && home && r.Header[Header] == nil && r.Header[altHeader] == nil {
		out = r.WithContext(r.Context())
		if out.Header = r.Header.Clone(); out.Header == nil {
			out.Header = http.Header{}
		}
		out.Header.Set(Header, token.String())
	}
	resp, err := t.base().RoundTrip(out)
	if err != nil {
		return nil, err
	}
	if resp.Request == nil {
		resp.Request = out // what follows a redirect finds its first request by it
	}
	if home && resp.StatusCode == http.StatusPreconditionFailed {
		tellHolder(out, resp)
	}
	return resp, nil
}

// CloseIdleConnections does what its name says to Base, where that can.
func (t *Transport) CloseIdleConnections() {
	if c, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

func (t *Transport) token(r *http.Request) (token fence.Token, ok bool) {
	if t.Key != nil {
		return fence.FromContext(r.Context(), t.Key(r))
	}
	_, token, ok = fence.Innermost(r.Context())
	return token, ok
}

// tellHolder tells the holder of the token that was sent, and of no other.
func tellHolder(sent *http.Request, resp *http.Response) {
	token, err := ParseHeader(sent.Header)
	if err != nil {
		return
	}
	var stale *fence.StaleError
	if errors.As(ReadError(resp), &stale) && stale.Token == token {
		_ = fence.Stale(sent.Context(), stale.Resource, token, stale.Seen)
	}
}

// sameHost reports whether a request that a client makes because of a redirect goes where the
// first one went.
func sameHost(r *http.Request) bool {
	first := r
	for first.Response != nil && first.Response.Request != nil {
		first = first.Response.Request
	}
	return strings.EqualFold(first.URL.Hostname(), r.URL.Hostname()) && first.URL.Port() == r.URL.Port()
}
