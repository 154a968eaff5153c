package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// LOS-01, classes 1 and 10: two of three nodes stop under a worker that looks at nothing but
// its context. That ends before the last confirmed promise does, with the cause; the lease
// asks for nothing afterwards, and what is left of it on the nodes lapses by itself.
func TestLostMajorityEndsTheContext(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			const short = 2 * time.Second
			b := newBed(t, c, 3, holdfast.Options{TTL: short})
			lease := kit.Acquire(t, b.locks, "k")
			ctx := lease.Context(t.Context())
			time.Sleep(short * 3 / 4) // it has been extended
			b.servers[0].Stop()
			b.servers[1].Stop()
			stopped := time.Now() // what a quorum confirms was sent before
			select {
			case <-ctx.Done():
			case <-time.After(2 * short):
				t.Fatal("the context of the worker does not end")
			}
			if d := time.Since(stopped); d > short+short/10 {
				t.Errorf("it ended %v after the nodes had stopped, with a ttl of %v", d, short)
			}
			var expired *holdfast.ExpiredError
			if cause := context.Cause(ctx); !errors.Is(cause, holdfast.ErrLost) || !errors.As(cause, &expired) || expired.Err == nil {
				t.Errorf("the cause is %v, want that extensions failed until the validity ran out", cause)
			}
			b.servers[0].Cont()
			b.servers[1].Cont()
			kit.NoKeys(t, 2*short, b.servers) // though nobody has released
			before := b.scripts(t)
			time.Sleep(short)
			if after := b.scripts(t); after != before {
				t.Errorf("%d requests are sent for a lost lease", after-before)
			}
			if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
				t.Errorf("Release: %v, want ErrLost", err)
			}
		})
	}
}

// QUO-01: the holder dies, and then two of three nodes, for longer than its ttl. A waiter
// waits for both, and has the key soon after the nodes are back.
func TestWaiterOutlivesALostQuorum(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 3, holdfast.Options{})
			kit.Warm(t, b.locks)
			holder := kit.Child(t, "hold", append([]string{"k", c.Name}, kit.Addrs(b.servers)...)...)
			holder.Expect(t, "held", time.Minute)
			holder.Kill()
			b.servers[0].Kill()
			b.servers[1].Kill()
			acquired := make(chan error, 1)
			go func() {
				lease, err := b.locks.Acquire(t.Context(), "k")
				if err == nil {
					err = lease.Release(t.Context())
				}
				acquired <- err
			}()
			select {
			case err := <-acquired:
				t.Fatalf("the waiter returned without a quorum: %v", err)
			case <-time.After(3 * time.Second): // thrice the holder's ttl
			}
			for _, e := range kit.Select[holdfast.Waiting](b.events) {
				if !errors.Is(e.Err, holdfast.ErrUnavailable) && !errors.Is(e.Err, holdfast.ErrHeld) {
					t.Errorf("it waits because of %v", e.Err)
				}
			}
			b.servers[0].Restart(kit.Old())
			b.servers[1].Restart(kit.Old())
			back := time.Now()
			select {
			case err := <-acquired:
				if err != nil {
					t.Fatal(err)
				}
				t.Logf("acquired %v after the nodes were back", time.Since(back).Round(time.Millisecond))
			case <-time.After(ttl):
				t.Fatal("the waiter does not get the key though the nodes are back")
			}
		})
	}
}

// register is a resource that keeps the highest token that was shown to it. It is guarded
// for those who show one.
type register struct {
	mu      sync.Mutex
	mark    holdfast.Token
	value   int
	writes  []holdfast.Token // that were accepted
	refused int
}

// use shows a token and calls f, unless a higher token was shown before.
func (r *register) use(token holdfast.Token, f func()) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if token < r.mark {
		r.refused++
		return false
	}
	r.mark = token
	f()
	return true
}

func (r *register) write(token holdfast.Token) bool {
	return r.use(token, func() { r.writes = append(r.writes, token) })
}

