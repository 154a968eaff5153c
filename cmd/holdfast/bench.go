package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

const benchHelp = `Measure a store from this machine, as it is used by programs that run here.

Four phases, each as long as --duration, or until --max-ops:
  one at a time  acquire and release, one after the other
  extend         extensions of one lease, one after the other
  in parallel    acquire and release by --parallel goroutines, each with keys of its own
  hand-over      --clients clients, each with connections of its own, want one key: the
                 time from the release by one to the grant of the next, who waited. Each
                 holds it for 10 ms

Of Redis servers, the first two phases also measure a PING before each operation: of all
servers at once, counted until a quorum has answered. "x ping" is the median of an
operation over that of the PINGs which it needs: one, or two for acquire and release. The
table of the nodes has the round trip of each one's PING and vote, how many votes it gave
and refused, and how many are missing because it did not answer or was not asked.

What it cannot tell: whether this machine, the network or the store is loaded by others at
this moment; what a proxy or a load balancer before the store adds; what clients on other
machines see; and what happens when a node fails. Measure again, at other times, and from
where your programs run.

It writes to the store that it measures. Its keys begin with holdfast-bench: and a random
word, and are all released at the end, also when a signal ends it; if it is killed they
end with their ttl of at most 15s. A Redis user with ACL rules needs the keys
~holdfast-bench:* and ~{holdfast-bench:* too. What stays is what every key leaves: on Redis the
record of its token, which expires by itself; in ZooKeeper a node that the servers remove
after some minutes; in etcd nothing; in SQLite, PostgreSQL and MySQL one row for each of
the --parallel + 1 keys.

Exit codes: 0, and
  64   the command line is wrong
  125  the store cannot be reached, or a phase had no success
  128+n  signal n ended it; what was measured until then is shown`

type benchFlags struct {
	store    storeFlags
	duration time.Duration
	maxOps   int
	parallel int
	clients  int
	wait     time.Duration
	json     bool
}

func benchCommand() *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:     "bench [flags]",
		Short:   "Measure a store",
		Long:    benchHelp,
		Example: "  holdfast bench --store redis://10.0.0.1 --store redis://10.0.0.2 --store redis://10.0.0.3\n  holdfast bench --duration 30s --parallel 64 --json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(cmd.Flags().Changed); err != nil {
				return err
			}
			return f.run(cmd.Context())
		},
	}
	flags := cmd.Flags()
	f.store.add(flags)
	flags.DurationVarP(&f.duration, "duration", "d", 5*time.Second, "length of each phase, at most 10m")
	flags.IntVar(&f.maxOps, "max-ops", 200_000, "most operations of each phase")
	flags.IntVarP(&f.parallel, "parallel", "p", 16, "goroutines of the phase in parallel")
	flags.IntVarP(&f.clients, "clients", "c", 4, "clients of the phase hand-over")
	flags.DurationVarP(&f.wait, "wait", "w", time.Minute, "wait at most this long for Redis servers that are too young to vote")
	flags.BoolVar(&f.json, "json", false, "print one JSON object")
	flags.SortFlags = false
	return cmd
}

func (f *benchFlags) check(given func(flag string) bool) error {
	if err := f.store.check(given); err != nil {
		return err
	}
	switch {
	case f.duration <= 0 || f.duration > 10*time.Minute:
		return usage("invalid --duration %v: must be positive and at most 10m", f.duration)
	case f.maxOps < 1 || f.maxOps > 10_000_000:
		return usage("invalid --max-ops %d: must be from 1 to 10000000", f.maxOps)
	case f.parallel < 1 || f.parallel > 1024:
		return usage("invalid --parallel %d: must be from 1 to 1024", f.parallel)
	case f.clients < 2 || f.clients > 64:
		return usage("invalid --clients %d: must be from 2 to 64", f.clients)
	case f.wait < 0:
		return usage("invalid --wait %v: must not be negative", f.wait)
	}
	return nil
}

