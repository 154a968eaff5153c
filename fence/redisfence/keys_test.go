package redisfence

import (
	"math/rand/v2"
	"strings"
	"testing"
)

func TestSlots(t *testing.T) {
	for key, want := range map[string]uint16{ // as CLUSTER KEYSLOT answers
		"123456789": 0x31c3, "foo": 12182, "bar": 5061, "{foo}bar": 12182, "x{foo}{bar}": 12182, "foo{}{bar}": 8363, "": 0,
	} {
		if got := slotOf(key); got != want {
			t.Errorf("slot of %q is %d, want %d", key, got, want)
		}
	}
}

func TestEverySlotHasATag(t *testing.T) {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	first := map[uint16]string{}
	for _, a := range letters {
		for _, b := range letters {
			for _, c := range letters {
				tag := string([]rune{a, b, c})
				if slot := slotOf(tag); first[slot] == "" {
					first[slot] = tag
				}
			}
		}
	}
	if len(first) != slots {
		t.Fatalf("%d of %d slots have a tag", len(first), slots)
	}
	for slot := uint16(0); slot < slots; slot += 61 {
		if tag := tagOf(slot); tag != first[slot] || slotOf("{"+tag+"}x}y") != slot {
			t.Errorf("slot %d: tag %q, want %q", slot, tag, first[slot])
		}
	}
}

// oddNames are names of all the kinds that hash tags tell apart.
func oddNames() []string {
	names := []string{"a", "{a}", "{a}b", "x{a}b", "{}", "{}a", "{}{a}", "}", "{", "a}", "a{", "}{", "}{a", "}{a}", "{a", "{{a}}",
		"{{}}", "a}b{c}d", "{a}{b}", "{a}}", "foo{}{bar}", "fence:{a}a", "seq:a", "{a}a", "{{a}a}a", "{aaa}", "ä", "{ä}"}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var b strings.Builder
		for range 1 + rnd.IntN(8) {
			b.WriteString([]string{"a", "b", "{", "}", "{}", ":", "fence:", "seq:"}[rnd.IntN(8)])
		}
		names = append(names, b.String())
	}
	return names
}

// The mark is in the slot of a data key that is named like the resource, and its own.
func TestMarkKey(t *testing.T) {
	seen := map[string]string{}
	for _, prefix := range []string{"fence:", "", "app/marks:"} {
		g := &Guard{prefix: prefix}
		clear(seen)
		for _, name := range oddNames() {
			for _, key := range []string{g.MarkKey(name), seqKey(prefix, name)} {
				if slotOf(key) != slotOf(name) {
					t.Fatalf("%q has slot %d, its key %q has %d", name, slotOf(name), key, slotOf(key))
				}
				if other, ok := seen[key]; ok && other != name {
					t.Fatalf("%q and %q share %q", name, other, key)
				}
				seen[key] = name
			}
			if g.MarkKey(name) == seqKey(prefix, name) {
				t.Fatalf("%q has one key for both records", name)
			}
		}
	}
	if got := (&Guard{prefix: "fence:"}).MarkKey("account/1"); got != "fence:{account/1}account/1" {
		t.Errorf("MarkKey = %q", got)
	}
	if got := (&Guard{prefix: "fence:"}).MarkKey("{account/1}:balance"); got != "fence:{account/1}{account/1}:balance" {
		t.Errorf("MarkKey = %q", got)
	}
}

func FuzzMarkKey(f *testing.F) {
	for _, name := range oddNames()[:28] {
		f.Add(name, "a")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if a == "" || b == "" {
			return
		}
		key := markKey("fence:", a)
		if slotOf(key) != slotOf(a) {
			t.Errorf("%q: another slot", a)
		}
		if (key == markKey("fence:", b)) != (a == b) {
			t.Errorf("%q and %q share %q", a, b, key)
		}
	})
}
