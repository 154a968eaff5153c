package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast"
)

const extendHelp = `Extend the lease of TICKET by its ttl, and print the ticket anew.

The old ticket stays good until its time has come; go on with the new one. With
--ticket-file the file is replaced as a whole, with mode 0600, and nothing is printed.
A lease that is lost is never acquired again: the exit code is 75, and the work must
stop.

` + ticketHelp + `

With --while-pid the lease is extended for as long as process PID lives; when it is gone
the key is released, and FILE of --ticket-file removed:
  holdfast acquire --ticket-file job.ticket nightly || exit
  holdfast extend --ticket-file job.ticket --while-pid $$ &
Only that process is watched, not what it has started. When the lease is lost the
exit code is 75, and the process is left alone: "holdfast run" ends it. A signal ends
the watch and not the lease, which the process may still need: the ticket is printed
anew, and the lease ends with its ttl unless somebody extends it. Until then the ticket
is not for use elsewhere: a release elsewhere is a loss here, unless both have the same
--ticket-file, which release removes.

Output with --json: see holdfast acquire --help.

Exit codes:
  0    the lease was extended and the ticket was written; with --while-pid: the process
       is gone and KEY was released, or holdfast release --ticket-file FILE released it
  64   the command line or the ticket is wrong, or it is another store's
  75   the lease is lost
  125  holdfast failed; also where the store cannot be reached. The ticket stays good
       until its ttl ends: try again
  128+n  signal n ended --while-pid`

// extendFlags are the flags of extend.
type extendFlags struct {
	store    storeFlags
	ticket   ticketFlags
	whilePID int
}

func extendCommand() *cobra.Command {
	var f extendFlags
	cmd := &cobra.Command{
		Use:               "extend [flags] [TICKET]",
		Short:             "Extend the lease of a ticket, also while a process lives",
		Long:              extendHelp,
		Example:           "  HOLDFAST_TICKET=$(holdfast extend)\n  holdfast extend --ticket-file job.ticket --while-pid 4711",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			given := cmd.Flags().Changed
			if err := cmp.Or(f.store.check(given), f.ticket.check(given)); err != nil {
				return err
			}
			if given("while-pid") && (f.whilePID <= 0 || f.whilePID > math.MaxInt32) { // a system cuts a larger one off
				return usage("invalid --while-pid %d: must be the id of a process", f.whilePID)
			}
			return f.run(cmd.Context(), args)
		},
	}
	flags := cmd.Flags()
	f.store.add(flags)
	f.ticket.addFile(flags, "read the ticket from `FILE`, and replace it by the new one")
	flags.IntVar(&f.whilePID, "while-pid", 0, "extend while process `PID` lives; released, and FILE removed, when it is gone")
	f.ticket.addJSON(flags)
	flags.SortFlags = false
	return cmd
}

func (f *extendFlags) run(ctx context.Context, args []string) error {
	if err := checkTickets(runtime.GOOS); err != nil {
		return err
	}
	text, t, err := f.ticket.read(args, os.Stdin)
	if err != nil {
		return err
	}
	st, err := f.store.open()
	if err != nil {
		return failure(err)
	}
	defer st.close()
	if f.whilePID > 0 {
		return f.watch(ctx, st, string(t.Key), text)
	}
	ignorePipe()
	locks, err := holdfast.New(st.Store, &holdfast.Options{NoExtend: true})
	if err != nil {
		return failure(err)
	}
	lease, err := adopt(ctx, locks, "extend", text)
	if err != nil {
		return err
	}
	return f.give(lease)
}

// give hands the ticket on. Where that fails the old one is still good for what it said.
func (f *extendFlags) give(lease *holdfast.Lease) error {
	if _, err := f.ticket.hand(lease); err != nil {
		return failure(fmt.Errorf("%w; the old one stays good until its ttl ends", err))
	}
	return nil
}

// watch extends the lease while the process lives.
func (f *extendFlags) watch(ctx context.Context, st *opened, key, ticket string) error {
	gone, err := watchProcess(f.whilePID) // first, so that it is the process that is meant
	if err != nil {
		return &exit{exitFailed, fmt.Errorf("process %d cannot be watched: %w", f.whilePID, err)}
	}
	report := makeReporter(key)
	locks, err := holdfast.New(st.Store, &holdfast.Options{Observer: report})
	if err != nil {
		return failure(err)
	}
	ignorePipe()
	signals := make(chan os.Signal, 16)
	catch(signals, ending)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var lease *holdfast.Lease
	adopted := make(chan struct{})
	go func() {
		defer close(adopted)
		lease, err = adopt(ctx, locks, "extend", ticket)
	}()
	select {
	case <-adopted:
	case s := <-signals:
		cancel()
		<-adopted
		return f.stopWatch(lease, err, gone, s)
	}
	if err != nil {
		return err
	}
	select {
	case <-gone:
		return f.ticket.giveBack(lease)
	case <-lease.Done():
		if f.released(lease) {
			say("%q was released by another command", key)
			return nil
		}
		return lost(lease.Err())
	case s := <-signals:
		return f.stopWatch(lease, nil, gone, s)
	}
}

// removedWithin bounds the time from a release to the removal of its ticket's file.
const removedWithin = 2 * time.Second

// released reports whether a lease that is lost was released by the ticket of our file: who
// does that removes the file.
func (f *extendFlags) released(lease *holdfast.Lease) bool {
	if f.ticket.file == "" || !givenUp(lease.Err()) {
		return false
	}
	for began := time.Now(); time.Since(began) < removedWithin; time.Sleep(20 * time.Millisecond) {
		owner, err := f.ticket.owner()
		if errors.Is(err, fs.ErrNotExist) || err == nil && owner != lease.Owner() {
			return true
		}
	}
	return false
}

// givenUp reports whether a loss may be a release: the store answered, and nobody broke the
// lease.
func givenUp(err error) bool {
	lost, ok := errors.AsType[*holdfast.LostError](err)
	return ok && lossCause(err) != "expired" && (lost.By == nil || !lost.By.Holder.Broken)
}

// stopWatch ends the watch by a signal: the lease, if there is one, is the caller's again.
func (f *extendFlags) stopWatch(lease *holdfast.Lease, err error, gone <-chan struct{}, s os.Signal) error {
	if err == nil {
		select {
		case <-gone:
			err = f.ticket.giveBack(lease)
		default:
			err = f.give(lease)
		}
	}
	if err != nil {
		say("%v", err)
	}
	return &exit{code: exitSignal + int(s.(syscall.Signal))}
}
