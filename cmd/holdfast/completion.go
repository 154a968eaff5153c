package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const completionHelp = `Print the script with which a shell completes holdfast.

  bash        source <(holdfast completion bash)  # needs the package bash-completion
  zsh         source <(holdfast completion zsh)
  fish        holdfast completion fish | source
  powershell  holdfast completion powershell | Out-String | Invoke-Expression
in the shell's start file, or the output in the folder where it looks for completions.
Keys are completed too, where the store answers within half a second: those that are
held at the moment.`

func completionCommand() *cobra.Command {
	return &cobra.Command{
		Use:       "completion bash|zsh|fish|powershell",
		Short:     "Print the completion script of a shell",
		Long:      completionHelp,
		ValidArgs: []string{"bash", "zsh", "fish", "powershell"},
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		RunE: func(cmd *cobra.Command, args []string) error {
			var script bytes.Buffer
			var err error
			switch root := cmd.Root(); args[0] {
			case "bash":
				err = root.GenBashCompletionV2(&script, true)
			case "zsh":
				err = root.GenZshCompletion(&script)
			case "fish":
				err = root.GenFishCompletion(&script, true)
			case "powershell":
				err = root.GenPowerShellCompletionWithDesc(&script)
			}
			if err = errors.Join(err, printText(script.String())); err != nil {
				return failure(err)
			}
			return nil
		},
	}
}

// plainFlags takes the marks of a value's name out of the texts of the flags, which cobra
// gives to the shells as they are.
func plainFlags(root *cobra.Command) {
	for _, c := range root.Commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) { _, f.Usage = pflag.UnquoteUsage(f) })
	}
}

// Bounds of what a completion may take: somebody waits for it with a finger on a key.
const (
	completeWithin = 500 * time.Millisecond
	completeAtMost = 100
)

// completeKey completes KEY, the first argument, from the keys that are held.
func completeKey(stores *storeFlags) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(context.Background(), completeWithin)
		defer cancel()
		keys := make(chan []string, 1)
		go func() { keys <- heldKeys(ctx, *stores, word) }() // a store may keep its own time
		select {
		case k := <-keys:
			return k, cobra.ShellCompDirectiveNoFileComp
		case <-ctx.Done():
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
	}
}

// completeRun completes KEY, and leaves CMD to the shell.
func completeRun(stores *storeFlags) cobra.CompletionFunc {
	key := completeKey(stores)
	return func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return key(cmd, args, word)
	}
}

// heldKeys returns keys that are held, as far as the store tells them. It makes no store
// where there is none.
func heldKeys(ctx context.Context, stores storeFlags, prefix string) (keys []string) {
	list, err := stores.targets()
	if err != nil {
		return nil
	}
	if s, ok := list[0].(*storeSpec); ok && s.scheme == "sqlite" {
		if _, err := os.Stat(s.path); err != nil {
			return nil
		}
	}
	i, done, err := stores.inspector()
	if err != nil {
		return nil
	}
	defer done()
	for h, err := range i.List(ctx, prefix) {
		if err != nil || len(keys) == completeAtMost {
			break
		}
		if !strings.ContainsFunc(h.Key, func(r rune) bool { return !unicode.IsPrint(r) }) { // it would end the line, or be obeyed by the terminal
			keys = append(keys, cobra.CompletionWithDesc(h.Key, whose(h)))
		}
	}
	return keys
}
