package storetest

import (
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var ttlTests = []test{
	{name: "DeadHolder", run: testDeadHolder},
	{name: "Promise", run: testPromise},
	{name: "Remaining", run: testRemaining},
}

// A holder that dies keeps others out for as long as its grant promised, and no longer
// than its ttl, be that an odd one or the smallest.
func testDeadHolder(e *env) {
	for _, ttl := range []time.Duration{e.ttl, e.ttl + 234567891*time.Nanosecond, max(store.MinTTL, e.info.MinTTL)} {
		if e.info.CheckTTL(ttl) != nil {
			continue // an odd one above the ceiling
		}
		key, what := e.key(), "a dead holder whose ttl is "+ttl.String()
		l := e.hold(e.s.Claim(key, store.ClaimOptions{TTL: ttl}), what)
		l.ttl = ttl
		next := e.lapse(l, e.claim(e.s2, key), what)
		e.release(next.claim, "the next holder")
	}
}

// A grant never promises more than was asked, be the ttl the smallest, an odd or a large
// one.
func testPromise(e *env) {
	ttls := []time.Duration{
		max(store.MinTTL, e.info.MinTTL),
		e.ttl + 234567891*time.Nanosecond,
		max(e.info.MaxTTL, e.long),
	}
	if e.info.MaxTTL == 0 {
		ttls = append(ttls, 400*24*time.Hour)
	}
	for _, ttl := range ttls {
		if err := e.info.CheckTTL(ttl); err != nil {
			continue // an odd one above the ceiling
		}
		c := e.s.Claim(e.key(), store.ClaimOptions{TTL: ttl})
		start := time.Now()
		g := e.grant(c, "a claim with a ttl of "+ttl.String())
		if most := ttl + e.step() + time.Since(start); g.TTL > most {
			e.Errorf("a grant promises %v where %v was asked", g.TTL, ttl)
		}
		if g.TTL < ttl/2 {
			e.Errorf("a grant promises %v where %v was asked: less than half", g.TTL, ttl)
		}
		_ = e.tryRelease(c) // the smallest one may be over already
	}
}

// What HeldError says of the remaining time falls, and says no more than is left; servers
// beyond the quorum may have granted a little later.
func testRemaining(e *env) {
	key := e.key()
	l := e.hold(e.claim(e.s, key), "the holder")
	time.Sleep(e.ttl / 2)
	before := time.Now()
	held := e.held(key, "a key that is held")
	if most := e.long - before.Sub(l.answered) + e.step() + e.ttl/20; held.Holder.TTL > most {
		e.Errorf("HeldError says that %v are left, there are at most %v", held.Holder.TTL, most)
	}
}
