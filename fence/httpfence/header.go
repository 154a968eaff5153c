package httpfence

import (
	"errors"
	"net/http"

	"github.com/holdfast-go/holdfast/fence"
)

// Header is the request header that carries a fencing token: 1 to 19 decimal digits, as
// [fence.Token] is written. It is not a structured field of RFC 9651, whose integers end at
// 15 digits. X-Fencing-Token, which older services use, is read as well.
const Header = "Fencing-Token"

const altHeader = "X-" + Header

// ErrMissing is answered where a request that needs a fencing token carries none.
var ErrMissing = errors.New("no " + Header + " header")

// ParseHeader reads the token of a request: [ErrMissing] where there is none, and a
// [*fence.InvalidError] where the header is repeated, where it and X-Fencing-Token differ, and
// where the value is no token: empty, signed, with spaces, zero, or beyond int64.
func ParseHeader(h http.Header) (fence.Token, error) {
	values, alt := h[Header], h[altHeader]
	if len(values) == 0 {
		values, alt = alt, nil
	}
	switch {
	case len(values) == 0:
		return 0, ErrMissing
	case len(values) > 1 || len(alt) > 1:
		return 0, invalidToken("", "the header "+Header+" must come once")
	case len(alt) == 1 && alt[0] != values[0]:
		return 0, invalidToken(alt[0], altHeader+" must be equal to "+Header+", or absent")
	}
	t, err := fence.ParseToken(values[0])
	if err != nil {
		return 0, invalidToken(values[0], "the header "+Header+" must be decimal digits, without sign, space or leading zero, from 1 to 9223372036854775807")
	}
	return t, nil
}

func invalidToken(value, rule string) error {
	return &fence.InvalidError{Field: "token", Value: value, Rule: rule}
}
