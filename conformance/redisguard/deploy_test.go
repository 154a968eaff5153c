package redisguard_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
)

// serverOf is the server of a Cluster that has a key.
func serverOf(t testing.TB, servers []*servertest.RedisServer, key string) *servertest.RedisServer {
	t.Helper()
	for _, s := range servers {
		if _, err := s.Do("EXISTS", key); err == nil {
			return s
		}
	}
	t.Fatalf("nobody has %q", key)
	return nil
}

func TestCluster(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		servers := servertest.RedisCluster(t, 3)
		addrs := kit.Addrs(servers)
		fencetest.Run(t, fencetest.Harness{
			New:    func(t testing.TB) fence.Guard { return guard(t, c.cluster(t, addrs)) },
			Reopen: func(t testing.TB, _ fence.Guard) fence.Guard { return guard(t, c.cluster(t, addrs)) },
		})
		g := guard(t, c.cluster(t, addrs))
		used := map[*servertest.RedisServer]bool{}
		for i, r := range []string{"r", "a", "b", "c", "{tag}a", "x{tag}", "}", "a}b", "{}", "{}{tag}", "a}{tag}", "{", "}{", "{tag", "ä}"} {
			s := serverOf(t, servers, r)
			used[s] = true
			slot := func(key string) any { return rig.Must(t, s, "CLUSTER", "KEYSLOT", key) }
			if slot(r) != slot(g.MarkKey(r)) {
				t.Errorf("%q is in slot %v, its mark %q in %v", r, slot(r), g.MarkKey(r), slot(g.MarkKey(r)))
			}
			want(t, "Set of "+r, g.Set(t.Context(), r, 5, r, strconv.Itoa(i), 0), nil)
			want(t, "stale Set of "+r, g.Set(t.Context(), r, 4, r, "x", 0), fence.ErrStale)
			n, err := g.IncrBySeq(t.Context(), r, 5, 1, r, 100)
			if err != nil || n != int64(100+i) || value(t, s, r) != strconv.Itoa(100+i) {
				t.Errorf("IncrBySeq of %q: %d, %v; the key holds %v", r, n, err, value(t, s, r))
			}
			want(t, "Del of "+r, g.Del(t.Context(), r, 5, r), nil)
		}
		if len(used) < 2 {
			t.Error("all resources are on one server")
		}
		for _, w := range writes(t, "q") {
			if w.name != "IncrBy" {
				want(t, w.name, w.do(g, t.Context(), "q", 5), nil)
			}
		}

		// Keys that are elsewhere, on another server or on the same.
		script := newScript(t, g, "redis.call('SET', KEYS[1], 'x')")
		for i := range 20 {
			key := "elsewhere" + strconv.Itoa(i)
			want(t, "Set", g.Set(t.Context(), "r", 9, key, "x", 0), fence.ErrInvalid, key, "hash tag")
			want(t, "Del", g.Del(t.Context(), "r", 9, "{r}x", key), fence.ErrInvalid, key, "hash tag")
			_, err := script.Run(t.Context(), "r", 9, []string{"r", key}, nil)
			want(t, "script", err, fence.ErrInvalid, key, "{r}")
		}
		want(t, "Check, nothing was raised", g.Check(t.Context(), "r", 5), nil)
	})
}

