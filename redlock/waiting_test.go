package redlock

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// claimAt is the owner of a claim that was born at that second, and its place in a queue.
func claimAt(second int64, label string) (owner string, member []any) {
	owner = newOwner(second*1e6, newInbox(), label).text
	return owner, []any{owner, fmt.Sprint(second * 1e6)}
}

func queueOf(t *testing.T, count int64, members ...[]any) seenQueue {
	t.Helper()
	return readQueue(Reply{Value: slices.Concat(append([][]any{{count}}, members...)...)})
}

// What a node's queue key holds may be anything: it counts as far as it is ours.
func TestReadQueue(t *testing.T) {
	a, inA := claimAt(1790000000, "a")
	b, inB := claimAt(1790000001, "")
	for name, c := range map[string]struct {
		reply  Reply
		places int
		owners []string
	}{
		"nobody":             {Reply{Value: []any{int64(0)}}, 0, nil},
		"two":                {Reply{Value: slices.Concat([]any{int64(2)}, inA, inB)}, 2, []string{a, b}},
		"more than named":    {Reply{Value: slices.Concat([]any{int64(700)}, inA)}, 700, []string{a}},
		"only the count":     {Reply{Value: []any{int64(7)}}, 7, nil},
		"printed with an E":  {Reply{Value: []any{int64(1), a, "1.79e+15"}}, 1, []string{a}},
		"others' members":    {Reply{Value: slices.Concat([]any{int64(3)}, []any{"7f3a", "1"}, inB, []any{"", "2"})}, 1, []string{b}},
		"a cut member":       {Reply{Value: []any{int64(1), strings.Repeat("x", 256), "1"}}, 0, nil},
		"infinite":           {Reply{Value: []any{int64(3), a, "inf", a, "-inf", a, "nan"}}, 0, nil},
		"no time":            {Reply{Value: []any{int64(4), a, "-5", a, "0", a, "1e300", a, "soon"}}, 0, nil},
		"half a member":      {Reply{Value: []any{int64(1), a}}, 0, nil},
		"no text":            {Reply{Value: []any{int64(1), int64(1), nil}}, 0, nil},
		"a count too low":    {Reply{Value: slices.Concat([]any{int64(0)}, inA)}, 1, []string{a}},
		"no count":           {Reply{Value: inA}, 0, nil},
		"no array":           {Reply{Value: "OK"}, 0, nil},
		"an empty array":     {Reply{Value: []any{}}, 0, nil},
		"another kind":       {Reply{Err: &ServerError{"WRONGTYPE Operation against a key"}}, 0, nil},
		"an error and value": {Reply{Value: []any{int64(1)}, Err: errReply}, 0, nil},
	} {
		q := readQueue(c.reply)
		var owners []string
		for _, p := range q.first {
			owners = append(owners, p.owner)
		}
		if q.places != c.places || !slices.Equal(owners, c.owners) {
			t.Errorf("%s: %+v, want %d places, of them %q", name, q, c.places, c.owners)
		}
	}
}

