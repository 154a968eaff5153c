package redlock

import (
	"context"
	_ "embed"
	"errors"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/internal/label"
	"github.com/holdfast-go/holdfast/store"
)

//go:embed break.lua
var breakText string

// brokenInbox stands where others have their inbox in the owner of a vote that an operator
// took: nobody is there to be told anything.
const brokenInbox = "broken"

// broken reports whether the vote is an operator's.
func (o owner) broken() bool {
	return !o.foreign() && strings.HasPrefix(o.text[len("h1.0000000000000000."):], brokenInbox+".")
}

// Break takes the votes of h.Owner over for an owner of its own, on all nodes, by BREAK of
// docs/protocol.md, sections 1.2 and 2. The holder finds its lease lost at its next extension
// and never gets it back; nobody else gets the key before Options.MaxTTL has passed, after
// which the holder's validity is over, too. Until then Inspect answers a Holder that is
// Broken, whose Label names the process that broke the lock and whose TTL is the time until
// the key is free. A lock of another library is broken likewise; it ends after MaxTTL, also
// where it had no end. Nothing is granted to anybody, so nodes need not be admitted, and may be
// young.
//
// Break first asks the nodes who holds the key, and changes nothing where that is not
// h.Owner: then it answers a [*store.HeldError], or a [*store.LostError] where nobody holds it, or
// a [*QuorumError] where too few nodes answered. It repeats its requests until a quorum has
// executed them, or too many nodes have another's vote, which is a [*store.HeldError], or
// nodes refuse them, ctx is done or MaxTTL has passed, which is a [*QuorumError]; where that is
// [store.ErrUncertain], some nodes may have been taken from the holder, for at most MaxTTL. Of
// two operators that break the same lock at once, one may be told that the other has done it.
// A holder that lets go while Break is under way may leave the key broken all the same.
func (s *Store) Break(ctx context.Context, h store.Holder) error {
	vote, err := s.named(ctx, h.Key)
	if err != nil {
		return err
	}
	if h.Owner == "" {
		return &store.InvalidError{Field: "owner", Rule: "must name the holder to take the key from"}
	}
	if goOn, err := s.breakable(ctx, h, vote); !goOn {
		return err
	}
	return s.newBreaking(h, vote).run(ctx)
}

// breakable asks the nodes who holds the key, and whether they are used on our terms.
func (s *Store) breakable(ctx context.Context, h store.Holder, vote string) (goOn bool, err error) {
	sent := s.clock.Now()
	all, err := s.askAll(ctx, s.opts.NodeTimeout,
		Call{Script: inspectScript, Keys: []string{vote}},
		Call{Script: s.scripts.record, Keys: []string{recordKey}, Args: s.recordArgs(false)})
	if err != nil {
		return false, err
	}
	sights := make([]sight, len(s.peers))
	votes := map[string]int{}
	for i, p := range s.peers {
		sights[i] = p.see(vote, all[i][0])
		s.tellSight(ctx, "inspect", h.Key, p, sights[i], sent)
		if sights[i].kind != noAnswer {
			if err := p.checkRecord(all[i][1].Value, all[i][1].Err); err != nil {
				var unfit misconfigured
				if errors.As(err, &unfit) {
					return false, err
				}
				sights[i] = sight{err: permanent(p.name, vote, err)}
			}
		}
		if sights[i].kind == busy && sights[i].other == "" {
			votes[sights[i].owner]++
		}
	}
	now, err := s.view("break", h.Key, sights)
	switch {
	case err != nil:
		return false, err
	case now.Owner == "":
		return false, &store.LostError{}
	case now.Owner != h.Owner && votes[now.Owner] >= s.q, votes[h.Owner] == 0:
		return false, &store.HeldError{Holder: now}
	case now.Owner == h.Owner && now.Broken && votes[now.Owner] >= s.q:
		return false, nil // it ends by itself; breaking it again would only put that off
	}
	return true, nil
}

// breaking is one Break under way.
type breaking struct {
	s      *Store
	key    string
	vote   string
	call   Call
	taken  []taken
	sights []sight // the last answers
	unsure bool    // some node may have executed a request
}

// taken is the time for which a node has had the operator's vote without a gap, as far as its
// answers tell.
type taken struct {
	since clock.Instant // when the first of them came
	asked clock.Instant // when the last request that was answered was sent
	until clock.Instant // the end of its vote
}

