package breaks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// Votes that are split are no lease. Inspect names the owner of the most, and its trace the
// vote of each node.
func TestSplitVotes(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			b := newBed(t, c, 5)
			owners := []string{}
			for _, label := range []string{"one", "two"} {
				claim := b.store().Claim("other/"+label, store.ClaimOptions{TTL: ttl, Label: label})
				owners = append(owners, b.grant(claim).Owner)
			}
			want := []string{owners[0], owners[0], owners[1], owners[1], ""}
			for i, owner := range want {
				if owner != "" {
					rig.Must(t, b.servers[i], "SET", "k", owner, "PX", fmt.Sprint(20000+i))
				}
			}
			b.inspect("k") // has connected
			var mu sync.Mutex
			said := map[string]store.NodeEvent{}
			ctx := store.WithTrace(t.Context(), func(e store.NodeEvent) {
				mu.Lock()
				defer mu.Unlock()
				said[e.Node] = e
			})
			h, err := b.op.Inspect(ctx, "k")
			if err != nil || h.Owner != owners[0] || h.Label != "one" || h.TTL <= 10*time.Second {
				t.Errorf("Inspect of split votes: %+v, %v", h, err)
			}
			for i, owner := range want {
				e := said[b.servers[i].Addr()]
				if e.Op != "inspect" || e.Key != "k" || e.Holder.Owner != owner || e.Err != nil {
					t.Errorf("node %d, which votes for %q, is told of by %+v", i+1, owner, e)
				}
			}
			if err := b.op.Break(t.Context(), h); err != nil { // two votes, and one that is free
				t.Errorf("Break of a split vote: %v", err)
			}
		})
	}
}

// How long the holder has had the key, how long a quorum still has voted for it, and for whom.
func TestInspectTells(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		b.inspect("k")
		asked := time.Now()
		claim := b.store().Claim("k", store.ClaimOptions{TTL: ttl, Label: "höst:17 (nightly)"})
		g := b.grant(claim)
		granted := time.Now()
		time.Sleep(ttl / 2)
		if _, err := claim.Extend(t.Context()); err != nil {
			t.Fatal(err)
		}
		// A store knows the nodes' clocks by half of a round trip, which is at most the node timeout.
		slack := options.NodeTimeout
		least := time.Since(granted) - slack
		h := b.inspect("k")
		if most := time.Since(asked) + slack; h.Held < least || h.Held > most {
			t.Errorf("held for %v, want %v to %v", h.Held, least, most)
		}
		if h.Owner != g.Owner || h.Label != "höst:17 (nightly)" || h.TTL <= 0 || h.TTL > ttl || h.NoTTL || h.Foreign || h.Broken {
			t.Errorf("Inspect tells of %+v", h)
		}
		_, err := b.store().Claim("k", store.ClaimOptions{TTL: ttl}).Try(t.Context())
		var held *store.HeldError
		if errors.As(err, &held) && (held.Holder.Held < least || held.Holder.Label != h.Label) {
			t.Errorf("a claim that is refused tells of %+v", held.Holder)
		}
		for _, s := range b.servers { // nothing was written but by the holder
			if v := rig.Must(t, s, "EXISTS", "{holdfast}:node", "k"); v != int64(2) {
				t.Errorf("%v records", v)
			}
		}
	})
}

// An operator that only looks leaves nothing on a server that nobody has used.
func TestInspectWritesNothing(t *testing.T) {
	t.Parallel()
	s := servertest.Redis(t) // young, too
	op := rig.Store(t, options, rig.GoRedis.Node(t, s.Addr()))
	servertest.Eventually(t, patience, func() error {
		_, err := op.Inspect(t.Context(), "k")
		return err
	})
	for h, err := range op.List(t.Context(), "") {
		t.Errorf("List of an empty server: %+v, %v", h, err)
	}
	if err := op.Break(t.Context(), store.Holder{Key: "k", Owner: "x"}); !errors.Is(err, store.ErrLost) {
		t.Errorf("Break of a free key: %v", err)
	}
	if n := rig.Must(t, s, "DBSIZE"); n != int64(0) {
		t.Errorf("%v keys are left", n)
	}
}

