package redlock

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// Extend runs EXTEND of docs/protocol.md, section 2, for one lease.
func (c *claim) Extend(ctx context.Context) (store.Grant, error) {
	r := c.s.ExtendMany(ctx, []store.Claim{c})[0]
	return r.Grant, r.Err
}

// ExtendMany extends the leases of many claims with one pipeline for each node. Each
// answer is decided by itself; the call returns when all are, at the latest at the node
// timeout. A lease that is not decided by then, or whose quorum did not answer, gets a
// [*QuorumError]: it may be asked for again while it is valid.
func (s *Store) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	b := &batch{s: s, trace: store.Trace(ctx), tr: s.clock.Now(), done: make(chan struct{}), results: make([]store.Result, len(claims))}
	for i, sc := range claims {
		c, ours := sc.(*claim)
		if !ours || c.s != s {
			b.results[i].Err = &store.InvalidError{Field: "claim", Value: "number " + strconv.Itoa(i), Rule: "must be a claim of this store"}
			continue
		}
		e, err := c.beginExtend(b, i)
		if err != nil {
			b.results[i].Err = err
			continue
		}
		b.leases = append(b.leases, e)
	}
	b.undecided = len(b.leases)
	if b.undecided == 0 {
		return b.results
	}
	if err := ctx.Err(); err != nil {
		for _, e := range b.leases {
			b.results[e.index].Err = err
		}
		return b.results
	}
	b.send()
	b.await(ctx)
	return b.results
}

// batch is one extension of many leases.
type batch struct {
	s     *Store
	tr    clock.Instant // stamped before anything was sent
	trace func(store.NodeEvent)

	mu        sync.Mutex
	leases    []*extending
	pending   int // nodes that have not answered
	undecided int
	results   []store.Result
	closed    bool // the results are handed out
	done      chan struct{}
}

// extending is one lease in a batch.
type extending struct {
	c     *claim
	a     *attempt
	owner string
	index int // of its result
	state extension
	tally keepTally
	nodes []NodeError
	heal  []bool // nodes that need a new vote, or whose promise had run out
	by    answer // a busy answer, if there was one
}

// beginExtend takes what the extension needs of a claim that is a lease.
func (c *claim) beginExtend(b *batch, index int) (*extending, error) {
	if c.invalid != nil {
		return nil, c.invalid
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.lost != nil:
		return nil, c.lost
	case c.ended || c.ticketed:
		return nil, store.ErrReleased
	case !c.held:
		return nil, &store.InvalidError{Field: "claim", Value: c.key(), Rule: "is not granted; only a lease can be extended"}
	case c.s.clock.Passed(c.until) && !off(ruleL):
		c.lost = &store.LostError{}
		return nil, c.lost
	}
	e := &extending{c: c, a: c.attempt, owner: c.attempt.owner, index: index,
		nodes: make([]NodeError, len(b.s.peers)), heal: make([]bool, len(b.s.peers))}
	for i, p := range b.s.peers {
		e.nodes[i] = NodeError{Node: p.name, Outcome: noAnswer.String(), Err: errNoAnswer{b.s.opts.NodeTimeout}}
	}
	return e, nil
}

// send asks every node. One that has many pipelines overdue is not sent another: its client
// would gather goroutines.
func (b *batch) send() {
	b.pending = len(b.s.peers)
	calls := make([]Call, len(b.leases))
	for i, e := range b.leases {
		calls[i] = Call{
			Script: b.s.scripts.keep,
			Keys:   []string{e.c.vote},
			Args:   []string{e.owner, b.s.milliseconds(e.c.ttl)},
		}
	}
	away := b.away()
	for i, p := range b.s.peers {
		if away[i] != nil {
			b.deliver(p, nil, notAsked{away[i]})
			continue
		}
		if p.overdue.Load() >= maxOverdue && !p.due() {
			b.deliver(p, nil, errors.New("earlier extensions are unanswered"))
			continue
		}
		go func() {
			late := time.AfterFunc(b.s.opts.NodeTimeout, func() { p.overdue.Add(1) })
			replies := p.run(calls...)
			if !late.Stop() {
				p.overdue.Add(-1)
			}
			b.deliver(p, replies, nil)
		}()
	}
}

