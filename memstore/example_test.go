package memstore_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/memstore"
)

// ship is the code under test: it ships orders for as long as it has the lease, and is
// careful not to ship one after that.
func ship(ctx context.Context, locks *holdfast.Locker, orders []string, send func(string)) error {
	return locks.Do(ctx, "shipping", func(ctx context.Context, lease *holdfast.Lease) error {
		for _, order := range orders {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			send(order)
		}
		return nil
	})
}

// A test of one's own code: the lease is taken away after the second order. The holder
// learns of it by its next extension, which here is long before the third one.
func Example() {
	locks := memstore.New()
	k, err := holdfast.New(locks, &holdfast.Options{TTL: 300 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = ship(context.Background(), k, []string{"A1", "B2", "C3"}, func(order string) {
		fmt.Println("shipped", order)
		if order == "B2" {
			if err := locks.Lose("shipping"); err != nil {
				fmt.Println(err)
			}
			time.Sleep(300 * time.Millisecond) // a slow order
		}
	})
	fmt.Println("lost:", errors.Is(err, holdfast.ErrLost))
	// Output:
	// shipped A1
	// shipped B2
	// lost: true
}
