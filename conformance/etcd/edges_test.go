package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// A request to break a lock arrives late, and whoever sent it does nothing more. The holder was
// extended meanwhile: nobody else gets the key while it may trust that.
func TestBreakArrivesLate(t *testing.T) {
	t.Parallel()
	for name, session := range map[string]time.Duration{"lease": 0, "session": 2 * minTTL, "long session": long} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			breakLate(t, session)
		})
	}
}

func breakLate(t *testing.T, session time.Duration) {
	const ttl = 2 * minTTL
	server := servertest.Etcd(t, module)
	s := open(t, etcdstore.Options{Session: session}, server.Addr())
	p := servertest.NewProxy(t, server.Addr())
	breaker := open(t, etcdstore.Options{}, p.Addr())
	holder := s.Claim("k", store.ClaimOptions{TTL: ttl})
	if _, err := holder.Try(t.Context()); err != nil {
		t.Fatal(err)
	}
	h, err := s.Inspect(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	breaks := servertest.Containing(`"broken:`)
	late := p.Hold(breaks)
	began := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() { answer <- breaker.Break(ctx, h) }()
	if err := late.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	var until time.Time // what the holder trusts
	for sent := began; sent.Sub(began) < ttl+ttl/16; {
		time.Sleep(ttl / 16)
		sent = time.Now()
		g, err := holder.Extend(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		until = sent.Add(g.TTL)
	}
	defer p.Hold(func(b []byte) bool { return !breaks(b) }).Release() // nothing comes after it
	late.Release()
	servertest.Eventually(t, ttl/2, func() error {
		h, err := s.Inspect(t.Context(), "k")
		if err == nil && !h.Broken {
			err = errors.New("the request has not arrived")
		}
		return err
	})
	other := locker(t, holdfast.Options{TTL: minTTL}, server.Addr())
	await(t, acquiring(t.Context(), other, "k"), 4*ttl, "the next holder")
	if early := time.Until(until); early > 0 {
		t.Errorf("another is granted the key %v before the end of what its holder was promised", early)
	}
	if _, err := holder.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
		t.Errorf("Extend of a holder whose lock was broken answers %v, want ErrLost", err)
	}
	cancel()
	<-answer
}

// A lock that was broken on a session goes when its holder gives it up, and else at the end of what
// the holder may trust, whether anybody asks; what else is on the session stays.
func TestBreakOnASession(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	breaker := open(t, etcdstore.Options{}, server.Addr())
	others := locker(t, holdfast.Options{TTL: minTTL}, server.Addr())
	shared := open(t, etcdstore.Options{Session: long}, server.Addr())
	anchor := kit.Acquire(t, kit.Locker(t, shared, holdfast.Options{TTL: long}), "anchor")
	for name, gives := range map[string]bool{"given up": true, "left alone": false} {
		ttl := 2 * minTTL
		if gives {
			ttl = long
		}
		c := shared.Claim(name, store.ClaimOptions{TTL: ttl})
		g, err := c.Try(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		sent := time.Now()
		if g, err = c.Extend(t.Context()); err != nil {
			t.Fatal(err)
		}
		until := sent.Add(g.TTL)
		h := store.Holder{Key: name, Owner: g.Owner}
		for range 2 { // the second one finds it broken
			if err := breaker.Break(t.Context(), h); err != nil {
				t.Fatalf("%s: Break answers %v", name, err)
			}
		}
		if _, err := c.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
			t.Errorf("%s: Extend of a lock that was broken answers %v, want ErrLost", name, err)
		}
		if h, err := shared.Inspect(t.Context(), name); err != nil || !h.Broken {
			t.Errorf("%s: what was broken is %+v, %v, before its holder has given it up", name, h, err)
		}
		if gives {
			if err := c.Release(t.Context()); !errors.Is(err, store.ErrLost) {
				t.Errorf("%s: Release of a lock that was broken answers %v, want ErrLost", name, err)
			}
		}
		next := await(t, acquiring(t.Context(), others, name), long/2, "the next holder")
		if early := time.Until(until); early > 0 && !gives {
			t.Errorf("%s: another is granted the key %v before the end of what its holder was promised", name, early)
		}
		if next.Token() <= g.Token {
			t.Errorf("%s: token %v comes after %v", name, next.Token(), g.Token)
		}
		_ = c.Release(t.Context()) // takes nothing from it
		if err := next.Release(t.Context()); err != nil {
			t.Errorf("%s: the next holder: %v", name, err)
		}
	}
	if err := errors.Join(anchor.Err(), anchor.Release(t.Context())); err != nil {
		t.Errorf("another lock of the session: %v", err)
	}
}

// A lock is broken that was taken by a request without an answer. Its claim ends, does not wait for
// itself, and leaves nothing behind.
func TestBreakOfATryWithoutAnswer(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	breaker := open(t, etcdstore.Options{}, server.Addr())
	for name, session := range map[string]time.Duration{"lease": 0, "session": long} {
		network := &lateNetwork{kept: make(chan *pb.TxnRequest, 1)}
		cfg := config(server.Addr())
		cfg.DialOptions = append(cfg.DialOptions, grpc.WithChainUnaryInterceptor(network.intercept))
		client, err := clientv3.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { client.Close() })
		s := warm(t, openCold(t, client, etcdstore.Options{Session: session}))
		for _, again := range []bool{true, false} {
			for _, wait := range []bool{true, false} {
				key := fmt.Sprint(name, again, wait)
				c := s.Claim(key, store.ClaimOptions{TTL: long, Wait: wait})
				network.on.Store(true)
				if _, err := c.Try(t.Context()); !errors.Is(err, store.ErrUncertain) {
					t.Fatalf("%s: Try without an answer answers %v", key, err)
				}
				network.on.Store(false)
				if _, err := pb.NewKVClient(direct.ActiveConnection()).Txn(t.Context(), <-network.kept); err != nil {
					t.Fatal(err)
				}
				h, err := s.Inspect(t.Context(), key)
				if err != nil || h.Owner == "" {
					t.Fatalf("%s: the late request has taken nothing: %+v, %v", key, h, err)
				}
				if err := breaker.Break(t.Context(), h); err != nil {
					t.Fatal(err)
				}
				if again {
					if _, err := c.Try(t.Context()); !errors.Is(err, store.ErrLost) {
						t.Errorf("%s: Try of a claim whose lock was broken answers %v, want ErrLost", key, err)
					}
				} else if err := c.Release(t.Context()); err != nil {
					t.Errorf("%s: Release of what was never granted answers %v", key, err)
				}
				if err := s.Settle(t.Context()); err != nil {
					t.Error(err)
				}
				servertest.Eventually(t, long/2, func() error { // without the holder's help it would be longer
					h, err := breaker.Inspect(t.Context(), key)
					if err == nil && (h.Owner != "" || h.Waiting > 0) {
						err = fmt.Errorf("%s: %+v is left", key, h)
					}
					return err
				})
			}
		}
	}
}

