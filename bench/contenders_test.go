package bench

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	redsyncgoredis "github.com/go-redsync/redsync/v4/redis/goredis/v9"
	redsyncrueidis "github.com/go-redsync/redsync/v4/redis/rueidis"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidiscompat"
	"github.com/redis/rueidis/rueidislock"

	"github.com/holdfast-go/holdfast"
)

// ours is the whole stack with the default options: token, automatic extension, and all.
func ours(b *testing.B, l library, addrs ...string) contender {
	return overLocker("holdfast-"+string(l), l.locker(b, holdfast.Options{}, addrs...))
}

func overLocker(name string, locks *holdfast.Locker) contender {
	return pair(name, func(key string) (func() error, error) {
		lease, err := locks.Acquire(background, key) // on an overloaded machine a node may be late: that is a slow pair
		if err != nil {
			return nil, err
		}
		return func() error { return lease.Release(background) }, nil
	})
}

// compareAndDelete is what every library uses to release.
const compareAndDelete = `if redis.call("GET", KEYS[1]) == ARGV[1] then return redis.call("DEL", KEYS[1]) end return 0`

var errNotOurs = errors.New("the key is not ours")

// commands are the raw commands on one node.
type commands interface {
	set(key, value string) (bool, error)
	del(key, value string) (bool, error)
}

type rueidisCommands struct {
	c   rueidis.Client
	sha string
}

func (r rueidisCommands) set(key, value string) (bool, error) {
	err := r.c.Do(background, r.c.B().Set().Key(key).Value(value).Nx().PxMilliseconds(ttl.Milliseconds()).Build()).Error()
	if rueidis.IsRedisNil(err) {
		return false, nil
	}
	return err == nil, err
}

func (r rueidisCommands) del(key, value string) (bool, error) {
	n, err := r.c.Do(background, r.c.B().Evalsha().Sha1(r.sha).Numkeys(1).Key(key).Arg(value).Build()).AsInt64()
	return n == 1, err
}

type goredisCommands struct {
	c   *goredis.Client
	sha string
}

func (r goredisCommands) set(key, value string) (bool, error) {
	return r.c.SetNX(background, key, value, ttl).Result()
}

func (r goredisCommands) del(key, value string) (bool, error) {
	n, err := r.c.EvalSha(background, r.sha, []string{key}, value).Int64()
	return n == 1, err
}

func (l library) commands(b *testing.B, addr string) commands {
	if l == onGoRedis {
		c := newGoRedis(b, addr)
		sha, err := c.ScriptLoad(background, compareAndDelete).Result()
		if err != nil {
			b.Fatal(err)
		}
		return goredisCommands{c, sha}
	}
	c := newRueidis(b, addr)
	sha, err := c.Do(background, c.B().ScriptLoad().Script(compareAndDelete).Build()).ToString()
	if err != nil {
		b.Fatal(err)
	}
	return rueidisCommands{c, sha}
}

func randomValue() string {
	var v [16]byte
	rand.Read(v[:])
	return hex.EncodeToString(v[:])
}

// raw is SET NX PX and compare-and-delete on one node.
func raw(b *testing.B, l library, addr string) contender {
	c := l.commands(b, addr)
	return pair("raw-"+string(l), func(key string) (func() error, error) {
		value := randomValue()
		if err := mustDo(c.set(key, value)); err != nil {
			return nil, err
		}
		return func() error { return mustDo(c.del(key, value)) }, nil
	})
}

func mustDo(done bool, err error) error {
	if err == nil && !done {
		return errNotOurs
	}
	return err
}

// fanOut is the same on five nodes at once, each time waiting for three that did it.
func fanOut(b *testing.B, l library, addrs ...string) contender {
	var nodes []commands
	for _, a := range addrs {
		nodes = append(nodes, l.commands(b, a))
	}
	quorum := func(ask func(commands) (bool, error)) error {
		answers := make(chan error, len(nodes))
		for _, n := range nodes {
			go func() { answers <- mustDo(ask(n)) }()
		}
		did := 0
		var failed error
		for range nodes {
			err := <-answers
			if err != nil {
				failed = err
				continue
			}
			if did++; did > len(nodes)/2 {
				return nil
			}
		}
		return failed
	}
	return pair("raw-"+string(l), func(key string) (func() error, error) {
		value := randomValue()
		if err := quorum(func(c commands) (bool, error) { return c.set(key, value) }); err != nil {
			return nil, err
		}
		return func() error {
			return quorum(func(c commands) (bool, error) { return c.del(key, value) })
		}, nil
	})
}

// overRedsync is redsync with one attempt, like the others.
func overRedsync(b *testing.B, l library, addrs ...string) contender {
	var pools []redsyncredis.Pool
	for _, a := range addrs {
		if l == onGoRedis {
			pools = append(pools, redsyncgoredis.NewPool(newGoRedis(b, a)))
		} else {
			pools = append(pools, redsyncrueidis.NewPool(rueidiscompat.NewAdapter(newRueidis(b, a))))
		}
	}
	rs := redsync.New(pools...)
	return pair("redsync-"+string(l), func(key string) (func() error, error) {
		m := rs.NewMutex(key, redsync.WithExpiry(ttl), redsync.WithTries(1))
		if err := m.LockContext(background); err != nil {
			return nil, err
		}
		return func() error { return mustDo(m.UnlockContext(background)) }, nil
	})
}

func overRedislock(b *testing.B, addr string) contender {
	client := redislock.New(newGoRedis(b, addr))
	return pair("redislock", func(key string) (func() error, error) {
		l, err := client.Obtain(background, key, ttl, nil)
		if err != nil {
			return nil, err
		}
		return func() error { return l.Release(background) }, nil
	})
}

// overRueidislock is rueidislock with one key on one node. It has no other kind: its several
// keys live behind one client, too, so that it takes no part with five nodes.
func overRueidislock(b *testing.B, addr string) contender {
	o := rueidisOption(addr)
	o.DisableCache = false // its waiters live on the cache
	locks, err := rueidislock.NewLocker(rueidislock.LockerOption{ClientOption: o, KeyMajority: 1, KeyValidity: ttl,
		ExtendInterval: ttl / 3, TryNextAfter: time.Second, NoLoopTracking: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(locks.Close)
	return pair("rueidislock", func(key string) (func() error, error) {
		_, cancel, err := locks.TryWithContext(background, key)
		if err != nil {
			return nil, err
		}
		return func() error { cancel(); return nil }, nil
	})
}
