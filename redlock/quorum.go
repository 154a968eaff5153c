package redlock

import (
	"cmp"
	"slices"
)

// This file holds the arithmetic of votes and the decisions of a round, without I/O and
// without a clock, to be read beside docs/protocol.md, section 2. Stamps and node clocks
// are microseconds.

// quorumOf is the smallest number of nodes of which any two sets meet: n/2+1 of the
// configured nodes (rule A), whatever number of them answers.
func quorumOf(n int) int { return n/2 + 1 }

// kind is what a node answered.
type kind uint8

const (
	noAnswer kind = iota // an error, or nothing in time: never a vote, never proof that nothing happened
	ok                   // the vote is ours and the stamp was accepted
	kept                 // the vote is ours and was refreshed; the stamp was not accepted
	busy                 // another owner has the vote
	low                  // no vote: the stamp is not above the mark
	ahead                // no vote: the stamp is too far ahead of the node's clock
	none                 // to KEEP: nobody has the vote
)

var kindNames = [...]string{"no answer", "ok", "kept", "busy", "low", "ahead", "none"}

func (k kind) String() string { return kindNames[k] }

// answer is one node's answer to VOTE or KEEP.
type answer struct {
	kind  kind
	mark  int64  // f: the highest stamp that the node accepted, or its clock less MARGIN
	now   int64  // the node's clock
	owner string // of a busy vote
	pttl  int64  // ms that remain of a busy vote; negative where it has no end
	place int64  // ours in the queue for a busy vote, from 1; zero where there is none
}

// tally counts the answers of a round.
type tally struct {
	oks, kepts, lows, aheads, answered int
	busy                               map[string]int // votes by other owners
}

func count(answers []answer) tally {
	var t tally
	for _, a := range answers {
		if a.kind != noAnswer {
			t.answered++
		}
		switch a.kind {
		case ok:
			t.oks++
		case kept:
			t.kepts++
		case low:
			t.lows++
		case ahead:
			t.aheads++
		case busy:
			if t.busy == nil {
				t.busy = make(map[string]int)
			}
			t.busy[a.owner]++
		}
	}
	return t
}

// settled reports whether a round can stop before its time is up: Q nodes accepted the
// stamp; or Q have answered, and whatever the pending ones say, they cannot make a quorum
// of nodes that are ours or free, which would be worth another round (decision 2). Where
// fewer than Q have answered, the others are waited for: a single one says little.
func settled(q int, t tally, pending int) bool {
	return t.oks >= q || t.answered >= q && t.oks+t.kepts+t.lows+pending < q
}

// nextSeen is the mark that the next stamp must exceed: the Q-th smallest that was
// answered, not the largest, so that one node with a bad clock steers nobody (rule T).
// Where only Q nodes have answered, that one may be the largest: so a mark above limit,
// which no node with a right clock can have, gives way to the next smaller one.
// Nodes whose vote is busy count only where there are too few others. It never falls.
func nextSeen(q int, seen, limit int64, answers []answer) int64 {
	var free, all []int64
	for _, a := range answers {
		if a.kind == noAnswer {
			continue
		}
		all = append(all, a.mark)
		if a.kind != busy {
			free = append(free, a.mark)
		}
	}
	marks := free
	if len(marks) < q {
		marks = all
	}
	if len(marks) < q {
		return seen
	}
	if off(ruleT) {
		return max(seen, slices.Max(marks))
	}
	slices.Sort(marks)
	for i := q - 1; i >= 0; i-- {
		if marks[i] <= limit {
			return max(seen, marks[i])
		}
	}
	return seen
}

// nthSmallest returns the n-th smallest value, counted from 1. It sorts values.
func nthSmallest[T cmp.Ordered](n int, values []T) T {
	slices.Sort(values)
	return values[n-1]
}

// action is what a client does after a round without a grant. The numbers are those of
// the decisions in section 2.
type action uint8

const (
	granted   action = iota // Q nodes accepted the stamp
	newStamps               // 1: Q clocks are far behind ours: correct the offset, new attempt
	again                   // 2: next round at once
	held                    // 3: another holds it: give own votes back and wait
	awaitGone               // 4: next round after RTT/2: the votes of released owners are about to go
	keepVotes               // 5: split vote, and we go on: next round after RTT/2, RTT, 2 RTT ...
	giveBack                // 5: split vote, and we yield: give the votes back and wait
	giveUp                  // 6: too few usable answers
)

// decision is an action and, where one is named, the owner whose votes led to it.
type decision struct {
	action action
	owner  string
}

// decide looks at the answers to one stamp. self is our attempt; gone knows owners that
// have released.
func decide(q int, self owner, answers []answer, gone func(owner string) bool) decision {
	t := count(answers)
	mine := t.oks + t.kepts
	leader, most, goneVotes := "", 0, 0
	for w, n := range t.busy {
		if gone(w) {
			goneVotes += n
			continue
		}
		if n > most || n == most && before(parseOwner(w), parseOwner(leader)) {
			leader, most = w, n
		}
	}
	switch {
	case t.oks >= q:
		return decision{action: granted}
	case t.aheads >= q:
		return decision{action: newStamps}
	case mine+t.lows >= q:
		return decision{action: again}
	case most >= q:
		return decision{held, leader}
	case mine+t.lows+goneVotes >= q:
		return decision{action: awaitGone}
	case t.answered < q:
		return decision{action: giveUp}
	case mine > 0 && (most < mine || most == mine && before(self, parseOwner(leader))):
		return decision{keepVotes, leader}
	case most > 0:
		return decision{giveBack, leader}
	default:
		return decision{action: giveUp}
	}
}

// before orders attempts for split votes: by birth, ties by the owner's text. A vote of
// another library has no birth and comes first: its owner will not yield to us.
func before(a, b owner) bool {
	return cmp.Or(cmp.Compare(a.birth, b.birth), cmp.Compare(a.text, b.text)) < 0
}

// keepTally counts the answers to one extension.
type keepTally struct {
	counted int // kept, by nodes whose promise to us has never run out (rule P)
	gone    int // none or busy
}

// extension is the state of one lease in one extension: open, extended or lost.
type extension uint8

const (
	open extension = iota
	extended
	goneFromQuorum
)

// judge decides an extension: Q counted answers extend a lease that is still valid (rule
// L); a quorum is out of reach once more than N-Q nodes say that the vote is not ours.
func (t keepTally) judge(n, q int, valid bool) extension {
	switch {
	case t.counted >= q && (valid || off(ruleL)):
		return extended
	case t.gone > n-q:
		return goneFromQuorum
	}
	return open
}
