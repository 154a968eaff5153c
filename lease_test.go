package holdfast

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

// validity is that of the default ttl.
var validity = store.Validity(DefaultTTL, 0)

func TestLeaseIsExtended(t *testing.T) {
	for name, in := range map[string]func(*testing.T, Options, func(*bed)){"batches": bubble, "one by one": plainBubble} {
		t.Run(name, func(t *testing.T) {
			in(t, Options{}, func(b *bed) {
				l := b.acquire("k")
				for range 1000 {
					time.Sleep(time.Second)
					if l.Err() != nil {
						t.Fatal(l.Err())
					}
					if v := l.Validity(); v < validity-DefaultTTL/3-time.Millisecond || v > validity {
						t.Fatalf("validity %v", v)
					}
				}
				if n := len(told[Extended](b.events)); n < 195 || n > 205 {
					t.Errorf("%d extensions in 1000 s, every %v", n, DefaultTTL/3)
				}
				b.release(l)
			})
		})
	}
}

// EXT-02, TTL-05: the same lease carries the new end, up to which it is valid, and not at it.
func TestNoExtend(t *testing.T) {
	bubble(t, Options{TTL: 5 * time.Second, NoExtend: true}, func(b *bed) {
		l := b.acquire("k")
		time.Sleep(4 * time.Second)
		if err := l.Extend(b.ctx); err != nil {
			t.Fatal(err)
		}
		if v := l.Validity(); v != store.Validity(5*time.Second, 0) {
			t.Errorf("validity %v after Extend", v)
		}
		time.Sleep(3 * time.Second)
		if err := l.Extend(b.ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(store.Validity(5*time.Second, 0) - 1)
		if l.Err() != nil {
			t.Fatal(l.Err())
		}
		time.Sleep(time.Nanosecond)
		want(t, l.Err(), ErrLost)
		var expired *ExpiredError
		if !errors.As(l.Err(), &expired) || expired.Err != nil || expired.Held != 7*time.Second+store.Validity(5*time.Second, 0) {
			t.Errorf("cause %+v", expired)
		}
		want(t, l.Extend(b.ctx), ErrLost)
		if l.Validity() != 0 {
			t.Error("a lost lease has a validity")
		}
	})
}

// The loss comes at the local deadline, whatever the store does.
func TestLossAtTheDeadline(t *testing.T) {
	for name, fault := range map[string]storetest.Fault{
		"extensions fail":          storetest.Fail(fmt.Errorf("node 2: %w", store.ErrUnavailable)),
		"extensions hang":          storetest.Hang,
		"requests are lost":        storetest.LoseRequest,
		"extensions ignore limits": nil,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, Options{}, func(b *bed) {
				l := b.acquire("k")
				ctx := l.Context(b.ctx)
				hung, fault := make(chan struct{}), fault
				if fault == nil {
					fault = storetest.HangUntil(hung)
				}
				b.faults.Set(storetest.Extend, fault)
				began := time.Now()
				<-ctx.Done()
				if since := time.Since(began); since != validity {
					t.Errorf("lost after %v, not %v", since, validity)
				}
				cause := context.Cause(ctx)
				want(t, cause, ErrLost)
				if cause != l.Err() {
					t.Error("two causes")
				}
				select {
				case <-l.Done():
				default:
					t.Error("Done is open")
				}
				var expired *ExpiredError
				if !errors.As(cause, &expired) || expired.Held != validity || expired.Err == nil || expired.Failing <= 0 || expired.Since.IsZero() {
					t.Errorf("cause %v", cause)
				}
				synctest.Wait() // the Observer is told right after the end
				risks, losses := told[AtRisk](b.events), told[Lost](b.events)
				if len(risks) == 0 || risks[0].Left < DefaultTTL/10 {
					t.Errorf("the risk was told too late: %+v", risks)
				}
				if len(losses) != 1 || losses[0].Err != cause || losses[0].Overrun != 0 {
					t.Errorf("told of losses %+v", losses)
				}
				if b.faults.Hits(storetest.Extend) == 0 {
					t.Error("no fault happened")
				}
				// What comes late revives nothing.
				b.faults.Heal()
				close(hung)
				time.Sleep(time.Minute)
				want(t, l.Err(), ErrLost)
				want(t, l.Extend(b.ctx), ErrLost)
				began = time.Now()
				want(t, l.Release(b.ctx), ErrLost)
				if time.Since(began) > 0 {
					t.Error("release of a lost lease took", time.Since(began))
				}
			})
		})
	}
}

