package redisfence

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// serverError is an error that the server replied, such as redlock.ServerError.
type serverError interface {
	error
	Code() string
}

// noAnswer is what a call gets whose reply did not come in time.
type noAnswer struct {
	after  time.Duration
	end    error // of ctx; nil where that goes on
	unsent error // why nothing was sent; nil where it may have been
}

func (e noAnswer) Error() string {
	after := e.after.Round(time.Millisecond).String()
	text := "no answer within " + after
	if e.unsent != nil {
		text = "no connection within " + after + ": " + e.unsent.Error()
	}
	if e.end != nil {
		text += ": " + e.end.Error()
	}
	return text
}

func (e noAnswer) Unwrap() error { return e.end }

func (e noAnswer) Is(target error) bool { return target == fence.ErrUnavailable && e.unsent != nil }

func isLate(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) || errors.Is(err, os.ErrDeadlineExceeded)
}

// neverSent says that the server has seen nothing of a request.
func neverSent(err error) bool {
	var op *net.OpError
	var untrusted *tls.CertificateVerificationError
	return errors.Is(err, fence.ErrUnavailable) || errors.As(err, &op) && op.Op == "dial" || errors.As(err, &untrusted)
}

// failure turns an error of Eval into one of the guard.
func (g *Guard) failure(ctx context.Context, c call, err error) error {
	var reply serverError
	var invalid *fence.InvalidError
	switch {
	case errors.As(err, &invalid):
		return invalid
	case neverSent(err):
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: c.resource, Err: err}
	case errors.As(err, &reply):
		return g.refusal(ctx, c, reply)
	case c.safe:
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: c.resource, Err: err}
	}
	return &fence.Error{Kind: fence.ErrUncertain, Resource: c.resource, Err: err}
}

// refusal turns an error reply of the server into an error of the guard.
func (g *Guard) refusal(ctx context.Context, c call, reply serverError) error {
	text := reply.Error()
	if why, ok := strings.CutPrefix(text, "FENCE "); ok {
		why, what, _ := strings.Cut(why, " ")
		if err := g.ownRefusal(ctx, c, why, what); err != nil {
			return err
		}
	}
	kind := fence.ErrUnavailable
	switch {
	case c.user && notTaken.MatchString(text):
		return &fence.InvalidError{Field: "script", Rule: "the server does not take it: " + text}
	case c.user && mayHaveRun(reply):
		kind = fence.ErrUncertain
	case reply.Code() == "CROSSSLOT":
		return g.crossSlot(c)
	case c.user:
	case strings.Contains(text, "WRONGTYPE"):
		return &fence.InvalidError{Field: "key", Value: strings.Join(c.keys, " "), Rule: "holds another kind of value"}
	case strings.Contains(text, "is not an integer"), strings.Contains(text, "would overflow"):
		return &fence.InvalidError{Field: "key", Value: strings.Join(c.keys, " "), Rule: "cannot be increased by " + strings.Join(c.args, " ") + ": " + text}
	}
	return &fence.Error{Kind: kind, Resource: c.resource, Err: reply}
}

// ownRefusal turns what the guard's own part of a script has refused into an error.
func (g *Guard) ownRefusal(ctx context.Context, c call, why, what string) error {
	switch why {
	case "stale":
		if seen, err := fence.ParseToken(what); err == nil {
			return fence.Stale(ctx, c.resource, c.token, seen)
		}
	case "applied":
		return &fence.Error{Kind: fence.ErrApplied, Resource: c.resource, Err: fmt.Errorf("step %d of token %v; step %s was the last", c.seq, c.token, what)}
	case "refused":
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: c.resource, Err: errors.New(what)}
	case "vote":
		if i, err := strconv.Atoi(what); err == nil && 0 < i && i <= len(c.keys) {
			return &fence.InvalidError{Field: "key", Value: c.keys[i-1], Rule: fmt.Sprintf(
				"holds a lock, which must not be written over; keep the data at another key, such as {%s}:data", hashTag(c.resource))}
		}
	case "mark":
		return g.badMark(c, g.MarkKey(c.resource), what)
	case "seq":
		return g.badMark(c, seqKey(g.prefix, c.resource), what)
	case "type":
		return g.badMark(c, g.MarkKey(c.resource), "")
	}
	return nil
}

func (g *Guard) badMark(c call, key, value string) error {
	return &fence.InvalidError{Field: "mark", Value: value, Rule: fmt.Sprintf("what key %q holds is no fencing token; find out who writes there, and delete it when no holder of %q is left", key, c.resource)}
}

// crossSlot names the first key that is in another slot than the mark.
func (g *Guard) crossSlot(c call) error {
	value := strings.Join(c.keys, " ")
	for _, key := range c.keys {
		if slotOf(key) != slotOf(c.resource) {
			value = key
			break
		}
	}
	return &fence.InvalidError{Field: "key", Value: value, Rule: fmt.Sprintf(
		"is not in the hash slot of the resource %q: on a Cluster, give it the same hash tag, as in {%s}:data", c.resource, hashTag(c.resource))}
}

// notTaken is what a server says of a script that is none.
var notTaken = regexp.MustCompile(`^ERR (Error compiling script|(Invalid|Unexpected engine in|Unexpected flag in) script shebang|Unknown lua shebang)`)

// notRun is what a server says in the place of a script. The first word alone does not tell: a
// script may answer it too, after it has written.
var notRun = regexp.MustCompile(`^(OOM (command not allowed|allow-oom flag is not set)|READONLY (You can't write|Can not run script)` +
	`|LOADING \w+ is loading|MISCONF (\w+ is configured to save|Errors writing to the AOF)|NOREPLICAS Not enough good replicas` +
	`|NOPERM .*permissions to |NOAUTH (Authentication required|HELLO must be called)|WRONGPASS invalid username-password` +
	`|CLUSTERDOWN (The cluster is down|Hash slot not served)|MASTERDOWN Link with |BUSY \w+ (is busy running|module command)` +
	`|TRYAGAIN Multiple keys request|(MOVED|ASK) \d+ |CROSSSLOT Keys in request|NOSCRIPT No matching script)`)

// mayHaveRun says that the user's part of a script may have begun: the script itself answered the
// error, and not the server in its place.
func mayHaveRun(reply serverError) bool {
	text := reply.Error()
	return strings.Contains(text, "user_script") || strings.Contains(text, "in script") || !notRun.MatchString(text)
}
