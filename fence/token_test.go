package fence_test

import (
	"context"
	"errors"
	"math"
	"regexp"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
)

func TestParseToken(t *testing.T) {
	for text, want := range map[string]fence.Token{
		"1":                   1,
		"9":                   9,
		"10":                  10,
		"9007199254740993":    1<<53 + 1, // a double has no such number
		"1795972895835210":    1795972895835210,
		"9223372036854775807": math.MaxInt64,
	} {
		got, err := fence.ParseToken(text)
		if err != nil || got != want {
			t.Errorf("ParseToken(%q) = %d, %v, want %d", text, got, err, want)
		}
		if s := want.String(); s != text {
			t.Errorf("%d is written %q, want %q", want, s, text)
		}
	}
	for _, text := range []string{
		"", "0", "00", "01", "-1", "+1", " 1", "1 ", "1\n", "1.0", "1e3", "1.7959728958352e+15", "0x1", "1_000", "1,000",
		"9223372036854775808", "18446744073709551616", "92233720368547758070", "\uff11", "\u0661", "NaN", "true", "1\x00",
		strings.Repeat("1", 1000),
	} {
		got, err := fence.ParseToken(text)
		if !errors.Is(err, fence.ErrToken) || got != 0 {
			t.Errorf("ParseToken(%.40q) = %d, %v, want ErrToken", text, got, err)
		} else if msg := err.Error(); strings.ContainsAny(msg, "\r\n\x00") || len(msg) > 300 {
			t.Errorf("ParseToken(%.40q): the error is not one short line: %q", text, msg)
		}
	}
}

var tokenText = regexp.MustCompile(`\A[1-9][0-9]{0,18}\z`)

func FuzzParseToken(f *testing.F) {
	for _, text := range []string{"1", "0", "-1", "9223372036854775807", "9223372036854775808", "01", "1e3"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got, err := fence.ParseToken(text)
		good := tokenText.MatchString(text) && (len(text) < 19 || text <= "9223372036854775807")
		switch {
		case good != (err == nil):
			t.Fatalf("ParseToken(%q) = %d, %v", text, got, err)
		case err != nil && (got != 0 || !errors.Is(err, fence.ErrToken)):
			t.Fatalf("ParseToken(%q) = %d, %v, want 0 and ErrToken", text, got, err)
		case err == nil && (got <= 0 || got.String() != text):
			t.Fatalf("ParseToken(%q) = %d, which is written %q", text, got, got)
		}
	})
}

// The order of tokens is the order of their texts by length, then bytes: guards that
// compare text rely on it.
func FuzzTokenOrder(f *testing.F) {
	f.Add(int64(9), int64(10))
	f.Add(int64(1<<53), int64(1<<53+1))
	f.Fuzz(func(t *testing.T, a, b int64) {
		if a <= 0 || b <= 0 {
			return
		}
		x, y := fence.Token(a).String(), fence.Token(b).String()
		if less := len(x) < len(y) || len(x) == len(y) && x < y; less != (a < b) {
			t.Errorf("%d < %d is %v, their texts say %v", a, b, a < b, less)
		}
	})
}

func TestContext(t *testing.T) {
	check := func(ctx context.Context, key string, want fence.Token) {
		t.Helper()
		if got, ok := fence.FromContext(ctx, key); got != want || ok != (want != 0) {
			t.Errorf("key %q: token %v, %v, want %v", key, got, ok, want)
		}
	}
	ctx := context.Background()
	check(ctx, "a", 0)
	a := fence.WithToken(ctx, "a", 1)
	ab := fence.WithToken(a, "b", 2)
	aba := fence.WithToken(ab, "a", 3)
	check(a, "a", 1)
	check(a, "b", 0)
	check(ab, "a", 1)
	check(ab, "b", 2)
	check(aba, "a", 3)
	check(aba, "b", 2)
	check(ab, "a", 1) // the outer one is as it was
	check(aba, "A", 0)
	check(aba, "", 0)
	type other struct{}
	check(context.WithValue(aba, other{}, 1), "a", 3)
}
