package etcd

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// locker makes a Locker with a client of its own.
func locker(t testing.TB, o holdfast.Options, addrs ...string) *holdfast.Locker {
	t.Helper()
	return kit.Locker(t, open(t, etcdstore.Options{}, addrs...), o)
}

// A holder that is cut off from the servers knows of the loss before another can acquire; its
// token is the smaller one, and a guard that has seen the other refuses it. LOS-04.
func TestCutOffHolderKnowsFirst(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	next := locker(t, holdfast.Options{TTL: minTTL}, server.Addr())
	runs := kit.Count(6, 100)
	leads := make([]time.Duration, runs)
	t.Run("runs", func(t *testing.T) {
		for i := range runs {
			t.Run(strconv.Itoa(i), func(t *testing.T) {
				t.Parallel()
				leads[i] = cutOff(t, server, next, t.Name())
			})
		}
	})
	smallest := time.Hour
	for _, lead := range leads {
		smallest = min(smallest, lead)
	}
	t.Logf("%d runs: the holder knew first, at the least by %v; ttl %v, drift %v",
		runs, smallest.Round(10*time.Microsecond), minTTL, store.Drift(minTTL))
}

// cutOff cuts one holder off at a random moment and answers by how much its loss came before
// the grant of the next one.
func cutOff(t *testing.T, server *servertest.EtcdServer, next *holdfast.Locker, key string) time.Duration {
	t.Helper()
	p := servertest.NewProxy(t, server.Addr())
	lease := kit.Acquire(t, locker(t, holdfast.Options{TTL: minTTL}, p.Addr()), key)
	ctx := lease.Context(t.Context())
	lost := make(chan time.Time, 1)
	go func() {
		<-ctx.Done()
		lost <- time.Now()
	}()
	// The holder goes on writing, whatever it is told.
	var guard fence.Memory
	stop := make(chan struct{})
	var stubborn sync.WaitGroup
	var stale error
	stubborn.Go(func() {
		for {
			if err := guard.Claim(context.Background(), key, lease.Token()); err != nil {
				stale = err
			} else if stale != nil {
				t.Error("a token is accepted after it was refused")
			}
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
	time.Sleep(time.Duration(rand.Int64N(int64(minTTL))))
	p.BlackHole()
	after := kit.Acquire(t, next, key)
	granted := time.Now()
	knew := lease.Err() // by the clock, whenever its timers run
	if err := guard.Claim(t.Context(), key, after.Token()); err != nil {
		t.Errorf("the next holder's token is refused: %v", err)
	}
	var at time.Time
	select {
	case at = <-lost:
	case <-time.After(minTTL):
		t.Fatal("the holder's context has not ended a ttl after the next grant")
	}
	time.Sleep(20 * time.Millisecond) // lets the stubborn one try
	close(stop)
	stubborn.Wait()
	lead := granted.Sub(at)
	if !errors.Is(knew, holdfast.ErrLost) || lead <= 0 {
		t.Errorf("another was granted %v before the holder knew of the loss (%v)", -lead, knew)
	}
	if !errors.Is(context.Cause(ctx), holdfast.ErrLost) {
		t.Errorf("the cause is %v, want ErrLost", context.Cause(ctx))
	}
	if after.Token() <= lease.Token() {
		t.Errorf("the next token is %v, the lost one %v", after.Token(), lease.Token())
	}
	if !errors.Is(stale, fence.ErrStale) {
		t.Errorf("the guard answers the former holder %v, want ErrStale", stale)
	}
	if p.Counts().BlackHoled == 0 {
		t.Error("nothing fell into the black hole: the test shows nothing")
	}
	p.Reset()
	p.Heal()
	if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("Release of a lost lease: %v, want ErrLost", err)
	}
	if err := after.Release(t.Context()); err != nil {
		t.Errorf("Release of the next holder: %v", err)
	}
	return lead
}

// hold is a child process that holds a key, looks at its lease all the time, and tells what
// it finds after it was stopped.
func hold() {
	args := kit.Args()
	session, err := time.ParseDuration(args[2])
	if err != nil {
		kit.Say("error", err)
		return
	}
	s, end, err := dial(etcdstore.Options{Session: session}, args[1])
	if err != nil {
		kit.Say("error", err)
		return
	}
	defer end()
	locks, err := holdfast.New(s, &holdfast.Options{TTL: minTTL})
	if err != nil {
		kit.Say("error", err)
		return
	}
	lease, err := locks.Acquire(context.Background(), args[0])
	if err != nil {
		kit.Say("error", err)
		return
	}
	ctx := lease.Context(context.Background())
	ended := make(chan int64, 1)
	go func() {
		<-ctx.Done()
		ended <- time.Now().UnixNano()
	}()
	last := time.Now() // before the parent may stop us
	kit.Say("held", int64(lease.Token()))
	for ; ; time.Sleep(time.Millisecond) {
		now := time.Now()
		if now.Sub(last) > minTTL {
			kit.Say("woke", lease.Err() != nil, lease.Validity() > 0) // before anything else
			break
		}
		last = now
	}
	at := <-ended
	kit.Say("ended", at, errors.Is(context.Cause(ctx), holdfast.ErrLost))
	kit.Say("released", errors.Is(lease.Release(context.Background()), holdfast.ErrLost))
}

var children = map[string]func(){"hold": hold}

// A holder that is stopped past its ttl finds its lease lost at its first look after waking, and
// its token below the next holder's.
func TestStoppedHolderWakesToALostLease(t *testing.T) {
	servertest.CanPause(t)
	t.Parallel()
	for name, session := range map[string]time.Duration{"lease": 0, "session": minTTL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			stopHolders(t, session)
		})
	}
}

