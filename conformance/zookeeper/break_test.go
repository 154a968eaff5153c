package zookeeper

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/zkstore"
)

// The leader is replaced by the others, which crash and come back, and does not notice for long. It goes on
// answering its clients, a sync too, as if it led, while the new one ends their sessions. The holder
// beside it knows first, and a guard beside it accepts no token that a later one has superseded.
func TestReplacedLeader(t *testing.T) {
	t.Parallel()
	const timeout = 4 * time.Second
	e := servertest.NewZooKeeperEnsemble(t, 3, servertest.ZooKeeperLinks(), servertest.ZooKeeperConfig("syncLimit", "300")) // a minute
	leader, others := e.Leader(), e.Followers()
	lease := kit.Acquire(t, kit.Locker(t, open(t, at(timeout, leader)), holdfast.Options{TTL: timeout / 2}), "k")
	g := newGuard(t, at(20*time.Second, leader))
	if _, err := again(func() (any, error) { return nil, claimed(g.Claim(t.Context(), "r", 5)) }); err != nil {
		t.Fatal(err)
	}
	naive := client(t, leader.Addr())
	queueOf(t, naive)
	var wg sync.WaitGroup
	for _, o := range others {
		e.Link(o, leader).BlackHole()
		o.Kill()
		wg.Go(o.Restart) // returns when both have a leader
	}
	wg.Wait()

	lead, after := knew(t, lease, kit.Locker(t, open(t, at(timeout, others...)), holdfast.Options{TTL: timeout / 2}))
	t.Logf("the holder knew %v before another had the key", lead.Round(time.Millisecond))
	next := newGuard(t, at(20*time.Second, others...))
	if _, err := again(func() (any, error) { return nil, claimed(next.Claim(t.Context(), "r", 7)) }); err != nil {
		t.Fatal(err)
	}
	if _, err := naive.Sync("/holdfast"); err != nil {
		t.Errorf("the former leader answers %v to a sync, and %q when asked what it is: the test shows nothing", err, mode(leader))
	}
	if _, nodes := queueOf(t, naive); len(nodes) != 1 || !strings.Contains(nodes[0], lease.Owner()) {
		t.Errorf("the former leader has the nodes %q, want that of the former holder: the test shows nothing", nodes)
	}
	for name, ask := range map[string]func(context.Context, string, fence.Token) error{"Claim": g.Claim, "Check": g.Check} {
		if err := ask(t.Context(), "r", 5); err == nil {
			t.Errorf("%s accepts token 5 when 7 has been claimed", name)
		}
	}
	if err := after.Release(t.Context()); err != nil && !errors.Is(err, holdfast.ErrLost) {
		t.Error(err)
	}
}

func mode(s *servertest.ZooKeeperServer) string {
	text, _ := s.Ask("srvr")
	return servertest.InfoField(text, "Mode")
}

// claimed puts what a guard cannot decide now into the words of stores.
func claimed(err error) error {
	if errors.Is(err, fence.ErrUnavailable) || errors.Is(err, fence.ErrUncertain) {
		return errors.Join(err, store.ErrUnavailable)
	}
	return err
}

