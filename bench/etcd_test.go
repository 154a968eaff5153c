package bench

import (
	"context"
	"errors"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
)

// etcdTTL is the one of every contender, in seconds.
const etcdTTL = int64(ttl / time.Second)

// BenchmarkEtcd compares locks in etcd with the raw requests and with etcd's own lock, whose
// sessions are as many as its locks: only then is a lock exclusive and ends with its holder. Locks
// that share a session are compared with etcd's own that do; in a queue each waiter of those has
// a session, because they do not exclude each other within one. The server syncs to its disk, as it does by default.
func BenchmarkEtcd(b *testing.B) {
	server := servertest.Etcd(b, "../conformance/etcdserver", servertest.EtcdSync())
	contenders := []contender{
		rawEtcd(newEtcd(b, server.Addr())),
		overEtcdMutex(newEtcd(b, server.Addr())),
		overLocker("holdfast", etcdLocker(b, newEtcd(b, server.Addr()), 0)),
		overSharedMutex(b, newEtcd(b, server.Addr())),
		overLocker("holdfast-session", etcdLocker(b, newEtcd(b, server.Addr()), ttl)),
	}
	b.Run("Sequential", func(b *testing.B) {
		once(b, func() {
			s := sequential(b, contenders)
			figure(b, "Etcd/Sequential", "raw/p50", s.ratios("raw", "holdfast", cycleTime)...)
			figure(b, "Etcd/Sequential", "mutex/p50", s.ratios("mutex", "holdfast", cycleTime)...)
			figure(b, "Etcd/Sequential", "p50-us", s.values("holdfast", cycleTime)...)
			figure(b, "Etcd/Session/Sequential", "mutex/p50", s.ratios("mutex-session", "holdfast-session", cycleTime)...)
			figure(b, "Etcd/Session/Sequential", "p50-us", s.values("holdfast-session", cycleTime)...)
		})
	})
	b.Run("Parallel64", func(b *testing.B) {
		once(b, func() {
			s := parallel(b, contenders)
			figure(b, "Etcd/Parallel64", "pairs/raw", s.ratios("holdfast", "raw", rateOf)...)
			figure(b, "Etcd/Parallel64", "pairs/mutex", s.ratios("holdfast", "mutex", rateOf)...)
			figure(b, "Etcd/Parallel64", "pairs/s", s.values("holdfast", rateOf)...)
			figure(b, "Etcd/Session/Parallel64", "pairs/mutex", s.ratios("holdfast-session", "mutex-session", rateOf)...)
			figure(b, "Etcd/Session/Parallel64", "pairs/leases", s.ratios("holdfast-session", "holdfast", rateOf)...)
			figure(b, "Etcd/Session/Parallel64", "pairs/s", s.values("holdfast-session", rateOf)...)
		})
	})
	b.Run("HandOver", func(b *testing.B) {
		one, each := newEtcd(b, server.Addr()), make([]*clientv3.Client, waiters)
		for i := range each {
			each[i] = newEtcd(b, server.Addr())
		}
		crowds := []crowd{
			etcdMutexes("mutex-process", func(int) *clientv3.Client { return one }),
			etcdMutexes("mutex-processes", func(i int) *clientv3.Client { return each[i] }),
			etcdLockers("holdfast-process", always(etcdLocker(b, one, 0))),
			etcdLockers("holdfast-processes", func(i int) *holdfast.Locker { return etcdLocker(b, each[i], 0) }),
			sharedMutexes(b, "mutex-session-process", func(int) *clientv3.Client { return one }),
			sharedMutexes(b, "mutex-session-processes", func(i int) *clientv3.Client { return each[i] }),
			etcdLockers("holdfast-session-process", always(etcdLocker(b, one, ttl))),
			etcdLockers("holdfast-session-processes", func(i int) *holdfast.Locker { return etcdLocker(b, each[i], ttl) }),
		}
		once(b, func() {
			s := queueUp(b, empty, repetitions(), crowds)
			figure(b, "Etcd/HandOver/process", "rate/mutex", s.ratios("holdfast-process", "mutex-process", handOvers)...)
			figure(b, "Etcd/HandOver/processes", "rate/mutex", s.ratios("holdfast-processes", "mutex-processes", handOvers)...)
			for _, where := range []string{"process", "processes"} {
				figure(b, "Etcd/Session/HandOver/"+where, "rate/mutex",
					s.ratios("holdfast-session-"+where, "mutex-session-"+where, handOvers)...)
			}
			s.list(b, "Etcd/HandOver", crowds)
		})
	})
}

