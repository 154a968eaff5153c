package etcd

import (
	"testing"

	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

func TestStore(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	storetest.Run(t, storetest.Config{TTL: minTTL, Fair: true, New: harness(server, etcdstore.Options{})})
}

func TestStoreWithSession(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	o := etcdstore.Options{Session: 4 * minTTL} // the longest ttl of the suite
	storetest.Run(t, storetest.Config{TTL: minTTL, Fair: true, New: harness(server, o)})
}

func harness(server *servertest.EtcdServer, o etcdstore.Options) func(testing.TB) storetest.Harness {
	return func(t testing.TB) storetest.Harness {
		return storetest.Harness{
			Open: func() store.Store { return open(t, o, server.Addr()) },
			OpenFaulty: func() (store.Store, storetest.Link) {
				p := servertest.NewProxy(t, server.Addr())
				return open(t, o, p.Addr()), link{p}
			},
		}
	}
}

// link is the way from one store to the server.
type link struct{ p *servertest.Proxy }

func (l link) LoseRequests() { l.p.BlackHole() }
func (l link) LoseReplies()  { l.p.DropReplies() }

// Heal ends the connections first: a black hole delivers what it kept when it ends, and a lost
// request never arrives.
func (l link) Heal() {
	l.p.Reset()
	l.p.Heal()
}

func (l link) Hits() int {
	c := l.p.Counts()
	return int(c.BlackHoled + c.Dropped)
}

func BenchmarkStore(b *testing.B) {
	storetest.Bench(b, storetest.Config{TTL: minTTL, New: harness(servertest.Etcd(b, module), etcdstore.Options{})})
}
