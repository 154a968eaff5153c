package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/store"
)

const breakHelp = `Take KEY from its holder, so that another can hold it.

The holder is not asked. It learns of the loss when it extends its lease the next time;
"holdfast run" then ends its command. KEY becomes free when the holder's lease would
have ended (on Redis after one max-ttl; in ZooKeeper also at once, where the holder's
session has ended), and not before: two holders of Holdfast never hold
it. The next one's token is larger, so that a guard refuses what the old one still writes.

Another library's lock on Redis is taken as well, and is free after one max-ttl, also where
it had no end or a later one: be sure that its holder has ended, or two hold the key. A
library that does not compare owners when it extends or releases may come back.

Say whom to break: --owner names the acquisition that status showed, and no other one is
broken; --force breaks whoever holds KEY at this moment. With neither, the answer names
the holder and nothing is done. To break a key that is broken already changes nothing.

Output with --json, one object:
  broken   the holder, an object as of holdfast status --json
  free_in  seconds until KEY is free, at most; in ZooKeeper, where its holder still lives

Exit codes:
  0    KEY was taken from its holder
  1    another holds KEY than --owner says; nothing was done
  2    nobody holds KEY
  64   the command line is wrong, or does not say whom to break
  125  holdfast failed; also where the store cannot be reached. Try again: what was done
       in part harms nothing`

// breakFlags are the flags of break.
type breakFlags struct {
	store storeFlags
	owner string
	force bool
	json  bool
}

func breakCommand() *cobra.Command {
	var f breakFlags
	cmd := &cobra.Command{
		Use:               "break [flags] KEY",
		Short:             "Take a key from its holder",
		Long:              breakHelp,
		Example:           "  holdfast status nightly\n  holdfast break --owner OWNER nightly",
		Args:              oneKey,
		ValidArgsFunction: completeKey(&f.store),
		RunE: func(cmd *cobra.Command, args []string) error {
			given := cmd.Flags().Changed
			if err := f.store.check(given); err != nil {
				return err
			}
			if given("owner") && f.owner == "" {
				return usage("invalid --owner: must not be empty; holdfast status shows the owner")
			}
			if given("owner") && f.force {
				return usage("--owner and --force exclude each other")
			}
			return f.run(cmd.Context(), args[0])
		},
	}
	flags := cmd.Flags()
	f.store.add(flags)
	flags.StringVar(&f.owner, "owner", "", "break only the acquisition of this `OWNER`, as status shows it")
	flags.BoolVar(&f.force, "force", false, "break whoever holds KEY")
	flags.BoolVar(&f.json, "json", false, "print a JSON object")
	flags.SortFlags = false
	return cmd
}

func (f *breakFlags) run(ctx context.Context, key string) error {
	i, done, err := f.store.inspector()
	if err != nil {
		return err
	}
	defer done()
	h, _, err := inspectKey(ctx, i, key)
	switch {
	case err != nil:
		return err
	case h.Owner == "":
		return notHeld(key)
	case h.Broken:
	case f.owner == "" && !f.force:
		return usage("%q is held by %s; nothing was done: give --owner %s to break it, or --force to break whoever holds it", key, whose(h), shown(h.Owner))
	case !f.force && f.owner != h.Owner:
		return notOwner(key, h)
	}
	if err := breakHolder(ctx, i, h); err != nil {
		return err
	}
	after, _, err := inspectKey(ctx, i, key)
	if err != nil {
		return refusal(fmt.Errorf("%q was taken from its holder, but when it is free is not known: %w", key, err))
	}
	return f.tell(h, after)
}

func breakHolder(ctx context.Context, i store.Inspector, h store.Holder) error {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	err := i.Break(ctx, h)
	if err == nil {
		return nil
	}
	held, ok := errors.AsType[*store.HeldError](err)
	switch {
	case ok:
		return notOwner(h.Key, held.Holder)
	case errors.Is(err, store.ErrLost):
		return notHeld(h.Key)
	}
	return refusal(asked("break", h.Key, answerLimit, err))
}

func notHeld(key string) error {
	return &exit{exitFree, fmt.Errorf("nobody holds %q", key)}
}

func notOwner(key string, h store.Holder) error {
	return &exit{exitConflict, fmt.Errorf("%q is held by %s, owner %s; nothing was done", key, whose(h), shown(h.Owner))}
}

// tell says who was broken, and when the key is free.
func (f *breakFlags) tell(h, after store.Holder) error {
	var free time.Duration
	if after.Broken {
		free = after.TTL
	}
	var err error
	if f.json {
		err = printJSON(struct {
			Broken holderJSON `json:"broken"`
			FreeIn float64    `json:"free_in"`
		}{jsonHolder(h, nil), free.Seconds()})
	} else {
		was, when, by := "was held", "now", whose(h)
		if h.Broken {
			was, by = "was broken already", shown(strings.TrimPrefix(h.Label, "broken by ")) // store.Holder's words
		}
		switch {
		case free > 0 && after.Session:
			when = "when its holder notices, or where that died, when its session ends"
		case free > 0:
			when = "in " + rounded(free).String() + " at the latest"
		}
		err = printText(fmt.Sprintf("%s %s by %s, owner %s; it is free %s\n", shown(h.Key), was, by, shown(h.Owner), when))
	}
	if err != nil {
		return failure(err)
	}
	return nil
}
