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
	lease  bool     // it ends a lease
	leave  bool     // the owner may have places in the queues
	handOn bool     // a vote that is freed is handed over
	token  int64    // of the lease that this may be
	next   *attempt // under which the claim goes on waiting; nil where it does not
	stamp2 int64    // of next
	needed int      // answers that a caller waits for
	lost   error
	began  clock.Instant // when it was last begun; guarded by the claim's mutex, as is until
	until  clock.Instant // end of the repetition
	trace  func(store.NodeEvent)

	mu        sync.Mutex
	nodes     []releasedAt
	only      [1]releasedAt // nodes of a store that has one
	answered  int
	gone      int           // nodes that had no vote of ours when they were first asked
	open      int           // requests that are under way
	settled   func() bool   // they need not be handed to the debts any more
	confirmed bool          // needed nodes have answered
	done      chan struct{} // closed then; nil where nobody waits
	result    error         // set before confirmed is
}

// releasedAt is what a RELEASE knows of one node.
type releasedAt struct {
	asked    bool
	open     bool // a request is under way
	owed     bool // and is repeated by the node's debts meanwhile
	answered bool
	outcome  kind
	err      error
}

// Release gives the vote back on all nodes. It returns when a quorum has answered, and
// leaves the others to the background. It answers an error that is [store.ErrUncertain]
// where no quorum answered within the node timeout; the repetition goes on, up to the ttl,
// and another call waits for it, or begins it anew.
func (c *claim) Release(ctx context.Context) error {
	c.mu.Lock()
	c.ended = true
	first := c.attempt != nil
	if first {
		c.releaseLocked(ctx)
	}
	c.s.inbox.leave(c)
	r := c.last
	send := r != nil && (first || r.again())
	var began clock.Instant
	if r != nil {
		began = r.began
	}
	c.mu.Unlock()
	if r == nil {
		return nil
	}
	limit := c.s.shortContext()
	if send && !r.direct(ctx, began, first) {
		r.send(first)
	}
	return r.wait(ctx, limit)
}

// again reports whether the repetition has ended in vain, and prolongs it. The caller holds c.mu.
func (r *releasing) again() bool {
	s := r.c.s
	r.mu.Lock()
	confirmed := r.confirmed
	r.mu.Unlock()
	if confirmed || !s.clock.Passed(r.until) {
		return false
	}
	r.began = s.clock.Now()
	r.until = r.began.Add(r.c.ttl)
	return true
}

// waited returns a channel that is closed when needed nodes have answered.
func (r *releasing) waited() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.done == nil {
		r.done = make(chan struct{})
		if r.confirmed {
			close(r.done)
		}
	}
	return r.done
}

// abandon ends the attempt of a Try that was not granted. Where a round is given, it
// first looks at its answers: an attempt that has no votes and no request under way goes on
// under its owner; else the votes are waited for that are known to be given back, for as
// long as the round leaves of the node timeout. A claim that waits is parked by the same RELEASE,
// under the owner with which it goes on, where goOn says that it does; moved tells that.
func (c *claim) abandon(ctx context.Context, r *round, goOn bool) (moved bool) {
	c.mu.Lock()
	if c.attempt == nil || r != nil && r.clean(c.w != nil) {
		c.mu.Unlock()
		return false
	}
	var rel *releasing
	if moved = goOn && c.w != nil && !c.ended; moved {
		rel = c.moveLocked(ctx)
	} else {
		rel = c.releaseLocked(ctx)
	}
	c.mu.Unlock()
	rel.send(true)
	if r == nil {
		return false
	}
	limit := time.NewTimer(max(time.Millisecond, c.s.opts.NodeTimeout-c.s.clock.Since(r.t0)))
	defer limit.Stop()
	select {
	case <-rel.waited():
	case <-limit.C:
	case <-ctx.Done():
	}
	return moved
}

// clean reports whether every node that the attempt's requests went to has just said that
// it holds no vote of it, and its stamps are worth repeating. A claim that waits has time for
// those that were not waited for: see stray.
func (r *round) clean(waits bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, n := range r.a.nodes {
		pending := waits && r.errs[i] == errPending && n.until.IsZero()
		if n.sent > 0 && r.answers[i].kind != busy && r.answers[i].kind != low && !pending {
			return false
		}
	}
	return true
}

