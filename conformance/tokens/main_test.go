// Package tokens_test shows on real servers what a fencing token promises: that it is unique
// and grows, whatever clocks, servers and networks do.
package tokens_test

import (
	"context"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func TestMain(m *testing.M) { kit.Main(m, nil) }

// Two nodes of five are down. An acquisition of a free key succeeds every time: an answer that
// needs another round does not end the attempt while the rest has still to answer.
func TestFreeKeyIsGrantedByThreeOfFive(t *testing.T) {
	t.Parallel()
	servers := servertest.RedisN(t, 5, servertest.Aged(time.Hour))
	servers[0].Kill()
	servers[1].Kill()
	var stores []*redlock.Store
	for _, c := range rig.Clients {
		stores = append(stores, rig.Store(t, redlock.Options{NodeTimeout: 2 * time.Second}, rig.Nodes(t, c, servers...)...))
	}
	var last store.Grant
	for i := range kit.Count(300, 3000) {
		c := stores[i%2].Claim("k", store.ClaimOptions{TTL: 10 * time.Second})
		g, err := c.Try(context.Background())
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		if g.Token <= last.Token {
			t.Fatalf("round %d: token %v after %v", i, g.Token, last.Token)
		}
		last = g
		if err := c.Release(context.Background()); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
	}
}

// Two nodes of five have clocks that are far ahead, and theirs are among the first answers,
// which ask for a higher stamp. A claim is not steered by them to stamps that the other three
// refuse until their clocks are there.
func TestBadClocksDoNotSteerAClaim(t *testing.T) {
	t.Parallel()
	servers := servertest.RedisN(t, 5, servertest.Aged(time.Hour))
	proxies := kit.Proxies(t, servers)
	st := rig.Store(t, redlock.Options{NodeTimeout: time.Second}, rig.Nodes(t, rig.GoRedis, proxies...)...)
	warm := st.Claim("warm", store.ClaimOptions{TTL: 10 * time.Second})
	if _, err := warm.Try(context.Background()); err != nil {
		t.Fatal(err)
	}
	for i, s := range servers {
		if i < 2 {
			s.Clock().Set(jump)
		} else {
			// As another client left it, whose clock is a little ahead: the first stamp is low.
			rig.Must(t, s, "SET", "{k}:fence", strconv.FormatInt(time.Now().Add(2*time.Second).UnixMicro(), 10), "PX", "120000")
		}
		if i > 2 {
			proxies[i].DelayReplies(50 * time.Millisecond)
		}
	}
	var mu sync.Mutex
	low := 0 // answers of the two
	ctx := store.WithTrace(context.Background(), func(e store.NodeEvent) {
		mu.Lock()
		defer mu.Unlock()
		if e.Outcome == "low" && (e.Node == proxies[0].Addr() || e.Node == proxies[1].Addr()) {
			low++
		}
	})
	c := st.Claim("k", store.ClaimOptions{TTL: 10 * time.Second})
	begin := time.Now()
	servertest.Eventually(t, jump/3, func() error {
		_, err := c.Try(ctx)
		return err
	})
	mu.Lock()
	defer mu.Unlock()
	t.Logf("granted after %v; the two found a stamp too low %d times", time.Since(begin), low)
	if low == 0 {
		t.Error("the bad clocks steered nobody; nothing is shown")
	}
}
