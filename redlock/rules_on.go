//go:build holdfast_rules

package redlock

import (
	"strings"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// This file exists only in tests. It lets them switch off one rule of docs/protocol.md,
// section 7, and move the client's clocks.

var (
	rulesOff   atomic.Uint64
	wallOffset atomic.Int64 // us
	elapsed    atomic.Int64 // ns
)

var ruleNames = "ABCDEFGHIJKLMNOPQRSTUVWmu"

// SwitchOff switches the named rules off, such as "M" or "EJ", and returns what switches
// them on again; "m" is the half of M that is the client's, "u" the half of U that is BREAK's.
// Stores made before are only partly affected: their scripts stay.
func SwitchOff(names string) (restore func()) {
	var mask uint64
	for _, name := range names {
		i := strings.IndexRune(ruleNames, name)
		if i < 0 {
			panic("redlock: there is no rule " + string(name))
		}
		mask |= 1 << i
	}
	before := rulesOff.Swap(mask)
	return func() { rulesOff.Store(before) }
}

// Elapse lets time pass for all stores of this process, by their wall clock and by the one
// that counts sleep, as if the machine had slept.
func Elapse(d time.Duration) { elapsed.Add(int64(d)) }

// Now reads the clock by which this process's stores measure validity, and in which tickets
// count.
func Now() time.Duration { return clock.Clock{}.Now().Boot() + time.Duration(elapsed.Load()) }

func storeClock() clock.Clock { return clock.Clock{Boot: Now} }

// MoveWallClock sets the wall clock of this process's stores d apart from the machine's.
func MoveWallClock(d time.Duration) (restore func()) {
	before := wallOffset.Swap(d.Microseconds())
	return func() { wallOffset.Store(before) }
}

func off(r rule) bool { return rulesOff.Load()&(1<<r) != 0 }

func wallNow() int64 {
	return time.Now().UnixMicro() + wallOffset.Load() + elapsed.Load()/int64(time.Microsecond)
}

// mutants are the scripts' rules switched off: in the script, replace from by to.
var mutants = []struct {
	rule             rule
	script, from, to string
}{
	{ruleD, "release", "cur == ARGV[1]", "true"},
	{ruleG, "vote", "call('PTTL', vote) < ttl", "true"},
	{ruleG, "keep", "redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2])", "true"},
	{ruleH, "release", "not raise(s) then", "false then"},
	{ruleJ, "vote", "elseif S > f then", "elseif S >= f then"},
	{ruleK, "vote", "  why = 'LOW'\n", "  why = 'LOW'\n  if not cur then redis.call('SET', KEYS[1], owner, 'PX', ttl, 'NX') end\n"},
	{ruleM, "release", "if stamp ~= '0' then", "if false then"},
	{ruleQ, "vote", "if S > now + 5000000 then", "if false then"},
	{ruleQ, "release", "early = stamp + 0 > now + 5000000", "early = false"},
	{ruleR, "vote", "local f = now - 5000000", "local f = F"},
	{ruleS, "vote", "'PX', '120000'", "'PX', '115000'"},
	{ruleS, "release", "'PX', '120000'", "'PX', '115000'"},
	{ruleUBreak, "break", "redis.call('SET', KEYS[1], ARGV[2], 'PX', string.format('%.0f', ttl))", "redis.call('DEL', KEYS[1])"},
}

func switched(script, text string) string {
	for _, m := range mutants {
		if m.script != script || !off(m.rule) {
			continue
		}
		if strings.Count(text, m.from) != 1 {
			panic("redlock: a mutant of " + script + " does not match: " + m.from)
		}
		text = strings.Replace(text, m.from, m.to, 1)
	}
	return text
}
