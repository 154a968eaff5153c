package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/store"
)

const listHelp = `List the keys that are held and begin with PREFIX, or all.

Each line has the key, its holder, for how long that has held it or, on Redis and in
ZooKeeper, waited for it and held it, when that ends unless it is extended, the token where
the store tells it, and how many wait in the store's queue. In ZooKeeper a key is free when
its holder's session ends. Keys and labels with special characters are quoted. With --json each line is an object as of holdfast status --json, without queue.

On Redis all keys of the database are looked at, which takes a while where there are
many. Locks of other libraries cannot be told from data there and are left out. The
keys of a Redis Cluster cannot be listed.

Exit codes:
  0    all were listed, also where there are none
  64   the command line is wrong
  125  holdfast failed; also where the store cannot be reached`

func listCommand() *cobra.Command {
	var stores storeFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:     "list [flags] [PREFIX]",
		Short:   "List the keys that are held",
		Long:    listHelp,
		Example: "  holdfast list\n  holdfast list --json jobs/ | jq -r .key",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usage("one PREFIX is taken, there are %d words: holdfast %s", len(args), cmd.Use)
			}
			return nil
		},
		ValidArgsFunction: completeKey(&stores),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := stores.check(cmd.Flags().Changed); err != nil {
				return err
			}
			prefix := ""
			if len(args) > 0 {
				prefix = args[0]
			}
			return list(cmd.Context(), stores, prefix, asJSON)
		},
	}
	flags := cmd.Flags()
	stores.add(flags)
	flags.BoolVar(&asJSON, "json", false, "print a JSON object on each line")
	flags.SortFlags = false
	return cmd
}

// listLimit ends a listing whose store stands still.
const listLimit = 5 * time.Minute

func list(ctx context.Context, stores storeFlags, prefix string, asJSON bool) error {
	i, done, err := stores.inspector()
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeout(ctx, listLimit)
	defer cancel()
	out := bufio.NewWriter(os.Stdout)
	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for h, err := range listAgain(ctx, i, prefix) {
		switch {
		case err != nil: // what was found so far is told
			return refusal(errors.Join(asked("list", prefix, listLimit, err), columns.Flush(), out.Flush()))
		case asJSON:
			text, jerr := json.Marshal(jsonHolder(h, nil))
			if jerr != nil {
				return failure(jerr)
			}
			fmt.Fprintf(out, "%s\n", text)
		default:
			fmt.Fprintln(columns, strings.Join(row(h), "\t"))
		}
	}
	if err := cmp.Or(columns.Flush(), out.Flush()); err != nil {
		return failure(err)
	}
	return nil
}

// listAgain lists, and begins again where the first answer does not come in time.
func listAgain(ctx context.Context, i store.Inspector, prefix string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) {
		began := time.Now()
		for try := 1; ; try++ {
			again := false
			for h, err := range i.List(ctx, prefix) {
				again = errors.Is(err, store.ErrUnavailable) && try < inspectTries && time.Since(began) < inspectAgain
				if again {
					break
				}
				if try = inspectTries; !yield(h, err) {
					return
				}
			}
			if !again {
				return
			}
		}
	}
}

// row is a line of the list.
func row(h store.Holder) []string {
	held, token := "-", "-"
	if h.Held > 0 {
		held = h.Held.Round(time.Second).String()
	}
	if h.Token > 0 {
		token = "token " + h.Token.String()
	}
	waiting := "-"
	if h.Waiting > 0 {
		waiting = strconv.Itoa(h.Waiting) + " waiting"
	}
	return []string{shown(h.Key), whose(h), state(h) + " " + held, "ends " + ends(h), token, waiting}
}
