package store_test

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

const ms = time.Millisecond

// The formula by hand, at the boundaries that other libraries got wrong: drift added
// instead of taken off (CLK-01), a stray 2 ms (CLK-02), zero taken for held, negative values
// handed out (TTL-05).
func TestValidity(t *testing.T) {
	for _, c := range []struct{ ttl, elapsed, want time.Duration }{
		{10 * time.Second, 0, 10*time.Second - 102*ms},
		{10 * time.Second, time.Second, 9*time.Second - 102*ms},
		{100 * ms, 0, 97 * ms},
		{100 * ms, 97*ms - 1, 1},
		{100 * ms, 97 * ms, 0},
		{100 * ms, 97*ms + 1, 0},
		{100 * ms, 100 * ms, 0},
		{100 * ms, time.Hour, 0},
		{5 * ms, 0, 5*ms - 2*ms - 50*time.Microsecond},
		{20 * ms, 10 * ms, 10*ms - 2*ms - 200*time.Microsecond},
		{2 * ms, 0, 0},
		{ms, 0, 0},
		{0, 0, 0},
		{-time.Second, 0, 0},
		{10 * time.Second, -time.Second, 10*time.Second - 102*ms}, // a clock that went back gives nothing
		// time.Since of no instant is the greatest duration
		{1, math.MaxInt64, 0},
		{100 * ms, math.MaxInt64, 0},
		{math.MinInt64, math.MaxInt64, 0},
		{math.MinInt64, math.MinInt64, 0},
	} {
		if got := store.Validity(c.ttl, c.elapsed); got != c.want {
			t.Errorf("Validity(%v, %v) = %v, want %v", c.ttl, c.elapsed, got, c.want)
		}
	}
}

// CLK-01, for all inputs: never negative, never more than ttl - elapsed - drift, and just that
// where it is positive, computed without bounds.
func TestValidityForAll(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	any := func() time.Duration {
		d := time.Duration(rng.Uint64()) >> rng.IntN(64)
		if rng.IntN(20) == 0 {
			d = []time.Duration{0, 1, -1, math.MaxInt64, math.MinInt64}[rng.IntN(5)]
		}
		return d
	}
	for range 200_000 {
		ttl, elapsed := any(), any()
		if rng.IntN(2) == 0 && ttl > 0 { // near the boundary
			elapsed = ttl - store.Drift(ttl) + time.Duration(rng.IntN(5)-2)
		}
		want := big.NewInt(int64(ttl))
		want.Sub(want, big.NewInt(int64(max(0, elapsed))))
		want.Sub(want, big.NewInt(int64(ttl/100)))
		want.Sub(want, big.NewInt(int64(2*ms)))
		if want.Sign() < 0 {
			want.SetInt64(0)
		}
		if got := store.Validity(ttl, elapsed); big.NewInt(int64(got)).Cmp(want) != 0 {
			t.Fatalf("Validity(%d, %d) = %d, want %v", ttl, elapsed, got, want)
		}
	}
}

func TestDriftGrows(t *testing.T) {
	for ttl := time.Duration(1); ttl > 0 && ttl < math.MaxInt64/3; ttl *= 3 {
		if d := store.Drift(ttl); d < 2*ms || d < ttl/100 || d > ttl/100+2*ms {
			t.Errorf("Drift(%v) = %v, want a hundredth and 2ms", ttl, d)
		}
	}
}

func FuzzValidity(f *testing.F) {
	f.Add(int64(time.Second), int64(0))
	f.Add(int64(1), int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, ttl, elapsed int64) {
		v := store.Validity(time.Duration(ttl), time.Duration(elapsed))
		if v < 0 || ttl <= 0 && v > 0 || ttl > 0 && v > time.Duration(ttl) {
			t.Errorf("Validity(%d, %d) = %d", ttl, elapsed, v)
		}
		if ttl > 0 && elapsed >= ttl && v != 0 {
			t.Errorf("Validity(%d, %d) = %d though the ttl has passed", ttl, elapsed, v)
		}
	})
}
