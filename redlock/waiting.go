package redlock

import (
	"cmp"
	_ "embed"
	"slices"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var (
	//go:embed waiting.lua
	waitingText string

	waitingScript = NewScript(waitingText)
)

// maxQueued is how many of those who wait a Holder names.
const maxQueued = 100

// seenQueue is what one node says of who waits for a vote; empty where it could not tell.
type seenQueue struct {
	places int
	first  []seenPlace // at most maxQueued
}

// seenPlace is one claim's in a queue.
type seenPlace struct {
	owner string
	birth int64 // of the claim, in us of the nodes' clocks
}

// askWaiting asks for the queue of a vote, and for the names of at most that many.
func askWaiting(vote string, names int) Call {
	return Call{Script: waitingScript, Keys: []string{queueKey(vote)}, Args: []string{strconv.Itoa(names)}}
}

// readQueue reads the answer to WAITING. Members that are not owners of ours are left out.
// Any failure is an empty queue: a key of another kind, or one that the user may not read, hides
// who waits but not who holds.
func readQueue(r Reply) (q seenQueue) {
	all, _ := r.Value.([]any)
	if r.Err != nil || len(all) == 0 {
		return seenQueue{}
	}
	n, isCount := all[0].(int64)
	if !isCount {
		return seenQueue{}
	}
	for member := range slices.Chunk(all[1:], 2) {
		if p, ours := readPlace(member); ours {
			q.first = append(q.first, p)
		} else {
			n--
		}
	}
	q.places = max(int(n), len(q.first))
	return q
}

func readPlace(member []any) (p seenPlace, ours bool) {
	if len(member) != 2 {
		return seenPlace{}, false
	}
	text, _ := member[0].(string)
	score, _ := member[1].(string)
	birth, err := strconv.ParseFloat(score, 64)
	if o := parseOwner(text); err != nil || o.foreign() || !(birth >= 1 && birth < 1<<53) {
		return seenPlace{}, false
	}
	return seenPlace{text, int64(birth)}, true
}

// addQueue adds to a holder who waits for the key, as far as the nodes that answered tell
// together. A place on one of them counts: a claim has one only where it was refused, and each
// node drops those that it hands the vote to or finds dead, so that no two queues are the same. The
// holder may have left places, too, where another had the vote; they do not count.
func addQueue(h *store.Holder, sights []sight) {
	births := map[string][]int64{}
	var clocks []int64
	for _, n := range sights {
		if n.kind == noAnswer {
			continue
		}
		clocks = append(clocks, n.now)
		places := n.queue.places
		for _, p := range n.queue.first {
			if p.owner == h.Owner {
				places--
				continue
			}
			births[p.owner] = append(births[p.owner], p.birth)
		}
		h.Waiting = max(h.Waiting, places)
	}
	h.Waiting = max(h.Waiting, len(births))
	if len(births) == 0 {
		return
	}
	// A node whose clock is behind the birth of a claim books its own time instead.
	all := make([]seenPlace, 0, len(births))
	for owner, b := range births {
		all = append(all, seenPlace{owner, nthSmallest((len(b)+1)/2, b)})
	}
	slices.SortFunc(all, func(a, b seenPlace) int {
		return cmp.Or(cmp.Compare(a.birth, b.birth), cmp.Compare(a.owner, b.owner))
	})
	now := nthSmallest((len(clocks)+1)/2, clocks)
	for _, p := range all[:min(len(all), maxQueued)] {
		h.Queue = append(h.Queue, store.Queued{
			Owner:  p.owner,
			Label:  parseOwner(p.owner).label,
			Waited: max(0, time.Duration(now-p.birth)*time.Microsecond),
		})
	}
}