// When the client is closed the store tries nothing more, and nobody waits for it; its client then
// has nothing to warn of.
func TestClientClosed(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	for name, session := range map[string]time.Duration{"lease": 0, "session": long} {
		p := servertest.NewProxy(t, server.Addr())
		core, logs := observer.New(zap.WarnLevel)
		cfg := config(p.Addr())
		cfg.Logger = zap.New(core)
		client, err := clientv3.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		s := warm(t, openCold(t, client, etcdstore.Options{Session: session}))
		c := s.Claim(name, store.ClaimOptions{TTL: long})
		if _, err := c.Try(t.Context()); err != nil {
			t.Fatal(err)
		}
		p.BlackHole()
		ctx, cancel := context.WithTimeout(t.Context(), minTTL/4)
		defer cancel()
		if err := c.Release(ctx); !errors.Is(err, store.ErrUncertain) {
			t.Errorf("%s: Release without an answer answers %v", name, err)
		}
		if err := s.Settle(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: Settle with something left answers %v", name, err)
		}
		client.Close()
		if err := s.Settle(t.Context()); err != nil {
			t.Errorf("%s: Settle with a closed client answers %v", name, err)
		}
		before := logs.Len()
		time.Sleep(minTTL)                   // two tries of what goes on
		if n := logs.Len() - before; n > 1 { // a request that was under way
			t.Errorf("%s: a closed client warns %d times: %v", name, n, logs.All()[before:])
		}
	}
}