// moveLocked ends the attempt and goes on under a new owner, which the same RELEASE parks. Its
// stamp is the first of the new attempt, and sent from this moment on. c.mu is held.
func (c *claim) moveLocked(ctx context.Context) *releasing {
	wall := c.s.wall()
	var marks []int64
	for _, n := range c.attempt.nodes {
		if n.mark > 0 && n.mark <= wall+aheadLimit.Microseconds() {
			marks = append(marks, n.mark)
		}
	}
	stamp := max(wall, c.attempt.stamp+1)
	if n := min(len(marks), c.s.q); n > 0 { // no single clock steers the claim (rule T)
		stamp = max(stamp, nthSmallest(n, marks)+1)
	}
	stamp += c.s.lead() // the marks go on while it is on its way
	moved := c.attempt
	rel := c.releaseLocked(ctx)
	next := c.newAttempt(newOwner(c.birth, c.s.inbox.name, c.label).text)
	next.stamp = stamp
	for i := range next.nodes {
		next.nodes[i].sent, next.nodes[i].parks = stamp, 1 // rule M
		next.nodes[i].place = moved.nodes[i].place         // by birth, which is the same
		rel.nodes[i].asked = true
	}
	c.w.forgetGiven()
	c.s.inbox.knows(c, next.owner)
	c.attempt = next
	rel.next, rel.stamp2, rel.leave, rel.handOn = next, stamp, true, false
	return rel
}

// releaseLocked ends the current attempt, whose RELEASE is then to be sent: an owner is never
// used after that (rule E). The caller holds c.mu.
func (c *claim) releaseLocked(ctx context.Context) *releasing {
	s := c.s
	now := s.clock.Now()
	if c.held && c.lost == nil && now.Until(c.until) <= 0 {
		c.lost = &store.LostError{} // by time, whatever the nodes still have
	}
	c.nameLocked()
	r := &releasing{c: c, a: c.attempt, lease: c.held || c.ticketed, lost: c.lost, began: now, until: now.Add(c.ttl),
		trace: store.Trace(ctx)}
	r.leave = c.adopted || c.w != nil && c.w.parked
	r.handOn = r.lease || r.leave // a claim that was parked may have a reservation that nobody else knows of
	if r.nodes = r.only[:]; len(s.peers) > 1 {
		r.nodes = make([]releasedAt, len(s.peers))
	}
	r.token = max(s.wall(), r.a.stamp+1)
	c.last, c.held, c.handed = r, false, false
	if !off(ruleE) || r.lease {
		c.attempt = nil
	}
	s.released.add(r.a.owner)
	known := 0
	for i, n := range r.a.nodes {
		if n.mark > 0 || !n.until.IsZero() || r.leave && n.sent > 0 {
			known++
		}
		r.nodes[i].asked = n.sent > 0
	}
	// What an attempt without a grant left open, its error has told.
	r.needed = min(s.q, known)
	if r.lease {
		r.needed = s.q
	}
	r.confirmed = r.needed == 0
	return r
}

// releaseCall is one RELEASE.
type releaseCall struct {
	stamp int64
	keys  [3]string
	args  [8]string
}

// write sets what is sent to one node. Where its mark is known to stand at the highest stamp
// sent there, that need not be looked at. A Cluster has no queue.
func (w *releaseCall) write(r *releasing, p *peer, script *voteScript) Call {
	c := r.c
	c.mu.Lock()
	n := r.a.nodes[p.index]
	c.mu.Unlock()
	w.keys = [3]string{c.vote, c.mark, c.queue}
	w.args = [8]string{r.a.owner, "0", "0", "0", "0"}
	keys, args := w.keys[:1], w.args[:2]
	if w.stamp = 0; n.marked != n.sent {
		w.stamp = n.sent
		w.args[1] = strconv.FormatInt(n.sent, 10)
		keys = w.keys[:2]
	}
	if (r.leave || r.handOn) && !p.admitted.isCluster.Load() {
		keys, args = w.keys[:], w.args[:5]
		if r.leave && (c.adopted || n.stays || n.parks > 0) {
			w.args[2] = "1"
		}
		if r.handOn {
			w.args[3] = cachedText(&c.s.rsvText, c.reserve())
			w.args[4] = strconv.FormatInt(r.token, 10)
			if script != nil {
				return Call{Script: script.release, Keys: keys, Args: args, Strict: script.checks != checkNone, Once: true}
			}
		}
		if r.next != nil {
			args = w.args[:]
			w.args[5], w.args[6], w.args[7] = r.next.owner, strconv.FormatInt(r.stamp2, 10), r.next.owner[ownerBirth:ownerInbox]
		}
	}
	return Call{Script: c.s.scripts.release, Keys: keys, Args: args, Once: true}
}

