package redlock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// This file holds what docs/protocol.md, section 4, says of waiting, to be read beside it. No
// safety depends on it: a wake-up that is lost, late or doubled costs time only.

const (
	// lingering is for how long a store stays subscribed after the last claim left.
	lingering = 3 * time.Second
	// unheardOf is how long a node has to confirm a subscription, until it is said that there is none.
	unheardOf = 2 * time.Second
	// askAgain is for how long a node that refuses subscriptions is not asked.
	askAgain = time.Minute

	minReserve = 250 * time.Millisecond
	maxReserve = 10 * time.Second

	minSplit = time.Millisecond      // after a split vote, at least
	firstAsk = time.Second           // after parking: what is my rank
	rankStep = 10 * time.Millisecond // between the first waiters, where a holder has died
	nearRank = 3                     // ranks that wait for the end of the holder's ttl

	maxOwners = 16 // of one claim, whose messages are taken
)

// inbox is where the nodes tell a store value of hand-overs: one subscription at each node, for
// all keys, from the first claim that waits until a while after the last one.
type inbox struct {
	s    *Store
	name string

	mu      sync.Mutex
	on      atomic.Bool       // stop is set: the store is subscribed
	claims  map[string]*claim // those that wait, or were granted by hand-over, by every owner that they have been parked under
	waiting int               // claims in it
	last    lastGrant         // of the claims that waited
	gen     int               // of subscriptions: messages of earlier ones do not count
	stop    context.CancelFunc
	left    time.Duration // age of the store when the last claim left; where waiting is zero
	subs    []subscription
	poked   bool // everybody will be poked soon
}

// lastGrant is a lease.
type lastGrant struct {
	vote  string
	token int64
}

// subscription is that of one node.
type subscription struct {
	up    bool
	why   error // why there is none; nil while it may come
	since time.Duration
	told  bool
}

// waiting is what a claim knows of its place in the nodes' queues. It is guarded by the claim's
// mutex, but for woken.
type waiting struct {
	woken    chan struct{} // has room for one: look again; nil when the claim has left the inbox
	ask      bool          // a reason to ask at once has come since the last round began
	stray    bool          // a vote came after its round: to be given back, unless another round uses it
	parked   bool          // a node may have a place for it, or may have had
	owners   []string      // that the inbox knows
	hint     int64         // highest mark that a wake-up told
	since    clock.Instant // when the place was taken, or a wake-up last came
	asked    bool          // it has asked for its rank since
	next     clock.Instant // when the reservation of the one before it ends
	unplaced bool          // the last round's stamp was too low for a place
	repeated int           // times that it has asked again for that
	counts   bool          // among those in the inbox that wait
	idle     bool          // no round is under way: a grant by hand-over counts
	grace    *time.Timer   // for the messages of other nodes, until it asks
	pairs    []pair        // of each node
	splits   int           // rounds in a row after which votes had to be given back
}

// enterLocked makes a claim one that waits, and subscribes where the store is not. The caller
// holds c.mu, which comes before b.mu everywhere.
func (b *inbox) enterLocked(c *claim) {
	if c.w != nil {
		return
	}
	c.w = &waiting{woken: make(chan struct{}, 1), counts: true, pairs: make([]pair, len(c.s.peers))}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting++
	if b.stop == nil {
		b.subscribe()
	}
}

// active reports whether the store is subscribed, so that claims may be parked at once.
func (b *inbox) active() bool { return b.on.Load() }

// knows books an owner under which the claim is about to be parked. The caller holds c.mu.
func (b *inbox) knows(c *claim, owner string) {
	c.w.parked = true
	if n := len(c.w.owners); n > 0 && c.w.owners[n-1] == owner {
		return
	}
	c.w.owners = append(c.w.owners, owner)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.claims[owner] = c
	if len(c.w.owners) > maxOwners {
		delete(b.claims, c.w.owners[0])
		c.w.owners = c.w.owners[1:]
	}
}

