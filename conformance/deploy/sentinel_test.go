package deploy_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// watched is a primary with a replica and a Sentinel.
type watched struct {
	primary, replica, sentinel *servertest.RedisServer
}

const secret = "pass=1"

func watch(t *testing.T) *watched {
	t.Helper()
	auth := []servertest.RedisOption{servertest.Config("requirepass", secret), servertest.Config("masterauth", secret), servertest.As("", secret)}
	d := &watched{primary: old(t, auth...)}
	d.replica = old(t, append(auth, servertest.ReplicaOf(d.primary))...)
	d.replica.WaitLinked()
	d.sentinel = servertest.Sentinel(t, "main", d.primary, servertest.Config("sentinel auth-pass", "main", secret))
	return d
}

func (d *watched) way() way {
	return way{addrs: []string{d.sentinel.Addr()}, master: "main", password: secret}
}

// cutOff ends the replication; the link does not come back.
func (d *watched) cutOff(t *testing.T) {
	t.Helper()
	rig.Must(t, d.replica, "CONFIG", "SET", "masterauth", "wrong")
	rig.Must(t, d.primary, "CLIENT", "KILL", "TYPE", "replica")
	servertest.Eventually(t, 10*time.Second, func() error {
		if d.replica.Info("replication", "master_link_status") != "down" {
			return errors.New("the replica is still linked")
		}
		return nil
	})
}

// copied waits until the replica has all.
func (d *watched) copied(t *testing.T) {
	t.Helper()
	servertest.Eventually(t, 10*time.Second, func() error {
		if d.primary.Info("replication", "master_repl_offset") != d.replica.Info("replication", "slave_repl_offset") {
			return errors.New("the replica lags")
		}
		return nil
	})
}

// failOver kills the primary and waits until the Sentinel has promoted the replica.
func (d *watched) failOver(t *testing.T) {
	t.Helper()
	d.primary.Kill()
	servertest.Eventually(t, time.Minute, func() error {
		if role(d.replica) != "master" {
			return errors.New("the replica is not promoted")
		}
		return nil
	})
}

// role is that of a server, which closes connections when it changes.
func role(s *servertest.RedisServer) string {
	info, _ := s.Do("INFO", "replication")
	text, _ := info.(string)
	return servertest.InfoField(text, "role")
}

// young waits until a client has followed and found a server that does not vote yet. Until then
// nothing is granted.
func young(t *testing.T, locks *holdfast.Locker, key string) {
	t.Helper()
	servertest.Eventually(t, time.Minute, func() error {
		l, err := try(t, locks, key)
		if err == nil {
			t.Fatalf("granted: token %v", l.Token())
		}
		check(t, "TryAcquire", err, holdfast.ErrUnavailable)
		var y *redlock.YoungError
		if !errors.As(err, &y) {
			return err
		}
		return nil
	})
}

// A failover of which the replica has the vote: the lease goes on, on the promoted server, and
// nobody gets the key, or another one, before the server may vote. A failover of which it does
// not: the lease is lost at the first extension that reaches it, before anybody can have the
// key. Tokens grow, waiters go on, and no client is started anew. (FAI-04)
func TestSentinelFailover(t *testing.T) {
	for _, row := range []struct {
		name string
		kept bool
	}{{"vote replicated", true}, {"vote not replicated", false}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, c client) {
				d := watch(t)
				events := new(kit.Events)
				const long = 30 * time.Second // a failover takes a while on a busy machine
				holder := kit.Locker(t, rigStore(t, c, d.way()), holdfast.Options{TTL: long, ExtendEvery: 500 * time.Millisecond, Observer: events})
				waiter, third := c.locker(t, d.way()), c.locker(t, d.way())
				kit.Warm(t, holder)
				kit.Warm(t, waiter)
				kit.Warm(t, third)
				if !row.kept {
					d.cutOff(t)
				}
				lease := kit.Acquire(t, holder, "k")
				token := lease.Token()
				type result struct {
					token holdfast.Token
					err   error
					alive bool // the holder's lease, at the grant
				}
				got := make(chan result, 1)
				ctx, giveUp := context.WithTimeout(t.Context(), 3*time.Minute)
				defer giveUp()
				go func() {
					l, err := waiter.Acquire(ctx, "k")
					alive := lease.Err() == nil
					if err == nil {
						got <- result{l.Token(), l.Release(ctx), alive}
						return
					}
					got <- result{err: err}
				}()
				if row.kept {
					d.copied(t)
				}
				d.failOver(t)
				if n := rig.Must(t, d.replica, "EXISTS", "k"); (n == int64(1)) != row.kept {
					t.Fatalf("the promoted server has %v votes", n)
				}

				young(t, third, "other")
				if row.kept {
					servertest.Eventually(t, long, func() error { return lease.Extend(t.Context()) })
					if lease.Err() != nil || lease.Token() != token {
						t.Fatalf("the lease: %v, token %v, was %v", lease.Err(), lease.Token(), token)
					}
					young(t, third, "k")
				} else {
					select {
					case <-lease.Done():
					case <-time.After(long):
						t.Fatal("the holder does not learn that its lease is gone")
					}
					if err := lease.Err(); !errors.Is(err, holdfast.ErrLost) {
						t.Errorf("lost by %v", err)
					}
				}
				select {
				case r := <-got:
					t.Fatalf("the waiter, before the server may vote: %+v", r)
				default:
				}
				if err := lease.Release(t.Context()); (err == nil) != row.kept {
					t.Errorf("release: %v", err)
				}
				if kit.Soak() { // the waiter waits for as long as it takes
					r := <-got
					if r.err != nil || r.token <= token || r.alive {
						t.Errorf("the waiter: %+v; the holder had token %v", r, token)
					}
				} else { // a client that has met the server asks it again when it said
					giveUp()
					if r := <-got; !errors.Is(r.err, context.Canceled) {
						t.Errorf("the waiter: %+v", r)
					}
					pass(quarantine, d.replica)
				}
				if t2 := comesBack(t, c.locker(t, d.way()), "k"); t2 <= token {
					t.Errorf("token %v after %v", t2, token)
				}
				kit.NoKeys(t, ttl, []*servertest.RedisServer{d.replica})
				if lost := len(kit.Select[holdfast.Lost](events)); lost > 0 == row.kept {
					t.Errorf("%d losses were told", lost)
				}
			})
		})
	}
}

