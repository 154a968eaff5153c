package bench

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	redsyncgoredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/rueidis/rueidislock"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
)

// crowdsOnOne are n clients of each contender on one node.
func crowdsOnOne(b testing.TB, n int, addr string) []crowd {
	return []crowd{
		overBLPOP(b, onRueidis, n, addr), overHoldfast(b, onRueidis, n, addr),
		overBLPOP(b, onGoRedis, n, addr), overHoldfast(b, onGoRedis, n, addr),
		redsyncs(b, "redsync", n, []string{addr}),
		redsyncs(b, "redsync-tuned", n, []string{addr}, eager...),
		redislocks(b, "redislock", n, addr, 100*time.Millisecond),
		redislocks(b, "redislock-tuned", n, addr, time.Millisecond),
		rueidislocks(b, "rueidislock", n, addr, rueidislock.LockerOption{}),
		rueidislocks(b, "rueidislock-tuned", n, addr, tracking(1)),
	}
}

// crowdsOnFive are n clients of each contender on five nodes. The five keys of rueidislock live
// behind one client, so that all of them are on one node: that is less work than five.
func crowdsOnFive(b testing.TB, n int, five ...string) []crowd {
	return []crowd{
		overHoldfast(b, onRueidis, n, five...), overHoldfast(b, onGoRedis, n, five...),
		redsyncs(b, "redsync", n, five),
		redsyncs(b, "redsync-tuned", n, five, eager...),
		rueidislocks(b, "rueidislock", n, five[0], rueidislock.LockerOption{KeyMajority: 3}),
		rueidislocks(b, "rueidislock-tuned", n, five[0], tracking(3)),
	}
}

func newCrowd(name string, n int, join func() func(context.Context) (func() error, error)) crowd {
	c := crowd{name: name}
	for range n {
		c.acquire = append(c.acquire, join())
	}
	return c
}

// overHoldfast gives each of n its own store, with clients of its own for the first 16: those
// after them share.
func overHoldfast(b testing.TB, l library, n int, addrs ...string) crowd {
	var clients [][]redlock.Node
	for range min(n, waiters) {
		clients = append(clients, l.nodes(b, addrs...))
	}
	i := 0
	c := newCrowd("holdfast-"+string(l), n, func() func(context.Context) (func() error, error) {
		locks := newLocker(b, holdfast.Options{}, clients[i%len(clients)]...)
		i++
		return func(ctx context.Context) (func() error, error) {
			lease, err := locks.Acquire(ctx, "bench/queue/holdfast")
			if err != nil {
				return nil, err
			}
			return func() error { return lease.Release(background) }, nil
		}
	})
	c.ours = true
	return c
}

// floors are the crowds without a lock.
var floors = []string{"blpop-rueidis", "blpop-goredis"}

// overBLPOP hands a token over in a list, without a lease: the server serves those who wait in
// order. Whoever dies with the token takes it along.
func overBLPOP(b testing.TB, l library, n int, addr string) crowd {
	key := "bench/queue/blpop-" + string(l)
	c := newGoRedis(b, addr)
	if err := c.Del(background, key).Err(); err != nil {
		b.Fatal(err)
	}
	if err := c.RPush(background, key, "token").Err(); err != nil {
		b.Fatal(err)
	}
	return newCrowd("blpop-"+string(l), n, func() func(context.Context) (func() error, error) {
		if l == onGoRedis {
			c := newGoRedis(b, addr)
			return func(ctx context.Context) (func() error, error) {
				if err := c.BLPop(ctx, stalled, key).Err(); err != nil {
					return nil, err
				}
				return func() error { return c.RPush(background, key, "token").Err() }, nil
			}
		}
		c := newRueidis(b, addr)
		return func(ctx context.Context) (func() error, error) {
			if err := c.Do(ctx, c.B().Blpop().Key(key).Timeout(stalled.Seconds()).Build()).Error(); err != nil {
				return nil, err
			}
			return func() error { return c.Do(background, c.B().Rpush().Key(key).Element("token").Build()).Error() }, nil
		}
	})
}

// eager asks again after 1 to 3 ms, as long as it takes.
var eager = []redsync.Option{redsync.WithTries(1 << 30), redsync.WithRetryDelayFunc(func(int) time.Duration {
	return time.Millisecond + rand.N(2*time.Millisecond)
})}

func redsyncs(b testing.TB, name string, n int, addrs []string, options ...redsync.Option) crowd {
	return newCrowd(name, n, func() func(context.Context) (func() error, error) {
		var pools []redsyncredis.Pool
		for _, a := range addrs {
			pools = append(pools, redsyncgoredis.NewPool(newGoRedis(b, a)))
		}
		rs := redsync.New(pools...)
		options := append([]redsync.Option{redsync.WithExpiry(ttl)}, options...)
		return func(ctx context.Context) (func() error, error) {
			m := rs.NewMutex("bench/queue/"+name, options...)
			if err := m.LockContext(ctx); err != nil {
				return nil, err
			}
			return func() error { return mustDo(m.UnlockContext(background)) }, nil
		}
	})
}

// redislocks ask again after a fixed time: the library has no random one. Without a strategy it
// does not wait at all; 100 ms is in its manual.
func redislocks(b testing.TB, name string, n int, addr string, again time.Duration) crowd {
	return newCrowd(name, n, func() func(context.Context) (func() error, error) {
		client := redislock.New(newGoRedis(b, addr))
		options := &redislock.Options{RetryStrategy: redislock.LinearBackoff(again)}
		return func(ctx context.Context) (func() error, error) {
			l, err := client.Obtain(ctx, "bench/queue/"+name, ttl, options)
			if err != nil {
				return nil, err
			}
			return func() error { return l.Release(background) }, nil
		}
	})
}

// tracking asks Redis for no word about the client's own changes, and gives each request a second.
func tracking(majority int32) rueidislock.LockerOption {
	return rueidislock.LockerOption{KeyMajority: majority, KeyValidity: ttl, ExtendInterval: ttl / 3,
		TryNextAfter: time.Second, NoLoopTracking: true}
}

var errLockerGone = errors.New("the lock ended while it was held")

func rueidislocks(b testing.TB, name string, n int, addr string, o rueidislock.LockerOption) crowd {
	o.ClientOption = rueidisOption(addr)
	o.ClientOption.DisableCache = false // its waiters live on the cache
	return newCrowd(name, n, func() func(context.Context) (func() error, error) {
		locks, err := rueidislock.NewLocker(o)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(locks.Close)
		return func(ctx context.Context) (func() error, error) {
			held, release, err := locks.WithContext(ctx, "bench/queue/"+name)
			if err != nil {
				return nil, err
			}
			return func() error {
				ended := held.Err()
				release()
				if ended != nil {
					return errLockerGone
				}
				return nil
			}, nil
		}
	})
}
