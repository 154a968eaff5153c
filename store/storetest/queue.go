package storetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// What a store whose claims wait by themselves must do beyond those that poll.
var queueTests = []test{
	{name: "Woken", run: testWoken, needs: hasWaiter},
	{name: "AsksSeldom", run: testAsksSeldom, needs: hasWaiter, fair: true},
	{name: "InOrder", run: testInOrder, needs: hasWaiter, fair: true},
	{name: "PlaceOfTheCancelled", run: testPlaceOfTheCancelled, needs: hasWaiter},
	{name: "WithdrawnAtItsTurn", run: testWithdrawnAtItsTurn, needs: hasWaiter},
	{name: "WithdrawalRacesRelease", run: testWithdrawalRacesRelease, needs: hasWaiter},
	{name: "ReturnsAtOnce", run: testWaitReturnsAtOnce, needs: hasWaiter},
	{name: "LeavesNothing", run: testCancelledLeavesNothing, needs: hasWaiter},
	{name: "Inspected", run: testQueueInspected, needs: is[store.Inspector], fair: true},
}

// waiting is a claim that acquires in the background.
type waiting struct {
	claim   store.Claim
	cancel  context.CancelFunc
	tries   int           // of Try; to be read when ended
	granted time.Time     // zero where it was not
	err     error         // why not
	ended   chan struct{} // closed then
}

// enqueue makes a claim of s that is refused once and goes on to wait, and answers what it was
// told. then is called, in the background, when it is granted.
func (e *env) enqueue(s store.Store, key, label string, then func(store.Claim)) (*waiting, *store.HeldError) {
	e.Helper()
	c := s.Claim(key, store.ClaimOptions{TTL: e.long, Wait: true, Label: label})
	held := e.refused(c, "a waiter")
	ctx, cancel := context.WithCancel(e.ctx)
	e.Cleanup(cancel)
	w := &waiting{claim: c, cancel: cancel, tries: 1, ended: make(chan struct{})}
	go func() {
		defer close(w.ended)
		_, w.err = e.acquire(ctx, counted{c, &w.tries})
		if w.err == nil {
			w.granted = time.Now()
			then(c)
		}
	}()
	return w, held
}

// await waits for a waiter to be served.
func (e *env) await(w *waiting, what string) {
	e.Helper()
	if <-w.ended; w.err != nil {
		e.Errorf("%s is not granted the key: %v", what, w.err)
	}
}

// giveBack is what a waiter does that has nothing to do.
func (e *env) giveBack(c store.Claim) { e.release(c, "a waiter that was granted the key") }

// counted counts the attempts of a claim.
type counted struct {
	store.Claim
	tries *int
}

func (c counted) Try(ctx context.Context) (store.Grant, error) {
	*c.tries++
	return c.Claim.Try(ctx)
}

func (c counted) Wait(ctx context.Context, held *store.HeldError) error {
	return c.Claim.(store.Waiter).Wait(ctx, held)
}

// soon complains where somebody had to wait for a fourth of the holder's ttl.
func (e *env) soon(took time.Duration, what string) {
	e.Helper()
	if took > e.long/4 {
		e.Errorf("%s takes %v, the holder's ttl being %v", what, took, e.long)
	}
}

// Each of several hand-overs, one after another, wakes the waiter.
func testWoken(e *env) {
	key := e.key()
	holder := e.claim(e.s, key)
	e.grant(holder, "the holder")
	s, other := e.s, e.s2
	for i := range 3 {
		w, _ := e.enqueue(other, key, "storetest", func(store.Claim) {})
		time.Sleep(e.ttl / 10) // lets it wait
		start := time.Now()
		e.release(holder, "the holder")
		e.await(w, "the waiter")
		e.soon(w.granted.Sub(start), fmt.Sprintf("hand-over %d", i+1))
		holder = w.claim
		s, other = other, s
	}
	e.release(holder, "the last holder")
}

