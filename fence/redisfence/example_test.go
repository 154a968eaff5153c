package redisfence_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
)

// eval is made by goredisnode.Eval or rueidisnode.Eval.
var eval redisfence.Eval

// token is a lease's, such as lease.Token().
var token fence.Token

// A holder claims before its first read, and then every write shows the token.
func Example() {
	guard, err := redisfence.New(eval, redisfence.Options{})
	if err != nil {
		log.Fatal(err)
	}
	work := func(ctx context.Context) error {
		if err := guard.Claim(ctx, "account/123", token); err != nil {
			return err
		}
		// Read here.
		// Not "account/123": that is the key of the lock, where package redlock keeps it in this database.
		return guard.Set(ctx, "account/123", token, "{account/123}:balance", "42", 0)
	}
	switch err := work(context.Background()); {
	case errors.Is(err, fence.ErrStale):
		log.Print("another holds the lock since: ", err) // final
	case err != nil:
		log.Fatal(err)
	}
}

// A script of one's own needs no change. On a Cluster its keys are in the slot of the resource, here
// by the hash tag.
func ExampleGuard_NewScript() {
	guard, err := redisfence.New(eval, redisfence.Options{})
	if err != nil {
		log.Fatal(err)
	}
	transfer, err := guard.NewScript(`
		if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then return 'too little' end
		redis.call('DECRBY', KEYS[1], ARGV[1])
		redis.call('INCRBY', KEYS[2], ARGV[1])
		return 'moved'`)
	if err != nil {
		log.Fatal(err)
	}
	reply, err := transfer.Run(context.Background(), "{bank/7}", token, []string{"{bank/7}:giro", "{bank/7}:savings"}, []string{"100"})
	if err != nil {
		log.Fatal(err)
	}
	log.Print(reply)
}

// An increment whose reply was lost is repeated with the same number, and applied once.
func ExampleGuard_IncrBySeq() {
	guard, err := redisfence.New(eval, redisfence.Options{})
	if err != nil {
		log.Fatal(err)
	}
	deposit := func(ctx context.Context, step, amount int64) error {
		for {
			_, err := guard.IncrBySeq(ctx, "account/123", token, step, "{account/123}:balance", amount)
			switch {
			case err == nil, errors.Is(err, fence.ErrApplied): // now, or by the call before
				return nil
			case ctx.Err() != nil || !errors.Is(err, fence.ErrUncertain) && !errors.Is(err, fence.ErrUnavailable):
				return err
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for step, amount := range []int64{100, -30, 12} {
		if err := deposit(ctx, int64(step+1), amount); err != nil {
			log.Fatal(err)
		}
	}
}

// Tokens for a lock that has none: the number is taken after the lock was granted.
func ExampleCounter() {
	counter, err := redisfence.NewCounter(eval, "tokens/account/123")
	if err != nil {
		log.Fatal(err)
	}
	token, err := counter.Next(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	log.Print("fencing token ", token)
}
