package holdfast_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/memstore"
)

// Do is the form to use where it fits: it cannot forget to release, and it reports a loss.
func Example() {
	ctx := context.Background()
	locks, err := holdfast.New(memstore.New(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	err = locks.Do(ctx, "account/123", func(ctx context.Context, lease *holdfast.Lease) error {
		fmt.Println("token", lease.Token())
		return nil // work that ends when ctx does, and shows the token to a guard
	})
	fmt.Println(err)
	// Output:
	// token 1
	// <nil>
}

// The guard refuses a holder that has lost its lease and does not know it yet. For real
// resources there are packages sqlfence, redisfence and httpfence.
func Example_guard() {
	ctx := context.Background()
	var guard fence.Memory
	s := memstore.New()
	// hold acquires in another process, and claims before anything is read.
	hold := func() (*holdfast.Lease, error) {
		locks, err := holdfast.New(s.Peer(), nil)
		if err != nil {
			return nil, err
		}
		lease, err := locks.Acquire(ctx, "account/123")
		if err != nil {
			return nil, err
		}
		return lease, guard.Claim(lease.Context(ctx), "account/123", lease.Token())
	}
	paused, err := hold()
	if err != nil {
		fmt.Println(err)
		return
	}
	if err := s.Lose("account/123"); err != nil {
		fmt.Println(err)
		return
	}
	next, err := hold()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer next.Release(ctx)
	fmt.Println("believes to hold:", paused.Err() == nil)
	err = guard.Claim(paused.Context(ctx), "account/123", paused.Token())
	fmt.Println("refused:", errors.Is(err, fence.ErrStale))
	fmt.Println("knows now:", errors.Is(paused.Err(), holdfast.ErrLost))
	// Output:
	// believes to hold: true
	// refused: true
	// knows now: true
}

// A lease by hand: released by a defer, and watched by its context.
func ExampleLocker_Acquire() {
	locks, err := holdfast.New(memstore.New(), &holdfast.Options{TTL: 5 * time.Second})
	if err != nil {
		fmt.Println(err)
		return
	}
	wait, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	lease, err := locks.Acquire(wait, "report")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lease.Release(context.Background())
	work := lease.Context(context.Background())
	fmt.Println(lease.Key(), work.Err())
	// Output: report <nil>
}

// TryAcquire does not wait: another does the work already.
func ExampleLocker_TryAcquire() {
	ctx := context.Background()
	locks, err := holdfast.New(memstore.New(), &holdfast.Options{Label: "web-1"})
	if err != nil {
		fmt.Println(err)
		return
	}
	lease, err := locks.TryAcquire(ctx, "nightly")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer lease.Release(ctx)
	_, err = locks.TryAcquire(ctx, "nightly")
	var held *holdfast.HeldError
	if errors.As(err, &held) {
		fmt.Println("held by", held.Holder.Label)
	}
	// Output: held by web-1
}

// Several keys: all or none, without a dead-lock between callers.
func ExampleLocker_AcquireAll() {
	ctx := context.Background()
	locks, err := holdfast.New(memstore.New(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	leases, err := locks.AcquireAll(ctx, "account/7", "account/3")
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, lease := range leases {
		fmt.Println(lease.Key())
	}
	fmt.Println(leases.Release(ctx))
	// Output:
	// account/3
	// account/7
	// <nil>
}

// The context of a lease carries its token to the guard, through whatever is in between.
func ExampleLease_Context() {
	locks, err := holdfast.New(memstore.New(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	write := func(ctx context.Context) {
		token, ok := fence.FromContext(ctx, "doc")
		fmt.Println("write with token", token, ok)
	}
	err = locks.Do(context.Background(), "doc", func(ctx context.Context, _ *holdfast.Lease) error {
		write(ctx)
		return nil
	})
	fmt.Println(err)
	// Output:
	// write with token 1 true
	// <nil>
}

// A test of one's own code: what does it do when the lease is taken away?
func Example_loss() {
	s := memstore.New()
	locks, err := holdfast.New(s, &holdfast.Options{TTL: 100 * time.Millisecond})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = locks.Do(context.Background(), "k", func(ctx context.Context, _ *holdfast.Lease) error {
		if err := s.Lose("k"); err != nil {
			return err
		}
		<-ctx.Done() // the next extension finds it
		fmt.Println("stopped:", errors.Is(context.Cause(ctx), holdfast.ErrLost))
		return nil
	})
	fmt.Println("reported:", errors.Is(err, holdfast.ErrLost))
	// Output:
	// stopped: true
	// reported: true
}

// A ticket lets another process go on with a lease.
func ExampleLease_Ticket() {
	ctx := context.Background()
	s := memstore.New()
	locks, err := holdfast.New(s, nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	lease, err := locks.Acquire(ctx, "migration")
	if err != nil {
		fmt.Println(err)
		return
	}
	ticket, err := lease.Ticket()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("here:", errors.Is(lease.Err(), holdfast.ErrHandedOver))
	there, err := holdfast.New(s.Peer(), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	adopted, err := there.Adopt(ctx, ticket)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("there: same token", adopted.Token() == lease.Token())
	fmt.Println(adopted.Release(ctx))
	// Output:
	// here: true
	// there: same token true
	// <nil>
}
