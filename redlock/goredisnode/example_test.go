package goredisnode_test

import (
	"context"
	"fmt"
	"log"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
)

// A lock on three independent servers: it needs two of them. With one address it is the lock
// on one server.
func Example() {
	var nodes []redlock.Node
	for _, addr := range []string{"10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.3:6379"} {
		client := redis.NewClient(&redis.Options{Addr: addr})
		defer client.Close()
		node, err := goredisnode.New(client)
		if err != nil {
			log.Fatal(err)
		}
		nodes = append(nodes, node)
	}
	store, err := redlock.New(redlock.Options{}, nodes...)
	if err != nil {
		log.Fatal(err)
	}
	locks, err := holdfast.New(store, nil)
	if err != nil {
		log.Fatal(err)
	}
	err = locks.Do(context.Background(), "account/123", func(ctx context.Context, lease *holdfast.Lease) error {
		fmt.Println("held; fencing token", lease.Token())
		return nil
	})
	if err != nil {
		log.Fatal(err)
	}
	// A release returns when a quorum has answered. A program that ends waits for the rest.
	if err := store.Settle(context.Background()); err != nil {
		log.Fatal(err)
	}
}

// The lock and the guard over one client. Without the guard, a holder that was paused past the end
// of its lease would write late.
func ExampleEval() {
	client := redis.NewClient(&redis.Options{Addr: "10.0.0.1:6379"})
	defer client.Close()
	node, err := goredisnode.New(client)
	if err != nil {
		log.Fatal(err)
	}
	store, err := redlock.New(redlock.Options{}, node)
	if err != nil {
		log.Fatal(err)
	}
	locks, err := holdfast.New(store, nil)
	if err != nil {
		log.Fatal(err)
	}
	eval, err := goredisnode.Eval(client)
	if err != nil {
		log.Fatal(err)
	}
	guard, err := redisfence.New(eval, redisfence.Options{})
	if err != nil {
		log.Fatal(err)
	}
	err = locks.Do(context.Background(), "account/123", func(ctx context.Context, lease *holdfast.Lease) error {
		if err := guard.Claim(ctx, "balance/123", lease.Token()); err != nil {
			return err // before the first read
		}
		balance, err := client.Get(ctx, "balance/123").Result()
		if err != nil {
			return err
		}
		return guard.Set(ctx, "balance/123", lease.Token(), "balance/123", balance+"0", 0)
	})
	if err != nil {
		log.Fatal(err)
	}
}
