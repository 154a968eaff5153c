// Package fence holds the fencing token: the number that a lease carries and
// that a guarded resource compares.
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

type keyed struct {
	key   string
	token Token
	next  *keyed
}

// WithToken returns a context that carries the token of a lease on key. Leases
// of several keys can be carried by one context.
func WithToken(ctx context.Context, key string, t Token) context.Context {
	outer, _ := ctx.Value(contextKey{}).(*keyed)
	return context.WithValue(ctx, contextKey{}, &keyed{key, t, outer})
}

// FromContext returns the token that ctx carries for key, the innermost where
// there are several. It is zero, and ok false, where there is none.
func FromContext(ctx context.Context, key string) (t Token, ok bool) {
	k, _ := ctx.Value(contextKey{}).(*keyed)
	for ; k != nil; k = k.next {
		if k.key == key {
			return k.token, true
		}
	}
	return 0, false
}
