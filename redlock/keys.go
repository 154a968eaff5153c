package redlock

import (
	"strings"

	"github.com/holdfast-go/holdfast/store"
)

// The names of a lock's records on a node. The vote is exactly the user's key behind the
// prefix, so that any SET NX PX lock on the same key excludes us and is excluded.
const (
	recordKey   = "{holdfast}:node"     // hash: maxttl in ms, trust
	promotedKey = "{holdfast}:promoted" // hash: when each replication id was first seen
	probeKey    = "{holdfast}:probe"    // sorted set: written by a client that is about to queue, gone at once
	checkedKey  = "{holdfast}:checked"  // replication id that was compared within the last second
)

// markKey names the mark beside a vote, in the same hash slot: {key}:fence. A key with a
// hash tag of its own keeps it and takes two colons, so that x and {x} share nothing.
func markKey(vote string) string { return string(appendMarkKey(nil, vote)) }

func appendMarkKey(b []byte, vote string) []byte { return appendBeside(b, vote, "fence") }

// queueKey names the queue beside a vote: {key}:queue.
func queueKey(vote string) string { return string(appendBeside(nil, vote, "queue")) }

func appendBeside(b []byte, vote, what string) []byte {
	if _, tagged := hashTag(vote); tagged {
		return append(append(append(b, vote...), "::"...), what...)
	}
	return append(append(append(append(b, '{'), vote...), "}:"...), what...)
}

// hashTag returns the part of a key that a Cluster hashes, and whether it is a tag: what
// stands between the first { and the next }, unless that is empty.
func hashTag(key string) (string, bool) {
	_, rest, found := strings.Cut(key, "{")
	if !found {
		return key, false
	}
	tag, _, found := strings.Cut(rest, "}")
	if !found || tag == "" {
		return key, false
	}
	return tag, true
}

// checkVote refuses what only the prefix makes the name of a record: that of a node, or of
// another lock. Those of a lock have a {.
func checkVote(vote, key string) error {
	suffixed := strings.HasSuffix(vote, ":fence") || strings.HasSuffix(vote, ":queue")
	if strings.HasPrefix(vote, "{holdfast}:") || suffixed && strings.IndexByte(vote, '{') >= 0 {
		return &store.InvalidError{Field: "key", Value: key, Rule: "gives " + vote + " with the prefix, which is the name of a record"}
	}
	return nil
}

// checkClusterKey refuses a key whose records cannot share its slot on a Cluster.
func checkClusterKey(vote string) error {
	if _, tagged := hashTag(vote); !tagged && strings.IndexByte(vote, '}') >= 0 {
		return clusterKeyError(vote)
	}
	return nil
}

func clusterKeyError(vote string) *store.InvalidError {
	return &store.InvalidError{Field: "key", Value: vote, Rule: "on a Redis Cluster a key that has a } must have a hash tag"}
}

const slots = 16384

// slotOf is the Cluster slot of a key: CRC16 (XMODEM) of its tag.
func slotOf(key string) uint16 {
	tag, _ := hashTag(key)
	var crc uint16
	for i := range len(tag) {
		crc ^= uint16(tag[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc % slots
}
