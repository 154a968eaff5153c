// Package bench compares Holdfast with other libraries and with the raw commands, and healthy
// nodes with failing ones, as ratios within one run: every contender takes its turn in short
// bursts. It is never tagged.
//
//	go test -bench . ./bench
//
// prints a table in the end and fails where a figure is beyond its limit. The servers must be
// old enough to vote, so the first half minute is a wait; -short measures one repetition and
// judges nothing.
package bench
