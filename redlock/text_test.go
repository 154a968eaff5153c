package redlock

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

func TestOwner(t *testing.T) {
	label := "höst.example:17 (nightly)"
	o := newOwner(1795990138886438, newInbox(), encodeLabel(label))
	p := parseOwner(o.text)
	if p.birth != o.birth || p.label != label || p.foreign() {
		t.Errorf("%s is read as birth %d, label %q", o.text, p.birth, p.label)
	}
	if q := newOwner(1795990138886438, "aa", ""); parseOwner(q.text).label != "" || parseOwner(q.text).foreign() {
		t.Errorf("%s, without a label, is not read", q.text)
	}
	for _, text := range []string{"", "x", "h1", "h1.12.aa.bb", "h1.0000000000000000.aa.bb", "h1.-000000000000001.aa.bb",
		"h2.0000000000000001.aa.bb", "h1.0000000000000001.aa", "0000000000000001"} {
		if !parseOwner(text).foreign() {
			t.Errorf("%q counts as ours", text)
		}
	}
}

// FRK-02: see also faults.TestOwnersOfManyProcesses.
func TestOwnersDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 100000 {
		o := newOwner(1, "aa", "").text
		if seen[o] {
			t.Fatalf("%s twice", o)
		}
		seen[o] = true
	}
}

func TestLabelIsCut(t *testing.T) {
	for _, label := range []string{strings.Repeat("x", 100), strings.Repeat("é", 50), strings.Repeat("x", 62) + "ééé", "." + strings.Repeat("%", 40)} {
		e := encodeLabel(label)
		if len(e) > maxLabel {
			t.Errorf("%q has %d bytes", e, len(e))
		}
		o := parseOwner(newOwner(1, "aa", e).text)
		if o.label == "" {
			t.Errorf("%q cannot be read back", e)
		}
	}
}

func FuzzParseOwner(f *testing.F) {
	f.Add(newOwner(1795990138886438, "aa", "host:1").text)
	f.Add("h1.0000000000000001.a.b.%")
	f.Fuzz(func(t *testing.T, text string) {
		o := parseOwner(text)
		if o.text != text || o.birth < 0 {
			t.Errorf("%q: %+v", text, o)
		}
	})
}

func TestMarkKeysShareSlotAndNothingElse(t *testing.T) {
	keys := []string{"x", "{x}", "{x}y", "y{x}", "a{b}c", "{}x", "{", "x}", "{{x}}", "account/123", "{a}b", "{a}b:", "{x"}
	seen := map[string]string{}
	for _, key := range keys {
		m := markKey(key)
		if other, dup := seen[m]; dup {
			t.Errorf("%q and %q share the mark %q", key, other, m)
		}
		seen[m] = key
		if checkClusterKey(key) == nil && slotOf(m) != slotOf(key) {
			t.Errorf("%q has slot %d, its mark %q has %d", key, slotOf(key), m, slotOf(m))
		}
	}
	if markKey("{a}b") != "{a}b::fence" || markKey("k") != "{k}:fence" {
		t.Errorf("marks are %q and %q", markKey("{a}b"), markKey("k"))
	}
	if checkClusterKey("x}") == nil || checkClusterKey("{}x") == nil || checkClusterKey("a{b}") != nil {
		t.Error("keys with a } are told apart wrongly")
	}
}

// TestSlot pins the values of the Redis Cluster specification.
func TestSlot(t *testing.T) {
	for key, slot := range map[string]uint16{"123456789": 0x31C3, "foo": 12182, "{user1000}.following": 3443, "user1000": 3443} {
		if got := slotOf(key); got != slot {
			t.Errorf("slotOf(%q) = %d, want %d", key, got, slot)
		}
	}
}

