// Package clock measures elapsed time that goes on while the machine sleeps.
//
// Go's monotonic clock stops in a system suspend (golang/go#24595), and a lease does
// not: a holder that only asked time.Since would trust a lease for the length of the
// nap too long. Where the system has a clock that counts sleep, an [Instant] carries a
// reading of it beside Go's own; elsewhere it carries the wall clock, whose steps
// forward can then end a lease early, never late.
package clock

import "time"

// Clock stamps instants. The zero value reads the system's clocks.
type Clock struct {
	// Boot replaces the system's boot clock, in tests.
	Boot func() time.Duration
}

// Instant is a point in time. The zero value is no instant, and earlier than any; see
// [Instant.IsZero].
type Instant struct {
	mono time.Duration // since long before origin
	boot time.Duration
}

// origin is what Go's monotonic clock is read against, which tells no absolute value.
var origin = time.Now()

// before keeps every reading away from zero: no process has run for that long.
const before = 50 * 365 * 24 * time.Hour

// Now stamps the present.
func (c Clock) Now() Instant {
	now := time.Now()
	i := Instant{mono: before + now.Sub(origin)}
	if c.Boot != nil {
		i.boot = c.Boot()
	} else {
		i.boot = bootAt(now)
	}
	return i
}

// At returns the instant at which the boot clock shows reading.
func (c Clock) At(reading time.Duration) Instant {
	now := c.Now()
	return now.Add(reading - now.boot)
}

// Since returns how much time has passed since i: by whichever clock says more.
func (c Clock) Since(i Instant) time.Duration { return c.Now().Since(i) }

// Until returns how much time is left until i: by whichever clock says less.
func (c Clock) Until(i Instant) time.Duration { return c.Now().Until(i) }

// Passed reports whether i has come, by either clock.
func (c Clock) Passed(i Instant) bool { return c.Until(i) <= 0 }

// Slept returns by how much more the boot clock has moved since i than Go's own: the
// time that the machine spent asleep.
func (c Clock) Slept(i Instant) time.Duration { return c.Now().Slept(i) }

// Since is [Clock.Since] where now is the present.
func (now Instant) Since(i Instant) time.Duration { return max(now.mono-i.mono, now.boot-i.boot) }

// Until is [Clock.Until] where now is the present.
func (now Instant) Until(i Instant) time.Duration { return min(i.mono-now.mono, i.boot-now.boot) }

// Slept is [Clock.Slept] where now is the present.
func (now Instant) Slept(i Instant) time.Duration {
	return max(0, now.boot-i.boot-(now.mono-i.mono))
}

// Add returns the instant d after i.
func (i Instant) Add(d time.Duration) Instant { return Instant{i.mono + d, i.boot + d} }

// Sub returns i - j by Go's monotonic clock.
func (i Instant) Sub(j Instant) time.Duration { return i.mono - j.mono }

// Max returns the later one.
func Max(i, j Instant) Instant {
	if i.mono < j.mono {
		return j
	}
	return i
}

// Boot returns the reading of the boot clock at i.
func (i Instant) Boot() time.Duration { return i.boot }

// IsZero reports whether i is no instant.
func (i Instant) IsZero() bool { return i.mono == 0 }
