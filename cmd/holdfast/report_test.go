package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

// A reason is new where something else is the matter, and not where only time has passed
// or another node was the last one to be heard of.
func TestReasonIsNew(t *testing.T) {
	held := func(owner string, ttl time.Duration) error {
		return &store.HeldError{Holder: store.Holder{Owner: owner, Label: "host:1", TTL: ttl}}
	}
	quorum := func(faults ...string) error {
		e := &redlock.QuorumError{Needed: 2}
		for i, f := range faults {
			n := redlock.NodeError{Node: string(rune('a' + i)), Outcome: "not waited for"}
			if f != "" {
				n.Err = errors.New(f)
			}
			e.Nodes = append(e.Nodes, n)
		}
		return e
	}
	r := &reporter{faults: map[string]string{}}
	last := ""
	for i, step := range []struct {
		why error
		new bool
	}{
		{held("o1", 9*time.Second), true},
		{held("o1", 1500*time.Millisecond), false},
		{held("o2", 9*time.Second), true},
		{quorum("refused", "votes in 27s", ""), true},
		{quorum("refused", "votes in 26s", ""), false},
		{quorum("", "votes in 25s", "no answer within 250ms"), true},
		{quorum("refused", "", "no answer within 250ms"), false},
		{quorum("refused", "reset", ""), true},
		{errors.New("disk I/O error after 1m3.5s"), true},
		{errors.New("disk I/O error after 1m13.25s"), false},
	} {
		r.Observe(context.Background(), holdfast.Waiting{Err: step.why})
		text, sort := r.reason()
		if text != step.why.Error() {
			t.Errorf("step %d: text %q, want %q", i, text, step.why)
		}
		if (sort != last) != step.new {
			t.Errorf("step %d: %v: new is %v, want %v", i, step.why, sort != last, step.new)
		}
		last = sort
	}
}
