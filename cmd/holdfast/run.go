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
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/store"
)

func runHelp() string {
	return `Run CMD while this process, and no other one, holds KEY.

The lease is extended for as long as CMD runs. When it is lost, CMD and all that it
started in its process group get TERM, and KILL after --grace, which is before
another can hold KEY. CMD is found in PATH and gets its arguments as they are; there
is no shell in between. What CMD leaves running in its process group when it ends is
ended too, because it would go on without the lock. Standard input and both outputs
are CMD's; what holdfast itself says goes to standard error. On Linux it reaps what CMD
orphans, and so may be the first process of a container.

--max-hold bounds for how long KEY is held: TERM comes early enough for KILL to be over
by then. --min-hold keeps KEY for a while after a short CMD, whatever its exit code, so
that several hosts that start the same job at about the same time run it once. Both
count from the grant.

` + storeHelp() + `

Environment of CMD:
  HOLDFAST_KEY       KEY
  HOLDFAST_TOKEN     the fencing token: larger than that of every earlier holder of KEY.
                     Pass it to what CMD writes to, and refuse smaller ones there
  HOLDFAST_OWNER     random identity of this acquisition
  HOLDFAST_OWNERS    the same of all runs around CMD, the outermost first
  HOLDFAST_DEADLINE  Unix time in seconds until which the lease holds if it is never
                     extended again, as of the start of CMD: the ttl less the margin, which
                     is the grace and a tenth of the ttl (at least 100ms, at most 1s)
  HOLDFAST_STORE     the store, for a holdfast inside CMD; it holds the password,
                     if there is one
A run inside CMD has words of its own. One of the same KEY and store would wait for
itself, and is refused at once; it knows by HOLDFAST_OWNERS.

Exit codes:
  that of CMD, or 128+n where signal n ended it, and
  1    another holds KEY (--nonblock, or --wait ran out), or a run around this one
       does; --conflict-exit-code
  64   the command line is wrong
  75   the lease was lost before it was released, or --max-hold ended CMD;
       --lost-exit-code
  125  holdfast failed; also where the store cannot be reached
  126  CMD cannot be run
  127  CMD was not found
  128+n  signal n came while waiting; nothing was run
So 0 says that CMD succeeded, and that KEY was held all the time.

Signals are sent on to the process group of CMD, all that can be caught but PIPE, CHLD,
URG, PROF and TTOU. One that comes while waiting gives up and leaves nothing behind; one
that comes during --min-hold, or that ended CMD before, ends that.

--json writes one object a line. Each has time, event and key, and key_base64 where the key
is not UTF-8; durations are seconds:
  waiting   waited, error, holder (label, token, ttl, since)
  acquired  token, owner, deadline, waited
  at-risk   token, left, error: an extension failed; extended: it works again
  lost      token, held, cause (expired, gone, taken, max-hold), error
  ended     code: CMD and its group have ended
  stuck     something of CMD did not end by KILL
  released  token, held; error where the store did not confirm
  warning   error: a configuration file that root does not read
  failed    code, error: there is no exit code of CMD to pass on
What is wrong with the flags is told as text.

Limits:
  What CMD starts and what leaves its process group, as daemons do, is neither ended nor
  waited for.
  What runs as another user, as under sudo, gets no signals from a holdfast that is not
  root: write sudo holdfast run, not holdfast run -- sudo.
  Where holdfast itself is killed by KILL, CMD is too on Linux, unless it has changed its
  user, but not what CMD has started; on macOS and the BSDs all of it goes on. On Windows
  CMD and all that it starts end with holdfast, always; Ctrl+Break stands for TERM there.
  While holdfast is stopped by STOP, nobody ends CMD.
  HOLDFAST_TOKEN, checked by what CMD writes to, is for all of these.

A KEY that begins with a dash stands behind a -- of its own:
  holdfast run [flags] -- KEY -- CMD`
}

// runFlags are the flags of run.
type runFlags struct {
	claimFlags
	grace    time.Duration
	maxHold  time.Duration
	minHold  time.Duration
	lostCode uint8
	json     bool
	verbose  bool

	given func(flag string) bool
}

