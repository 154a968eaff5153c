package zkstore

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

var owners = []string{strings.Repeat("a", ownerLen), strings.Repeat("0", ownerLen), strings.Repeat("f", ownerLen)}

func nodeName(owner string, seq int64) string {
	return fmt.Sprintf("%s%s-%010d", nodePrefix, owner, seq)
}

// ZOO-07: the number in a node's name has 32 bits, and turns negative. The order is that of the
// creates all the same, also where the names sort otherwise.
func TestOrderOverTheWrap(t *testing.T) {
	var names []string
	seqs := []int64{1<<31 - 2, 1<<31 - 1, -1 << 31, -1<<31 + 1}
	for i, seq := range seqs {
		names = append(names, nodeName(owners[i%3], seq))
	}
	want := slices.Clone(names)
	for _, order := range [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}, {1, 3, 0, 2}} {
		var list []string
		for _, i := range order {
			list = append(list, want[i])
		}
		var got []string
		for i, m := range members(list) {
			got = append(got, m.name)
			if int64(m.seq) != seqs[i] {
				t.Errorf("node %q has the number %d, want %d", m.name, m.seq, seqs[i])
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("the order is %q, want %q", got, want)
		}
	}
}

// ZOO-08: the first is the one with the lowest number, whatever stands before it in the names.
func TestOrderIgnoresOwners(t *testing.T) {
	list := members([]string{nodeName(owners[1], 2), nodeName(owners[2], 1), nodeName(owners[0], 3)})
	if len(list) != 3 || list[0].owner != owners[2] || list[1].owner != owners[1] || list[2].owner != owners[0] {
		t.Errorf("the order is %+v", list)
	}
	if place(list, owners[1]) != 1 || place(list, owners[0]) != 2 || place(list, "x") != -1 {
		t.Error("an owner is found at another place than its own")
	}
}

func TestNamesThatAreNone(t *testing.T) {
	good := nodeName(owners[0], 7)
	for _, name := range []string{
		"", "c-", good[1:], good + "x", good[:len(good)-1], "lock-0000000001",
		"_c_" + owners[0] + "-lock-0000000001", nodePrefix + owners[0] + "0000000001",
		nodePrefix + strings.Repeat("g", ownerLen) + "-0000000001", nodeName(owners[0], 1<<31), nodePrefix + owners[0] + "-+000000001",
	} {
		if m, ok := parseMember(name); ok {
			t.Errorf("%q is read as %+v", name, m)
		}
	}
	if list := members([]string{"x", good, "lock-0000000001"}); len(list) != 1 || list[0].name != good {
		t.Errorf("the members are %+v", list)
	}
}

func TestHashed(t *testing.T) {
	a, b := hashed("/x", "k"), hashed("/x", "K")
	if a == b || len(a) != len(b) || strings.Count(a, "/") != 3 || !strings.HasPrefix(a, "/x/") {
		t.Errorf("the paths are %q and %q", a, b)
	}
	if parts := strings.Split(a, "/"); parts[2] != parts[3][:1] {
		t.Errorf("the path is %q", a)
	}
}

func FuzzParseMember(f *testing.F) {
	f.Add(nodeName(owners[0], 7))
	f.Add(nodeName(owners[1], -1<<31))
	f.Add("_c_lock-0000000001")
	f.Fuzz(func(t *testing.T, name string) {
		m, ok := parseMember(name)
		if ok && (m.name != name || len(m.owner) != ownerLen || !strings.HasPrefix(name, nodePrefix+m.owner+"-")) {
			t.Errorf("%q is read as %+v", name, m)
		}
		if ok && nodeName(m.owner, int64(m.seq)) != name && len(name) == len(nodeName(m.owner, int64(m.seq))) {
			t.Errorf("%q is read as %+v, which is written %q", name, m, nodeName(m.owner, int64(m.seq)))
		}
	})
}

func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"label":"host:1","ttl":1000000000}`))
	f.Add([]byte(`{"ttl":"x"}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if again := parseRecord(parseRecord(data).bytes()); len(again.Label) > maxLabel {
			t.Errorf("the label is %q", again.Label)
		}
	})
}