// leave forgets a claim that is granted or over. The caller holds c.mu.
func (b *inbox) leave(c *claim) {
	if c.w == nil || c.w.woken == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, owner := range c.w.owners {
		delete(b.claims, owner)
	}
	c.signalLocked()
	c.w.woken, c.w.owners = nil, nil
	b.discount(c.w)
	if c.held {
		b.last = lastGrant{c.vote, int64(c.token)}
	}
}

// recent is the token of the last lease, where it was for the same key: the marks stand there, which may
// be ahead of our clock.
func (b *inbox) recent(vote string, wall int64) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.last.vote != vote || b.last.token > wall+aheadLimit.Microseconds() {
		return 0
	}
	return b.last.token
}

// discount books that a claim does not wait any more. b.mu is held.
func (b *inbox) discount(w *waiting) {
	if !w.counts {
		return
	}
	w.counts = false
	if b.waiting--; b.waiting == 0 {
		b.left = b.s.age()
	}
}

// served is leave for a claim that was granted by hand-over: what other nodes say of that is still
// taken, as long as the store is subscribed. The caller holds c.mu.
func (b *inbox) served(c *claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.discount(c.w)
	b.last = lastGrant{c.vote, int64(c.token)}
}

// returned undoes served: the claim waits again.
func (b *inbox) returned(c *claim) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.w.counts || c.w.woken == nil {
		return
	}
	c.w.counts = true
	b.waiting++
	for _, owner := range c.w.owners {
		b.claims[owner] = c
	}
	if b.stop == nil {
		b.subscribe()
	}
}

// subscribe begins to listen at every node. b.mu is held.
func (b *inbox) subscribe() {
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	b.on.Store(true)
	b.gen++
	b.subs = make([]subscription, len(b.s.peers))
	for i, p := range b.s.peers {
		b.subs[i].since = b.s.age()
		go b.listen(ctx, b.gen, p)
	}
	go b.linger(ctx, b.gen)
}

// linger ends the subscriptions when no claim has waited for a while.
func (b *inbox) linger(ctx context.Context, gen int) {
	for rest := lingering; rest > 0; {
		select {
		case <-time.After(rest):
		case <-ctx.Done():
			return
		}
		b.sweep()
		b.mu.Lock()
		if rest = lingering; b.waiting == 0 {
			rest = b.left + lingering - b.s.age()
		}
		if rest <= 0 {
			b.stop()
			b.stop = nil
			b.on.Store(false)
			clear(b.claims) // none of them waits
		}
		b.mu.Unlock()
	}
}

// sweep forgets claims that were granted by hand-over and have lapsed, of callers who do not release.
func (b *inbox) sweep() {
	b.mu.Lock()
	claims := slices.Collect(maps.Values(b.claims))
	b.mu.Unlock()
	for _, c := range claims {
		c.mu.Lock()
		if c.handed && c.taken && b.s.clock.Passed(c.until) {
			b.leave(c)
		}
		c.mu.Unlock()
	}
}

// listen keeps the subscription of one node. A node that refuses it is asked again, seldom.
func (b *inbox) listen(ctx context.Context, gen int, p *peer) {
	for ctx.Err() == nil {
		err := b.mayQueue(p)
		if err == nil {
			err = p.node.Subscribe(ctx, "holdfast:"+b.name,
				func(payload string) { b.deliver(p, payload) },
				func() { b.up(gen, p) })
		}
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("the subscription has ended")
		}
		b.refused(gen, p, err)
		select {
		case <-time.After(time.Duration(float64(askAgain) * (0.75 + rand.Float64()/2))):
		case <-ctx.Done():
		}
	}
}

// mayQueue answers why no claim should be parked at p: a place without the right to be told, or
// to tell, would be one to wait in for a whole ttl. What p does not answer is left open.
func (b *inbox) mayQueue(p *peer) error {
	if p.admitted.isCluster.Load() {
		return errNoQueue
	}
	r := p.runInTime([]Call{{Script: b.s.scripts.probe, Keys: []string{probeKey}, Args: []string{"holdfast:" + b.name}}})[0]
	if err := permanent(p.name, probeKey, r.Err); errors.As(err, new(refused)) {
		return err
	}
	return nil
}

