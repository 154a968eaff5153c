package redisfence

import (
	"context"
	_ "embed"
	"errors"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
)

// Counter mints tokens by INCR, for users of a lock that has none. It is safe for concurrent use.
//
// Take a number after the lock was granted, and before the first [Guard] Claim. What it loses
// against a lock that mints its tokens itself: it is a second server to ask, without which nobody
// can work; and a failover to a replica that had not got the latest INCR, a restart without
// appendfsync always, an eviction or a backup that is restored give the same numbers once more,
// so that two holders have the same token and no guard can tell them apart. Keep the counter
// without a ttl, on a server with maxmemory-policy noeviction.
type Counter struct {
	eval   Eval
	key    string
	script string
}

//go:embed counter.lua
var counterText string

// NewCounter returns the counter at key, which is its own. It does no I/O. A counter starts at 1;
// to go on where another left off, SET the key before.
func NewCounter(eval Eval, key string) (*Counter, error) {
	if err := checkEval(eval); err != nil {
		return nil, err
	}
	if key == "" {
		return nil, &fence.InvalidError{Field: "key", Rule: "must not be empty"}
	}
	return &Counter{eval, key, script(counterText)}, nil
}

// Next returns the next number, larger than all before. After [fence.ErrUncertain] one number may
// have been used up, which does no harm: call it again. What is at the key and is no token, or is
// the last one, is an [*fence.InvalidError]. It waits for 5 s at the most.
func (c *Counter) Next(ctx context.Context) (fence.Token, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	v, err := ask(ctx, c.eval, defaultTimeout, c.script, []string{c.key}, nil)
	if err != nil {
		return 0, c.failure(err)
	}
	text, _ := v.(string)
	t, err := fence.ParseToken(text)
	if err != nil {
		return 0, c.failure(unexpected(v))
	}
	return t, nil
}

func (c *Counter) failure(err error) error {
	kind := fence.ErrUncertain
	var reply serverError
	var invalid *fence.InvalidError
	switch {
	case errors.As(err, &reply):
		kind = fence.ErrUnavailable
		if why, ok := strings.CutPrefix(reply.Error(), "FENCE "); ok {
			why, what, _ := strings.Cut(why, " ")
			switch why {
			case "refused":
				err = errors.New(what)
			case "last":
				return &fence.InvalidError{Field: "counter", Value: c.key, Rule: "has given out the last token, " + what}
			default:
				return &fence.InvalidError{Field: "counter", Value: c.key, Rule: "holds no number that a counter could have left there"}
			}
		}
	case errors.As(err, &invalid):
		return invalid
	case neverSent(err):
		kind = fence.ErrUnavailable
	}
	return &fence.Error{Kind: kind, Resource: c.key, Err: err}
}
