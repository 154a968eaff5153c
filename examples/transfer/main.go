// Transfer moves money between the accounts of a SQL database, by several processes that are
// stopped and continued at random for longer than their leases last, and then audits the books:
//
//	go run ./examples/transfer             # with the guard: the money is right
//	go run ./examples/transfer -guard=off  # without: money appears or vanishes
//
// It needs nothing installed: the accounts and the lock are in SQLite files in a temporary
// directory. -db and -store name servers instead. The exit code is 1 where the money is wrong,
// and 2 where the program could not do its work.
//
// The transfer itself is in transfer.go.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// config is what the parent and its workers agree on.
type config struct {
	DB, Store                    string
	Guard                        bool
	Accounts, Transfers, Workers int64
	TTL, Think                   time.Duration
	Pauses, Heed                 bool
}

func main() {
	if os.Getenv(workerVariable) != "" {
		workerMain()
		return
	}
	c := config{Guard: true}
	flag.StringVar(&c.DB, "db", "", "`URL` of the accounts: postgres://... or mysql://...; its tables transfer_* are made anew (default an SQLite file)")
	flag.StringVar(&c.Store, "store", "", "`URL` of the lock's store: redis://... (default an SQLite file)")
	flag.BoolFunc("guard", "on, or off to see it go wrong (default on)", func(s string) error {
		c.Guard = s == "on" || s == "true"
		if !c.Guard && s != "off" && s != "false" {
			return fmt.Errorf("want on or off")
		}
		return nil
	})
	flag.Int64Var(&c.Workers, "workers", 2, "`number` of processes")
	flag.Int64Var(&c.Accounts, "accounts", 8, "`number` of accounts")
	flag.Int64Var(&c.Transfers, "transfers", 100, "`number` of transfers")
	flag.DurationVar(&c.TTL, "ttl", 300*time.Millisecond, "of the leases")
	flag.DurationVar(&c.Think, "think", 40*time.Millisecond, "time between reading and writing")
	flag.BoolVar(&c.Pauses, "pauses", true, "stop and continue the workers at random")
	flag.BoolVar(&c.Heed, "heed", false, "let the work end with the leases, as a program should")
	flag.Parse()
	if flag.NArg() > 0 || c.Accounts < 2 || c.Workers < 1 || c.Transfers < 0 || c.Think <= 0 {
		fmt.Fprintln(os.Stderr, "transfer: want at least 1 worker, 2 accounts and 1 ns to think, and no arguments")
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := run(ctx, c)
	if err != nil {
		fmt.Fprintln(os.Stderr, "transfer:", err)
		os.Exit(2)
	}
	fmt.Print(r)
	if !r.ok() {
		os.Exit(1)
	}
}
