package storetest

import (
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

var tokenTests = []test{
	{name: "GrowOverReleases", run: testTokensOverReleases},
	{name: "GrowOverExpiry", run: testTokensOverExpiry},
	{name: "SameWhenTriedAgain", run: testTokenOfRepeatedTry},
}

// growing complains where a token is not larger than the one before.
func (e *env) growing(tokens []fence.Token, what string) {
	e.Helper()
	if e.info.Fencing == store.FencingNone {
		return // sound has seen that there are none
	}
	for i := 1; i < len(tokens); i++ {
		if tokens[i] <= tokens[i-1] {
			e.Errorf("token %v comes after token %v, %s", tokens[i], tokens[i-1], what)
		}
	}
}

func testTokensOverReleases(e *env) {
	key := e.key()
	var tokens []fence.Token
	for i := range 30 {
		s := e.s
		if i%3 == 0 {
			s = e.s2
		}
		c := e.claim(s, key)
		g := e.regrant(c, "a holder")
		if i%2 == 0 {
			if x := e.extend(c, "a holder"); x.Token != g.Token {
				e.Errorf("Extend answers token %v, the grant had %v", x.Token, g.Token)
			}
		}
		tokens = append(tokens, g.Token)
		e.release(c, "a holder")
	}
	e.growing(tokens, "over releases")
	fresh := e.h.Open() // a process that starts now
	c := e.claim(fresh, key)
	tokens = append(tokens, e.grant(c, "a holder in a new process").Token)
	e.growing(tokens, "in a new process")
}

func testTokensOverExpiry(e *env) {
	key := e.key()
	l := e.hold(e.short(e.s, key), "a holder")
	tokens := []fence.Token{l.Token}
	for range 2 {
		l = e.lapse(l, e.short(e.s2, key), "a holder")
		tokens = append(tokens, l.Token)
	}
	e.growing(tokens, "over the end of a ttl")
}

// Try of a claim that holds the key already answers the grant that stands, or a new one;
// the last answer is the one that counts.
func testTokenOfRepeatedTry(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	first := e.grant(c, "the holder")
	again := e.grant(c, "the holder, trying again")
	if again.Token < first.Token {
		e.Errorf("a repeated Try answers token %v after %v", again.Token, first.Token)
	}
	if x := e.extend(c, "the holder"); x.Token != again.Token {
		e.Errorf("Extend answers token %v, the last Try %v", x.Token, again.Token)
	}
	e.held(key, "a key whose holder has tried twice")
	e.release(c, "the holder, having tried twice")
	e.growing([]fence.Token{again.Token, e.free(key, "the key of a holder that tried twice").Token}, "after a repeated Try")
}
