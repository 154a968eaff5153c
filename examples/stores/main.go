// Stores takes one key in each of several stores, a few times, and prints the fencing tokens:
//
//	go run ./examples/stores sqlite:/tmp/locks.db redis://localhost etcd://localhost:2379
//	HOLDFAST_STORE=postgres://localhost/app go run ./examples/stores
//
// What is done under the lock is the same everywhere; which store keeps it is said by its URL
// alone. The URLs are the plain ones of holdfast --store, for the same locks: user and password,
// hosts, the path, epoch= of etcd, notify= and what pgx knows of PostgreSQL. What else
// holdfast reads, such as TLS, password-file=, Sentinel or max-ttl=, is refused. The exit code is 1 where
// a token did not grow, or a store could not be used.
//
// How a URL becomes a store is in open.go; listener.go is a sqlstore.Listener.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast"
)

func main() {
	times := flag.Int("times", 5, "how often each key is taken")
	key := flag.String("key", "examples/stores", "what is taken")
	wait := flag.Duration("wait", time.Minute, "for the key and the store")
	flag.Parse()
	urls := flag.Args()
	if len(urls) == 0 {
		urls = strings.Fields(os.Getenv("HOLDFAST_STORE"))
	}
	if len(urls) == 0 || *times < 1 {
		fmt.Fprintln(os.Stderr, "stores: name stores by their URLs, as arguments or in HOLDFAST_STORE, and take the key at least once")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	failed := false
	for _, url := range urls {
		ctx, cancel := context.WithTimeout(ctx, *wait)
		if err := tokens(ctx, url, *key, *times, os.Stdout); err != nil {
			fmt.Fprintf(os.Stderr, "stores: %v\n", err)
			failed = true
		}
		cancel()
	}
	if failed {
		os.Exit(1)
	}
}

// tokens takes the key so many times and prints a line with the name of the store and the tokens.
func tokens(ctx context.Context, url, key string, times int, out io.Writer) error {
	store, closeStore, err := open(url)
	if err != nil {
		return err
	}
	defer closeStore()
	locks, err := holdfast.New(store, nil)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s:", store.Info().Name)
	defer fmt.Fprintln(out)
	var last holdfast.Token
	for range times {
		err = locks.Do(ctx, key, func(_ context.Context, lease *holdfast.Lease) error {
			fmt.Fprintf(out, " %v", lease.Token())
			if lease.Token() <= last {
				return errors.New("the token did not grow")
			}
			last = lease.Token()
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
