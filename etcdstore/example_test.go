package etcdstore_test

import (
	"context"
	"errors"
	"log"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/etcdstore"
)

// A process with thousands of locks has them share an etcd lease.
func Example_session() {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            []string{"http://etcd-1:2379"},
		DialKeepAliveTime:    2 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		Logger:               zap.NewNop(),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	s, err := etcdstore.New(client, etcdstore.Options{Session: 15 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	locks, err := holdfast.New(s, &holdfast.Options{TTL: 15 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	lease, err := locks.Acquire(context.Background(), "devices/4711")
	if err != nil {
		log.Fatal(err)
	}
	<-lease.Done()
	var session *etcdstore.SessionError
	if errors.As(lease.Err(), &session) {
		log.Printf("all locks are lost: %v", session)
	}
}

func Example() {
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            []string{"http://etcd-1:2379", "http://etcd-2:2379", "http://etcd-3:2379"},
		DialKeepAliveTime:    2 * time.Second,
		DialKeepAliveTimeout: 2 * time.Second,
		Logger:               zap.NewNop(), // without it the client writes to stderr what it cannot reach
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