func stopHolders(t *testing.T, session time.Duration) {
	server := servertest.Etcd(t, module)
	next := locker(t, holdfast.Options{TTL: minTTL}, server.Addr())
	var late []time.Duration
	for i := range kit.Count(1, 20) {
		key := "k" + strconv.Itoa(i)
		child := kit.Child(t, "hold", key, server.Addr(), session.String())
		token, _ := strconv.ParseInt(child.Expect(t, "held", time.Minute), 10, 64)
		child.Stop()
		after := kit.Acquire(t, next, key)
		if int64(after.Token()) <= token {
			t.Errorf("the next token is %v, that of the stopped holder %d", after.Token(), token)
		}
		time.Sleep(minTTL / 2) // so that the child sees a gap of more than a ttl
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
		if d > minTTL {
			t.Errorf("the context was cancelled %v after waking, later than a ttl", d)
		}
		late = append(late, d)
		if child.Expect(t, "released", time.Minute) != "true" {
			t.Error("Release of the stopped holder does not answer ErrLost")
		}
		<-child.Done()
		if err := after.Extend(t.Context()); err != nil {
			t.Errorf("the next holder, after the stopped one has released: %v", err)
		}
		if err := after.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d runs: cancelled %v after waking (median), %v at the most",
		len(late), kit.Median(late).Round(time.Microsecond), kit.Quantile(late, 1).Round(time.Microsecond))
}

// taking matches the transaction that takes a key: it alone has an owner in it.
var taking = servertest.Containing(`"owner":"`)

// An acquisition whose reply is lost, though the server has granted it, is uncertain, and leaves
// nothing behind: neither the key nor its lease outlives the clean-up, long before the ttl.
func TestLostReplyLeavesNoOrphan(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	const ttl = time.Minute
	runs, workers := kit.Count(24, 500), 4
	var worst time.Duration
	var mu sync.Mutex
	var wg sync.WaitGroup
	for w := range workers {
		prefix := "/w" + strconv.Itoa(w) + "/"
		p := servertest.NewProxy(t, server.Addr())
		s := warm(t, openCold(t, connect(t, p.Addr()), etcdstore.Options{Prefix: prefix}))
		locks := kit.Locker(t, s, holdfast.Options{TTL: ttl})
		wg.Go(func() {
			for i := w; i < runs; i += workers {
				took := loseReply(t, direct, p, locks, prefix, 0, i)
				mu.Lock()
				worst = max(worst, took)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	servertest.Eventually(t, ttl/2, func() error {
		leases, err := direct.Leases(t.Context())
		if err == nil && len(leases.Leases) > 0 {
			err = fmt.Errorf("%d leases are left", len(leases.Leases))
		}
		return err
	})
	t.Logf("%d runs: each key was gone at most %v after the network was whole again; ttl %v", runs, worst.Round(time.Millisecond), ttl)
}

// The same for the replies to whatever else an acquisition, an extension and a release ask for:
// connections are cut at random moments, and in the end nothing is left.
func TestCutConnectionsLeaveNoOrphan(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	p := servertest.NewProxy(t, server.Addr())
	const ttl = time.Minute
	locks := locker(t, holdfast.Options{TTL: ttl}, p.Addr())
	stop := make(chan struct{})
	cuts := 0
	var breaker sync.WaitGroup
	breaker.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(1+rand.IntN(60)) * time.Millisecond):
				cuts += p.Reset()
			}
		}
	})
	var tokens []holdfast.Token // written under the lock
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range kit.Count(15, 100) {
				lease, err := locks.Acquire(t.Context(), "k")
				if err != nil {
					t.Errorf("Acquire, which waits for the store as well: %v", err)
					return
				}
				if lease.Err() == nil {
					tokens = append(tokens, lease.Token())
				}
				_ = lease.Extend(t.Context())
				if err := lease.Release(t.Context()); err != nil && !errors.Is(err, holdfast.ErrUncertain) {
					t.Errorf("Release: %v, want nil or ErrUncertain", err)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	breaker.Wait()
	if cuts == 0 {
		t.Error("no connection was cut: the test shows nothing")
	}
	for i := 1; i < len(tokens); i++ {
		if tokens[i] <= tokens[i-1] {
			t.Errorf("token %v comes after %v", tokens[i], tokens[i-1])
		}
	}
	servertest.Eventually(t, ttl/2, func() error {
		if n := keys(t, direct, etcdstore.DefaultPrefix); n != 0 {
			return fmt.Errorf("%d keys are left", n)
		}
		return nil
	})
	t.Logf("%d cuts, %d grants", cuts, len(tokens))
}
