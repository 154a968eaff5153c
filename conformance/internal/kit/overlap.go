package kit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// CutOff cuts holders off from their store, which another reaches.
type CutOff struct {
	Locks *holdfast.Locker // goes through Proxy, with leases of TTL
	Next  store.Store      // of another process
	Proxy *servertest.Proxy
	TTL   time.Duration
}

// Run cuts one holder off at a random moment and answers by how much the end of its validity came
// before the grant of the next one, who asks again and again: by the clock, since on a busy
// machine the goroutine that hears of it may run later.
func (c CutOff) Run(t *testing.T, key string) time.Duration {
	t.Helper()
	began := time.Now() // right before the instant from which the lease counts
	lease := Acquire(t, c.Locks, key)
	ctx := lease.Context(t.Context())
	time.Sleep(rand.N(c.TTL))
	before := c.Proxy.Counts().BlackHoled
	c.Proxy.BlackHole()
	claim := c.Next.Claim(key, store.ClaimOptions{TTL: c.TTL})
	token, granted := AskUntilGranted(t, claim)
	knew := lease.Err() // by the clock, whenever its timers run
	var expired *holdfast.ExpiredError
	if !errors.As(knew, &expired) {
		t.Fatalf("another was granted the key while the holder trusts its lease for %v (%v)", lease.Validity(), knew)
	}
	lead := granted.Sub(began.Add(expired.Held))
	if lead <= 0 {
		t.Errorf("another was granted %v before the end of the holder's validity", -lead)
	}
	select {
	case <-ctx.Done():
	case <-time.After(c.TTL):
		t.Fatal("the holder's context has not ended a ttl after the next grant")
	}
	if !errors.Is(context.Cause(ctx), holdfast.ErrLost) {
		t.Errorf("the cause is %v, want ErrLost", context.Cause(ctx))
	}
	if token <= lease.Token() {
		t.Errorf("the next token is %v, the lost one %v", token, lease.Token())
	}
	if c.Proxy.Counts().BlackHoled == before {
		t.Error("nothing fell into the black hole: the test shows nothing")
	}
	c.Proxy.Reset()
	c.Proxy.Heal()
	if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("Release of a lost lease: %v, want ErrLost", err)
	}
	if err := claim.Release(t.Context()); err != nil {
		t.Errorf("Release of the next holder: %v", err)
	}
	return lead
}

// AskUntilGranted tries without a pause when the key is about to be free. It answers the token
// and when it was known.
func AskUntilGranted(t *testing.T, claim store.Claim) (fence.Token, time.Time) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(500 * time.Microsecond) {
		g, err := claim.Try(t.Context())
		if err == nil {
			return g.Token, time.Now()
		}
		var held *store.HeldError
		if !errors.As(err, &held) {
			t.Fatal(err)
		}
		time.Sleep(held.Holder.TTL - 50*time.Millisecond)
	}
	t.Fatal("nobody is granted the key")
	return 0, time.Time{}
}

// Hold is what a child process does for [StopHolder]: it holds a key, looks at its lease all
// the time, and tells what it finds after it was stopped.
func Hold(s store.Store, key string, ttl time.Duration) {
	locks, err := holdfast.New(s, &holdfast.Options{TTL: ttl})
	if err != nil {
		Say("error", err)
		return
	}
	lease, err := locks.Acquire(context.Background(), key)
	if err != nil {
		Say("error", err)
		return
	}
	ctx := lease.Context(context.Background())
	ended := make(chan int64, 1)
	go func() {
		<-ctx.Done()
		ended <- time.Now().UnixNano()
	}()
	last := time.Now() // before the parent may stop us
	Say("held", int64(lease.Token()))
	for ; ; time.Sleep(time.Millisecond) {
		now := time.Now()
		if now.Sub(last) > ttl {
			Say("woke", lease.Err() != nil, lease.Validity() > 0) // before anything else
			break
		}
		last = now
	}
	at := <-ended
	Say("ended", at, errors.Is(context.Cause(ctx), holdfast.ErrLost))
	Say("released", errors.Is(lease.Release(context.Background()), holdfast.ErrLost))
}

// StopHolder stops a child that runs [Hold] until after its ttl. Another is granted the key
// meanwhile; the child finds its lease lost when it wakes, and takes nothing from that other. It
// answers how long after its waking the child's context ended.
func StopHolder(t *testing.T, child *Process, next store.Store, key string, ttl time.Duration) time.Duration {
	t.Helper()
	token, _ := strconv.ParseInt(child.Expect(t, "held", time.Minute), 10, 64)
	child.Stop()
	claim := next.Claim(key, store.ClaimOptions{TTL: 10 * ttl})
	granted, _ := AskUntilGranted(t, claim)
	if int64(granted) <= token {
		t.Errorf("the next token is %v, that of the stopped holder %d", granted, token)
	}
	time.Sleep(ttl) // so that the child sees a gap of more than a ttl
	resumed := time.Now()
	child.Cont()
	var gone, valid, isLost bool
	var at int64
	fmt.Sscan(child.Expect(t, "woke", time.Minute), &gone, &valid)
	fmt.Sscan(child.Expect(t, "ended", time.Minute), &at, &isLost)
	if !gone || valid || !isLost {
		t.Errorf("after waking: Err set %v, validity left %v, cause is ErrLost %v", gone, valid, isLost)
	}
	late := time.Unix(0, at).Sub(resumed)
	if late > ttl {
		t.Errorf("the context was cancelled %v after waking, later than a ttl", late)
	}
	if child.Expect(t, "released", time.Minute) != "true" {
		t.Error("Release of the stopped holder does not answer ErrLost")
	}
	<-child.Done()
	if _, err := claim.Extend(t.Context()); err != nil {
		t.Errorf("the next holder, after the stopped one has released: %v", err)
	}
	if err := claim.Release(t.Context()); err != nil {
		t.Error(err)
	}
	return late
}