// debt is the RELEASE for one node, to be repeated.
func (r *releasing) debt(p *peer) debt {
	w := new(releaseCall)
	call := w.write(r, p, nil)
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	return debt{call: call, stamp: w.stamp, until: r.until,
		done: func(did released, err error, first bool) { r.deliver(p, did, err, first) }}
}

// send asks the nodes that have not answered: at once, or by a node's debts where it has not
// been answering. first says that they are asked for the first time.
func (r *releasing) send(first bool) {
	sent := r.c.s.clock.Now()
	r.mu.Lock()
	r.settled = context.AfterFunc(r.c.s.shortContext(), func() { r.overdue(sent) })
	r.open++ // until all are asked
	r.mu.Unlock()
	defer r.closeOne()
	list := make([]giving, len(r.nodes))
	for i, p := range r.c.s.peers {
		r.mu.Lock()
		n := r.nodes[i]
		r.mu.Unlock()
		switch silent := p.silent(); {
		case !n.asked || n.answered:
		case silent != nil:
			r.deliver(p, released{}, silent, true)
			p.owe(r.debt(p))
		case n.open: // the client has not returned from an earlier request
			p.owe(r.debt(p))
		default:
			list[i] = giving{r: r, p: p, sent: sent, first: first}
			r.ask(p, &list[i])
		}
	}
}

// ask sends RELEASE to one node and does not wait for the answer.
func (r *releasing) ask(p *peer, g *giving) {
	r.mu.Lock()
	r.open++
	n := &r.nodes[p.index]
	n.open, n.owed = true, false
	r.mu.Unlock()
	p.s.sending.begin()
	p.post(g)
}

// giving is a RELEASE on its way to one node.
type giving struct {
	r     *releasing
	p     *peer
	sent  clock.Instant
	first bool
	plain bool // by the script that every server may run
	w     releaseCall
}

// call is written as late as it can be: the answer to a VOTE that was still under way when the
// lease ended may tell where the mark stands.
func (g *giving) call() Call {
	if g.plain {
		return g.w.write(g.r, g.p, nil)
	}
	return g.w.write(g.r, g.p, g.p.admitted.load(g.r.c.vote))
}

func (g *giving) answer(reply Reply) {
	r, p := g.r, g.p
	if unadmitted(reply) && !g.plain {
		g.plain = true
		p.post(g)
		return
	}
	defer p.s.sending.end()
	r.mu.Lock()
	n := &r.nodes[p.index]
	owed := n.owed
	n.open = false
	r.mu.Unlock()
	r.closeOne()
	if wait, repeat := r.take(p, reply, g.w.stamp, g.sent, g.first && !owed); repeat && !owed {
		p.owe(r.debt(p).after(p.s.clock.Now(), wait))
	}
}

func (r *releasing) closeOne() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open--; r.open == 0 {
		r.settled()
	}
}

// overdue leaves the requests that are unanswered to the debts: the client may never return.
func (r *releasing) overdue(sent clock.Instant) {
	for _, p := range r.c.s.peers {
		r.mu.Lock()
		n := &r.nodes[p.index]
		late := n.open && !n.owed
		n.owed = n.owed || late
		r.mu.Unlock()
		if late {
			p.note(errNoAnswer{p.s.opts.NodeTimeout}, sent)
			p.owe(r.debt(p))
		}
	}
}

