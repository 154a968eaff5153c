package redlock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// peer is a node as one store value sees it.
type peer struct {
	s      *Store
	index  int
	node   Node
	single Single // node, where it keeps deadlines by itself
	name   string
	lines  lines

	offset  atomic.Int64 // us that its clock is ahead of ours
	sampled atomic.Bool
	// wasPrimary: met as a primary, so that a replica in its place is one only until the
	// client has followed the failover.
	wasPrimary atomic.Bool
	admitted
	debts   debts
	overdue atomic.Int32 // pipelines of KEEP that are unanswered for longer than the node timeout

	mu         sync.Mutex
	asked      int           // requests that are unanswered
	last       time.Duration // when it was last asked
	heard      time.Duration // when it last answered, or was asked first after having answered all
	misses     int           // missing answers in a row, to requests that were sent one after the other
	missed     clock.Instant // when the last of them was booked
	away       clock.Instant // not asked before this
	why        error         // what the last missing answer was, or why it is not asked
	unfit      error         // why it makes the store one that is not put together right
	rechecking bool          // it is being asked whether it still does
	raced      time.Duration // until when it is not trusted to keep deadlines
}

func newPeer(s *Store, index int, n Node) *peer {
	p := &peer{s: s, index: index, node: n, name: n.Name()}
	p.single, _ = n.(Single)
	p.admitted.turn = make(chan struct{}, 1)
	p.debts.wake = make(chan struct{}, 1)
	p.lines.wake = make(chan struct{}, 1)
	return p
}

const (
	firstAway = 100 * time.Millisecond // after the first missing answer, doubled with each
	maxAway   = 2 * time.Second
	// maxOverdue bounds the overdue pipelines of one node: a client that ignores deadlines
	// must not gather goroutines while its node is frozen.
	maxOverdue = 16
	// maxUnheard bounds the requests that a node is sent while it answers none and others
	// do, for longer than minQuiet; maxProbes is the same for one that has missed an answer.
	maxUnheard = 32
	maxProbes  = 4
	minQuiet   = 20 * time.Millisecond
)

// usable returns nil where the node may be asked for a vote now, or why not.
func (p *peer) usable() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.away.IsZero() || p.s.clock.Passed(p.away) {
		return nil
	}
	var young *YoungError
	if errors.As(p.why, &young) { // say how long it takes from now
		left := p.s.clock.Until(p.away)
		return &YoungError{Age: young.Age + young.VotesIn - left, VotesIn: left}
	}
	return p.why
}

// silent returns why nothing at all should be sent now: the node has not been answering.
// Unlike usable it lets a young node pass, which may be asked for anything but a vote.
func (p *peer) silent() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.misses == 0 || p.s.clock.Passed(p.away) {
		return nil
	}
	return p.why
}

// crowded returns why no vote should be asked of a node that answers nothing while others do:
// rounds return at their quorum, so that a loop of them would send a frozen node, and leave
// waiting, as many requests as there are rounds in the node timeout. A node that is not asked
// for a vote is sent no RELEASE either; extensions leave it out, too.
func (p *peer) crowded() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	quiet := time.Duration(p.s.heard.Load()) - p.heard
	switch {
	case p.dueLocked():
	case p.asked >= maxUnheard && quiet > max(minQuiet, 8*p.s.roundTrip()),
		p.asked >= maxProbes && p.misses > 0:
		return errNoAnswer{p.s.age() - p.heard}
	}
	return nil
}

// asking books that n requests are sent, and returns the age of the store.
func (p *peer) asking(n int) time.Duration {
	now := p.s.age()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.askingLocked(n, now)
	return now
}

func (p *peer) askingLocked(n int, now time.Duration) {
	p.last = now
	if p.asked += n; p.asked == n {
		p.heard = now
	}
}

// dueLocked reports whether a node shall be asked although its client has not returned from
// earlier calls: it may never do so, and the node be well. p.mu is held.
func (p *peer) dueLocked() bool { return p.s.age()-p.last > maxAway }

func (p *peer) due() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dueLocked()
}

// returned books that the node's client has returned from n requests, with or without an
// answer.
func (p *peer) returned(n int, answered bool) {
	now := p.s.age()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.returnedLocked(n, answered, now)
}

func (p *peer) returnedLocked(n int, answered bool, now time.Duration) {
	p.asked -= n
	if answered {
		p.heard = now
		p.s.heard.Store(int64(now))
	}
}

