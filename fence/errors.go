package fence

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The kinds of failure, for [errors.Is]. Every error of a guard answers at least one of
// them, or is the context's own error.
var (
	// ErrStale: the guard has seen a larger token, so that another has been granted the
	// lock since. It is final: nothing was written, and no retry will help.
	ErrStale = errors.New("stale fencing token")
	// ErrNoResource: the guard knows nothing of the resource. Nothing was written.
	ErrNoResource = errors.New("no such resource")
	// ErrUnclaimed: the guard has not seen this token yet. Claim comes before Check.
	ErrUnclaimed = errors.New("fencing token not claimed")
	// ErrApplied: a guard that takes each token, or each step of a token, once has taken
	// this one, or a later step of the same token, before. Nothing was written now.
	ErrApplied = errors.New("already applied")
	// ErrBusy: others used the resource for longer than the guard may wait. Nothing was
	// written.
	ErrBusy = errors.New("resource busy")
	// ErrUncertain: the resource may have been changed.
	ErrUncertain = errors.New("outcome uncertain: the resource may have been changed")
	// ErrUnavailable: the guard could not be asked. Nothing was written.
	ErrUnavailable = errors.New("guard unavailable")
	// ErrInvalid: an input, or the state of the resource, breaks a rule that the error
	// names. Nothing was written.
	ErrInvalid = errors.New("invalid")
)

// StaleError refuses a token because a larger one has been seen. It answers [ErrStale].
// Guards make it by [Stale].
type StaleError struct {
	Resource string
	Token    Token // as shown
	Seen     Token // the larger one
}

// Error returns one line.
func (e *StaleError) Error() string {
	return fmt.Sprintf("stale fencing token %v for %s: %v has been seen", e.Token, quoteShort(e.Resource), e.Seen)
}

// Is reports whether target is [ErrStale].
func (e *StaleError) Is(target error) bool { return target == ErrStale }

// Error is what a guard answers when it neither accepts a token nor finds it stale.
type Error struct {
	Kind     error  // one of this package's kinds
	Resource string // empty where the failure is about none
	Err      error  // what the resource said; nil where there is nothing to add
}

// Error returns one line.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("fence: ")
	if e.Resource != "" {
		b.WriteString(quoteShort(e.Resource) + ": ")
	}
	b.WriteString(e.Kind.Error())
	if e.Err != nil {
		b.WriteString(": " + strings.Join(strings.Fields(e.Err.Error()), " "))
	}
	return b.String()
}

// Unwrap returns the kind and the reason.
func (e *Error) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

// InvalidError refuses an input before any I/O, or a server or resource whose state
// contradicts the configuration. It answers [ErrInvalid].
type InvalidError struct {
	Field string // what is wrong: "resource", "token", "column"
	Value string // the value as given
	Rule  string // the rule that it breaks, and the remedy where there is one
}

// Error returns one line.
func (e *InvalidError) Error() string {
	if e.Value == "" {
		return fmt.Sprintf("invalid %s: %s", e.Field, e.Rule)
	}
	return fmt.Sprintf("invalid %s %s: %s", e.Field, quoteShort(e.Value), e.Rule)
}

// Is reports whether target is [ErrInvalid].
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// quoteShort quotes s on one line, cut where it is long.
func quoteShort(s string) string {
	if len(s) > 80 {
		return strconv.Quote(s[:77]) + "..."
	}
	return strconv.Quote(s)
}

// MaxResourceLen is the length of the longest name of a resource, in bytes.
const MaxResourceLen = 512

// CheckResource refuses, by an [*InvalidError], a name that no guard takes: names have 1 to
// [MaxResourceLen] bytes of UTF-8 without NUL, and are compared byte by byte.
func CheckResource(resource string) error {
	rule := ""
	switch {
	case resource == "":
		rule = "must not be empty"
	case len(resource) > MaxResourceLen:
		rule = fmt.Sprintf("must have at most %d bytes, has %d", MaxResourceLen, len(resource))
	case strings.IndexByte(resource, 0) >= 0:
		rule = "must not contain NUL"
	case !utf8.ValidString(resource):
		rule = "must be UTF-8"
	default:
		return nil
	}
	return &InvalidError{Field: "resource", Value: resource, Rule: rule}
}

// CheckToken refuses, by an [*InvalidError], a token that is zero or negative.
func CheckToken(t Token) error {
	if t > 0 {
		return nil
	}
	return &InvalidError{Field: "token", Value: t.String(), Rule: "must be positive; zero means that the lock's store minted none"}
}

// Stale is how a guard answers that it has seen a larger token: it tells the holder whose
// token ctx carries (see [WithHolder]), and returns the [*StaleError]. Call it with no lock
// held and with nothing open at the resource.
func Stale(ctx context.Context, resource string, t, seen Token) error {
	e := &StaleError{Resource: resource, Token: t, Seen: seen}
	for _, refused := range holders(ctx, resource, t) {
		refused(e)
	}
	return e
}
