package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/store"
)

const statusHelp = `Tell who holds KEY, since when, for how long still, and who waits for it.

The answer is of the moment at which the store gave it. To act only while nobody holds
KEY, acquire it.

The holder is the label of the one who acquired KEY, by default its host and process
id. The owner is the random identity of the acquisition, which break takes. Since may be
when the holder began to wait. A lock that another library keeps on the same key is
shown as well, and may have no ttl. Broken is a key that break took from its holder and
that is not free yet.

Waiters are shown in the order in which they get KEY, at most 20, with --json 100. They
are those in the store's queue: of several in one process only the first is there, one
that died may still be, and where waiting polls, as with SQL, there are none. A waiter
whose turn has come is shown as the holder at once.

Output with --json, one object:
  key      KEY; with key_base64 where it is not UTF-8
  state    held, free, or broken
  label    who holds it; who broke it
  owner    the identity of the acquisition
  token    the fencing token; the last one where nobody holds KEY. Redis does not tell it
  since    Unix time in seconds
  ttl      seconds until the lease ends unless it is extended
  no_ttl   true where it never ends by itself
  session  true in ZooKeeper: where the holder died, KEY is free when its session ends, up to
           the session-timeout and 2s after that, and not when the ttl does
  foreign  true for another library's lock
  waiting  how many wait in the store's queue
  queue    of each of the first of them: label, owner, waited in seconds
  nodes    for Redis, of each server: node, answer (busy: it has a vote; none; no answer;
           or what else it holds), error, and of its vote label, owner, ttl
What is not known is left out.

Exit codes:
  0    KEY is held, or broken and not free yet
  2    nobody holds KEY
  64   the command line is wrong
  125  holdfast failed; also where the store cannot be reached: nothing is known`

func statusCommand() *cobra.Command {
	var stores storeFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "status [flags] KEY",
		Short:             "Tell who holds a key, and who waits for it",
		Long:              statusHelp,
		Example:           "  holdfast status nightly\n  holdfast status --json nightly | jq .label",
		Args:              oneKey,
		ValidArgsFunction: completeKey(&stores),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := stores.check(cmd.Flags().Changed); err != nil {
				return err
			}
			return status(cmd.Context(), stores, args[0], asJSON)
		},
	}
	flags := cmd.Flags()
	stores.add(flags)
	flags.BoolVar(&asJSON, "json", false, "print a JSON object")
	flags.SortFlags = false
	return cmd
}

func status(ctx context.Context, stores storeFlags, key string, asJSON bool) error {
	i, done, err := stores.inspector()
	if err != nil {
		return err
	}
	defer done()
	h, nodes, err := inspectKey(ctx, i, key)
	if err != nil {
		return err
	}
	if asJSON {
		err = printJSON(jsonHolder(h, nodes))
	} else {
		err = printText(statusText(h, nodes))
	}
	switch {
	case err != nil:
		return &exit{exitFailed, err}
	case h.Owner == "":
		return &exit{code: exitFree}
	}
	return nil
}

// maxWaiters is how many of a queue are shown to people.
const maxWaiters = 20

func statusText(h store.Holder, nodes []nodeVote) string {
	var b strings.Builder
	line := func(name, value string) { fmt.Fprintf(&b, "%-6s  %s\n", name, value) }
	line("key", shown(h.Key))
	line("state", state(h))
	if h.Owner != "" {
		line("holder", whose(h))
		if h.Held > 0 {
			line("since", fmt.Sprintf("%s, %v ago", time.Now().Add(-h.Held).Format(time.RFC3339), h.Held.Round(time.Second)))
		}
		switch {
		case h.NoTTL:
			line("ends", "never by itself; holdfast break takes it")
		case h.Session && h.Broken:
			line("free", "when its holder notices; where that died, when its session ends")
		case h.Session:
			line("ends", "when it is released; where its holder died, when its session ends")
		case h.Broken:
			line("free", ends(h)+" at the latest")
		default:
			line("ends", ends(h)+" unless extended")
		}
		line("owner", shown(h.Owner))
	}
	if h.Token > 0 {
		line("token", h.Token.String())
	}
	for i, q := range h.Queue[:min(len(h.Queue), maxWaiters)] {
		line("waiter", fmt.Sprintf("%d  %s, for %v", i+1, whose(store.Holder{Label: q.Label}), q.Waited.Round(time.Second)))
	}
	if more := h.Waiting - min(len(h.Queue), maxWaiters); more > 0 {
		line("waiter", fmt.Sprintf("... and %d more", more))
	}
	for _, n := range nodes {
		line("node", shown(n.Node)+"  "+n.String())
	}
	return b.String()
}
