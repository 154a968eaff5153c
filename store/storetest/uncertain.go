package storetest

import (
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

var uncertaintyTests = []test{
	{name: "TryReplyLostThenTry", run: testTryReplyLostThenTry},
	{name: "TryReplyLostThenRelease", run: testTryReplyLostThenRelease},
	{name: "TryReplyLostThenNothing", run: testTryReplyLostThenNothing},
	{name: "TryRequestLost", run: testTryRequestLost},
	{name: "TryAfterItsRelease", run: testTryAfterItsRelease},
	{name: "ExtendReplyLost", run: testExtendReplyLost},
	{name: "ExtendRequestLost", run: testExtendRequestLost},
	{name: "ReleaseReplyLost", run: testReleaseReplyLost},
	{name: "ReleaseRequestLost", run: testReleaseRequestLost},
	{name: "Duplicates", run: testDuplicates},
}

// faulty opens a store value whose link can be broken: the harness's, or our own.
func (e *env) faulty() (store.Store, Link) {
	if e.h.OpenFaulty != nil {
		return e.h.OpenFaulty()
	}
	s, faults := NewFaults(e.h.Open())
	return s, faultLink{faults}
}

// faultLink makes a Link of Faults.
type faultLink struct{ faults *Faults }

func (l faultLink) LoseRequests() { l.faults.SetAll(LoseRequest) }
func (l faultLink) LoseReplies()  { l.faults.SetAll(LoseReply) }
func (l faultLink) Heal()         { l.faults.Heal() }
func (l faultLink) Hits() (n int) {
	for op := range numOps {
		n += l.faults.Hits(op)
	}
	return n
}

// broken makes one call while the link is broken and wants an error that leaves the
// outcome open.
func (e *env) broken(link Link, lose func(), op string, call func() error) {
	e.Helper()
	before := link.Hits()
	lose()
	err := call()
	link.Heal()
	e.known(op, err)
	if link.Hits() == before {
		e.Fatalf("nothing was lost in %s: the test shows nothing", op)
	}
	if err == nil {
		e.Fatalf("%s without an answer succeeds", op)
	}
	if isAny(err, store.ErrLost, store.ErrHeld, store.ErrInvalid, store.ErrReleased) {
		e.Fatalf("%s without an answer claims to know the outcome: %v", op, err)
	}
	if !isAny(err, store.ErrUncertain, store.ErrUnavailable) {
		e.Fatalf("%s without an answer answers %v, want ErrUncertain or ErrUnavailable", op, err)
	}
}

// replyLost makes a call whose request arrives. The store may have acted, and must say so.
func (e *env) replyLost(link Link, op string, call func() error) {
	e.Helper()
	e.broken(link, link.LoseReplies, op, func() error {
		err := call()
		if err != nil && !errors.Is(err, store.ErrUncertain) {
			e.Errorf("%s that acted, without an answer, answers %v, want ErrUncertain", op, err)
		}
		return err
	})
}

func (e *env) tryOnce(c store.Claim) func() error {
	return func() error { _, err := c.Try(e.ctx); return err }
}

func (e *env) extendOnce(c store.Claim) func() error {
	return func() error { _, err := c.Extend(e.ctx); return err }
}

func (e *env) releaseOnce(c store.Claim) func() error {
	return func() error { return c.Release(e.ctx) }
}

// A grant whose reply was lost is found again by Try, and is one lease.
func testTryReplyLostThenTry(e *env) {
	s, link := e.faulty()
	key := e.key()
	before := e.free(key, "the key")
	c := e.claim(s, key)
	e.replyLost(link, "Try", e.tryOnce(c))
	g := e.grant(c, "a claim whose first grant had no answer")
	e.held(key, "a key that was granted by a second Try")
	e.extend(c, "the holder")
	e.release(c, "the holder")
	after := e.free(key, "a key whose holder had needed two Try calls, after its Release")
	e.growing([]fence.Token{before.Token, g.Token, after.Token}, "around a Try without an answer")
}

// Release after a Try without an answer frees the key.
func testTryReplyLostThenRelease(e *env) {
	s, link := e.faulty()
	key := e.key()
	c := e.claim(s, key)
	e.replyLost(link, "Try", e.tryOnce(c))
	e.release(c, "a claim whose Try had no answer")
	e.soonFree(key, "a key after Try without an answer, and Release")
}

// Nobody asks again: the grant that nobody knows of ends with its ttl.
func testTryReplyLostThenNothing(e *env) {
	s, link := e.faulty()
	key := e.key()
	c := e.short(s, key)
	e.replyLost(link, "Try", e.tryOnce(c))
	end := time.Now().Add(2*e.ttl + e.step())
	next := e.claim(e.s2, key)
	for {
		asked := time.Now()
		if _, err := e.try(next); err == nil {
			break
		}
		if asked.After(end) {
			e.Fatalf("a grant of %v without an answer still keeps the key after twice that time", e.ttl)
		}
		e.pause()
	}
	if g, err := e.try(c); err == nil {
		e.Errorf("a claim whose Try had no answer is granted token %v though another holds the key", g.Token)
	}
	e.release(next, "the next holder")
}

func testTryRequestLost(e *env) {
	s, link := e.faulty()
	key := e.key()
	c := e.claim(s, key)
	e.broken(link, link.LoseRequests, "Try", e.tryOnce(c))
	e.release(c, "a claim whose Try did not arrive")
	e.soonFree(key, "a key after a Try that did not arrive, and Release")
}

// A Try that arrives after the Release of its claim leaves nothing.
func testTryAfterItsRelease(e *env) {
	s, faults := NewFaults(e.h.Open())
	key := e.key()
	c := e.claim(s, key)
	faults.Next(Try, Late(e.ttl/4))
	if _, err := c.Try(e.ctx); !errors.Is(err, store.ErrUncertain) {
		e.Fatalf("Try that arrives late answers %v, want ErrUncertain", err)
	}
	e.release(c, "a claim whose Try is on its way")
	time.Sleep(e.ttl / 2)
	if faults.Hits(Try) != 1 {
		e.Error("no Try was late: the test shows nothing")
	}
	e.soonFree(key, "a key after a Try that arrived after its Release")
}

func testExtendReplyLost(e *env) {
	s, link := e.faulty()
	key := e.key()
	c := e.claim(s, key)
	g := e.grant(c, "the holder")
	e.replyLost(link, "Extend", e.extendOnce(c))
	if x := e.extend(c, "the holder, after Extend without an answer"); x.Token != g.Token {
		e.Errorf("Extend answers token %v, the grant had %v", x.Token, g.Token)
	}
	e.held(key, "a key after Extend without an answer")
	e.release(c, "the holder")
}

func testExtendRequestLost(e *env) {
	s, link := e.faulty()
	key := e.key()
	c := e.claim(s, key)
	g := e.grant(c, "the holder")
	e.broken(link, link.LoseRequests, "Extend", e.extendOnce(c))
	if x := e.extend(c, "the holder, after Extend that did not arrive"); x.Token != g.Token {
		e.Errorf("Extend answers token %v, the grant had %v", x.Token, g.Token)
	}
	e.release(c, "the holder")
}

// Nobody can tell a second Release from one that finds the lease gone, but the key is
// free.
func testReleaseReplyLost(e *env) {
	s, link := e.faulty()
	key := e.key()
	c := e.claim(s, key)
	e.grant(c, "the holder")
	e.replyLost(link, "Release", e.releaseOnce(c))
	if err := e.tryRelease(c); err != nil && !errors.Is(err, store.ErrLost) {
		e.Errorf("Release after one without an answer answers %v, want nil or ErrLost", err)
	}
	e.soonFree(key, "a key after Release without an answer, and another one")
}

// A Release that did not arrive can be repeated.
func testReleaseRequestLost(e *env) {
	s, link := e.faulty()
	key := e.key()
	c := e.claim(s, key)
	e.grant(c, "the holder")
	e.broken(link, link.LoseRequests, "Release", e.releaseOnce(c))
	e.release(c, "the holder, after a Release that did not arrive")
	e.soonFree(key, "a key after a Release that did not arrive, and another one")
}

// Every call may arrive twice.
func testDuplicates(e *env) {
	s, faults := NewFaults(e.h.Open())
	faults.SetAll(Duplicate)
	key := e.key()
	c := e.claim(s, key)
	e.grant(c, "a claim whose calls arrive twice")
	e.held(key, "a key whose holder's calls arrive twice")
	e.extend(c, "a holder whose calls arrive twice")
	e.release(c, "a holder whose calls arrive twice")
	e.free(key, "a key whose holder's calls arrived twice")
	for _, op := range []Op{Try, Extend, Release} {
		if faults.Hits(op) == 0 {
			e.Errorf("no call of op %d arrived twice: the test shows nothing", op)
		}
	}
}
