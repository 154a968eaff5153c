package fence_test

import (
	"context"
	"errors"
	"io"
	"math"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
)

var kinds = []error{fence.ErrStale, fence.ErrNoResource, fence.ErrUnclaimed, fence.ErrApplied, fence.ErrBusy,
	fence.ErrUncertain, fence.ErrUnavailable, fence.ErrInvalid, fence.ErrToken}

// Each error is one line, says what is in it, and answers its own kind alone.
func TestErrors(t *testing.T) {
	twoLines := errors.New("ERROR: deadlock detected\n\tDETAIL:  Process 7")
	_, noToken := fence.ParseToken("0x1f\n")
	for _, tt := range []struct {
		err  error
		is   []error
		says string
	}{
		{&fence.StaleError{Resource: "account/1", Token: 5, Seen: 9}, []error{fence.ErrStale},
			`stale fencing token 5 for "account/1": 9 has been seen`},
		{&fence.StaleError{Resource: "a\nb\x00", Token: 1, Seen: math.MaxInt64}, []error{fence.ErrStale},
			`stale fencing token 1 for "a\nb\x00": 9223372036854775807 has been seen`},
		{&fence.Error{Kind: fence.ErrNoResource, Resource: "account/1"}, []error{fence.ErrNoResource},
			`fence: "account/1": no such resource`},
		{&fence.Error{Kind: fence.ErrUnclaimed, Resource: "r"}, []error{fence.ErrUnclaimed}, `fence: "r": fencing token not claimed`},
		{&fence.Error{Kind: fence.ErrApplied, Resource: "r"}, []error{fence.ErrApplied}, `fence: "r": already applied`},
		{&fence.Error{Kind: fence.ErrBusy, Resource: "r", Err: twoLines}, []error{fence.ErrBusy, twoLines},
			`fence: "r": resource busy: ERROR: deadlock detected DETAIL: Process 7`},
		{&fence.Error{Kind: fence.ErrUncertain, Err: errors.Join(io.EOF, context.Canceled)},
			[]error{fence.ErrUncertain, io.EOF, context.Canceled},
			`fence: outcome uncertain: the resource may have been changed: EOF context canceled`},
		{&fence.Error{Kind: fence.ErrUnavailable, Err: io.EOF}, []error{fence.ErrUnavailable, io.EOF}, `fence: guard unavailable: EOF`},
		{&fence.InvalidError{Field: "token", Value: "-1", Rule: "must be positive"}, []error{fence.ErrInvalid},
			`invalid token "-1": must be positive`},
		{&fence.InvalidError{Field: "resource", Rule: "must not be empty"}, []error{fence.ErrInvalid},
			`invalid resource: must not be empty`},
		{noToken, []error{fence.ErrToken}, `fence: not a fencing token: "0x1f\n": want decimal digits without sign or leading zero, from 1 to 9223372036854775807`},
	} {
		if got := tt.err.Error(); got != tt.says {
			t.Errorf("the error says\n%q, want\n%q", got, tt.says)
		}
		for _, is := range tt.is {
			if !errors.Is(tt.err, is) {
				t.Errorf("%v is no %v", tt.err, is)
			}
		}
		for _, kind := range kinds {
			if kind != tt.is[0] && errors.Is(tt.err, kind) {
				t.Errorf("%v is also %v", tt.err, kind)
			}
		}
	}
	for _, kind := range kinds {
		if errors.Is(&fence.StaleError{}, kind) != (kind == fence.ErrStale) || strings.ContainsAny(kind.Error(), "\r\n") {
			t.Errorf("kind %v", kind)
		}
	}
}

// A long name is cut, so that a log stays readable; it is whole in the field.
func TestErrorsAreShort(t *testing.T) {
	long := strings.Repeat("\n", fence.MaxResourceLen)
	for _, err := range []error{
		&fence.StaleError{Resource: long, Token: 1, Seen: 2},
		&fence.Error{Kind: fence.ErrBusy, Resource: long},
		&fence.InvalidError{Field: "resource", Value: long + long, Rule: "must be shorter"},
		fence.CheckResource(strings.Repeat("\xff", 600)),
	} {
		if text := err.Error(); len(text) > 500 || strings.ContainsAny(text, "\r\n") {
			t.Errorf("the error has %d bytes: %q", len(text), text)
		}
	}
}

func TestCheckResource(t *testing.T) {
	for _, good := range []string{
		"a", " ", "account/1", "a b", "a\nb", "%", "'", `\`, "{tag}", "é", "e\u0301", "\U0001f512", "\ufffd", "..",
		strings.Repeat("x", fence.MaxResourceLen), strings.Repeat("\U0001f512", fence.MaxResourceLen/4),
	} {
		if err := fence.CheckResource(good); err != nil {
			t.Errorf("CheckResource(%.40q) = %v", good, err)
		}
	}
	for bad, rule := range map[string]string{
		"":             "must not be empty",
		"\x00":         "must not contain NUL",
		"a\x00b":       "must not contain NUL",
		"\xff":         "must be UTF-8",
		"a\xc3":        "must be UTF-8",
		"\xed\xa0\x80": "must be UTF-8", // half of a surrogate pair
		"\xc0\x80":     "must be UTF-8", // NUL, overlong
		strings.Repeat("x", fence.MaxResourceLen+1):                "must have at most 512 bytes, has 513",
		strings.Repeat("\U0001f512", fence.MaxResourceLen/4) + "x": "must have at most 512 bytes, has 513",
	} {
		err := fence.CheckResource(bad)
		var invalid *fence.InvalidError
		if !errors.As(err, &invalid) || *invalid != (fence.InvalidError{Field: "resource", Value: bad, Rule: rule}) {
			t.Errorf("CheckResource(%.40q) = %v, want the rule: %s", bad, err, rule)
		}
	}
}

func TestCheckToken(t *testing.T) {
	for _, good := range []fence.Token{1, 1 << 53, math.MaxInt64} {
		if err := fence.CheckToken(good); err != nil {
			t.Errorf("CheckToken(%v) = %v", good, err)
		}
	}
	for _, bad := range []fence.Token{0, -1, math.MinInt64} {
		var invalid *fence.InvalidError
		if err := fence.CheckToken(bad); !errors.As(err, &invalid) || invalid.Field != "token" || invalid.Value != bad.String() || invalid.Rule == "" {
			t.Errorf("CheckToken(%v) = %v", bad, err)
		}
	}
}

// What Check answers for a mark, and that only a stale one tells the holder.
func TestCompare(t *testing.T) {
	told := 0
	ctx := fence.WithHolder(t.Context(), "r", 5, func(*fence.StaleError) { told++ })
	for seen, want := range map[fence.Token]error{
		0: fence.ErrNoResource, 4: fence.ErrUnclaimed, 5: nil, 6: fence.ErrStale, math.MaxInt64: fence.ErrStale,
	} {
		told = 0
		if err := fence.Compare(ctx, "r", 5, seen); !errors.Is(err, want) {
			t.Errorf("Compare with %v seen answers %v, want %v", seen, err, want)
		}
		if (told == 1) != (want == fence.ErrStale) || told > 1 {
			t.Errorf("Compare with %v seen tells the holder %d times", seen, told)
		}
	}
}