func TestAddQueue(t *testing.T) {
	a, inA := claimAt(2, "host")
	b, inB := claimAt(3, "")
	c, inC := claimAt(4, "")
	early := []any{b, "1500000"} // as a node books it whose clock is behind
	twin := newOwner(2e6, "zz", "").text
	inTwin := []any{twin, "2000000"}
	if twin < a {
		t.Fatal("the inbox must make it the later of the two")
	}
	node := func(s string, count int64, members ...[]any) sight {
		n := sights(s)[0]
		n.now = 5e6
		n.queue = queueOf(t, count, members...)
		return n
	}
	for name, c := range map[string]struct {
		holder  string
		sights  []sight
		waiting int
		owners  []string
	}{
		"none":                          {"", []sight{node("0", 0)}, 0, nil},
		"one node":                      {c, []sight{node(c, 2, inA, inB)}, 2, []string{a, b}},
		"nobody holds":                  {"", []sight{node("0", 2, inA, inB)}, 2, []string{a, b}},
		"all the same":                  {c, []sight{node(c, 2, inA, inB), node(c, 2, inA, inB), node(c, 2, inA, inB)}, 2, []string{a, b}},
		"one at one node":               {c, []sight{node(c, 1, inB), node(c, 1, inA), node(c, 0)}, 2, []string{a, b}},
		"not of nodes without answer":   {c, []sight{node(c, 1, inB), node("-", 1, inA), node(c, 0)}, 1, []string{b}},
		"a clock that is behind":        {"", []sight{node("0", 2, inA, early), node("0", 2, inA, inB), node("0", 2, inA, inB)}, 2, []string{a, b}},
		"a client that is ahead":        {"", []sight{node("0", 2, []any{c, "1000000"}, inA)}, 2, []string{c, a}},
		"ties by the owner":             {"", []sight{node("0", 2, inTwin, inA), node("0", 1, inTwin), node("0", 0)}, 2, []string{a, twin}},
		"places that the holder left":   {a, []sight{node(a, 1, inB), node(a, 1, inB), node(b, 2, inA, inB)}, 1, []string{b}},
		"only the holder's":             {a, []sight{node(a, 0), node(a, 0), node(b, 1, inA)}, 0, nil},
		"more than are named":           {c, []sight{node(c, 500, inA), node(c, 501, inA, inB), node(c, 2, inA, inB)}, 501, []string{a, b}},
		"only counts":                   {c, []sight{node(c, 4), node(c, 7), node(c, 0)}, 7, nil},
		"the order of three at 1 each":  {"", []sight{node("0", 1, inC), node("0", 1, inB), node("0", 1, inA)}, 3, []string{a, b, c}},
		"no answer at all":              {"", []sight{node("-", 1, inA)}, 0, nil},
		"another kind of value, queued": {"", []sight{node("hash", 1, inA), node("0", 1, inA), node("0", 1, inA)}, 1, []string{a}},
	} {
		h := store.Holder{Owner: c.holder}
		addQueue(&h, c.sights)
		var owners []string
		for _, q := range h.Queue {
			owners = append(owners, q.Owner)
			if q.Owner == a && (q.Label != "host" || q.Waited != 3*time.Second) || q.Owner == b && (q.Label != "" || q.Waited != 2*time.Second) {
				t.Errorf("%s: %+v", name, q)
			}
		}
		if h.Waiting != c.waiting || !slices.Equal(owners, c.owners) {
			t.Errorf("%s: %d wait, %q, want %d, %q", name, h.Waiting, owners, c.waiting, c.owners)
		}
	}
}

// Only the first are named, of however many nodes, and nobody has waited for less than nothing.
func TestAddQueueBounds(t *testing.T) {
	all := make([]sight, 2)
	for i := range all {
		all[i] = sight{kind: none, now: 50e6}
		for n := range int64(maxQueued) {
			_, member := claimAt(1+2*n+int64(i), "")
			all[i].queue.first = append(all[i].queue.first, queueOf(t, 1, member).first...)
		}
		all[i].queue.places = maxQueued
	}
	var h store.Holder
	addQueue(&h, all)
	if h.Waiting != 2*maxQueued || len(h.Queue) != maxQueued {
		t.Fatalf("%d wait, %d are named", h.Waiting, len(h.Queue))
	}
	for i, q := range h.Queue {
		if want := max(0, time.Duration(49-i)*time.Second); q.Waited != want {
			t.Errorf("place %d has waited for %v, want %v", i+1, q.Waited, want)
		}
	}
}

func FuzzReadQueue(f *testing.F) {
	owner, _ := claimAt(1790000000, "a")
	f.Add(int64(1), owner, "1790000000000000", "x", "1", uint8(5))
	f.Add(int64(-1), "h1.", "inf", "", "-0", uint8(4))
	f.Fuzz(func(t *testing.T, count int64, a, scoreA, b, scoreB string, n uint8) {
		q := readQueue(Reply{Value: []any{count, a, scoreA, b, scoreB}[:min(int(n), 5)]})
		if q.places < len(q.first) || len(q.first) > 2 {
			t.Errorf("%+v", q)
		}
		for _, now := range []int64{0, 1790000000000000, math.MaxInt64} {
			var h store.Holder
			addQueue(&h, []sight{{kind: none, now: now, queue: q}})
			for _, w := range h.Queue {
				if w.Waited < 0 || parseOwner(w.Owner).foreign() {
					t.Errorf("at %d: %+v", now, w)
				}
			}
		}
	})
}
