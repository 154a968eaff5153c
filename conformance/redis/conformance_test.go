package redis

import (
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

func TestMain(m *testing.M) {
	// The tests mostly wait for leases to end: many can wait at once.
	_ = flag.Set("test.parallel", "8")
	kit.Main(m, nil)
}

func TestConformance(t *testing.T) {
	kit.Each(t, []int{1, 5}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		servers := kit.Servers(t, n)
		storetest.Run(t, storetest.Config{TTL: time.Second, Fair: true, New: harness(c, servers)})
	})
}

func harness(c kit.Client, servers []*servertest.RedisServer) func(testing.TB) storetest.Harness {
	return func(t testing.TB) storetest.Harness {
		return storetest.Harness{
			Open: func() store.Store { return open(t, c, kit.Addrs(servers)) },
			OpenFaulty: func() (store.Store, storetest.Link) {
				proxies := kit.Proxies(t, servers)
				return open(t, c, kit.Addrs(proxies)), network(proxies)
			},
		}
	}
}

// maxTTL is for how long a key that was broken stays taken.
const maxTTL = 4 * time.Second

// open opens a store that has met its nodes, so that a fault, or a busy machine, meets a
// request about a lock.
func open(t testing.TB, c kit.Client, addrs []string) store.Store {
	t.Helper()
	s := kit.Store(t, c, redlock.Options{MaxTTL: maxTTL}, addrs)
	servertest.Eventually(t, time.Minute, func() error {
		c := s.Claim("warm-up/"+rand.Text(), store.ClaimOptions{TTL: maxTTL})
		_, err := c.Try(t.Context())
		return errors.Join(err, c.Release(t.Context()))
	})
	return s
}

// network is the way from one store to all of its nodes.
type network []*servertest.Proxy

func (n network) LoseRequests() {
	for _, p := range n {
		p.BlackHole()
	}
}

func (n network) LoseReplies() {
	for _, p := range n {
		p.DropReplies()
	}
}

// Heal ends the connections first: a black hole delivers what it kept when it ends, and a
// lost request never arrives.
func (n network) Heal() {
	for _, p := range n {
		p.Reset()
		p.Heal()
	}
}

func (n network) Hits() (hits int) {
	for _, p := range n {
		c := p.Counts()
		hits += int(c.BlackHoled + c.Dropped)
	}
	return hits
}

func BenchmarkStore(b *testing.B) {
	for _, n := range []int{1, 5} {
		for _, c := range kit.Clients {
			b.Run(fmt.Sprintf("%dx%s", n, c.Name), func(b *testing.B) {
				storetest.Bench(b, storetest.Config{New: harness(c, kit.Servers(b, n))})
			})
		}
	}
}
