//go:build !linux && !windows && !darwin && !dragonfly && !freebsd && !netbsd && !openbsd

package main

import "github.com/holdfast-go/holdfast"

// watchProcess: there is no way here to tell a process from a later one of the same id.
func watchProcess(int) (<-chan struct{}, error) { return nil, holdfast.ErrUnsupported }
