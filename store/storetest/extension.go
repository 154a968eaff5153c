package storetest

import (
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var extensionTests = []test{
	{name: "Keeps", run: testExtendKeeps},
	{name: "NeverShortens", run: testExtendNeverShortens},
	{name: "NotAfterRelease", run: testExtendAfterRelease},
	{name: "NotAfterExpiry", run: testExtendAfterExpiry},
	{name: "NotAfterAnother", run: testExtendAfterAnother},
	{name: "NotInAnothersName", run: testExtendNotInAnothersName},
	{name: "NotWithoutGrant", run: testExtendWithoutGrant},
	{name: "Batch", run: testBatch, needs: is[store.BatchExtender]},
}

// Extended in time, a lease goes on past its ttl, with the same token and owner.
func testExtendKeeps(e *env) {
	key := e.key()
	c := e.short(e.s, key)
	asked := time.Now()
	first := e.grant(c, "the holder")
	for range 6 {
		time.Sleep(e.ttl / 3)
		now := time.Now()
		g, err := e.tryExtend(c)
		if errors.Is(err, store.ErrLost) && now.Sub(asked) > store.Validity(e.ttl, 0) {
			e.Fatalf("this machine is too busy: the extension came %v after the one before, with a ttl of %v", now.Sub(asked), e.ttl)
		}
		if err != nil {
			e.Fatalf("Extend of a lease that stands answers %v, want a grant", err)
		}
		e.sound(g, "an extension")
		if g.Token != first.Token || g.Owner != first.Owner {
			e.Errorf("Extend answers token %v and owner %q, the grant had %v and %q", g.Token, g.Owner, first.Token, first.Owner)
		}
		if most := e.ttl + e.step() + time.Since(now); g.TTL > most {
			e.Errorf("Extend promises %v where %v was asked", g.TTL, e.ttl)
		}
		asked = now
		e.held(key, "a key whose lease is extended")
	}
	e.release(c, "the holder, after extensions")
}

// The end after an extension is never before what the extension promised.
func testExtendNeverShortens(e *env) {
	key := e.key()
	l := e.hold(e.short(e.s, key), "the holder")
	time.Sleep(e.ttl / 3)
	e.extend(l.claim, "the holder")
	l.asked = time.Now()
	l.Grant = e.extend(l.claim, "the holder, again at once")
	l.answered = time.Now()
	next := e.lapse(l, e.claim(e.s2, key), "a holder that dies after its extension")
	e.release(next.claim, "the next holder")
}

func testExtendAfterRelease(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	e.grant(c, "the holder")
	e.release(c, "the holder")
	if g, err := e.tryExtend(c); err == nil {
		e.Errorf("Extend after Release grants token %v, want ErrLost or ErrReleased", g.Token)
	} else if !isAny(err, store.ErrLost, store.ErrReleased) {
		e.Errorf("Extend after Release answers %v, want ErrLost or ErrReleased", err)
	}
	e.free(key, "a key that was released, and extended afterwards")
}

// A lapsed lease is not extended, whether or not somebody held the key in between.
func testExtendAfterExpiry(e *env) {
	for _, between := range []bool{false, true} {
		key, what := e.key(), "a lease whose time has ended"
		l := e.hold(e.short(e.s, key), "the holder")
		if between {
			what = "a lease whose time has ended, another having held the key since"
			e.release(e.lapse(l, e.claim(e.s2, key), "the holder").claim, "the holder in between")
		} else {
			time.Sleep(e.ttl + e.step() + e.ttl/2)
		}
		e.lost(l.claim, what)
		e.free(key, "a key after Extend of "+what)
	}
}

// Extend of a former holder leaves the grant of its successor alone.
func testExtendAfterAnother(e *env) {
	key := e.key()
	l := e.hold(e.short(e.s, key), "the former holder")
	next := e.lapse(l, e.claim(e.s2, key), "the former holder")
	e.lost(l.claim, "a former holder, another holding the key")
	e.extend(next.claim, "the holder, after a former one has tried to extend")
	e.held(key, "a key whose former holder has tried to extend")
	e.release(next.claim, "the holder")
}

// Extend of a former holder does not prolong its successor's grant.
func testExtendNotInAnothersName(e *env) {
	key := e.key()
	former := e.hold(e.short(e.s, key), "the former holder")
	l := e.lapse(former, e.short(e.s2, key), "the former holder")
	time.Sleep(e.ttl * 3 / 4)
	e.lost(former.claim, "a former holder, another holding the key")
	next := e.lapse(l, e.claim(e.s, key), "a dead holder whose predecessor has tried to extend")
	e.release(next.claim, "the third holder")
}

func testExtendWithoutGrant(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	if g, err := e.tryExtend(c); err == nil {
		e.Errorf("Extend of a claim that was never granted grants token %v", g.Token)
	}
	e.free(key, "a key after Extend of a claim that was never granted")
}

// The answers of a batch stand in the order of its claims, each for itself.
func testBatch(e *env) {
	s := e.s.(store.BatchExtender)
	if got := s.ExtendMany(e.ctx, nil); len(got) != 0 {
		e.Errorf("ExtendMany of no claims has %d answers", len(got))
	}
	const n = 40
	claims, grants := make([]store.Claim, n), make([]store.Grant, n)
	lapsed := func(i int) bool { return i%4 == 1 }
	released := func(i int) bool { return i%4 == 3 }
	for i := range claims {
		if claims[i] = e.claim(e.s, e.key()); lapsed(i) {
			claims[i] = e.s.Claim(e.key(), store.ClaimOptions{TTL: max(store.MinTTL, e.info.MinTTL)})
		}
	}
	for i, c := range claims {
		grants[i] = e.grant(c, "a claim of the batch")
		if released(i) {
			e.release(c, "a claim of the batch")
		}
	}
	for left := max(store.MinTTL, e.info.MinTTL) + e.step() + e.ttl/2; left > 0; left -= e.long / 4 {
		time.Sleep(min(left, e.long/4))
		for i, c := range claims { // where a store rounds a ttl to more than the others have
			if left > e.long/4 && !lapsed(i) && !released(i) {
				e.extend(c, "a claim of the batch, while another lapses")
			}
		}
	}
	results := s.ExtendMany(e.ctx, claims)
	if len(results) != n {
		e.Fatalf("ExtendMany of %d claims has %d answers", n, len(results))
	}
	for i, r := range results {
		e.known("ExtendMany", r.Err)
		switch {
		case lapsed(i) && !errors.Is(r.Err, store.ErrLost):
			e.Errorf("answer %d of a batch is %v for a lapsed lease, want ErrLost", i, r.Err)
		case released(i) && !isAny(r.Err, store.ErrLost, store.ErrReleased):
			e.Errorf("answer %d of a batch is %v for a released lease, want ErrLost or ErrReleased", i, r.Err)
		case !lapsed(i) && !released(i) && r.Err != nil:
			e.Errorf("answer %d of a batch is %v for a lease that stands", i, r.Err)
		case r.Err == nil && (r.Grant.Token != grants[i].Token || r.Grant.Owner != grants[i].Owner):
			e.Errorf("answer %d of a batch has token %v and owner %q, the claim's are %v and %q", i,
				r.Grant.Token, r.Grant.Owner, grants[i].Token, grants[i].Owner)
		}
	}
}