// direct asks the only node in this goroutine, and reports whether it did.
func (r *releasing) direct(ctx context.Context, sent clock.Instant, first bool) bool {
	s := r.c.s
	p := s.peers[0]
	r.mu.Lock()
	ask := r.nodes[0].asked && !r.nodes[0].open
	r.mu.Unlock()
	if !ask || p.silent() != nil {
		return false
	}
	node := p.direct(ctx)
	if node == nil {
		return false
	}
	d := s.directCall()
	d.call = d.release.write(r, p, p.admitted.load(r.c.vote))
	stamp := d.release.stamp
	s.sending.begin()
	reply := p.runOne(node, &d.call)
	s.sending.end()
	if unadmitted(reply) {
		return false
	}
	s.calls.Put(d)
	if wait, repeat := r.take(p, reply, stamp, sent, first); repeat {
		p.owe(r.debt(p).after(s.clock.Now(), wait))
	}
	return true
}

// take books a reply, and reports whether RELEASE must be sent again, and after what pause.
func (r *releasing) take(p *peer, reply Reply, stamp int64, sent clock.Instant, first bool) (wait time.Duration, repeat bool) {
	did, wait, err := parseRelease(reply, stamp)
	switch {
	case err == nil || codeOf(err) != "":
		p.answered()
	case err != errStale:
		p.note(err, sent)
	}
	p.tell(r.trace, "release", r.c.key(), kindOfRelease(did, err), err, sent)
	r.deliver(p, did, err, first)
	return wait, err != nil || wait > 0 && !off(ruleMRepeat)
}

func kindOfRelease(did released, err error) kind {
	switch {
	case err != nil:
		return noAnswer
	case did.freed:
		return ok
	}
	return none
}

// deliver books an answer. Only the first request to a node tells whether the vote was
// there: a repeated one may find that an earlier one, whose reply was lost, deleted it.
func (r *releasing) deliver(p *peer, did released, err error, first bool) {
	if r.next != nil && err == nil {
		r.c.placed(r.next, p, did.placed, first)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	n := &r.nodes[p.index]
	if n.answered {
		return
	}
	n.outcome, n.err = kindOfRelease(did, err), permanent(p.name, r.c.vote, err)
	if err != nil {
		return
	}
	n.answered = true
	r.answered++
	if first && !did.freed {
		r.gone++
	}
	if r.answered == r.needed {
		// Lost where it turns out that no quorum can have held the vote until then.
		if r.lease && r.gone > len(r.nodes)-r.c.s.q {
			r.result = &store.LostError{}
		}
		r.confirmed = true
		if r.done != nil {
			close(r.done)
		}
	}
}

// wait returns when enough nodes have answered, when limit is done, the node timeout of the call,
// or when ctx is.
func (r *releasing) wait(ctx, limit context.Context) error {
	if r.lost != nil {
		return r.lost // whatever the nodes answer
	}
	r.mu.Lock()
	confirmed, result := r.confirmed, r.result
	r.mu.Unlock()
	if confirmed {
		return result
	}
	select {
	case <-r.waited():
	case <-ctx.Done():
		return r.unconfirmed(ctx.Err())
	case <-limit.Done():
		return r.unconfirmed(nil)
	}
	return r.result
}

// unconfirmed says that too few nodes have answered, unless enough of them have by now.
func (r *releasing) unconfirmed(cause error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.confirmed {
		return r.result
	}
	e := &QuorumError{Op: "release", Needed: r.needed, kinds: []error{store.ErrUncertain, store.ErrUnavailable}}
	if cause != nil {
		e.kinds = append(e.kinds, cause)
	}
	for i, n := range r.nodes {
		p := r.c.s.peers[i]
		switch {
		case !n.asked:
			e.Nodes = append(e.Nodes, NodeError{Node: p.name, Outcome: "not asked"})
		case !n.answered && n.err == nil:
			e.Nodes = append(e.Nodes, p.outcome(noAnswer, errNoAnswer{r.c.s.opts.NodeTimeout}))
		default:
			e.Nodes = append(e.Nodes, p.outcome(n.outcome, n.err))
		}
	}
	return e
}
