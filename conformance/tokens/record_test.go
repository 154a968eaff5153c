package tokens_test

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// history records grants. It is safe for concurrent use.
type history struct {
	clock atomic.Int64 // one order for all events

	mu     sync.Mutex
	grants []grant
}

// grant is one lease.
type grant struct {
	key   string
	who   int
	token fence.Token
	// asked comes before the first message of the acquisition, counted after its answers.
	asked, counted int64
	from, to       time.Time // while its holder could trust it
}

func (h *history) tick() int64 { return h.clock.Add(1) }

func (h *history) add(g grant) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.grants = append(h.grants, g)
}

func (h *history) byKey() map[string][]grant {
	h.mu.Lock()
	defer h.mu.Unlock()
	keys := map[string][]grant{}
	for _, g := range h.grants {
		keys[g.key] = append(keys[g.key], g)
	}
	return keys
}

// checkTokens fails where two grants of a key have the same token, or one that was asked for
// after another was counted has none larger. It answers how many pairs were so ordered.
func (h *history) checkTokens(t *testing.T) (ordered int) {
	t.Helper()
	for key, grants := range h.byKey() {
		seen := map[fence.Token]grant{}
		for _, g := range grants {
			if g.token <= 0 {
				t.Errorf("%s: token %v", key, g.token)
			}
			if other, twice := seen[g.token]; twice {
				t.Errorf("%s: token %v was given twice, to %d and %d", key, g.token, other.who, g.who)
			}
			seen[g.token] = g
		}
		byAsked := slices.SortedFunc(slices.Values(grants), func(a, b grant) int { return int(a.asked - b.asked) })
		byCounted := slices.SortedFunc(slices.Values(grants), func(a, b grant) int { return int(a.counted - b.counted) })
		var last grant // the largest token that was counted before b was asked for
		i := 0
		for _, b := range byAsked {
			for ; byCounted[i].counted < b.asked; i++ {
				if byCounted[i].token > last.token {
					last = byCounted[i]
				}
			}
			if last.token == 0 {
				continue
			}
			ordered++
			if b.token <= last.token {
				t.Errorf("%s: token %v of %d was asked for after token %v of %d had been counted", key, b.token, b.who, last.token, last.who)
			}
		}
	}
	return ordered
}

// checkExclusion fails where two holders of a key could trust their leases at one instant.
func (h *history) checkExclusion(t *testing.T) {
	t.Helper()
	for key, grants := range h.byKey() {
		slices.SortFunc(grants, func(a, b grant) int { return a.from.Compare(b.from) })
		last := grants[0] // the one that could be trusted longest
		for _, b := range grants[1:] {
			if last.to.After(b.from) && b.to.After(b.from) {
				t.Errorf("%s: %d with token %v and %d with token %v held it together, for %v", key, last.who, last.token, b.who, b.token, last.to.Sub(b.from))
			}
			if b.to.After(last.to) {
				last = b
			}
		}
	}
}

// The checks can fail.
func TestChecks(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	good := []grant{
		{"k", 1, 5, 1, 2, at(1), at(2)}, {"k", 2, 6, 3, 5, at(3), at(4)}, {"k", 3, 9, 4, 6, at(4), at(9)}, {"other", 3, 1, 7, 8, at(1), at(9)},
	}
	h := &history{grants: good}
	if n := h.checkTokens(t); n != 2 {
		t.Errorf("%d grants were ordered, want 2", n)
	}
	h.checkExclusion(t)
	for name, bad := range map[string]grant{
		"twice":    {"k", 4, 9, 4, 7, at(9), at(9)},
		"smaller":  {"k", 4, 8, 7, 8, at(9), at(9)},
		"together": {"k", 4, 10, 7, 8, at(3), at(4)},
		"within":   {"k", 4, 10, 7, 8, at(7), at(8)},
	} {
		probe := &testing.T{}
		h := &history{grants: append(slices.Clone(good), bad)}
		if name == "together" || name == "within" {
			h.checkExclusion(probe)
		} else {
			h.checkTokens(probe)
		}
		if !probe.Failed() {
			t.Errorf("%s is not found", name)
		}
	}
}
