package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/store"
)

const runHelp = `Run CMD while this process, and no other one, holds KEY.

The lease is extended for as long as CMD runs. When it is lost, CMD and all that it
started in its process group get TERM, and KILL after --grace, which is before
another can hold KEY. CMD is found in PATH and gets its arguments as they are; there
is no shell in between. What CMD leaves running in its process group when it ends is
ended too, because it would go on without the lock. Where holdfast itself is killed by
KILL, CMD is too (on Linux), but not what CMD has started.

Stores:
  sqlite:PATH                         a file: all processes of this machine
  redis://[USER:PASSWORD@]HOST[:PORT][/DB]   one Redis server; rediss:// is with TLS
  several redis://, one --store each  Redlock: a lock needs more than half of them
  ?max-ttl=30s&trust-restarts=1       the flags of these names, as part of a redis:// URL
Without --store it is HOLDFAST_STORE (URLs with spaces between them), else the SQLite
file holdfast/locks.db in $XDG_STATE_HOME or ~/.local/state (root: /var/lib), which
excludes the processes of one user.

Environment of CMD:
  HOLDFAST_KEY       KEY
  HOLDFAST_TOKEN     the fencing token: larger than that of every earlier holder of KEY.
                     Pass it to what CMD writes to, and refuse smaller ones there
  HOLDFAST_OWNER     random identity of this acquisition
  HOLDFAST_DEADLINE  Unix time in seconds until which the lease holds if it is never
                     extended again, as of the start of CMD
  HOLDFAST_STORE     the store, for a holdfast inside CMD; it holds the password,
                     if there is one

Exit codes:
  that of CMD, or 128+n where signal n ended it, and
  1    another holds KEY (--nonblock, or --wait ran out); --conflict-exit-code
  64   the command line is wrong
  75   the lease was lost while CMD ran; --lost-exit-code
  125  holdfast failed; also where the store cannot be reached
  126  CMD cannot be run
  127  CMD was not found
  128+n  signal n came while waiting; nothing was run

Signals are sent on to the process group of CMD. A signal that comes while waiting
gives up.

A KEY that begins with a dash stands behind a -- of its own:
  holdfast run [flags] -- KEY -- CMD`

// runFlags are the flags of run.
type runFlags struct {
	claimFlags
	grace    time.Duration
	lostCode uint8
}

func runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:     "run [flags] KEY -- CMD [ARGS]",
		Short:   "Run a command while holding a key",
		Long:    runHelp,
		Example: "  holdfast run nightly -- ./backup.sh\n  holdfast run --nonblock --store redis://10.0.0.1 report -- make report",
		RunE: func(cmd *cobra.Command, args []string) error {
			key, argv, err := splitArgs(args, cmd.ArgsLenAtDash())
			if err != nil {
				return err
			}
			if err := f.check(cmd.Flags().Changed); err != nil {
				return err
			}
			return f.run(cmd.Context(), key, argv)
		},
	}
	flags := cmd.Flags()
	f.claimFlags.add(flags, "time after which the lease ends unless it is extended, at least 400ms")
	flags.DurationVar(&f.grace, "grace", 0, "time from TERM to KILL (default 5s, or a quarter of the ttl if that is less)")
	flags.Uint8Var(&f.lostCode, "lost-exit-code", exitLost, "exit `CODE` where the lease was lost, from 1")
	flags.SortFlags = false
	// The help flag among the words of CMD means that "--" was forgotten.
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		if words := cmd.Flags().Args(); len(words) > 0 {
			_, _, err := splitArgs(words, cmd.ArgsLenAtDash())
			say("%v", err)
			stderr.flush()
			os.Exit(exitUsage)
		}
		help(cmd, args)
	})
	return cmd
}

// splitArgs takes the words of the command line apart. The dash is mandatory, so that no
// flag of CMD is ever taken for ours.
func splitArgs(args []string, dash int) (key string, argv []string, err error) {
	if dash == 0 && len(args) > 1 && args[1] == "--" { // a KEY that could be taken for a flag
		args, dash = append([]string{args[0]}, args[2:]...), 1
	}
	switch {
	case len(args) == 0 || dash == 0:
		return "", nil, usage("KEY is missing: holdfast run [flags] KEY -- CMD [ARGS]")
	case dash < 0:
		return "", nil, usage("-- is missing after the key: holdfast run [flags] KEY -- CMD [ARGS]")
	case dash > 1:
		return "", nil, usage("one KEY must stand before --, there are %d words: holdfast run [flags] KEY -- CMD [ARGS]", dash)
	case len(args) == dash:
		return "", nil, usage("CMD is missing after --: holdfast run [flags] KEY -- CMD [ARGS]")
	}
	if err := store.CheckKey(args[0]); err != nil {
		return "", nil, failure(err)
	}
	return args[0], args[1:], nil
}

// slack is taken off the validity beside the grace, for the KILL to be done.
const slack = 100 * time.Millisecond

func (f *runFlags) check(given func(flag string) bool) error {
	if !given("grace") {
		f.grace = min(5*time.Second, f.ttl/4)
	}
	if err := f.claimFlags.check(given); err != nil {
		return err
	}
	switch {
	case f.lostCode == 0:
		return usage("invalid --lost-exit-code 0: a lost lease is never a success")
	case f.ttl < 4*slack:
		return usage("invalid --ttl %v: must be at least %v, to end CMD in time when the lease is lost", f.ttl, 4*slack)
	case f.grace < 0 || f.grace > f.ttl/2-slack:
		return usage("invalid --grace %v: must be from 0s to half of the ttl less %v (%v)", f.grace, slack, f.ttl/2-slack)
	}
	return nil
}

