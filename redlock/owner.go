package redlock

import (
	"crypto/rand"
	"encoding/hex"
	"net/url"
	"strconv"
	"strings"
)

// owner is the identity of one attempt, as it stands in the votes:
//
//	h1.BIRTH.INBOX.RANDOM[.LABEL]
//
// with the claim's birth in 16 decimal digits of microseconds, the inbox of the store
// value that made it, 128 random bits, and a label for people, percent-encoded. A vote of
// any other form belongs to another library; its birth is zero.
type owner struct {
	text  string
	birth int64
	label string
}

const (
	maxLabel = 64 // bytes, encoded

	ownerBirth = len("h1.") // where the parts of an owner of ours begin
	ownerInbox = ownerBirth + 16
)

// newOwner makes the owner of a fresh attempt. The random part comes from crypto/rand, so
// that copies of one process never share one.
func newOwner(birth int64, inbox, label string) owner {
	var random [16]byte
	rand.Read(random[:])
	var buf [256]byte
	b := append(buf[:0], "h1."...)
	for limit := int64(1e15); limit > 1 && birth < limit; limit /= 10 {
		b = append(b, '0')
	}
	b = append(strconv.AppendInt(b, birth, 10), '.')
	b = append(append(b, inbox...), '.')
	b = hex.AppendEncode(b, random[:])
	if label != "" {
		b = append(append(b, '.'), label...)
	}
	return owner{text: string(b), birth: birth}
}

// newInbox names a store value.
func newInbox() string {
	var random [8]byte
	rand.Read(random[:])
	return hex.EncodeToString(random[:])
}

// encodeLabel percent-encodes a label and cuts it, never within an escape.
func encodeLabel(label string) string {
	e := url.PathEscape(label)
	if len(e) <= maxLabel {
		return e
	}
	e = e[:maxLabel]
	if i := strings.LastIndexByte(e, '%'); i > maxLabel-3 {
		e = e[:i]
	}
	return e
}

// parseOwner reads a vote.
func parseOwner(text string) owner {
	o := owner{text: text}
	parts := strings.SplitN(text, ".", 5)
	if len(parts) < 4 || parts[0] != "h1" || len(parts[1]) != 16 {
		return o
	}
	birth, err := strconv.ParseUint(parts[1], 10, 63)
	if err != nil || birth == 0 {
		return o
	}
	o.birth = int64(birth)
	if len(parts) == 5 {
		if label, err := url.PathUnescape(parts[4]); err == nil {
			o.label = label
		}
	}
	return o
}

// foreign reports whether the vote is another library's.
func (o owner) foreign() bool { return o.birth == 0 }
