package servertest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

func dieWithParent(cmd *exec.Cmd) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
}

func sendStop(pid int) error { return syscall.Kill(pid, syscall.SIGSTOP) }
func sendCont(pid int) error { return syscall.Kill(pid, syscall.SIGCONT) }

func isStopped(pid int) (bool, error) {
	stats, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
	if len(stats) == 0 {
		return false, os.ErrProcessDone
	}
	for _, f := range stats {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has just ended
		}
		// The state follows the name in brackets, which may hold anything.
		i := bytes.LastIndexByte(b, ')')
		if i < 0 || i+2 >= len(b) {
			return false, nil
		}
		if s := b[i+2]; s == 'Z' || s == 'X' {
			return false, os.ErrProcessDone
		} else if s != 'T' && s != 't' {
			return false, nil
		}
	}
	return true, nil
}