// A slot that moves to another server: redirections are followed, a call of several keys is
// refused while they are not together, and the order of tokens is kept.
func TestClusterSlotMoves(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		servers := servertest.RedisCluster(t, 3)
		g := guard(t, c.cluster(t, kit.Addrs(servers)))
		const r = "{moves}r"
		from := serverOf(t, servers, r)
		to := servers[0]
		if to == from {
			to = servers[1]
		}
		want(t, "Set", g.Set(t.Context(), r, 5, r, "0", 0), nil)
		id := func(s *servertest.RedisServer) string { return rig.Must(t, s, "CLUSTER", "MYID").(string) }
		slot := fmt.Sprint(rig.Must(t, from, "CLUSTER", "KEYSLOT", r))
		rig.Must(t, to, "CLUSTER", "SETSLOT", slot, "IMPORTING", id(from))
		rig.Must(t, from, "CLUSTER", "SETSLOT", slot, "MIGRATING", id(to))
		migrate := func(key string) {
			t.Helper()
			rig.Must(t, from, "MIGRATE", "127.0.0.1", strconv.Itoa(to.Port()), key, "0", "5000")
		}
		sum := int64(0)
		incr := func(when string) {
			t.Helper()
			sum++
			n, err := g.IncrBy(t.Context(), r, 5, r, 1)
			if err != nil || n != sum {
				t.Errorf("%s: %d, %v, want %d", when, n, err, sum)
			}
			want(t, when+": stale", g.Claim(t.Context(), r, 4), fence.ErrStale)
		}
		incr("before its keys move")
		migrate(g.MarkKey(r))
		_, err := g.IncrBy(t.Context(), r, 5, r, 1)
		want(t, "while the mark is there, and the data here", err, fence.ErrUnavailable, "TRYAGAIN")
		want(t, "the mark alone", g.Check(t.Context(), r, 5), nil)
		want(t, "stale while the keys are apart", g.Claim(t.Context(), r, 4), fence.ErrStale)
		migrate(r)
		incr("while the slot moves")
		for _, s := range servers {
			rig.Must(t, s, "CLUSTER", "SETSLOT", slot, "NODE", id(to))
		}
		incr("after it has moved")
		if v := value(t, to, r); v != strconv.FormatInt(sum, 10) {
			t.Errorf("the other server has %v", v)
		}
	})
}

func TestClusterDown(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		servers := servertest.RedisCluster(t, 3, servertest.Config("cluster-node-timeout", "1500"))
		g := guard(t, c.cluster(t, kit.Addrs(servers)))
		r := "r"
		s := serverOf(t, servers, r)
		want(t, "Claim", g.Claim(t.Context(), r, 5), nil)
		for _, other := range servers {
			if other != s {
				other.Kill()
				break
			}
		}
		servertest.Eventually(t, patience, func() error {
			if _, err := s.Do("GET", r); err == nil {
				return errors.New("the Cluster is still up")
			}
			return nil
		})
		want(t, "Set", g.Set(t.Context(), r, 5, r, "x", 0), fence.ErrUnavailable, "CLUSTERDOWN")
		want(t, "Claim", g.Claim(t.Context(), r, 6), fence.ErrUnavailable, "CLUSTERDOWN")
	})
}

// A Cluster client does not send a script again either, when its reply is lost with the connection.
func TestClusterLosesReplies(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		servers := servertest.RedisCluster(t, 2)
		proxies := map[string]*servertest.Proxy{}
		for _, s := range servers {
			proxies[s.Addr()] = servertest.NewProxy(t, s.Addr())
		}
		dial := func(ctx ctx, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", proxies[addr].Addr())
		}
		var eval redisfence.Eval
		if c.name == "goredis" {
			client := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: kit.Addrs(servers),
				Dialer: func(ctx ctx, _, addr string) (net.Conn, error) { return dial(ctx, addr) }})
			t.Cleanup(func() { client.Close() })
			eval = made(t)(goredisnode.Eval(client))
		} else {
			client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: kit.Addrs(servers), DisableCache: true,
				DialCtxFn: func(ctx ctx, addr string, _ *net.Dialer, _ *tls.Config) (net.Conn, error) { return dial(ctx, addr) }})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(client.Close)
			eval = made(t)(rueidisnode.Eval(client))
		}
		g := guardWith(t, eval, time.Second)
		s := serverOf(t, servers, "r")
		proxy := proxies[s.Addr()]
		lost := 0
		for range kit.Count(5, 100) {
			servertest.Eventually(t, patience, func() error { _, err := g.IncrBy(t.Context(), "r", 1, "r", 1); return err })
			rig.Must(t, s, "SET", "r", "0")
			dropped := proxy.Counts().Dropped
			proxy.DropReplies()
			time.AfterFunc(200*time.Millisecond, func() { proxy.Reset(); proxy.Heal() })
			_, err := g.IncrBy(t.Context(), "r", 1, "r", 1)
			servertest.Eventually(t, patience, func() error { return g.Claim(t.Context(), "r", 1) }) // it has healed
			v := value(t, s, "r")
			switch {
			case v == "1" && errors.Is(err, fence.ErrUncertain) && proxy.Counts().Dropped > dropped:
				lost++
			case v == "1" && err == nil, v == "0" && err != nil: // the reply, or not even the request, went through
			default:
				t.Errorf("applied %v times: %v", v, err)
			}
		}
		if lost == 0 {
			t.Error("no reply was lost")
		}
		t.Logf("%d replies lost", lost)
	})
}

