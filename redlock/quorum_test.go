package redlock

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

const (
	earlyOwner = "h1.0000000000000001.aa.01"
	selfOwner  = "h1.0000000000000002.bb.02"
	lateOwner  = "h1.0000000000000003.cc.03"
	alien      = "redsync-value"
)

func nobody(string) bool { return false }

// answersOf reads a picture of a round: O ok, K kept, L low, A ahead, - no answer, and the
// votes of others: e earlier, l later, f foreign.
func answersOf(picture string) []answer {
	var out []answer
	for _, ch := range picture {
		a := map[rune]answer{
			'O': {kind: ok}, 'K': {kind: kept}, 'L': {kind: low}, 'A': {kind: ahead}, '-': {},
			'e': {kind: busy, owner: earlyOwner}, 'l': {kind: busy, owner: lateOwner}, 'f': {kind: busy, owner: alien},
		}[ch]
		out = append(out, a)
	}
	return out
}

func TestDecide(t *testing.T) {
	early := func(w string) bool { return w == earlyOwner }
	for _, c := range []struct {
		picture string
		gone    func(string) bool
		want    action
		owner   string
	}{
		{"O", nobody, granted, ""},
		{"K", nobody, again, ""}, // the vote is ours, the stamp was too low
		{"L", nobody, again, ""},
		{"A", nobody, newStamps, ""},
		{"e", nobody, held, earlyOwner},
		{"f", nobody, held, alien},
		{"e", early, awaitGone, ""},
		{"-", nobody, giveUp, ""},
		{"OOO--", nobody, granted, ""},
		{"OOOee", nobody, granted, ""},
		{"OO---", nobody, giveUp, ""},
		{"OOL--", nobody, again, ""},
		{"OKL--", nobody, again, ""}, // acceptances count for a grant, votes for the next round
		{"AAA--", nobody, newStamps, ""},
		{"eee--", nobody, held, earlyOwner},
		{"OOeee", nobody, held, earlyOwner},
		{"eeeOO", early, awaitGone, ""},
		{"OeeL-", early, awaitGone, ""},
		{"OOllf", nobody, keepVotes, lateOwner}, // as many votes, ours is the earlier birth
		{"OOeel", nobody, giveBack, earlyOwner}, // theirs is
		{"OOffl", nobody, giveBack, alien},      // another library will not yield
		{"OOl--", nobody, keepVotes, lateOwner}, // more votes than anybody
		{"OeeLA", nobody, giveBack, earlyOwner}, // fewer
		{"eelll", nobody, held, lateOwner},      // none of ours
		{"eellf", nobody, giveBack, earlyOwner}, // split among others
		{"OOAA-", nobody, keepVotes, ""},        // two clocks are behind
		{"LLAA-", nobody, giveUp, ""},           // no vote and nobody holds it
		{"OO--", nobody, giveUp, ""},            // N=4: three must agree
		{"OOO-", nobody, granted, ""},           //
		{"OOee", nobody, giveBack, earlyOwner},  // an even split of an even N
		{"OOll", nobody, keepVotes, lateOwner},  //
	} {
		got := decide(quorumOf(len(c.picture)), parseOwner(selfOwner), answersOf(c.picture), c.gone)
		if got.action != c.want || got.owner != c.owner {
			t.Errorf("%s: decided %v for %q, want %v for %q", c.picture, got.action, got.owner, c.want, c.owner)
		}
	}
}

// naive is decide written a second time, from the words of the specification and without
// a thought for speed.
func naive(n int, self owner, answers []answer, gone func(string) bool) action {
	need := 0
	for need*2 <= n {
		need++
	}
	votes := func(keep func(answer) bool) (sum int) {
		for _, a := range answers {
			if keep(a) {
				sum++
			}
		}
		return sum
	}
	is := func(k kind) func(answer) bool { return func(a answer) bool { return a.kind == k } }
	mine := votes(is(ok)) + votes(is(kept))
	by := func(w string) int {
		return votes(func(a answer) bool { return a.kind == busy && a.owner == w && !gone(w) })
	}
	atRest := votes(func(a answer) bool { return a.kind == busy && gone(a.owner) })
	others := []string{}
	for _, a := range answers {
		if a.kind == busy && !gone(a.owner) {
			others = append(others, a.owner)
		}
	}
	switch {
	case votes(is(ok)) >= need:
		return granted
	case votes(is(ahead)) >= need:
		return newStamps
	case mine+votes(is(low)) >= need:
		return again
	case slices.ContainsFunc(others, func(w string) bool { return by(w) >= need }):
		return held
	case mine+votes(is(low))+atRest >= need:
		return awaitGone
	case n-votes(is(noAnswer)) < need:
		return giveUp
	}
	yield := mine == 0
	for _, w := range others {
		o := parseOwner(w)
		earlier := o.birth < self.birth || o.birth == self.birth && w < self.text
		if by(w) > mine || by(w) == mine && earlier {
			yield = true
		}
	}
	switch {
	case !yield:
		return keepVotes
	case len(others) > 0:
		return giveBack
	}
	return giveUp
}