// A claim with a place in the queue does not ask again and again.
func testAsksSeldom(e *env) {
	key := e.key()
	holder := e.claim(e.s, key)
	e.grant(holder, "the holder")
	w, _ := e.enqueue(e.s2, key, "storetest", e.giveBack)
	time.Sleep(2 * e.ttl)
	e.release(holder, "the holder")
	if e.await(w, "the waiter"); w.tries > 8 {
		e.Errorf("a waiter tries %d times within half a ttl of the holder, want at most 8", w.tries)
	}
}

// Claims of separate processes are served in the order of their first attempts. One that a
// busy machine stops may lose its turn: most rounds count, where time is real.
func testInOrder(e *env) {
	const rounds, many = 5, 5
	var wrong []string
	for range rounds {
		key := e.key()
		holder := e.claim(e.s, key)
		e.grant(holder, "the holder")
		var mu sync.Mutex
		var order []int
		var all []*waiting
		for i := range many {
			w, held := e.enqueue(e.h.Open(), key, "storetest", func(c store.Claim) {
				mu.Lock()
				order = append(order, i)
				mu.Unlock()
				e.giveBack(c)
			})
			if held.Place != 0 && held.Place != i+1 {
				e.Errorf("waiter %d is told place %d", i+1, held.Place)
			}
			all = append(all, w)
		}
		time.Sleep(e.ttl / 4) // lets all of them wait
		e.release(holder, "the holder")
		for _, w := range all {
			e.await(w, "a waiter in the queue")
		}
		if !slices.IsSorted(order) {
			wrong = append(wrong, fmt.Sprint(order))
		}
	}
	if len(wrong) > rounds/2 || len(wrong) > 0 && e.cfg.Bubble {
		e.Errorf("in %d of %d rounds, waiters are served in another order than that in which they came: %v", len(wrong), rounds, wrong)
	}
}

// A waiter that gives up leaves its place to the next one, while the key is held.
func testPlaceOfTheCancelled(e *env) {
	key := e.key()
	holder := e.claim(e.s, key)
	e.grant(holder, "the holder")
	first, _ := e.enqueue(e.s, key, "storetest", e.giveBack)
	second, _ := e.enqueue(e.s2, key, "storetest", e.giveBack)
	time.Sleep(e.ttl / 10)
	first.cancel()
	<-first.ended
	e.release(first.claim, "the waiter that gives up")
	start := time.Now()
	e.release(holder, "the holder")
	e.await(second, "the waiter behind one that gave up")
	e.soon(second.granted.Sub(start), "the hand-over past one that gave up")
}

// A waiter that gives up when the key is free, and may be meant for it, does not stop the next.
func testWithdrawnAtItsTurn(e *env) {
	key := e.key()
	holder, first := e.claim(e.s, key), e.waiter(e.s, key)
	e.grant(holder, "the holder")
	e.refused(first, "the first waiter")
	second, _ := e.enqueue(e.s2, key, "storetest", e.giveBack)
	time.Sleep(e.ttl / 10)
	start := time.Now()
	e.release(holder, "the holder")
	e.release(first, "the waiter that gives up at its turn")
	e.await(second, "the waiter behind one that gave up at its turn")
	e.soon(second.granted.Sub(start), "the hand-over past one that gave up at its turn")
}

// Whatever the order in which a release and a withdrawal arrive, and whether or not the waiter
// that gives up has heard of its turn: the rest is served.
func testWithdrawalRacesRelease(e *env) {
	rounds := 30
	if os.Getenv("HOLDFAST_SOAK") != "" {
		rounds = 300
	}
	for i := range rounds {
		key := e.key()
		holder := e.claim(e.s, key)
		e.grant(holder, "the holder")
		first := &waiting{claim: e.waiter(e.s, key)}
		if i%2 == 0 {
			first, _ = e.enqueue(e.s, key, "storetest", func(store.Claim) {})
		} else {
			e.refused(first.claim, "a waiter that does not come at its turn")
		}
		second, _ := e.enqueue(e.s2, key, "storetest", e.giveBack)
		start := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(time.Duration(i%15) * 200 * time.Microsecond)
			if i%2 == 0 {
				first.cancel()
				<-first.ended
			}
			e.release(first.claim, "the waiter that gives up")
		})
		time.Sleep(time.Millisecond)
		e.release(holder, "the holder")
		wg.Wait()
		e.await(second, "the waiter behind one that gives up")
		if took := second.granted.Sub(start); took > e.long/2 {
			e.Errorf("round %d: the waiter behind one that gives up is granted the key after %v, the holder's ttl being %v", i, took, e.long)
		}
	}
}