// Close ends the leases of the process before the servers let others in, also where their answers take
// long.
func TestCloseTellsTheHolderFirst(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	proxy := servertest.NewProxy(t, server.Addr())
	s := open(t, at(sessionTimeout, proxy))
	o := holdfast.Options{TTL: sessionTimeout / 2}
	lease := kit.Acquire(t, kit.Locker(t, s, o), "k")
	next := kit.Locker(t, open(t, at(sessionTimeout, server)), o)
	proxy.DelayReplies(800 * time.Millisecond)
	closed := make(chan struct{})
	go func() { s.Close(); close(closed) }()
	_, after := knew(t, lease, next)
	select {
	case <-closed:
		t.Error("Close has returned before the next holder came: the test shows nothing")
	default:
	}
	<-closed
	if err := after.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// Release with a context that is done does not answer, but gives the key back all the same.
func TestReleaseWithADoneContext(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	s, c := open(t, at(sessionTimeout, server)), client(t, server.Addr())
	free(t, s, "k")
	for _, wait := range []bool{false, true} {
		claim := s.Claim("k", store.ClaimOptions{TTL: time.Second, Wait: wait})
		if _, err := again(func() (store.Grant, error) { return claim.Try(t.Context()) }); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := claim.Release(ctx); !errors.Is(err, store.ErrUncertain) {
			t.Errorf("Release with a done context answers %v, want ErrUncertain", err)
		}
		empty(t, c, sessionTimeout)
		if err := claim.Release(t.Context()); err != nil {
			t.Errorf("Release once more answers %v", err)
		}
	}
}

// The largest transaction that a guard takes is one that the servers take.
func TestLargestWrites(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	s, c := open(t, at(sessionTimeout, server)), client(t, server.Addr())
	g, err := zkstore.NewGuard(s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Create("/data", nil, 0, zk.WorldACL(zk.PermAll)); err != nil {
		t.Fatal(err)
	}
	lease := kit.Acquire(t, kit.Locker(t, s, holdfast.Options{TTL: sessionTimeout / 2}), "k")
	resource := strings.Repeat("r", 512)
	most := bytes.Repeat([]byte("x"), 1<<20-1<<12-100)
	set := func() any { return &zk.SetDataRequest{Path: "/data", Data: most, Version: -1} }
	for range 2 {
		if _, err := g.Write(t.Context(), resource, 5, set()); err != nil {
			t.Errorf("the largest write answers %v", err)
		}
		if _, err := s.WriteHeld(t.Context(), "k", lease.Token(), set()); err != nil {
			t.Errorf("the largest write of a holder answers %v", err)
		}
	}
	if data, _, err := c.Get("/data"); err != nil || !bytes.Equal(data, most) {
		t.Errorf("the data has %d bytes, %v, want %d", len(data), err, len(most))
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("Release answers %v: the lease did not survive the writes", err)
	}
}

// What the servers refuse is told in words that say what to do, and what waiting cannot mend ends a
// wait.
func TestServersThatRefuse(t *testing.T) {
	t.Parallel()
	try := func(t *testing.T, o zkstore.Options) error {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		_, err := kit.Locker(t, open(t, o), holdfast.Options{TTL: time.Second}).Acquire(ctx, "k")
		return err
	}
	t.Run("SASL", func(t *testing.T) {
		t.Parallel()
		server := servertest.ZooKeeper(t, ticks(), servertest.ZooKeeperConfig("sessionRequireClientSASLAuth", "true"),
			servertest.ZooKeeperConfig("authProvider.sasl", "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"))
		if err := try(t, at(sessionTimeout, server)); !errors.Is(err, store.ErrUnsupported) || !strings.Contains(err.Error(), "SASL") {
			t.Errorf("Acquire answers %v, want ErrUnsupported and SASL", err)
		}
	})
	t.Run("quota", func(t *testing.T) {
		t.Parallel()
		server := servertest.ZooKeeper(t, ticks(), servertest.ZooKeeperConfig("enforceQuota", "true"))
		c := client(t, server.Addr())
		for path, data := range map[string]string{"/apps": "", "/zookeeper/quota/apps": ""} {
			if _, err := c.Create(path, []byte(data), 0, zk.WorldACL(zk.PermAll)); err != nil {
				t.Fatal(err)
			}
		}
		for _, path := range []string{"limits", "stats"} {
			if _, err := c.Create("/zookeeper/quota/apps/zookeeper_"+path, []byte("count=3,bytes=-1=;byteHardLimit=-1;countHardLimit=3"), 0, zk.WorldACL(zk.PermAll)); err != nil {
				t.Fatal(err)
			}
		}
		o := at(sessionTimeout, server)
		o.Chroot = "/apps"
		claim := open(t, o).Claim("k", store.ClaimOptions{TTL: time.Second})
		var err error
		servertest.Eventually(t, time.Minute, func() error {
			if _, err = claim.Try(t.Context()); err != nil && strings.Contains(err.Error(), "no session") {
				return err
			}
			return nil
		})
		if !errors.Is(err, store.ErrUnavailable) || !strings.Contains(err.Error(), "quota") {
			t.Errorf("Try answers %v, want ErrUnavailable and the quota", err)
		}
	})
	t.Run("closed", func(t *testing.T) {
		t.Parallel()
		server := servertest.ZooKeeper(t, ticks())
		s := open(t, at(sessionTimeout, server))
		locks := kit.Locker(t, s, holdfast.Options{TTL: time.Second})
		lease := kit.Acquire(t, locks, "k")
		waits := make(chan error, 1)
		go func() {
			_, err := locks.Acquire(t.Context(), "k")
			waits <- err
		}()
		time.Sleep(50 * time.Millisecond)
		s.Close()
		for range 2 {
			select {
			case err := <-waits:
				if !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "closed") {
					t.Errorf("Acquire of a closed store answers %v, want ErrInvalid", err)
				}
			case <-time.After(20 * time.Second):
				t.Fatal("Acquire of a closed store waits on")
			}
			_, err := locks.Acquire(t.Context(), "other")
			waits <- err
		}
		if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release of a lease whose store was closed answers %v, want ErrLost", err)
		}
	})
}
