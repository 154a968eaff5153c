package store

import (
	"context"
	"time"
)

// NodeEvent tells what one server of a store answered to one request. It is told
// synchronously, also for answers that come after the call has returned.
type NodeEvent struct {
	Node    string // name, without credentials
	Op      string // "acquire", "extend", "release", "admit", "inspect", "list", "break"
	Key     string // empty for a request that is about no key
	Outcome string // the store's word for the answer, such as "ok", "busy", "no answer"
	Err     error  // why there was no answer; nil where there was
	Elapsed time.Duration
	Holder  Holder // for "inspect", "list" and "break": whose vote this server has, if anybody's
}

type traceKey struct{}

// WithTrace returns a context under which a store tells f about its servers. f must
// not block and must be safe for concurrent use.
func WithTrace(ctx context.Context, f func(NodeEvent)) context.Context {
	return context.WithValue(ctx, traceKey{}, f)
}

// Trace returns the function given to [WithTrace], or nil.
func Trace(ctx context.Context) func(NodeEvent) {
	f, _ := ctx.Value(traceKey{}).(func(NodeEvent))
	return f
}
