package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"unsafe"

	"golang.org/x/sys/windows"
)

// ending: Ctrl+C and Ctrl+Break are Interrupt; the end of the console, the session and the
// system is SIGTERM.
var (
	ending  = []os.Signal{os.Interrupt, syscall.SIGTERM}
	passing []os.Signal
)

func ignorePipe() {}

// child is a started command in a job object of its own, with all that it starts. The system
// ends the job when its last handle is closed, and so also when we are killed.
type child struct {
	cmd *exec.Cmd
	job windows.Handle
}

// start starts cmd in a job and a process group of its own. It runs only when it is in the
// job, so that nothing that it starts can be outside.
func start(cmd *exec.Cmd, _ supervision) (*child, error) {
	job, err := newJob()
	if err != nil {
		return nil, err
	}
	c := &child{cmd, job}
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: windows.CREATE_SUSPENDED | windows.CREATE_NEW_PROCESS_GROUP}
	if err := cmd.Start(); err != nil {
		c.close()
		return nil, err
	}
	if err := c.begin(); err != nil {
		_ = cmd.Process.Kill() // it may not be in the job
		_ = cmd.Wait()
		c.close()
		return nil, err
	}
	return c, nil
}

// newJob makes a job object whose processes end with its last handle. They cannot leave it.
func newJob() (windows.Handle, error) {
	job, err := windows.CreateJobObject(nil, nil)
	if err != nil {
		return 0, fmt.Errorf("cannot make a job object: %w", err)
	}
	var limits windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION
	limits.BasicLimitInformation.LimitFlags = windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
	if _, err := windows.SetInformationJobObject(job, windows.JobObjectExtendedLimitInformation,
		uintptr(unsafe.Pointer(&limits)), uint32(unsafe.Sizeof(limits))); err != nil {
		windows.CloseHandle(job)
		return 0, fmt.Errorf("cannot set up a job object: %w", err)
	}
	return job, nil
}

// begin puts the suspended command into the job and lets it run.
func (c *child) begin() error {
	var err error
	if herr := c.cmd.Process.WithHandle(func(h uintptr) {
		err = windows.AssignProcessToJobObject(c.job, windows.Handle(h))
	}); herr != nil {
		err = herr
	}
	if err != nil {
		return fmt.Errorf("cannot put it into a job object: %w", err)
	}
	if err := resume(uint32(c.cmd.Process.Pid)); err != nil {
		return fmt.Errorf("cannot let it run: %w", err)
	}
	return nil
}

// resume lets the only thread of a suspended process run. Package os has closed the handle
// of that thread, so it is looked up.
func resume(pid uint32) error {
	snapshot, err := windows.CreateToolhelp32Snapshot(windows.TH32CS_SNAPTHREAD, 0)
	if err != nil {
		return err
	}
	defer windows.CloseHandle(snapshot)
	entry := windows.ThreadEntry32{Size: uint32(unsafe.Sizeof(windows.ThreadEntry32{}))}
	for err = windows.Thread32First(snapshot, &entry); err == nil; err = windows.Thread32Next(snapshot, &entry) {
		if entry.OwnerProcessID != pid {
			continue
		}
		thread, err := windows.OpenThread(windows.THREAD_SUSPEND_RESUME, false, entry.ThreadID)
		if err != nil {
			return err
		}
		defer windows.CloseHandle(thread)
		_, err = windows.ResumeThread(thread)
		return err
	}
	if errors.Is(err, windows.ERROR_NO_MORE_FILES) {
		return errors.New("its thread is not found")
	}
	return err
}

func (c *child) wait() int {
	err := c.cmd.Wait()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		return exitFailed
	}
	return c.cmd.ProcessState.ExitCode()
}

// forward: only Ctrl+Break can be sent to a process group, and so an Interrupt becomes one.
// The end of the console reaches the command without us.
func (c *child) forward(s os.Signal) {
	if s == os.Interrupt {
		c.terminate()
	}
}

// terminate sends Ctrl+Break to those of the command's process group that share our console.
// A program that does not handle it ends; one without a console hears nothing.
func (c *child) terminate() {
	_ = windows.GenerateConsoleCtrlEvent(windows.CTRL_BREAK_EVENT, uint32(c.cmd.Process.Pid)) // fails where nobody is left
}

func (c *child) kill() { _ = windows.TerminateJobObject(c.job, exitSignal+9) } // as where KILL ends it

// jobAccounting is JOBOBJECT_BASIC_ACCOUNTING_INFORMATION.
type jobAccounting struct {
	totalUserTime, totalKernelTime           int64
	thisPeriodUserTime, thisPeriodKernelTime int64
	totalPageFaultCount                      uint32
	totalProcesses                           uint32
	activeProcesses                          uint32
	totalTerminatedProcesses                 uint32
}

// remains reports whether processes of the job are left.
func (c *child) remains() bool {
	var a jobAccounting
	err := windows.QueryInformationJobObject(c.job, windows.JobObjectBasicAccountingInformation,
		uintptr(unsafe.Pointer(&a)), uint32(unsafe.Sizeof(a)), nil)
	return err == nil && a.activeProcesses > 0
}

// close ends what is left.
func (c *child) close() { windows.CloseHandle(c.job) }
