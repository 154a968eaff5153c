//go:build !linux

package clock

import (
	"errors"
	"time"
)

// bootNow reads the wall clock: it runs on while the machine sleeps.
func bootNow() time.Duration { return time.Duration(time.Now().UnixNano()) }

// BootID fails: there is no clock here that all processes share and nobody can set.
func BootID() (string, error) {
	return "", errors.New("this system has no clock that counts sleep, is shared by all processes and cannot be set")
}