// run acquires the key, runs the command and releases. It must be called by the main
// goroutine; see start.
func (f *runFlags) run(ctx context.Context, key string, argv []string) error {
	path, err := lookPath(argv[0])
	if err != nil { // before the wait, which may be long
		return err
	}
	st, err := f.store.open()
	if err != nil {
		return failure(err)
	}
	defer st.close()

	report := newReporter(key)
	locks, err := holdfast.New(st, &holdfast.Options{TTL: f.ttl, Margin: f.grace + slack, Label: f.label, Observer: report})
	if err != nil {
		return failure(err)
	}

	ignorePipe()
	signals := make(chan os.Signal, 16)
	catch(signals, ending)
	lease, err := f.acquire(ctx, locks, key, signals)
	report.waited()
	if err != nil {
		return err
	}

	catch(signals, passing)
	cmd := &exec.Cmd{Path: path, Args: argv, Env: environment(lease, st.spec), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	code, err := f.supervise(cmd, lease, report.lost, signals)
	return f.finish(lease, code, err)
}

// catch relays signals, but none that we were started to ignore, as nohup does.
func catch(to chan<- os.Signal, signals []os.Signal) {
	signals = slices.DeleteFunc(slices.Clone(signals), signal.Ignored)
	if len(signals) > 0 { // Notify takes none for all
		signal.Notify(to, signals...)
	}
}

// acquire waits as the flags say. A signal ends it; then nothing is held.
func (f *claimFlags) acquire(ctx context.Context, locks *holdfast.Locker, key string, signals <-chan os.Signal) (*holdfast.Lease, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if f.wait > 0 {
		ctx, cancel = context.WithTimeout(ctx, f.wait)
		defer cancel()
	}
	var lease *holdfast.Lease
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		if f.nonblock {
			lease, err = locks.TryAcquire(ctx, key)
		} else {
			lease, err = locks.Acquire(ctx, key)
		}
	}()
	select {
	case <-done:
	case s := <-signals:
		cancel()
		<-done
		if err == nil {
			if err := release(lease); err != nil {
				say("%v", err)
			}
		}
		return nil, &exit{code: exitSignal + int(s.(syscall.Signal))}
	}
	switch {
	case err == nil:
		return lease, nil
	case errors.Is(err, holdfast.ErrHeld):
		return nil, &exit{int(f.conflictCode), err}
	}
	return nil, &exit{exitFailed, err}
}

// supervise runs the command until nothing of its process group is left, and returns its
// exit code. Signals are sent on; the loss of the lease ends the command.
func (f *runFlags) supervise(cmd *exec.Cmd, lease *holdfast.Lease, lost <-chan holdfast.Lost, signals <-chan os.Signal) (int, error) {
	if err := lease.Err(); err != nil { // we have been paused: another may hold the key
		return 0, fmt.Errorf("%w; %s is not run", err, cmd.Args[0])
	}
	c, err := start(cmd, func() bool { return lease.Validity() > 0 })
	if err != nil {
		return 0, cannotRun(cmd.Args[0], err)
	}
	defer c.close()
	ended := make(chan int, 1)
	go func() { ended <- c.wait() }()

	var code int
	var kill, again <-chan time.Time
	for {
		select {
		case s := <-signals:
			c.forward(s)
			continue
		case l := <-lost:
			say("%v; ending %s", l.Err, cmd.Args[0])
			left := f.grace - l.Overrun
			if left > 0 { // else another may hold the key already: no instant more
				c.terminate()
			}
			kill = time.After(left)
			continue
		case <-kill:
			c.kill()
			continue
		case code = <-ended:
			if kill == nil && c.remains() {
				c.terminate()
				kill = time.After(f.grace)
			}
			ended = nil
		case <-again:
		}
		if ended == nil && !c.remains() {
			return code, nil
		}
		again = time.After(10 * time.Millisecond)
	}
}

// finish gives the key back and says with which code to exit.
func (f *runFlags) finish(lease *holdfast.Lease, code int, err error) error {
	lost := lease.Err()
	if rerr := release(lease); rerr != nil && lost == nil {
		if errors.Is(rerr, holdfast.ErrLost) {
			lost = rerr
		}
		say("%v", rerr)
	}
	switch {
	case lost != nil:
		return &exit{int(f.lostCode), err}
	case err != nil:
		return err
	case code != 0:
		return &exit{code: code}
	}
	return nil
}

// release bounds its own time.
func release(lease *holdfast.Lease) error { return lease.Release(context.Background()) }

// environment is ours with the words of this lease. They come last, and so override
// those of a lease around it.
func environment(lease *holdfast.Lease, spec string) []string {
	return append(os.Environ(),
		"HOLDFAST_KEY="+lease.Key(),
		"HOLDFAST_TOKEN="+lease.Token().String(),
		"HOLDFAST_OWNER="+lease.Owner(),
		"HOLDFAST_DEADLINE="+strconv.FormatInt(time.Now().Add(lease.Validity()).Unix(), 10),
		storeVariable+"="+spec)
}

// lookPath finds CMD as a shell would.
func lookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil && !errors.Is(err, exec.ErrDot) { // PATH may name the current folder, as for a shell
		return "", cannotRun(name, err)
	}
	return path, nil
}

// cannotRun tells a command that does not exist from one that cannot be executed.
func cannotRun(name string, err error) error {
	code := exitCannotRun
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		code = exitNotFound
	}
	if e, ok := errors.AsType[*exec.Error](err); ok {
		err = e.Err
	}
	return &exit{code, fmt.Errorf("cannot run %s: %w", name, err)}
}
