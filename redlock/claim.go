package redlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// claim is one acquisition: a row of attempts, each with an owner of its own, of which the
// last may become the lease.
type claim struct {
	s       *Store
	vote    string // the name of the vote: the key behind the prefix
	ttl     time.Duration
	label   string
	invalid error         // why it is refused, before any I/O
	waits   bool          // it may be parked
	least   time.Duration // validity that a grant by hand-over must leave; zero where it is not wanted
	polls   int32         // of Wait, which no two goroutines call

	held     bool // attempt is a lease; this and the rest is guarded by mu
	handed   bool // by hand-over, and not extended since
	taken    bool // Try has answered that grant
	ticketed bool
	ended    bool // Release was called
	mu       sync.Mutex
	birth    int64    // wall() at the claim's first attempt
	attempt  *attempt // &first, or a later one
	seen     int64
	lost     error
	token    fence.Token
	until    clock.Instant // end of the validity, margin aside
	last     *releasing    // the RELEASE that ended the lease, or the last attempt
	w        *waiting      // nil where it has not had to wait
	adopted  bool          // whoever acquired it may have left places in the queues
	mark     string        // names of the records beside the vote, once they are needed
	queue    string
	first    attempt
}

// key is what the user calls it.
func (c *claim) key() string { return c.vote[len(c.s.opts.Prefix):] }

// attempt is one owner and what its requests did at each node. It is guarded by the
// claim's mutex.
type attempt struct {
	owner string
	stamp int64 // S: the highest stamp that was sent to any node with a sane clock
	nodes []atNode
	only  [1]atNode // nodes of a store that has one
}

// atNode is what an attempt knows of one node.
type atNode struct {
	sent   int64         // highest stamp sent there, zero where none was
	marked int64         // highest stamp that it answered OK to
	mark   int64         // f, as last answered
	until  clock.Instant // until_n: end of its promise
	place  int64         // in its queue, from 1, as last answered; zero where there is none
	parks  int           // requests without an answer that may have got it a place
	stays  bool          // it may have a place that no message has taken away
}

// Claim returns a fresh claim, without I/O.
func (s *Store) Claim(key string, o store.ClaimOptions) store.Claim {
	c := &claim{s: s, vote: s.opts.Prefix + key, label: encodeLabel(o.Label), ttl: o.TTL.Truncate(time.Millisecond), waits: o.Wait, least: o.Least}
	c.invalid = store.CheckKey(key)
	if c.invalid == nil {
		c.invalid = checkVote(c.vote, key)
	}
	if c.invalid == nil {
		c.invalid = s.info.CheckTTL(o.TTL)
	}
	return c
}

// voteCall is one VOTE, of any node's script.
type voteCall struct {
	stamp int64
	keys  [3]string
	args  [4]string
}

// write sets what is sent. The claim has its names.
func (v *voteCall) write(c *claim, owner string, stamp int64) {
	v.stamp = stamp
	v.keys = [3]string{c.vote, c.mark, c.queue}
	v.args = [4]string{owner, c.s.milliseconds(c.ttl), strconv.FormatInt(stamp, 10), owner[ownerBirth:ownerInbox]}
}

// nameLocked makes the names of the records beside the vote. c.mu is held.
func (c *claim) nameLocked() {
	if c.mark == "" {
		var buf [1200]byte
		b := appendBeside(buf[:0], c.vote, "fence")
		n := len(b)
		names := string(appendBeside(b, c.vote, "queue"))
		c.mark, c.queue = names[:n], names[n:]
	}
}

