// Package redlockx tests corners of package redlock on real servers.
package redlockx

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func TestMain(m *testing.M) { kit.Main(m, nil) }

const timeout = 3 * time.Second // of a node: the machine is busy

// A VOTE that a client library sends again is answered as the first one was, also where the
// mark is the last thing that the server accepted for longer than MARGIN; and the lower bound
// of the window, which moves with the clock, is nobody's mark.
func TestRetransmittedVote(t *testing.T) {
	s := servertest.Redis(t, servertest.Aged(time.Hour))
	p := servertest.NewProxy(t, s.Addr())
	tap := rig.NewTap(p)
	st := rig.Store(t, redlock.Options{NodeTimeout: timeout}, rig.GoRedis.Node(t, p.Addr()))
	c := st.Claim("k", store.ClaimOptions{TTL: 30 * time.Second})
	if _, err := c.Try(t.Context()); err != nil {
		t.Fatal(err)
	}
	vote := tap.Vote()
	for _, later := range []time.Duration{0, 6 * time.Second} {
		s.Clock().Set(later)
		if r, isOK := rig.Must(t, s, vote...).(int64); !isOK {
			t.Errorf("%v later the same VOTE is not answered OK: %v", later, r)
		}
	}
	s.Clock().Set(0)
	if err := c.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if r, _ := rig.Must(t, s, vote...).([]any); len(r) < 3 || r[0] != "LOW" {
		t.Errorf("after the RELEASE the same VOTE is answered %v", r)
	}
}

func clusterStore(t *testing.T, o redlock.Options) *redlock.Store {
	t.Helper()
	servers := servertest.RedisCluster(t, 3, servertest.Aged(time.Hour))
	var addrs []string
	for _, s := range servers {
		addrs = append(addrs, s.Addr())
	}
	client := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: addrs})
	t.Cleanup(func() { client.Close() })
	n, err := goredisnode.New(client)
	if err != nil {
		t.Fatal(err)
	}
	return rig.Store(t, o, n)
}

// A key whose mark cannot share its slot is refused by a Cluster, with the rule.
func TestClusterKeyWithoutTag(t *testing.T) {
	for _, o := range []redlock.Options{{NodeTimeout: timeout}, {NodeTimeout: timeout, TrustRestarts: true}} {
		st := clusterStore(t, o)
		for _, key := range []string{"x}", "{}x"} {
			c := st.Claim(key, store.ClaimOptions{TTL: 10 * time.Second})
			_, err := c.Try(t.Context())
			if !errors.Is(err, store.ErrInvalid) || !strings.Contains(err.Error(), "hash tag") {
				t.Errorf("%q, TrustRestarts %v: %v", key, o.TrustRestarts, err)
			}
			_ = c.Release(t.Context())
		}
	}
}

// Many keys of many slots at once, none of which was used before.
func TestClusterBurstOfSlots(t *testing.T) {
	st := clusterStore(t, redlock.Options{})
	const n = 200
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			c := st.Claim(fmt.Sprintf("k%d", i), store.ClaimOptions{TTL: 10 * time.Second})
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			for ctx.Err() == nil {
				if _, errs[i] = c.Try(ctx); errs[i] == nil {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
			_ = c.Release(context.Background())
		})
	}
	start := time.Now()
	wg.Wait()
	failed := 0
	for _, err := range errs {
		if err != nil {
			if failed++; failed == 1 {
				t.Log(err)
			}
		}
	}
	if failed > 0 {
		t.Errorf("%d of %d are not granted within 30s", failed, n)
	}
	t.Logf("%d slots admitted within %v", n, time.Since(start))
}