// List goes through many keys, more than a page, of which only some are locks, and strips the
// prefix that the store puts before its keys.
func TestList(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		for _, s := range b.servers {
			rig.Must(t, s, "EVAL", `for i = 1, 3000 do redis.call('SET', 'app:job/data' .. i, i) end
				redis.call('SET', 'app:job/foreign', '7f3a')
				redis.call('HSET', 'app:job/hash', 'a', 1)
				redis.call('ZADD', 'app:job/zset', 1, 'a')`, "0")
		}
		o := options
		o.Prefix = "app:"
		var held []string
		locks := kit.Store(t, b.client, o, kit.Addrs(b.servers))
		op := kit.Store(t, b.client, o, kit.Addrs(b.servers))
		for i := range 300 {
			key := fmt.Sprintf("job/%03d", i)
			b.grant(locks.Claim(key, store.ClaimOptions{TTL: maxTTL}))
			held = append(held, key)
		}
		b.grant(locks.Claim("other", store.ClaimOptions{TTL: maxTTL}))
		b.grant(b.store().Claim("job/beside", store.ClaimOptions{TTL: maxTTL})) // without the prefix
		var found, foundAgain []string
		began := time.Now()
		for h, err := range op.List(t.Context(), "job/") {
			if err != nil {
				t.Fatal(err)
			}
			found = append(found, h.Key)
		}
		for h, err := range op.List(t.Context(), "job/29") {
			if err != nil {
				t.Fatal(err)
			}
			foundAgain = append(foundAgain, h.Key)
		}
		t.Logf("two lists take %v", time.Since(began))
		// On a busy machine the first locks may have ended by now.
		if !slices.IsSorted(found) || len(found) == 0 || len(found) > 300 || !slices.Equal(found, held[300-len(found):]) {
			t.Errorf("List answers %d keys: %q", len(found), found)
		}
		if len(foundAgain) > 10 || !slices.Equal(foundAgain, held[300-len(foundAgain):]) {
			t.Errorf("List of job/29 answers %q", foundAgain)
		}
	})
}

// A minority of frozen nodes does not hide a lock, nor hold up for longer than node timeouts;
// a context ends the list.
func TestListWithFrozenNodes(t *testing.T) {
	t.Parallel()
	servertest.CanPause(t)
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 5)
			b.grant(b.store().Claim("a", store.ClaimOptions{TTL: maxTTL}))
			b.inspect("a")
			for _, s := range b.servers[:2] {
				s.Stop()
				t.Cleanup(s.Cont)
			}
			claim := b.store().Claim("k", store.ClaimOptions{TTL: maxTTL})
			var keys []string
			servertest.Eventually(t, patience, func() error {
				if _, err := claim.Try(t.Context()); err != nil {
					return err
				}
				began := time.Now()
				keys = nil
				for h, err := range b.op.List(t.Context(), "k") {
					if err != nil {
						return err
					}
					keys = append(keys, h.Key)
				}
				if d := time.Since(began); d > 8*options.NodeTimeout {
					t.Errorf("List takes %v", d)
				}
				if len(keys) != 1 {
					return fmt.Errorf("List answers %q", keys)
				}
				return nil
			})
			for _, s := range b.servers[2:] {
				s.Stop()
				t.Cleanup(s.Cont)
			}
			ctx, cancel := context.WithTimeout(t.Context(), options.NodeTimeout/10)
			defer cancel()
			began := time.Now()
			for _, err := range b.op.List(ctx, "") {
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("List whose context ends: %v", err)
				}
			}
			if d := time.Since(began); d > options.NodeTimeout {
				t.Errorf("List whose context ends takes %v", d)
			}
			for _, s := range b.servers {
				s.Cont()
			}
		})
	}
}

// No server of a Cluster has all keys; one key can be looked at, and broken.
func TestCluster(t *testing.T) {
	t.Parallel()
	servers := servertest.RedisCluster(t, 3, kit.Old())
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			s, op := clusterStore(t, c, kit.Addrs(servers)), clusterStore(t, c, kit.Addrs(servers))
			b := &bed{t: t, op: op}
			for i := range 5 {
				key := fmt.Sprintf("%s/%d", c.Name, i)
				claim := s.Claim(key, store.ClaimOptions{TTL: ttl})
				g := b.grant(claim)
				if h := b.breaks(key); h.Owner != g.Owner {
					t.Errorf("Inspect tells of %+v", h)
				}
				if _, err := claim.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
					t.Errorf("Extend after Break: %v", err)
				}
			}
			servertest.Eventually(t, patience, func() error {
				for h, err := range op.List(t.Context(), "") {
					if !errors.Is(err, store.ErrUnsupported) {
						return fmt.Errorf("%+v, %w", h, err)
					}
					return nil
				}
				return errors.New("nothing is listed, and no error")
			})
		})
	}
}

func clusterStore(t *testing.T, c kit.Client, addrs []string) *redlock.Store {
	t.Helper()
	if c.Name == kit.Rueidis.Name {
		n, err := rueidisnode.Dial(rueidis.ClientOption{InitAddress: addrs})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		return rig.Store(t, options, n)
	}
	client := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() { client.Close() })
	n, err := goredisnode.New(client)
	if err != nil {
		t.Fatal(err)
	}
	return rig.Store(t, options, n)
}