// on is the call by one node's script, which parks the claim there or does not.
func (v *voteCall) on(script *voteScript, park bool) Call {
	keys, args := v.keys[:2], v.args[:3]
	if park {
		keys, args = v.keys[:], v.args[:]
	}
	return Call{Script: script.Script, Keys: keys, Args: args, Strict: script.checks != checkNone}
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// limits bounds the rounds of one attempt, by the decision that leads to the next.
type limits struct{ again, gone, keep, place int }

const (
	maxAgain = 4
	maxPlace = 2 // rounds for a place in the queues, whose marks were above the stamp
	maxGone  = 8
	maxKeep  = 8
	maxNew   = 2 // attempts that begin anew because the clocks were far apart
)

// Try runs the rounds of docs/protocol.md, section 2, ACQUIRE.
func (c *claim) Try(ctx context.Context) (store.Grant, error) {
	if err := ctx.Err(); err != nil {
		return store.Grant{}, err
	}
	if c.invalid != nil {
		return store.Grant{}, c.invalid
	}
	if g, err := c.granted(); err != nil || g.Owner != "" {
		return g, err
	}
	if c.waits {
		c.enter()
	}
	start := c.s.clock.Now()
	sent := start
	if !c.s.contacted.Load() {
		sent = clock.Instant{} // the first contact takes its time
	}
	if err := c.s.contact(ctx, c.vote); err != nil {
		return store.Grant{}, err
	}
	for renewed := 0; ; renewed++ {
		grant, d, r, err := c.try(ctx, start, sent)
		sent = clock.Instant{}
		if err != nil || d.action == granted {
			return grant, err
		}
		if d.action == newStamps && renewed < maxNew {
			continue
		}
		return store.Grant{}, c.failure(d, r)
	}
}

// granted answers a claim that is tried again after its grant: the same grant, with what is
// left of it, or that it is lost. The grant is zero where there was none.
func (c *claim) granted() (store.Grant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handed && !c.taken && c.s.clock.Until(c.until) < c.enough() { // nobody has heard of it: ask
		c.held, c.handed = false, false
		c.s.inbox.returned(c)
	}
	if c.w != nil {
		c.w.idle = false
	}
	switch {
	case c.ended || !c.held:
		return store.Grant{}, nil
	case c.lost == nil && c.s.clock.Passed(c.until):
		c.lost = &store.LostError{}
	}
	if c.lost != nil {
		return store.Grant{}, c.lost
	}
	g := c.grantLocked(0)
	g.TTL = (c.s.clock.Until(c.until) + store.Drift(0)) * 100 / 99 // less drift, that is c.until
	if c.taken = true; c.handed {
		g.ExtendIn = handedPace
	}
	return g, nil
}

// try runs the rounds of one attempt. It ends with a grant; with the context's error; or
// with the decision that ended the attempt, whose votes have then been given back.
//
// The first round is sent now, where that is not zero: no clock is read twice.
func (c *claim) try(ctx context.Context, start, now clock.Instant) (store.Grant, decision, *round, error) {
	var l limits
	var oks []answer // of earlier rounds, where tests have switched rule I off
	for {
		r, err := c.round(ctx, now)
		now = clock.Instant{}
		if err != nil {
			c.abandon(ctx, nil, false)
			return store.Grant{}, decision{}, nil, err
		}
		d := r.decide(&oks)
		if d.action == granted {
			grant, valid, err := c.grant(r, start)
			if err != nil || valid {
				return grant, d, r, err
			}
			d.action = giveUp // granted too late to be of use
		}
		pause, goOn := c.next(d, r, &l)
		if !goOn {
			c.split(d, r, c.abandon(ctx, r, d.action != newStamps))
			return store.Grant{}, d, r, nil
		}
		if err := sleep(ctx, pause); err != nil {
			c.abandon(ctx, nil, false)
			return store.Grant{}, decision{}, nil, err
		}
	}
}

// next says whether the attempt goes on after a decision, and after what pause.
func (c *claim) next(d decision, r *round, l *limits) (time.Duration, bool) {
	rtt := c.s.roundTrip()
	switch d.action {
	case held:
		l.place++
		return 0, r.unplaced() && l.place <= maxPlace
	case again:
		l.again++
		return 0, l.again <= maxAgain
	case awaitGone:
		l.gone++
		if l.gone > 2 { // the RELEASE may have to be repeated
			return max(rtt/2, time.Millisecond<<(l.gone-3)), l.gone <= maxGone
		}
		return rtt / 2, true
	case keepVotes:
		l.keep++
		return rtt / 2 << (l.keep - 1), l.keep <= maxKeep
	}
	return 0, false
}

// unplaced reports whether the round should have got the claim a place in the queues, and has
// not: its stamp was below the marks there.
func (r *round) unplaced() bool {
	c := r.c
	c.mu.Lock()
	defer c.mu.Unlock()
	placed, refused := 0, 0
	for i, n := range r.a.nodes {
		switch {
		case n.place > 0, r.parks[i] && r.errs[i] == errPending: // most likely
			placed++
		case r.parks[i] && r.answers[i].kind == busy:
			refused++
		}
	}
	unplaced := placed < c.s.q && refused > 0
	if c.w != nil {
		c.w.unplaced = unplaced
	}
	return unplaced
}

// split counts the rounds in a row in which the claim gave votes back: it backs off. One that had
// none, or has to wait for a holder, waits for a hand-over.
func (c *claim) split(d decision, r *round, gaveBack bool) {
	t := count(r.answers)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.w == nil:
	case d.action == held || t.oks+t.kepts == 0:
		c.w.splits = 0
	case gaveBack:
		c.w.splits++
	}
}

