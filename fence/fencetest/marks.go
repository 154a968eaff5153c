package fencetest

import (
	"errors"
	"math"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
)

func testClaim(e *env) {
	r := e.resource()
	e.claim(e.g, r, 5, accepted)
	e.claim(e.g, r, 5, accepted) // as often as the holder likes
	e.claim(e.g, r, 5, accepted)
	e.check(e.g, r, 5, accepted)
	e.claim(e.g, r, 6, accepted)
	e.check(e.g, r, 6, accepted)
	e.claim(e.g, r, 1000, accepted) // tokens have gaps
	e.check(e.g, r, 1000, accepted)
	e.claim(e.g, r, 6, stale(1000))
	e.claim(e.g, r, 5, stale(1000))
}

// A stale answer names the resource, the token and what was seen, and changes nothing.
func testClaimStale(e *env) {
	r := e.resource()
	e.claim(e.g, r, 7, accepted)
	for _, t := range []fence.Token{3, 6, 1, 3} {
		e.claim(e.g, r, t, stale(7))
		e.check(e.g, r, 7, accepted)
	}
	e.claim(e.g, r, 7, accepted)
	e.check(e.g, r, 8, unclaimed)
	e.claim(e.g, r, 8, accepted)
	e.claim(e.g, r, 7, stale(8))
	e.check(e.g, r, 8, accepted)
}

// Check compares, and changes nothing.
func testCheck(e *env) {
	r := e.resource()
	e.unmarked(r, "nothing at all")
	e.unmarked(r, "a Check")
	e.claim(e.g, r, 7, accepted)
	for range 2 {
		e.check(e.g, r, 7, accepted)
		e.check(e.g, r, 9, unclaimed)
		e.check(e.g, r, math.MaxInt64, unclaimed)
		e.check(e.g, r, 5, stale(7))
	}
	e.claim(e.g, r, 8, accepted) // the Check of 9 has raised nothing
	e.check(e.g, r, 7, stale(8))
	e.check(e.g, r, 8, accepted)
}

func testMissing(e *env) {
	missing, other := e.name(), e.resource()
	e.claim(e.g, other, 5, accepted)
	e.check(e.g, missing, 5, noResource)
	e.check(e.g, missing, 5, noResource)
	if e.h.MissingIsError {
		e.claim(e.g, missing, 5, noResource)
		e.claim(e.g, missing, 5, noResource)
		e.check(e.g, missing, 5, noResource)
	}
}

// edges are tokens around those that a double, a short decimal or a narrow column gets wrong.
var edges = []fence.Token{1, 9, 10, 1<<31 - 1, 1 << 31, 1<<53 - 1, 1 << 53, 1<<53 + 1,
	1<<62 + 1, math.MaxInt64 - 1, math.MaxInt64}

// Tokens are compared as int64s, exactly, in each order in which two may come.
func testTokens(e *env) {
	for _, first := range edges {
		for _, second := range edges {
			r := e.resource()
			e.claim(e.g, r, first, accepted)
			if second < first {
				e.claim(e.g, r, second, stale(first))
				e.check(e.g, r, second, stale(first))
				continue
			}
			if second > first {
				e.check(e.g, r, second, unclaimed)
			}
			e.claim(e.g, r, second, accepted)
			e.check(e.g, r, second, accepted)
		}
	}
	r := e.resource()
	for _, t := range edges {
		e.claim(e.g, r, t, accepted)
		e.check(e.g, r, t, accepted)
	}
	for _, t := range edges[:len(edges)-1] {
		e.claim(e.g, r, t, stale(math.MaxInt64))
	}
}