// pair is a primary and its replica, with what replicates in between.
func pair(t testing.TB) (primary, replica *servertest.RedisServer, link *servertest.Proxy) {
	t.Helper()
	primary = servertest.Redis(t, kit.Old())
	link = servertest.NewProxy(t, primary.Addr())
	_, port, _ := strings.Cut(link.Addr(), ":")
	replica = servertest.Redis(t, kit.Old(), servertest.Config("replicaof", "127.0.0.1", port))
	replica.WaitLinked()
	return primary, replica, link
}

// caughtUp waits until a replica has all of its primary.
func caughtUp(t testing.TB, primary, replica *servertest.RedisServer) {
	t.Helper()
	servertest.Eventually(t, patience, func() error {
		if p, r := primary.Info("replication", "master_repl_offset"), replica.Info("replication", "slave_repl_offset"); p != r {
			return fmt.Errorf("the replica has %s of %s", r, p)
		}
		return nil
	})
}

// fail ends the primary and promotes the replica.
func fail(t testing.TB, primary, replica *servertest.RedisServer) {
	t.Helper()
	primary.Kill()
	rig.Must(t, replica, "REPLICAOF", "NO", "ONE")
}

// A replica that has got the mark keeps the order once it is promoted.
func TestFailover(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		primary, replica, _ := pair(t)
		g := guard(t, c.eval(t, primary.Addr()))
		want(t, "Set", g.Set(t.Context(), "r", 33, "r", "old", 0), nil)
		want(t, "Claim", g.Claim(t.Context(), "r", 34), nil)
		caughtUp(t, primary, replica)
		fail(t, primary, replica)
		after := guard(t, c.eval(t, replica.Addr()))
		want(t, "the old holder", after.Set(t.Context(), "r", 33, "r", "late", 0), fence.ErrStale)
		want(t, "the new holder", after.Check(t.Context(), "r", 34), nil)
		if v := value(t, replica, "r"); v != "old" {
			t.Errorf("the key holds %v", v)
		}
	})
}

// A replica that has not got the mark lets the old holder write, until the new one's next call. With
// the tokens of package redlock the new one's is the larger in any case: they are not kept where the
// mark is.
func TestFailoverThatLosesTheMark(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		primary, replica, link := pair(t)
		lockServer := servertest.Redis(t, kit.Old())
		locks := kit.Locker(t, kit.Store(t, kitClient(c), redlock.Options{}, []string{lockServer.Addr()}), holdfast.Options{})
		lease := func() *holdfast.Lease {
			t.Helper()
			l := kit.Acquire(t, locks, "r")
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			return l
		}
		before, after := guard(t, c.eval(t, primary.Addr())), guard(t, c.eval(t, replica.Addr()))
		old := lease().Token()
		want(t, "the old holder", before.Set(t.Context(), "r", old, "r", "old", 0), nil)
		caughtUp(t, primary, replica)
		link.BlackHole()
		next := lease().Token()
		want(t, "the new holder", before.Claim(t.Context(), "r", next), nil)
		want(t, "the old holder", before.Set(t.Context(), "r", old, "r", "late", 0), fence.ErrStale)
		fail(t, primary, replica)
		if link.Counts().BlackHoled == 0 {
			t.Error("nothing of the replication was held back")
		}
		if v := value(t, replica, before.MarkKey("r")); v != old.String() {
			t.Fatalf("the replica has the mark %v", v)
		}
		want(t, "the old holder, where the mark was forgotten", after.Set(t.Context(), "r", old, "r", "late", 0), nil)
		want(t, "Check of the new holder", after.Check(t.Context(), "r", next), fence.ErrUnclaimed)
		if next <= old {
			t.Errorf("token %v after %v", next, old)
		}
		want(t, "the new holder again", after.Claim(t.Context(), "r", next), nil)
		want(t, "the old holder, too late", after.Set(t.Context(), "r", old, "r", "later", 0), fence.ErrStale)
	})
}