// enter makes the claim one that waits, where the store is subscribed: it is parked in its first round.
func (c *claim) enter() {
	if !c.s.inbox.active() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.ended {
		c.s.inbox.enterLocked(c)
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// round is one stamp sent to all usable nodes.
type round struct {
	c     *claim
	a     *attempt
	stamp int64
	t0    clock.Instant

	mu       sync.Mutex
	answers  []answer
	errs     []error
	parks    []bool // it asks for a place there
	asked    int
	answered int           // including those that failed
	closed   bool          // the decision is taken; later answers are only booked
	done     chan struct{} // closed when the round can stop; nil where nobody waits
	ending   bool
	enough   chan struct{} // closed when Q nodes have answered, or so many cannot any more

	only struct { // answers and errs of a store of one node
		answers [1]answer
		errs    [1]error
		parks   [1]bool
	}
}

func (s *Store) newRound(c *claim) *round {
	r := &round{c: c}
	if len(s.peers) == 1 {
		r.answers, r.errs, r.parks = r.only.answers[:], r.only.errs[:], r.only.parks[:]
	} else {
		r.answers, r.errs, r.parks = make([]answer, len(s.peers)), make([]error, len(s.peers)), make([]bool, len(s.peers))
	}
	return r
}

// round sends the next stamp and waits until the answers decide. A zero now is read.
func (c *claim) round(ctx context.Context, now clock.Instant) (*round, error) {
	r := c.s.newRound(c)
	var room [8]*peer
	usable, crowded := room[:0], []*peer(nil)
	for i, p := range c.s.peers {
		if err := p.usable(); err != nil {
			r.errs[i] = notAsked{err}
		} else if err := p.crowded(); err != nil {
			r.errs[i] = notAsked{err}
			crowded = append(crowded, p)
		} else {
			usable = append(usable, p)
		}
	}
	if len(usable) < c.s.q { // they may only be slow, and nobody else can decide
		usable = append(usable, crowded...)
		for _, p := range crowded {
			r.errs[p.index] = nil
		}
	}
	if len(usable) < c.s.q {
		for _, p := range usable {
			r.errs[p.index] = errTooFew
		}
		r.a = c.current()
		return r, nil
	}
	r.asked = len(usable)
	if err := c.begin(r, usable, now); err != nil {
		return nil, err
	}
	trace := store.Trace(ctx)
	if r.direct(ctx, usable[0], trace) {
		return r, nil
	}
	r.done, r.enough = make(chan struct{}), make(chan struct{})
	call := new(voteCall)
	call.write(c, r.a.owner, r.stamp)
	list := make([]asking, len(usable))
	for i, p := range usable {
		list[i] = asking{r: r, p: p, vote: call, trace: trace}
		list[i].ask()
	}
	return r, r.await(ctx)
}

// direct asks the only node in this goroutine, and reports whether that gave an outcome. A node
// that must be admitted first is asked again, by ask.
func (r *round) direct(ctx context.Context, p *peer, trace func(store.NodeEvent)) bool {
	c := r.c
	script := p.admitted.load(c.vote)
	if script == nil || p.admitted.isCluster.Load() {
		return false
	}
	node := p.direct(ctx)
	if node == nil {
		return false
	}
	d := c.s.directCall()
	d.vote.write(c, r.a.owner, r.stamp)
	d.call = d.vote.on(script, r.parks[0])
	reply := p.runOne(node, &d.call)
	c.s.calls.Put(d)
	if unadmitted(reply) {
		return false
	}
	a, err := p.counted(c.vote, r.stamp, reply, r.t0)
	p.tell(trace, "acquire", c.key(), a.kind, err, r.t0)
	r.deliver(p, a, err)
	return true
}

// asking is a round's VOTE on its way to one node.
type asking struct {
	r      *round
	p      *peer
	vote   *voteCall
	script *voteScript
	trace  func(store.NodeEvent)
}

// ask sends the round's VOTE to one node and does not wait for the answer.
func (q *asking) ask() {
	q.script = q.p.admitted.load(q.r.c.vote)
	if q.script == nil || q.p.admitted.isCluster.Load() {
		go q.whole()
		return
	}
	q.p.post(q)
}

func (q *asking) call() Call { return q.vote.on(q.script, q.r.parks[q.p.index]) }

func (q *asking) answer(reply Reply) {
	switch {
	case unadmitted(reply):
		go q.whole()
	case reply.Err == errStale: // says nothing of the node
		q.deliver(answer{}, reply.Err)
	default:
		q.deliver(q.p.counted(q.r.c.vote, q.vote.stamp, reply, q.r.t0))
	}
}

// whole asks with the admission that it may need.
func (q *asking) whole() { q.deliver(q.p.vote(q.r.c.vote, q.vote, q.r.parks[q.p.index])) }

func (q *asking) deliver(a answer, err error) {
	q.p.tell(q.trace, "acquire", q.r.c.key(), a.kind, err, q.r.t0)
	q.r.deliver(q.p, a, err)
}

// current is the attempt that goes on, or a fresh one.
func (c *claim) current() *attempt {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.currentLocked(c.s.wall())
}

func (c *claim) currentLocked(wall int64) *attempt {
	if c.birth == 0 {
		c.birth = wall
	}
	if c.attempt == nil {
		c.attempt = c.newAttempt(newOwner(c.birth, c.s.inbox.name, c.label).text)
	}
	return c.attempt
}

// newAttempt returns a fresh attempt: the claim's first one is part of it.
func (c *claim) newAttempt(owner string) *attempt {
	a := &c.first
	if a.owner != "" {
		a = new(attempt)
	}
	a.owner = owner
	if a.nodes = a.only[:]; len(c.s.peers) > 1 {
		a.nodes = make([]atNode, len(c.s.peers))
	}
	return a
}

// begin proposes a stamp and books it as sent, before anything is: a RELEASE that
// overtakes the round must know it.
func (c *claim) begin(r *round, usable []*peer, now clock.Instant) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return store.ErrReleased
	}
	c.nameLocked()
	wall := c.s.wall()
	r.a = c.currentLocked(wall)
	r.stamp = max(wall, c.seen+1, r.a.stamp+1)
	if c.w != nil {
		r.stamp = max(r.stamp, c.beginParked(r, usable, wall))
	}
	r.a.stamp = r.stamp
	for _, p := range usable {
		r.a.nodes[p.index].sent = r.stamp // rule M
	}
	if r.t0 = now; now.IsZero() {
		r.t0 = c.s.clock.Now()
	}
	return nil
}

