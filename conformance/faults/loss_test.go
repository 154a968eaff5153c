package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// A holder that is cut off from the store knows of the loss before another can acquire; its
// token is the smaller one. R9, class 1, SLO-03.
func TestCutOffHolderKnowsFirst(t *testing.T) {
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{TTL: cutOffTTL})
		next := b.store(t, kit.Addrs(b.servers))
		runs := kit.Count(3, 100)
		smallest := time.Hour
		for i := range runs {
			lead := b.cutOff(t, next, "k"+strconv.Itoa(i))
			smallest = min(smallest, lead)
		}
		t.Logf("%d runs: the holder knew first, at the least by %v; ttl %v, drift %v",
			runs, smallest.Round(10*time.Microsecond), cutOffTTL, store.Drift(cutOffTTL))
	})
}

// cutOffTTL has a drift that is longer than a goroutine waits for a processor on a busy machine.
const cutOffTTL = 2 * time.Second

// cutOff cuts one holder off at a random moment and answers by how much its loss came before
// the grant of the next one, who asks again and again.
func (b *bed) cutOff(t *testing.T, next store.Store, key string) time.Duration {
	t.Helper()
	lease, err := b.locks.Acquire(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	ctx := lease.Context(t.Context())
	lost := make(chan time.Time, 1)
	go func() {
		<-ctx.Done()
		lost <- time.Now()
	}()
	time.Sleep(time.Duration(rand.Int64N(int64(cutOffTTL))))
	var before int64
	for _, p := range b.proxies {
		before += p.Counts().BlackHoled
		p.BlackHole()
	}
	claim := next.Claim(key, store.ClaimOptions{TTL: cutOffTTL})
	token, granted := kit.AskUntilGranted(t, claim)
	knew := lease.Err() // by the clock, whenever its timers run
	var at time.Time
	select {
	case at = <-lost:
	case <-time.After(cutOffTTL):
		t.Fatal("the holder's context has not ended a ttl after the next grant")
	}
	lead := granted.Sub(at)
	if !errors.Is(knew, holdfast.ErrLost) || lead <= 0 {
		t.Errorf("another was granted %v before the holder knew of the loss (%v)", -lead, knew)
	}
	if !errors.Is(context.Cause(ctx), holdfast.ErrLost) {
		t.Errorf("the cause is %v, want ErrLost", context.Cause(ctx))
	}
	if token <= lease.Token() {
		t.Errorf("the next token is %v, the lost one %v", token, lease.Token())
	}
	var holed int64
	for _, p := range b.proxies {
		holed += p.Counts().BlackHoled
		p.Reset()
		p.Heal()
	}
	if holed == before {
		t.Error("nothing fell into the black hole: the test shows nothing")
	}
	if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("Release of a lost lease: %v, want ErrLost", err)
	}
	if err := claim.Release(t.Context()); err != nil {
		t.Errorf("Release of the next holder: %v", err)
	}
	return lead
}

// hold is a child process that runs [kit.Hold].
func hold() {
	args := kit.Args()
	s, end := kit.ChildStore(args[1:])
	kit.Hold(s, args[0], time.Second)
	end()
}

// A holder that is stopped past its ttl finds its context cancelled right after waking, and
// its token below the next holder's; its first look says that the lease is lost. LOS-08.
func TestStoppedHolderWakesToALostLease(t *testing.T) {
	servertest.CanPause(t)
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		servers := kit.Servers(t, n)
		next := kit.Store(t, c, redlockOptions, kit.Addrs(servers))
		var late []time.Duration
		for i := range kit.Count(2, 20) {
			key := "k" + strconv.Itoa(i)
			child := kit.Child(t, "hold", append([]string{key, c.Name}, kit.Addrs(servers)...)...)
			token, _ := strconv.ParseInt(child.Expect(t, "held", time.Minute), 10, 64)
			child.Stop()
			claim := next.Claim(key, store.ClaimOptions{TTL: ttl})
			g, err := grantedAfterWait(t, claim)
			if err != nil {
				t.Fatal(err)
			}
			if int64(g.Token) <= token {
				t.Errorf("the next token is %v, that of the stopped holder %d", g.Token, token)
			}
			time.Sleep(time.Second) // so that the child sees a gap of more than a ttl
			resumed := time.Now()
			child.Cont()
			var gone, valid, isLost bool
			var at int64
			fmt.Sscan(child.Expect(t, "woke", time.Minute), &gone, &valid)
			fmt.Sscan(child.Expect(t, "ended", time.Minute), &at, &isLost)
			if !gone || valid || !isLost {
				t.Errorf("after waking: Err set %v, validity left %v, cause is ErrLost %v", gone, valid, isLost)
			}
			d := time.Unix(0, at).Sub(resumed)
			if d > time.Second {
				t.Errorf("the context was cancelled %v after waking, later than a ttl", d)
			}
			late = append(late, d)
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
		}
		t.Logf("%d runs: cancelled %v after waking (median), %v at the most",
			len(late), kit.Median(late).Round(time.Microsecond), kit.Quantile(late, 1).Round(time.Microsecond))
	})
}

func grantedAfterWait(t *testing.T, claim store.Claim) (store.Grant, error) {
	for end := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		g, err := claim.Try(t.Context())
		if !errors.Is(err, store.ErrHeld) || time.Now().After(end) {
			return g, err
		}
	}
}

// SLO-03: nodes that answer after the end of the lease do not make it valid, nor is it ever
// called valid later than its deadline.
func TestLateAnswersReviveNothing(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 5, holdfast.Options{TTL: 2 * time.Second, NoExtend: true})
			kit.Warm(t, b.locks)
			lease := kit.Acquire(t, b.locks, "k")
			// One late node: the extension returns with the quorum of the others. On a busy
			// machine these can be late, too, so it is repeated, as the Locker does.
			b.proxies[4].DelayReplies(3 * time.Second)
			err := lease.Extend(t.Context())
			for err != nil && lease.Err() == nil {
				err = lease.Extend(t.Context())
			}
			if err != nil {
				t.Fatalf("Extend with one late node: %v", err)
			}
			left := lease.Validity()
			// Three late nodes: no quorum in time, and the lease ends by its own clock.
			for _, p := range b.proxies {
				p.DelayReplies(3 * time.Second)
			}
			deadline := time.Now().Add(left)
			if err := lease.Extend(t.Context()); err == nil {
				t.Error("Extend succeeds without an answer")
			}
			for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				if asked := time.Now(); lease.Err() == nil && asked.After(deadline) {
					t.Fatalf("the lease is called valid %v after its deadline", asked.Sub(deadline))
				}
			}
			if err := lease.Extend(t.Context()); !errors.Is(err, holdfast.ErrLost) {
				t.Errorf("Extend after the late answers: %v, want ErrLost", err)
			}
			if b.proxies[0].Counts().Delayed == 0 {
				t.Error("nothing was late: the test shows nothing")
			}
			for _, p := range b.proxies {
				p.Heal()
			}
			_ = lease.Release(t.Context())
		})
	}
}