// LOS-13: extensions that fail for a while are no loss.
func TestExtensionRecovers(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		b.faults.Set(storetest.Extend, storetest.Fail(store.ErrUnavailable))
		time.AfterFunc(DefaultTTL/3+DefaultTTL*4/10, b.faults.Heal)
		time.Sleep(10 * DefaultTTL)
		if l.Err() != nil {
			t.Fatal(l.Err())
		}
		hits := b.faults.Hits(storetest.Extend)
		if hits < 4 || hits > 5 { // every tenth of the ttl
			t.Errorf("%d failures", hits)
		}
		if risks := told[AtRisk](b.events); len(risks) != hits {
			t.Errorf("%d failures, %d told", hits, len(risks))
		}
		recovered := 0
		for _, e := range told[Extended](b.events) {
			recovered += e.Failures
		}
		if recovered != hits {
			t.Errorf("the recovery tells of %d failures, not %d", recovered, hits)
		}
		b.release(l)
	})
}

func TestLostReplyOfExtension(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		b.faults.Next(storetest.Extend, storetest.LoseReply, nil, storetest.Duplicate)
		time.Sleep(10 * DefaultTTL)
		if l.Err() != nil || b.faults.Hits(storetest.Extend) != 2 {
			t.Fatal(l.Err(), b.faults.Hits(storetest.Extend))
		}
		b.release(l)
	})
}

// OWN-01, OWN-09: an extension never re-acquires, and never touches another's lease.
func TestLeaseGoneFromTheStore(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		_ = b.mem.Lose("k")
		want(t, l.Extend(b.ctx), ErrLost)
		var lost *LostError
		if !errors.As(l.Err(), &lost) || lost.By != nil {
			t.Errorf("cause %v", l.Err())
		}
		want(t, l.Extend(b.ctx), ErrLost)
		if b.holder("k") != "" {
			t.Error("the extension took the key again")
		}
		want(t, l.Release(b.ctx), ErrLost)

		l = b.acquire("k")
		_ = b.mem.Lose("k")
		rival, err := b.other(&Options{Label: "rival"}).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		<-l.Done()
		if since := time.Since(began); since > DefaultTTL/3 {
			t.Errorf("noticed after %v", since)
		}
		want(t, l.Err(), ErrLost, ErrHeld)
		if !strings.Contains(l.Err().Error(), "rival") {
			t.Error(l.Err())
		}
		want(t, l.Release(b.ctx), ErrLost)
		if b.holder("k") != rival.Owner() {
			t.Error("the late release took the rival's lease")
		}
		if err := rival.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
	})
}

// A second grant within the process proves that the first one is gone.
func TestSecondGrantEndsTheFirst(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		before, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		b.faults.Next(storetest.Try, storetest.Delay(time.Second)) // under way when the first one is taken over
		ctx, cancel := context.WithTimeout(b.ctx, DefaultTTL/10)
		defer cancel()
		time.AfterFunc(time.Second/2, func() {
			ticket, err := before.Ticket()
			if err != nil {
				t.Error(err)
			}
			if before, err = b.locks.Adopt(b.ctx, ticket); err != nil {
				t.Error(err)
			}
			_ = b.mem.Lose("k")
		})
		m, err := b.locks.Acquire(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		l := before
		synctest.Wait()
		want(t, l.Err(), ErrLost, ErrHeld)
		if m.Err() != nil {
			t.Error(m.Err())
		}
		want(t, l.Release(b.ctx), ErrLost)
		b.release(m)
	})
}

// A lease that is gone from the store keeps the waiters of its process until that is noticed,
// which is before its time is over.
func TestWaiterBehindALeaseThatIsGone(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		_ = b.mem.Lose("k")
		began := time.Now()
		m := b.acquire("k")
		if since := time.Since(began); since > DefaultTTL/3 || l.Err() == nil {
			t.Errorf("acquired after %v; the first one: %v", since, l.Err())
		}
		want(t, l.Release(b.ctx), ErrLost)
		b.release(m)
	})
}

