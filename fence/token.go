// Package fence holds the fencing token, the number that a lease carries and that grows
// with each grant of a key, and the contract of the guard: the check at the resource that
// remembers the highest token it has seen and refuses smaller ones.
//
// A lock alone cannot protect a resource: a holder may be paused past the end of its lease
// and write once it wakes. What protects is the resource that refuses a smaller token
// (Kleppmann, "How to do distributed locking", 2016). Guards for databases, for Redis and for
// services over HTTP are in sqlfence, redisfence and httpfence; [Memory] is the reference.
//
// The rule for every holder is: claim before the first read. Until the new holder's first
// [Guard] Claim the former holder's writes still pass, and what was read before them is old.
//
// The package knows nothing of locks, so a service that only checks tokens
// imports nothing else.
package fence

import (
	"context"
	"errors"
	"fmt"
	"strconv"
)

// Token is a fencing token. A later grant of the same key always carries a
// larger one; tokens of different keys are not comparable. Valid tokens are
// positive; the zero value means that there is none, and guards refuse it.
// See Kleppmann, "How to do distributed locking" (2016).
type Token int64

// ErrToken is answered by [ParseToken] for text that is no token.
var ErrToken = errors.New("fence: not a fencing token")

// String returns the token in decimal, without leading zeros.
func (t Token) String() string { return strconv.FormatInt(int64(t), 10) }

// ParseToken reads what [Token.String] wrote: one to nineteen decimal digits,
// no sign, no leading zero, larger than zero. Everything else is [ErrToken].
func ParseToken(s string) (Token, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n <= 0 || strconv.FormatInt(n, 10) != s {
		return 0, fmt.Errorf("%w: %.40q: want decimal digits without sign or leading zero, from 1 to 9223372036854775807", ErrToken, s)
	}
	return Token(n), nil
}

type contextKey struct{}

// keyed is a context that carries a token.
type keyed struct {
	context.Context
	key     string
	token   Token
	refused func(*StaleError) // nil where nobody needs to be told
	outer   *keyed            // the next one that it carries
}

func (k *keyed) Value(key any) any {
	if key == (contextKey{}) {
		return k
	}
	return k.Context.Value(key)
}

// WithToken returns a context that carries the token of a lease on key. Leases
// of several keys can be carried by one context.
func WithToken(ctx context.Context, key string, t Token) context.Context {
	return WithHolder(ctx, key, t, nil)
}

// WithHolder is [WithToken] for the holder's own process: when a guard that is given the
// context finds the token stale, refused is called, before the guard's call returns. It may be
// called many times, from any goroutine, and must not block. The context of a lease is made
// so, and ends when a guard refuses its token.
func WithHolder(ctx context.Context, key string, t Token, refused func(*StaleError)) context.Context {
	outer, _ := ctx.Value(contextKey{}).(*keyed)
	return &keyed{ctx, key, t, refused, outer}
}

// FromContext returns the token that ctx carries for key, the innermost where
// there are several. It is zero, and ok false, where there is none.
func FromContext(ctx context.Context, key string) (t Token, ok bool) {
	k, _ := ctx.Value(contextKey{}).(*keyed)
	for ; k != nil; k = k.outer {
		if k.key == key {
			return k.token, true
		}
	}
	return 0, false
}

// Innermost returns the key and the token that were put into ctx last. They are
// empty, and ok false, where it carries none.
func Innermost(ctx context.Context) (key string, t Token, ok bool) {
	k, _ := ctx.Value(contextKey{}).(*keyed)
	if k == nil {
		return "", 0, false
	}
	return k.key, k.token, true
}

// holders returns what to call when a guard of the resource refuses t. The resource may have
// another name than the key of the lock, so that the token decides; where several leases have
// the same one, a key that is the resource's name does.
func holders(ctx context.Context, resource string, t Token) []func(*StaleError) {
	var named, all []func(*StaleError)
	k, _ := ctx.Value(contextKey{}).(*keyed)
	for ; k != nil; k = k.outer {
		if k.token != t || k.refused == nil {
			continue
		}
		all = append(all, k.refused)
		if k.key == resource {
			named = append(named, k.refused)
		}
	}
	if named != nil {
		return named
	}
	return all
}
