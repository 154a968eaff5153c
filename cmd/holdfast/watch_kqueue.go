//go:build darwin || dragonfly || freebsd || netbsd || openbsd

package main

import (
	"time"

	"golang.org/x/sys/unix"
)

// watchProcess returns a channel that is closed when the process has ended, also where
// nobody has reaped it yet. A later process of the same id is another one. One that does not
// exist has ended.
func watchProcess(pid int) (<-chan struct{}, error) {
	queue, err := unix.Kqueue()
	if err != nil {
		return nil, err
	}
	var end unix.Kevent_t
	unix.SetKevent(&end, pid, unix.EVFILT_PROC, unix.EV_ADD)
	end.Fflags = unix.NOTE_EXIT
	_, err = unix.Kevent(queue, []unix.Kevent_t{end}, nil, nil)
	if err != nil && err != unix.ESRCH {
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
			n, err := unix.Kevent(queue, nil, make([]unix.Kevent_t, 1), nil)
			if n > 0 {
				return
			}
			if err != unix.EINTR { // nothing that says that the process has ended
				time.Sleep(100 * time.Millisecond)
			}
		}
	}()
	return gone, nil
}