func (s *Store) newBreaking(h store.Holder, vote string) *breaking {
	ours := "1"
	if parseOwner(h.Owner).foreign() {
		ours = "0"
	}
	b := newOwner(s.wall(), brokenInbox, encodeLabel(label.BrokenBy()))
	return &breaking{
		s: s, key: h.Key, vote: vote,
		call: Call{
			Script: NewScript(switched("break", fill(breakText))),
			Keys:   []string{vote, markKey(vote)},
			Args:   []string{h.Owner, b.text, milliseconds(s.opts.MaxTTL), ours},
		},
		taken:  make([]taken, len(s.peers)),
		sights: make([]sight, len(s.peers)),
	}
}

const (
	minBreakPause = 20 * time.Millisecond
	maxBreakPause = 500 * time.Millisecond
)

// run repeats BREAK until it is done or cannot be.
func (b *breaking) run(ctx context.Context) error {
	limit := b.s.clock.Now().Add(b.s.opts.MaxTTL)
	for pause := minBreakPause; ; pause = min(2*pause, maxBreakPause) {
		answered := b.round(ctx)
		switch {
		case b.done():
			return nil
		case ctx.Err() != nil:
			return b.failure(ctx.Err())
		case b.count(busy) > len(b.sights)-b.s.q:
			return b.heldByOthers()
		case b.s.clock.Passed(limit), b.refused() > len(b.sights)-b.s.q:
			return b.failure(nil)
		case answered:
			continue // once more to the same nodes
		}
		if err := sleep(ctx, pause); err != nil {
			return b.failure(err)
		}
	}
}

// round sends BREAK to every node, and reports whether a quorum has executed it. Its votes
// must not end while it waits for nodes that do not answer.
func (b *breaking) round(ctx context.Context) bool {
	s := b.s
	sent := s.clock.Now()
	all, _ := s.askAll(ctx, min(s.opts.NodeTimeout, s.opts.MaxTTL/4), b.call)
	came := s.clock.Now()
	for i, p := range s.peers {
		n := p.see(b.vote, all[i][0])
		b.sights[i] = n
		b.unsure = b.unsure || n.kind == ok || n.err != nil && mayHaveRun(n.err)
		if n.kind == ok {
			b.take(i, sent, came)
		}
		s.tellSight(ctx, "break", b.key, p, n, sent)
	}
	return b.count(ok) >= s.q
}

// take books that a node has executed a request that was sent and answered then.
func (b *breaking) take(node int, sent, came clock.Instant) {
	t, ttl := &b.taken[node], b.s.opts.MaxTTL
	if t.until.IsZero() || b.s.clock.Passed(t.until) {
		t.since = came
	}
	t.asked, t.until = sent, sent.Add(ttl-drift(ttl))
}

// mayHaveRun reports whether a request that got this error may have been executed.
func mayHaveRun(err error) bool {
	var unasked notAsked
	var reply *ServerError
	var bad refused
	return !errors.As(err, &unasked) && !errors.As(err, &reply) && !errors.As(err, &bad) && !neverSent(err)
}

// done reports whether there was an instant at which a quorum of nodes had the operator's
// vote, without a gap until it was set anew by a request that was sent later. From that
// instant on no extension of the former holder can be counted: it would need one of those
// nodes, and they have the operator's vote for at least as long as the holder's validity,
// which is of an earlier extension, runs.
func (b *breaking) done() bool {
	for _, at := range b.taken {
		n := 0
		for _, t := range b.taken {
			if !at.since.IsZero() && !t.since.IsZero() && at.since.Sub(t.since) >= 0 && t.asked.Sub(at.since) >= 0 {
				n++
			}
		}
		if n >= b.s.q {
			return true
		}
	}
	return false
}

// count is how many nodes answered so at last.
func (b *breaking) count(k kind) (n int) {
	for _, s := range b.sights {
		if s.kind == k {
			n++
		}
	}
	return n
}

// refused is how many nodes answered what no waiting mends.
func (b *breaking) refused() (n int) {
	for _, s := range b.sights {
		if errors.As(s.err, new(refused)) {
			n++
		}
	}
	return n
}

func (b *breaking) heldByOthers() error {
	votes := map[string]int{}
	for _, s := range b.sights {
		if s.kind == busy {
			votes[s.owner]++
		}
	}
	return &store.HeldError{Holder: b.s.held(b.key, leading(votes), b.sights)}
}

func (b *breaking) failure(cause error) error {
	e := b.s.undecided("break", b.sights)
	if b.unsure {
		e.kinds = append(e.kinds, store.ErrUncertain)
	}
	if cause != nil {
		e.kinds = append(e.kinds, cause)
	}
	return e
}
