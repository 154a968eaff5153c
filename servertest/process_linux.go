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
	if cmd.SysProcAttr.Pdeathsig == 0 {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
}

// dieByQuit makes the end of this process a SIGQUIT for cmd.
func dieByQuit(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGQUIT}
}

func runAs(cmd *exec.Cmd, uid, gid int) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
}

func killPID(pid int) { _ = syscall.Kill(pid, syscall.SIGKILL) }
func quitPID(pid int) { _ = syscall.Kill(pid, syscall.SIGQUIT) }

// children answers the ids of the processes that pid has started.
func children(pid int) ([]int, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, stat := range stats {
		// id (name) state parent ...
		b, _ := os.ReadFile(stat) // the process may have just ended
		f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		if len(f) < 2 || string(f[1]) != strconv.Itoa(pid) {
			continue
		}
		kid, err := strconv.Atoi(filepath.Base(filepath.Dir(stat)))
		if err != nil {
			return nil, err
		}
		pids = append(pids, kid)
	}
	return pids, nil
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