func TestDecideAgainstNaive(t *testing.T) {
	seen := map[action]int{}
	for seed := range uint64(200000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		n := 1 + rng.IntN(7)
		weights := "OKLA-elfOOLeel"
		var picture []byte
		for range n {
			picture = append(picture, weights[rng.IntN(len(weights))])
		}
		gone := nobody
		if rng.IntN(4) == 0 {
			gone = func(w string) bool { return w == earlyOwner }
		}
		answers := answersOf(string(picture))
		got := decide(quorumOf(n), parseOwner(selfOwner), answers, gone)
		if want := naive(n, parseOwner(selfOwner), answers, gone); got.action != want {
			t.Fatalf("seed %d, %s: decided %v, want %v", seed, picture, got.action, want)
		}
		seen[got.action]++
	}
	for a := granted; a <= giveUp; a++ {
		if seen[a] == 0 {
			t.Errorf("no random round led to action %d", a)
		}
	}
}

// TestSplitConverges: of contenders who split the votes exactly one keeps its own, so that
// the round after it can be won.
func TestSplitConverges(t *testing.T) {
	for seed := range uint64(20000) {
		rng := rand.New(rand.NewPCG(seed, 2))
		n, contenders := 3+rng.IntN(5), 2+rng.IntN(4)
		var owners []owner
		for i := range contenders {
			owners = append(owners, parseOwner(fmt.Sprintf("h1.%016d.aa.%02d", 1+rng.IntN(3), i)))
		}
		votes := make([]int, n)
		for i := range votes {
			votes[i] = rng.IntN(contenders)
		}
		keeping := 0
		for i, self := range owners {
			answers := make([]answer, n)
			for node, w := range votes {
				answers[node] = answer{kind: busy, owner: owners[w].text}
				if w == i {
					answers[node] = answer{kind: ok}
				}
			}
			switch decide(quorumOf(n), self, answers, nobody).action {
			case keepVotes, granted:
				keeping++
			}
		}
		if keeping != 1 {
			t.Fatalf("seed %d: votes %v of owners %v: %d keep theirs, want 1", seed, votes, owners, keeping)
		}
	}
}

func TestNextSeen(t *testing.T) {
	at := func(k kind, marks ...int64) (out []answer) {
		for _, m := range marks {
			out = append(out, answer{kind: k, mark: m})
		}
		return out
	}
	for name, c := range map[string]struct {
		q       int
		seen    int64
		answers []answer
		want    int64
	}{
		"one node":                       {1, 0, at(low, 7), 7},
		"third smallest of five":         {3, 0, at(low, 5, 1, 9, 3, 7), 5},
		"one wild clock steers nobody":   {3, 0, at(low, 5, 1, 1e15, 3, 7), 5},
		"never falls":                    {1, 9, at(low, 7), 9},
		"too few answers":                {3, 4, at(low, 10, 20), 4},
		"busy nodes only where needed":   {2, 0, append(at(busy, 100, 100), at(low, 5, 6)...), 6},
		"busy nodes where others do not": {2, 0, append(at(busy, 100, 90), at(low, 5)...), 90},
		"nodes without an answer do not": {2, 0, append(at(noAnswer, 0, 0), at(low, 5, 6)...), 6},
		"a wild clock among Q answers":   {2, 0, at(low, 1e15, 5), 5},
		"and beside a busy node":         {2, 0, append(at(busy, 90), at(low, 1e15)...), 90},
		"wild clocks only":               {2, 4, at(low, 1e15, 2e15), 4},
	} {
		if got := nextSeen(c.q, c.seen, 1e14, c.answers); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestSettled(t *testing.T) {
	// A picture of the answers so far; a point stands for a node that has yet to answer.
	for picture, want := range map[string]bool{
		".": false, "O": true, "L": false, "A": true, "e": true, "-": false,
		"OOO..": true, "OO...": false, "OOe..": false, "OOL..": false,
		"eee..": true, "ee...": false, "eef..": true,
		"eLL..": false, "eeL..": false, "eeL-.": true, "eeLL.": false, // they may be free soon: decision 2
		"AAA..": true, "AA...": false, "OAA..": false,
		"---..": false, "----.": false, "e---.": false, // fewer than Q answers: for their time
		"OOOO": true, "OO..": false, "ee..": false, "eee.": true, "eO..": false,
	} {
		answers := answersOf(strings.ReplaceAll(picture, ".", "-"))
		got := settled(quorumOf(len(answers)), count(answers), strings.Count(picture, "."))
		if got != want {
			t.Errorf("%s: %v, want %v", picture, got, want)
		}
	}
}

// TestJudge compares with all ways in which five or four nodes can answer an extension.
func TestJudge(t *testing.T) {
	for n := 1; n <= 6; n++ {
		q := quorumOf(n)
		for counted := 0; counted <= n; counted++ {
			for gone := 0; counted+gone <= n; gone++ {
				for _, valid := range []bool{true, false} {
					want := open
					silent := n - counted - gone
					if counted >= q && valid {
						want = extended
					} else if counted+silent < q { // even if all others kept it
						want = goneFromQuorum
					}
					if counted >= q && !valid {
						continue // the Locker's timer has said so already; never extended
					}
					if got := (keepTally{counted, gone}).judge(n, q, valid); got != want {
						t.Errorf("n=%d counted=%d gone=%d valid=%v: %v, want %v", n, counted, gone, valid, got, want)
					}
				}
				if (keepTally{counted, gone}).judge(n, q, false) == extended {
					t.Errorf("n=%d counted=%d gone=%d: extended after its validity", n, counted, gone)
				}
			}
		}
	}
}

func TestQuorumsMeet(t *testing.T) {
	for n := 1; n < 100; n++ {
		if q := quorumOf(n); 2*q <= n || 2*(q-1) > n {
			t.Errorf("quorumOf(%d) = %d: two quorums need not meet, or it is larger than needed", n, q)
		}
	}
}
