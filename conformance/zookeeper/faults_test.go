package zookeeper

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/zkstore"
)

// queueOf finds the queue of the only key that a server has, and answers its nodes.
func queueOf(t testing.TB, c *zk.Conn) (path string, nodes []string) {
	t.Helper()
	path = "/holdfast/locks"
	for range 2 {
		names, _, err := c.Children(path)
		if err != nil || len(names) != 1 {
			t.Fatalf("below %s are %q, %v: want one node", path, names, err)
		}
		path += "/" + names[0]
	}
	nodes, _, err := c.Children(path)
	if err != nil {
		t.Fatal(err)
	}
	return path, nodes
}

// empty waits until nobody is in the queue of the only key.
func empty(t testing.TB, c *zk.Conn, d time.Duration) {
	t.Helper()
	servertest.Eventually(t, d, func() error {
		if path, nodes := queueOf(t, c); len(nodes) > 0 {
			return fmt.Errorf("%s still has %q", path, nodes)
		}
		return nil
	})
}

// knew answers by how much a holder knew of its loss before the next one was granted the key, or
// fails.
func knew(t testing.TB, lease *holdfast.Lease, next *holdfast.Locker) (lead time.Duration, after *holdfast.Lease) {
	t.Helper()
	lost := make(chan time.Time, 1)
	go func() { <-lease.Done(); lost <- time.Now() }()
	after, err := next.Acquire(t.Context(), lease.Key())
	granted := time.Now()
	if err != nil {
		t.Fatal(err)
	}
	if lease.Err() == nil {
		t.Fatalf("another is granted the key while the holder trusts its lease for %v", lease.Validity())
	}
	if !errors.Is(lease.Err(), holdfast.ErrLost) {
		t.Errorf("the holder is told %v, want ErrLost", lease.Err())
	}
	if after.Token() <= lease.Token() {
		t.Errorf("token %v comes after token %v", after.Token(), lease.Token())
	}
	return granted.Sub(<-lost), after
}

// The network swallows everything between a holder and its server. The holder knows that it has
// lost before another is granted the key.
func TestCutOffHolderKnowsFirst(t *testing.T) {
	t.Parallel()
	const timeout = 3 * time.Second
	server := servertest.ZooKeeper(t)
	runs := kit.Count(4, 100)
	var mu sync.Mutex
	smallest := time.Hour
	t.Run("runs", func(t *testing.T) {
		for i := range runs {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				lead := cutOff(t, server, timeout, i)
				mu.Lock()
				defer mu.Unlock()
				smallest = min(smallest, lead)
			})
		}
	})
	t.Logf("%d runs, sessions of %v: the holder knew at least %v before another had the key", runs, timeout, smallest.Round(time.Millisecond))
	if smallest <= 0 {
		t.Errorf("the smallest lead is %v", smallest)
	}
}

// cutOff cuts a holder off, at a phase of its extensions that i says, and answers by how much it knew.
func cutOff(t *testing.T, server *servertest.ZooKeeperServer, timeout time.Duration, i int) time.Duration {
	proxy := servertest.NewProxy(t, server.Addr())
	o := holdfast.Options{TTL: timeout / 2}
	lease := kit.Acquire(t, kit.Locker(t, open(t, at(timeout, proxy)), o), fmt.Sprint("k", i))
	time.Sleep(time.Duration(i%10) * timeout / 20)
	proxy.BlackHole()
	lead, after := knew(t, lease, kit.Locker(t, open(t, at(timeout, server)), o))
	if proxy.Counts().BlackHoled == 0 {
		t.Error("nothing fell into the black hole")
	}
	if err := after.Release(t.Context()); err != nil {
		t.Error(err)
	}
	proxy.Reset()
	proxy.Heal()
	return lead
}

// ensemble is three members whose followers notice late that they are cut off.
func ensemble(t testing.TB, opts ...servertest.ZooKeeperOption) *servertest.ZooKeeperEnsemble {
	return servertest.NewZooKeeperEnsemble(t, 3, append(opts, servertest.ZooKeeperLinks(), servertest.ZooKeeperConfig("syncLimit", "60"))...)
}