// LOS-04: a holder is cut off and does not care: it goes on writing. It is told of the loss
// before another is granted the key, and no write of it passes the check of tokens after the
// first one of that other.
func TestCheckRefusesACutOffHolder(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		const short = 2 * time.Second
		b := newBed(t, c, n, holdfast.Options{TTL: short})
		next := b.other(t, holdfast.Options{TTL: short})
		lease := kit.Acquire(t, b.locks, "k")
		var r register
		stop := make(chan struct{})
		var stubborn sync.WaitGroup
		stubborn.Go(func() {
			for {
				r.write(lease.Token())
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
			}
		})
		time.Sleep(short / 2)
		for _, p := range b.proxies {
			p.BlackHole()
		}
		after := kit.Acquire(t, next, "k")
		knew := lease.Err()
		if !errors.Is(knew, holdfast.ErrLost) {
			t.Errorf("another has the key, and the holder is told %v", knew)
		}
		if after.Token() <= lease.Token() {
			t.Errorf("token %v after %v", after.Token(), lease.Token())
		}
		if !r.write(after.Token()) {
			t.Error("the write of the new holder is refused")
		}
		time.Sleep(short / 4)
		close(stop)
		stubborn.Wait()
		for i, p := range b.proxies {
			if p.Counts().BlackHoled == 0 {
				t.Errorf("nothing of node %d fell into the black hole", i)
			}
			p.Reset()
			p.Heal()
		}
		if last := r.writes[len(r.writes)-1]; last != after.Token() || len(r.writes) < 2 || r.refused == 0 {
			t.Errorf("%d writes were accepted, the last with token %v, and %d refused", len(r.writes), last, r.refused)
		}
		if err := after.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release of the lost lease: %v, want ErrLost", err)
		}
	})
}

// LOS-11: many customers buy from one stock under a lease that the work often outlives, and
// none of them looks whether it still holds. With the check of tokens at the stock nothing is
// sold twice; and every customer that was too slow had its context cancelled and is told so at
// the release, which takes the key from nobody else.
func TestStockIsNotOversold(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			const short = 400 * time.Millisecond
			customers, stock := kit.Count(16, 50), kit.Count(8, 25)
			b := newBed(t, c, 1, holdfast.Options{TTL: short, NoExtend: true})
			kit.Warm(t, b.locks)
			var checked, unchecked register
			checked.value, unchecked.value = stock, stock
			var sold, oversold, overrun atomic.Int64
			var wg sync.WaitGroup
			for range customers {
				locks := b.locks
				if rand.IntN(2) == 0 {
					locks = b.other(t, holdfast.Options{TTL: short, NoExtend: true})
				}
				wg.Go(func() {
					lease, err := locks.Acquire(t.Context(), "stock")
					if err != nil {
						t.Error(err)
						return
					}
					granted := time.Now()
					ctx := lease.Context(t.Context())
					var seen, seenUnchecked int
					ok := checked.use(lease.Token(), func() { seen = checked.value })
					unchecked.use(0, func() { seenUnchecked = unchecked.value })
					time.Sleep(short/2 + time.Duration(rand.Int64N(int64(short))))
					late := lease.Err() != nil
					if ok && seen > 0 && checked.use(lease.Token(), func() { checked.value = seen - 1 }) {
						sold.Add(1)
					}
					if seenUnchecked > 0 {
						unchecked.use(0, func() { unchecked.value = seenUnchecked - 1 })
						oversold.Add(1)
					}
					err = lease.Release(t.Context())
					switch {
					case late:
						overrun.Add(1)
						if ctx.Err() == nil || !errors.Is(context.Cause(ctx), holdfast.ErrLost) || !errors.Is(err, holdfast.ErrLost) {
							t.Errorf("too slow: the context ended by %v, Release says %v", context.Cause(ctx), err)
						}
					case err != nil && (!errors.Is(err, holdfast.ErrLost) || time.Since(granted) < short*9/10):
						t.Errorf("in time: Release says %v", err)
					}
				})
			}
			wg.Wait()
			if want := stock - checked.value; sold.Load() != int64(want) || checked.value < 0 {
				t.Errorf("%d are sold, and %d are left of %d", sold.Load(), checked.value, stock)
			}
			if overrun.Load() == 0 {
				t.Error("nobody was too slow: the test shows nothing")
			}
			t.Logf("%d customers, %d too slow: %d of %d sold with the check, %d refused; without it %d sold and %d left",
				customers, overrun.Load(), sold.Load(), stock, checked.refused, oversold.Load(), unchecked.value)
		})
	}
}