// run measures, gives all keys back, and then prints.
func (f *benchFlags) run(ctx context.Context) error {
	targets, err := f.store.targets()
	if err != nil {
		return failure(err)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	signals := make(chan os.Signal, 1)
	catch(signals, ending)
	go func() {
		s := <-signals
		signal.Reset(ending...) // the next one ends us at once
		stop(&exit{code: exitSignal + int(s.(syscall.Signal))})
	}()

	b := &bench{f: f, targets: targets, prefix: "holdfast-bench:" + rand.Text()[:10] + ":"}
	err = b.measure(ctx)
	b.close()
	signalled, _ := errors.AsType[*exit](context.Cause(ctx))
	if err != nil && signalled == nil {
		return err
	}
	if b.began.IsZero() { // the signal came before the first phase
		return signalled
	}
	r := b.report()
	r.Interrupted = signalled != nil
	if err := r.print(os.Stdout, f.json); err != nil {
		return &exit{exitFailed, err}
	}
	if signalled != nil {
		return signalled
	}
	return r.failure()
}

// bench is one measurement.
type bench struct {
	f       *benchFlags
	targets []target
	prefix  string
	stores  []*opened // of the clients; the first is that of the other phases
	locks   []*holdfast.Locker
	pings   *pinger // nil where the store is no Redis
	began   time.Time

	acquire, release, cycle, extend, parallel, handOver meter
	cyclePing, extendPing                               meter
	acquires                                            int // of the first phase, whose votes the nodes count
	nodes                                               nodeMeters
	late                                                meter // by how much the system wakes us up too late
	parallelTook                                        time.Duration
}

// key is the name of the nth key.
func (b *bench) key(n int) string { return b.prefix + strconv.Itoa(n) }

// measure opens the store and runs the phases.
func (b *bench) measure(ctx context.Context) error {
	for range b.f.clients {
		if err := b.open(ctx); err != nil {
			return err
		}
	}
	if servers := redisServers(b.targets); len(servers) > 0 {
		var err error
		if b.pings, err = newPinger(servers); err != nil {
			return failure(err)
		}
	}
	one, err := b.locks[0].With(holdfast.Options{Observer: &b.nodes})
	if err != nil {
		return failure(err)
	}
	b.began = time.Now()
	stopWatch := b.late.watchMachine()
	defer stopWatch()
	show := newBars()
	defer show.close()
	for _, p := range []struct {
		name string
		m    *meter
		run  func(g *budget)
	}{
		{"one at a time", &b.cycle, func(g *budget) { b.oneAtATime(g, one) }},
		{"extend", &b.extend, func(g *budget) { b.extensions(g, one) }},
		{"in parallel", &b.parallel, b.inParallel},
		{"hand-over", &b.handOver, b.handOvers},
	} {
		g := newBudget(ctx, b.f.duration, b.f.maxOps)
		done := show.phase(p.name, p.m, g)
		p.run(g)
		done()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

// open opens the store once more and waits until it can be used.
func (b *bench) open(ctx context.Context) error {
	st, err := b.f.store.open()
	if err != nil {
		return failure(err)
	}
	b.stores = append(b.stores, st)
	locks, err := holdfast.New(st, &holdfast.Options{NoExtend: true})
	if err != nil {
		return failure(err)
	}
	b.locks = append(b.locks, locks)
	return b.reach(ctx, locks)
}

// close lets the releases under way end.
func (b *bench) close() {
	if b.pings != nil {
		b.pings.close()
	}
	for _, st := range b.stores {
		st.close()
	}
}

const (
	reachLimit = 4 * time.Second // for a store that cannot be reached
	reachPause = 250 * time.Millisecond
)

// reach acquires a key once. It waits for servers that are too young to vote, and gives a
// store that does not answer a few more attempts.
func (b *bench) reach(ctx context.Context, locks *holdfast.Locker) error {
	began := time.Now()
	var told time.Time
	for {
		lease, err := locks.TryAcquire(ctx, b.key(0))
		if err == nil {
			if err = release(lease); err == nil {
				return nil
			}
		}
		waited := time.Since(began)
		young, isYoung := errors.AsType[*redlock.YoungError](err)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, store.ErrInvalid), errors.Is(err, store.ErrUnsupported):
			return refusal(err)
		case isYoung && waited+young.VotesIn > b.f.wait:
			return &exit{exitFailed, fmt.Errorf("%w; wait longer (--wait %v), or give --trust-restarts if these servers lose nothing at a restart",
				err, (waited + young.VotesIn + 2*time.Second).Round(time.Second))}
		case isYoung && time.Since(told) > repeatAfter:
			told = time.Now()
			say("waiting until the servers vote, at most %v more: %v", (b.f.wait - waited).Round(time.Second), err)
		case !isYoung && waited > reachLimit:
			return &exit{exitFailed, fmt.Errorf("%w; %s", err, reachAdvice)}
		}
		select {
		case <-time.After(reachPause):
		case <-ctx.Done():
		}
	}
}