// LOS-08: a machine that slept wakes up to a lost lease, though Go's clock stood still.
func TestLossOnSuspend(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		time.Sleep(time.Second)
		b.suspend(time.Hour)
		began := time.Now()
		<-l.Done() // nobody asks: the watchdog finds it
		if since := time.Since(began); since > time.Second {
			t.Errorf("noticed after %v", since)
		}
		want(t, l.Err(), ErrLost)
		synctest.Wait() // the Observer is told right after the end
		if losses := told[Lost](b.events); len(losses) != 1 || losses[0].Overrun < 59*time.Minute {
			t.Errorf("told %+v", losses)
		}
		want(t, l.Release(b.ctx), ErrLost)

		l = b.acquire("k")
		b.suspend(validity)
		if v := l.Validity(); v != 0 { // who asks learns it at once
			t.Errorf("validity %v", v)
		}
		want(t, l.Err(), ErrLost)
		want(t, l.Extend(b.ctx), ErrLost)

		l = b.acquire("k")
		b.suspend(validity + time.Second)
		err := l.Release(b.ctx) // it is late, and says so
		want(t, err, ErrLost)
		if !strings.Contains(err.Error(), "1s after its end") {
			t.Error(err)
		}

		l = b.acquire("j")
		for range 100 { // naps that leave validity are no loss, also in sum
			b.suspend(5 * time.Second)
			time.Sleep(time.Second)
		}
		if l.Err() != nil {
			t.Fatal(l.Err())
		}
		b.release(l)
		// Without extension as well, with a short ttl, beside a lease with a long one.
		long := b.acquire("long")
		k, err := b.locks.With(Options{TTL: 500 * time.Millisecond, NoExtend: true})
		if err != nil {
			t.Fatal(err)
		}
		if l, err = k.Acquire(b.ctx, "short"); err != nil {
			t.Fatal(err)
		}
		b.suspend(490 * time.Millisecond)
		began = time.Now()
		<-l.Done()
		if since := time.Since(began); since > 50*time.Millisecond {
			t.Errorf("noticed after %v", since)
		}
		b.release(long)
	})
}

// The lease is judged before an answer that waited through the suspend is believed.
func TestLateAnswerAfterSuspend(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		b.faults.Next(storetest.Extend, func(ctx context.Context, call func(context.Context) error) error {
			err := call(ctx)
			b.suspend(validity)
			return err
		})
		want(t, l.Extend(b.ctx), ErrLost)
		want(t, l.Err(), ErrLost)
		if len(told[Extended](b.events)) > 0 {
			t.Error("a late answer was booked")
		}
	})
}

// LOS-13: where extensions fail for longer than the validity, the loss comes before the ttl at
// the store ends, by the margin.
func TestMargin(t *testing.T) {
	bubble(t, Options{TTL: 10 * time.Second, Margin: 2 * time.Second}, func(b *bed) {
		l := b.acquire("k")
		if v := l.Validity(); v != store.Validity(10*time.Second, 0)-2*time.Second {
			t.Errorf("validity %v", v)
		}
		b.faults.Set(storetest.Extend, storetest.Fail(store.ErrUnavailable))
		other := b.other(nil)
		lost := make(chan time.Time, 1)
		go func() { <-l.Done(); lost <- time.Now() }()
		m, err := other.Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		if lead := time.Since(<-lost); lead < 2*time.Second {
			t.Errorf("lost only %v before the next holder", lead)
		}
		_ = m.Release(b.ctx)
	})
}

// A ttl that the store made shorter is honoured, and so is one of an extension.
func TestShorterGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := changed{Store: memstore.New(), grant: func(op string, g *store.Grant) {
			if g.TTL = 9 * time.Second; op == "extend" {
				g.TTL = 6 * time.Second
			}
		}}
		k := locker(t, s, &Options{NoExtend: true})
		l, err := k.Acquire(context.Background(), "k")
		if err != nil {
			t.Fatal(err)
		}
		if v := l.Validity(); v != store.Validity(9*time.Second, 0) {
			t.Errorf("validity %v", v)
		}
		if err := l.Extend(context.Background()); err != nil {
			t.Fatal(err)
		}
		if v := l.Validity(); v != store.Validity(6*time.Second, 0) {
			t.Errorf("validity %v after an extension", v)
		}
		began := time.Now()
		<-l.Done()
		if since := time.Since(began); since != store.Validity(6*time.Second, 0) {
			t.Errorf("lost after %v", since)
		}
	})
}

