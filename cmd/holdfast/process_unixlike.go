//go:build unix && !linux

package main

import (
	"os"
	"syscall"
)

// dieWithParent: there is no such thing here. A command whose holdfast is killed by
// SIGKILL goes on, and the lease ends with its ttl.
func dieWithParent(*syscall.SysProcAttr) {}

func waitFor(pid int) int { return pid }

func reapOrphans() {}

func allZombies(int) bool { return false }

func systemSignals() []os.Signal { return nil }