func runCommand() *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:               "run [flags] KEY -- CMD [ARGS]",
		Short:             "Run a command while holding a key",
		Long:              runHelp(),
		Example:           "  holdfast run nightly -- ./backup.sh\n  holdfast run --nonblock --store redis://10.0.0.1 report -- make report",
		ValidArgsFunction: completeRun(&f.store),
		RunE: func(cmd *cobra.Command, args []string) error {
			key, argv, err := splitArgs(args, cmd.ArgsLenAtDash())
			if err != nil {
				return err
			}
			if err := f.check(cmd.Flags().Changed); err != nil {
				return err
			}
			report := &reporter{key: key, json: f.json}
			f.store.warn = func(text string) { report.tell(record{Event: "warning", Error: text}, text) }
			return report.failed(f.run(cmd.Context(), key, argv))
		},
	}
	flags := cmd.Flags()
	f.claimFlags.add(flags, "time after which the lease ends unless it is extended, at least 400ms")
	flags.DurationVar(&f.grace, "grace", 0, "time from TERM to KILL (default 5s, or a quarter of --ttl or --max-hold if that is less)")
	flags.DurationVar(&f.maxHold, "max-hold", 0, "hold KEY at most this long: CMD gets TERM in time before, as if the lease were lost (default without end)")
	flags.DurationVar(&f.minHold, "min-hold", 0, "hold KEY at least this long, also after CMD has ended, so that a short job runs once")
	flags.Uint8Var(&f.lostCode, "lost-exit-code", exitLost, "exit `CODE` where the lease was lost, from 1")
	flags.BoolVar(&f.json, "json", false, "write our own words as JSON, one object a line")
	flags.BoolVarP(&f.verbose, "verbose", "v", false, "also say what goes well: acquired with which token, ended, released")
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

// stuckAfter is the time from KILL to a word about what does not end.
const stuckAfter = time.Second

// minSlack and maxSlack bound the slack.
const minSlack, maxSlack = 100 * time.Millisecond, time.Second

// slack is taken off the validity beside the grace, for the KILL to be over in time also on a
// busy machine.
func (f *runFlags) slack() time.Duration { return min(max(minSlack, f.ttl/10), maxSlack) }

func (f *runFlags) check(given func(flag string) bool) error {
	if err := f.claimFlags.check(given); err != nil {
		return err
	}
	f.given = given
	switch {
	case f.lostCode == 0:
		return usage("invalid --lost-exit-code 0: a lost lease is never a success")
	case given("min-hold") && f.minHold <= 0:
		return usage("invalid --min-hold %v: must be positive", f.minHold)
	}
	return f.times()
}

// times sets the grace where it is not given, and refuses times for which the ttl is too short.
func (f *runFlags) times() error {
	if !f.given("grace") {
		f.grace = min(5*time.Second, f.ttl/4)
		if f.maxHold > 0 {
			f.grace = min(f.grace, f.maxHold/4)
		}
	}
	slack := f.slack()
	switch {
	case f.ttl < 4*minSlack:
		return usage("invalid --ttl %v: must be at least %v, to end CMD in time when the lease is lost", f.ttl, 4*minSlack)
	case f.grace < 0 || f.grace > f.ttl/2-slack:
		return usage("invalid --grace %v: must be from 0s to half of the ttl less %v (%v)", f.grace, slack, f.ttl/2-slack)
	case f.given("max-hold") && f.maxHold <= f.grace+minSlack:
		return usage("invalid --max-hold %v: must be more than the grace and %v (%v)", f.maxHold, minSlack, f.grace+minSlack)
	case f.maxHold > 0 && f.minHold > f.maxHold:
		return usage("invalid --min-hold %v: must be at most --max-hold (%v)", f.minHold, f.maxHold)
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
	if f.fit(st) {
		if err := f.times(); err != nil {
			return err
		}
	}

	report := f.reporter(key, st.Store, f.json, f.verbose)
	locks, err := holdfast.New(st.Store, &holdfast.Options{TTL: f.ttl, ExtendEvery: f.ttl / 8, Margin: f.grace + f.slack(), Label: f.label, Observer: report})
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

	catch(signals, passing)
	cmd := &exec.Cmd{Path: path, Args: argv, Env: environment(lease, st.spec, report.outer), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	j := &job{runFlags: f, name: argv[0], lease: lease, granted: time.Now(), report: report, pause: st.pause, signals: signals}
	code, err := j.supervise(cmd)
	if err == nil {
		j.keep(code)
	}
	return j.finish(code, err)
}

// catch relays signals, but none that we were started to ignore, as nohup does.
func catch(to chan<- os.Signal, signals []os.Signal) {
	signals = slices.DeleteFunc(slices.Clone(signals), signal.Ignored)
	if len(signals) > 0 { // Notify takes none for all
		signal.Notify(to, signals...)
	}
}

// await waits as the flags say. A signal ends it; then nothing is held. The report is the
// Observer of locks.
func (f *claimFlags) await(ctx context.Context, locks *holdfast.Locker, report *reporter, signals <-chan os.Signal) (*holdfast.Lease, error) {
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
			lease, err = locks.TryAcquire(ctx, report.key)
		} else {
			lease, err = locks.Acquire(ctx, report.key)
		}
	}()
	select {
	case <-done:
	case <-report.nested:
		cancel()
		<-done
	case s := <-signals:
		cancel()
		<-done
		return nil, giveUp(lease, err, report, s)
	}
	if err != nil && ctx.Err() == context.DeadlineExceeded && errors.Is(err, context.DeadlineExceeded) {
		err = f.waitedOut(err, report)
	}
	switch {
	case err == nil:
		return lease, nil
	case heldAround(err, report.outer):
		return nil, &exit{int(f.conflictCode), fmt.Errorf("acquire %q: already held by a holdfast run around this one, which would wait for itself; leave out one of the two, or take another key", report.key)}
	case errors.Is(err, holdfast.ErrHeld):
		return nil, &exit{int(f.conflictCode), err}
	}
	return nil, refusal(err)
}