// answers reports whether one of the replies is the server's.
func answers(replies ...Reply) bool {
	for _, r := range replies {
		if r.Err == nil || codeOf(r.Err) != "" {
			return true
		}
	}
	return false
}

// refusal returns why the node makes the store one that is not put together right, and
// whether it is time to ask again.
func (p *peer) refusal() (err error, again bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	again = p.unfit != nil && !p.rechecking && p.s.clock.Passed(p.away)
	p.rechecking = p.rechecking || again
	return p.unfit, again
}

// reconsider asks a node again that was refused.
func (p *peer) reconsider(key string) {
	p.readmit(key, p.admitted.load(key))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rechecking = false
}

// answered books an answer to anything but a vote: it ends the silence, but says nothing of
// the node's right to vote.
func (p *peer) answered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.misses > 0 {
		p.misses, p.away, p.why = 0, clock.Instant{}, nil
	}
}

// note books the outcome of a request that was sent at that instant: a missing answer keeps
// the node from being asked for a while, any answer ends that. One silence counts once,
// however many requests fall into it, and whoever books them: a timer, and the client later.
func (p *peer) note(err error, sent clock.Instant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.unfit, p.misses, p.away, p.why = nil, 0, clock.Instant{}, nil
		return
	}
	var reply *ServerError
	var young *YoungError
	var bad refused
	var unfit misconfigured
	if !errors.As(err, &reply) {
		p.unfit = nil
	}
	if errors.As(err, &unfit) {
		p.unfit = unfit.error
	}
	switch {
	case errors.As(err, &young):
		p.misses, p.away, p.why = 0, p.s.clock.Now().Add(young.VotesIn), err
	case errors.As(err, &bad) && bad.Field == "node":
		p.misses, p.away, p.why = 0, p.s.clock.Now().Add(maxAway), err
	case errors.As(err, &reply):
		// It answers, if only with an error about this request.
		p.misses = 0
	case p.misses > 0 && sent.Sub(p.missed) < 0:
	default:
		away := min(maxAway, firstAway<<min(p.misses, 8))
		p.misses++
		p.missed = p.s.clock.Now()
		p.away, p.why = p.missed.Add(away), err
	}
}

// run sends calls as one pipeline. It returns when the node's client does, which may be
// long after the request's deadline: callers that must not wait race it.
func (p *peer) run(calls ...Call) []Reply {
	p.asking(1)
	replies := p.send(calls)
	p.returned(1, answers(replies...))
	return replies
}

// send is run without the books.
func (p *peer) send(calls []Call) []Reply {
	replies := p.node.Run(p.s.requestContext(), calls...)
	if len(replies) != len(calls) {
		err := errors.New("the node's client answered the wrong number of calls")
		replies = make([]Reply, len(calls))
		for i := range replies {
			replies[i].Err = err
		}
	}
	return replies
}

// vote sends one VOTE and answers it, or the reason why there is no answer. A node that
// does not have the script is admitted, if it may be, and asked again with the same stamp.
func (p *peer) vote(key string, call *voteCall, park bool) (answer, error) {
	script, err := p.script(key)
	if err == nil && p.admitted.isCluster.Load() {
		if err := checkClusterKey(key); err != nil {
			return answer{}, refused{clusterKeyError(key)}
		}
	}
	for attempt := 0; ; attempt++ {
		if err != nil {
			return answer{}, err
		}
		sent := p.s.clock.Now()
		reply := p.run(call.on(script, park && !p.admitted.isCluster.Load()))[0]
		if attempt < 2 && unadmitted(reply) {
			script, err = p.readmit(key, script)
			continue
		}
		return p.counted(key, call.stamp, reply, sent)
	}
}

// counted is what a reply to VOTE says, which the node's books take in.
func (p *peer) counted(key string, stamp int64, reply Reply, sent clock.Instant) (answer, error) {
	if reply.Err != nil {
		err := permanent(p.name, key, reply.Err)
		p.note(err, sent)
		return answer{}, err
	}
	a, err := parseVote(reply.Value, stamp)
	p.note(err, sent)
	if err == nil {
		p.s.learn(p, a.now, p.s.clock.Since(sent))
	}
	return a, err
}

// unadmitted reports whether the server does not have the VOTE script, or not this one.
func unadmitted(r Reply) bool {
	if r.Err == nil {
		return false
	}
	code := codeOf(r.Err)
	return code == "NOSCRIPT" || code == "NOTADMITTED"
}

