package httpfence

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/holdfast-go/holdfast/fence"
)

// Options say which requests are guarded, and which resource they are about.
type Options struct {
	// Resource names the resource of a request: see [ByPath], [ByHeader] and [ByPattern]. All
	// requests that change one thing must give it one name. An error that is none of package
	// fence's is answered as 503 unavailable. nil: ByPath.
	Resource func(*http.Request) (string, error)

	// Guarded says which requests need a token; one that carries a token is guarded in any case.
	// nil: all but GET, HEAD, OPTIONS and TRACE, and of these those that ask for an upgrade of the
	// connection, through which anything can be sent.
	Guarded func(*http.Request) bool
}

func (o *Options) setDefaults() {
	if o.Resource == nil {
		o.Resource = ByPath
	}
	if o.Guarded == nil {
		o.Guarded = guarded
	}
}

func guarded(r *http.Request) bool { return !safe(r) || r.Header["Upgrade"] != nil }

func safe(r *http.Request) bool {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

// identify returns the resource and the token of a request, and a zero token where it is not
// guarded.
func (o *Options) identify(r *http.Request) (resource string, t fence.Token, err error) {
	t, missing := ParseHeader(r.Header)
	switch {
	case missing == nil:
	case !errors.Is(missing, ErrMissing):
		return "", 0, missing
	case !o.Guarded(r):
		return "", 0, nil
	}
	if resource, err = o.Resource(r); err == nil {
		err = fence.CheckResource(resource)
	}
	if err != nil {
		return "", 0, err
	}
	if missing != nil {
		return "", 0, &fence.Error{Kind: ErrMissing, Resource: resource}
	}
	return resource, t, nil
}

// Middleware guards a handler: requests enter the gate before it is called and leave when it has
// returned, or panicked, and a connection that it has hijacked is closed. Those that may not
// enter are answered by [WriteError]. The handler finds the token of the request in its context
// (fence.FromContext with the name of the resource), and a guard that is given it, such as
// sqlfence's, finds the same.
//
// The gate is a fence for this process alone. With several instances of the service, or other
// ways to the resource, another may let in a larger token while a handler here is paused, and
// this handler would write all the same. Then the handler's own transaction must check the
// token, and the gate does no more than refuse early. Where that is so, gate may be nil: the
// middleware then demands the token and hands it on, and all the checking is the handler's,
// which answers by WriteError what its guard says.
//
// What a handler leaves behind when it returns, such as goroutines, is not waited for. A client
// that is stopped keeps a handler that writes to it, or reads from it, in its place: give the
// server a ReadTimeout and a WriteTimeout.
func Middleware(gate *Gate, o Options) func(http.Handler) http.Handler {
	o.setDefaults()
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			resource, t, err := o.identify(r)
			if err != nil {
				refuse(w, err)
				return
			}
			if t == 0 {
				next.ServeHTTP(w, r)
				return
			}
			if gate != nil {
				leave, err := gate.Enter(r.Context(), resource, t)
				if err != nil {
					refuse(w, err)
					return
				}
				if h := hijackerOf(w); h != nil {
					stay := &visit{left: leave}
					stay.parts.Store(1)
					w, leave = &hijackable{w, h, stay}, stay.leave
				}
				defer leave()
			}
			next.ServeHTTP(w, r.WithContext(fence.WithToken(r.Context(), resource, t)))
		})
	}
}

// hijackerOf returns what an [http.ResponseController] of w would ask, nil where there is none.
func hijackerOf(w http.ResponseWriter) http.Hijacker {
	for {
		switch v := w.(type) {
		case http.Hijacker:
			return v
		case interface{ Unwrap() http.ResponseWriter }:
			w = v.Unwrap()
		default:
			return nil
		}
	}
}

// visit ends when all its parts have: the handler, and a hijacked connection.
type visit struct {
	parts atomic.Int32
	left  func()
}

func (v *visit) leave() {
	if v.parts.Add(-1) == 0 {
		v.left()
	}
}

// hijackable is the ResponseWriter of a connection that can be hijacked.
type hijackable struct {
	http.ResponseWriter
	hijacker http.Hijacker
	visit    *visit
}

func (h *hijackable) Unwrap() http.ResponseWriter { return h.ResponseWriter }

// Flush does nothing where there is nothing to flush.
func (h *hijackable) Flush() { http.NewResponseController(h.ResponseWriter).Flush() }

func (h *hijackable) ReadFrom(r io.Reader) (int64, error) { return io.Copy(h.ResponseWriter, r) }

func (h *hijackable) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := h.hijacker.Hijack()
	if err != nil {
		return nil, nil, err
	}
	h.visit.parts.Add(1)
	return &hijacked{Conn: conn, leave: sync.OnceFunc(h.visit.leave)}, rw, nil
}

// hijacked is a connection that has left the server.
type hijacked struct {
	net.Conn
	leave func()
}

func (h *hijacked) Close() error {
	defer h.leave()
	return h.Conn.Close()
}