// waitedOut says that --wait ran out, and why the last attempt failed, in place of the
// library's words. It is the error that it stands for.
type waitedOut struct {
	error
	text string
}

func (e waitedOut) Error() string { return e.text }
func (e waitedOut) Unwrap() error { return e.error }

func (f *claimFlags) waitedOut(err error, report *reporter) error {
	e, ok := errors.AsType[*holdfast.Error](err)
	if !ok {
		return err
	}
	why := *e
	text, _ := report.reason()
	why.Err = fmt.Errorf("gave up after --wait %v: %s", f.wait, text)
	return waitedOut{err, why.Error()}
}

// giveUp gives back what a signal has come too late for, and says with which code to exit.
func giveUp(lease *holdfast.Lease, err error, report *reporter, s os.Signal) error {
	code := exitSignal + int(s.(syscall.Signal))
	if err == nil {
		err = release(lease)
	} else {
		err = nil // it says that the wait was given up
	}
	report.tell(record{Event: "failed", Code: &code, Error: "gave up by signal: " + s.String()}, report.aside("gave up by signal: %v", s))
	if err != nil {
		report.tell(record{Event: "released", Error: err.Error()}, err.Error())
	}
	return &exit{code: code}
}

// job is a run that holds its key.
type job struct {
	*runFlags
	name    string // of CMD
	lease   *holdfast.Lease
	granted time.Time
	report  *reporter
	pause   func() (resume func()) // of the store
	signals <-chan os.Signal
	stop    bool // a signal has asked for the end
	overdue bool // --max-hold ended CMD
}

// supervision is what a command's process asks of its job.
type supervision struct {
	valid func() bool            // whether a stopped command may go on
	pause func() (resume func()) // see opened; may be nil
}

// stopping are the signals that ask for the end of all, and not only of CMD's business.
var stopping = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM}

