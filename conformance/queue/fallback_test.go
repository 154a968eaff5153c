package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	redsyncgoredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
)

// Nobody tells when another library's lock goes: waiters poll, and have the key soon after.
func TestForeignHolder(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n)
		first, second := b.locker(holdfast.Options{}), b.locker(holdfast.Options{})
		var pools []redsyncredis.Pool
		for _, s := range b.servers {
			client := goredis.NewClient(&goredis.Options{Addr: s.Addr()})
			t.Cleanup(func() { client.Close() })
			pools = append(pools, redsyncgoredis.NewPool(client))
		}
		mutex := redsync.New(pools...).NewMutex("redsync", redsync.WithExpiry(3*ttl), redsync.WithTries(1))
		each := func(args ...string) {
			for _, s := range b.servers {
				rig.Must(t, s, args...)
			}
		}
		for _, foreign := range []struct {
			key          string
			lock, unlock func()
		}{
			{"with a ttl", func() { each("SET", "with a ttl", "somebody", "NX", "PX", "60000") }, func() { each("DEL", "with a ttl") }},
			{"without", func() { each("SET", "without", "somebody", "NX") }, func() { each("DEL", "without") }},
			{"that ends", func() { each("SET", "that ends", "somebody", "NX", "PX", "1500") }, func() { time.Sleep(1200 * time.Millisecond) }},
			{"redsync", func() {
				if err := mutex.Lock(); err != nil {
					t.Fatal(err)
				}
			}, func() {
				if ok, err := mutex.Unlock(); !ok {
					t.Fatal(err)
				}
			}},
		} {
			foreign.lock()
			one, two := acquire(t, first, foreign.key), acquire(t, second, foreign.key)
			time.Sleep(300 * time.Millisecond)
			if !one.waits() || !two.waits() {
				t.Fatalf("%s: granted beside another library's lock, or told %v, %v", foreign.key, one.err, two.err)
			}
			foreign.unlock()
			gone := time.Now()
			select {
			case <-one.done:
			case <-two.done:
				one, two = two, one
			case <-time.After(ttl):
				t.Fatalf("%s: nobody notices that it has gone", foreign.key)
			}
			within(t, foreign.key+": granted after another library's lock", one.at.Sub(gone), 1500*time.Millisecond, ttl*3/4)
			release(t, one.wait(ttl))
			release(t, two.wait(ttl))
			kit.NoKeys(t, ttl/2, b.servers)
		}
	})
}

// told counts the events that say why a waiter polls, by node.
func told(e *kit.Events) map[string]int {
	nodes := map[string]int{}
	for _, n := range kit.Select[holdfast.Node](e) {
		if n.Op == "subscribe" && n.Err != nil {
			nodes[n.Node]++
		}
	}
	return nodes
}

// A user without rights to channels waits by polling, and is told once.
func TestNoRightToChannels(t *testing.T) {
	t.Parallel()
	for _, c := range []rig.Client{rig.GoRedis, rig.Rueidis} {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			servers := kit.Servers(t, 1)
			rig.Must(t, servers[0], "ACL", "SETUSER", "app", "reset", "on", ">pass", "~*", "+@all", "resetchannels")
			c.User, c.Password = "app", "pass"
			events := &kit.Events{}
			lockers := make([]*holdfast.Locker, 3)
			for i := range lockers {
				lockers[i] = kit.Locker(t, rig.Store(t, redlock.Options{NodeTimeout: nodeTimeout}, rig.Nodes(t, c, servers...)...), holdfast.Options{TTL: ttl, Observer: events})
				kit.Warm(t, lockers[i])
			}
			polls(t, servers, lockers[0], lockers[1:], "k")
			for node, n := range told(events) {
				if n > 2 { // stores
					t.Errorf("%s is told of %d times", node, n)
				}
			}
			if len(told(events)) == 0 {
				t.Error("nobody is told that waiting polls")
			}
		})
	}
}

