package rueidisnode_test

import (
	"context"
	"fmt"
	"log"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
)

// A lock on three independent servers: it needs two of them. With one address it is the lock
// on one server.
func Example() {
	var nodes []redlock.Node
	for _, addr := range []string{"10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.3:6379"} {
		node, err := rueidisnode.Dial(rueidis.ClientOption{InitAddress: []string{addr}})
		if err != nil {
			log.Fatal(err)
		}
		defer node.Close()
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

// The guard over a client, or over a [rueidisnode.Conn]: redisfence.New(conn.Eval, ...).
func ExampleEval() {
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{"10.0.0.1:6379"}})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	eval, err := rueidisnode.Eval(client)
	if err != nil {
		log.Fatal(err)
	}
	guard, err := redisfence.New(eval, redisfence.Options{})
	if err != nil {
		log.Fatal(err)
	}
	var lease *holdfast.Lease // of a Locker
	ctx := lease.Context(context.Background())
	if err := guard.Claim(ctx, "balance/123", lease.Token()); err != nil {
		log.Fatal(err) // before the first read
	}
	if err := guard.Set(ctx, "balance/123", lease.Token(), "balance/123", "42", 0); err != nil {
		log.Fatal(err)
	}
}