// hostileNames are names that differ in their bytes, and that some resource somewhere takes
// for the same one, or for a path, a pattern, a statement or a hash tag.
func hostileNames(salt string) []string {
	names := []string{
		// case, normal forms, look-alikes, full width
		"Row" + salt, "row" + salt, "ROW" + salt, "straße" + salt, "strasse" + salt,
		"\u00e9" + salt, "e\u0301" + salt, "e" + salt, "\u0130" + salt, "i" + salt, "\u0131" + salt,
		"\uff52\uff4f\uff57" + salt, "\u212a" + salt, "k" + salt, "K" + salt,
		// white space and what is not seen
		" " + salt, salt, salt + " ", salt + "  ", salt + "\n", salt + "\r\n", salt + "\nb", salt + "\t", "\u00a0" + salt,
		salt + "\u200b", "\ufeff" + salt, "\x01" + salt, "\x7f" + salt, "\u202e" + salt, "\ufffd" + salt,
		// patterns, quotes, escapes, statements
		salt + "%", salt + "%%", salt + "_", salt + "*", salt + "?", salt + "[a]", salt + `\`, salt + `\\`, salt + `\'`,
		salt + "'", salt + "''", salt + `"`, salt + `""`, salt + "`", salt + "$1", salt + ":1", salt + "@p", salt + "%s",
		salt + "%41", salt + "A", salt + "%2F", salt + "+", salt + "'; DROP TABLE x; --", "0" + salt, "00" + salt,
		// paths, and the signs of queries and of headers
		salt + "/", salt + "/b", "/" + salt, "//" + salt, salt + "/.", "../" + salt, salt + "//b", salt + ":", salt + ":b",
		salt + "#b", salt + "?b", salt + "&b", salt + ",b", salt + ";b",
		// hash tags
		"{" + salt + "}b", "{" + salt + "}", "{" + salt, salt + "}", "{}" + salt, "x{" + salt + "}y",
		// more than two bytes of UTF-8, and length
		"\U0001f512" + salt, "\U0001f513" + salt, strings.Repeat("\u9396", 64) + salt,
		pad(salt, "a"), pad(salt, "b"), pad(salt, "a")[:fence.MaxResourceLen-1], pad(salt, "a")[:255], pad(salt, "a")[:256],
	}
	return names
}

// pad makes a name of the greatest length that ends in last.
func pad(salt, last string) string {
	return salt + strings.Repeat("p", fence.MaxResourceLen-len(salt)-len(last)) + last
}

// Names that differ in one byte have marks of their own.
func testNames(e *env) {
	names := hostileNames(e.salt)
	for i, name := range names {
		names[i] = e.make(name)
	}
	token := func(i int) fence.Token { return fence.Token(100 + i) }
	for i, r := range names {
		e.unmarked(r, "claims of other names")
		e.claim(e.g, r, token(i), accepted)
	}
	other := e.another()
	for i, r := range names {
		e.check(other, r, token(i), accepted)
		e.claim(other, r, 99, stale(token(i)))
	}
}

// invalid complains of an answer that is no *InvalidError about field and value.
func (e *env) invalid(op string, err error, field, value string) {
	e.Helper()
	e.known(op, err)
	var invalid *fence.InvalidError
	switch {
	case !errors.As(err, &invalid) || !errors.Is(err, fence.ErrInvalid):
		e.Errorf("%s with %s %.80q answers %v, want an *InvalidError", op, field, value, err)
	case invalid.Field != field || invalid.Value != value || invalid.Rule == "":
		e.Errorf("%s with %s %.80q answers %+v, want the field, the value and a rule", op, field, value, *invalid)
	}
}

func testBadToken(e *env) {
	r, claimed := e.resource(), e.resource()
	e.claim(e.g, claimed, 5, accepted)
	for _, t := range []fence.Token{0, -1, -5, math.MinInt64, math.MinInt64 + 1} {
		for _, r := range []string{r, claimed} {
			e.invalid("Claim", e.g.Claim(e.ctx, r, t), "token", t.String())
			e.invalid("Check", e.g.Check(e.ctx, r, t), "token", t.String())
		}
	}
	e.unmarked(r, "claims of bad tokens")
	e.check(e.g, claimed, 5, accepted)
}

func testBadResource(e *env) {
	stem := e.name()
	long := pad(e.salt, "xx")
	for bad, near := range map[string]string{ // near is what a careless guard makes of it
		"":             "",
		long + "y":     long,
		long + long:    long,
		stem + "\x00":  stem,
		stem + "\x00b": stem + "b",
		stem + "\xff":  stem + "\ufffd",
		"\xc3" + stem:  "\ufffd" + stem,
		"\xed\xa0\x80": "",
	} {
		e.invalid("Claim", e.g.Claim(e.ctx, bad, 5), "resource", bad)
		e.invalid("Check", e.g.Check(e.ctx, bad, 5), "resource", bad)
		if near != "" {
			e.check(e.g, near, 5, noResource)
		}
	}
}

// Marks are kept where every process finds them.
func testReopen(e *env) {
	r, s := e.resource(), e.resource()
	e.claim(e.g, r, math.MaxInt64-1, accepted)
	e.claim(e.g, s, 7, accepted)
	other := e.another()
	e.check(other, r, math.MaxInt64-1, accepted)
	e.check(other, s, 7, accepted)
	e.claim(other, s, 6, stale(7))
	e.claim(other, s, 8, accepted)
	e.check(e.g, s, 7, stale(8))
	e.claim(e.g, s, 7, stale(8))
	e.claim(e.g, s, 9, accepted)
	e.check(e.another(), s, 9, accepted)
	e.check(other, s, 8, stale(9))
	fresh := e.resource()
	e.claim(other, fresh, 3, accepted)
	e.claim(e.g, fresh, 2, stale(3))
}
