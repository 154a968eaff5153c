package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

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

// failure gives err the exit code that belongs to its kind.
func failure(err error) error {
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
	err := root.Execute()
	if err == nil {
		return 0
	}
	e, ok := errors.AsType[*exit](err)
	if !ok { // cobra's own: a flag, a command that does not exist
		e = &exit{exitUsage, err}
	}
	if e.err != nil {
		say("%v", e.err)
	}
	return e.code
}

// say tells people something, in one line. It goes to stderr: stdout is the command's. It
// does not wait until it is written.
func say(format string, args ...any) {
	text := strings.TrimPrefix(fmt.Sprintf(format, args...), "holdfast: ") // the library's errors have it too
	stderr.say("holdfast: " + oneLine.Replace(text))
}

var oneLine = strings.NewReplacer("\n", `\n`, "\r", `\r`)

// writer writes lines in the background: a reader that stands still, such as a terminal
// that was stopped, must not hold up the end of a command whose lease is lost.
type writer struct {
	to    *os.File
	begin sync.Once
	lines chan line
}

// line is a line to write, or none and who waits until those before are written.
type line struct {
	text    string
	flushed chan struct{}
}

var stderr = &writer{to: os.Stderr, lines: make(chan line, 64)}

// flushLimit bounds how long the end of the program waits for a reader.
const flushLimit = 2 * time.Second

func (w *writer) say(text string) {
	w.begin.Do(func() { go w.write() })
	select {
	case w.lines <- line{text: text}:
	default: // nobody has read for long
	}
}

func (w *writer) write() {
	for l := range w.lines {
		if l.flushed != nil {
			close(l.flushed)
			continue
		}
		fmt.Fprintln(w.to, l.text)
	}
}

// flush waits until all is written.
func (w *writer) flush() {
	w.begin.Do(func() { go w.write() })
	limit := time.After(flushLimit)
	flushed := make(chan struct{})
	select {
	case w.lines <- line{flushed: flushed}:
	case <-limit:
		return
	}
	select {
	case <-flushed:
	case <-limit:
	}
}

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "holdfast",
		Short:         "Distributed locks that stay correct when a lock service alone cannot",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usage("no command given; see holdfast --help")
		},
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.AddCommand(runCommand(), versionCommand())
	return root
}
