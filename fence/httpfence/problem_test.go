package httpfence_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/httpfence"
)

var kinds = []error{
	httpfence.ErrMissing, fence.ErrStale, fence.ErrNoResource, fence.ErrUnclaimed, fence.ErrApplied,
	fence.ErrBusy, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrInvalid,
}

// What WriteError writes, ReadError reads: the same kind and no other, and no secrets.
func TestProblems(t *testing.T) {
	secret := errors.New("password of db.internal is hunter2")
	of := func(kind error) error { return &fence.Error{Kind: kind, Resource: "r\"1", Err: secret} }
	for _, tt := range []struct {
		err    error
		status int
		retry  string
		kind   error
	}{
		{&fence.StaleError{Resource: "r\"1", Token: 1<<53 + 1, Seen: 1<<63 - 1}, 412, "", fence.ErrStale},
		{fmt.Errorf("transfer: %w", &fence.StaleError{Resource: "r\"1", Token: 1, Seen: 2}), 412, "", fence.ErrStale},
		{httpfence.ErrMissing, 428, "", httpfence.ErrMissing},
		{of(fence.ErrBusy), 503, "1", fence.ErrBusy},
		{of(fence.ErrUnavailable), 503, "1", fence.ErrUnavailable},
		{&fence.Error{Kind: fence.ErrUnavailable, Resource: "r\"1", Err: of(fence.ErrUncertain)}, 503, "1", fence.ErrUnavailable},
		{&fence.Error{Kind: fence.ErrUncertain, Resource: "r\"1", Err: of(fence.ErrBusy)}, 500, "", fence.ErrUncertain},
		{of(fence.ErrApplied), 409, "", fence.ErrApplied},
		{of(fence.ErrUnclaimed), 409, "", fence.ErrUnclaimed},
		{of(fence.ErrNoResource), 404, "", fence.ErrNoResource},
		{fmt.Errorf("%w: %w", fence.ErrBusy, secret), 503, "1", fence.ErrBusy},
		{fence.CheckToken(0), 400, "", fence.ErrInvalid},
		{fence.CheckResource(""), 400, "", fence.ErrInvalid},
		{&fence.InvalidError{Field: "column", Value: "hunter2", Rule: "hunter2"}, 500, "", fence.ErrInvalid},
	} {
		w := httptest.NewRecorder()
		w.Header().Set("Content-Length", "3")
		if !httpfence.WriteError(w, tt.err) {
			t.Errorf("%v: not taken", tt.err)
			continue
		}
		resp := w.Result()
		body := w.Body.String()
		if resp.StatusCode != tt.status || resp.Header.Get("Retry-After") != tt.retry || resp.Header.Get("Content-Type") != "application/problem+json" || resp.Header.Get("Content-Length") != "" {
			t.Errorf("%v: %s, %v", tt.err, resp.Status, resp.Header)
		}
		var p struct {
			Type, Title, Detail, Resource string
			Status                        int
		}
		if err := json.Unmarshal([]byte(body), &p); err != nil || p.Status != tt.status || p.Title == "" || p.Detail == "" || !strings.HasPrefix(p.Type, "urn:holdfast:") {
			t.Errorf("%v: %v in %s", tt.err, err, body)
		}
		if strings.Contains(body, "hunter2") {
			t.Errorf("%v: tells a secret: %s", tt.err, body)
		}
		got := httpfence.ReadError(resp)
		for _, kind := range kinds {
			if errors.Is(got, kind) != (kind == tt.kind) {
				t.Errorf("%v was read as %v", tt.err, got)
			}
		}
		var stale, want *fence.StaleError
		if errors.As(tt.err, &want) && (!errors.As(got, &stale) || *stale != *want) {
			t.Errorf("%+v was read as %+v", want, stale)
		}
		var e, wantE *fence.Error
		if errors.As(tt.err, &wantE) && (!errors.As(got, &e) || e.Resource != wantE.Resource) {
			t.Errorf("%v was read as %v", tt.err, got)
		}
		if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != body {
			t.Errorf("the body after ReadError: %q, %v", rest, err)
		}
	}
	for _, err := range []error{nil, io.EOF, context.Canceled} {
		w := httptest.NewRecorder()
		if httpfence.WriteError(w, err) || w.Body.Len() != 0 || len(w.Header()) != 0 {
			t.Errorf("%v was written: %v %s", err, w.Header(), w.Body)
		}
	}
}

// Answers of others say nothing.
func TestReadErrorOfOthers(t *testing.T) {
	stale := `{"type":"urn:holdfast:stale-token","status":412,"resource":"r","token":"5","seen":"6"}`
	for _, tt := range []struct {
		name, media string
		status      int
		body        string
	}{
		{"a page", "text/html", 412, "<html>precondition failed</html>"},
		{"a page that looks like ours", "text/html", 412, stale},
		{"plain json", "application/json", 412, stale},
		{"no media type", "", 412, stale},
		{"somebody else's problem", "application/problem+json", 412, `{"type":"about:blank","status":412,"token":"5","seen":"6"}`},
		{"no type", "application/problem+json", 412, `{"token":"5","seen":"6"}`},
		{"a type of ours that there is not", "application/problem+json", 412, `{"type":"urn:holdfast:x"}`},
		{"another status", "application/problem+json", 409, stale},
		{"success", "application/problem+json", 200, stale},
		{"numbers", "application/problem+json", 412, `{"type":"urn:holdfast:stale-token","token":5,"seen":6}`},
		{"seen below token", "application/problem+json", 412, strings.Replace(stale, `"6"`, `"4"`, 1)},
		{"seen equal to token", "application/problem+json", 412, strings.Replace(stale, `"6"`, `"5"`, 1)},
		{"no token", "application/problem+json", 412, strings.Replace(stale, `"5"`, `""`, 1)},
		{"bad seen", "application/problem+json", 412, strings.Replace(stale, `"6"`, `"06"`, 1)},
		{"cut off", "application/problem+json", 412, stale[:40]},
		{"too long", "application/problem+json", 412, `{"detail":"` + strings.Repeat("x", 64<<10) + `",` + stale[1:]},
		{"empty", "application/problem+json", 412, ""},
	} {
		read := &counter{r: strings.NewReader(tt.body)}
		resp := &http.Response{StatusCode: tt.status, Header: http.Header{"Content-Type": {tt.media}}, Body: read}
		if err := httpfence.ReadError(resp); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if read.n > 64<<10 {
			t.Errorf("%s: %d bytes were read", tt.name, read.n)
		}
		if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != tt.body {
			t.Errorf("%s: the body has changed: %.100q, %v", tt.name, rest, err)
		}
		if resp.Body.Close(); !read.closed {
			t.Errorf("%s: the body is not closed", tt.name)
		}
	}
	resp := &http.Response{StatusCode: 412, Header: http.Header{"Content-Type": {"Application/Problem+JSON; charset=utf-8"}}, Body: io.NopCloser(strings.NewReader(stale))}
	if err := httpfence.ReadError(resp); !errors.Is(err, fence.ErrStale) {
		t.Errorf("a media type in other letters, with a parameter: %v", err)
	}
}

type counter struct {
	r      io.Reader
	n      int
	closed bool
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += n
	return n, err
}

func (c *counter) Close() error {
	c.closed = true
	return nil
}