// Where the store promises less than was asked, extensions come often enough for that.
func TestShorterGrantIsExtended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var extensions atomic.Int64
		s := changed{Store: memstore.New(), grant: func(op string, g *store.Grant) {
			if g.TTL = 4 * time.Second; op == "extend" && extensions.Add(1) > 5 {
				g.TTL = time.Second
			}
		}}
		k := locker(t, s, nil) // extends every 5 s
		l, err := k.Acquire(context.Background(), "k")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if err := l.Release(context.Background()); err != nil {
			t.Error(err)
		}
		if n := extensions.Load(); n < 100 || n > 130 {
			t.Errorf("%d extensions", n)
		}
	})
}

// The token stands for the whole life of a lease.
func TestExtensionUnderAnotherToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := changed{Store: memstore.New(), grant: func(op string, g *store.Grant) {
			if op == "extend" {
				g.Token++
			}
		}}
		k := locker(t, s, nil)
		l, err := k.Acquire(context.Background(), "k")
		if err != nil {
			t.Fatal(err)
		}
		token := l.Token()
		<-l.Done()
		want(t, l.Err(), ErrLost)
		if l.Token() != token || !strings.Contains(l.Err().Error(), "token") {
			t.Error(l.Err())
		}
		_ = l.Release(context.Background())
	})
}

// EXT-10, LOS-07
func TestMaxHold(t *testing.T) {
	bubble(t, Options{TTL: time.Second, MaxHold: 3 * time.Second}, func(b *bed) {
		l := b.acquire("k")
		ctx := l.Context(b.ctx)
		began := time.Now()
		m, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		if since := time.Since(began); since < 3*time.Second || since > 3*time.Second+pollMax {
			t.Errorf("another acquired after %v", since)
		}
		want(t, context.Cause(ctx), ErrLost, ErrMaxHold)
		if losses := told[Lost](b.events); len(losses) != 1 || losses[0].Held != 3*time.Second {
			t.Errorf("told %+v", losses)
		}
		extensions := count(b.faults, storetest.Extend)
		time.Sleep(10 * time.Second)
		if extensions.Load() > 0 {
			t.Error("it is still extended")
		}
		want(t, l.Release(b.ctx), ErrLost, ErrMaxHold)
		if b.holder("k") != m.Owner() {
			t.Error("the other's lease is gone")
		}
		_ = m.Release(b.ctx)
	})
}