// buy is a child process that tries once for a key, says what it got, and then releases.
func buy() {
	args := kit.Args()
	s, end := kit.ChildStore(args[1:])
	defer end()
	locks, err := holdfast.New(s, &holdfast.Options{TTL: time.Second, NoExtend: true})
	if err != nil {
		kit.Say("error", err)
		return
	}
	warm, err := locks.Acquire(context.Background(), args[0]+".warm-up")
	if err == nil {
		err = warm.Release(context.Background())
	}
	kit.Say("ready", err)
	lease, err := locks.TryAcquire(context.Background(), args[0])
	kit.Say("got", time.Now().UnixNano(), lease != nil, errors.Is(err, holdfast.ErrUnavailable) || errors.Is(err, holdfast.ErrUncertain) || errors.Is(err, holdfast.ErrHeld))
	if lease != nil {
		_ = lease.Release(context.Background())
	}
}

// CLK-04: a client is stopped after the servers have voted and before it reads that. When it
// goes on, its votes have lapsed and another holds the key: the answers that it then reads are
// no grant, and what it gives back is not the other's.
func TestStoppedWithAnswersOnTheirWay(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		kit.Warm(t, b.locks)
		for _, p := range b.proxies {
			p.DelayReplies(150 * time.Millisecond) // below the node timeout of the child
		}
		for i := range 10 { // the child may have read the answers before it is stopped
			if b.stopWithAnswersOnTheirWay(t, fmt.Sprint("k", i)) {
				return
			}
		}
		t.Fatal("the child was never stopped in time")
	})
}

func (b *bed) stopWithAnswersOnTheirWay(t *testing.T, key string) bool {
	child := kit.Child(t, "buy", append([]string{key, b.client.Name}, kit.Addrs(b.proxies)...)...)
	if said := child.Expect(t, "ready", time.Minute); said != "<nil>" {
		t.Fatal(said)
	}
	voted := func() (n int) {
		for _, s := range b.servers {
			if v, _ := s.Do("EXISTS", key); v == int64(1) {
				n++
			}
		}
		return n
	}
	for end := time.Now().Add(ttl); voted() <= len(b.servers)/2; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return false // it came and went unseen
		}
	}
	child.Stop()
	stopped := time.Now()
	lease := kit.Acquire(t, b.other(t, holdfast.Options{}), key) // after the child's ttl
	child.Cont()
	var at int64
	var got, why bool
	fmt.Sscan(child.Expect(t, "got", time.Minute), &at, &got, &why)
	<-child.Done()
	if err := lease.Err(); err != nil {
		t.Error(err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("Release of the other: %v", err)
	}
	if time.Unix(0, at).Before(stopped) {
		return false
	}
	if got || !why {
		t.Errorf("a client that was stopped for its ttl: granted %v, told why %v", got, why)
	}
	return true
}

