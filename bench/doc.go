// Package bench compares Holdfast with other libraries and with the raw commands, healthy nodes
// with failing ones, and guarded transactions with bare ones, as ratios within one run: every
// contender takes its turn in short bursts. It is never tagged.
//
//	go test -bench . ./bench
//
// prints a table in the end and fails where a figure is beyond its limit. The servers must be
// old enough to vote, so the first half minute is a wait; -short measures one repetition and
// judges nothing.
//
// Three kinds of figures are beyond their limits on the machine of two cores on which they were
// last measured: one goroutine on one node (1.3 to 1.4 of the raw commands; wanted 1.15), one
// goroutine on five nodes (1.3 to 1.5 of a raw fan-out; wanted 1.2), and, by a hair, 64 goroutines
// on one node beside the best library without tokens. A grant with a token is two writes, two
// reads and a look at the clock in one script, where SET NX is one write: sent by hand, that
// script alone is 1.2 of the raw pair.
//
// The guard in SQL is measured beside bare transactions of the same statements, where commits
// reach the disk. One more statement is one more round trip: beside a transfer of four
// statements it is a third of the time on a fast disk, and on PostgreSQL about at its limit.
// Beside a single UPDATE, which has no limit, it is 1.5 to 1.7. A slow disk or a distant server
// changes the ratio: the former hides the statement, the latter shows the round trips alone,
// 7 over 6 for a transfer.
//
// Locks in SQL are measured on servers whose commits reach the disk, beside as many bare commits
// of one UPDATE. On PostgreSQL a pair is 0.4 to 0.6 of them, by how slow the disk is, since only
// the grant waits for it; on MariaDB, where the release does too, 0.4. 64 connections on two
// cores are bound by the processors, where two statements cannot be half of one.
//
// The gateway is measured in a process of its own beside a plain ReverseProxy that keeps
// connections and buffers as it does. With 16 clients it is at 1.27 to 1.29 of the plain one, close
// to its limit of 1.3, and with 64 at 1.1 to 1.2.
//
// Hand-overs are measured with 16 clients that want one key, beside other locks, with their
// defaults and tuned to ask often, and beside a token in a list that BLPOP hands on: that has no
// lease and loses the token with its holder, and is as fast as Redis can be. A gap is the time
// from the begin of a release to the return of the next acquisition. A client that takes the
// key again right after its own release hands nothing over: such grants are listed apart, and
// count for fairness only.
//
// Work without contention is compared with that of an earlier commit by
//
//	make compare BASE=<commit>
//
// which builds the benchmarks of both and lets them take turns on the same servers.
package bench