func TestValidityEndsWithMaxHold(t *testing.T) {
	bubble(t, Options{MaxHold: 3 * time.Second}, func(b *bed) {
		l := b.acquire("k")
		if v := l.Validity(); v != 3*time.Second {
			t.Errorf("validity %v", v)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if l.Validity() != 0 || b.holder("k") != "" {
			t.Error("the key is still held")
		}
	})
}

// EXT-01, LEK-06: after Release has returned, nothing is sent for the key.
func TestNothingIsSentAfterRelease(t *testing.T) {
	for name, in := range map[string]func(*testing.T, Options, func(*bed)){"batches": bubble, "one by one": plainBubble} {
		t.Run(name, func(t *testing.T) {
			in(t, Options{TTL: 100 * time.Millisecond, ExtendEvery: 10 * time.Millisecond}, func(b *bed) {
				var released sync.Map
				var late, sent atomic.Int64
				fault := func(d time.Duration) storetest.Fault {
					return func(ctx context.Context, call func(context.Context) error) error {
						time.Sleep(d)
						sent.Add(1)
						if _, ok := released.Load("busy"); ok {
							late.Add(1)
						}
						return call(ctx)
					}
				}
				b.faults.Set(storetest.Extend, fault(3*time.Millisecond))
				for i := range 200 {
					l := b.acquire("k")
					time.Sleep(time.Duration(i%25) * time.Millisecond) // also right at an extension
					b.release(l)
					released.Store("busy", true)
					time.Sleep(30 * time.Millisecond)
					if b.holder("k") != "" {
						t.Fatal("the key is held")
					}
					released.Delete("busy")
				}
				if late.Load() > 0 || sent.Load() == 0 {
					t.Errorf("%d of %d extensions were sent after a release", late.Load(), sent.Load())
				}
				if len(b.locks.f.sched.ends.leases) > 0 || b.locks.f.sched.inFlight > 0 {
					t.Error("the scheduler keeps something")
				}
			})
		})
	}
}

// EXT-06, EXT-07: what became of an earlier lease on the key does not matter.
func TestLaterLeaseIsExtended(t *testing.T) {
	bubble(t, Options{TTL: time.Second}, func(b *bed) {
		first := b.acquire("k")
		b.faults.Set(storetest.Extend, storetest.Fail(store.ErrUnavailable))
		<-first.Done()
		b.faults.Heal()
		second := b.acquire("k")
		time.Sleep(10 * time.Second)
		if second.Err() != nil {
			t.Fatal(second.Err())
		}
		want(t, first.Release(b.ctx), ErrLost)
		time.Sleep(10 * time.Second)
		if second.Err() != nil {
			t.Fatal(second.Err())
		}
		b.release(second)
	})
}

// OWN-03: a release that failed can be repeated.
func TestReleaseThatFailed(t *testing.T) {
	bubble(t, Options{TTL: 30 * time.Second}, func(b *bed) {
		l := b.acquire("k")
		b.faults.Next(storetest.Release, storetest.Fail(store.ErrUnavailable), storetest.LoseRequest, storetest.LoseReply)
		err := l.Release(b.ctx)
		want(t, err, ErrUnavailable)
		not(t, err, ErrLost, ErrReleased)
		if b.holder("k") != l.Owner() || l.Validity() != 0 {
			t.Error("the key is free, or the lease is valid")
		}
		want(t, l.Release(b.ctx), ErrUncertain)
		want(t, l.Release(b.ctx), ErrUncertain)
		if err := l.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
		releases := count(b.faults, storetest.Release)
		b.release(l)
		if releases.Load() > 0 {
			t.Error("a confirmed release was sent again")
		}
		if n := len(told[Released](b.events)); n != 4 {
			t.Errorf("told of %d releases", n)
		}
	})
}

// CTX-01: also with a done context, and with a store that hangs.
func TestReleaseIsDetached(t *testing.T) {
	racedBubble(t, Options{}, func(b *bed) {
		ctx, cancel := context.WithCancel(b.ctx)
		l, err := b.locks.Acquire(ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := l.Release(ctx); err != nil {
			t.Fatal(err)
		}
		if b.holder("k") != "" {
			t.Error("the key is held")
		}
		for _, fault := range []storetest.Fault{storetest.Hang, storetest.HangUntil(ctx.Done())} {
			l = b.acquire("k")
			b.faults.Next(storetest.Release, fault)
			began := time.Now()
			if err := l.Release(ctx); err != nil {
				want(t, err, ErrUncertain)
			}
			if since := time.Since(began); since > 5*time.Second/2 {
				t.Errorf("took %v", since)
			}
			b.release(l)
		}
		l = b.acquire("k")
		hung := make(chan struct{})
		b.faults.Next(storetest.Release, storetest.HangUntil(hung))
		began := time.Now()
		want(t, l.Release(b.ctx), ErrUncertain)
		if since := time.Since(began); since > 5*time.Second/2 {
			t.Errorf("took %v", since)
		}
		want(t, l.Release(b.ctx), ErrUncertain) // joins the call that hangs
		if b.faults.Hits(storetest.Release) != 3 {
			t.Errorf("%d releases", b.faults.Hits(storetest.Release))
		}
		close(hung)
		synctest.Wait()
		_ = l.Release(b.ctx)
		if b.holder("k") != "" {
			t.Error("the key is held")
		}
	})
}

// OWN-05, EXT-13: a late release says what it is, and how late.
func TestReleaseAfterLoss(t *testing.T) {
	bubble(t, Options{TTL: time.Second, NoExtend: true}, func(b *bed) {
		l := b.acquire("k")
		time.Sleep(3 * time.Second)
		for range 2 {
			err := l.Release(b.ctx)
			want(t, err, ErrLost)
			not(t, err, ErrHeld, ErrUnavailable, ErrReleased)
			for _, part := range []string{"release", `"k"`, "3s after the grant", "2.01s after its end"} {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q lacks %q", err, part)
				}
			}
		}
		if e := told[Released](b.events); len(e) != 1 || e[0].Overrun < 2*time.Second || e[0].Held != 3*time.Second {
			t.Errorf("told %+v", e)
		}
		l = b.acquire("k")
		time.Sleep(3 * time.Second)
		b.faults.Next(storetest.Release, storetest.Fail(store.ErrUnavailable))
		want(t, l.Release(b.ctx), ErrLost, ErrUnavailable)
	})
}

// The store says at the release that the lease had gone before.
func TestLossFoundByRelease(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		_ = b.mem.Lose("k")
		want(t, l.Release(b.ctx), ErrLost)
		want(t, l.Release(b.ctx), ErrLost)
		l = b.acquire("k")
		_ = b.mem.Expire("k")
		m, err := b.other(nil).Acquire(b.ctx, "k")
		if err != nil {
			t.Fatal(err)
		}
		want(t, l.Release(b.ctx), ErrLost, ErrHeld)
		if m.Err() != nil || b.holder("k") != m.Owner() {
			t.Error("the other's lease is gone")
		}
		_ = m.Release(b.ctx)
	})
}

