package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast"
)

const releaseHelp = `Release the lease of TICKET: another can hold the key at once.

` + ticketHelp + `

A file given by --ticket-file is removed when the lease is released.

Exit codes:
  0    the key was released
  64   the command line or the ticket is wrong, or it is another store's
  75   the lease was lost, or released, before
  125  holdfast failed; also where the store cannot be reached. The key stays taken until
       the ttl ends, or until another try succeeds`

func releaseCommand() *cobra.Command {
	var stores storeFlags
	var ticket ticketFlags
	cmd := &cobra.Command{
		Use:               "release [flags] [TICKET]",
		Short:             "Release the lease of a ticket",
		Long:              releaseHelp,
		Example:           "  holdfast release --ticket-file job.ticket",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			given := cmd.Flags().Changed
			if err := cmp.Or(stores.check(given), ticket.check(given)); err != nil {
				return err
			}
			return releaseTicket(cmd.Context(), stores, ticket, args)
		},
	}
	flags := cmd.Flags()
	stores.add(flags)
	ticket.addFile(flags, "read the ticket from `FILE`, and remove it when the lease is released")
	flags.SortFlags = false
	return cmd
}

func releaseTicket(ctx context.Context, stores storeFlags, ticket ticketFlags, args []string) error {
	if err := checkTickets(runtime.GOOS); err != nil {
		return err
	}
	text, _, err := ticket.read(args, os.Stdin)
	if err != nil {
		return err
	}
	st, err := stores.open()
	if err != nil {
		return failure(err)
	}
	defer st.close()
	locks, err := holdfast.New(st.Store, &holdfast.Options{NoExtend: true})
	if err != nil {
		return failure(err)
	}
	lease, err := adopt(ctx, locks, "release", text)
	if err != nil {
		return err
	}
	return ticket.giveBack(lease)
}

// drop removes the file with the ticket of a lease that is released, if there is one.
func (f *ticketFlags) drop(lease *holdfast.Lease) {
	if f.file == "" {
		return
	}
	if owner, err := f.owner(); err != nil || owner != lease.Owner() {
		return
	}
	if err := os.Remove(f.file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		say("the key is released; the ticket, which is of no use any more, stays: %v", err)
	}
}

// giveBack releases a lease, removes its ticket's file, and says with which code to exit.
func (f *ticketFlags) giveBack(lease *holdfast.Lease) error {
	err := release(lease)
	switch {
	case err == nil:
		f.drop(lease)
		return nil
	case errors.Is(err, holdfast.ErrLost):
		return lost(err)
	}
	return refusal(err)
}
