package etcd

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
)

// clusterTTL is longer than an election, so that a holder survives one.
const clusterTTL = 6 * time.Second

// late is how much later than its ttl a dead holder's key may be free: leases begin anew at an
// election, and the servers look for lapsed ones twice a second.
const late = 5 * time.Second

// acquiring acquires in the background.
func acquiring(ctx context.Context, locks *holdfast.Locker, key string) <-chan *holdfast.Lease {
	leases := make(chan *holdfast.Lease, 1)
	go func() {
		lease, _ := locks.Acquire(ctx, key)
		leases <- lease
	}()
	return leases
}

// await answers what acquiring got, within the limit.
func await(t *testing.T, leases <-chan *holdfast.Lease, limit time.Duration, what string) *holdfast.Lease {
	t.Helper()
	select {
	case lease := <-leases:
		if lease == nil {
			t.Fatalf("%s: Acquire fails", what)
		}
		return lease
	case <-time.After(limit):
		t.Fatalf("%s: not granted within %v", what, limit)
		return nil
	}
}

// refused complains where the key can be taken.
func refused(t *testing.T, locks *holdfast.Locker, key, what string) {
	t.Helper()
	servertest.Eventually(t, time.Minute, func() error {
		lease, err := locks.TryAcquire(t.Context(), key)
		switch {
		case err == nil:
			t.Errorf("%s: another is granted the key", what)
			return lease.Release(t.Context())
		case errors.Is(err, holdfast.ErrHeld):
			return nil
		}
		return err
	})
}

// The leader dies while a key is held and another waits: the holder keeps it, with its token, for
// as long as it lives, and the waiter is granted it afterwards.
func TestLeaderKilled(t *testing.T) {
	t.Parallel()
	for name, session := range map[string]time.Duration{"lease": 0, "session": clusterTTL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			killLeaders(t, session)
		})
	}
}

