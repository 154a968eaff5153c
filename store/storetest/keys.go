package storetest

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var keyTests = []test{
	{name: "ByteExact", run: testKeysByteExact},
	{name: "Refused", run: testKeysRefused},
}

// hostileKeys are keys that differ in their bytes, and that some store somewhere takes for
// the same one, or for a path, a pattern, a statement or a hash tag. Each has the salt in
// it.
func hostileKeys(salt string) []string {
	keys := []string{
		// case, normal forms, look-alikes, full width
		"Job" + salt, "job" + salt, "JOB" + salt, "straße" + salt, "strasse" + salt,
		"\u00e9" + salt, "e\u0301" + salt, "\u0130" + salt, "i" + salt, "\uff4a\uff4f\uff42" + salt,
		"\u043eb" + salt, "ob" + salt, "\u212a" + salt, "k" + salt, "K" + salt,
		// white space
		" " + salt, salt, salt + " ", salt + "  ", salt + "\n", salt + "\r\n", salt + "\t", "\u00a0" + salt,
		salt + "\u200b", "\ufeff" + salt,
		// patterns, quotes, escapes, statements
		salt + "%", salt + "%%", salt + "_", salt + "*", salt + "?", salt + "[a]", salt + "\\", salt + "\\*",
		salt + "'", salt + "''", salt + `"`, salt + "`", salt + "$1", salt + "%41", salt + "A", salt + "%2F",
		salt + "'; DROP TABLE x; --",
		// paths and prefixes
		salt + "/", salt + "/b", salt + "/b/", "/" + salt, "//" + salt, salt + "/.", salt + "/..", "../" + salt,
		salt + "/../" + salt, ".", "..", ".." + salt, salt + ":", salt + ":b", ":" + salt, salt + "::b",
		salt + ":b:c", salt + "#b", salt + "?b", salt + "&b", salt + ",b",
		// hash tags
		"{" + salt + "}b", "{" + salt + "}", "{" + salt, salt + "}", "{}" + salt, "{{" + salt + "}}", "x{" + salt + "}y",
		"{" + salt + "}:", "{" + salt + "}:b",
		// names near those of Holdfast's own records
		salt + ":fence:", salt + ":fenc", salt + ":Fence", salt + "fence", salt + ":queue2", "{holdfast}" + salt, "holdfast:" + salt,
		// bytes
		"\xff" + salt, "\xfe" + salt, "\ufffd" + salt, "\xc3\x28" + salt, "\xf0\x9f\x94\x92" + salt, "\xf0\x9f\x94" + salt,
		"\x01" + salt, "\x7f" + salt, "\x1b[31m" + salt, "\u202e" + salt,
		// length
		pad(salt, "a"), pad(salt, "b"), pad(salt, "a")[:store.MaxKeyLen-1], strings.Repeat("\u9396", 64) + salt,
		pad(strings.Repeat("\U0001f512", 120)+salt, "x"),
	}
	var own []string
	for _, key := range keys {
		if strings.Contains(key, salt) || len(key) == store.MaxKeyLen {
			own = append(own, key)
		}
	}
	return own
}

// pad makes a key of the greatest length that ends in last.
func pad(salt, last string) string {
	return salt + strings.Repeat("p", store.MaxKeyLen-len(salt)-len(last)) + last
}

func (e *env) refuses(key string) bool { return e.cfg.Refuses != nil && e.cfg.Refuses(key) }

// Keys that differ in one byte are held side by side by different processes, and each of
// them is released alone.
func testKeysByteExact(e *env) {
	keys := []string{}
	for _, key := range hostileKeys(e.salt) {
		if err := store.CheckKey(key); err != nil {
			e.Fatalf("the suite has a key that no store takes: %v", err)
		}
		if !e.refuses(key) {
			keys = append(keys, key)
		}
	}
	// Many keys take a slow store a while, and the last must find the first one held.
	ttl := 10 * time.Minute
	if e.info.MaxTTL > 0 {
		ttl = min(ttl, e.info.MaxTTL)
	}
	claim := func(s store.Store, key string) store.Claim { return s.Claim(key, store.ClaimOptions{TTL: ttl}) }
	claims := map[string]store.Claim{}
	for i, key := range keys {
		claims[key] = claim([]store.Store{e.s, e.s2}[i%2], key)
		e.grant(claims[key], fmt.Sprintf("key %.80q, which nobody has yet", key))
	}
	other := e.h.Open()
	for i, key := range keys {
		c := claim(other, key)
		held := e.refused(c, fmt.Sprintf("key %.80q, which is held", key))
		if held.Holder.Key != "" && held.Holder.Key != key {
			e.Errorf("HeldError names key %.80q, want %.80q", held.Holder.Key, key)
		}
		e.release(c, "a refused claim")
		if i%2 == 0 {
			e.release(claims[key], fmt.Sprintf("key %.80q", key))
		}
	}
	for i, key := range keys {
		c, what := claim(other, key), fmt.Sprintf("key %.80q", key)
		if i%2 == 0 {
			e.grant(c, what+", which was released")
		} else {
			e.refused(c, what+", which is held while others were released")
			e.release(claims[key], what)
		}
		e.release(c, what)
	}
}

// Keys that the store refuses beyond the common rules are refused by Try, with a reason.
func testKeysRefused(e *env) {
	for _, key := range hostileKeys(e.salt) {
		if !e.refuses(key) {
			continue
		}
		c := e.claim(e.s, key)
		_, err := c.Try(e.ctx)
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != "key" || invalid.Rule == "" {
			e.Errorf("Try of key %.80q, which the store refuses, answers %v, want an *InvalidError about the key", key, err)
		}
	}
}