// REN-04
func TestReleaseByAnotherGoroutine(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		ctx := l.Context(b.ctx)
		for range 10 {
			go func() { _ = l.Release(b.ctx) }()
		}
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, ErrReleased) || errors.Is(cause, ErrLost) {
			t.Error(cause)
		}
		synctest.Wait()
		b.release(l)
		if n := len(told[Released](b.events)); n != 1 {
			t.Errorf("%d releases", n)
		}
		if err := l.Extend(b.ctx); !errors.Is(err, ErrReleased) || errors.Is(err, ErrLost) {
			t.Error(err)
		}
	})
}

func TestContext(t *testing.T) {
	type name struct{}
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		parent, cancel := context.WithCancel(context.WithValue(b.ctx, name{}, "value"))
		ctx := l.Context(parent)
		if token, ok := fence.FromContext(ctx, "k"); !ok || token != l.Token() || ctx.Value(name{}) != "value" {
			t.Error("the context lacks a value")
		}
		for range 100 {
			l.Context(parent)
		}
		cancel()
		synctest.Wait()
		if ctx.Err() == nil || l.Err() != nil || len(l.contexts) > 0 {
			t.Error("a parent that ended leaves something, or ends the lease")
		}
		ctx = l.Context(b.ctx)
		b.release(l)
		if context.Cause(ctx) != l.Err() || !errors.Is(l.Err(), ErrReleased) {
			t.Error(context.Cause(ctx))
		}
		if after := l.Context(b.ctx); context.Cause(after) != l.Err() {
			t.Error("a context of an ended lease lives")
		}
	})
}

