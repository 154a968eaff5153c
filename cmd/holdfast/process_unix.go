//go:build unix

package main

import (
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// ending are the signals that give up a wait; passing are of use to a running command
// only. All that are caught are sent on to the command's process group. SIGPIPE is
// caught as well, so that a closed stderr does not end us, and sent nowhere. Left out are
// SIGCHLD, the runtime's own SIGURG and SIGPROF, which it never passes on, and SIGTTOU: a
// write to the terminal from the background would be repeated for ever if it were caught.
var (
	ending = append([]os.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGABRT, unix.SIGALRM, unix.SIGUSR1, unix.SIGUSR2,
		unix.SIGIO, unix.SIGXCPU, unix.SIGXFSZ, unix.SIGVTALRM, unix.SIGILL, unix.SIGTRAP, unix.SIGBUS, unix.SIGFPE, unix.SIGSEGV,
		unix.SIGSYS}, systemSignals()...)
	passing = []os.Signal{unix.SIGCONT, unix.SIGTSTP, unix.SIGTTIN, unix.SIGWINCH}
)

// ignorePipe keeps a write to a closed stderr from ending the process. The signal is
// caught and not ignored, since ignoring is inherited by the command.
func ignorePipe() { signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE) }

// child is a started command: the leader of a process group of its own.
type child struct {
	pid     int
	process *os.Process
	tty     *os.File // the terminal whose foreground the group was given; nil where none
	// lent: others of our own group, such as a pager behind us in a pipeline, have read the
	// terminal. The foreground is then theirs, until the command reads.
	lent bool
	supervision
	resume atomic.Pointer[func()] // to be called when we go on
	killed bool
	reaped atomic.Bool // its id may be another's
}

// start starts cmd in its own process group, in the foreground where we are. It must be
// called by the main goroutine, and pins it: on Linux the kernel kills the command
// when the thread that started it ends, be it by SIGKILL.
func start(cmd *exec.Cmd, job supervision) (*child, error) {
	runtime.LockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	dieWithParent(cmd.SysProcAttr)
	c := &child{tty: foregroundTerminal(), supervision: job}
	if c.tty != nil {
		cmd.SysProcAttr.Foreground = true
		cmd.SysProcAttr.Ctty = int(c.tty.Fd())
	}
	if err := cmd.Start(); err != nil {
		c.close()
		return nil, err
	}
	c.pid, c.process = cmd.Process.Pid, cmd.Process
	if c.tty != nil {
		// From here on we are in the background, and a write or a change of the
		// foreground would stop us.
		signal.Ignore(unix.SIGTTOU)
	}
	return c, nil
}

// foregroundTerminal opens the controlling terminal, if we are in its foreground.
func foregroundTerminal() *os.File {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil
	}
	if !inForeground(tty) {
		tty.Close()
		return nil
	}
	return tty
}

func inForeground(tty *os.File) bool { return hasForeground(tty, unix.Getpgrp()) }

func hasForeground(tty *os.File, group int) bool {
	has, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && has == group
}

// setForeground gives the terminal to a process group. Where that fails the terminal is
// gone, and there is nothing to give.
func setForeground(tty *os.File, group int) {
	_ = unix.IoctlSetPointerInt(int(tty.Fd()), unix.TIOCSPGRP, group)
}

// wait returns the exit code of the command, as a shell tells it, once it has ended.
// Other members of its group may be left.
func (c *child) wait() int {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(waitFor(c.pid), &status, unix.WUNTRACED, nil)
		switch {
		case err == unix.EINTR || err == nil && pid != c.pid: // an orphan that came to us
		case err != nil:
			return exitFailed
		case status.Stopped():
			c.stopped(status.StopSignal())
		case status.Signaled():
			c.reaped.Store(true)
			return exitSignal + int(status.Signal())
		default:
			c.reaped.Store(true)
			return status.ExitStatus()
		}
	}
}

// stopped follows a command that was stopped from its terminal: we stop too, so that
// the shell gets its terminal back. Meanwhile the lease is not extended. A command that
// wants the terminal while it is lent gets it.
func (c *child) stopped(by syscall.Signal) {
	if c.tty == nil {
		return // somebody else stopped it and will continue it; the lease stays
	}
	if by == unix.SIGTTIN && inForeground(c.tty) {
		setForeground(c.tty, c.pid)
		c.signal(unix.SIGCONT)
		return
	}
	if hasForeground(c.tty, c.pid) { // and not the shell, which has put us in the background
		setForeground(c.tty, unix.Getpgrp())
	}
	if c.pause != nil && c.resume.Load() == nil {
		resume := c.pause()
		c.resume.Store(&resume)
	}
	// This thread may run on for a moment: only SIGCONT says that the stop is over.
	_ = unix.Kill(0, unix.SIGSTOP)
}

// goOn ends the pause of the store, if there is one.
func (c *child) goOn() {
	if resume := c.resume.Swap(nil); resume != nil {
		(*resume)()
	}
}

// forward sends on a signal that we got. A stopped command goes on only while the lease
// is valid, which it need not be when we have been stopped with it.
func (c *child) forward(s os.Signal) {
	if s == unix.SIGCONT {
		c.goOn()
	}
	switch {
	case s == unix.SIGCONT && !c.valid():
		return
	case s == unix.SIGCONT && c.tty != nil && !c.lent && inForeground(c.tty):
		setForeground(c.tty, c.pid)
	case s == unix.SIGTTIN && c.tty != nil && hasForeground(c.tty, c.pid):
		c.lent = true
		setForeground(c.tty, unix.Getpgrp())
		_ = unix.Kill(0, unix.SIGCONT)
		return
	}
	c.signal(s)
}

// signal sends s to the command and all that it started in its group. A command that has gone
// over to another group gets it alone.
func (c *child) signal(s os.Signal) {
	_ = unix.Kill(-c.pid, s.(syscall.Signal)) // fails where nobody is left
	if group, err := unix.Getpgid(c.pid); err == nil && group != c.pid && !c.reaped.Load() {
		_ = c.process.Signal(s)
	}
}

// terminate asks the group to end; a stopped process hears it when it continues.
func (c *child) terminate() {
	c.signal(unix.SIGTERM)
	c.signal(unix.SIGCONT)
}

func (c *child) kill() {
	c.killed = true
	c.signal(unix.SIGKILL)
}

// remains reports whether members of the group are left after wait has returned. Those that
// were killed and whose parents do not reap them are not.
func (c *child) remains() bool {
	dead := c.killed && allZombies(c.pid)
	reapOrphans() // after that, since what is dead may be ours to reap
	return !dead && unix.Kill(-c.pid, 0) != unix.ESRCH
}

// close takes the terminal back. Nothing is paused any more.
func (c *child) close() {
	c.goOn()
	if c.tty != nil {
		if c.pid != 0 {
			setForeground(c.tty, unix.Getpgrp())
		}
		c.tty.Close()
	}
}
