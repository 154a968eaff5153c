//go:build unix

package main

// inForeground reports whether we may write to the terminal at any time: a job in the
// background would write into what others do.
func (w *writer) inForeground() bool { return inForeground(w.to) }
