package interop

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	redsyncgoredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

const ttl = 10 * time.Second

func TestMain(m *testing.M) { kit.Main(m, nil) }

func sync(t testing.TB, servers []*servertest.RedisServer) *redsync.Redsync {
	var pools []redsyncredis.Pool
	for _, s := range servers {
		c := goredis.NewClient(&goredis.Options{Addr: s.Addr()})
		t.Cleanup(func() { c.Close() })
		pools = append(pools, redsyncgoredis.NewPool(c))
	}
	return redsync.New(pools...)
}

func locker(t testing.TB, c kit.Client, servers []*servertest.RedisServer) *holdfast.Locker {
	return kit.Locker(t, kit.Store(t, c, redlock.Options{NodeTimeout: time.Second}, kit.Addrs(servers)), holdfast.Options{TTL: ttl})
}

// redsync and Holdfast exclude each other on the same key and nodes, both ways.
func TestRedsync(t *testing.T) {
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		servers := kit.Servers(t, n)
		rs, locks := sync(t, servers), locker(t, c, servers)

		lease := kit.Acquire(t, locks, "k")
		mutex := rs.NewMutex("k", redsync.WithExpiry(ttl), redsync.WithTries(1))
		if err := mutex.Lock(); err == nil {
			t.Fatal("redsync locks a key that Holdfast holds")
		}
		if err := lease.Extend(t.Context()); err != nil {
			t.Fatalf("Extend after redsync has tried: %v", err)
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		kit.NoKeys(t, ttl/2, servers) // a release returns at the quorum
		if err := mutex.Lock(); err != nil {
			t.Fatalf("redsync, after Release: %v", err)
		}
		_, err := locks.TryAcquire(t.Context(), "k")
		var held *holdfast.HeldError
		if !errors.As(err, &held) || !held.Holder.Foreign || held.Holder.NoTTL || held.Holder.TTL <= ttl/2 || held.Holder.TTL > ttl {
			t.Fatalf("TryAcquire of a key that redsync holds: %v (%+v), want a foreign holder with what is left of %v", err, held, ttl)
		}
		if ok, err := mutex.Extend(); !ok {
			t.Fatalf("redsync's Extend after Holdfast has tried: %v", err)
		}
		next := acquireWhileHeld(t, locks, "k")
		if ok, err := mutex.Unlock(); !ok {
			t.Fatalf("redsync's Unlock while Holdfast waits: %v", err)
		}
		after := <-next
		if after == nil {
			t.FailNow()
		}
		if after.Token() <= lease.Token() {
			t.Errorf("token %v after token %v, with another library's lock between", after.Token(), lease.Token())
		}
		if err := after.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// acquireWhileHeld starts an Acquire, and wants it to wait.
func acquireWhileHeld(t *testing.T, locks *holdfast.Locker, key string) <-chan *holdfast.Lease {
	got := make(chan *holdfast.Lease, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 2*ttl)
		defer cancel()
		lease, err := locks.Acquire(ctx, key)
		if err != nil {
			t.Errorf("Acquire: %v", err)
		}
		got <- lease
	}()
	select {
	case <-got:
		t.Fatal("Acquire returned while another library held the key")
	case <-time.After(ttl / 20):
	}
	return got
}

// Many of both on one key: never two at once.
func TestRedsyncContended(t *testing.T) {
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		servers := kit.Servers(t, n)
		rs := sync(t, servers)
		var inside, foreign, own atomic.Int64
		enter := func(count *atomic.Int64) {
			if inside.Add(1) != 1 {
				t.Error("two holders at once")
			}
			time.Sleep(time.Millisecond)
			inside.Add(-1)
			count.Add(1)
		}
		rounds := int64(kit.Count(20, 300))
		ctx := kit.Context(t, 5*time.Minute)
		done := make(chan error, 4)
		for range 2 {
			locks := locker(t, c, servers)
			go func() {
				for own.Load() < rounds || foreign.Load() < rounds {
					err := locks.Do(ctx, "k", func(context.Context, *holdfast.Lease) error { enter(&own); return nil })
					if err != nil {
						done <- fmt.Errorf("holdfast: %w", err)
						return
					}
					time.Sleep(5 * time.Millisecond) // redsync sleeps for 50 to 250 ms between tries
				}
				done <- nil
			}()
			go func() {
				for (own.Load() < rounds || foreign.Load() < rounds) && ctx.Err() == nil {
					m := rs.NewMutex("k", redsync.WithExpiry(ttl), redsync.WithTries(1))
					if m.LockContext(ctx) != nil {
						time.Sleep(time.Millisecond)
						continue
					}
					enter(&foreign)
					if ok, err := m.UnlockContext(ctx); !ok {
						done <- fmt.Errorf("redsync: %w", err)
						return
					}
				}
				done <- ctx.Err()
			}()
		}
		for range 4 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		t.Logf("%d turns of Holdfast, %d of redsync, never two at once", own.Load(), foreign.Load())
	})
}

// A lock by hand, SET NX with or without PX as redis-py, node-redlock and many others do it:
// the error says that it is another library's, and whether it has an end.
func TestSetNX(t *testing.T) {
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		servers := kit.Servers(t, n)
		locks := locker(t, c, servers)
		set := func(args ...string) (won int) {
			for _, s := range servers {
				v, err := s.Do(append([]string{"SET"}, args...)...)
				if err != nil {
					t.Fatal(err)
				}
				if v == "OK" {
					won++
				}
			}
			return won
		}
		del := func(key string) {
			for _, s := range servers {
				if _, err := s.Do("DEL", key); err != nil {
					t.Fatal(err)
				}
			}
		}
		for _, forever := range []bool{false, true} {
			args := []string{"k", "d8f1a9c2", "NX", "PX", "10000"}
			if forever {
				args = args[:3]
			}
			if set(args...) != n {
				t.Fatal("the key was not free")
			}
			_, err := locks.TryAcquire(t.Context(), "k")
			var held *holdfast.HeldError
			if !errors.As(err, &held) {
				t.Fatalf("TryAcquire: %v, want a HeldError", err)
			}
			h := held.Holder
			if !h.Foreign || h.Owner != "d8f1a9c2" || h.NoTTL != forever || (h.TTL > 0) == forever {
				t.Errorf("without an end %v: holder %+v", forever, h)
			}
			next := acquireWhileHeld(t, locks, "k")
			del("k")
			lease := <-next
			if lease == nil {
				t.FailNow()
			}
			if won := set(args...); won > n/2 {
				t.Errorf("SET NX takes a key that Holdfast holds, on %d of %d nodes", won, n)
			}
			if err := lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
			del("k") // what SET NX took on nodes beyond the quorum
			kit.NoKeys(t, ttl/2, servers)
		}
	})
}
