//go:build !holdfast_rules

package redlock

import "time"

func off(rule) bool { return false }

func switched(_, text string) string { return text }

// wallNow is the wall clock in microseconds.
func wallNow() int64 { return time.Now().UnixMicro() }
