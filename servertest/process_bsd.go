//go:build darwin || freebsd || netbsd || openbsd

package servertest

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

func dieWithParent(*exec.Cmd) {}

func sendStop(pid int) error { return syscall.Kill(pid, syscall.SIGSTOP) }
func sendCont(pid int) error { return syscall.Kill(pid, syscall.SIGCONT) }

func isStopped(pid int) (bool, error) {
	out, err := exec.Command("ps", "-o", "state=", "-p", strconv.Itoa(pid)).Output()
	if err != nil {
		return false, os.ErrProcessDone
	}
	return strings.HasPrefix(strings.TrimSpace(string(out)), "T"), nil
}
