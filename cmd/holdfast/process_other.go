//go:build !unix && !windows

package main

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
)

var (
	ending  = []os.Signal{os.Interrupt, syscall.SIGTERM}
	passing []os.Signal
)

func ignorePipe() {}

// child is a started command. There are no process groups here: only the command itself
// is ended, and only by force; an interrupt of the console reaches it without us.
type child struct {
	cmd *exec.Cmd
}

func start(cmd *exec.Cmd, _ supervision) (*child, error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &child{cmd}, nil
}

func (c *child) wait() int {
	err := c.cmd.Wait()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		return exitFailed
	}
	return c.cmd.ProcessState.ExitCode()
}

func (c *child) forward(os.Signal) {}

func (c *child) terminate() {}

func (c *child) kill() { _ = c.cmd.Process.Kill() } // fails where it has ended

func (c *child) remains() bool { return false }

func (c *child) close() {}
