package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/zkstore"
)

// BenchmarkZooKeeper compares locks in ZooKeeper with the lock of the client library, which has no
// token, no ttl, no heartbeat and no context, and with the requests that no lock on sequential
// nodes can do without. The server syncs to its disk, as it does by default.
func BenchmarkZooKeeper(b *testing.B) {
	server := servertest.ZooKeeper(b, servertest.ZooKeeperDurable(), servertest.ZooKeeperConfig("tickTime", "2000"))
	b.Run("Pairs", func(b *testing.B) {
		contenders := []contender{
			rawZK(b, newZK(b, server.Addr())),
			overZKLock(newZK(b, server.Addr())),
			overLocker("holdfast", zkLocker(b, server.Addr())),
		}
		for name, measure := range map[string]func(*testing.B, []contender) samples{"Sequential": sequential, "Parallel64": parallel} {
			of := func(s sample) float64 { return 1 / cycleTime(s) }
			if name == "Parallel64" {
				of = rateOf
			}
			b.Run(name, func(b *testing.B) {
				once(b, func() {
					s := measure(b, contenders)
					figure(b, "ZooKeeper/"+name, "rate/zk.Lock", s.ratios("holdfast", "zk.Lock", of)...)
					figure(b, "ZooKeeper/"+name, "rate/raw", s.ratios("holdfast", "raw", of)...)
				})
			})
		}
	})
	b.Run("HandOver", func(b *testing.B) {
		crowds := []crowd{
			zkCrowd("zk.Lock", func() func(context.Context) (func() error, error) {
				c := newZK(b, server.Addr())
				return func(context.Context) (func() error, error) { return lockZK(c, "/bench/queue") }
			}),
			zkCrowd("holdfast", func() func(context.Context) (func() error, error) {
				locks := zkLocker(b, server.Addr())
				return func(ctx context.Context) (func() error, error) {
					lease, err := locks.Acquire(ctx, "bench/queue")
					if err != nil {
						return nil, err
					}
					return func() error { return lease.Release(background) }, nil
				}
			}),
		}
		crowds[1].ours = true
		once(b, func() {
			s := queueUp(b, empty, repetitions(), crowds)
			figure(b, "ZooKeeper/HandOver", "rate/zk.Lock", s.ratios("holdfast", "zk.Lock", handOvers)...)
			s.list(b, "ZooKeeper/HandOver", crowds)
		})
	})
}

func zkCrowd(name string, client func() func(context.Context) (func() error, error)) crowd {
	return newCrowd(name, waiters, client)
}

type noLog struct{}

func (noLog) Printf(string, ...any) {}

func newZK(b testing.TB, addr string) *zk.Conn {
	c, _, err := zk.Connect([]string{addr}, 2*ttl, zk.WithLogInfo(false), zk.WithLogger(noLog{}))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.Close)
	return c
}

func zkLocker(b testing.TB, addr string) *holdfast.Locker {
	s, err := zkstore.Dial(zkstore.Options{Servers: []string{addr}, SessionTimeout: 2 * ttl})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(s.Close)
	locks, err := holdfast.New(s, &holdfast.Options{TTL: ttl})
	if err != nil {
		b.Fatal(err)
	}
	return locks
}

// zkPath is where the library's lock of a key is: below one node for each, as ours.
func zkPath(key string) string {
	var n int
	_, _ = fmt.Sscanf(key, "bench/key/%d", &n)
	return fmt.Sprintf("/bench/lock-%d", n)
}

func lockZK(c *zk.Conn, path string) (func() error, error) {
	l := zk.NewLock(c, path, zk.WorldACL(zk.PermAll))
	if err := l.Lock(); err != nil {
		return nil, err
	}
	return l.Unlock, nil
}

func overZKLock(c *zk.Conn) contender {
	return pair("zk.Lock", func(key string) (func() error, error) { return lockZK(c, zkPath(key)) })
}

// rawZK creates a sequential node, lists its parent, and deletes the node.
func rawZK(b testing.TB, c *zk.Conn) contender {
	var made atomic.Bool
	return pair("raw", func(string) (func() error, error) {
		if made.CompareAndSwap(false, true) {
			if _, err := c.Create("/raw", nil, zk.FlagPersistent, zk.WorldACL(zk.PermAll)); err != nil {
				b.Fatal(err)
			}
		}
		path, err := c.Create("/raw/n-", nil, zk.FlagEphemeralSequential, zk.WorldACL(zk.PermAll))
		if err != nil {
			return nil, err
		}
		_, _, err = c.Children("/raw")
		return func() error { return c.Delete(path, -1) }, err
	})
}
