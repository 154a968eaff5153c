package zkstore_test

import (
	"context"
	"fmt"
	"log"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/zkstore"
)

// A lock in ZooKeeper, and a guarded write to data that is there too: a holder that has been
// superseded is refused.
func Example() {
	store, err := zkstore.Dial(zkstore.Options{
		Servers: []string{"zk1:2181", "zk2:2181", "zk3:2181"},
		Chroot:  "/apps/shop",
	})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	locks, err := holdfast.New(store, nil)
	if err != nil {
		log.Fatal(err)
	}
	guard, err := zkstore.NewGuard(store)
	if err != nil {
		log.Fatal(err)
	}
	err = locks.Do(context.Background(), "config", func(ctx context.Context, lease *holdfast.Lease) error {
		_, err := guard.Write(ctx, "config", lease.Token(),
			&zk.SetDataRequest{Path: "/apps/shop/config", Data: []byte("v2"), Version: -1})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("written")
}
