//go:build !unix

package main

func (w *writer) inForeground() bool { return true }