// lead is by how much, in us, a stamp that shall be above the marks is ahead of them.
func (s *Store) lead() int64 { return min(s.roundTrip(), aheadLimit/4).Microseconds() }

// beginParked asks for a place at the nodes that are listened to, and returns the least stamp for
// that. It must be above the marks when it arrives: those of nearer clients go on meanwhile.
// Whatever has woken the claim is answered by this round. c.mu is held.
func (c *claim) beginParked(r *round, usable []*peer, wall int64) (stamp int64) {
	w := c.w
	if c.seen == 0 {
		c.seen = c.s.inbox.recent(c.vote, wall)
	}
	lead := c.s.lead()
	switch {
	case w.hint > 0: // the vote is kept for it
		stamp = w.hint + 1
	case w.unplaced:
		stamp = max(wall, c.seen+1) + 2*lead
	default:
		stamp = max(wall, c.seen+1) + lead
	}
	w.hint, w.ask, w.stray, w.next, w.idle = 0, false, false, clock.Instant{}, false
	w.stopGrace()
	w.forgetGiven()
	select {
	case <-w.woken:
	default:
	}
	for _, p := range usable {
		if c.s.inbox.listens(p) {
			r.parks[p.index] = true
			r.a.nodes[p.index].parks++
			c.s.inbox.knows(c, r.a.owner)
		}
	}
	return stamp
}

// deliver books a node's answer, in its round or late.
func (r *round) deliver(p *peer, a answer, err error) {
	r.c.book(r.a, p, r.stamp, r.t0, a, r.parks[p.index])
	if late := r.take(p, a, err); late && (a.kind == ok || a.kind == kept) {
		r.c.stray(r.a)
	}
}

// take counts an answer, and reports whether it came after the decision.
func (r *round) take(p *peer, a answer, err error) (late bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answered++
	if r.closed {
		return true
	}
	r.answers[p.index], r.errs[p.index] = a, err
	t, pending := count(r.answers), r.asked-r.answered
	if !r.ending && (t.answered >= r.c.s.q || t.answered+pending < r.c.s.q) {
		r.ending = true
		if r.enough != nil {
			close(r.enough)
		}
	}
	early := settled(r.c.s.q, t, pending) && !off(ruleA) && !off(ruleI)
	if early || r.answered == r.asked {
		r.closed = true
		if r.done != nil {
			close(r.done)
		}
	}
	return false
}

