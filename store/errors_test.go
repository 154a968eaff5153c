package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var kinds = []error{store.ErrHeld, store.ErrLost, store.ErrReleased, store.ErrUncertain, store.ErrUnavailable,
	store.ErrUnsupported, store.ErrInvalid}

// Each error answers the kinds that it should, and no other, also when wrapped.
func TestErrorKinds(t *testing.T) {
	held := &store.HeldError{Holder: store.Holder{Key: "k", Label: "host:1"}}
	for _, c := range []struct {
		err  error
		want []error
	}{
		{held, []error{store.ErrHeld}},
		{&store.LostError{}, []error{store.ErrLost}},
		{&store.LostError{By: held}, []error{store.ErrLost, store.ErrHeld}},
		{&store.InvalidError{Field: "key"}, []error{store.ErrInvalid}},
		{store.ErrReleased, []error{store.ErrReleased}},
	} {
		for _, err := range []error{c.err, fmt.Errorf("acquire: %w", c.err)} {
			for _, kind := range kinds {
				want := false
				for _, w := range c.want {
					want = want || w == kind
				}
				if got := errors.Is(err, kind); got != want {
					t.Errorf("%T: errors.Is(%q) = %v, want %v", c.err, kind, got, want)
				}
			}
		}
	}
	var as *store.HeldError
	if !errors.As(error(&store.LostError{By: held}), &as) || as != held {
		t.Error("the holder of a LostError cannot be reached")
	}
	if errors.As(error(&store.LostError{}), &as) {
		t.Errorf("a LostError without a holder answers %v", as)
	}
}

func TestErrorTexts(t *testing.T) {
	for want, err := range map[string]error{
		"held by another": &store.HeldError{},
		`held by "host:1", for at most 1.5s unless extended, place 3 in the queue`: &store.HeldError{
			Holder: store.Holder{Label: "host:1", TTL: 1500 * time.Millisecond}, Place: 3},
		`held by another library's lock "abc", without a ttl, or data at the key`: &store.HeldError{
			Holder: store.Holder{Owner: "abc", Foreign: true, NoTTL: true}},
		`taken from its holder: "broken by host:1", free in at most 1.5s`: &store.HeldError{
			Holder: store.Holder{Label: "broken by host:1", TTL: 1500 * time.Millisecond, Broken: true}},
		`held by "host:1" until it releases, or its session ends, place 3 in the queue`: &store.HeldError{
			Holder: store.Holder{Label: "host:1", TTL: 1500 * time.Millisecond, Session: true}, Place: 3},
		`taken from its holder: "broken by host:1", free when its holder notices, or where that died, when its session ends`: &store.HeldError{
			Holder: store.Holder{Label: "broken by host:1", TTL: 1500 * time.Millisecond, Session: true, Broken: true}},
		`held by "a\nb"`:                       &store.HeldError{Holder: store.Holder{Label: "a\nb"}},
		"lease lost: gone from the store":      &store.LostError{},
		"lease lost: held by another":          &store.LostError{By: &store.HeldError{}},
		`invalid TTL "0s": must be positive`:   &store.InvalidError{Field: "TTL", Value: "0s", Rule: "must be positive"},
		"invalid nodes: must be at least one":  &store.InvalidError{Field: "nodes", Rule: "must be at least one"},
		`invalid key "a\x00": must not be NUL`: &store.InvalidError{Field: "key", Value: "a\x00", Rule: "must not be NUL"},
	} {
		if got := err.Error(); got != want {
			t.Errorf("text %q, want %q", got, want)
		}
	}
}

func TestCheckKey(t *testing.T) {
	long := strings.Repeat("k", store.MaxKeyLen)
	for _, key := range []string{"k", " ", "\n", "\xff", "a:fence:", ":fenc", "fence", "a:Fence", "{holdfast}", "{holdfast}x:",
		"x{holdfast}:", "a/../b", ".", long, long[:511]} {
		if err := store.CheckKey(key); err != nil {
			t.Errorf("key %q is refused: %v", key, err)
		}
	}
	for _, key := range []string{"", "\x00", "a\x00", "a\x00b", long + "k", strings.Repeat("\u9396", 171), ":fence", "a:fence", ":queue",
		"a:queue", "{holdfast}:", "{holdfast}:node"} {
		refused(t, key, store.CheckKey(key))
	}
}

func refused(t *testing.T, key string, err error) {
	t.Helper()
	var invalid *store.InvalidError
	if !errors.As(err, &invalid) || !errors.Is(err, store.ErrInvalid) {
		t.Fatalf("key %.100q answers %v, want an *InvalidError", key, err)
	}
	if invalid.Field != "key" || invalid.Value != key || invalid.Rule == "" {
		t.Errorf("key %.100q: the error does not name the value and the rule: %+v", key, invalid)
	}
	if text := err.Error(); strings.ContainsAny(text, "\r\n\x00") || len(text) > 600 {
		t.Errorf("key %.100q: the error is not one short line: %q", key, text)
	}
}

func FuzzCheckKey(f *testing.F) {
	for _, key := range []string{"", "k", "a\x00", "a:fence", ":queue", "{holdfast}:x", strings.Repeat("k", 513)} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		err := store.CheckKey(key)
		good := len(key) >= 1 && len(key) <= 512
		for i := range len(key) {
			good = good && key[i] != 0
		}
		for _, tail := range []string{":fence", ":queue"} {
			good = good && !(len(key) >= 6 && key[len(key)-6:] == tail)
		}
		good = good && !(len(key) >= 11 && key[:11] == "{holdfast}:")
		if good != (err == nil) {
			t.Fatalf("CheckKey(%q) = %v", key, err)
		}
		if err != nil {
			refused(t, key, err)
		}
	})
}

func TestCheckTTL(t *testing.T) {
	info := store.Info{MinTTL: time.Second, MaxTTL: 30 * time.Second}
	for _, c := range []struct {
		info store.Info
		ttl  time.Duration
		rule string // part of it; empty: taken
	}{
		{info, time.Second, ""},
		{info, 30 * time.Second, ""},
		{info, time.Second - 1, "at least 1s"},
		{info, 30*time.Second + 1, "at most 30s"},
		{info, 0, "positive"},
		{info, -time.Second, "positive"},
		{store.Info{}, 100 * time.Millisecond, ""},
		{store.Info{}, 100*time.Millisecond - 1, "at least 100ms"},
		{store.Info{MinTTL: 1}, time.Millisecond, "at least 100ms"},
		{store.Info{}, 1<<63 - 1, ""},
	} {
		err := c.info.CheckTTL(c.ttl)
		if c.rule == "" {
			if err != nil {
				t.Errorf("ttl %v is refused: %v", c.ttl, err)
			}
			continue
		}
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != "TTL" || invalid.Value != c.ttl.String() || !strings.Contains(invalid.Rule, c.rule) {
			t.Errorf("ttl %v answers %v, want an *InvalidError about the TTL with %q", c.ttl, err, c.rule)
		}
	}
}

func TestTrace(t *testing.T) {
	if store.Trace(context.Background()) != nil {
		t.Error("a context without a trace answers one")
	}
	var got []store.NodeEvent
	ctx := store.WithTrace(context.Background(), func(e store.NodeEvent) { got = append(got, e) })
	store.Trace(ctx)(store.NodeEvent{Node: "n", Op: "acquire"})
	inner := store.WithTrace(ctx, func(store.NodeEvent) {})
	store.Trace(inner)(store.NodeEvent{Node: "other"})
	if len(got) != 1 || got[0].Node != "n" {
		t.Errorf("the trace was told %+v", got)
	}
}