// errNoQueue is why a Cluster has no queues.
var errNoQueue = fmt.Errorf("%w: a Redis Cluster has no queue; waiting polls", store.ErrUnsupported)

func (b *inbox) up(gen int, p *peer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gen != gen || b.stop == nil {
		return
	}
	b.subs[p.index].up, b.subs[p.index].why = true, nil
	b.pokeAllSoon()
}

func (b *inbox) refused(gen int, p *peer, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.gen != gen || b.stop == nil {
		return
	}
	sub := &b.subs[p.index]
	news := sub.up || sub.why == nil
	if sub.up, sub.why = false, err; news {
		b.pokeAllSoon()
	}
}

// pokeAllSoon has every claim ask once: a message may have been lost. The nodes' subscriptions
// most often come together. b.mu is held.
func (b *inbox) pokeAllSoon() {
	if b.poked {
		return
	}
	b.poked = true
	time.AfterFunc(min(2*b.s.roundTrip(), 100*time.Millisecond), b.pokeAll)
}

func (b *inbox) pokeAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.poked = false
	for _, c := range b.claims {
		go c.poke()
	}
}

// listens reports whether a claim may be parked at p: a place without a subscription would be that
// of a dead process.
func (b *inbox) listens(p *peer) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.stop != nil && b.subs[p.index].up && !p.admitted.isCluster.Load()
}

// refusals tells, once for each node, that claims are not parked there, and reports whether too many do not.
func (b *inbox) refusals(ctx context.Context, key string) (poll bool) {
	type news struct {
		p   *peer
		err error
	}
	var tell []news
	b.mu.Lock()
	none := 0
	for i, p := range b.s.peers {
		if b.stop == nil {
			break
		}
		sub := &b.subs[i]
		why := sub.why
		if why == nil && !sub.up && b.s.age()-sub.since > unheardOf && p.silent() == nil {
			why = errNotConfirmed
		}
		if why == nil {
			continue
		}
		none++
		if !sub.told {
			sub.told = true
			tell = append(tell, news{p, why})
		}
	}
	b.mu.Unlock()
	for _, n := range tell {
		n.p.tell(store.Trace(ctx), "subscribe", key, noAnswer, n.err, b.s.clock.Now())
	}
	return none > len(b.s.peers)-b.s.q
}

var errNotConfirmed = errors.New("no confirmation of the subscription; waiting polls until it comes")

// message is what a node says to a process that waits.
type message struct {
	wake     bool   // the vote is reserved for owner; else owner is next in line
	mark     int64  // the stamp that was accepted in the name of owner
	clock    int64  // the node's, in us, where the reservation is a grant; else zero
	id       string // as what the node was admitted, which makes it one
	reserve  time.Duration
	owner    string
	released string
}

// parseMessage reads a payload. The key in it is for people: the owner says which claim is meant.
func parseMessage(payload string) (message, bool) {
	f := strings.SplitN(payload, " ", 6)
	if len(f) < 5 || f[0] != "w1" {
		return message{}, false
	}
	n, err := strconv.ParseInt(f[2], 10, 64)
	if err != nil || n < 0 {
		return message{}, false
	}
	switch {
	case f[1] == "grant":
		return parseGrant(n, f[3:])
	case f[1] == "wake" && len(f) == 6:
		return message{wake: true, mark: n, owner: f[3], released: f[4]}, true
	case f[1] == "next" && n <= maxReserve.Milliseconds():
		return message{reserve: time.Duration(n) * time.Millisecond, owner: f[3]}, true
	}
	return message{}, false
}

// parseGrant reads what follows the stamp: clock, reservation, admission, owner, released owner, key.
func parseGrant(stamp int64, f []string) (message, bool) {
	if len(f) < 3 {
		return message{}, false
	}
	m := message{wake: true, mark: stamp, clock: parseTime(f[0])}
	ms, err := strconv.ParseInt(f[1], 10, 64)
	m.reserve = time.Duration(ms) * time.Millisecond
	names := strings.SplitN(f[2], " ", 4)
	if err != nil || ms <= 0 || ms > maxReserve.Milliseconds() || m.clock <= 0 || len(names) < 4 || names[0] == "" {
		return message{}, false
	}
	m.id, m.owner, m.released = names[0], names[1], names[2]
	return m, true
}