// book remembers what an answer to VOTE says, for as long as its attempt may use it.
func (c *claim) book(a *attempt, p *peer, stamp int64, t0 clock.Instant, ans answer, parked bool) {
	if ans.kind == noAnswer {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &a.nodes[p.index]
	n.mark = max(n.mark, ans.mark)
	if parked {
		n.parks--
		n.place = ans.place
		n.stays = n.stays || ans.place > 0
	}
	if ans.kind == busy && c.w != nil {
		c.w.pairs[p.index].book(t0, ans, p.admitted.load(c.vote))
	}
	if ans.place > 0 && c.w != nil && c.w.since.IsZero() {
		c.w.since = c.s.clock.Now()
	}
	if parked && ans.kind == busy && ans.place == 0 {
		c.displaced(a)
	}
	if ans.kind == ok {
		n.marked = max(n.marked, stamp)
	}
	if ans.kind == ok && c.held && off(ruleO) {
		c.token = fence.Token(stamp)
	}
	if ans.kind == ok || ans.kind == kept {
		n.until = clock.Max(n.until, t0.Add(c.ttl-drift(c.ttl)))
	}
}

// stray has a claim that waits give back a vote that came after its round.
func (c *claim) stray(a *attempt) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.w != nil && c.attempt == a && !c.held {
		c.w.stray = true
		c.signalLocked()
	}
}

// minStraggle is what the other nodes get at least once Q have answered: a busy machine is
// slow by milliseconds, however near its nodes are.
const minStraggle = 5 * time.Millisecond

// await returns when the answers decide, when Q nodes have answered and as long again (at
// least two round trips, and 5 ms: this one may have been quick) has passed, or at the node timeout.
func (r *round) await(ctx context.Context) error {
	s := r.c.s
	enough := r.enough
	var straggle <-chan time.Time
	limit := s.shortContext().Done() // no timer of its own: the earliest one wakes another thread
	for {
		select {
		case <-r.done:
			return nil
		case <-enough:
			enough = nil
			if r.over() { // which most often comes with it
				return nil
			}
			took := s.clock.Since(r.t0)
			t := time.NewTimer(max(0, min(max(took, 2*s.roundTrip(), minStraggle), s.opts.NodeTimeout-took)))
			defer t.Stop()
			straggle = t.C
		case <-straggle:
			r.close()
			return nil
		case <-limit:
			r.close()
			return nil
		case <-ctx.Done():
			r.close()
			return ctx.Err()
		}
	}
}

func (r *round) over() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.closed
}

// close ends a round whose time is up. A node that has not answered then has missed an
// answer only if it had the whole node timeout; otherwise it was just not waited for.
func (r *round) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	if r.c.s.clock.Since(r.t0) < r.c.s.opts.NodeTimeout {
		return
	}
	err := errNoAnswer{r.c.s.opts.NodeTimeout}
	for i, p := range r.c.s.peers {
		if r.answers[i].kind == noAnswer && r.errs[i] == nil {
			r.errs[i] = err
			p.note(err, r.t0)
		}
	}
}

// decide closes the round and decides by what was answered.
func (r *round) decide(earlier *[]answer) decision {
	r.mu.Lock()
	r.closed = true // from here on nothing is written to its answers
	for i := range r.errs {
		if r.answers[i].kind == noAnswer && r.errs[i] == nil {
			r.errs[i] = errPending
		}
	}
	r.mu.Unlock()
	answers := r.answers // rule I: of one stamp
	if off(ruleI) {
		answers = accumulate(earlier, answers)
	}
	c := r.c
	q := c.s.quorum(answers)
	c.mu.Lock()
	defer c.mu.Unlock()
	d := decide(q, owner{text: r.a.owner, birth: c.birth}, answers, c.s.released.has)
	if d.action == granted {
		return d
	}
	c.seen = nextSeen(c.s.q, c.seen, c.s.wall()+aheadLimit.Microseconds(), r.answers)
	if !off(ruleT) && count(answers).aheads > 0 && (d.action == newStamps || d.action == giveUp) {
		// Some node finds the stamp far ahead and no quorum wanted a higher one: seen is from a
		// bad clock, which was taken for right while ours was not corrected yet.
		c.seen = 0
	}
	return d
}

// errTooFew stands for a node that is well, where too few others are.
var errTooFew = errors.New("not asked, as too few others can be")

// errPending stands for a node whose answer was not waited for.
var errPending = errors.New("not waited for")

