package redisfence

import (
	"strings"

	"github.com/holdfast-go/holdfast/fence"
)

// MarkKey is the key of the mark of a resource: the prefix, {TAG} and the resource, where TAG is
// the resource's own hash tag, or the whole resource. So on a Redis Cluster the mark is in the
// slot of a data key whose hash tag is the resource, or that of the resource, as {account/123}:balance is; and no two
// resources share a mark. The name must be one that a guard takes.
func (g *Guard) MarkKey(resource string) string { return markKey(g.prefix, resource) }

// The tag has no }, so that the resource is what follows the first one.
func markKey(prefix, resource string) string {
	return prefix + "{" + tagFor(resource) + "}" + resource
}

// seqKey is the key of the record of steps.
func seqKey(prefix, resource string) string { return markKey(prefix+"seq:", resource) }

// tagFor is a hash tag for the slot of key.
func tagFor(key string) string {
	tag := hashTag(key)
	if strings.IndexByte(tag, '}') < 0 {
		return tag
	}
	return tagOf(slotOf(key))
}

// hashTag is the part of a key that a Cluster hashes: what stands between the first { and the
// next }, or all of it where that is nothing.
func hashTag(key string) string {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			return tag
		}
	}
	return key
}

const slots = 16384

// slotOf is the slot of a key: CRC16 (XMODEM) of what is hashed.
func slotOf(key string) uint16 {
	var crc uint16
	for _, c := range []byte(hashTag(key)) {
		crc = crc16(crc, c)
	}
	return crc % slots
}

func crc16(crc uint16, c byte) uint16 {
	crc ^= uint16(c) << 8
	for range 8 {
		if crc&0x8000 != 0 {
			crc = crc<<1 ^ 0x1021
		} else {
			crc <<= 1
		}
	}
	return crc
}

// tagOf is the first text of three letters or digits that has the slot. There is one for each.
func tagOf(slot uint16) string {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	for _, a := range []byte(letters) {
		crcA := crc16(0, a)
		for _, b := range []byte(letters) {
			crcAB := crc16(crcA, b)
			for _, c := range []byte(letters) {
				if crc16(crcAB, c)%slots == slot {
					return string([]byte{a, b, c})
				}
			}
		}
	}
	panic("redisfence: no tag for a slot") // a test has tried them all
}

// checkKeys refuses data keys that are none, or that are the guard's own. A script may look at the
// marks of other resources.
func (g *Guard) checkKeys(c call) error {
	mark, seq := g.MarkKey(c.resource), seqKey(g.prefix, c.resource)
	for _, key := range c.keys {
		switch {
		case key == "":
			return &fence.InvalidError{Field: "key", Rule: "must not be empty"}
		case key == mark, key == seq, !c.user && g.owns(key):
			return &fence.InvalidError{Field: "key", Value: key, Rule: "is where the guard keeps the mark of a resource; name the data otherwise"}
		}
	}
	return nil
}

// owns reports whether a key is the mark, or the record of steps, of any resource.
func (g *Guard) owns(key string) bool {
	for _, prefix := range []string{g.prefix, g.prefix + "seq:"} {
		rest, ok := strings.CutPrefix(key, prefix+"{")
		if _, resource, _ := strings.Cut(rest, "}"); ok && resource != "" && markKey(prefix, resource) == key {
			return true
		}
	}
	return false
}