// polls lets waiters have a key, several times, and looks that they left nothing in a queue.
func polls(t *testing.T, servers []*servertest.RedisServer, holder *holdfast.Locker, waiters []*holdfast.Locker, key string) {
	t.Helper()
	for range 3 {
		lease := kit.Acquire(t, holder, key)
		var claims []*claim
		for _, w := range waiters {
			claims = append(claims, acquire(t, w, key))
		}
		time.Sleep(1500 * time.Millisecond)
		for _, s := range servers {
			for _, k := range kit.Keys(t, s) {
				if strings.HasSuffix(k, ":queue") {
					t.Errorf("a queue that nobody can be called from: %s", k)
				}
			}
		}
		release(t, lease)
		released := time.Now()
		within(t, "the last is granted", drain(t, ttl, claims...).Sub(released), 1500*time.Millisecond, ttl*3/4)
	}
}

// The holder may not publish, and the waiters are subscribed: its release finds nobody, and they
// have the key by their timers.
func TestHolderMayNotPublish(t *testing.T) {
	t.Parallel()
	for _, c := range []rig.Client{rig.GoRedis, rig.Rueidis} {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			const ttl = 3 * time.Second
			servers := kit.Servers(t, 1)
			rig.Must(t, servers[0], "ACL", "SETUSER", "app", "reset", "on", ">pass", "~*", "+@all", "resetchannels")
			b := &bed{t: t, client: kit.GoRedis, servers: servers}
			waiters := []*holdfast.Locker{b.locker(holdfast.Options{TTL: ttl}), b.locker(holdfast.Options{TTL: ttl})}
			c.User, c.Password = "app", "pass"
			mute := kit.Locker(t, rig.Store(t, redlock.Options{NodeTimeout: nodeTimeout}, rig.Nodes(t, c, servers...)...), holdfast.Options{TTL: ttl})
			lease := kit.Acquire(t, mute, "k")
			one := acquire(t, waiters[0], "k")
			b.parked("k", 1)
			two := acquire(t, waiters[1], "k")
			b.parked("k", 2)
			release(t, lease)
			released := time.Now()
			within(t, "the last of two waiters", drain(t, 10*ttl, one, two).Sub(released), ttl*9/4, ttl*3)
		})
	}
}

// On a Cluster waiting polls, which is told once.
func TestClusterPolls(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			servers := servertest.RedisCluster(t, 3, kit.Old())
			events := &kit.Events{}
			lockers := make([]*holdfast.Locker, 2)
			for i := range lockers {
				lockers[i] = kit.Locker(t, rig.Store(t, redlock.Options{NodeTimeout: nodeTimeout}, clusterNode(t, c, kit.Addrs(servers))), holdfast.Options{TTL: ttl, Observer: events})
				kit.Warm(t, lockers[i])
			}
			for _, key := range []string{"k1", "{tag}k2"} {
				polls(t, servers, lockers[0], lockers[1:], key)
			}
			if n := told(events); len(n) != 1 {
				t.Errorf("it is told of %v, want of one node", n)
			}
			for node, n := range told(events) {
				if n != 1 {
					t.Errorf("%s is told of %d times", node, n)
				}
			}
		})
	}
}

func clusterNode(t testing.TB, c kit.Client, addrs []string) redlock.Node {
	t.Helper()
	if c.Name == kit.Rueidis.Name {
		n, err := rueidisnode.Dial(rueidis.ClientOption{InitAddress: addrs})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		return n
	}
	client := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() { client.Close() })
	n, err := goredisnode.New(client)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A waiter whose context ends leaves no place and no reservation on any node, also where a node