func TestNoTokenInContextWhereNoneIsMinted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := changed{Store: memstore.New(), info: func(i *store.Info) { i.Fencing = store.FencingNone }, grant: func(_ string, g *store.Grant) { g.Token = 0 }}
		k := locker(t, s, nil)
		err := k.Do(context.Background(), "k", func(ctx context.Context, l *Lease) error {
			if _, ok := fence.FromContext(ctx, "k"); ok || l.Token() != 0 {
				t.Error("a token came from nowhere")
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestExtendByHand(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		time.Sleep(time.Second)
		if err := l.Extend(b.ctx); err != nil || l.Validity() != validity {
			t.Fatal(err, l.Validity())
		}
		b.faults.Next(storetest.Extend, storetest.Fail(store.ErrUnavailable))
		want(t, l.Extend(b.ctx), ErrUnavailable)
		if l.Err() != nil {
			t.Fatal(l.Err())
		}
		// A caller that gives up is no risk for the lease.
		risks := len(told[AtRisk](b.events))
		b.faults.Next(storetest.Extend, storetest.Hang)
		ctx, cancel := context.WithTimeout(b.ctx, time.Second)
		defer cancel()
		want(t, l.Extend(ctx), context.DeadlineExceeded, ErrUncertain)
		synctest.Wait()
		if len(told[AtRisk](b.events)) != risks {
			t.Error("it was told as a risk")
		}
		// Many at once: calls of one claim do not overlap.
		var running, overlaps atomic.Int64
		b.faults.Set(storetest.Extend, func(ctx context.Context, call func(context.Context) error) error {
			if running.Add(1) > 1 {
				overlaps.Add(1)
			}
			defer running.Add(-1)
			time.Sleep(time.Millisecond)
			return call(ctx)
		})
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				if err := l.Extend(b.ctx); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		time.Sleep(time.Minute)
		if overlaps.Load() > 0 || l.Err() != nil {
			t.Errorf("%d overlaps, %v", overlaps.Load(), l.Err())
		}
		// One that hangs does not outlive the lease.
		b.faults.Set(storetest.Extend, storetest.Hang)
		want(t, l.Extend(b.ctx), ErrLost)
	})
}

func TestTicket(t *testing.T) {
	bubble(t, Options{TTL: 6 * time.Second}, func(b *bed) {
		l := b.acquire("k")
		ctx := l.Context(b.ctx)
		releases := count(b.faults, storetest.Release)
		ticket, err := l.Ticket()
		if err != nil {
			t.Fatal(err)
		}
		if cause := context.Cause(ctx); !errors.Is(cause, ErrHandedOver) || !errors.Is(cause, ErrReleased) || errors.Is(cause, ErrLost) {
			t.Error(cause)
		}
		_, err = l.Ticket()
		want(t, err, ErrHandedOver)
		want(t, l.Release(b.ctx), ErrHandedOver)
		want(t, l.Extend(b.ctx), ErrHandedOver)
		if releases.Load() > 0 || b.holder("k") != l.Owner() {
			t.Error("the lease was released")
		}
		m, err := b.other(nil).Adopt(b.ctx, ticket)
		if err != nil {
			t.Fatal(err)
		}
		if m.Token() != l.Token() || m.Owner() != l.Owner() || m.Key() != "k" {
			t.Errorf("adopted %v of %q", m.Token(), m.Owner())
		}
		if v := m.Validity(); v != store.Validity(6*time.Second, 0) {
			t.Errorf("the ttl is not that of the ticket: validity %v", v)
		}
		time.Sleep(time.Minute)
		if m.Err() != nil {
			t.Fatal(m.Err())
		}
		if err := m.Release(b.ctx); err != nil {
			t.Fatal(err)
		}
		_, err = b.locks.Adopt(b.ctx, ticket)
		want(t, err, ErrLost)
	})
}

// A margin of the adopter's is kept with the ttl of the ticket too.
func TestAdoptWithMargin(t *testing.T) {
	bubble(t, Options{TTL: 10 * time.Second}, func(b *bed) {
		l := b.acquire("k")
		ticket, err := l.Ticket()
		if err != nil {
			t.Fatal(err)
		}
		// None that leaves no validity: the lease stays that of the ticket.
		_, err = b.other(&Options{TTL: time.Minute, Margin: 10 * time.Second}).Adopt(b.ctx, ticket)
		want(t, err, ErrInvalid)
		if b.holder("k") != l.Owner() {
			t.Error("the lease was released")
		}
		m, err := b.other(&Options{TTL: time.Minute, Margin: 8 * time.Second}).Adopt(b.ctx, ticket)
		if err != nil {
			t.Fatal(err)
		}
		if v := m.Validity(); v != store.Validity(10*time.Second, 0)-8*time.Second {
			t.Errorf("validity %v", v)
		}
		time.Sleep(time.Minute)
		b.release(m)
	})
}

func TestTicketWithinTheProcess(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		ticket, err := l.Ticket()
		if err != nil {
			t.Fatal(err)
		}
		m, err := b.locks.Adopt(b.ctx, ticket)
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.locks.TryAcquire(b.ctx, "k")
		want(t, err, ErrHeld)
		b.release(m)
		err = b.locks.Do(b.ctx, "k", func(_ context.Context, l *Lease) error {
			ticket, err = l.Ticket()
			return err
		})
		if err != nil {
			t.Errorf("Do answers %v for a lease that was handed over", err)
		}
		time.Sleep(DefaultTTL)
		_, err = b.locks.Adopt(b.ctx, ticket) // lapsed
		want(t, err, ErrLost)
	})
}

func TestTicketFails(t *testing.T) {
	plainBubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		_, err := l.Ticket()
		want(t, err, ErrUnsupported)
		time.Sleep(time.Minute)
		if l.Err() != nil {
			t.Fatal(l.Err())
		}
		b.release(l)
		m, err := b.other(nil).Acquire(b.ctx, "j")
		if err != nil {
			t.Fatal(err)
		}
		ticket, err := m.Ticket()
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.locks.Adopt(b.ctx, ticket)
		want(t, err, ErrUnsupported)
		_, err = locker(t, memstore.New(), nil).Adopt(b.ctx, ticket)
		want(t, err, ErrInvalid)
	})
	bubble(t, Options{}, func(b *bed) {
		l := b.acquire("k")
		_ = b.mem.Lose("k")
		_, err := l.Ticket()
		want(t, err, ErrLost)
		want(t, l.Err(), ErrLost)
		l = b.acquire("k")
		ticket, err := l.Ticket()
		if err != nil {
			t.Fatal(err)
		}
		b.faults.Set(storetest.Adopt, storetest.Hang)
		ctx, cancel := context.WithTimeout(b.ctx, time.Second)
		defer cancel()
		_, err = b.locks.Adopt(ctx, ticket)
		want(t, err, context.DeadlineExceeded, ErrUncertain)
		b.faults.Heal()
		if l, err = b.locks.Adopt(b.ctx, ticket); err != nil { // it is still good
			t.Fatal(err)
		}
		b.release(l)
	})
}

