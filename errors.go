package holdfast

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// The kinds of failure, for [errors.Is]. They are those of package store.
var (
	// ErrHeld: another holds the key. The error is a [*HeldError] where the holder is known.
	ErrHeld = store.ErrHeld
	// ErrLost: the lease was ours and is not any more. Lost is final.
	ErrLost = store.ErrLost
	// ErrReleased: the lease was given back by its holder.
	ErrReleased = store.ErrReleased
	// ErrUncertain: the store may have acted, or may act later.
	ErrUncertain = store.ErrUncertain
	// ErrUnavailable: the store cannot decide now.
	ErrUnavailable = store.ErrUnavailable
	// ErrUnsupported: this store cannot do what was asked.
	ErrUnsupported = store.ErrUnsupported
	// ErrInvalid: an input, or the state of a server, breaks a rule that the error names.
	ErrInvalid = store.ErrInvalid
)

var (
	// ErrAlreadyHeld answers an acquisition inside the context of a lease on the same key
	// of the same store: waiting for oneself would never end.
	ErrAlreadyHeld = errors.New("already held by this call chain: its context carries a lease on the key")

	// ErrMaxHold is the cause of a loss by [Options.MaxHold]. It answers [ErrLost].
	ErrMaxHold error = &ending{"lease lost: max hold reached", ErrLost}

	// ErrHandedOver is how a lease ends whose ticket was taken. It answers [ErrReleased]:
	// the holder gave the lease away by its own will.
	ErrHandedOver error = &ending{"lease handed over by its ticket", ErrReleased}

	errTokenChanged error = &ending{"lease lost: the store extended it under another fencing token", ErrLost}
)

type (
	// HeldError says who holds the key. It answers [ErrHeld].
	HeldError = store.HeldError
	// LostError says that a lease is gone from the store, and who holds the key now.
	LostError = store.LostError
	// InvalidError names the value that was refused and the rule. It answers [ErrInvalid].
	InvalidError = store.InvalidError
)

// Error is what every failing call of this package returns: which call, for which key,
// on which store, and why. It wraps once; [errors.Is] and [errors.As] reach the kind, the
// details and the raw error of the client underneath.
type Error struct {
	Op    string // "new", "acquire", "hold", "extend", "release", "ticket", "adopt", "do"
	Key   string // empty where the call is about no key
	Store string // Info.Name; empty where there is no store
	Err   error
}

// Error returns one line.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("holdfast: " + e.Op)
	if e.Key != "" {
		b.WriteString(" " + quoteKey(e.Key))
	}
	if e.Store != "" {
		b.WriteString(" on " + e.Store)
	}
	b.WriteString(": " + oneLine.Replace(e.Err.Error()))
	return b.String()
}

// Unwrap returns the reason.
func (e *Error) Unwrap() error { return e.Err }

// ExpiredError is the cause of a loss by time: the validity ran out before an extension
// was confirmed. It answers [ErrLost], and unwraps to the last failure.
type ExpiredError struct {
	Held    time.Duration // from the grant to the end of the validity
	Failing time.Duration // for how long extensions had failed then; zero where none did
	Since   time.Time     // when the first of them failed, by the wall clock; zero where none did
	Err     error         // the last failure; nil where there was none
}

func (e *ExpiredError) Error() string {
	s := fmt.Sprintf("lease lost: its validity ran out after %v", round(e.Held))
	if e.Err == nil {
		return s + ", not extended"
	}
	return fmt.Sprintf("%s, extensions failed for %v: %v", s, round(e.Failing), e.Err)
}

// Is reports whether target is [ErrLost].
func (e *ExpiredError) Is(target error) bool { return target == ErrLost }

// Unwrap returns the last failure, or nil.
func (e *ExpiredError) Unwrap() error { return e.Err }

// refusedError is the cause of a loss by a guard's answer. It answers [ErrLost], and the
// guard's [fence.ErrStale].
type refusedError struct{ stale *fence.StaleError }

func (e *refusedError) Error() string        { return "lease lost: its token was refused: " + e.stale.Error() }
func (e *refusedError) Is(target error) bool { return target == ErrLost }
func (e *refusedError) Unwrap() error        { return e.stale }

// ending is a sentinel that answers for a kind as well.
type ending struct {
	text string
	kind error
}

func (e *ending) Error() string        { return e.text }
func (e *ending) Is(target error) bool { return target == e.kind }

// joined is errors.Join on one line.
type joined []error

// join returns nil, the only error that is not nil, or all of them on one line.
func join(errs ...error) error {
	var j joined
	for _, err := range errs {
		if err != nil {
			j = append(j, err)
		}
	}
	switch len(j) {
	case 0:
		return nil
	case 1:
		return j[0]
	}
	return j
}

func (j joined) Error() string {
	texts := make([]string, len(j))
	for i, err := range j {
		texts[i] = oneLine.Replace(err.Error())
	}
	return strings.Join(texts, "; ")
}

func (j joined) Unwrap() []error { return j }

// contextError returns why ctx is done: its error, and its cause where that says more.
func contextError(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if cause == nil || errors.Is(err, cause) {
		return err
	}
	return fmt.Errorf("%w: %w", err, cause)
}

// useless reports whether trying again cannot mend err.
func useless(err error) bool {
	return errors.Is(err, ErrInvalid) || errors.Is(err, ErrUnsupported)
}

// kinded makes sure that a store's error answers one of the kinds: a client's own error,
// or that of a context, says nothing about what the server did.
func kinded(err error) error {
	for _, kind := range []error{ErrHeld, ErrLost, ErrReleased, ErrUncertain, ErrUnavailable, ErrUnsupported, ErrInvalid} {
		if errors.Is(err, kind) {
			return err
		}
	}
	return fmt.Errorf("%w: %w", ErrUncertain, err)
}

var oneLine = strings.NewReplacer("\r\n", "; ", "\n", "; ", "\r", "; ")

// quoteKey quotes a key for people, cut where it is long.
func quoteKey(key string) string {
	if len(key) > 80 {
		return strconv.Quote(key[:77]) + "..."
	}
	return strconv.Quote(key)
}

// round cuts a duration to what people read.
func round(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(10 * time.Millisecond)
	}
	return d.Round(100 * time.Microsecond)
}
