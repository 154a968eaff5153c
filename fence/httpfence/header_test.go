package httpfence_test

import (
	"errors"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

const alt = "X-Fencing-Token"

func TestParseHeader(t *testing.T) {
	header := func(pairs ...string) http.Header {
		h := http.Header{}
		for i := 0; i < len(pairs); i += 2 {
			h.Add(pairs[i], pairs[i+1])
		}
		return h
	}
	for _, tt := range []struct {
		h    http.Header
		want fence.Token
		err  error
	}{
		{nil, 0, httpfence.ErrMissing},
		{header("Token", "5"), 0, httpfence.ErrMissing},
		{http.Header{httpfence.Header: nil}, 0, httpfence.ErrMissing},
		{header(httpfence.Header, "5"), 5, nil},
		{header("fencing-token", "5"), 5, nil},
		{header(alt, "5"), 5, nil},
		{header(httpfence.Header, "9223372036854775807"), 1<<63 - 1, nil},
		{header(httpfence.Header, "1795972895835210"), 1795972895835210, nil},
		{header(httpfence.Header, "5", alt, "5"), 5, nil},
		{header(httpfence.Header, "5", alt, "6"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "5", alt, "05"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "5", httpfence.Header, "5"), 0, fence.ErrInvalid},
		{header(alt, "5", alt, "5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "5", alt, "5", alt, "5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, ""), 0, fence.ErrInvalid},
		{header(alt, ""), 0, fence.ErrInvalid},
		{header(httpfence.Header, "", alt, "5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "5, 5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "0"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "-5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "+5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, " 5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "5 "), 0, fence.ErrInvalid},
		{header(httpfence.Header, "1 2"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "05"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "0x5"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "ff"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "5.0"), 0, fence.ErrInvalid},
		{header(httpfence.Header, "1e3"), 0, fence.ErrInvalid},
		{header(httpfence.Header, `"5"`), 0, fence.ErrInvalid},
		{header(httpfence.Header, "9223372036854775808"), 0, fence.ErrInvalid},
		{header(httpfence.Header, strings.Repeat("1", 8000)), 0, fence.ErrInvalid},
	} {
		got, err := httpfence.ParseHeader(tt.h)
		if got != tt.want || !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) {
			t.Errorf("%.80q: %v, %v, want %v, %v", tt.h, got, err, tt.want, tt.err)
		}
		if err != nil && (len(err.Error()) > 400 || strings.Contains(err.Error(), "\n")) {
			t.Errorf("%.80q: not one short line: %v", tt.h, err)
		}
	}
}

var tokenText = regexp.MustCompile(`\A[1-9][0-9]{0,18}\z`)

func FuzzParseHeader(f *testing.F) {
	for _, v := range []string{"5", "", "0", "05", "-1", "9223372036854775807", "9223372036854775808", "1,2", " 1", "1\n"} {
		f.Add(uint8(1), v, "")
		f.Add(uint8(2), v, "7")
		f.Add(uint8(6), "7", v)
		f.Add(uint8(3), v, v)
	}
	f.Fuzz(func(t *testing.T, shape uint8, a, b string) {
		h := http.Header{}
		for range shape & 3 {
			h.Add(httpfence.Header, a)
		}
		for range shape >> 2 & 3 {
			h.Add(alt, b)
		}
		main, other := h.Values(httpfence.Header), h.Values(alt)
		all := append(append([]string{}, main...), other...)
		good := len(all) > 0 && len(main) <= 1 && len(other) <= 1
		for _, v := range all {
			good = good && v == all[0] && tokenText.MatchString(v) && (len(v) < 19 || v <= "9223372036854775807")
		}
		got, err := httpfence.ParseHeader(h)
		switch {
		case len(all) == 0:
			if !errors.Is(err, httpfence.ErrMissing) {
				t.Fatalf("%q: %v", h, err)
			}
		case !good:
			if !errors.Is(err, fence.ErrInvalid) || got != 0 {
				t.Fatalf("%q: %v, %v", h, got, err)
			}
		case err != nil || got.String() != all[0]:
			t.Fatalf("%q: %v, %v", h, got, err)
		}
	})
}

func TestResources(t *testing.T) {
	request := func(target string) *http.Request {
		r, err := http.NewRequest("PUT", "http://x"+target, nil)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	pattern := func(p string) func(*http.Request) (string, error) {
		f, err := httpfence.ByPattern(p)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	account, sub := pattern("/accounts/{id}"), pattern("/v1/{kind}/by/{id}")
	for _, tt := range []struct {
		name   string
		f      func(*http.Request) (string, error)
		target string
		want   string // "" = refused
	}{
		{"path", httpfence.ByPath, "/", "/"},
		{"path", httpfence.ByPath, "/a/b?c=d#e", "/a/b"},
		{"path", httpfence.ByPath, "/a/b/", "/a/b"},
		{"path", httpfence.ByPath, "/%61/b", "/a/b"},
		{"path", httpfence.ByPath, "/a%20b", "/a b"},
		{"path", httpfence.ByPath, "/a..b/.c", "/a..b/.c"},
		{"path", httpfence.ByPath, "", ""},
		{"path", httpfence.ByPath, "//", ""},
		{"path", httpfence.ByPath, "/a//b", ""},
		{"path", httpfence.ByPath, "/a/b//", ""},
		{"path", httpfence.ByPath, "/a/./b", ""},
		{"path", httpfence.ByPath, "/a/../b", ""},
		{"path", httpfence.ByPath, "/a/%2e%2e/b", ""},
		{"path", httpfence.ByPath, "/a%2Fb", ""},
		{"path", httpfence.ByPath, "/a%2fb", ""},
		{"path", httpfence.ByPath, "/a%5Cb", ""},
		{"account", account, "/accounts/7", "/accounts/7"},
		{"account", account, "/accounts/7/", "/accounts/7"},
		{"account", account, "/accounts/7/transfers/9", "/accounts/7"},
		{"account", account, "/accounts/%37/x", "/accounts/7"},
		{"account", account, "/accounts", ""},
		{"account", account, "/accounts/", ""},
		{"account", account, "/account/7", ""},
		{"account", account, "/Accounts/7", ""},
		{"account", account, "/x/accounts/7", ""},
		{"account", account, "/accounts//7", ""},
		{"account", account, "/accounts/..", ""},
		{"sub", sub, "/v1/users/by/7/x", "/v1/users/by/7"},
		{"sub", sub, "/v1/users/7", ""},
		{"header", httpfence.ByHeader("account-id"), "/", ""},
	} {
		got, err := tt.f(request(tt.target))
		var invalid *fence.InvalidError
		if got != tt.want || (tt.want == "") != errors.As(err, &invalid) || invalid != nil && invalid.Field != "resource" {
			t.Errorf("%s %s: %q, %v, want %q", tt.name, tt.target, got, err, tt.want)
		}
	}
	r := request("/")
	for _, tt := range []struct {
		values []string
		want   string
	}{{[]string{"7"}, "7"}, {[]string{""}, ""}, {[]string{"7", "7"}, ""}} {
		r.Header["Account-Id"] = tt.values
		if got, err := httpfence.ByHeader("account-id")(r); got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("header %q: %q, %v", tt.values, got, err)
		}
	}
	for _, p := range []string{"", "/", "accounts", "accounts/{id}", "/a/", "//a", "/a/../b", "/{", "/{}", "/a{b}", "/{a}b", "/{a", "/a}", "/{a}{b}", "/{a...}"} {
		if f, err := httpfence.ByPattern(p); !errors.Is(err, fence.ErrInvalid) || f != nil {
			t.Errorf("pattern %q: %v", p, err)
		}
	}
}