// A counter repeats a number after a failover to a replica that has not got the last INCR: this is
// what is documented of it.
func TestCounter(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		primary, replica, link := pair(t)
		counter := func(s *servertest.RedisServer, key string) *redisfence.Counter {
			t.Helper()
			n, err := redisfence.NewCounter(c.eval(t, s.Addr()), key)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		n := counter(primary, "n")
		next := func(n *redisfence.Counter, want fence.Token) {
			t.Helper()
			if got, err := n.Next(t.Context()); err != nil || got != want {
				t.Errorf("Next = %v, %v, want %v", got, err, want)
			}
		}
		next(n, 1)
		next(n, 2)
		for _, start := range []fence.Token{1<<53 - 2, 1 << 62, 1<<63 - 4} { // TOK-08
			rig.Must(t, primary, "SET", "n", start.String())
			for i := range fence.Token(3) {
				next(n, start+i+1)
			}
		}
		_, err := n.Next(t.Context())
		want(t, "Next after the last", err, fence.ErrInvalid, "last token")
		if v := value(t, primary, "n"); v != "9223372036854775807" {
			t.Errorf("the counter is at %v", v)
		}
		for _, bad := range []string{"", "x", "-1", "-9223372036854775808", "007", "1.5", "9223372036854775808"} {
			rig.Must(t, primary, "SET", "n", bad)
			_, err := n.Next(t.Context())
			want(t, fmt.Sprintf("Next of %q", bad), err, fence.ErrInvalid, "counter")
			if v := value(t, primary, "n"); v != bad {
				t.Errorf("%q has become %v", bad, v)
			}
		}
		rig.Must(t, primary, "DEL", "n")
		rig.Must(t, primary, "RPUSH", "n", "1")
		_, err = n.Next(t.Context())
		want(t, "Next of a list", err, fence.ErrInvalid, "counter")

		m := counter(primary, "m")
		next(m, 1)
		caughtUp(t, primary, replica)
		link.BlackHole()
		next(m, 2)
		fail(t, primary, replica)
		next(counter(replica, "m"), 2) // once more
		if link.Counts().BlackHoled == 0 {
			t.Error("nothing of the replication was held back")
		}
	})
}

// A stale answer ends the lease whose context carries the token.
func TestStaleEndsTheLease(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t, kit.Old())
		locks := kit.Locker(t, kit.Store(t, kitClient(c), redlock.Options{}, []string{s.Addr()}), holdfast.Options{TTL: 30 * time.Second})
		g := guard(t, c.eval(t, s.Addr()))
		script := newScript(t, g, "return redis.call('SET', KEYS[1], ARGV[1])")
		for name, use := range map[string]func(ctx ctx, tok fence.Token) error{
			"Claim": func(ctx ctx, tok fence.Token) error { return g.Claim(ctx, "data", tok) },
			"Check": func(ctx ctx, tok fence.Token) error { return g.Check(ctx, "data", tok) },
			"Set":   func(ctx ctx, tok fence.Token) error { return g.Set(ctx, "data", tok, "data", "x", 0) },
			"script": func(ctx ctx, tok fence.Token) error {
				_, err := script.Run(ctx, "data", tok, []string{"data"}, []string{"x"})
				return err
			},
		} {
			lease := kit.Acquire(t, locks, "lock/"+name)
			ctx := lease.Context(t.Context())
			want(t, "Claim", g.Claim(ctx, "data", lease.Token()), nil)
			want(t, name, use(ctx, lease.Token()), nil)
			if lease.Err() != nil || ctx.Err() != nil {
				t.Fatalf("%s ended the lease: %v", name, lease.Err())
			}
			want(t, "another's Claim", g.Claim(t.Context(), "data", lease.Token()+1), nil)
			want(t, name, use(ctx, lease.Token()), fence.ErrStale)
			var stale *fence.StaleError
			if err := lease.Err(); !errors.As(err, &stale) || stale.Seen != lease.Token()+1 || !errors.Is(err, holdfast.ErrLost) {
				t.Errorf("%s: the lease: %v", name, err)
			}
			if ctx.Err() == nil {
				t.Errorf("%s: the context goes on", name)
			}
			rig.Must(t, s, "DEL", g.MarkKey("data"))
		}
	})
}