// The server of the holder is cut off from the leader and does not notice. It goes on answering
// the holder's reads and pings, while the leader ends the session: a client that goes by the state
// of its connection, and by its node, takes itself for the holder when another is. Ours knows first.
func TestFollowerCutOffFromItsLeader(t *testing.T) {
	t.Parallel()
	const timeout = 4 * time.Second
	e := ensemble(t)
	leader := e.Leader()
	follower := e.Followers()[0]
	holder := open(t, at(timeout, follower)) // it has nowhere else to go
	lease := kit.Acquire(t, kit.Locker(t, holder, holdfast.Options{TTL: timeout / 2}), "k")

	naive := client(t, follower.Addr())
	path, nodes := queueOf(t, naive)
	link := e.Link(follower, leader)
	link.BlackHole()
	lead, after := knew(t, lease, kit.Locker(t, open(t, at(timeout, leader)), holdfast.Options{TTL: timeout / 2}))
	data, _, err := naive.Get(path + "/" + nodes[0])
	if err != nil || len(data) == 0 {
		t.Errorf("the follower answers %q, %v for the node of the former holder: the test shows nothing", data, err)
	}
	if link.Counts().BlackHoled == 0 {
		t.Error("nothing fell into the black hole")
	}
	t.Logf("the holder knew %v before another had the key, when its server still showed its node", lead.Round(time.Millisecond))
	if err := after.Release(t.Context()); err != nil {
		t.Error(err)
	}
	link.Reset()
	link.Heal()
}

