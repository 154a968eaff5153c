package breaks

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// clockOf is a server's time in us.
func clockOf(t *testing.T, s *servertest.RedisServer) int64 {
	t.Helper()
	now := rig.Must(t, s, "TIME").([]any)
	seconds, _ := strconv.ParseInt(now[0].(string), 10, 64)
	micros, _ := strconv.ParseInt(now[1].(string), 10, 64)
	return seconds*1e6 + micros
}

// parks puts a claim into a server's queue, as one that began to wait that long ago, and returns
// its owner.
func parks(t *testing.T, s *servertest.RedisServer, queue, label string, ago time.Duration) string {
	t.Helper()
	birth := clockOf(t, s) - ago.Microseconds()
	owner := fmt.Sprintf("h1.%016d.00000000000000aa.%032x.%s", birth, birth, label)
	rig.Must(t, s, "ZADD", queue, strconv.FormatInt(birth, 10), owner)
	return owner
}

func owners(queue []store.Queued) (all []string) {
	for _, q := range queue {
		all = append(all, q.Owner)
	}
	return all
}

// The queue of a key is told in its order, from wherever its claims have places, under any name
// of a key.
func TestInspectQueue(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		n := len(b.servers)
		for key, queue := range map[string]string{"k": "{k}:queue", "a{b}c": "a{b}c::queue", "d}e": "{d}e}:queue"} {
			if h := b.inspect(key); h.Waiting != 0 || h.Queue != nil {
				t.Errorf("%s: nobody waits, Inspect tells of %+v", key, h)
			}
			var want []string
			for i := range 12 { // places on single nodes, in turn
				want = append(want, parks(t, b.servers[i%n], queue, fmt.Sprint("host%3A", i), time.Duration(1000-10*i)*time.Second))
			}
			last := want[11]
			for _, s := range b.servers { // and one on all
				rig.Must(t, s, "ZADD", queue, last[len("h1."):len("h1.")+16], last)
			}
			rig.Must(t, b.servers[0], "ZADD", queue, "5", "data", "-inf", last[:20])
			h := b.inspect(key) // for a moment nobody holds what claims wait for
			if h.Owner != "" || h.Waiting != 12 || !slices.Equal(owners(h.Queue), want) {
				t.Errorf("%s: Inspect of a free key tells of %+v", key, h)
			}
			g := b.grant(b.store().Claim(key, store.ClaimOptions{TTL: ttl, Label: "me"}))
			rig.Must(t, b.servers[n-1], "ZADD", queue, "1790000000000000", g.Owner) // a place that it left
			h = b.inspect(key)
			if h.Owner != g.Owner || h.Waiting != 12 || !slices.Equal(owners(h.Queue), want) {
				t.Errorf("%s: Inspect tells of %+v", key, h)
			}
			for i, q := range h.Queue {
				least := time.Duration(1000-10*i) * time.Second
				if q.Label != fmt.Sprint("host:", i) || q.Waited < least-options.NodeTimeout || q.Waited > least+5*time.Minute {
					t.Errorf("%s: place %d: %+v", key, i+1, q)
				}
			}
			for h, err := range b.op.List(t.Context(), key) {
				if err != nil || h.Waiting < 12/n || h.Queue != nil {
					t.Errorf("List tells of %+v, %v", h, err)
				}
			}
		}
	})
}

// Of a long queue the first are named and all are counted.
func TestInspectLongQueue(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		for _, s := range b.servers {
			rig.Must(t, s, "EVAL", `for i = 1, 1000 do
				redis.call('ZADD', '{k}:queue', 1790000000000000 + i, string.format('h1.%016d.aa.%032x', 1790000000000000 + i, i)) end
				redis.call('ZADD', '{k}:queue', 1790000000002000, string.rep('x', 1000000))`, "0")
		}
		h := b.inspect("k")
		if h.Waiting != 1001 || len(h.Queue) != 100 { // what is behind the named may be anything
			t.Fatalf("%d wait, %d are named", h.Waiting, len(h.Queue))
		}
		for i, q := range h.Queue {
			if want := fmt.Sprintf("h1.%016d.aa.%032x", 1790000000000001+i, i+1); q.Owner != want {
				t.Errorf("place %d is %q, want %q", i+1, q.Owner, want)
			}
		}
	})
}