// was frozen at that moment, and those behind it move up.
func TestCancelledWaiterLeavesNothing(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	kit.Each(t, []int{1, 3, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n)
		holder, leaving, next := b.locker(holdfast.Options{}), b.locker(holdfast.Options{}), b.locker(holdfast.Options{Label: "next"})
		for run := range kit.Count(4, 50) {
			freeze := run%2 == 1
			key := fmt.Sprint("k", run)
			lease := kit.Acquire(t, holder, key)
			one := acquire(t, leaving, key)
			b.parked(key, 1)
			two := acquire(t, next, key)
			b.parked(key, 2)
			last := b.servers[n-1]
			if freeze {
				last.Stop()
			}
			one.cancel()
			begun := time.Now()
			<-one.done
			took := time.Since(begun)
			if freeze {
				last.Cont()
			}
			if !errors.Is(one.err, context.Canceled) || !errors.Is(one.err, holdfast.ErrHeld) {
				t.Errorf("the waiter is told %v", one.err)
			}
			if took > ttl/2 {
				t.Errorf("it takes %v to give up", took)
			}
			b.parked(key, 1)
			if owners := b.places(b.servers[0], key); !slices.ContainsFunc(owners, func(o string) bool { return labelOf(o) == "next" }) {
				t.Errorf("%q have a place, and the one that is left has none", owners)
			}
			release(t, lease)
			release(t, two.wait(ttl))
			kit.NoKeys(t, ttl/2, b.servers)
		}
	})
}

// A queue lives for an hour after it was last used, and a store's subscription ends 3 s after its
// last waiter has left.
func TestQueuesAndSubscriptionsEnd(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n)
		holder, waiting := b.locker(holdfast.Options{}), b.locker(holdfast.Options{})
		for _, key := range []string{"k", "{tag}k"} {
			queue := queueKey(key)
			if key[0] == '{' {
				queue = key + "::queue"
			}
			lease := kit.Acquire(t, holder, key)
			w := acquire(t, waiting, key)
			for i, s := range b.servers {
				servertest.Eventually(t, patience, func() error {
					if left, _ := rig.Must(t, s, "PTTL", queue).(int64); left <= 59*60_000 || left > 60*60_000 {
						return fmt.Errorf("%s lives for %d ms more at node %d, want an hour", queue, left, i)
					}
					return nil
				})
			}
			release(t, lease)
			release(t, w.wait(ttl))
		}
		b.listened(1) // one connection for both keys, and none of the one that has never waited
		left := time.Now()
		servertest.Eventually(t, 3*patience, func() error {
			for i, s := range b.servers {
				if have := subscribers(t, s); have > 0 {
					return fmt.Errorf("%d connections still listen at node %d", have, i)
				}
			}
			return nil
		})
		t.Logf("the subscription ended after %v", time.Since(left).Round(time.Second))
	})
}

// A proxy keeps the connection of a client whose server side has ended: the subscription is gone
// and nobody knows. Waiters have the key by their timers. Rueidis panics by itself where a proxy swaps
// the server behind a connection: the new one does not know that RESP3 was agreed on.
func TestSubscriptionLostBehindAProxy(t *testing.T) {
	t.Parallel()
	for _, c := range []kit.Client{kit.GoRedis} {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			const ttl = 3 * time.Second
			b := newBed(t, c, 1)
			proxy := servertest.NewProxy(t, b.servers[0].Addr(), servertest.KeepClients())
			holder := b.locker(holdfast.Options{TTL: ttl})
			waiters := []*holdfast.Locker{b.locker(holdfast.Options{TTL: ttl}, proxy), b.locker(holdfast.Options{TTL: ttl}, proxy)}
			for run := range kit.Count(2, 10) {
				lease := kit.Acquire(t, holder, "k")
				one := acquire(t, waiters[0], "k")
				two := acquire(t, waiters[1], "k")
				if run == 0 {
					b.parked("k", 2)
					if killed := rig.Must(t, b.servers[0], "CLIENT", "KILL", "TYPE", "pubsub"); killed != int64(2) {
						t.Errorf("%v subscriptions were killed", killed)
					}
				}
				time.Sleep(100 * time.Millisecond)
				release(t, lease)
				released := time.Now()
				within(t, "the last of two waiters", drain(t, 10*ttl, one, two).Sub(released), ttl*9/4, ttl*3)
			}
		})
	}
}