func killLeaders(t *testing.T, session time.Duration) {
	servers := servertest.EtcdCluster(t, module, 3)
	addrs := kit.Addrs(servers)
	o := holdfast.Options{TTL: clusterTTL}
	shared := func() *holdfast.Locker {
		return kit.Locker(t, open(t, etcdstore.Options{Session: session}, addrs...), o)
	}
	holder, waiter, other := shared(), shared(), locker(t, o, addrs...)
	var tokens []holdfast.Token
	for range kit.Count(1, 5) {
		lease := kit.Acquire(t, holder, "held")
		waiting := acquiring(t.Context(), waiter, "held")
		idle := kit.Acquire(t, holder, "free") // is released while there is no leader
		waitingToo := acquiring(t.Context(), waiter, "free")
		time.Sleep(clusterTTL / 10)

		leader, _ := servertest.EtcdLeader(t, servers)
		leader.Kill()
		released := make(chan error, 1)
		go func() { released <- idle.Release(context.Background()) }()
		free := await(t, waitingToo, clusterTTL+late, "the waiter of a key that is released while the leader is dead")
		if free.Token() <= idle.Token() {
			t.Errorf("token %v comes after %v", free.Token(), idle.Token())
		}
		if err := <-released; err != nil && !errors.Is(err, holdfast.ErrUncertain) {
			t.Errorf("Release while the leader is dead answers %v, want nil or ErrUncertain", err)
		}
		time.Sleep(clusterTTL) // past the ttl of the grant
		if err := lease.Err(); err != nil {
			t.Errorf("the leader's death costs the holder its lease: %v", err)
		}
		refused(t, other, "held", "a key whose holder has seen the leader die")
		if err := lease.Release(t.Context()); err != nil {
			t.Errorf("Release after the leader's death: %v", err)
		}
		next := await(t, waiting, clusterTTL, "the waiter, after the leader's death")
		tokens = append(tokens, lease.Token(), next.Token())
		for _, l := range []*holdfast.Lease{free, next} {
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
		leader.Restart()
	}
	for i := 1; i < len(tokens); i++ {
		if tokens[i] <= tokens[i-1] {
			t.Errorf("token %v comes after %v", tokens[i], tokens[i-1])
		}
	}
}

// A holder that reaches the cluster only by a follower which is cut off from the others loses its
// lease, and knows so before another is granted the key by them. A waiter there is not granted
// what it cannot be, and gets it when the follower is back.
func TestFollowerPartitioned(t *testing.T) {
	t.Parallel()
	servers := servertest.EtcdCluster(t, module, 3)
	o := holdfast.Options{TTL: clusterTTL / 2}
	var smallest time.Duration = time.Hour
	for range kit.Count(1, 10) {
		_, followers := servertest.EtcdLeader(t, servers)
		apart := followers[0]
		var rest []string
		for _, s := range servers {
			if s != apart {
				rest = append(rest, s.Addr())
			}
		}
		holder, waiter, other := locker(t, o, apart.Addr()), locker(t, o, apart.Addr()), locker(t, o, rest...)
		lease := kit.Acquire(t, holder, "k")
		ctx := lease.Context(t.Context())
		lost := make(chan time.Time, 1)
		go func() {
			<-ctx.Done()
			lost <- time.Now()
		}()
		time.Sleep(o.TTL / 4)
		apart.Isolate()
		next := await(t, acquiring(t.Context(), other, "k"), o.TTL+late, "another, by the majority")
		granted := time.Now()
		if knew := lease.Err(); !errors.Is(knew, holdfast.ErrLost) {
			t.Errorf("another has the key, and the holder is told %v", knew)
		}
		lead := granted.Sub(<-lost)
		if smallest = min(smallest, lead); lead <= 0 {
			t.Errorf("another was granted the key %v before the holder knew", -lead)
		}
		if next.Token() <= lease.Token() {
			t.Errorf("token %v comes after %v", next.Token(), lease.Token())
		}
		waiting := acquiring(t.Context(), waiter, "k")
		time.Sleep(o.TTL)
		if err := next.Release(t.Context()); err != nil {
			t.Errorf("Release by the majority: %v", err)
		}
		select {
		case l := <-waiting:
			t.Errorf("a follower without the others grants %v", l)
		case <-time.After(o.TTL / 2):
		}
		if apart.Held() == 0 {
			t.Error("no message was kept from the follower: the test shows nothing")
		}
		apart.Rejoin()
		last := await(t, waiting, time.Minute, "the waiter, when its follower is back")
		if last.Token() <= next.Token() {
			t.Errorf("token %v comes after %v", last.Token(), next.Token())
		}
		if err := last.Release(t.Context()); err != nil {
			t.Error(err)
		}
		servertest.EtcdLeader(t, servers)
	}
	t.Logf("the holder knew first, at the least by %v; ttl %v", smallest.Round(10*time.Microsecond), o.TTL)
}

// A holder with all endpoints keeps its lease while one follower is cut off, or stopped, for longer
// than the lease would last, though the client goes on asking it in turn.
func TestOneEndpointSilent(t *testing.T) {
	t.Parallel()
	servers := servertest.EtcdCluster(t, module, 3)
	// Two thirds of the ttl remain for the first extension: room for two requests that wait for
	// the silent one in vain, and for a busy machine.
	const ttl = 4 * clusterTTL
	lease := kit.Acquire(t, locker(t, holdfast.Options{TTL: ttl}, kit.Addrs(servers)...), "k")
	_, followers := servertest.EtcdLeader(t, servers)
	followers[0].Isolate()
	time.Sleep(ttl + ttl/8)
	followers[0].Rejoin()
	if err := lease.Err(); err != nil {
		t.Errorf("one follower that is cut off costs the holder its lease: %v", err)
	}
	_, followers = servertest.EtcdLeader(t, servers) // another one may lead since
	followers[1].Stop()
	time.Sleep(ttl + ttl/8)
	if err := lease.Err(); err != nil {
		t.Errorf("one follower that is stopped costs the holder its lease: %v", err)
	}
	followers[1].Cont()
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// QUO-01: without a majority nothing is decided, and a waiter waits on; afterwards a dead holder's
// lease counts from its beginning, and then the waiter gets the key.
func TestMajorityLost(t *testing.T) {
	t.Parallel()
	servers := servertest.EtcdCluster(t, module, 3)
	o := holdfast.Options{TTL: clusterTTL / 2, NoExtend: true}
	dead := kit.Acquire(t, locker(t, o, kit.Addrs(servers)...), "k")
	waiting := acquiring(t.Context(), locker(t, holdfast.Options{TTL: clusterTTL / 2}, kit.Addrs(servers)...), "k")
	leader, followers := servertest.EtcdLeader(t, servers)
	leader.Kill()
	followers[0].Kill()
	pause := 2 * clusterTTL
	if kit.Soak() {
		pause = time.Minute
	}
	select {
	case l := <-waiting:
		t.Fatalf("without a majority the waiter gets %v", l)
	case <-time.After(pause):
	}
	if !errors.Is(dead.Err(), holdfast.ErrLost) {
		t.Errorf("a holder that could not extend is told %v", dead.Err())
	}
	ups := make(chan struct{}, 2)
	for _, s := range []*servertest.EtcdServer{leader, followers[0]} {
		go func() {
			s.Restart()
			ups <- struct{}{}
		}()
	}
	<-ups
	<-ups
	back := time.Now()
	next := await(t, waiting, o.TTL+late+30*time.Second, "the waiter, when the majority is back")
	t.Logf("granted %v after the majority was back; ttl %v", time.Since(back).Round(time.Millisecond), o.TTL)
	if next.Token() <= dead.Token() {
		t.Errorf("token %v comes after %v", next.Token(), dead.Token())
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
