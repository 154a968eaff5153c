// Package tokens_test shows on real servers what a fencing token promises: that it is unique
// and grows, whatever clocks, servers and networks do.
package tokens_test

import (
	"context"
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