// The same with a holder that knows the other servers: its lease goes on through one of them,
// with the same session and the same token.
func TestHolderLeavesACutOffFollower(t *testing.T) {
	t.Parallel()
	const timeout = 10 * time.Second
	e := ensemble(t, ticks())
	leader := e.Leader()
	proxies := map[*servertest.ZooKeeperServer]*servertest.Proxy{}
	var list []*servertest.Proxy
	for _, s := range e.Servers {
		proxies[s] = servertest.NewProxy(t, s.Addr())
		list = append(list, proxies[s])
	}
	proxies[leader].Refuse() // so that the holder begins at a follower
	lease := kit.Acquire(t, kit.Locker(t, open(t, at(timeout, list...)), holdfast.Options{TTL: timeout / 2}), "k")
	proxies[leader].Heal()
	var follower *servertest.ZooKeeperServer
	for s, p := range proxies {
		if s != leader && p.Counts().Replies > 0 {
			follower = s
		}
	}
	link := e.Link(follower, leader)
	link.BlackHole()
	select {
	case <-lease.Done():
		t.Errorf("the lease is lost: %v", lease.Err())
	case <-time.After(timeout * 5 / 4):
	}
	if link.Counts().BlackHoled == 0 {
		t.Error("nothing fell into the black hole")
	}
	if held := open(t, at(timeout, leader)); !holds(t, held, "k", lease) {
		t.Error("the leader does not know the holder")
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	link.Reset()
	link.Heal()
}

// holds reports whether a lease has the key, in the eyes of a store.
func holds(t testing.TB, s *zkstore.Store, key string, lease *holdfast.Lease) bool {
	t.Helper()
	h, err := s.Inspect(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	return h.Owner == lease.Owner() && h.Token == lease.Token()
}

// The leader is killed while a lease is held and waited for. The lease goes on, or its holder knows
// before another has the key; the waiter gets it, and the tokens grow, though the new leader
// counts its transactions from zero.
func TestLeaderKilled(t *testing.T) {
	t.Parallel()
	const timeout = 10 * time.Second
	e := servertest.NewZooKeeperEnsemble(t, 3, ticks())
	locks := kit.Locker(t, open(t, at(timeout, e.Servers...)), holdfast.Options{TTL: timeout / 2})
	next := kit.Locker(t, open(t, at(timeout, e.Servers...)), holdfast.Options{TTL: timeout / 2})
	for range kit.Count(1, 10) {
		lease := kit.Acquire(t, locks, "k")
		acquired := make(chan *holdfast.Lease, 1)
		go func() {
			l, err := next.Acquire(t.Context(), "k")
			if err != nil {
				t.Error(err)
			} else if lease.Err() == nil {
				t.Errorf("another has the key, which its holder trusts for %v", lease.Validity())
			}
			acquired <- l
		}()
		time.Sleep(timeout / 16)
		leader := e.Leader()
		leader.Kill()
		select {
		case <-lease.Done():
			t.Logf("the lease did not survive the election: %v", lease.Err())
		case <-time.After(timeout / 2): // the validity that it had has run out: it was extended
			if err := lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
			t.Log("the lease survived the election")
		}
		after := <-acquired
		if after == nil {
			return
		}
		if after.Token() <= lease.Token() {
			t.Errorf("token %v comes after token %v", after.Token(), lease.Token())
		}
		if err := after.Release(t.Context()); err != nil {
			t.Error(err)
		}
		last := kit.Acquire(t, locks, "k") // whose node the new leader has made
		if last.Token() <= after.Token() || last.Token()>>32 == lease.Token()>>32 {
			t.Errorf("token %#x comes after token %#x, want a larger one, of another epoch", int64(last.Token()), int64(after.Token()))
		}
		if err := last.Release(t.Context()); err != nil {
			t.Error(err)
		}
		leader.Restart()
	}
}

// The connection is cut when the node of a claim has been made, before its name is known. The claim
// finds the node when it is tried again, a release removes it, and one that nobody cares for is
// gone before long: nothing is left in any of the runs.
func TestLostCreateReplyLeavesNoOrphan(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	c := client(t, server.Addr())
	proxy := servertest.NewProxy(t, server.Addr())
	s := open(t, at(sessionTimeout, proxy))
	free(t, s, "k") // so that the queue is there
	ctx := t.Context()
	runs, hits, found := kit.Count(12, 500), 0, 0
	for i := range runs {
		claim := s.Claim("k", store.ClaimOptions{TTL: sessionTimeout / 2, Wait: i%2 == 0, Label: "orphan"})
		lost := proxy.DropReplyTo(servertest.Only(1, creates))
		_, err := claim.Try(ctx)
		lost.Stop()
		hits += lost.Count()
		if !errors.Is(err, store.ErrUncertain) {
			t.Fatalf("run %d: a Try whose reply was lost answers %v, want ErrUncertain", i, err)
		}
		if _, nodes := queueOf(t, c); len(nodes) != 1 {
			t.Fatalf("run %d: the queue has %q", i, nodes)
		}
		if i%3 == 0 {
			g, err := again(func() (store.Grant, error) { return claim.Try(ctx) })
			if err != nil || g.Token == 0 {
				t.Fatalf("run %d: Try after a lost reply answers %v, %v", i, g, err)
			}
			if _, nodes := queueOf(t, c); len(nodes) != 1 {
				t.Fatalf("run %d: a claim that was tried again has the nodes %q", i, nodes)
			}
			found++
		}
		if i%3 != 2 {
			if _, err := again(func() (any, error) { return nil, claim.Release(ctx) }); err != nil {
				t.Fatalf("run %d: Release answers %v", i, err)
			}
		}
		empty(t, c, 2*sessionTimeout)
	}
	if hits != runs {
		t.Errorf("%d replies were lost in %d runs", hits, runs)
	}
	t.Logf("%d replies lost, %d nodes found again, none left", hits, found)
}

// again repeats a call that could not be answered, until the connection is back.
func again[T any](call func() (T, error)) (v T, err error) {
	for range 100 {
		if v, err = call(); !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	return v, err
}

// free acquires a key and releases it.
func free(t testing.TB, s store.Store, key string) store.Grant {
	t.Helper()
	claim := s.Claim(key, store.ClaimOptions{TTL: s.Info().MaxTTL})
	g, err := again(func() (store.Grant, error) { return claim.Try(t.Context()) })
	if err == nil {
		_, err = again(func() (any, error) { return nil, claim.Release(t.Context()) })
	}
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// A create is stuck on its way to one server, the client goes to another one with the same session,
// and the create arrives after all: it is refused, since the session has moved, and the claim has
// one node.
func TestSessionMoved(t *testing.T) {
	t.Parallel()
	for _, same := range []bool{false, true} { // by another way to the same server
		e := servertest.NewZooKeeperEnsemble(t, 3)
		leader := e.Leader()
		first, second := e.Followers()[0], leader
		if same {
			second = first
		}
		proxies := []*servertest.Proxy{servertest.NewProxy(t, first.Addr()), servertest.NewProxy(t, second.Addr())}
		proxies[1].Refuse()
		s := open(t, at(4*time.Second, proxies...))
		free(t, s, "k")
		proxies[1].Heal()
		claim := s.Claim("k", store.ClaimOptions{TTL: 2 * time.Second, Wait: true})
		held := proxies[0].Hold(creates)
		if _, err := claim.Try(t.Context()); !errors.Is(err, store.ErrUncertain) {
			t.Fatalf("a Try that is stuck answers %v, want ErrUncertain", err)
		}
		if held.Count() != 1 {
			t.Fatalf("%d requests are stuck, want 1", held.Count())
		}
		proxies[0].Refuse()
		g, err := again(func() (store.Grant, error) { return claim.Try(t.Context()) })
		if err != nil {
			t.Fatalf("Try through another server answers %v", err)
		}
		c := client(t, leader.Addr())
		_, before := queueOf(t, c)
		held.Release()
		time.Sleep(time.Second / 2)
		if _, err := claim.Extend(t.Context()); err != nil {
			t.Errorf("Extend answers %v", err)
		}
		path, after := queueOf(t, c)
		if len(before) != 1 || len(after) != 1 || before[0] != after[0] {
			t.Errorf("the queue had %q, and has %q when the stuck create has arrived", before, after)
		}
		if ok, stat, err := c.Exists(path + "/" + after[0]); err != nil || !ok || stat.Czxid != int64(g.Token) {
			t.Errorf("the token is %v, the node %+v, %v", g.Token, stat, err)
		}
		if err := claim.Release(t.Context()); err != nil {
			t.Error(err)
		}
		empty(t, c, 10*time.Second)
	}
}

// A holder is stopped for longer than its session lives. When it runs on, the first thing it is told
// is that its lease is lost.
func TestStoppedHolderWakesToALostLease(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	const timeout = 2 * time.Second
	server := servertest.ZooKeeper(t)
	next := kit.Locker(t, open(t, at(timeout, server)), holdfast.Options{TTL: timeout / 2})
	for range kit.Count(1, 20) {
		child := kit.Child(t, "hold", "k", server.Addr(), timeout.String())
		child.Expect(t, "held", time.Minute)
		time.Sleep(timeout / 4)
		child.Stop()
		after := kit.Acquire(t, next, "k") // its session is over
		child.Cont()
		if lost := child.Expect(t, "woke", time.Minute); lost != "true" {
			t.Error("a holder that was stopped wakes and trusts its lease, though another has the key")
		}
		if err := after.Release(t.Context()); err != nil {
			t.Error(err)
		}
		<-child.Done()
	}
}

// A server may grant a shorter session than asked. Leases are shorter then, too.
func TestShorterSessionThanAsked(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks(), servertest.ZooKeeperConfig("maxSessionTimeout", "6000"))
	s := open(t, at(30*time.Second, server))
	if most := s.Info().MaxTTL; most != 15*time.Second {
		t.Errorf("the largest ttl is %v, want half of the session's timeout as asked", most)
	}
	if g := free(t, s, "k"); g.TTL != 3*time.Second {
		t.Errorf("a grant is for %v, want half of the session's timeout as granted", g.TTL)
	}
	lease := kit.Acquire(t, kit.Locker(t, s, holdfast.Options{TTL: 15 * time.Second}), "k")
	time.Sleep(7 * time.Second)
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("a lease that is extended often enough ends so: %v", err)
	}
}

// A server may raise the timeout of a session to its least, two ticks. Leases are not longer for that:
// they are trusted for the part of it that two ticks allow.
func TestLeastSession(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, servertest.ZooKeeperConfig("tickTime", "3000"))
	s := open(t, at(5900*time.Millisecond, server))
	if g := free(t, s, "k"); g.TTL != 2500*time.Millisecond {
		t.Errorf("a grant is for %v, want five twelfths of 6s", g.TTL)
	}
}

// A holder that does not extend, in a process that lives, loses the key when its ttl is over, long
// before the session would end.
func TestTTLIsNotTheSessions(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	a, b := open(t, at(sessionTimeout, server)), open(t, at(sessionTimeout, server))
	claim := a.Claim("k", store.ClaimOptions{TTL: time.Second})
	asked := time.Now()
	if _, err := again(func() (store.Grant, error) { return claim.Try(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	lease, err := kit.Locker(t, b, holdfast.Options{TTL: time.Second}).Acquire(ctx, "k")
	took := time.Since(asked)
	if err != nil {
		t.Fatal(err)
	}
	if took < time.Second || took > sessionTimeout/2 {
		t.Errorf("the next holder comes after %v, the ttl being 1s and the session's timeout %v", took, sessionTimeout)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
