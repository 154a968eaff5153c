package redlock

// rule is a rule of docs/protocol.md, section 7. Tests built with the tag holdfast_rules
// can switch each one off, to show what breaks without it; every other build has the
// rules compiled in.
type rule uint

const (
	ruleA       rule = iota // a quorum of the configured nodes
	ruleB                   // validity from before the send
	ruleC                   // drift
	ruleD                   // RELEASE compares the owner
	ruleE                   // an owner is never used after its RELEASE was sent
	ruleF                   // late answers of an older extension are not booked on a newer one
	ruleG                   // votes are never shortened
	ruleH                   // a reservation raises the mark
	ruleI                   // acceptances are counted for one stamp only
	ruleJ                   // a stamp must exceed the mark
	ruleK                   // LOW gives no vote
	ruleL                   // an extension counts only while the lease is valid
	ruleM                   // RELEASE leaves a tombstone
	ruleN                   // healing stamps rise
	ruleO                   // the token is fixed for the life of a lease
	ruleP                   // a KEPT counts only while the node's promise runs; admission
	ruleQ                   // a stamp far ahead of the node's clock is refused
	ruleR                   // a stamp far behind the node's clock is refused
	ruleS                   // marks live, and young nodes wait, long enough
	ruleT                   // the Q-th smallest mark is followed, not the largest
	ruleU                   // an extension never votes before a quorum kept
	ruleV                   // the script compares the replication id
	ruleW                   // a grant by hand-over counts from when it was made, not from when it was heard of
	ruleMRepeat             // m: RELEASE is repeated until the node takes the tombstone
	ruleUBreak              // u: BREAK takes the vote instead of deleting it
)
