//go:build holdfast_rules

package queue

import "github.com/holdfast-go/holdfast/redlock"

var moveWall = redlock.MoveWallClock