func codeOf(err error) string {
	var reply *ServerError
	if errors.As(err, &reply) {
		return reply.Code()
	}
	return ""
}

var errReply = errors.New("the server's reply has an unknown form")

// parseVote reads the answer to a VOTE of that stamp.
func parseVote(v any, stamp int64) (answer, error) {
	if now, isTime := v.(int64); isTime {
		return answer{kind: ok, mark: stamp, now: now}, nil
	}
	r, isArray := v.([]any)
	if !isArray || len(r) < 3 {
		return answer{}, errReply
	}
	word, isText := r[0].(string)
	mark, isMark := r[1].(int64)
	now, isTime := r[2].(int64)
	if !isText || !isMark || !isTime {
		return answer{}, errReply
	}
	a := answer{mark: mark, now: now}
	switch word {
	case "KEPT":
		a.kind = kept
	case "LOW":
		a.kind = low
	case "AHEAD":
		a.kind = ahead
	case "BUSY":
		return parseBusy(a, r[3:])
	default:
		return answer{}, errReply
	}
	return a, nil
}

// parseBusy reads owner and remaining ttl of a busy vote, and the asker's place in the queue.
func parseBusy(a answer, r []any) (answer, error) {
	if len(r) < 2 {
		return answer{}, errReply
	}
	var isOwner, isTTL bool
	a.owner, isOwner = r[0].(string)
	a.pttl, isTTL = r[1].(int64)
	if !isOwner || !isTTL {
		return answer{}, errReply
	}
	if len(r) > 2 {
		rank, isRank := r[2].(int64)
		if !isRank {
			return answer{}, errReply
		}
		a.place = max(0, rank+1)
	}
	a.kind = busy
	return a, nil
}

// parseKeep reads the answer to KEEP.
func parseKeep(v any) (answer, error) {
	if now, isTime := v.(int64); isTime {
		return answer{kind: kept, now: now}, nil
	}
	r, isArray := v.([]any)
	if !isArray || len(r) == 0 {
		return answer{}, errReply
	}
	switch r[0] {
	case "NONE":
		return answer{kind: none}, nil
	case "BUSY":
		return parseBusy(answer{}, r[1:])
	}
	return answer{}, errReply
}

// tell reports an outcome to the trace of a call, if it has one.
func (p *peer) tell(trace func(store.NodeEvent), op, key string, outcome kind, err error, sent clock.Instant) {
	if trace == nil {
		return
	}
	trace(store.NodeEvent{Node: p.name, Op: op, Key: key, Outcome: outcome.String(), Err: err, Elapsed: p.s.clock.Since(sent)})
}

// outcome is what a QuorumError says of a node.
func (p *peer) outcome(k kind, err error) NodeError {
	return NodeError{Node: p.name, Outcome: k.String(), Err: err}
}

// debts are the RELEASEs that a node has not answered. One goroutine repeats them, as one
// pipeline, until they are answered or what they would free has ended anyway.
type debts struct {
	mu      sync.Mutex
	owed    []debt
	running bool
	wake    chan struct{} // more is owed
	hung    atomic.Int32  // pipelines from which the client has not returned in time
}

type debt struct {
	call  Call
	stamp int64
	due   clock.Instant
	until clock.Instant
	done  func(r released, err error, first bool)
}

const (
	firstRepeat = 20 * time.Millisecond
	maxRepeat   = time.Second
	maxRepaid   = 512 // in one pipeline
	maxHung     = 8
)

// owe takes over the repetition of a RELEASE.
func (p *peer) owe(d debt) {
	p.debts.mu.Lock()
	defer p.debts.mu.Unlock()
	if n := len(p.debts.owed); n >= 1024 && n == cap(p.debts.owed) { // a node that is away for long: drop what has ended
		p.debts.owed = p.unexpired(p.debts.owed)
	}
	p.debts.owed = append(p.debts.owed, d)
	if !p.debts.running {
		p.debts.running = true
		go p.repay()
		return
	}
	select {
	case p.debts.wake <- struct{}{}:
	default:
	}
}

func (p *peer) unexpired(owed []debt) []debt {
	left := make([]debt, 0, len(owed))
	for _, d := range owed {
		if !p.s.clock.Passed(d.until) {
			left = append(left, d)
		}
	}
	return left
}

// repay runs while something is owed.
func (p *peer) repay() {
	pause := firstRepeat
	for {
		due, next := p.collect()
		if due == nil && next < 0 {
			return
		}
		if len(due) == 0 {
			p.rest(min(next, maxRepeat))
			continue
		}
		if p.settle(due) {
			pause = firstRepeat
			continue
		}
		time.Sleep(pause)
		pause = min(2*pause, maxRepeat)
	}
}