// accumulate is what rule I forbids: acceptances of different stamps taken together.
func accumulate(earlier *[]answer, answers []answer) []answer {
	sum := append([]answer(nil), answers...)
	for i, a := range *earlier {
		if a.kind == ok {
			sum[i] = a
		}
	}
	*earlier = sum
	return sum
}

// grant makes the attempt the lease, if its time has not run out on the way: what is left
// must be worth having, at least a tenth of the ttl.
func (c *claim) grant(r *round, start clock.Instant) (store.Grant, bool, error) {
	t0 := r.t0
	if off(ruleB) {
		t0 = c.s.clock.Now()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return store.Grant{}, false, store.ErrReleased // Release has sent the stamp's RELEASE
	}
	until := t0.Add(c.ttl - drift(c.ttl)) // rules B, C
	if c.s.clock.Until(until) <= c.ttl/10 {
		return store.Grant{}, false, nil
	}
	c.held, c.token, c.until = true, fence.Token(r.stamp), until
	c.s.inbox.leave(c)
	return c.grantLocked(t0.Sub(start)), true, nil
}

func (c *claim) grantLocked(passed time.Duration) store.Grant {
	return store.Grant{Token: c.token, Owner: c.attempt.owner, TTL: c.ttl + passed}
}

// failure is the error for the decision that ended a Try.
func (c *claim) failure(d decision, r *round) error {
	e := &QuorumError{Op: "acquire", Needed: c.s.q}
	uncertain, dead, answered := false, 0, 0
	var bad refused
	var why error
	for i, p := range c.s.peers {
		err := r.errs[i]
		if err == errTooFew || err == errPending {
			e.Nodes = append(e.Nodes, NodeError{Node: p.name, Outcome: err.Error()})
			continue
		}
		e.Nodes = append(e.Nodes, p.outcome(r.answers[i].kind, err))
		if err == nil {
			answered++
			continue
		}
		var unasked notAsked
		var reply *ServerError
		if !errors.As(err, &unasked) && !errors.As(err, &reply) && !errors.As(err, &bad) && !neverSent(err) {
			uncertain = true
		}
		if errors.As(err, &bad) {
			dead, why = dead+1, bad.InvalidError
		}
	}
	switch {
	case d.action == held:
		return c.heldBy(d.owner, r)
	case dead > len(c.s.peers)-c.s.q:
		e.kinds = append(e.kinds, store.ErrInvalid, why)
	case answered >= c.s.q && len(count(r.answers).busy) > 0:
		e.kinds = append(e.kinds, c.heldBy(d.owner, r))
	default:
		e.kinds = append(e.kinds, store.ErrUnavailable)
	}
	if uncertain {
		e.kinds = append(e.kinds, store.ErrUncertain)
	}
	return e
}

// neverSent reports whether a request failed before it left: no connection was made.
func neverSent(err error) bool {
	var dial *net.OpError
	return errors.As(err, &dial) && dial.Op == "dial"
}

// heldBy describes the holder: its remaining ttl is the Q-th smallest that its nodes
// answered, since then a quorum may be free.
func (c *claim) heldBy(w string, r *round) *store.HeldError {
	h := describe(c.key(), w, c.s.wall())
	var left []int64
	for _, a := range r.answers {
		if a.kind == busy && (a.owner == w || w == "") {
			if a.pttl < 0 {
				h.NoTTL = true
				continue
			}
			left = append(left, a.pttl)
		}
	}
	if n := min(c.s.q, len(left)); n > 0 {
		h.TTL = max(time.Duration(nthSmallest(n, left))*time.Millisecond, time.Millisecond) // zero is unknown
	}
	h.NoTTL = h.NoTTL && len(left) == 0
	e := &store.HeldError{Holder: h}
	c.mu.Lock()
	defer c.mu.Unlock()
	if place := c.place(); place < somewhere {
		e.Place = int(place)
	}
	return e
}

const (
	minPoll = 5 * time.Millisecond
	maxPoll = 100 * time.Millisecond
)

// pollPause doubles from poll to poll, and ends when the holder's ttl does.
func (c *claim) pollPause(held *store.HeldError) time.Duration {
	pause := max(min(minPoll<<min(c.polls, 8), maxPoll), 4*c.s.roundTrip())
	c.polls++
	pause = time.Duration(float64(pause) * (0.5 + rand.Float64()))
	if left := held.Holder.TTL; left > 0 && left < pause {
		pause = left + time.Millisecond
	}
	return pause
}
