package store

import "time"

// Drift is the allowance for clock-rate error that is taken off a ttl: one per cent
// and two milliseconds, the second one for the expiry granularity of the servers
// (Redis documentation, "Distributed Locks with Redis"). It is the only place where
// drift is computed.
func Drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }

// Validity is how long a grant of ttl can be trusted, elapsed after the clock was
// stamped before its request was sent. It is never negative, for no input.
func Validity(ttl, elapsed time.Duration) time.Duration {
	trusted, elapsed := ttl-Drift(ttl), max(0, elapsed)
	if elapsed >= trusted {
		return 0
	}
	return trusted - elapsed
}
