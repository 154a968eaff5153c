package zkstore

import (
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
)

const (
	ownerLen   = 32
	nodePrefix = "c-"
)

var nameEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// hashed is the path of a name below base: a hash, in one of 32 parts, so that no node has too many
// children for one answer of the server before there are half a million of them.
func hashed(base, name string) string {
	sum := sha256.Sum256([]byte(name))
	text := nameEncoding.EncodeToString(sum[:])
	return base + "/" + text[:1] + "/" + text
}

// newOwner returns 128 random bits in hexadecimal.
func newOwner() string {
	var b [ownerLen / 2]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// member is a node in the queue of a key.
type member struct {
	name  string
	owner string
	seq   int32
}

// parseMember reads the name that a sequential create has made: the owner, and the number as the
// server writes it, which turns negative after 2^31 creates.
func parseMember(name string) (member, bool) {
	rest, ok := strings.CutPrefix(name, nodePrefix)
	if !ok || len(rest) < ownerLen+2 || rest[ownerLen] != '-' {
		return member{}, false
	}
	owner, number := rest[:ownerLen], rest[ownerLen+1:]
	if _, err := hex.DecodeString(owner); err != nil || len(number) < 10 || number[0] == '+' || strings.Trim(number, "0") == "-" {
		return member{}, false
	}
	seq, err := strconv.ParseInt(number, 10, 32)
	if err != nil {
		return member{}, false
	}
	return member{name, owner, int32(seq)}, true
}

// members are the nodes of a queue in their order, by serial arithmetic, so that the order
// survives the wrap of the number. Names that are no claim's are left out.
func members(names []string) []member {
	var list []member
	for _, name := range names {
		if m, ok := parseMember(name); ok {
			list = append(list, m)
		}
	}
	slices.SortFunc(list, func(a, b member) int { return cmp.Compare(a.seq-b.seq, 0) })
	return list
}

// place is where an owner stands in the queue; -1 where it does not.
func place(list []member, owner string) int {
	return slices.IndexFunc(list, func(m member) bool { return m.owner == owner })
}
