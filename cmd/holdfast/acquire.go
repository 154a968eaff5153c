package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/store"
)

const acquireHelp = `Acquire KEY and print a ticket, with which extend and release go on.

Nobody extends the lease: it ends when the ttl does, unless extend is called before.
Where a single command does the work, "holdfast run" is better: it extends the lease,
and ends the work when the lease is lost.

  ticket=$(holdfast acquire --ttl 30s nightly) || exit
  export HOLDFAST_TICKET=$ticket
  step-one
  HOLDFAST_TICKET=$(holdfast extend) || exit
  step-two
  holdfast release

The ticket is a secret: whoever has it can extend and release the lease. With
--ticket-file it goes to a file that only its owner can read, and extend replaces it
there; one that holds the ticket of a lease on another key is refused. It works on this
machine, until that boots again. Tickets need Linux's boot clock: on other systems use
holdfast run, and so with ZooKeeper, whose leases end with the process.

Output with --json, one object:
  key       KEY; with key_base64 where it is not UTF-8
  token     the fencing token: larger than that of every earlier holder of KEY
  owner     random identity of this acquisition, a secret as well
  deadline  Unix time in seconds until which the lease holds unless it is extended
  ticket    the ticket; not with --ticket-file

Exit codes:
  0    KEY is held, and the ticket was written
  1    another holds KEY (--nonblock, or --wait ran out), or a run around this one
       does; --conflict-exit-code
  64   the command line is wrong
  125  holdfast failed; also where the store cannot be reached
  128+n  signal n came while waiting; nothing is held`

// acquireFlags are the flags of acquire.
type acquireFlags struct {
	claimFlags
	ticket  ticketFlags
	verbose bool
}

func acquireCommand() *cobra.Command {
	var f acquireFlags
	cmd := &cobra.Command{
		Use:               "acquire [flags] KEY",
		Short:             "Acquire a key and print a ticket for extend and release",
		Long:              acquireHelp,
		Example:           "  holdfast acquire --ttl 30s --ticket-file job.ticket nightly",
		Args:              oneKey,
		ValidArgsFunction: completeKey(&f.store),
		RunE: func(cmd *cobra.Command, args []string) error {
			given := cmd.Flags().Changed
			if f.ttl <= 0 { // zero would be a default of the library
				return usage("invalid --ttl %v: must be positive", f.ttl)
			}
			if err := cmp.Or(f.check(given), f.ticket.check(given)); err != nil {
				return err
			}
			return f.run(cmd.Context(), args[0])
		},
	}
	flags := cmd.Flags()
	f.claimFlags.add(flags, "time until which extend must be called")
	f.ticket.addFile(flags, "write the ticket to `FILE`, with mode 0600, and not to the standard output")
	f.ticket.addJSON(flags)
	flags.BoolVarP(&f.verbose, "verbose", "v", false, "also say what goes well: acquired with which token")
	flags.SortFlags = false
	return cmd
}

// oneKey is the rule for the arguments of the verbs that take one KEY.
func oneKey(cmd *cobra.Command, args []string) error {
	switch len(args) {
	case 0:
		return usage("KEY is missing: holdfast %s", cmd.Use)
	case 1:
	default:
		return usage("one KEY is taken, there are %d words: holdfast %s", len(args), cmd.Use)
	}
	if err := store.CheckKey(args[0]); err != nil {
		return failure(err)
	}
	return nil
}

func (f *acquireFlags) run(ctx context.Context, key string) error {
	if err := cmp.Or(checkTickets(runtime.GOOS), checkTicketFile(f.ticket.file)); err != nil {
		return err
	}
	st, err := f.store.open()
	if err != nil {
		return failure(err)
	}
	defer st.close()
	if _, ok := st.Store.(store.Adopter); !ok {
		return &exit{exitFailed, fmt.Errorf("%w: a store in %s has no tickets, since its leases end with the process; use holdfast run", holdfast.ErrUnsupported, st.Info().Name)}
	}
	if err := f.ticket.checkUnused(st.Store, key); err != nil {
		return err
	}
	f.fit(st)
	report := f.reporter(key, st.Store, false, f.verbose)
	locks, err := holdfast.New(st.Store, &holdfast.Options{TTL: f.ttl, NoExtend: true, Label: f.callerLabel(), Observer: report})
	if err != nil {
		return failure(err)
	}
	ignorePipe()
	signals := make(chan os.Signal, 16)
	catch(signals, ending)
	lease, err := f.await(ctx, locks, report, signals)
	report.waited()
	if err != nil {
		return err
	}
	ticket, err := f.ticket.hand(lease)
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%w; %q is not held", err, key)
	if ticket != "" { // nobody has it: it must not keep others away until its ttl ends
		lease, rerr := adopt(ctx, locks, "release", ticket)
		if rerr == nil {
			rerr = release(lease)
		}
		if rerr != nil {
			err = fmt.Errorf("%w after its ttl of %v: %w", err, f.ttl, rerr)
		}
	} else if rerr := release(lease); rerr != nil && !errors.Is(rerr, holdfast.ErrLost) {
		err = fmt.Errorf("%w after its ttl of %v: %w", err, f.ttl, rerr)
	}
	return &exit{exitFailed, err}
}

// callerLabel names the caller: we have ended when people look.
func (f *acquireFlags) callerLabel() string {
	if f.label != "" {
		return f.label
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s:%d", host, os.Getppid())
}

// deadline is the Unix time in seconds until which a lease holds unless it is extended.
func deadline(lease *holdfast.Lease) float64 { return unixTime(time.Now().Add(lease.Validity())) }
