package deploy_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/servertest"
)

// cluster are the servers of a Cluster and the way to it.
func cluster(t *testing.T, opts ...servertest.RedisOption) ([]*servertest.RedisServer, way) {
	t.Helper()
	servers := servertest.RedisCluster(t, 3, append([]servertest.RedisOption{kit.Old(), servertest.Config("cluster-node-timeout", "1500")}, opts...)...)
	return servers, way{addrs: kit.Addrs(servers), cluster: true}
}

// keyOf is a key whose slot a server has.
func keyOf(t *testing.T, s *servertest.RedisServer) string {
	t.Helper()
	for i := range 1000 {
		key := "k" + strconv.Itoa(i)
		if _, err := s.Do("EXISTS", key); err == nil {
			return key
		}
	}
	t.Fatal("the server has no slot")
	return ""
}

// A slot that moves to another server while a lock in it is held: ASK and MOVED are followed,
// the lease is extended all along and released on the other server. While the slot moves its
// locks are granted to nobody, and nobody is told that they are free.
func TestClusterSlotMoves(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		servers, w := cluster(t)
		from, to := servers[0], servers[1]
		tag := keyOf(t, from)
		held, free := "{"+tag+"}held", "{"+tag+"}free"
		locks, other := c.locker(t, w), c.locker(t, w)
		comesBack(t, other, "{"+tag+"}warm")
		lease := kit.Acquire(t, locks, held)

		slot := strconv.FormatInt(rig.Must(t, from, "CLUSTER", "KEYSLOT", held).(int64), 10)
		fromID, toID := rig.Must(t, from, "CLUSTER", "MYID").(string), rig.Must(t, to, "CLUSTER", "MYID").(string)
		rig.Must(t, to, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID)
		rig.Must(t, from, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID)
		extended := func(when string) {
			t.Helper()
			token := lease.Token()
			servertest.Eventually(t, ttl, func() error {
				if err := lease.Extend(t.Context()); err != nil && lease.Err() == nil {
					return fmt.Errorf("%s: %w", when, err)
				}
				return nil
			})
			if lease.Err() != nil || lease.Token() != token {
				t.Fatalf("%s: %v", when, lease.Err())
			}
		}
		extended("before its keys move")
		migrate := []string{"MIGRATE", "127.0.0.1", strconv.Itoa(to.Port()), "", "0", "5000", "KEYS"}
		for {
			keys := rig.Must(t, from, "CLUSTER", "GETKEYSINSLOT", slot, "1").([]any)
			if len(keys) == 0 {
				break
			}
			rig.Must(t, from, append(migrate, keys[0].(string))...)
			extended("while its keys move")
			for _, key := range []string{held, free} {
				if l, err := try(t, other, key); err == nil && key == held {
					t.Fatalf("another got the lock: token %v", l.Token())
				} else if err == nil {
					t.Errorf("a lock of a slot that moves was granted")
					_ = l.Release(t.Context())
				} else if !errors.Is(err, holdfast.ErrHeld) || key == free {
					check(t, "TryAcquire "+key, err, holdfast.ErrUnavailable)
					t.Log(err)
				}
			}
		}
		for _, s := range servers {
			rig.Must(t, s, "CLUSTER", "SETSLOT", slot, "NODE", toID)
		}
		extended("after its slot has moved")
		if v := rig.Must(t, to, "EXISTS", held); v != int64(1) {
			t.Error("the lock is not on the other server")
		}
		release(t, lease)
		for _, key := range []string{held, free} {
			if token := comesBack(t, other, key); token <= lease.Token() {
				t.Errorf("%s: token %v after %v", key, token, lease.Token())
			}
		}
	})
}

