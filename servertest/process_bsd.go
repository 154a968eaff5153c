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
func dieByQuit(*exec.Cmd)     {}

func runAs(cmd *exec.Cmd, uid, gid int) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
}

func killPID(pid int) { _ = syscall.Kill(pid, syscall.SIGKILL) }
func quitPID(pid int) { _ = syscall.Kill(pid, syscall.SIGQUIT) }

// children answers the ids of the processes that pid has started.
func children(pid int) ([]int, error) {
	out, err := exec.Command("ps", "-axo", "ppid=,pid=").Output()
	if err != nil {
		return nil, err
	}
	var pids []int
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == strconv.Itoa(pid) {
			kid, err := strconv.Atoi(f[1])
			if err != nil {
				return nil, err
			}
			pids = append(pids, kid)
		}
	}
	return pids, nil
}

func sendStop(pid int) error { return syscall.Kill(pid, syscall.SIGSTOP) }
func sendCont(pid int) error { return syscall.Kill(pid, syscall.SIGCONT) }

func isStopped(pid int) (bool, error) {
	out, err := exec.Command("ps", "-o", "state=", "-p", strconv.Itoa(pid)).Output()
	if err != nil {
		return false, os.ErrProcessDone
	}
	return strings.HasPrefix(strings.TrimSpace(string(out)), "T"), nil
}