func TestDo(t *testing.T) {
	mine := errors.New("my own")
	bubble(t, Options{}, func(b *bed) {
		err := b.locks.Do(b.ctx, "k", func(ctx context.Context, l *Lease) error {
			if b.holder("k") != l.Owner() || ctx.Err() != nil {
				t.Error("fn runs without the lease")
			}
			time.Sleep(time.Minute)
			return l.Err()
		})
		if err != nil || b.holder("k") != "" {
			t.Fatal(err)
		}
		if err := b.locks.Do(b.ctx, "k", func(context.Context, *Lease) error { return mine }); err != mine {
			t.Errorf("got %v", err)
		}
		err = b.locks.Do(b.ctx, "k", func(ctx context.Context, l *Lease) error { return l.Release(ctx) })
		if err != nil {
			t.Errorf("fn released itself: %v", err)
		}
		// A failed release.
		b.faults.Next(storetest.Release, storetest.Fail(store.ErrUnavailable), storetest.Fail(store.ErrUnavailable))
		err = b.locks.Do(b.ctx, "k1", func(context.Context, *Lease) error { return nil })
		want(t, err, ErrUnavailable)
		var e *Error
		if !errors.As(err, &e) || e.Op != "release" {
			t.Errorf("%v is not about the release", err)
		}
		want(t, b.locks.Do(b.ctx, "k2", func(context.Context, *Lease) error { return mine }), ErrUnavailable, mine)
		// A loss, found while fn runs, or at the release.
		for _, own := range []error{nil, mine} {
			err = b.locks.Do(b.ctx, "k", func(ctx context.Context, l *Lease) error {
				_ = b.mem.Lose("k")
				<-ctx.Done()
				want(t, context.Cause(ctx), ErrLost)
				return own
			})
			want(t, err, ErrLost)
			err = errors.Join(err, b.locks.Do(b.ctx, "k", func(context.Context, *Lease) error {
				_ = b.mem.Lose("k")
				return own
			}))
			if !errors.Is(err, ErrLost) || own != nil && !errors.Is(err, own) {
				t.Errorf("got %v", err)
			}
		}
		// LOS-02: a fn that overruns the lease is waited for, and the way out is short.
		b.faults.SetAll(storetest.Hang)
		b.faults.Next(storetest.Try, nil)
		var left time.Time
		err = b.locks.Do(b.ctx, "k", func(ctx context.Context, l *Lease) error {
			time.Sleep(10 * time.Minute)
			left = time.Now()
			return mine
		})
		want(t, err, ErrLost, mine)
		if since := time.Since(left); since > 5*time.Second/2 {
			t.Errorf("Do returned %v after fn", since)
		}
	})
}

// The context of Do bounds the wait and is the parent of fn's; its end is no loss.
func TestDoWithCancelledContext(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		ctx, cancel := context.WithCancel(b.ctx)
		err := b.locks.Do(ctx, "k", func(ctx context.Context, l *Lease) error {
			cancel()
			<-ctx.Done()
			if l.Err() != nil {
				t.Error(l.Err())
			}
			return nil
		})
		if err != nil || b.holder("k") != "" {
			t.Error(err)
		}
	})
}

// LOS-07: the key is given back on the way of a panic, which goes on, and of Goexit.
func TestDoReleasesOnPanic(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		func() {
			defer func() {
				if r := recover(); r != "boom" {
					t.Errorf("recovered %v", r)
				}
			}()
			_ = b.locks.Do(b.ctx, "k", func(context.Context, *Lease) error { panic("boom") })
		}()
		if b.holder("k") != "" {
			t.Error("the key is held after a panic")
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = b.locks.Do(b.ctx, "k", func(context.Context, *Lease) error { runtime.Goexit(); return nil })
		}()
		<-done
		if b.holder("k") != "" {
			t.Error("the key is held after Goexit")
		}
	})
}