func newEtcd(b testing.TB, addr string) *clientv3.Client {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, DialTimeout: 5 * time.Second, Logger: zap.NewNop()})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	return c
}

func etcdLocker(b testing.TB, c *clientv3.Client, session time.Duration) *holdfast.Locker {
	s, err := etcdstore.New(c, etcdstore.Options{Session: session})
	if err != nil {
		b.Fatal(err)
	}
	locks, err := holdfast.New(s, &holdfast.Options{TTL: ttl})
	if err != nil {
		b.Fatal(err)
	}
	return locks
}

// rawEtcd sends what a lock with a lease of its own cannot do without: grant, create, revoke.
func rawEtcd(c *clientv3.Client) contender {
	return pair("raw", func(key string) (func() error, error) {
		lease, err := c.Grant(background, etcdTTL)
		if err != nil {
			return nil, err
		}
		resp, err := c.Txn(background).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, "owner", clientv3.WithLease(lease.ID))).Else(clientv3.OpGet(key)).Commit()
		if err == nil && !resp.Succeeded {
			err = errors.New("held")
		}
		return func() error {
			_, err := c.Revoke(background, lease.ID)
			return err
		}, err
	})
}

// lockEtcdMutex takes etcd's own lock with a session of its own.
func lockEtcdMutex(ctx context.Context, c *clientv3.Client, key string) (func() error, error) {
	session, err := concurrency.NewSession(c, concurrency.WithTTL(int(etcdTTL)))
	if err != nil {
		return nil, err
	}
	m := concurrency.NewMutex(session, key)
	if err := m.Lock(ctx); err != nil {
		return nil, errors.Join(err, session.Close())
	}
	return func() error { return errors.Join(m.Unlock(background), session.Close()) }, nil
}

func overEtcdMutex(c *clientv3.Client) contender {
	return pair("mutex", func(key string) (func() error, error) { return lockEtcdMutex(background, c, key) })
}

// newSession opens a session that lasts as long as the benchmark.
func newSession(b testing.TB, c *clientv3.Client) *concurrency.Session {
	session, err := concurrency.NewSession(c, concurrency.WithTTL(int(etcdTTL)))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = session.Close() })
	return session
}

// overSharedMutex takes etcd's own locks on one session.
func overSharedMutex(b testing.TB, c *clientv3.Client) contender {
	session := newSession(b, c)
	return pair("mutex-session", func(key string) (func() error, error) {
		m := concurrency.NewMutex(session, key)
		return func() error { return m.Unlock(background) }, m.Lock(background)
	})
}

// sharedMutexes has each waiter keep a session for all its turns.
func sharedMutexes(b testing.TB, name string, client func(int) *clientv3.Client) crowd {
	i := 0
	return newCrowd(name, waiters, func() func(context.Context) (func() error, error) {
		session := newSession(b, client(i))
		i++
		return func(ctx context.Context) (func() error, error) {
			m := concurrency.NewMutex(session, "bench/queue/"+name)
			return func() error { return m.Unlock(background) }, m.Lock(ctx)
		}
	})
}

// always is the same Locker for all waiters.
func always(locks *holdfast.Locker) func(int) *holdfast.Locker {
	return func(int) *holdfast.Locker { return locks }
}

func etcdMutexes(name string, client func(int) *clientv3.Client) crowd {
	i := 0
	return newCrowd(name, waiters, func() func(context.Context) (func() error, error) {
		c := client(i)
		i++
		return func(ctx context.Context) (func() error, error) { return lockEtcdMutex(ctx, c, "bench/queue/mutex") }
	})
}

func etcdLockers(name string, locker func(int) *holdfast.Locker) crowd {
	i := 0
	c := newCrowd(name, waiters, func() func(context.Context) (func() error, error) {
		locks := locker(i)
		i++
		return func(ctx context.Context) (func() error, error) {
			lease, err := locks.Acquire(ctx, "bench/queue/"+name)
			if err != nil {
				return nil, err
			}
			return func() error { return lease.Release(background) }, nil
		}
	})
	c.ours = true
	return c
}
