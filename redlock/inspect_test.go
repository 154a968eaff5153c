package redlock

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/internal/label"
	"github.com/holdfast-go/holdfast/store"
)

func sights(list ...string) (all []sight) {
	for _, s := range list {
		switch {
		case s == "-":
			all = append(all, sight{err: errNoAnswer{time.Second}})
		case s == "0":
			all = append(all, sight{kind: none, now: 5e6})
		case s == "hash":
			all = append(all, sight{kind: busy, other: s, now: 5e6})
		default: // an owner, with as many seconds left as it has marks
			owner := strings.TrimRight(s, "'")
			pttl := int64(len(s)-len(owner)) * 1000
			if pttl == 0 {
				pttl = -1
			}
			all = append(all, sight{kind: busy, owner: owner, pttl: pttl, now: 5e6})
		}
	}
	return all
}

func TestView(t *testing.T) {
	_, nodes := fakes(5)
	s := fakeStore(t, Options{}, nodes...)
	a := newOwner(2e6, "aa", "host").text
	b := newOwner(3e6, "bb", "").text
	for name, c := range map[string]struct {
		sights []sight
		owner  string
		ttl    time.Duration
		err    error
	}{
		"all free":                         {sights("0", "0", "0", "0", "0"), "", 0, nil},
		"free, with remains":               {sights("0", a+"'", "0", b+"'", "0"), "", 0, nil},
		"a quorum":                         {sights("0", a+"'", a+"''", a+"'''", "0"), a, time.Second, nil},
		"the quorum that lasts":            {sights(a+"'''", a+"'", a+"''", a+"'''", a+"'"), a, 2 * time.Second, nil},
		"a quorum beside silent ones":      {sights("-", a+"'", a+"''", a+"'''", "-"), a, time.Second, nil},
		"may have a quorum":                {sights("-", a+"''", a+"'''", "0", "-"), a, 2 * time.Second, nil},
		"a split vote":                     {sights(a+"'", b+"'", "0", b+"''", a+"''"), a, time.Second, nil},
		"the most votes of a split":        {sights(a+"'", b+"'", "0", b+"''", b+"'"), b, time.Second, nil},
		"too few answers":                  {sights("-", a+"'", "-", a+"'", "-"), "", 0, store.ErrUnavailable},
		"a foreign lock without an end":    {sights("x", "x", "x", "-", "-"), "x", 0, nil},
		"another kind of value":            {sights("hash", "hash", "hash", "hash", "hash"), "", 0, store.ErrInvalid},
		"another kind of value, and votes": {sights("hash", "hash", a+"'", a+"'", a+"'"), a, time.Second, nil},
		"another kind of value at one":     {sights("hash", "0", "0", "0", "0"), "", 0, nil},
		"another kind of value, unsure":    {sights("hash", "0", "0", "-", "-"), "", 0, store.ErrInvalid},
	} {
		h, err := s.view("inspect", "k", c.sights)
		if !errors.Is(err, c.err) || h.Owner != c.owner || h.TTL != c.ttl {
			t.Errorf("%s: %+v, %v; want %q for %v, %v", name, h, err, c.owner, c.ttl, c.err)
		}
		if err == nil && h.Key != "k" {
			t.Errorf("%s: key %q", name, h.Key)
		}
		switch o := h.Owner; {
		case o == a && (h.Label != "host" || h.Held != 3*time.Second || h.Foreign || h.NoTTL || h.Broken || h.Token != 0):
			t.Errorf("%s: %+v", name, h)
		case o == "x" && (!h.Foreign || !h.NoTTL || h.Held != 0):
			t.Errorf("%s: %+v", name, h)
		}
	}
}

func TestBrokenOwner(t *testing.T) {
	text := newOwner(1795990138886438, brokenInbox, encodeLabel(label.BrokenBy())).text
	h := describe("k", text, 1795990138886438+2e6)
	if !h.Broken || h.Foreign || h.Label != label.BrokenBy() || h.Held != 2*time.Second {
		t.Errorf("%s is described as %+v", text, h)
	}
	for _, text := range []string{newOwner(1, newInbox(), "broken by me").text, "broken", "h1.0000000000000000.broken.x", "h1.", ""} {
		if describe("k", text, 1).Broken {
			t.Errorf("%q counts as broken", text)
		}
	}
}

// A Break is done when a quorum has the operator's vote at one instant, and each of its nodes
// keeps it, without a gap, for a ttl after that.
func TestBreakDone(t *testing.T) {
	const ttl = 10 * time.Second
	type say struct{ sent, came int } // s; of BROKEN at one node, in the order of rounds
	for name, c := range map[string]struct {
		nodes [3][]say
		done  bool
	}{
		"nothing":                      {},
		"once everywhere":              {[3][]say{{{0, 1}}, {{0, 1}}, {{0, 1}}}, false},
		"twice at one":                 {[3][]say{{{0, 1}, {2, 3}}, {{0, 1}}, {}}, false},
		"twice at a quorum":            {[3][]say{{{0, 1}, {2, 3}}, {{0, 1}, {2, 3}}, {}}, true},
		"twice, each in its time":      {[3][]say{{{0, 1}, {6, 7}}, {{4, 5}, {6, 7}}, {}}, true},
		"the second before the first":  {[3][]say{{{0, 1}, {2, 3}}, {{4, 5}, {6, 7}}, {}}, false},
		"a gap at one":                 {[3][]say{{{0, 1}, {12, 13}}, {{4, 5}, {12, 13}}, {}}, false},
		"a gap, and once more":         {[3][]say{{{0, 1}, {12, 13}, {14, 15}}, {{4, 5}, {12, 13}, {14, 15}}, {}}, true},
		"a gap while the answer comes": {[3][]say{{{0, 1}, {9, 11}}, {{8, 9}, {9, 11}}, {}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				_, nodes := fakes(3)
				s := fakeStore(t, Options{MaxTTL: ttl}, nodes...)
				b := s.newBreaking(store.Holder{Owner: "x"}, "k")
				began := s.clock.Now()
				at := func(second int) { time.Sleep(time.Duration(second)*time.Second - s.clock.Since(began)) }
				var ends []int
				for _, says := range c.nodes {
					for _, say := range says {
						ends = append(ends, say.came)
					}
				}
				slices.Sort(ends)
				for _, end := range slices.Compact(ends) {
					at(end)
					for i, says := range c.nodes {
						for _, say := range says {
							if say.came == end {
								b.take(i, began.Add(time.Duration(say.sent)*time.Second), s.clock.Now())
							}
						}
					}
				}
				if b.done() != c.done {
					t.Errorf("done: %v, want %v; %+v", b.done(), c.done, b.taken)
				}
			})
		})
	}
}

func FuzzParseSight(f *testing.F) {
	f.Add("BUSY", int64(1), "o", int64(-1), uint8(4))
	f.Add("OTHER", int64(1), "hash", int64(0), uint8(3))
	f.Add("BROKEN", int64(1), "", int64(0), uint8(2))
	f.Fuzz(func(t *testing.T, word string, now int64, text string, pttl int64, n uint8) {
		reply := []any{word, now, text, pttl}[:min(int(n), 4)]
		s, err := parseSight(reply)
		if (err == nil) == (s.kind == noAnswer) || err == nil && s.kind == busy && s.owner == "" && s.other == "" && text != "" {
			t.Errorf("%v: %+v, %v", reply, s, err)
		}
	})
}
