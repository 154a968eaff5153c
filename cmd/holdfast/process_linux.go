package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// dieWithParent has the kernel kill the command when we are killed. What the command
// started itself is out of reach then.
func dieWithParent(a *syscall.SysProcAttr) {
	a.Pdeathsig = syscall.SIGKILL
	// Orphans of the command come to us and not to pid 1: they are reaped also where
	// pid 1 does not, and where we are pid 1.
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
}

// waitFor: all children are ours to reap, the command and its orphans.
func waitFor(int) int { return -1 }

func reapOrphans() {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if err != unix.EINTR && (err != nil || pid == 0) {
			return
		}
	}
}