// A waiter keeps its place for as long as it waits, also where each of its waits is short against
// its ttl, because the holder's ttl is: it comes before one that queued up later.
func TestPlaceOutlivesShortWaits(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	s := open(t, etcdstore.Options{}, server.Addr())
	const ttl = 4 * minTTL
	lease := kit.Acquire(t, locker(t, holdfast.Options{TTL: minTTL}, server.Addr()), "k")
	queued := func(n int) []store.Queued {
		t.Helper()
		var h store.Holder
		servertest.Eventually(t, time.Minute, func() (err error) {
			h, err = s.Inspect(t.Context(), "k")
			if err == nil && len(h.Queue) != n {
				err = fmt.Errorf("%d wait, want %d", len(h.Queue), n)
			}
			return err
		})
		return h.Queue
	}
	first := acquiring(t.Context(), locker(t, holdfast.Options{TTL: ttl, Label: "first"}, server.Addr()), "k")
	queued(1)
	second := acquiring(t.Context(), locker(t, holdfast.Options{TTL: minTTL, Label: "second"}, server.Addr()), "k")
	queued(2)
	time.Sleep(ttl + minTTL)
	if q := queued(2); q[0].Label != "first" {
		t.Errorf("after more than its ttl the first waiter is behind %q", q[0].Label)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	one := await(t, first, ttl, "the first waiter")
	if err := one.Release(t.Context()); err != nil {
		t.Error(err)
	}
	two := await(t, second, ttl, "the second waiter")
	if two.Token() <= one.Token() {
		t.Errorf("the second waiter, with token %v, came before the first, with %v", two.Token(), one.Token())
	}
	if err := two.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Those before a waiter give up, in any order: it learns of each, and comes at once when the key is
// free, and not when their turns would have been over.
func TestThoseBeforeGiveUp(t *testing.T) {
	t.Parallel()
	const turn = 200 * time.Millisecond // that the store leaves to a waiter
	server := servertest.Etcd(t, module)
	s := open(t, etcdstore.Options{}, server.Addr())
	var locks []*holdfast.Locker
	for range 5 {
		locks = append(locks, locker(t, holdfast.Options{TTL: 10 * minTTL}, server.Addr()))
	}
	var gaps []time.Duration
	for i := range kit.Count(5, 50) {
		key := fmt.Sprint("k", i)
		queued := func(n int) {
			t.Helper()
			servertest.Eventually(t, time.Minute, func() error {
				h, err := s.Inspect(t.Context(), key)
				if err == nil && h.Waiting != n {
					err = fmt.Errorf("%d wait, want %d", h.Waiting, n)
				}
				return err
			})
		}
		lease := kit.Acquire(t, locks[0], key)
		var giveUp []context.CancelFunc
		var last <-chan *holdfast.Lease
		for n, l := range locks[1:] {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			giveUp = append(giveUp, cancel)
			last = acquiring(ctx, l, key)
			queued(n + 1)
		}
		// First the one right before the last, which leaves two before it, and then those.
		for n, who := range []int{2, 0, 1} {
			time.Sleep(turn / 2)
			giveUp[who]()
			queued(2 - n + 1)
		}
		time.Sleep(turn / 2)
		began := time.Now()
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		next := await(t, last, 10*minTTL, "the last waiter")
		gaps = append(gaps, time.Since(began))
		if err := next.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if gap := kit.Median(gaps); gap > turn {
		t.Errorf("the only waiter that is left comes %v after the release (median)", gap)
	}
}

// One of two ways to the server falls silent, and the client does not notice. A waiter whose watch
// goes that way asks again long before the holder's ttl is over.
func TestWatchWithoutAnswer(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	const ttl = 2 * time.Minute
	holder := locker(t, holdfast.Options{TTL: ttl}, server.Addr())
	var wg sync.WaitGroup
	var holes atomic.Int64
	for i := range 8 { // a watch goes either way
		key := fmt.Sprint("k", i)
		lease := kit.Acquire(t, holder, key)
		p, q := servertest.NewProxy(t, server.Addr()), servertest.NewProxy(t, server.Addr())
		cfg := config(p.Addr(), q.Addr())
		cfg.DialKeepAliveTime, cfg.DialKeepAliveTimeout = 0, 0
		c, err := clientv3.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		s := warm(t, openCold(t, c, etcdstore.Options{}))
		claim := s.Claim(key, store.ClaimOptions{TTL: ttl, Wait: true})
		_, err = claim.Try(t.Context())
		var held *store.HeldError
		if !errors.As(err, &held) {
			t.Fatalf("Try of a held key: %v", err)
		}
		p.BlackHole()
		wg.Go(func() {
			woken := make(chan error, 1)
			go func() { woken <- claim.(store.Waiter).Wait(t.Context(), held) }()
			time.Sleep(minTTL)
			if err := lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
			select {
			case err := <-woken:
				if err != nil {
					t.Errorf("Wait: %v", err)
				}
			case <-time.After(ttl / 4):
				t.Errorf("Wait has not returned %v after the release; the holder's ttl was %v", ttl/4, ttl)
			}
			holes.Add(p.Counts().BlackHoled)
			p.Reset()
			p.Heal()
		})
	}
	wg.Wait()
	if holes.Load() == 0 {
		t.Error("nothing was sent into the hole: the test shows nothing")
	}
}

// Release gives up before an extension, which has no answer, has ended: what it could not do is
// still done once the server is back, and not left to the ttl.
func TestReleaseBehindAnExtension(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	for name, limit := range map[string]time.Duration{"gives up": 200 * time.Millisecond, "is given no time": 0} {
		t.Run(name, func(t *testing.T) {
			const ttl = time.Minute
			p := servertest.NewProxy(t, server.Addr())
			prefix := "/" + name + "/"
			s := open(t, etcdstore.Options{Prefix: prefix}, p.Addr())
			c := s.Claim("k", store.ClaimOptions{TTL: ttl})
			if _, err := c.Try(t.Context()); err != nil {
				t.Fatal(err)
			}
			p.BlackHole()
			extended := make(chan store.Result, 1)
			go func() { extended <- s.ExtendMany(context.Background(), []store.Claim{c})[0] }()
			servertest.Eventually(t, time.Minute, func() error {
				if p.Counts().BlackHoled == 0 {
					return errors.New("the extension was not sent")
				}
				return nil
			})
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			if err := c.Release(ctx); !errors.Is(err, store.ErrUncertain) {
				t.Errorf("Release without an answer: %v, want ErrUncertain", err)
			}
			p.Reset()
			p.Heal()
			if r := <-extended; r.Err == nil {
				t.Error("the extension was answered: the test shows nothing")
			}
			servertest.Eventually(t, ttl/3, func() error {
				if n := keys(t, direct, prefix); n > 0 {
					return fmt.Errorf("%d keys are left of a claim that was released", n)
				}
				return nil
			})
			if err := c.Release(t.Context()); err != nil {
				t.Errorf("Release once more: %v, want nil", err)
			}
		})
	}
}

// The program's own client has a namespace. The store's keys and the changes that it watches are
// the same ones, so that a waiter is woken.
func TestClientWithNamespace(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	within := func() *etcdstore.Store {
		c := connect(t, server.Addr())
		c.KV = namespace.NewKV(c.KV, "app/")
		c.Watcher = namespace.NewWatcher(c.Watcher, "app/")
		c.Lease = namespace.NewLease(c.Lease, "app/")
		return warm(t, openCold(t, c, etcdstore.Options{}))
	}
	s := within()
	o := holdfast.Options{TTL: 20 * minTTL}
	lease := kit.Acquire(t, kit.Locker(t, s, o), "k")
	waiting := acquiring(t.Context(), kit.Locker(t, within(), o), "k")
	servertest.Eventually(t, time.Minute, func() error {
		h, err := s.Inspect(t.Context(), "k")
		if err == nil && h.Waiting == 0 {
			err = errors.New("nobody waits")
		}
		return err
	})
	time.Sleep(minTTL / 2) // it watches
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	next := await(t, waiting, 5*minTTL, "the waiter, whose client has a namespace")
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Holds answers no for what is no token, also while the key is free.
func TestHoldsNothing(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	s := open(t, etcdstore.Options{}, server.Addr())
	lease := kit.Acquire(t, kit.Locker(t, s, holdfast.Options{TTL: minTTL}), "held")
	for _, key := range []string{"free", "held"} {
		for _, token := range []fence.Token{0, 1 << 48, -1, -1 << 48, -1 << 63} {
			resp, err := direct.Txn(t.Context()).If(s.Holds(key, token)).Commit()
			if err != nil {
				t.Fatal(err)
			}
			if resp.Succeeded {
				t.Errorf("Holds of a key that is %s holds for token %d", key, token)
			}
		}
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A write that cannot succeed says so, and not that it may have been made.
func TestGuardedWriteThatNeverSucceeds(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	c := connect(t, server.Addr())
	g := newGuard(t, c)
	many := make([]clientv3.Op, 200)
	for i := range many {
		many[i] = clientv3.OpPut(fmt.Sprint("data", i), "a")
	}
	for name, writes := range map[string][]clientv3.Op{
		"larger than the server takes":       {clientv3.OpPut("data", strings.Repeat("x", 1700<<10))},
		"larger than the client sends":       {clientv3.OpPut("data", strings.Repeat("x", 3<<20))},
		"of more keys than the server takes": many,
		"on a lease that has ended":          {clientv3.OpPut("data", "a", clientv3.WithLease(12345))},
		"of an empty key":                    {clientv3.OpPut("", "a")},
		"that is none":                       {{}},
		"of the mark itself":                 {clientv3.OpDelete(etcdstore.DefaultPrefix, clientv3.WithPrefix())},
	} {
		err := g.Write(t.Context(), "r", 5, writes...)
		if !errors.Is(err, fence.ErrInvalid) || errors.Is(err, fence.ErrUncertain) || errors.Is(err, store.ErrUncertain) {
			t.Errorf("a write %s answers %v, want ErrInvalid alone", name, err)
		}
	}
	if err := g.Check(t.Context(), "r", 5); !errors.Is(err, fence.ErrNoResource) {
		t.Errorf("after writes that failed Check answers %v, want ErrNoResource", err)
	}
}

// A server that is far away: to list many locks takes few of its answers one after another.
func TestListFarAway(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	p := servertest.NewProxy(t, server.Addr())
	near, far := open(t, etcdstore.Options{}, server.Addr()), open(t, etcdstore.Options{}, p.Addr())
	const n = 300
	claims := make([]store.Claim, n)
	var wg sync.WaitGroup
	for w := range 10 {
		wg.Go(func() {
			for i := w; i < n; i += 10 {
				claims[i] = near.Claim(fmt.Sprint("k", i), store.ClaimOptions{TTL: time.Minute})
				if _, err := claims[i].Try(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	p.Delay(30 * time.Millisecond)
	listed := 0
	for h, err := range far.List(t.Context(), "k") {
		if err != nil {
			t.Fatalf("List, after %d holders: %v", listed, err)
		}
		if h.TTL <= 0 || h.TTL > time.Minute {
			t.Errorf("%s is held for %v more", h.Key, h.TTL)
		}
		listed++
	}
	if listed != n {
		t.Errorf("List answers %d holders, want %d", listed, n)
	}
	p.Heal()
	for _, c := range claims {
		if err := c.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// A ticket is good whatever the prefix.
func TestTicketOfOddPrefix(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	for _, prefix := range []string{"ü\n\x01 ", "\"<&", "\xff/"} {
		c := connect(t, server.Addr())
		s, err := etcdstore.New(c, etcdstore.Options{Prefix: prefix})
		if errors.Is(err, store.ErrInvalid) {
			t.Logf("prefix %q: %v", prefix, err)
			continue
		}
		warm(t, s)
		claim := s.Claim("k", store.ClaimOptions{TTL: time.Minute})
		if _, err := claim.Try(t.Context()); err != nil {
			t.Fatal(err)
		}
		ticket, err := s.Ticket(claim)
		if err != nil {
			t.Fatal(err)
		}
		adopted, _, err := s.Adopt(t.Context(), ticket)
		if err != nil {
			t.Errorf("prefix %q: Adopt of the store's own ticket: %v", prefix, err)
			continue
		}
		if err := adopted.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
