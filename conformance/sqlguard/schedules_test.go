package sqlguard_test

import "strings"

// A schedule is what two sessions do, one step after another. Old holds token 33, New has been
// granted 34 since; each claims the resource by the hand-written statements that the schedule
// names, or by the guard in their place.
//
// The steps: O and N are the sessions. begin, commit and rollback are of a transaction.
//
//	look      reads the mark by a plain SELECT and goes on unless it is larger
//	claim R   raises the mark of resource R by a statement that locks it, and refuses a larger one
//	cas R     changes row R where its own mark is not larger, and raises that
//	again R   is cas that leaves the row as it is
//	acquire   claims in a transaction of its own (the guard only)
//	read R    reads row R by a plain SELECT, in the transaction
//	outside R reads row R by itself
//	set R     writes row R from what was read: that plus the session's own number
//	add R     adds the session's number to row R, whatever that is
//	insert R  inserts row R, with the session's number, into a table that nobody reads: in the
//	          other one SERIALIZABLE may take it for a row that New has looked for
//
// A step that blocks keeps the steps of its session behind it waiting; the others go on.
type schedule struct {
	name, what string
	steps      string
	guarded    string // what the guard's rules make of the steps; "" where they leave them alone
	missing    bool   // there is no mark at first
	want       string // of the hand-written form, in the order of configs; see outcome
}

// schedules are those of a study of eleven configurations. "BAD" there means that Old's effect
// was committed after New had committed, or that New worked on what it had read before Old's.
//
// In want, each word is one configuration: PostgreSQL READ COMMITTED, REPEATABLE READ and
// SERIALIZABLE; MariaDB READ COMMITTED, REPEATABLE READ, the same with
// innodb_snapshot_isolation, and SERIALIZABLE; SQLite with WAL and with a rollback journal,
// begun deferred, and both begun immediate.
var schedules = []schedule{
	{
		name: "S1a", what: "Old looks at the mark; New claims, writes and commits; Old writes the same row",
		steps: "O begin; O look; N begin; N claim 1; N add 1; N commit; O add 1; O commit",
		want:  "BAD abort abort  BAD BAD abort ok  abort abort  ok ok",
	},
	{
		name: "S1b", what: "the same, and Old inserts another row",
		steps: "O begin; O look; N begin; N claim 1; N add 1; N commit; O insert 3; O commit",
		want:  "BAD BAD BAD  BAD BAD BAD ok  abort abort  ok ok",
	},
	{
		name: "S2a", what: "Old claims; New claims meanwhile; Old commits; New reads and writes",
		steps: "O begin; O claim 1; O add 1; N begin; N claim 1; N read 1; N set 1; N commit; O commit",
		want:  "ok abort abort  ok ok ok ok  ok ok  ok ok",
	},
	{
		name: "S2b", what: "New claims; Old claims meanwhile; New commits",
		steps: "N begin; N claim 1; O begin; O claim 1; O add 1; O commit; N read 1; N set 1; N commit",
		want:  "stale abort abort  stale stale stale stale  stale stale  stale stale",
	},
	{
		name: "S2c", what: "the same, without a mark at first", missing: true,
		steps: "N begin; N claim 1; O begin; O claim 1; O add 1; O commit; N read 1; N set 1; N commit",
		want:  "stale abort abort  stale stale stale stale  stale stale  stale stale",
	},
	{
		name: "S2d", what: "New claims and rolls back; Old waits and goes on",
		steps: "N begin; N claim 1; N add 1; O begin; O claim 1; O add 1; O commit; N rollback",
		want:  "ok ok ok  ok ok ok ok  ok ok  ok ok",
	},
	{
		name: "S2e", what: "New reads before it claims, and reads again",
		steps: "N begin; N read 1; O begin; O claim 1; O add 1; O commit; N claim 1; N read 1; N set 1; N commit",
		want:  "ok abort abort  ok BAD abort abort  abort abort  stale stale",
	},
	{
		name: "S3", what: "a mark in the row: New in flight, Old waits",
		steps: "N begin; N cas 1; O begin; O cas 1; O commit; N commit",
		want:  "stale abort abort  stale stale stale stale  stale stale  stale stale",
	},
	{
		name: "S3b", what: "a mark in the row: Old in flight, New waits",
		steps: "O begin; O cas 1; N begin; N cas 1; N commit; O commit",
		want:  "ok abort abort  ok ok ok ok  ok ok  ok ok",
	},
	{
		name: "S4", what: "a mark in each row, and Old writes row 2 under the mark of row 1",
		steps:   "O begin; O cas 1; N begin; N cas 2; N commit; O add 2; O commit",
		guarded: "O begin; O claim 1; O add 1; N begin; N claim 1; N add 2; N commit; O add 2; O commit",
		want:    "BAD abort abort  BAD BAD BAD BAD  ok ok  ok ok",
	},
	{
		name: "S5", what: "two resources in opposite order",
		steps:   "O begin; O claim 1; N begin; N claim 2; O claim 2; N claim 1; O add 1; O commit; N read 1; N set 1; N commit",
		guarded: "O begin; O claim 1,2; N begin; N claim 2,1; O add 1; O commit; N read 1; N set 1; N commit",
		want:    "abort abort abort  abort abort abort abort  ok ok  ok ok",
	},
	{
		name: "S6", what: "New reads outside before it claims; Old writes; New writes",
		steps:   "N outside 1; O begin; O claim 1; O add 1; O commit; N begin; N claim 1; N set 1; N commit",
		guarded: "N acquire 1; N outside 1; O begin; O claim 1; O add 1; O commit; N begin; N claim 1; N set 1; N commit",
		want:    "BAD BAD BAD  BAD BAD BAD BAD  BAD BAD  BAD BAD",
	},
	{
		name: "S6b", what: "New claims, and reads then",
		steps: "N begin; N claim 1; N commit; N outside 1; O begin; O claim 1; O add 1; O commit; N begin; N claim 1; N set 1; N commit",
		want:  "stale stale stale  stale stale stale stale  stale stale  stale stale",
	},
	{
		// A count of rows says "stale" to the holder itself where it counts what has changed.
		name: "S7", what: "the holder writes the same once more",
		steps: "N begin; N cas 1; N commit; N begin; N again 1; N commit",
		want:  "ok ok ok  stale stale stale stale  ok ok  ok ok",
	},
}

// wanted is what the hand-written form gives in the i-th configuration.
func (s *schedule) wanted(i int) string { return strings.Fields(s.want)[i] }

// op is one step.
type op struct{ who, do, row string }

// ops reads the steps.
func ops(steps string) (list []op) {
	for step := range strings.SplitSeq(steps, ";") {
		f := append(strings.Fields(step), "")
		list = append(list, op{f[0], f[1], f[2]})
	}
	return list
}
