package sqlfence

import (
	"math/rand/v2"
	"testing"
)

// claimOn is what the database does with a claim.
func claimOn(l *layout, r *row, c *claim) bool {
	c.renew()
	c.before = r.seq
	if !c.passes(*r) {
		return false
	}
	if l.own && r.token < c.token {
		r.prevToken, r.prevSeq = r.token, r.seq
	}
	r.token = c.token
	if c.hasSeq {
		r.seq = c.seq
	}
	return true
}

// Whatever others do between a commit that was not answered and the look at the row, what is
// said of it is true. And where nobody else used the token, and only one newer one came, it
// is not left open, but in a column.
func TestOutcomeIsTrue(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	said := map[outcome]int{}
	for range 200000 {
		h := []how{monotonic, once, sequenced}[rng.IntN(3)]
		l := layout{own: rng.IntN(2) == 0}
		hasSeq := l.own || h == sequenced || rng.IntN(2) == 0
		next := func(low int64) *claim {
			c := &claim{token: low + rng.Int64N(3), how: h, hasSeq: hasSeq, seq: 1 + rng.Int64N(4)}
			if rng.IntN(3) == 0 {
				c.how, c.seq = raise, 0
			}
			return c
		}
		r := row{exists: true}
		for range rng.IntN(4) {
			claimOn(&l, &r, next(max(1, r.token)))
		}
		mine := &claim{token: max(1, r.token) + rng.Int64N(2), how: h, hasSeq: hasSeq, seq: 1 + rng.Int64N(4)}
		was := r
		if !claimOn(&l, &r, mine) {
			continue
		}
		took := rng.IntN(2) == 0
		if !took {
			r = was
		}
		alone, newer := true, map[int64]bool{}
		for range rng.IntN(4) {
			c := next(max(1, r.token))
			if claimOn(&l, &r, c) {
				alone = alone && c.token != mine.token
				newer[c.token] = c.token > mine.token
				// The same step is the same work, whoever did it.
				took = took || c.how == sequenced && c.token == mine.token && c.seq == mine.seq
			}
		}
		o := mine.outcome(r, &l)
		said[o]++
		if o == applied && !took || o == notApplied && took {
			t.Fatalf("own %v, seq %v, mode %v: it took effect: %v, said %v; claim %+v, row %+v, before %+v", l.own, hasSeq, h, took, o, mine, r, was)
		}
		if o == unsure && alone && l.own && len(newer) <= 1 {
			t.Fatalf("left open: mode %v, it took effect: %v; claim %+v, row %+v, before %+v", h, took, mine, r, was)
		}
	}
	t.Logf("%v", said)
	for _, o := range []outcome{unsure, applied, notApplied} {
		if said[o] == 0 {
			t.Errorf("never said %v", o)
		}
	}
}