// Where a queue cannot be read, or is another kind of value, the holder is told all the same.
func TestInspectBesideBadQueue(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		g := b.grant(b.store().Claim("k", store.ClaimOptions{TTL: ttl}))
		for i, s := range b.servers {
			rig.Must(t, s, [][]string{{"SET", "{k}:queue", "x"}, {"HSET", "{k}:queue", "x", "y"}, {"LPUSH", "{k}:queue", "x"}}[i%3]...)
		}
		if h := b.inspect("k"); h.Owner != g.Owner || h.Waiting != 0 || h.Queue != nil {
			t.Errorf("Inspect tells of %+v", h)
		}
		var listed []store.Holder
		for h, err := range b.op.List(t.Context(), "k") {
			if err != nil {
				t.Error(err)
			}
			listed = append(listed, h)
		}
		if len(listed) != 1 || listed[0].Owner != g.Owner || listed[0].Waiting != 0 {
			t.Errorf("List tells of %+v", listed)
		}
		if err := b.op.Break(t.Context(), store.Holder{Key: "k", Owner: g.Owner}); err != nil {
			t.Errorf("Break: %v", err)
		}
	})
}

// An operator's user who may see the locks and not the queues is told of the locks.
func TestInspectWithoutRights(t *testing.T) {
	t.Parallel()
	for name, rules := range map[string][]string{
		"no right to the queue":   {"~k", "+@all"},
		"no right to sorted sets": {"~*", "+@all", "-@sortedset"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := kit.Servers(t, 1)[0]
			rig.Must(t, s, append([]string{"ACL", "SETUSER", "op", "on", ">pass"}, rules...)...)
			parks(t, s, "{k}:queue", "me", time.Minute)
			rig.Must(t, s, "SET", "k", "7f3a")
			for _, c := range []rig.Client{{User: "op", Password: "pass"}, {User: "op", Password: "pass", Rueidis: true}} {
				op := rig.Store(t, options, c.Node(t, s.Addr()))
				var h store.Holder
				servertest.Eventually(t, patience, func() (err error) {
					h, err = op.Inspect(t.Context(), "k")
					return err
				})
				if h.Owner != "7f3a" || h.Waiting != 0 || h.Queue != nil {
					t.Errorf("%v: Inspect tells of %+v", c, h)
				}
			}
		})
	}
}

// On a Cluster no queue is needed: a key whose records are on two servers, or in a slot that
// moves, can be looked at.
func TestInspectOnCluster(t *testing.T) {
	t.Parallel()
	servers := servertest.RedisCluster(t, 3, kit.Old())
	from, to := servers[0], servers[1]
	tag := ""
	for i := 0; tag == ""; i++ {
		if _, err := from.Do("EXISTS", fmt.Sprint("k", i)); err == nil {
			tag = fmt.Sprint("k", i)
		}
	}
	moving := "{" + tag + "}moving"
	rig.Must(t, from, "SET", moving, "7f3a")
	slot := strconv.FormatInt(rig.Must(t, from, "CLUSTER", "KEYSLOT", moving).(int64), 10)
	rig.Must(t, to, "CLUSTER", "SETSLOT", slot, "IMPORTING", rig.Must(t, from, "CLUSTER", "MYID").(string))
	rig.Must(t, from, "CLUSTER", "SETSLOT", slot, "MIGRATING", rig.Must(t, to, "CLUSTER", "MYID").(string))
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			op := clusterStore(t, c, kit.Addrs(servers))
			for key, owner := range map[string]string{moving: "7f3a", "x}y": ""} {
				h := inspects(t, op, key)
				if h.Owner != owner || h.Waiting != 0 {
					t.Errorf("%s: Inspect tells of %+v", key, h)
				}
			}
		})
	}
}

func inspects(t *testing.T, op *redlock.Store, key string) (h store.Holder) {
	t.Helper()
	tries := 0
	servertest.Eventually(t, patience, func() (err error) {
		tries++
		h, err = op.Inspect(t.Context(), key)
		if err != nil && !errors.Is(err, store.ErrUnavailable) {
			t.Errorf("%s: %v", key, err)
			return nil
		}
		return err
	})
	t.Logf("%s is told of at try %d", key, tries)
	return h
}
