//go:build !linux && !darwin && !freebsd && !netbsd && !openbsd

package servertest

import "os/exec"

func dieWithParent(*exec.Cmd)   {}
func dieByQuit(*exec.Cmd)       {}
func runAs(*exec.Cmd, int, int) {}

func killPID(int)                 {}
func quitPID(int)                 {}
func children(int) ([]int, error) { return nil, ErrNoPause }

func sendStop(int) error          { return ErrNoPause }
func sendCont(int) error          { return ErrNoPause }
func isStopped(int) (bool, error) { return false, ErrNoPause }
