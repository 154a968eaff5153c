//go:build !linux && !darwin && !freebsd && !netbsd && !openbsd

package servertest

import "os/exec"

func dieWithParent(*exec.Cmd) {}

func sendStop(int) error          { return ErrNoPause }
func sendCont(int) error          { return ErrNoPause }
func isStopped(int) (bool, error) { return false, ErrNoPause }
