package etcdstore_test

import (
	"context"
	"log"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/etcdstore"
)

func Example() {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            []string{"http://etcd-1:2379", "http://etcd-2:2379", "http://etcd-3:2379"},
		DialKeepAliveTime:    2 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	s, err := etcdstore.New(client, etcdstore.Options{})
	if err != nil {
		log.Fatal(err)
	}
	locks, err := holdfast.New(s, nil)
	if err != nil {
		log.Fatal(err)
	}
	guard, err := etcdstore.NewGuard(client, "")
	if err != nil {
		log.Fatal(err)
	}
	err = locks.Do(context.Background(), "jobs/nightly", func(ctx context.Context, lease *holdfast.Lease) error {
		return guard.Write(ctx, "report", lease.Token(), clientv3.OpPut("/reports/last", "done"))
	})
	if err != nil {
		log.Fatal(err)
	}
}
