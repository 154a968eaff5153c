//go:build !holdfast_rules

package redlock

import (
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

func off(rule) bool { return false }

func switched(_, text string) string { return text }

// wallNow is the wall clock in microseconds.
func wallNow() int64 { return time.Now().UnixMicro() }

// storeClock measures validity.
func storeClock() clock.Clock { return clock.Clock{} }