// away tells which nodes are left out, and why: those that have just missed an answer, or
// answer nothing while others do, as long as a quorum of others can be asked.
func (b *batch) away() []error {
	why, left := make([]error, len(b.s.peers)), 0
	for i, p := range b.s.peers {
		if why[i] = p.silent(); why[i] == nil {
			why[i] = p.crowded()
		}
		if why[i] == nil {
			left++
		}
	}
	if left < b.s.q {
		clear(why)
	}
	return why
}

// deliver books a node's answers. The last node's starts the healing.
func (b *batch) deliver(p *peer, replies []Reply, err error) {
	answers, errs := make([]answer, len(b.leases)), make([]error, len(b.leases))
	for i, e := range b.leases {
		if errs[i] = err; err == nil {
			if errs[i] = replies[i].Err; errs[i] == nil {
				answers[i], errs[i] = parseKeep(replies[i].Value)
			}
		}
		p.tell(b.trace, "extend", e.c.key(), answers[i].kind, errs[i], b.tr)
	}
	for _, a := range answers {
		if a.now != 0 { // the stamps of healing follow the clocks
			b.s.learnClock(p, a.now, b.s.clock.Since(b.tr))
			break
		}
	}
	if errs[0] == nil || codeOf(errs[0]) != "" {
		p.answered()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, e := range b.leases {
		b.book(e, p, answers[i], errs[i])
	}
	b.pending--
	if b.undecided == 0 || b.pending == 0 {
		b.closeLocked()
	}
	if b.pending == 0 {
		go b.heal()
	}
}

// book counts one answer to one lease.
func (b *batch) book(e *extending, p *peer, a answer, err error) {
	e.nodes[p.index] = p.outcome(a.kind, permanent(p.name, e.c.vote, err))
	c := e.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.attempt != e.a || !c.held { // released meanwhile
		b.decide(e, goneFromQuorum, store.Result{Err: store.ErrReleased})
		return
	}
	switch a.kind {
	case kept:
		n := &e.a.nodes[p.index]
		if b.s.clock.Passed(n.until) && !off(ruleP) && !off(ruleL) {
			e.heal[p.index] = true // rule P: its promise had run out, others may have been promised the vote meanwhile
			break
		}
		n.until = clock.Max(n.until, b.promise(c))
		e.tally.counted++
	case none:
		e.tally.gone++
		e.heal[p.index] = true
		e.a.nodes[p.index].until = clock.Instant{}
	case busy:
		e.tally.gone++
		e.by = a
	default:
		return
	}
	switch e.tally.judge(len(b.s.peers), b.s.q, !b.s.clock.Passed(c.until)) {
	case extended:
		c.until = clock.Max(c.until, b.promise(c))
		if c.handed {
			c.handed = false
			c.s.inbox.leave(c)
		}
		b.decide(e, extended, store.Result{Grant: c.grantLocked(0)})
	case goneFromQuorum:
		if e.state == open {
			c.lost = e.lostTo()
			b.decide(e, goneFromQuorum, store.Result{Err: c.lost})
		}
	}
}

// promise is until when the nodes that keep this extension's request promise the vote. An
// answer counts for the request that it answers, however late it comes (rule F).
func (b *batch) promise(c *claim) clock.Instant {
	sent := b.tr
	if off(ruleF) {
		sent = b.s.clock.Now()
	}
	return sent.Add(c.ttl - drift(c.ttl))
}

// decide settles the result of one lease, once.
func (b *batch) decide(e *extending, state extension, r store.Result) {
	if e.state != open {
		return
	}
	e.state = state
	b.undecided--
	if !b.closed {
		b.results[e.index] = r
	}
}

func (e *extending) lostTo() error {
	if e.by.kind != busy {
		return &store.LostError{}
	}
	h := describe(e.c.key(), e.by.owner, e.c.s.wall())
	h.NoTTL = e.by.pttl < 0
	h.TTL = time.Duration(max(0, e.by.pttl)) * time.Millisecond
	return &store.LostError{By: &store.HeldError{Holder: h}}
}

func (b *batch) closeLocked() {
	if !b.closed {
		b.closed = true
		close(b.done)
	}
}

// await returns when every lease is decided, when all nodes have answered, or at the node
// timeout. What is not decided then gets an error that names each node's answer.
func (b *batch) await(ctx context.Context) {
	limit := time.NewTimer(b.s.opts.NodeTimeout)
	defer limit.Stop()
	var cause error
	select {
	case <-b.done:
	case <-limit.C:
	case <-ctx.Done():
		cause = ctx.Err()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closeLocked()
	for _, e := range b.leases {
		if e.state == open {
			err := &QuorumError{Op: "extend", Needed: b.s.q, Nodes: append([]NodeError(nil), e.nodes...), kinds: []error{store.ErrUnavailable, store.ErrUncertain}}
			if cause != nil {
				err.kinds = append(err.kinds, cause)
			}
			b.results[e.index].Err = err
		}
	}
	if b.pending > 0 {
		time.AfterFunc(b.s.opts.NodeTimeout-b.s.clock.Since(b.tr), func() {
			b.noteSilent()
			b.heal()
		})
	}
}

// noteSilent books a missing answer for the nodes that have not answered by the node
// timeout.
func (b *batch) noteSilent() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, p := range b.s.peers {
		var silent errNoAnswer
		var unasked notAsked
		if err := b.leases[0].nodes[i].Err; errors.As(err, &silent) && !errors.As(err, &unasked) {
			p.note(silent, b.tr)
		}
	}
}

// heal gives the votes back to nodes that have lost them, or whose promise had run out, for
// leases that a quorum has kept (rule U): with VOTE, of stamps that rise (rule N).
func (b *batch) heal() {
	for i, p := range b.s.peers {
		var patients []*extending
		b.mu.Lock()
		for _, e := range b.leases {
			if e.heal[i] && (e.state == extended || off(ruleU)) {
				e.heal[i] = false
				patients = append(patients, e)
			}
		}
		b.mu.Unlock()
		if len(patients) > 0 && p.usable() == nil {
			go p.heal(patients, b.trace)
		}
	}
}

// heal sends one VOTE for each lease. It is not counted for the extension; a promise that
// it brings is the node's own.
func (p *peer) heal(patients []*extending, trace func(store.NodeEvent)) {
	for _, e := range patients {
		t0 := p.s.clock.Now()
		call, valid := e.c.beginHeal(e.a, p)
		if !valid {
			continue
		}
		a, err := p.vote(e.c.vote, call, false)
		p.tell(trace, "heal", e.c.key(), a.kind, err, t0)
		e.c.book(e.a, p, call.stamp, t0, a, false)
		if err != nil && codeOf(err) == "" {
			return // the node does not answer: at the next extension
		}
	}
}

// beginHeal proposes a healing stamp and books it as sent. A node whose clock is far off
// gets stamps of its own, which never raise S.
func (c *claim) beginHeal(a *attempt, p *peer) (*voteCall, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.attempt != a || !c.held || c.s.clock.Passed(c.until) {
		return nil, false
	}
	n := &a.nodes[p.index]
	stamp := max(c.s.wall(), n.mark+1, a.stamp+1)
	if apart := time.Duration(p.offset.Load()-c.s.offset.Load()) * time.Microsecond; apart.Abs() > aheadLimit/2 {
		stamp = max(wallNow()+p.offset.Load(), n.mark+1)
	} else {
		a.stamp = stamp
	}
	if off(ruleN) {
		stamp = int64(c.token)
	}
	n.sent = max(n.sent, stamp)
	call := new(voteCall)
	c.nameLocked()
	call.write(c, a.owner, stamp)
	return call, true
}
