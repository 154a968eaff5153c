package storetest

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

var exclusionTests = []test{
	{name: "Info", run: testInfo},
	{name: "OneHolder", run: testOneHolder},
	{name: "SameLabel", run: testSameLabel},
	{name: "SameProcess", run: testSameProcess},
	{name: "Contended", run: testContended},
}

func testInfo(e *env) {
	if e.info.Name == "" || e.info.Fingerprint == "" {
		e.Errorf("Info lacks a name or a fingerprint: %+v", e.info)
	}
	if again := e.s.Info(); again != e.info {
		e.Errorf("Info answers %+v, and then %+v", e.info, again)
	}
	if other := e.s2.Info(); other != e.info {
		e.Errorf("two store values on the same state answer %+v and %+v", e.info, other)
	}
}

func testOneHolder(e *env) {
	key := e.key()
	a := e.claim(e.s, key)
	g := e.grant(a, "the first holder")
	held := e.held(key, "a key that another process holds")
	if held.Holder.TTL > e.long+e.step()+time.Millisecond {
		e.Errorf("HeldError says that the grant has %v left, of %v asked", held.Holder.TTL, e.long)
	}
	if held.Holder.Owner != "" && held.Holder.Owner != g.Owner {
		e.Errorf("HeldError names owner %q, the grant's is %q", held.Holder.Owner, g.Owner)
	}
	if held.Holder.Foreign || held.Holder.NoTTL {
		e.Errorf("HeldError calls a lease of this store foreign or endless: %+v", held.Holder)
	}
	e.release(a, "the first holder")
	e.free(key, "a released key")
}

// A label is for people: two claims with the same one exclude each other.
func testSameLabel(e *env) {
	key := e.key()
	o := store.ClaimOptions{TTL: e.long, Label: "worker-1"}
	a, b := e.s.Claim(key, o), e.s2.Claim(key, o)
	g := e.grant(a, "the first of two claims with the same label")
	e.refused(b, "the second of two claims with the same label")
	e.release(b, "the refused claim with the same label")
	e.extend(a, "the holder, after the other claim with its label was released")
	e.release(a, "the holder")
	if next := e.regrant(e.s2.Claim(key, o), "the next claim with the same label"); next.Owner == g.Owner {
		e.Errorf("two claims with the same label have the same owner %q", g.Owner)
	}
}

func testSameProcess(e *env) {
	key := e.key()
	a, b := e.claim(e.s, key), e.claim(e.s, key)
	e.grant(a, "the first of two claims of one store value")
	e.refused(b, "the second of two claims of one store value")
	e.release(b, "the refused claim")
	e.held(key, "a key that is held, after the release of another claim")
}

// Many goroutines of three processes take the lock in turn: never two at once, and tokens
// grow in the order of the holders.
func testContended(e *env) {
	const workers, rounds = 6, 5
	key := e.key()
	stores := []store.Store{e.s, e.s2, e.h.Open()}
	var inside atomic.Int32
	var tokens []fence.Token // written under the lock that is tested
	var mu sync.Mutex        // makes a failure of that lock a message, not a data race
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for range rounds {
				c := e.waiter(stores[i%len(stores)], key)
				g, err := e.acquire(e.ctx, c)
				if err != nil {
					e.Errorf("a waiter is not granted the key: %v", err)
					return
				}
				if n := inside.Add(1); n != 1 {
					e.Errorf("%d hold the key at once", n)
				}
				mu.Lock()
				tokens = append(tokens, g.Token)
				mu.Unlock()
				inside.Add(-1)
				if err := e.tryRelease(c); err != nil && !errors.Is(err, store.ErrLost) {
					e.Errorf("Release of a holder answers %v", err)
				}
			}
		})
	}
	wg.Wait()
	if want := workers * rounds; len(tokens) != want {
		e.Errorf("the key was granted %d times, want %d", len(tokens), want)
	}
	e.growing(tokens, "in the order of the holders")
}