// supervise runs the command until nothing of its process group is left, and returns its
// exit code. Signals are sent on; the loss of the lease ends the command, and so does the
// end of --max-hold.
func (j *job) supervise(cmd *exec.Cmd) (int, error) {
	if err := j.lease.Err(); err != nil { // we have been paused: another may hold the key
		return 0, fmt.Errorf("%w; %s is not run", err, j.name)
	}
	c, err := start(cmd, supervision{valid: func() bool { return j.lease.Validity() > 0 }, pause: j.pause})
	if err != nil {
		return 0, cannotRun(j.name, err)
	}
	defer c.close()
	ended := make(chan int, 1)
	go func() { ended <- c.wait() }()

	var overdue, kill, stuck, again <-chan time.Time
	if j.maxHold > 0 {
		overdue = time.After(time.Until(j.granted.Add(j.maxHold - j.grace - minSlack)))
	}
	var killAt time.Time
	end := func(at time.Time) { // TERM now and KILL then; an earlier KILL stays where it is
		left := time.Until(at)
		if kill == nil || at.Before(killAt) {
			killAt, kill = at, time.After(left)
		}
		if left > 0 { // else another may hold the key already: no instant more
			c.terminate()
		}
	}
	var code int
	for {
		select {
		case s := <-j.signals:
			j.stop = j.stop || slices.Contains(stopping, s)
			c.forward(s)
			continue
		case l := <-j.report.lost:
			j.report.loss(l, fmt.Sprintf("%v; ending %s", l.Err, j.name))
			end(l.ended.Add(j.grace)) // however late we hear of it
			continue
		case <-overdue:
			if ended != nil {
				j.expire()
			}
			end(j.granted.Add(j.maxHold - minSlack))
			continue
		case <-kill:
			c.kill()
			stuck = time.After(stuckAfter)
			continue
		case <-stuck:
			j.report.tell(record{Event: "stuck"}, fmt.Sprintf("%s does not end: what is left of it runs as another user, or hangs in the system", j.name))
			continue
		case code = <-ended:
			if kill == nil && c.remains() {
				end(time.Now().Add(j.grace))
			}
			ended = nil
		case <-again:
		}
		if ended == nil && !c.remains() {
			j.report.tell(record{Event: "ended", Code: &code}, j.report.aside("%s ended with exit code %d", j.name, code))
			return code, nil
		}
		again = time.After(10 * time.Millisecond)
	}
}

// expire notes that --max-hold is over.
func (j *job) expire() {
	j.overdue = true
	err := fmt.Errorf("hold %q: lease lost: --max-hold %v is over", j.report.key, j.maxHold)
	j.report.tell(record{Event: "lost", Token: j.lease.Token(), Held: time.Since(j.granted).Seconds(), Cause: "max-hold", Error: err.Error()},
		fmt.Sprintf("%v; ending %s", err, j.name))
}

// keep holds the key until --min-hold is over, unless somebody wants the end.
func (j *job) keep(code int) {
	left := j.minHold - time.Since(j.granted)
	if left <= 0 || j.stop || j.overdue || j.lease.Err() != nil || slices.Contains(stopping, os.Signal(syscall.Signal(code-exitSignal))) {
		return
	}
	if len(passing) > 0 { // none would be all
		signal.Reset(passing...)
	}
	if text := j.report.aside("keeping %q for %v more", j.report.key, rounded(left)); text != "" && !j.json {
		say("%s", text)
	}
	over := time.After(left)
	for {
		select {
		case <-over:
			return
		case <-j.lease.Done():
			return
		case s := <-j.signals:
			if slices.Contains(ending, s) {
				return
			}
		}
	}
}

// finish gives the key back and says with which code to exit.
func (j *job) finish(code int, err error) error {
	lost := j.lease.Err()
	rerr := release(j.lease)
	select {
	case l := <-j.report.lost: // before CMD began, which err tells, or after it ended
		text := ""
		if err == nil {
			text = l.Err.Error()
		}
		j.report.loss(l, text)
	default:
	}
	rec := record{Event: "released", Token: j.lease.Token(), Held: time.Since(j.granted).Seconds()}
	text := j.report.aside("released %q after %v", j.report.key, rounded(time.Since(j.granted)))
	if rerr != nil {
		rec.Error, text = rerr.Error(), ""
		if lost == nil {
			text = rec.Error
		}
		if errors.Is(rerr, holdfast.ErrLost) {
			lost = rerr
		}
	}
	j.report.tell(rec, text)
	switch {
	case lost != nil || j.overdue:
		return &exit{int(j.lostCode), err}
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
func environment(lease *holdfast.Lease, spec string, outer []string) []string {
	return append(os.Environ(),
		"HOLDFAST_KEY="+lease.Key(),
		"HOLDFAST_TOKEN="+lease.Token().String(),
		ownerVariable+"="+lease.Owner(),
		ownersVariable+"="+strings.Join(append(outer, lease.Owner()), " "),
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
	return &exit{code, fmt.Errorf("cannot run %s: %w", shown(name), err)}
}
