package httpfence_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

// client has a Transport, and leaves nothing behind.
func client(t testing.TB, key func(*http.Request) string) *http.Client {
	c := &http.Client{Transport: &httpfence.Transport{Base: &http.Transport{}, Key: key}}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// echo answers with the tokens that it is sent.
func echo(w http.ResponseWriter, r *http.Request) {
	io.WriteString(w, strings.Join(append(r.Header[httpfence.Header], r.Header[alt]...), "+"))
}

func TestTransport(t *testing.T) {
	s := serve(t, http.HandlerFunc(echo))
	none := t.Context()
	one := fence.WithToken(none, "a", 5)
	two := fence.WithToken(one, "b", 6)
	key := func(k string) func(*http.Request) string { return func(*http.Request) string { return k } }
	for _, tt := range []struct {
		name string
		ctx  context.Context
		key  func(*http.Request) string
		own  []string
		want string
	}{
		{"no token", none, nil, nil, ""},
		{"one", one, nil, nil, "5"},
		{"the innermost", two, nil, nil, "6"},
		{"by key", two, key("a"), nil, "5"},
		{"a key without token", one, key("b"), nil, ""},
		{"the empty key", one, key(""), nil, ""},
		{"the request has one", one, nil, []string{httpfence.Header, "9"}, "9"},
		{"the request has one by the other name", one, nil, []string{alt, "9"}, "9"},
	} {
		r, err := http.NewRequestWithContext(tt.ctx, "POST", s.URL, nil)
		if err != nil {
			t.Fatal(err)
		}
		if tt.own != nil {
			r.Header.Set(tt.own[0], tt.own[1])
		} else if tt.want != "" {
			r.Header = nil
		}
		resp, err := client(t, tt.key).Transport.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(body) != tt.want || err != nil {
			t.Errorf("%s: the service saw %q, %v, want %q", tt.name, body, err, tt.want)
		}
		if len(r.Header) != len(tt.own)/2 {
			t.Errorf("%s: the request was changed: %v", tt.name, r.Header)
		}
	}
	if resp, err := (&http.Client{Transport: new(httpfence.Transport)}).Get("http://127.0.0.1:0/"); err == nil {
		resp.Body.Close()
		t.Error("port 0 answers")
	}
}

// A stale answer ends the lease of the token that was sent, and of no other; answers of others
// do not. The response comes back whole in any case.
func TestTransportTellsTheHolder(t *testing.T) {
	problem := func(token string) string {
		return `{"type":"urn:holdfast:stale-token","status":412,"resource":"row","token":"` + token + `","seen":"9"}`
	}
	const media = "application/problem+json"
	for _, tt := range []struct {
		name, media, body string
		status            int
		own, told         string
	}{
		{"stale", media, problem("5"), 412, "", "5"},
		{"stale by the request's own header", media, problem("4"), 412, "4", "4"},
		{"a token that was not sent", media, problem("4"), 412, "", ""},
		{"a precondition of somebody else", "text/html", "<html>If-Match</html>", 412, "", ""},
		{"a problem of somebody else", media, `{"type":"about:blank"}`, 412, "", ""},
		{"another status", media, problem("5"), 409, "", ""},
	} {
		s := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", tt.media)
			w.WriteHeader(tt.status)
			io.WriteString(w, tt.body)
		}))
		told := ""
		ctx := t.Context()
		for _, token := range []fence.Token{4, 5} {
			ctx = fence.WithHolder(ctx, token.String(), token, func(e *fence.StaleError) {
				told += token.String()
				if *e != (fence.StaleError{Resource: "row", Token: token, Seen: 9}) {
					t.Errorf("%s: told %+v", tt.name, e)
				}
			})
		}
		var own []string
		if tt.own != "" {
			own = []string{httpfence.Header, tt.own}
		}
		a, err := trySend(ctx, client(t, nil), "PUT", s.URL, "", own...)
		if err != nil || a.status != tt.status || a.body != tt.body || told != tt.told {
			t.Errorf("%s: %d %q, %v; told %q, want %q", tt.name, a.status, a.body, err, told, tt.told)
		}
		if errors.Is(a.err, fence.ErrStale) != strings.HasPrefix(tt.name, "stale") && tt.told != "" {
			t.Errorf("%s: ReadError: %v", tt.name, a.err)
		}
	}
}

// The token follows a redirect on the same host and to no other, also not back from there, and a
// foreign host cannot end the lease.
func TestTransportRedirects(t *testing.T) {
	var home, other *httptest.Server
	other = serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/back":
			http.Redirect(w, r, home.URL+"/echo", http.StatusTemporaryRedirect)
		case r.URL.Path == "/stale":
			httpfence.WriteError(w, &fence.StaleError{Resource: "r", Token: 5, Seen: 6})
		default:
			echo(w, r)
		}
	}))
	home = serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch to := r.URL.Query().Get("to"); {
		case to != "":
			if r.Header.Get(httpfence.Header) != "5" {
				t.Errorf("%s came without its token", r.URL)
			}
			http.Redirect(w, r, to, http.StatusTemporaryRedirect)
		default:
			echo(w, r)
		}
	}))
	told := 0
	ctx := fence.WithHolder(t.Context(), "r", 5, func(*fence.StaleError) { told++ })
	for _, tt := range []struct{ to, want string }{
		{"/echo", "5"},
		{"/?to=/echo", "5"},
		{other.URL + "/echo", ""},
		{"/?to=" + other.URL + "/echo", ""},
		{other.URL + "/back", "5"},
		{other.URL + "/stale", ""},
	} {
		a, err := trySend(ctx, client(t, nil), "PUT", home.URL+"/?to="+tt.to, "body")
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(tt.to, "/stale") {
			if a.status != 412 || told != 0 {
				t.Errorf("a foreign 412: %d %s, told %d", a.status, a.body, told)
			}
		} else if a.body != tt.want {
			t.Errorf("to %s: the service saw %q, want %q", tt.to, a.body, tt.want)
		}
	}
	if a, err := trySend(ctx, client(t, nil), "PUT", home.URL+"/?to="+other.URL+"/stale", "", httpfence.Header, "5"); err != nil || a.status != 412 || told != 0 {
		t.Errorf("a foreign 412 to the request's own header: %d, %v, told %d", a.status, err, told)
	}
	if a, err := trySend(ctx, client(t, nil), "PUT", other.URL+"/stale", ""); err != nil || a.status != 412 || told != 1 {
		t.Errorf("asked directly: %d, %v, told %d", a.status, err, told)
	}
}
