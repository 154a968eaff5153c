//go:build !holdfast_rules

package queue

import "time"

// moveWall moves the wall clock of the clients; nil where the build cannot.
var moveWall func(d time.Duration) (restore func())
