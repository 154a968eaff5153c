package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// workerVariable makes a process a worker: its config, as JSON.
const workerVariable = "TRANSFER_WORKER"

type workerConfig struct {
	config
	Worker int64
}

// counts is what a worker has to tell.
type counts struct {
	Made        int64 // transfers
	Stale       int   // refused by the guard
	StaleWrites int   // of those: when it wrote; the others when it claimed
	Busy        int   // gave up waiting for a process that was stopped inside a transaction
	Lost        int   // noticed in time that a lease was lost
	Failed      int   // anything else that another attempt mends
}

func (c *counts) add(o counts) {
	c.Made += o.Made
	c.Stale += o.Stale
	c.StaleWrites += o.StaleWrites
	c.Busy += o.Busy
	c.Lost += o.Lost
	c.Failed += o.Failed
}

// workerMain is the main function of a worker. It writes its counts to stdout, and ends when
// the parent closes stdin, or is gone.
func workerMain() {
	go func() {
		var c workerConfig
		err := json.Unmarshal([]byte(os.Getenv(workerVariable)), &c)
		if err == nil {
			err = work(context.Background(), c)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "transfer: worker %d: %v\n", c.Worker, err)
			os.Exit(2)
		}
	}()
	io.Copy(io.Discard, os.Stdin)
}

// work makes the orders of one worker, each until it is made, and then writes the counts.
func work(ctx context.Context, c workerConfig) error {
	b, end, err := open(c.config)
	if err != nil {
		return err
	}
	defer end()
	var n counts
	for id := c.Worker; id < c.Transfers; id += c.Workers {
		if err := b.insist(ctx, orderOf(id, c.Accounts), &n); err != nil {
			return err
		}
		n.Made++
	}
	n.StaleWrites = b.staleWrites
	return json.NewEncoder(os.Stdout).Encode(n)
}

// insist makes an order, in as many attempts as it takes, each under new leases.
func (b *bank) insist(ctx context.Context, o order, n *counts) error {
	for failed := 0; ; {
		err := b.transfer(ctx, o)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, fence.ErrStale):
			n.Stale++
		case errors.Is(err, fence.ErrBusy):
			n.Busy++
		case errors.Is(err, holdfast.ErrLost), errors.Is(err, context.Canceled):
			n.Lost++ // while it waited for the other lease, or, with -heed, at any time
		default: // such as a deadlock, where no guard tries again
			n.Failed++
			if failed++; failed == 100 {
				return err
			}
		}
		time.Sleep(rand.N(b.think))
	}
}

// open opens what a process needs. The caller ends it.
func open(c config) (b *bank, end func(), err error) {
	db, err := openDatabase(c.DB)
	if err != nil {
		return nil, nil, err
	}
	s, endStore, err := openStore(c.Store)
	if err != nil {
		return nil, nil, errors.Join(err, db.Close())
	}
	end = func() {
		endStore()
		db.Close()
	}
	b = &bank{db: db, think: c.Think, heed: c.Heed}
	b.locks, err = holdfast.New(s, &holdfast.Options{TTL: c.TTL, RequireFencing: true})
	if err == nil && c.Guard {
		b.guard, err = sqlfence.New(db.DB, sqlfence.Options{Dialect: db.dialect, Table: fenceTable, LockWait: time.Second})
	}
	if err != nil {
		end()
		return nil, nil, err
	}
	return b, end, nil
}

// openStore opens the lock's store at a redis:// URL, or the SQLite file at a path.
func openStore(at string) (store.Store, func(), error) {
	if strings.HasPrefix(at, "redis") {
		opt, err := rueidis.ParseURL(at)
		if err != nil {
			return nil, nil, err
		}
		node, err := rueidisnode.Dial(opt)
		if err != nil {
			return nil, nil, err
		}
		s, err := redlock.New(redlock.Options{}, node)
		return s, func() { node.Close() }, err
	}
	dsn, err := sqlstore.SQLiteDSN(at)
	if err != nil {
		return nil, nil, err
	}
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, nil, err
	}
	s, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.SQLite, Database: at})
	return s, func() { db.Close() }, err
}
