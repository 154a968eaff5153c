//go:build holdfast_rules

package tokens_test

import "github.com/holdfast-go/holdfast/redlock"

var moveWall = redlock.MoveWallClock
