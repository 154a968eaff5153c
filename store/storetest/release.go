package storetest

import (
	"errors"
	"sync"

	"github.com/holdfast-go/holdfast/store"
)

var releaseTests = []test{
	{name: "Frees", run: testReleaseFrees},
	{name: "Untried", run: testReleaseUntried},
	{name: "Refused", run: testReleaseRefused},
	{name: "AfterExpiry", run: testReleaseAfterExpiry},
	{name: "AfterAnother", run: testReleaseAfterAnother},
	{name: "ThenTry", run: testReleaseThenTry},
	{name: "DuringTry", run: testReleaseDuringTry},
	{name: "DuringExtend", run: testReleaseDuringExtend},
}

func testReleaseFrees(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	e.grant(c, "the holder")
	e.release(c, "the holder")
	e.release(c, "the holder, a second time")
	next := e.claim(e.s2, key)
	e.grant(next, "the next holder")
	e.release(c, "the former holder, a third time, another holding the key")
	e.held(key, "a key that is held, after a repeated Release of its former holder")
}

func testReleaseUntried(e *env) {
	key := e.key()
	holder := e.claim(e.s2, key)
	e.grant(holder, "the holder")
	e.release(e.claim(e.s, key), "a claim that was never tried")
	e.held(key, "a key that is held, after Release of a claim that was never tried")
}

func testReleaseRefused(e *env) {
	key := e.key()
	holder, c := e.claim(e.s2, key), e.claim(e.s, key)
	e.grant(holder, "the holder")
	e.refused(c, "the other claim")
	e.release(c, "the refused claim")
	e.release(c, "the refused claim, a second time")
	e.held(key, "a key that is held, after Release of a refused claim")
	e.extend(holder, "the holder, after Release of a refused claim")
}

func testReleaseAfterExpiry(e *env) {
	key := e.key()
	l := e.hold(e.short(e.s, key), "the holder")
	e.release(e.lapse(l, e.claim(e.s2, key), "the holder").claim, "the holder in between")
	if err := e.tryRelease(l.claim); !errors.Is(err, store.ErrLost) {
		e.Errorf("Release of a lease whose time has ended answers %v, want ErrLost", err)
	}
	e.free(key, "a key after Release of a lapsed lease")
}

// Release compares the owner: it never touches the grant of a successor.
func testReleaseAfterAnother(e *env) {
	key := e.key()
	l := e.hold(e.short(e.s, key), "the former holder")
	next := e.lapse(l, e.claim(e.s2, key), "the former holder")
	for range 2 {
		if err := e.tryRelease(l.claim); !errors.Is(err, store.ErrLost) {
			e.Errorf("Release of a former holder, another holding the key, answers %v, want ErrLost", err)
		}
	}
	e.held(key, "a key that is held, after Release of its former holder")
	e.extend(next.claim, "the holder, after Release of a former one")
}

// A Try that comes after Release takes nothing.
func testReleaseThenTry(e *env) {
	for _, granted := range []bool{false, true} {
		key := e.key()
		c := e.claim(e.s, key)
		if granted {
			e.grant(c, "the holder")
		}
		e.release(c, "the claim")
		if g, err := e.try(c); err == nil {
			e.Errorf("Try after Release grants token %v", g.Token)
		}
		e.free(key, "a key after Try of a released claim")
	}
}

// Release may be called while Try runs, and then wins.
func testReleaseDuringTry(e *env) {
	e.overlap("Try", func(c store.Claim) { _, _ = c.Try(e.ctx) }, false)
}

// Release may be called while Extend runs, and then wins.
func testReleaseDuringExtend(e *env) {
	e.overlap("Extend", func(c store.Claim) { _, _ = c.Extend(e.ctx) }, true)
}

func (e *env) overlap(op string, call func(store.Claim), granted bool) {
	key := e.key()
	for range 30 {
		c := e.claim(e.s, key)
		if granted {
			e.regrant(c, "the holder")
		}
		var wg sync.WaitGroup
		wg.Go(func() { call(c) })
		e.release(c, "a claim while "+op+" runs")
		wg.Wait()
		e.soonFree(key, "a key after Release and "+op+" at the same time")
	}
}

// soonFree must be granted the key long before a lease that is left over would end.
func (e *env) soonFree(key, what string) {
	e.Helper()
	c := e.claim(e.s2, key)
	var err error
	for range 20 { // one ttl; leases left over have four
		if _, err = e.try(c); !errors.Is(err, store.ErrHeld) {
			break
		}
		e.pause()
	}
	if err != nil {
		e.Fatalf("%s: another is not granted it within a ttl: %v", what, err)
	}
	e.release(c, what)
}