// CLK-06, class 9: a holder is killed. A process that comes later and tries just once, after
// the ttl, has the key at once: it need not have watched.
func TestTryTakesOverFromADeadHolder(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		holder := kit.Child(t, "hold", append([]string{"k", c.Name}, kit.Addrs(b.servers)...)...)
		holder.Expect(t, "held", time.Minute)
		holder.Kill()
		early, err := b.locks.TryAcquire(t.Context(), "k")
		var held *holdfast.HeldError
		if err == nil { // the machine is so busy that the ttl is over
			_ = early.Release(t.Context())
			return
		}
		if !errors.As(err, &held) || held.Holder.TTL <= 0 || held.Holder.TTL > time.Second {
			t.Fatalf("TryAcquire beside a dead holder: %v, want for how long it lasts", err)
		}
		time.Sleep(held.Holder.TTL + 50*time.Millisecond)
		kit.Warm(t, b.other(t, holdfast.Options{}))
		lease, err := b.other(t, holdfast.Options{}).TryAcquire(t.Context(), "k")
		if err != nil {
			t.Fatalf("one try after the ttl: %v", err)
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Classes 6 and 11: a lease lives on after the context of its Acquire has ended, and while
// another goroutine waits for a busy key, whose wait ends when it is told to.
func TestLeaseOutlivesItsAcquire(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		const short = time.Second
		b := newBed(t, c, n, holdfast.Options{TTL: short})
		busy := kit.Acquire(t, b.other(t, holdfast.Options{}), "busy")
		ctx, cancel := context.WithTimeout(t.Context(), ttl)
		lease, err := b.locks.Acquire(ctx, "k")
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		wait, giveUp := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() {
			_, err := b.locks.Acquire(wait, "busy")
			ended <- err
		}()
		time.Sleep(3 * short)
		if lease.Err() != nil {
			t.Errorf("after three ttls: %v", lease.Err())
		}
		giveUp()
		select {
		case err := <-ended:
			if !errors.Is(err, context.Canceled) || !errors.Is(err, holdfast.ErrHeld) {
				t.Errorf("the waiter is told %v", err)
			}
		case <-time.After(short):
			t.Error("the waiter goes on after it was told to give up")
		}
		if err := errors.Join(lease.Release(t.Context()), busy.Release(t.Context())); err != nil {
			t.Error(err)
		}
	})
}

// R8: options are not used up. Two waits under the same ones are equally long, and both ask
// more than once.
func TestOptionsAreNotUsedUp(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 1, holdfast.Options{})
			held := kit.Acquire(t, b.other(t, holdfast.Options{}), "k")
			kit.Warm(t, b.locks)
			for range 3 {
				before := len(kit.Select[holdfast.Waiting](b.events))
				const wait = 1500 * time.Millisecond // who has a place in the queue asks again after 1 s
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				var err error
				d := took(func() { _, err = b.locks.Acquire(ctx, "k") })
				cancel()
				if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, holdfast.ErrHeld) {
					t.Errorf("Acquire: %v, want DeadlineExceeded and ErrHeld", err)
				}
				if asked := len(kit.Select[holdfast.Waiting](b.events)) - before; d < wait || asked < 2 {
					t.Errorf("it waited for %v and asked %d times", d, asked)
				}
			}
			if err := held.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// R7, TTL-03, class 15: a ttl that a server cannot keep is refused before anything is sent.
// Zero is no "without end": it is refused by the store, and is the default of a Locker.
func TestTTLThatCannotBeKept(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 1, holdfast.Options{})
			kit.Warm(t, b.locks)
			s := b.store(t, kit.Addrs(b.servers))
			before := b.scripts(t)
			for _, ttl := range []time.Duration{0, -time.Second, 500 * time.Microsecond, store.MinTTL - 1, time.Hour} {
				var invalid *store.InvalidError
				g, err := s.Claim("k", store.ClaimOptions{TTL: ttl}).Try(t.Context())
				if g.Owner != "" || !errors.As(err, &invalid) || invalid.Rule == "" {
					t.Errorf("a claim with a ttl of %v: %v, %v, want a rule", ttl, g, err)
				}
				if ttl == 0 {
					continue
				}
				if _, err := holdfast.New(s, &holdfast.Options{TTL: ttl}); !errors.Is(err, holdfast.ErrInvalid) {
					t.Errorf("a locker with a ttl of %v: %v, want ErrInvalid", ttl, err)
				}
			}
			if after := b.scripts(t); after != before {
				t.Errorf("%d requests were sent", after-before)
			}
			lease := kit.Acquire(t, kit.Locker(t, s, holdfast.Options{}), "k")
			v, err := b.servers[0].Do("PTTL", "k")
			if ms, _ := v.(int64); err != nil || ms <= 0 || time.Duration(ms)*time.Millisecond > holdfast.DefaultTTL {
				t.Errorf("without a ttl the key lives for %v ms: %v", v, err)
			}
			if err := lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}
