package faults

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// nodeTimeout is long against a round trip on a busy machine, and short against the ttl.
const (
	nodeTimeout = time.Second
	ttl         = 10 * time.Second
)

var redlockOptions = redlock.Options{NodeTimeout: nodeTimeout}

func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "6") // they mostly wait
	kit.Main(m, map[string]func(){"hold": hold, "churn": churn, "buy": buy, "owners": owners})
}

// bed is n servers, with a proxy before each, and one locker that goes through the proxies.
type bed struct {
	servers []*servertest.RedisServer
	proxies []*servertest.Proxy
	client  kit.Client
	locks   *holdfast.Locker
	events  *kit.Events
}

func newBed(t testing.TB, c kit.Client, n int, o holdfast.Options) *bed {
	t.Helper()
	b := &bed{servers: kit.Servers(t, n), client: c, events: &kit.Events{}}
	b.proxies = kit.Proxies(t, b.servers)
	if o.TTL == 0 {
		o.TTL = ttl
	}
	o.Observer = b.events
	b.locks = kit.Locker(t, b.store(t, kit.Addrs(b.proxies)), o)
	return b
}

func (b *bed) store(t testing.TB, addrs []string) *redlock.Store {
	return kit.Store(t, b.client, redlockOptions, addrs)
}

// other is a locker of another process, whose way to the nodes is sound.
func (b *bed) other(t testing.TB, o holdfast.Options) *holdfast.Locker {
	if o.TTL == 0 {
		o.TTL = ttl
	}
	return kit.Locker(t, b.store(t, kit.Addrs(b.servers)), o)
}

// fault breaks the first n nodes, and mends them before the servers end.
func (b *bed) fault(t testing.TB, f kit.Fault, n int) (undo func()) {
	for i := range n {
		f.Do(b.servers[i], b.proxies[i])
	}
	undone := false
	undo = func() {
		for i := range n {
			if !undone {
				f.Undo(b.servers[i], b.proxies[i])
			}
		}
		undone = true
	}
	return undo
}

// hit shows that the first n nodes were broken: also later than the calls that did not wait for
// them.
func (b *bed) hit(t testing.TB, f kit.Fault, n int) {
	t.Helper()
	servertest.Eventually(t, ttl/2, func() error {
		for i := range n {
			if !f.Hit(b.servers[i], b.proxies[i]) {
				return fmt.Errorf("node %d was not %s: the test shows nothing", i, f.Name)
			}
		}
		return nil
	})
}

// took runs f and answers how long it took.
func took(f func()) time.Duration {
	start := time.Now()
	f()
	return time.Since(start)
}
