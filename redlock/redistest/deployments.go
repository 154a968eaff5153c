package redistest

import (
	"fmt"
	"reflect"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// RunCluster tests nodes that are a Redis Cluster. open returns a new node for the Cluster
// that has servers at addrs and closes its client when the test that it is given ends.
func RunCluster(t *testing.T, open func(t testing.TB, addrs []string) redlock.Node) {
	servers := servertest.RedisCluster(t, 3)
	var addrs []string
	for _, s := range servers {
		addrs = append(addrs, s.Addr())
	}
	n := open(t, addrs)
	t.Run("Replies", func(t *testing.T) { testReplies(t, n) })
	t.Run("Order", func(t *testing.T) { testOrder(t, n) }) // 100 keys: over all servers
	t.Run("Strict", func(t *testing.T) { testStrictEverywhere(t, servers, n) })
	t.Run("Pinned", func(t *testing.T) { testPinnedByKey(t, servers, n) })
	t.Run("Subscribe", func(t *testing.T) { testSubscribeAnywhere(t, servers, n) })
	t.Run("MovedSlot", func(t *testing.T) { testMovedSlot(t, servers, n) })
}

// owner is the server that has the slot of key.
func owner(t *testing.T, servers []*servertest.RedisServer, key string) *servertest.RedisServer {
	t.Helper()
	for _, s := range servers {
		if _, err := s.Do("GET", key); err == nil {
			return s
		}
	}
	t.Fatalf("nobody has key %s", key)
	return nil
}

func testStrictEverywhere(t *testing.T, servers []*servertest.RedisServer, n redlock.Node) {
	script := redlock.NewScript("return 'strict'")
	do(t, owner(t, servers, "k0"), "SCRIPT", "LOAD", script.Text)
	var list []redlock.Call
	for i := range 30 {
		list = append(list, redlock.Call{Script: script, Keys: []string{"k" + strconv.Itoa(i)}, Strict: true})
	}
	known := 0
	for i, r := range n.Run(within(t, patience), list...) {
		if owner(t, servers, list[i].Keys[0]) != owner(t, servers, "k0") {
			wantCode(t, r.Err, "NOSCRIPT")
			continue
		}
		if r.Err != nil || r.Value != "strict" {
			t.Errorf("key %s: %v, %v", list[i].Keys[0], r.Value, r.Err)
		}
		known++
	}
	if known == 0 || known == len(list) {
		t.Errorf("%d of %d keys on one server", known, len(list))
	}
}

func testPinnedByKey(t *testing.T, servers []*servertest.RedisServer, n redlock.Node) {
	seen := map[any]bool{}
	for i := range 10 {
		key := "k" + strconv.Itoa(i)
		want := owner(t, servers, key).Info("server", "run_id")
		err := n.Pinned(within(t, patience), key, func(do func(...string) (any, error)) error {
			id, err := do("CLIENT", "ID")
			if err != nil {
				return err
			}
			v, err := do("INFO", "server")
			if err != nil {
				return err
			}
			if text, _ := v.(string); servertest.InfoField(text, "run_id") != want {
				t.Errorf("key %s: another server's connection", key)
			}
			if now, err := do("CLIENT", "ID"); now != id || err != nil {
				t.Errorf("connection %v, before %v: %v", now, id, err)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		seen[want] = true
	}
	if len(seen) < 2 {
		t.Error("all keys on one server")
	}
}

func testSubscribeAnywhere(t *testing.T, servers []*servertest.RedisServer, n redlock.Node) {
	// Channels of any slots, over one connection to any server.
	var all []*subscription
	for i := range 20 {
		all = append(all, subscribe(t, n, "holdfast:"+strconv.Itoa(i)))
	}
	for _, s := range all {
		s.get(t, s.up, "confirmation")
	}
	connections := 0
	for _, server := range servers {
		connections += len(subscribers(t, server))
		for i, s := range all {
			s.hears(t, server.Addr(), func() { do(t, server, "PUBLISH", "holdfast:"+strconv.Itoa(i), server.Addr()) })
		}
	}
	if connections != 1 {
		t.Errorf("%d connections", connections)
	}
	for _, s := range all {
		s.end(t)
	}
}

// hears publishes until the text comes: servers of a Cluster pass messages on over links that may break.
func (s *subscription) hears(t *testing.T, text string, publish func()) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); {
		publish()
		for again := time.After(2 * time.Second); again != nil; {
			select {
			case v := <-s.messages:
				if v == text {
					return
				}
			case err := <-s.done:
				t.Fatalf("Subscribe returned: %v", err)
			case <-again:
				again = nil
			}
		}
	}
	t.Fatalf("no message %q", text)
}

// testMovedSlot moves the slot of a key, and asks in the middle and afterwards.
func testMovedSlot(t *testing.T, servers []*servertest.RedisServer, n redlock.Node) {
	const key = "{moved}key"
	get := "return redis.call('GET', KEYS[1])"
	ask(t, n, "return redis.call('SET', KEYS[1], 'here')", []string{key})
	from := owner(t, servers, key)
	to := servers[0]
	if to == from {
		to = servers[1]
	}
	slot := fmt.Sprint(do(t, from, "CLUSTER", "KEYSLOT", key))
	fromID, toID := do(t, from, "CLUSTER", "MYID").(string), do(t, to, "CLUSTER", "MYID").(string)
	do(t, to, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID)
	do(t, from, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID)
	do(t, from, "MIGRATE", "127.0.0.1", strconv.Itoa(to.Port()), key, "0", "5000")

	asked := calls(t, to, "asking")
	if v := ask(t, n, get, []string{key}); v != "here" {
		t.Errorf("while the slot moves: %v", v)
	}
	if calls(t, to, "asking") == asked {
		t.Error("no ASK was followed")
	}
	for _, s := range servers {
		do(t, s, "CLUSTER", "SETSLOT", slot, "NODE", toID)
	}
	if v := ask(t, n, get, []string{key}); v != "here" {
		t.Errorf("after the slot moved: %v", v)
	}
	if owner(t, servers, key) != to {
		t.Error("the slot did not move")
	}
}

// RunSentinel tests nodes that are a primary behind Sentinel. open returns a new node for the
// master of that name and closes its client when the test that it is given ends.
func RunSentinel(t *testing.T, open func(t testing.TB, sentinelAddr, master string) redlock.Node) {
	primary := servertest.Redis(t)
	replica := servertest.Redis(t, servertest.ReplicaOf(primary))
	replica.WaitLinked()
	sentinel := servertest.Sentinel(t, "main", primary)
	n := open(t, sentinel.Addr(), "main")
	t.Run("Replies", func(t *testing.T) { testReplies(t, n) })
	t.Run("Order", func(t *testing.T) { testOrder(t, n) })
	t.Run("Strict", func(t *testing.T) { testStrict(t, primary, n) })
	t.Run("NotStrict", func(t *testing.T) { testNotStrict(t, primary, n) })
	t.Run("Pinned", func(t *testing.T) { testPinned(t, primary, n) })
	t.Run("Failover", func(t *testing.T) { testFailover(t, primary, replica, n) })
}

func testFailover(t *testing.T, primary, replica *servertest.RedisServer, n redlock.Node) {
	s := subscribe(t, n, "holdfast:test")
	s.get(t, s.up, "confirmation")
	set := redlock.Call{Script: redlock.NewScript("return redis.call('SET', KEYS[1], ARGV[1])"), Keys: []string{"failover"}, Args: []string{"done"}}
	primary.Kill()
	servertest.Eventually(t, patience, func() error { return n.Run(within(t, time.Second), set)[0].Err })
	if v := do(t, replica, "GET", "failover"); v != "done" {
		t.Errorf("the promoted server has %v", v)
	}
	s.get(t, s.up, "confirmation after the failover")
	servertest.Eventually(t, patience, func() error {
		if v := do(t, replica, "PUBLISH", "holdfast:test", "on"); v != int64(1) {
			return fmt.Errorf("%v receivers", v)
		}
		return nil
	})
	if v := s.get(t, s.messages, "message"); v != "on" {
		t.Errorf("message %q", v)
	}
	s.end(t)
	if v := ask(t, n, "return {1}", nil); !reflect.DeepEqual(v, []any{int64(1)}) {
		t.Errorf("after all that: %v", v)
	}
}
