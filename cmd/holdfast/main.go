package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/store"
)

// Exit codes, besides those of the command that is run. They keep out of the way of
// what shells, timeout and env use, and never say 0 for work that was not done.
const (
	exitConflict  = 1   // another holds the key; --conflict-exit-code
	exitUsage     = 64  // the command line or a URL is wrong
	exitLost      = 75  // the lease was lost while the command ran; --lost-exit-code
	exitFailed    = 125 // our own failure, such as a store that cannot be reached
	exitCannotRun = 126 // CMD was found and cannot be run
	exitNotFound  = 127 // CMD was not found
	exitSignal    = 128 // plus the number of the signal
)

// exit ends the program with a code. err is what stderr is told; nil where it has been
// told, or where there is nothing to tell.
type exit struct {
	code int
	err  error
}

func (e *exit) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exit) Unwrap() error { return e.err }

// usage is a refusal of what the user wrote.
func usage(format string, args ...any) error {
	return &exit{exitUsage, fmt.Errorf(format, args...)}
}

// failure gives err the exit code that belongs to its kind, unless it has one.
func failure(err error) error {
	if e, ok := err.(*exit); ok {
		return e
	}
	if errors.Is(err, store.ErrInvalid) {
		return &exit{exitUsage, err}
	}
	return &exit{exitFailed, err}
}

func main() { os.Exit(run(os.Args[1:])) }

// run executes the command line and returns the exit code.
func run(args []string) int {
	defer stderr.flush()
	root := rootCommand()
	root.SetArgs(args)
	if len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) {
		plainFlags(root)
	}
	cmd, err := root.ExecuteC()
	if err == nil {
		return 0
	}
	e, ok := errors.AsType[*exit](err)
	if !ok { // cobra's own: a flag, a command that does not exist
		e = &exit{exitUsage, fmt.Errorf("%w; see %s --help", err, cmd.CommandPath())}
	}
	if e.err != nil {
		say("%v", e.err)
	}
	return e.code
}

const rootHelp = `Distributed locks that stay correct when a lock service alone cannot.

  holdfast run KEY -- CMD    runs CMD while no other process holds KEY. This is what
                             most need
  acquire, extend, release   the same in steps, for scripts, with a ticket
  status, list, break        who holds what, and who waits; take a key from its holder
  fence                      show a fencing token to the marks of a resource, for scripts
  gateway                    check tokens before a service that knows nothing of them
  bench                      measure a store

Locks are in a store: a SQLite file of this machine, a Redis server, or several for
Redlock, an etcd cluster, a ZooKeeper ensemble, PostgreSQL, MySQL or MariaDB; holdfast run
--help tells how to name it. The exit codes mean the same everywhere:
  1    another holds the key; of fence: the token is stale
  2    nobody holds the key that status or break was asked about
  64   the command line is wrong
  75   the lease is lost
  125  holdfast failed; also where the store cannot be reached
  128+n  signal n came`

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "holdfast",
		Short:         "Distributed locks that stay correct when a lock service alone cannot",
		Long:          rootHelp,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usage("no command given; see holdfast --help")
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(runCommand(), benchCommand(), acquireCommand(), extendCommand(), releaseCommand(), statusCommand(), listCommand(), breakCommand(),
		fenceCommand(), gatewayCommand(), completionCommand(), manCommand(), versionCommand())
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" { // cobra's own shows another page where there is no such verb, and succeeds
			c.Args = func(_ *cobra.Command, args []string) error {
				if _, rest, err := root.Find(args); err != nil || len(rest) > 0 {
					return usage("there is no verb %q; holdfast --help lists them", strings.Join(args, " "))
				}
				return nil
			}
		}
	}
	return root
}
