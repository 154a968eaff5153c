package servertest

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"
)

const slots = 16384

// RedisCluster starts a Redis Cluster of that many masters without replicas, which share the
// slots evenly, and returns when all of them find it complete.
func RedisCluster(t testing.TB, masters int, opts ...RedisOption) []*RedisServer {
	t.Helper()
	servers := RedisN(t, masters, append([]RedisOption{
		Config("cluster-enabled", "yes"), Config("cluster-node-timeout", "5000"),
	}, opts...)...)
	for i, s := range servers {
		first, last := i*slots/masters, (i+1)*slots/masters-1
		s.must("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
		s.must("CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(first), strconv.Itoa(last))
	}
	for _, s := range servers[1:] {
		bus := s.base.config["cluster-port"][0]
		servers[0].must("CLUSTER", "MEET", "127.0.0.1", strconv.Itoa(s.port), bus)
	}
	for _, s := range servers {
		s.await("CLUSTER INFO", func() error {
			v, err := s.Do("CLUSTER", "INFO")
			if err != nil {
				return err
			}
			info := v.(string)
			if InfoField(info, "cluster_state") != "ok" || InfoField(info, "cluster_slots_assigned") != strconv.Itoa(slots) ||
				InfoField(info, "cluster_known_nodes") != strconv.Itoa(masters) {
				return fmt.Errorf("incomplete: %s", info)
			}
			return nil
		})
	}
	return servers
}

// Sentinel starts one Sentinel that watches primary under the given name and fails over when
// it has been away for a second. It returns when the Sentinel knows all replicas of primary.
func Sentinel(t testing.TB, name string, primary *RedisServer, opts ...RedisOption) *RedisServer {
	t.Helper()
	s, err := newRedis(t, append([]RedisOption{
		func(o *redisOptions) { o.sentinel = true },
		Config("sentinel monitor", name, "127.0.0.1", strconv.Itoa(primary.port), "1"),
		Config("sentinel down-after-milliseconds", name, "1000"),
		Config("sentinel failover-timeout", name, "5000"),
	}, opts...))
	if err != nil {
		t.Fatal(err)
	}
	want := primary.Info("replication", "connected_slaves")
	s.await("SENTINEL MASTER", func() error {
		v, err := s.Do("SENTINEL", "MASTER", name)
		if err != nil {
			return err
		}
		list := v.([]any)
		for i := 0; i+1 < len(list); i += 2 {
			switch {
			case list[i] == "num-slaves" && list[i+1] != want:
				return fmt.Errorf("knows %v of %v replicas", list[i+1], want)
			case list[i] == "flags" && list[i+1] != "master":
				return fmt.Errorf("flags %v", list[i+1])
			}
		}
		return nil
	})
	return s
}

// must is Do for a command of the helper's own.
func (s *RedisServer) must(args ...string) any {
	s.t.Helper()
	v, err := s.Do(args...)
	if err != nil {
		s.t.Fatalf("servertest: %s: %v", strings.Join(args, " "), err)
	}
	return v
}

// await waits for f, as long as for a start.
func (s *RedisServer) await(what string, f func() error) {
	s.t.Helper()
	if err := eventually(startTimeout, f); err != nil {
		s.t.Fatalf("servertest: %s of %s: %v", what, s.Addr(), err)
	}
}

// Eventually polls f until it answers nil, and fails the test with its last error after d.
func Eventually(t testing.TB, d time.Duration, f func() error) {
	t.Helper()
	if err := eventually(d, f); err != nil {
		t.Fatal(err)
	}
}

// ClusterReplica adds a replica of master, which is of a Cluster, and returns when it has all of
// its data.
func ClusterReplica(t testing.TB, master *RedisServer, opts ...RedisOption) *RedisServer {
	t.Helper()
	s := Redis(t, append([]RedisOption{
		Config("cluster-enabled", "yes"), Config("cluster-node-timeout", master.base.config["cluster-node-timeout"][0]),
	}, opts...)...)
	id := master.must("CLUSTER", "MYID").(string)
	s.must("CLUSTER", "MEET", "127.0.0.1", strconv.Itoa(master.port), master.base.config["cluster-port"][0])
	s.await("CLUSTER REPLICATE", func() error { // the master must be known first
		_, err := s.Do("CLUSTER", "REPLICATE", id)
		return err
	})
	s.WaitLinked()
	return s
}