// rest waits until something is due, or more is owed.
func (p *peer) rest(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-p.debts.wake:
	}
}

// collect takes what is due. Otherwise next is the time until something will be, or
// negative where nothing is owed, in which case the repetition has ended.
func (p *peer) collect() (due []debt, next time.Duration) {
	p.debts.mu.Lock()
	defer p.debts.mu.Unlock()
	owed := p.unexpired(p.debts.owed)
	p.debts.owed = nil
	next = -1
	for _, d := range owed {
		if left := max(p.s.clock.Until(d.due), 0); left > 0 || len(due) == maxRepaid {
			p.debts.owed = append(p.debts.owed, d)
			if next < 0 || left < next {
				next = left
			}
		} else {
			due = append(due, d)
		}
	}
	if len(owed) == 0 {
		p.debts.running = false
	}
	return due, next
}

// settle sends RELEASEs and keeps those that were not answered. It reports whether the
// node answered.
func (p *peer) settle(due []debt) bool {
	calls := make([]Call, len(due))
	for i, d := range due {
		calls[i] = d.call
	}
	answered := false
	for i, r := range p.runInTime(calls) {
		did, wait, err := parseRelease(r, due[i].stamp)
		if err == nil {
			answered = true
			due[i].done(did, nil, false)
			if wait == 0 {
				continue
			}
		}
		p.debts.mu.Lock()
		p.debts.owed = append(p.debts.owed, due[i].after(p.s.clock.Now(), wait))
		p.debts.mu.Unlock()
	}
	if answered {
		p.answered()
	}
	return answered
}

// runInTime is run for one that must not wait longer than a client has to.
func (p *peer) runInTime(calls []Call) []Reply {
	failed := make([]Reply, len(calls))
	for i := range failed {
		failed[i].Err = errNoAnswer{2 * p.s.opts.NodeTimeout}
	}
	if p.debts.hung.Load() >= maxHung && !p.due() {
		return failed
	}
	replies := make(chan []Reply, 1)
	late := time.AfterFunc(2*p.s.opts.NodeTimeout+sharing, func() {
		p.debts.hung.Add(1)
		replies <- failed
	})
	go func() {
		r := p.run(calls...)
		if late.Stop() {
			replies <- r
		} else {
			p.debts.hung.Add(-1)
		}
	}()
	return <-replies
}

// after puts a debt off by wait. A tombstone that a node's clock still refuses is worth
// waiting for while the VOTE that it stops may be on its way.
func (d debt) after(now clock.Instant, wait time.Duration) debt {
	d.due = now.Add(wait)
	if wait > 0 && wait < markLife {
		d.until = clock.Max(d.until, d.due.Add(maxRepeat))
	}
	return d
}

// released is what a RELEASE did at a node.
type released struct {
	freed  bool // the vote was there
	placed bool // the claim's next owner has a place in the queue
}

// parseRelease reads the answer to RELEASE. A positive wait says that the tombstone for
// the stamp is still refused, and for how long.
func parseRelease(r Reply, stamp int64) (did released, wait time.Duration, err error) {
	if r.Err != nil {
		return released{}, 0, r.Err
	}
	bits, isInt := r.Value.(int64)
	if !isInt {
		a, isArray := r.Value.([]any)
		if !isArray || len(a) < 3 || a[0] != "AHEAD" {
			return released{}, 0, errReply
		}
		now, isTime := a[2].(int64)
		if bits, isInt = a[1].(int64); !isInt || !isTime {
			return released{}, 0, errReply
		}
		wait = max(time.Millisecond, time.Duration(stamp-now)*time.Microsecond-aheadLimit)
	}
	return released{freed: bits&1 != 0, placed: bits&2 != 0}, wait, nil
}

// pinned runs fn on one connection of p, raced against ctx: fn goes on alone where the
// node's client ignores the context, so what it finds comes back as its value only.
func pinned[T any](ctx context.Context, p *peer, key string, fn func(do func(args ...string) (any, error)) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		err := p.node.Pinned(ctx, key, func(do func(args ...string) (any, error)) error {
			r.value, r.err = fn(do)
			return r.err
		})
		r.err = err
		done <- r
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		var none T
		return none, errNoAnswer{p.s.opts.NodeTimeout}
	}
}