// Wait returns when its context is done, whatever it waits for, and also where nothing answers.
func testWaitReturnsAtOnce(e *env) {
	s, link := e.faulty()
	key := e.key()
	holder := e.claim(e.s, key)
	e.grant(holder, "the holder")
	for _, silent := range []bool{false, true} {
		c := e.waiter(s, key)
		held := e.refused(c, "the waiter")
		if silent {
			link.LoseReplies()
		}
		ctx, cancel := context.WithCancel(e.ctx)
		var cancelled time.Time
		timer := time.AfterFunc(e.ttl/5, func() { cancelled = time.Now(); cancel() })
		for ctx.Err() == nil { // a hint may come at any time
			err := c.(store.Waiter).Wait(ctx, held)
			if e.known("Wait", err); ctx.Err() == nil {
				time.Sleep(e.ttl / 50)
			} else if err != nil && !errors.Is(err, context.Canceled) {
				e.Errorf("Wait whose context was cancelled answers %v", err)
			}
		}
		timer.Stop()
		if took := time.Since(cancelled); took > e.ttl/4 {
			e.Errorf("Wait returns %v after its context was cancelled (answers lost: %v)", took, silent)
		}
		link.Heal()
		e.release(c, "the waiter")
	}
	e.release(holder, "the holder")
}

// Nothing keeps a free key, not for a moment, when its waiters have all been withdrawn.
func testCancelledLeavesNothing(e *env) {
	key := e.key()
	holder := e.claim(e.s, key)
	e.grant(holder, "the holder")
	var all []*waiting
	for range 3 {
		for _, s := range []store.Store{e.s, e.s2} {
			w, _ := e.enqueue(s, key, "storetest", e.giveBack)
			all = append(all, w)
		}
	}
	time.Sleep(e.ttl / 10)
	for _, w := range all {
		w.cancel()
	}
	for _, w := range all {
		<-w.ended
		e.release(w.claim, "a waiter that gives up")
	}
	if e.cfg.Fair && is[store.Inspector](e.s2) {
		e.queued(key)
	}
	e.release(holder, "the holder")
	e.soonFree(key, "a key whose waiters were all withdrawn")
}

// queued complains unless Inspect, soon, tells just of waiters with those labels, in their order.
func (e *env) queued(key string, labels ...string) {
	e.Helper()
	var h store.Holder
	var found []string
	for range 40 {
		h = e.inspect(key)
		found = nil
		for _, q := range h.Queue {
			found = append(found, q.Label)
			if q.Owner == "" || q.Waited < 0 || q.Waited > time.Since(e.began)+e.ttl {
				e.Errorf("Inspect tells of a waiter %+v", q)
			}
		}
		if h.Waiting == len(labels) && slices.Equal(found, labels) {
			return
		}
		e.pause()
	}
	e.Errorf("Inspect tells of %d waiters, %q, want %q", h.Waiting, found, labels)
}

// Inspect tells who is in the queue, and in which order.
func testQueueInspected(e *env) {
	key := e.key()
	holder := e.claim(e.s, key)
	g := e.grant(holder, "the holder")
	e.queued(key)
	var all []*waiting
	for _, label := range []string{"first", "second", "third"} {
		w, _ := e.enqueue(e.h.Open(), key, label, e.giveBack)
		all = append(all, w)
	}
	e.queued(key, "first", "second", "third")
	e.describes("Inspect of a key with a queue", e.inspect(key), key, g)
	all[1].cancel()
	<-all[1].ended
	e.release(all[1].claim, "the second waiter")
	e.queued(key, "first", "third")
	e.release(holder, "the holder")
	e.await(all[0], "the first waiter")
	e.await(all[2], "the third waiter")
	e.queued(key)
}
