package main

import (
	"context"
	"errors"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
)

const (
	reportAfter = time.Second      // of waiting, and then whenever the reason changes
	repeatAfter = 10 * time.Second // also where it does not
)

// reporter tells stderr for what we wait, and what becomes of the lease. It is the
// Observer of the run.
type reporter struct {
	key  string
	lost chan holdfast.Lost // gets the loss of the lease

	mu       sync.Mutex
	why      error             // of the last attempt to acquire; nil before the first
	faults   map[string]string // of each node, as last seen
	failing  bool              // extensions fail, and that has been told
	acquired chan struct{}
	told     chan struct{} // closed when the goroutine that tells has ended
}

func newReporter(key string) *reporter {
	r := &reporter{key: key, faults: map[string]string{}, lost: make(chan holdfast.Lost, 1), acquired: make(chan struct{}), told: make(chan struct{})}
	go r.tell(time.Now())
	return r
}

// Observe implements [holdfast.Observer].
func (r *reporter) Observe(_ context.Context, e holdfast.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e := e.(type) {
	case holdfast.Waiting:
		r.why = e.Err
	case holdfast.AtRisk:
		if !r.failing {
			say("cannot extend the lease on %q, %v left: %v", e.Key, rounded(e.Left), e.Err)
		}
		r.failing = true
	case holdfast.Extended:
		if r.failing {
			say("the lease on %q is extended again", e.Key)
		}
		r.failing = false
	case holdfast.Lost:
		select {
		case r.lost <- e:
		default: // there is one lease, which is lost once
		}
	}
}

// waited ends the telling of a wait.
func (r *reporter) waited() {
	close(r.acquired)
	<-r.told
}

func (r *reporter) tell(began time.Time) {
	defer close(r.told)
	tick := time.NewTicker(reportAfter)
	defer tick.Stop()
	var last string
	var told time.Time
	for {
		select {
		case <-r.acquired:
			return
		case now := <-tick.C:
			text, sort := r.reason()
			if sort == last && now.Sub(told) < repeatAfter {
				continue
			}
			last, told = sort, now
			say("waiting for %q since %v: %s", r.key, now.Sub(began).Round(time.Second), text)
		}
	}
}

var durations = regexp.MustCompile(`\b([0-9.]+(h|m|s|ms|µs|ns))+\b`)

// reason says why we wait, and in sort the same without what changes all the time.
func (r *reporter) reason() (text, sort string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why == nil {
		return "no answer from the store yet", ""
	}
	text = r.why.Error()
	if held, ok := errors.AsType[*holdfast.HeldError](r.why); ok && held.Holder.Owner != "" {
		return text, "held by " + held.Holder.Owner
	}
	nodes, ok := errors.AsType[*redlock.QuorumError](r.why)
	if !ok {
		return text, durations.ReplaceAllString(text, "")
	}
	// Not every attempt hears of every node: what is new is a fault that is new for its node.
	for _, n := range nodes.Nodes {
		if n.Err != nil {
			r.faults[n.Node] = durations.ReplaceAllString(n.Error(), "")
		}
	}
	return text, strings.Join(slices.Sorted(maps.Values(r.faults)), "; ")
}

// rounded cuts a duration to what people read.
func rounded(d time.Duration) time.Duration { return d.Round(100 * time.Millisecond) }
