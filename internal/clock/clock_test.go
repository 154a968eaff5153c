package clock

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// machine is a boot clock in a bubble: it moves with Go's, and by what the machine slept.
type machine struct {
	start time.Time
	slept atomic.Int64
}

func newMachine() *machine { return &machine{start: time.Now()} }

func (m *machine) sleep(d time.Duration) { m.slept.Add(int64(d)) }

func (m *machine) clock() Clock {
	return Clock{Boot: func() time.Duration { return time.Hour + time.Since(m.start) + time.Duration(m.slept.Load()) }}
}

// By whichever clock says that more has passed.
func TestSuspend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		c := m.clock()
		start := c.Now()
		end := start.Add(10 * time.Second)
		check := func(since, until, slept time.Duration, passed bool) {
			t.Helper()
			if got := c.Since(start); got != since {
				t.Errorf("Since = %v, want %v", got, since)
			}
			if got := c.Until(end); got != until {
				t.Errorf("Until = %v, want %v", got, until)
			}
			if got := c.Slept(start); got != slept {
				t.Errorf("Slept = %v, want %v", got, slept)
			}
			if got := c.Passed(end); got != passed {
				t.Errorf("Passed = %v, want %v", got, passed)
			}
		}
		check(0, 10*time.Second, 0, false)
		time.Sleep(3 * time.Second)
		check(3*time.Second, 7*time.Second, 0, false)
		m.sleep(7*time.Second - 1)
		check(10*time.Second-1, 1, 7*time.Second-1, false)
		m.sleep(1)
		check(10*time.Second, 0, 7*time.Second, true)
		m.sleep(time.Hour)
		check(time.Hour+10*time.Second, -time.Hour, time.Hour+7*time.Second, true)
		// A boot clock that goes back, such as a wall clock in its stead, gives nothing back.
		m.sleep(-3 * time.Hour)
		check(3*time.Second, 7*time.Second, 0, false)
		time.Sleep(7 * time.Second)
		check(10*time.Second, 0, 0, true)
	})
}

// An instant survives as a reading of the boot clock, which another process can take up.
func TestAt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		c := m.clock()
		end := c.Now().Add(10 * time.Second)
		reading := end.Boot()
		time.Sleep(2 * time.Second)
		m.sleep(3 * time.Second)
		other := m.clock().At(reading)
		if got := c.Until(other); got != 5*time.Second {
			t.Errorf("Until of the instant taken up = %v, want 5s", got)
		}
		if got := other.Boot(); got != reading {
			t.Errorf("the instant taken up reads %v, want %v", got, reading)
		}
		if past := c.At(reading - time.Minute); !c.Passed(past) {
			t.Error("an instant of a past reading has not passed")
		}
	})
}

func TestInstants(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newMachine().clock()
		var zero Instant
		i := c.Now()
		j := i.Add(time.Second)
		if !zero.IsZero() || i.IsZero() {
			t.Error("IsZero does not tell an instant from none")
		}
		if got := j.Sub(i); got != time.Second {
			t.Errorf("Sub = %v, want 1s", got)
		}
		if got := i.Sub(j); got != -time.Second {
			t.Errorf("Sub = %v, want -1s", got)
		}
		for _, c := range []struct{ i, j, want Instant }{{i, j, j}, {j, i, j}, {zero, i, i}, {i, zero, i}, {i, i, i}, {zero, zero, zero}} {
			if got := Max(c.i, c.j); got != c.want {
				t.Errorf("Max(%v, %v) = %v, want %v", c.i, c.j, got, c.want)
			}
		}
		if !c.Passed(i) || c.Passed(j) {
			t.Error("the present has passed, and the future has not: Passed says otherwise")
		}
		if c.Since(zero) < 1000*time.Hour {
			t.Errorf("Since of no instant = %v, want a very long time", c.Since(zero))
		}
	})
}

// The system's own clocks: both move, and never back.
func TestSystem(t *testing.T) {
	var c Clock
	last := c.Now()
	for range 1000 {
		now := c.Now()
		if now.Boot() < last.Boot() || now.Sub(last) < 0 {
			t.Fatalf("a clock went back: %+v after %+v", now, last)
		}
		last = now
	}
	start := c.Now()
	time.Sleep(20 * time.Millisecond)
	if got := c.Since(start); got < 20*time.Millisecond {
		t.Errorf("Since = %v after 20ms", got)
	}
	if moved := c.Now().Boot() - start.Boot(); moved <= 0 {
		t.Errorf("the boot clock moved by %v in 20ms", moved)
	}
}
