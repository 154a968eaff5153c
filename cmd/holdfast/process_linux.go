package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
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

// systemSignals are more signals that end a program. The real-time ones before 35 belong
// to the C library.
func systemSignals() []os.Signal {
	signals := []os.Signal{unix.SIGPWR, unix.SIGSTKFLT}
	for n := syscall.Signal(35); n <= 64; n++ {
		signals = append(signals, n)
	}
	return signals
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

// allZombies reports whether a process group has members, and none of them can run.
func allZombies(group int) bool {
	found := false
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue // it has just ended
		}
		// "pid (name) state parent group ...", and the name may hold anything.
		f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(f) < 3 || string(f[2]) != strconv.Itoa(group) {
			continue
		}
		if state := string(f[0]); state != "Z" && state != "X" {
			return false
		}
		found = true
	}
	return found
}
