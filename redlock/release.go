package redlock

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// Settle returns when every release that was sent has been answered, or when ctx is done,
// with its error. Release itself returns once a quorum has answered: a program that ends
// right afterwards would leave its vote on the other nodes until the ttl ends. Nodes that
// do not answer are not waited for longer than their request lasts.
func (s *Store) Settle(ctx context.Context) error {
	select {
	case <-s.sending.wait():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// sending counts the first requests of releases that are under way.
type sending struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n is zero again; nil where nobody waits
}

func (s *sending) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n++
}

func (s *sending) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.n--; s.n == 0 && s.idle != nil {
		close(s.idle)
		s.idle = nil
	}
}

func (s *sending) wait() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	idle := s.idle
	if idle == nil {
		idle = make(chan struct{})
		if s.n == 0 {
			close(idle)
			return idle
		}
		s.idle = idle
	}
	return idle
}

// releasing is one RELEASE on its way to the nodes. It goes on, without a caller, until
// each node has answered or what it would free has ended.
type releasing struct {
	c      *claim
	a      *attempt
	lease  bool // it ends a lease
	needed int  // answers that a caller waits for
	lost   error
	until  clock.Instant // end of the repetition; guarded by the claim's mutex
	trace  func(store.NodeEvent)
	asked  []bool

	mu       sync.Mutex
	nodes    []NodeError
	have     []bool // nodes that have answered
	answered int
	gone     int           // nodes that had no vote of ours when they were first asked
	done     chan struct{} // closed when needed nodes have answered
	result   error         // set before done is closed
}

// Release gives the vote back on all nodes. It returns when a quorum has answered, and
// leaves the others to the background. It answers an error that is [store.ErrUncertain]
// where no quorum answered within the node timeout; the repetition goes on, up to the ttl,
// and another call waits for it, or begins it anew.
func (c *claim) Release(ctx context.Context) error {
	c.mu.Lock()
	c.ended = true
	if c.attempt != nil {
		c.releaseLocked(ctx)
	}
	r := c.last
	if r != nil {
		r.again()
	}
	c.mu.Unlock()
	if r == nil {
		return nil
	}
	return r.wait(ctx)
}

// again begins the repetition anew where it has ended in vain. The caller holds c.mu.
func (r *releasing) again() {
	s := r.c.s
	if r.confirmed() || !s.clock.Passed(r.until) {
		return
	}
	r.until = s.clock.Now().Add(r.c.ttl)
	for i, p := range s.peers {
		r.mu.Lock()
		ask := r.asked[i] && !r.have[i]
		r.mu.Unlock()
		if ask {
			r.send(p, r.call(r.a.nodes[i]), false)
		}
	}
}

func (r *releasing) confirmed() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// abandon ends the attempt of a Try that was not granted. Where a round is given, it
// first looks at its answers: an attempt that has no votes and no request under way goes on
// under its owner; else the votes are waited for that are known to be given back, for as
// long as the round leaves of the node timeout.
func (c *claim) abandon(ctx context.Context, r *round) {
	c.mu.Lock()
	if c.attempt == nil || r != nil && r.clean() {
		c.mu.Unlock()
		return
	}
	rel := c.releaseLocked(ctx)
	c.mu.Unlock()
	if r == nil {
		return
	}
	limit := time.NewTimer(max(time.Millisecond, c.s.opts.NodeTimeout-c.s.clock.Since(r.t0)))
	defer limit.Stop()
	select {
	case <-rel.done:
	case <-limit.C:
	case <-ctx.Done():
	}
}

// clean reports whether every node that the attempt's requests went to has just said that
// it holds no vote of it, and its stamps are worth repeating.
func (r *round) clean() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, n := range r.a.nodes {
		if n.sent > 0 && r.answers[i].kind != busy && r.answers[i].kind != low {
			return false
		}
	}
	return true
}

// releaseLocked sends RELEASE of the current attempt, which ends with it: an owner is never
// used after its RELEASE was sent (rule E). The caller holds c.mu.
func (c *claim) releaseLocked(ctx context.Context) *releasing {
	s := c.s
	now := s.clock.Now()
	if c.held && c.lost == nil && s.clock.Passed(c.until) {
		c.lost = &store.LostError{} // by time, whatever the nodes still have
	}
	r := &releasing{c: c, a: c.attempt, lease: c.held || c.ticketed, lost: c.lost, until: now.Add(c.ttl),
		trace: store.Trace(ctx), nodes: make([]NodeError, len(s.peers)), asked: make([]bool, len(s.peers)),
		have: make([]bool, len(s.peers)), done: make(chan struct{})}
	c.last, c.held = r, false
	if !off(ruleE) || r.lease {
		c.attempt = nil
	}
	s.released.add(r.a.owner.text)
	known := 0
	for i, n := range r.a.nodes {
		r.nodes[i] = NodeError{Node: s.peers[i].name, Outcome: "not asked"}
		if n.mark > 0 || !n.until.IsZero() {
			known++
		}
		r.asked[i] = n.sent > 0
	}
	// What an attempt without a grant left open, its error has told.
	r.needed = min(s.q, known)
	if r.lease {
		r.needed = s.q
	}
	if r.needed == 0 {
		close(r.done)
	}
	for i, p := range s.peers {
		if r.asked[i] {
			r.send(p, r.call(r.a.nodes[i]), true)
		}
	}
	return r
}