// parseTime reads a node's clock as TIME answers it, with a point between; zero where it is none.
func parseTime(text string) int64 {
	sec, us, _ := strings.Cut(text, ".")
	s, err := strconv.ParseUint(sec, 10, 40)
	n, err2 := strconv.ParseUint(us, 10, 20)
	if err != nil || err2 != nil || n >= 1e6 {
		return 0
	}
	return int64(s)*1e6 + int64(n)
}

// deliver takes a message. One for a claim that was granted, or is over, is ignored: the owner
// may be a live lease, and the RELEASE that ended a claim hands on by itself.
func (b *inbox) deliver(p *peer, payload string) {
	m, ok := parseMessage(payload)
	if !ok {
		return
	}
	b.mu.Lock()
	c := b.claims[m.owner]
	b.mu.Unlock()
	if c != nil {
		c.told(p, m)
	}
}

func (c *claim) told(p *peer, m message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.w == nil || c.w.woken == nil {
		return
	}
	if c.held { // by the messages of other nodes
		if c.attempt.owner == m.owner && m.mark == int64(c.token) {
			c.give(p, m)
		}
		return
	}
	now := c.s.clock.Now()
	if !m.wake {
		c.w.next = now.Add(m.reserve + 5*time.Millisecond)
		c.signalLocked()
		return
	}
	c.s.released.add(m.released)
	if m.mark <= c.s.wall()+aheadLimit.Microseconds() { // no right clock can have more
		c.w.hint = max(c.w.hint, m.mark)
	}
	if c.attempt != nil && c.attempt.owner == m.owner {
		n := &c.attempt.nodes[p.index]
		n.place, n.stays = 0, false // it has been taken out of the queue there
		if c.give(p, m) {
			c.w.since, c.w.asked = now, false
			c.gather(m, now)
			return
		}
	}
	c.w.since, c.w.asked = now, false
	c.pokeLocked()
}

// poke has a claim that waits ask at once.
func (c *claim) poke() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.w != nil {
		c.pokeLocked()
	}
}

func (c *claim) pokeLocked() {
	c.w.ask = true
	c.signalLocked()
}

func (c *claim) signalLocked() {
	select {
	case c.w.woken <- struct{}{}: // never where the claim has left
	default:
	}
}

// maxRepeated bounds how often a claim asks again at once for its places: after that it polls.
const maxRepeated = 1

// displaced has a claim that waits ask again where an answer, which came after the round, leaves it places
// on fewer than Q nodes. c.mu is held.
func (c *claim) displaced(a *attempt) {
	if c.w == nil || c.attempt != a || c.held || c.w.repeated >= maxRepeated {
		return
	}
	places := 0
	for _, n := range a.nodes {
		if n.place > 0 || n.parks > 0 {
			places++
		}
	}
	if places >= c.s.q {
		return
	}
	c.w.repeated++
	c.w.unplaced = true
	c.pokeLocked()
}

// somewhere is the place of a claim that has one, where it does not know which.
const somewhere = 1 << 40

// placed books whether a RELEASE has parked the attempt at p. Only the first answer says that it has not.
func (c *claim) placed(a *attempt, p *peer, yes, first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &a.nodes[p.index]
	switch {
	case yes:
		if n.stays = true; n.place == 0 {
			n.place = somewhere
		}
		if c.w != nil && c.w.since.IsZero() {
			c.w.since = c.s.clock.Now()
		}
	case first && !n.stays:
		n.place, n.parks = 0, max(0, n.parks-1)
		c.displaced(a)
	}
}

// place is the Q-th smallest of the places that the nodes told: then so many nodes will not have
// more claims before this one. It is zero where fewer have a place for it. c.mu is held.
func (c *claim) place() int64 {
	if c.attempt == nil {
		return 0
	}
	var room [8]int64
	places := room[:0]
	for _, n := range c.attempt.nodes {
		if n.place > 0 {
			places = append(places, n.place)
		}
	}
	if len(places) < c.s.q {
		return 0
	}
	return nthSmallest(c.s.q, places)
}