// A shard without replicas dies. Its locks are unavailable, those of the others go on, or not,
// as the Cluster is configured; all goes on when it is back.
func TestClusterShardDown(t *testing.T) {
	for _, coverage := range []string{"no", "yes"} {
		t.Run("full coverage "+coverage, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, c client) {
				servers, w := cluster(t, servertest.Config("cluster-require-full-coverage", coverage))
				locks := c.locker(t, w)
				dead, alive := keyOf(t, servers[0]), keyOf(t, servers[1])
				comesBack(t, locks, dead)
				comesBack(t, locks, alive)
				lease := kit.Acquire(t, locks, alive+"x{"+alive+"}")
				servers[0].Kill()
				_, err := try(t, locks, dead)
				check(t, "TryAcquire", err, holdfast.ErrUnavailable)
				t.Log(err)
				if coverage == "no" {
					comesBack(t, locks, alive)
				} else {
					servertest.Eventually(t, 30*time.Second, func() error { return replies("CLUSTERDOWN", "GET", alive)(servers[1]) })
					servertest.Eventually(t, patience, func() error {
						if _, err = try(t, locks, alive); !contains(err, "CLUSTERDOWN") {
							return fmt.Errorf("not CLUSTERDOWN: %w", err)
						}
						return nil
					})
					check(t, "TryAcquire", err, holdfast.ErrUnavailable, "CLUSTERDOWN")
					t.Log(err)
				}
				servers[0].Restart(kit.Old())
				comesBack(t, locks, dead)
				comesBack(t, locks, alive)
				if lease.Err() == nil {
					if err := lease.Extend(t.Context()); err != nil && lease.Err() == nil {
						t.Error(err)
					}
				} else if coverage == "no" {
					t.Errorf("a lease of another shard: %v", lease.Err())
				}
				_ = lease.Release(t.Context())
			})
		})
	}
}

// A shard fails over to its replica, which has the vote: the lease goes on, nobody gets a lock
// of that shard before the replica may vote, the other shards go on.
func TestClusterShardFailover(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		servers, w := cluster(t)
		replica := servertest.ClusterReplica(t, servers[0], kit.Old())
		knownAs(t, servers, replica, "slave")
		for _, s := range servers { // it learns of the others from its master
			knownAs(t, []*servertest.RedisServer{replica}, s, "master")
		}
		locks := kit.Locker(t, rigStore(t, c, w), holdfast.Options{TTL: 30 * time.Second})
		key, elsewhere := keyOf(t, servers[0]), keyOf(t, servers[1])
		comesBack(t, locks, elsewhere)
		lease := kit.Acquire(t, locks, key)
		token := lease.Token()
		servertest.Eventually(t, 10*time.Second, func() error {
			if servers[0].Info("replication", "master_repl_offset") != replica.Info("replication", "slave_repl_offset") {
				return errors.New("the replica lags")
			}
			return nil
		})
		servers[0].Kill()
		rig.Must(t, replica, "CLUSTER", "FAILOVER", "TAKEOVER")
		knownAs(t, servers[1:], replica, "master")
		servertest.Eventually(t, 30*time.Second, func() error {
			if err := lease.Extend(t.Context()); err != nil && lease.Err() == nil {
				return err
			}
			return nil
		})
		if lease.Err() != nil || lease.Token() != token {
			t.Errorf("the lease: %v", lease.Err())
		}
		young(t, c.locker(t, w), "{"+key+"}other")
		comesBack(t, locks, elsewhere)
		release(t, lease)
		pass(quarantine, servers[1], servers[2], replica) // another shard remembers since when it is the primary
		if t2 := comesBack(t, c.locker(t, w), key); t2 <= token {
			t.Errorf("token %v after %v", t2, token)
		}
	})
}

// knownAs waits until servers of a Cluster know another one by its role.
func knownAs(t *testing.T, servers []*servertest.RedisServer, other *servertest.RedisServer, role string) {
	t.Helper()
	id := rig.Must(t, other, "CLUSTER", "MYID").(string)
	for _, s := range servers {
		servertest.Eventually(t, 30*time.Second, func() error {
			for line := range strings.Lines(rig.Must(t, s, "CLUSTER", "NODES").(string)) {
				if strings.HasPrefix(line, id) && strings.Contains(line, role) {
					return nil
				}
			}
			return fmt.Errorf("%s does not know it as %s", s.Addr(), role)
		})
	}
}