// call is the RELEASE for one node. Where the node's mark is known to stand at the highest
// stamp sent there, it need not be looked at.
func (r *releasing) call(n atNode) debt {
	stamp, held := n.sent, "0"
	if n.marked == n.sent {
		stamp = 0
	}
	if r.lease {
		held = "1"
	}
	return debt{
		call: Call{
			Script: r.c.s.scripts.release,
			Keys:   []string{r.c.vote, r.c.mark},
			Args:   []string{r.a.owner.text, strconv.FormatInt(stamp, 10), held, "", "", ""},
			Once:   true,
		},
		stamp: stamp,
		until: r.until,
	}
}

// send asks one node: at once, or by the node's debts where it has not been answering. first
// says that it is asked for the first time.
func (r *releasing) send(p *peer, d debt, first bool) {
	d.done = func(freed bool, err error, first bool) { r.deliver(p, freed, err, first) }
	if err := p.silent(); err != nil {
		r.deliver(p, false, err, true)
		p.owe(d)
		return
	}
	p.s.sending.begin()
	go func() {
		defer p.s.sending.end()
		sent := p.s.clock.Now()
		late := time.AfterFunc(p.s.opts.NodeTimeout, func() { // the client may never return
			p.note(errNoAnswer{p.s.opts.NodeTimeout}, sent)
			p.owe(d)
		})
		freed, wait, err := parseRelease(p.run(d.call)[0], d.stamp)
		owed := !late.Stop()
		if err == nil || codeOf(err) != "" {
			p.answered()
		} else {
			p.note(err, sent)
		}
		p.tell(r.trace, "release", r.c.key, kindOfRelease(freed, err), err, sent)
		r.deliver(p, freed, err, first && !owed)
		if !owed && (err != nil || wait > 0 && !off(ruleMRepeat)) {
			p.owe(d.after(p.s.clock.Now(), wait))
		}
	}()
}

func kindOfRelease(freed bool, err error) kind {
	switch {
	case err != nil:
		return noAnswer
	case freed:
		return ok
	}
	return none
}

// deliver books an answer. Only the first request to a node tells whether the vote was
// there: a repeated one may find that an earlier one, whose reply was lost, deleted it.
func (r *releasing) deliver(p *peer, freed bool, err error, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.have[p.index] {
		return
	}
	r.nodes[p.index] = p.outcome(kindOfRelease(freed, err), permanent(p.name, r.c.vote, err))
	if err != nil {
		return
	}
	r.have[p.index] = true
	r.answered++
	if first && !freed {
		r.gone++
	}
	if r.answered == r.needed {
		// Lost where it turns out that no quorum can have held the vote until then.
		if r.lease && r.gone > len(r.nodes)-r.c.s.q {
			r.result = &store.LostError{}
		}
		close(r.done)
	}
}

// wait returns when enough nodes have answered, at the node timeout, or when ctx is done.
func (r *releasing) wait(ctx context.Context) error {
	if r.lost != nil {
		return r.lost // whatever the nodes answer
	}
	if !r.confirmed() {
		limit := time.NewTimer(r.c.s.opts.NodeTimeout)
		defer limit.Stop()
		select {
		case <-r.done:
		case <-ctx.Done():
			return r.unconfirmed(ctx.Err())
		case <-limit.C:
			return r.unconfirmed(nil)
		}
	}
	return r.result
}

func (r *releasing) unconfirmed(cause error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := &QuorumError{Op: "release", Needed: r.needed, kinds: []error{store.ErrUncertain, store.ErrUnavailable}}
	if cause != nil {
		e.kinds = append(e.kinds, cause)
	}
	for i, n := range r.nodes {
		if r.asked[i] && n.Err == nil && n.Outcome == "not asked" {
			n = NodeError{Node: n.Node, Outcome: noAnswer.String(), Err: errNoAnswer{r.c.s.opts.NodeTimeout}}
		}
		e.Nodes = append(e.Nodes, n)
	}
	return e
}
