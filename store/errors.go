package store

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// The kinds of failure. Every error of a store answers [errors.Is] for at least one
// of them, or is the context's own error.
var (
	ErrHeld        = errors.New("held by another")
	ErrLost        = errors.New("lease lost")
	ErrReleased    = errors.New("lease released")
	ErrUncertain   = errors.New("outcome uncertain: the store may have acted")
	ErrUnavailable = errors.New("store unavailable")
	ErrUnsupported = errors.New("not supported")
	ErrInvalid     = fence.ErrInvalid
)

// Limits of keys and ttls that hold for every store, so that a program can change
// its store and keep its keys.
const (
	MaxKeyLen = 512                    // bytes
	MinTTL    = 100 * time.Millisecond // no store keeps a shorter one
)

// HeldError says that another holds the key. It answers [ErrHeld].
type HeldError struct {
	Holder Holder // as far as known; Holder.TTL is what remains of its grant
	Place  int    // place in the store's queue, from 1; zero where unknown or none
}

func (e *HeldError) Error() string {
	var b strings.Builder
	h := e.Holder
	if h.Broken {
		b.WriteString("taken from its holder: ")
	} else {
		b.WriteString("held by ")
	}
	switch {
	case h.Label != "":
		b.WriteString(strconv.Quote(h.Label))
	case h.Foreign:
		b.WriteString("another library's lock " + quoteShort(h.Owner))
	default:
		b.WriteString("another")
	}
	switch {
	case h.NoTTL && h.Foreign:
		b.WriteString(", without a ttl, or data at the key")
	case h.NoTTL:
		b.WriteString(", without a ttl")
	case h.Session && h.Broken:
		b.WriteString(", free when its holder notices, or where that died, when its session ends")
	case h.Session:
		b.WriteString(" until it releases, or its session ends")
	case h.TTL > 0 && h.Broken:
		fmt.Fprintf(&b, ", free in at most %v", h.TTL.Round(time.Millisecond))
	case h.TTL > 0:
		fmt.Fprintf(&b, ", for at most %v unless extended", h.TTL.Round(time.Millisecond))
	}
	if e.Place > 0 {
		fmt.Fprintf(&b, ", place %d in the queue", e.Place)
	}
	return b.String()
}

// Is reports whether target is [ErrHeld].
func (e *HeldError) Is(target error) bool { return target == ErrHeld }

// LostError says why a grant is gone from the store. It answers [ErrLost], and
// [ErrHeld] where another holds the key now.
type LostError struct {
	By *HeldError // who holds the key now; nil where nobody does
}

func (e *LostError) Error() string {
	if e.By != nil {
		return "lease lost: " + e.By.Error()
	}
	return "lease lost: gone from the store"
}

// Is reports whether target is [ErrLost].
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns the holder, if there is one.
func (e *LostError) Unwrap() error {
	if e.By == nil {
		return nil
	}
	return e.By
}

// InvalidError refuses an input before any I/O, or a server whose state contradicts
// the configuration. It answers [ErrInvalid], and is one with the guards' [fence.InvalidError].
type InvalidError = fence.InvalidError

// quoteShort quotes s on one line, cut where it is long.
func quoteShort(s string) string {
	if len(s) > 80 {
		return strconv.Quote(s[:77]) + "..."
	}
	return strconv.Quote(s)
}

// CheckKey refuses a key that no store takes. Keys are bytes: 1 to [MaxKeyLen] of
// them, no NUL, not ending in ":fence" or ":queue" and not beginning with
// "{holdfast}:", which are the names of Holdfast's own records. They are compared
// byte by byte, on every store.
func CheckKey(key string) error {
	rule := ""
	switch {
	case key == "":
		return &InvalidError{Field: "key", Value: "", Rule: "must not be empty"}
	case len(key) > MaxKeyLen:
		rule = fmt.Sprintf("must have at most %d bytes, has %d", MaxKeyLen, len(key))
	case strings.IndexByte(key, 0) >= 0:
		rule = "must not contain NUL"
	case strings.HasSuffix(key, ":fence"), strings.HasSuffix(key, ":queue"):
		rule = "must not end in :fence or :queue, the names of a lock's own records"
	case strings.HasPrefix(key, "{holdfast}:"):
		rule = "must not begin with {holdfast}:, the names of a node's own records"
	default:
		return nil
	}
	return &InvalidError{Field: "key", Value: key, Rule: rule}
}