func FuzzParseReplies(f *testing.F) {
	f.Add("OK", int64(1), int64(2), "o", int64(3), uint8(5))
	f.Add("BUSY", int64(1), int64(2), "o", int64(-1), uint8(5))
	f.Add("AHEAD", int64(1), int64(2), "", int64(0), uint8(3))
	f.Fuzz(func(t *testing.T, word string, a, b int64, owner string, c int64, n uint8) {
		reply := []any{word, a, b, owner, c}[:min(int(n), 5)]
		if v, err := parseVote(reply, b); (err == nil) == (v.kind == noAnswer) {
			t.Errorf("VOTE %v: %v, %v", reply, v, err)
		}
		for _, r := range [][]any{reply, {word, owner, c}, {word, a}} {
			if v, err := parseKeep(r); (err == nil) == (v.kind == noAnswer) {
				t.Errorf("KEEP %v: %v, %v", r, v, err)
			}
		}
		if _, wait, err := parseRelease(Reply{Value: reply}, c); err == nil && word == "AHEAD" && wait <= 0 {
			t.Errorf("RELEASE %v: no wait", reply)
		}
	})
}

type deadNode struct {
	Node
	name string
}

func (n deadNode) Name() string { return n.name }

func TestNewRefuses(t *testing.T) {
	a, b := deadNode{name: "127.0.0.1:1"}, deadNode{name: "127.0.0.1:2"}
	for want, try := range map[string]func() (*Store, error){
		"nodes":       func() (*Store, error) { return New(Options{}) },
		"node":        func() (*Store, error) { return New(Options{}, a, b, a) },
		"MaxTTL":      func() (*Store, error) { return New(Options{MaxTTL: time.Hour}, a) },
		"NodeTimeout": func() (*Store, error) { return New(Options{NodeTimeout: -1}, a) },
		"Prefix":      func() (*Store, error) { return New(Options{Prefix: "a\x00"}, a) },
	} {
		_, err := try()
		var bad *store.InvalidError
		if !errors.As(err, &bad) || !errors.Is(err, store.ErrInvalid) || bad.Field != want || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", want, err)
		}
	}
	if _, err := New(Options{}, a, nil); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("a nil node: %v", err)
	}
}

func TestScriptsCarryNoPlaceholder(t *testing.T) {
	s := newScripts()
	always, cached, trust := newVote("ab12", checkAlways, time.Second), newVote("ab12", checkCached, time.Second), newVote("", checkNone, time.Second)
	releases := map[string]bool{s.release.Text: true, always.release.Text: true, cached.release.Text: true, trust.release.Text: true}
	if len(releases) != 4 {
		t.Errorf("%d texts of RELEASE differ, want 4", len(releases))
	}
	if text := cached.release.Text; strings.Count(text, "'PXAT'") != 1 || strings.Count(text, "MGET") != 1 || strings.Contains(text, "PEXPIREAT") {
		t.Error("RELEASE of Redis 7 does not use what it has")
	}
	for _, script := range []*Script{s.keep, s.release, s.record, s.promoted, always.Script, cached.Script, trust.Script,
		always.release, cached.release, trust.release} {
		if strings.Contains(script.Text, "@") || strings.Contains(script.Text, "--[[") {
			t.Errorf("a placeholder is left in:\n%s", script.Text)
		}
	}
	texts := map[string]bool{}
	for _, c := range []check{checkAlways, checkCached, checkNone} {
		for _, id := range []string{"ab12", "cd34"} {
			for _, ttl := range []time.Duration{time.Second, time.Minute} {
				texts[newVote(id, c, ttl).Text] = true
			}
		}
	}
	if len(texts) != 12 {
		t.Errorf("%d texts differ, want 12", len(texts))
	}
}

func TestKnownServers(t *testing.T) {
	for text, want := range map[string]bool{
		"redis_version:7.0.15\r\ngcc_version:12.2.0\r\n":       true,
		"redis_version:8.2.1\r\nredis_mode:standalone\r\n":     true,
		"redis_version:6.2.14\r\n":                             false,
		"redis_version:7.2.4\r\nserver_name:valkey\r\n":        false,
		"redis_version:7.4.0\r\ndragonfly_version:df-1.30\r\n": false,
		"redis_version:255.255.255\r\nunstable_version:1\r\n":  false,
		"# Server\r\n": false,
	} {
		info := map[string]string{}
		parseInfo(text, info)
		if got := knownSince7(info); got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}
