package main

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// watchProcess returns a channel that is closed when the process has ended, also where
// nobody has reaped it yet. A later process of the same id is another one. One that does not
// exist has ended.
func watchProcess(pid int) (<-chan struct{}, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case err == unix.ENOSYS || err == unix.EPERM: // before Linux 5.3, or forbidden by a filter
		return pollProcess(pid)
	case err != nil && err != unix.ESRCH:
		return nil, err
	}
	gone := make(chan struct{})
	if err == unix.ESRCH {
		close(gone)
		return gone, nil
	}
	go func() {
		defer close(gone)
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if n > 0 {
				return
			}
			if err != unix.EINTR { // nothing that says that the process has ended
				time.Sleep(pollEvery)
			}
		}
	}()
	return gone, nil
}

const pollEvery = 100 * time.Millisecond

// pollProcess does the same by the time at which the process was started.
func pollProcess(pid int) (<-chan struct{}, error) {
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		return nil, err
	}
	gone := make(chan struct{})
	started, err := startOf(pid)
	switch {
	case errors.Is(err, os.ErrNotExist):
		close(gone)
		return gone, nil
	case err != nil:
		return nil, err
	}
	go func() {
		defer close(gone)
		for {
			time.Sleep(pollEvery)
			now, err := startOf(pid)
			if errors.Is(err, os.ErrNotExist) || err == nil && now != started {
				return
			}
		}
	}()
	return gone, nil
}

// startOf returns when a process was started, in ticks since the boot. It is
// [os.ErrNotExist] where the process has ended.
func startOf(pid int) (string, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, unix.ESRCH) {
		return "", os.ErrNotExist
	}
	if err != nil {
		return "", err
	}
	// "pid (name) state ... starttime", and the name may hold anything.
	f := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	switch {
	case len(f) < 20:
		return "", errors.New("/proc/PID/stat cannot be read")
	case string(f[0]) == "Z" || string(f[0]) == "X":
		return "", os.ErrNotExist
	}
	return string(f[19]), nil
}
