package main

import (
	"time"

	"golang.org/x/sys/windows"
)

// watchProcess returns a channel that is closed when the process has ended. The handle
// keeps its id from being given to another one. One that does not exist has ended.
func watchProcess(pid int) (<-chan struct{}, error) {
	process, err := windows.OpenProcess(windows.SYNCHRONIZE, false, uint32(pid))
	if err != nil && err != windows.ERROR_INVALID_PARAMETER {
		return nil, err
	}
	gone := make(chan struct{})
	if err != nil {
		close(gone)
		return gone, nil
	}
	go func() {
		defer close(gone)
		for {
			event, _ := windows.WaitForSingleObject(process, windows.INFINITE)
			if event == windows.WAIT_OBJECT_0 {
				return
			}
			time.Sleep(100 * time.Millisecond) // nothing that says that the process has ended
		}
	}()
	return gone, nil
}
