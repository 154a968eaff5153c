package zookeeper

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
	"github.com/holdfast-go/holdfast/zkstore"
)

// sessionTimeout of most tests: a holder of four seconds, which is half of it, outlives one that
// does not extend by far.
const sessionTimeout = 8 * time.Second

func config(server *servertest.ZooKeeperServer, o zkstore.Options) storetest.Config {
	return storetest.Config{
		Fair: true,
		TTL:  time.Second,
		New: func(t testing.TB) storetest.Harness {
			return storetest.Harness{
				Open: func() store.Store { o := o; o.Servers = []string{server.Addr()}; return open(t, o) },
				OpenFaulty: func() (store.Store, storetest.Link) {
					p := servertest.NewProxy(t, server.Addr())
					o := o
					o.Servers = []string{p.Addr()}
					s := open(t, o)
					reach(t, s)
					return s, link{p}
				},
			}
		},
	}
}

func ticks() servertest.ZooKeeperOption { return servertest.ZooKeeperConfig("tickTime", "500") }

// In a chroot, with credentials.
func TestStore(t *testing.T) {
	storetest.Run(t, config(servertest.ZooKeeper(t, ticks()), zkstore.Options{
		SessionTimeout: sessionTimeout, Chroot: "/apps/shop", User: "shop", Password: "secret",
	}))
}

func BenchmarkStore(b *testing.B) {
	server := servertest.ZooKeeper(b, servertest.ZooKeeperDurable(), servertest.ZooKeeperConfig("tickTime", "2000"))
	storetest.Bench(b, config(server, zkstore.Options{}))
}