// A failover while both live (SENTINEL FAILOVER, as for an upgrade): the demoted server answers
// READONLY, the client follows.
func TestSentinelSwitch(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		d := watch(t)
		locks := c.locker(t, d.way())
		kit.Warm(t, locks)
		lease := kit.Acquire(t, locks, "k")
		d.copied(t)
		servertest.Eventually(t, time.Minute, func() error { // it may find no good replica yet
			_, err := d.sentinel.Do("SENTINEL", "FAILOVER", "main")
			return err
		})
		servertest.Eventually(t, time.Minute, func() error {
			if role(d.replica) != "master" || role(d.primary) != "slave" {
				return errors.New("the roles have not changed")
			}
			return nil
		})
		young(t, locks, "other")
		if lease.Err() == nil { // on a busy machine the failover may outlast it
			servertest.Eventually(t, ttl, func() error {
				if err := lease.Extend(t.Context()); err != nil && lease.Err() == nil {
					return err
				}
				return nil
			})
		}
		pass(quarantine, d.replica, d.primary)
		token := comesBack(t, c.locker(t, d.way()), "other")
		if token <= lease.Token() {
			t.Errorf("token %v after %v", token, lease.Token())
		}
	})
}

// The primary is made a replica under a client that has no Sentinel to ask: READONLY, which ends
// no lease and no wait, until it is a primary again. (RED-03)
func TestDemotedUnderUs(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s, other := old(t), old(t)
		locks := c.locker(t, to(s))
		lease := kit.Acquire(t, locks, "k")
		_, port := splitPort(other)
		rig.Must(t, s, "REPLICAOF", "127.0.0.1", port)
		s.WaitLinked()
		for range 3 {
			_, err := try(t, locks, "other")
			check(t, "TryAcquire", err, holdfast.ErrUnavailable, "replica")
		}
		err := inTime(t, callLimit, "Extend", func() error { return lease.Extend(t.Context()) })
		if err == nil {
			t.Fatal("a replica has extended")
		}
		t.Log(err)
		if err := inTime(t, callLimit, "Release", func() error { return lease.Release(t.Context()) }); err == nil {
			t.Error("a replica has released")
		}
		rig.Must(t, s, "REPLICAOF", "NO", "ONE")
		young(t, locks, "other")
		pass(quarantine, s)
		if token := comesBack(t, c.locker(t, to(s)), "k"); token <= lease.Token() {
			t.Errorf("token %v after %v", token, lease.Token())
		}
	})
}

// Two primaries behind one name, as after a split: two may hold, which no lock on such a pair
// can prevent. Their tokens differ, and the resource lets them through in rising order only. (FAI-06)
func TestTwoPrimaries(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		one, two := old(t), old(t)
		a := kit.Acquire(t, c.locker(t, to(one)), "k")
		b := kit.Acquire(t, c.locker(t, to(two)), "k")
		if b.Token() <= a.Token() { // both servers have one clock
			t.Errorf("token %v after %v", b.Token(), a.Token())
		}
	})
}