// Wait returns when another Try is worth it: at a wake-up, or by a timer, since messages get lost
// and holders die. Where it has no place on a quorum of the nodes, and for a lock of another
// library, of whose end nobody tells, it polls. It answers the error of ctx, at once, and
// [store.ErrReleased] where Release was called meanwhile. Votes that came late are given back.
func (c *claim) Wait(ctx context.Context, held *store.HeldError) error {
	if !c.waits {
		return sleep(ctx, c.pollPause(held))
	}
	poll := c.s.inbox.refusals(ctx, c.key()) || held.Holder.Foreign
	c.mu.Lock()
	if !c.ended {
		c.s.inbox.enterLocked(c)
	}
	w := c.w
	if w == nil || w.woken == nil { // it was granted, or is over
		c.mu.Unlock()
		return sleep(ctx, c.pollPause(held))
	}
	w.idle = true
	asked := c.s.clock.Now()
	w.asked = w.asked || !w.since.IsZero() && asked.Sub(w.since) >= firstAsk
	slow := 0.75 + rand.Float64()/2
	woken := w.woken
	polling := c.pollPause(held)
	c.mu.Unlock()
	for {
		c.giveStrayBack(ctx)
		c.mu.Lock()
		if c.held { // by hand-over
			c.mu.Unlock()
			return nil
		}
		if w.woken == nil { // Release was called
			c.mu.Unlock()
			return store.ErrReleased
		}
		ask := w.ask
		rest := polling
		if !poll {
			rest = c.restLocked(held, asked, slow, polling)
		}
		c.mu.Unlock()
		if ask || rest <= 0 {
			return ctx.Err()
		}
		t := time.NewTimer(rest)
		select {
		case <-woken:
			t.Stop()
		case <-t.C:
			return nil
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
	}
}

// giveStrayBack ends an attempt that was given a vote after its round, and goes on under another
// owner. Its place in the queues is the same.
func (c *claim) giveStrayBack(ctx context.Context) {
	c.mu.Lock()
	if !c.w.stray || c.w.ask || c.attempt == nil || c.held || c.ended {
		c.mu.Unlock()
		return
	}
	c.w.stray = false
	rel := c.moveLocked(ctx)
	c.mu.Unlock()
	rel.send(true)
}

// restLocked is for how long to go on waiting, if nothing happens. asked is when the nodes
// answered held.
func (c *claim) restLocked(held *store.HeldError, asked clock.Instant, slow float64, polling time.Duration) time.Duration {
	w, place := c.w, c.place()
	var due clock.Instant
	at := func(t clock.Instant) {
		if due.IsZero() || t.Sub(due) < 0 {
			due = t
		}
	}
	if w.splits > 0 {
		at(asked.Add(time.Duration(float64(max(16*c.s.roundTrip(), minSplit)<<min(w.splits-1, 8)) * (slow*2 - 1))))
	}
	near := (place <= nearRank || place == somewhere) && held.Holder.TTL > 0
	switch {
	case place == 0 && due.IsZero():
		at(asked.Add(polling))
	case place == 0:
	case near:
		left := min(held.Holder.TTL, c.s.opts.MaxTTL) // somebody may have put the end off
		at(asked.Add(left + time.Millisecond + time.Duration(min(place, nearRank)-1)*rankStep))
	case w.asked:
		at(asked.Add(time.Duration(slow * float64(max(c.ttl, time.Duration(min(place, 3600))*time.Second)))))
	}
	if place > 0 && !w.asked {
		at(w.since.Add(firstAsk))
	}
	if !w.next.IsZero() {
		at(w.next)
	}
	return c.s.clock.Until(due)
}

// reserve is for how long a hand-over keeps the vote for the waiter: it must be able to come, and
// to extend the grant that this may be.
func (c *claim) reserve() time.Duration {
	return min(max(16*c.s.roundTrip(), min(c.ttl/16, time.Second), minReserve), c.ttl, maxReserve)
}
