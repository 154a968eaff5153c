package fence_test

import (
	"context"
	"errors"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
)

func TestStaleTellsTheHolder(t *testing.T) {
	told := map[string]int{}
	hold := func(ctx context.Context, key string, tok fence.Token) context.Context {
		return fence.WithHolder(ctx, key, tok, func(e *fence.StaleError) { told[key]++ })
	}
	ctx := hold(hold(hold(t.Context(), "a", 5), "b", 5), "c", 6)
	for _, tt := range []struct {
		resource string
		token    fence.Token
		want     string
	}{
		{"row 1", 6, "c"}, {"row 1", 5, "ab"}, {"a", 5, "a"}, {"b", 5, "b"}, {"c", 6, "c"}, {"c", 4, ""},
	} {
		clear(told)
		err := fence.Stale(ctx, tt.resource, tt.token, 9)
		var stale *fence.StaleError
		if !errors.As(err, &stale) || *stale != (fence.StaleError{Resource: tt.resource, Token: tt.token, Seen: 9}) {
			t.Errorf("Stale(%q, %v) = %v", tt.resource, tt.token, err)
		}
		if len(told) != len(tt.want) {
			t.Errorf("token %v for %q: told %v, want %q", tt.token, tt.resource, told, tt.want)
		}
		for _, key := range tt.want {
			if told[string(key)] != 1 {
				t.Errorf("token %v for %q: told %v, want %q", tt.token, tt.resource, told, tt.want)
			}
		}
	}
	if key, tok, ok := fence.Innermost(ctx); key != "c" || tok != 6 || !ok {
		t.Errorf("Innermost = %q, %v, %v", key, tok, ok)
	}
	if _, _, ok := fence.Innermost(t.Context()); ok {
		t.Error("Innermost of an empty context")
	}
}
