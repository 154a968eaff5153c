//go:build !linux

package clock

import (
	"errors"
	"time"
)

// bootAt reads the wall clock: it runs on while the machine sleeps.
func bootAt(now time.Time) time.Duration { return time.Duration(now.UnixNano()) }

// BootID fails: there is no clock here that all processes share and nobody can set.
func BootID() (string, error) {
	return "", errors.New("this system has no clock that counts sleep, is shared by all processes and cannot be set")
}
