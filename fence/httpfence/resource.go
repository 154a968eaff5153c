package httpfence

import (
	"net/http"
	"path"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
)

// ByPath names the resource by the path of the request, decoded and without a slash at its end.
// A path that a service might read in two ways is refused by a [*fence.InvalidError]: one with
// empty segments, "." or "..", an encoded slash, or a backslash. Where a service takes more
// spellings for one resource, such as letters of either case, or parameters behind a semicolon
// that it leaves out, or where the query names it, write a function that gives all of them one
// name; a name too coarse is safe, one too fine is not.
func ByPath(r *http.Request) (string, error) {
	p := r.URL.Path
	plain := path.Clean(p)
	slash := plain != "/" && p == plain+"/"
	if !strings.HasPrefix(p, "/") || p != plain && !slash || strings.Contains(p, `\`) || strings.Contains(strings.ToLower(r.URL.RawPath), "%2f") {
		return "", invalidResource(p, "the path must be absolute and plain: no empty segment, dot segment, encoded slash or backslash")
	}
	return plain, nil
}

// ByHeader names the resource by a header of the request, which must come once, and must not be
// declared by the header Connection to be for the next hop only. The service must take the
// resource from the same header: whatever else it acts on is not guarded.
func ByHeader(name string) func(*http.Request) (string, error) {
	key := http.CanonicalHeaderKey(name)
	return func(r *http.Request) (string, error) {
		v := r.Header[key]
		switch {
		case len(v) != 1 || v[0] == "":
			return "", invalidResource("", "the header "+key+", which names it, must come once and not be empty")
		case forOneHop(r.Header, key): // a proxy drops it, and the service would act on another
			return "", invalidResource(v[0], "the header Connection must not name "+key)
		}
		return v[0], nil
	}
}

// forOneHop reports whether the header Connection names key.
func forOneHop(h http.Header, key string) bool {
	for _, list := range h["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			if strings.EqualFold(strings.Trim(name, " \t"), key) {
				return true
			}
		}
	}
	return false
}

// ByPattern names the resource by the first segments of the path: with /accounts/{id} both
// /accounts/7 and /accounts/7/transfers are the resource /accounts/7. A segment in braces stands
// for any text. Paths that do not begin like the pattern, or that [ByPath] refuses, are refused
// by a [*fence.InvalidError], and so is a pattern that is none.
func ByPattern(pattern string) (func(*http.Request) (string, error), error) {
	want := strings.Split(pattern, "/")
	if pattern == "/" || path.Clean(pattern) != pattern || want[0] != "" {
		return nil, &fence.InvalidError{Field: "pattern", Value: pattern, Rule: "must be an absolute path such as /accounts/{id}"}
	}
	for i, s := range want {
		wild := strings.HasPrefix(s, "{") && strings.HasSuffix(s, "}")
		if wild {
			s, want[i] = s[1:len(s)-1], ""
		}
		if strings.ContainsAny(s, "{}") || wild && (s == "" || strings.HasSuffix(s, "...")) {
			return nil, &fence.InvalidError{Field: "pattern", Value: pattern, Rule: "a segment in braces must be whole and have a name, as in /accounts/{id}"}
		}
	}
	return func(r *http.Request) (string, error) {
		p, err := ByPath(r)
		if err != nil {
			return "", err
		}
		got := strings.Split(p, "/")
		for i, s := range want {
			if i >= len(got) || s != "" && s != got[i] || i > 0 && got[i] == "" {
				return "", invalidResource(p, "the path must begin like "+pattern)
			}
		}
		return strings.Join(got[:len(want)], "/"), nil
	}, nil
}

func invalidResource(value, rule string) error {
	return &fence.InvalidError{Field: "resource", Value: value, Rule: rule}
}
