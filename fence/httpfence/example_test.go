package httpfence_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// put stands for the work of a holder: ctx is the context of its lease.
func put(ctx context.Context, url, body string) {
	client := &http.Client{Transport: &httpfence.Transport{}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, url, strings.NewReader(body))
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	if err := httpfence.ReadError(resp); err != nil {
		fmt.Println(resp.StatusCode, err)
		return
	}
	answer, _ := io.ReadAll(resp.Body)
	fmt.Println(resp.StatusCode, string(answer))
}

// A service that is one process: the middleware keeps holders apart.
func ExampleMiddleware() {
	account, err := httpfence.ByPattern("/accounts/{id}")
	if err != nil {
		panic(err)
	}
	// The marks of a service that is restarted belong where they survive, as in sqlfence.
	gate, err := httpfence.NewGate(new(fence.Memory), httpfence.GateOptions{})
	if err != nil {
		panic(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /accounts/{id}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "written")
	})
	service := httptest.NewServer(httpfence.Middleware(gate, httpfence.Options{Resource: account})(mux))
	defer service.Close()

	url := service.URL + "/accounts/7"
	older := fence.WithToken(context.Background(), "account-7", 33) // in real life: lease.Context(ctx)
	newer := fence.WithToken(context.Background(), "account-7", 34)
	put(older, url, "balance=10")
	put(newer, url, "balance=20")
	put(older, url, "balance=30") // this holder was paused, and does not know that it has lost the lock
	put(context.Background(), url, "balance=40")
	// Output:
	// 200 written
	// 200 written
	// 412 stale fencing token 33 for "/accounts/7": 34 has been seen
	// 428 fence: "/accounts/7": no Fencing-Token header: The resource is guarded: send the token of the lease in the header Fencing-Token.
}

// A service with several instances: the middleware demands the token, and the handler's guard,
// which all instances share, checks it together with the write.
func ExampleMiddleware_severalInstances() {
	guard := new(fence.Memory) // in real life: sqlfence, and its Tx around the write
	handler := func(w http.ResponseWriter, r *http.Request) {
		token, _ := fence.FromContext(r.Context(), r.URL.Path)
		if err := guard.Claim(r.Context(), r.URL.Path, token); err != nil {
			if !httpfence.WriteError(w, err) {
				http.Error(w, "internal error", http.StatusInternalServerError)
			}
			return
		}
		fmt.Fprint(w, "written")
	}
	demand := httpfence.Middleware(nil, httpfence.Options{})
	a := httptest.NewServer(demand(http.HandlerFunc(handler)))
	defer a.Close()
	b := httptest.NewServer(demand(http.HandlerFunc(handler)))
	defer b.Close()

	put(fence.WithToken(context.Background(), "report", 8), a.URL+"/reports/1", "new")
	put(fence.WithToken(context.Background(), "report", 7), b.URL+"/reports/1", "old")
	// Output:
	// 200 written
	// 412 stale fencing token 7 for "/reports/1": 8 has been seen
}

// A stale answer ends the lease of the token that was sent.
func ExampleTransport() {
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, _ := httpfence.ParseHeader(r.Header)
		httpfence.WriteError(w, fence.Stale(r.Context(), "/accounts/7", token, 34))
	}))
	defer service.Close()
	// Lease.Context of package holdfast makes such a context.
	ctx, cancel := context.WithCancelCause(context.Background())
	ctx = fence.WithHolder(ctx, "account-7", 33, func(stale *fence.StaleError) { cancel(stale) })
	put(ctx, service.URL+"/accounts/7", "balance=30")
	fmt.Println(context.Cause(ctx))
	// Output:
	// 412 stale fencing token 33 for "/accounts/7": 34 has been seen
	// stale fencing token 33 for "/accounts/7": 34 has been seen
}

// A gateway before a service that knows nothing of tokens.
func ExampleGateway() {
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "written, with token ", r.Header.Get(httpfence.Header))
	}))
	defer service.Close()
	upstream, err := url.Parse(service.URL)
	if err != nil {
		panic(err)
	}
	gate, err := httpfence.NewGate(new(fence.Memory), httpfence.GateOptions{})
	if err != nil {
		panic(err)
	}
	gateway, err := httpfence.NewGateway(httpfence.GatewayOptions{Upstream: upstream, Gate: gate})
	if err != nil {
		panic(err)
	}
	front := httptest.NewServer(gateway)
	defer front.Close()

	put(fence.WithToken(context.Background(), "file", 34), front.URL+"/files/a", "new")
	put(fence.WithToken(context.Background(), "file", 33), front.URL+"/files/a", "old")
	// Output:
	// 200 written, with token 34
	// 412 stale fencing token 33 for "/files/a": 34 has been seen
}
