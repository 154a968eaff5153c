package redlock

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"hash/maphash"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// Options are the terms of a store. The zero value of a field means its default.
type Options struct {
	// MaxTTL is the longest ttl that any client of these nodes asks for. It belongs to the
	// deployment: each node keeps it in a record, and a client with another value is
	// refused. A node that has restarted votes again after max(MaxTTL, 30 s) + 1 s.
	// Default 30 s.
	MaxTTL time.Duration

	// NodeTimeout bounds the wait for one node's answer. Default 250 ms.
	NodeTimeout time.Duration

	// TrustRestarts lets a server vote at once after a restart or promotion, without asking
	// for its age. It is for servers that lose nothing (AOF with appendfsync always), and
	// for tests and laptops: after a restart that loses data two holders, and tokens that
	// repeat or go back for some seconds, are possible. It belongs to the deployment, like
	// MaxTTL.
	TrustRestarts bool

	// Prefix stands before every key on the nodes. It is joined to the key as it is, so that
	// of the prefixes used on the same nodes none should begin with another: with a: and
	// a:b: the keys b:c and c are one.
	Prefix string
}

const (
	defaultMaxTTL      = 30 * time.Second
	defaultNodeTimeout = 250 * time.Millisecond
	// ceiling of MaxTTL: the quarantine must end before Redis forgets a promotion
	// (repl-backlog-ttl, 3600 s by default).
	ceilingMaxTTL = 50 * time.Minute
)

// Store is the lock service that N Redis nodes make up. It implements [store.Store],
// [store.BatchExtender], [store.Adopter] and [store.Inspector]; its claims implement
// [store.Waiter]. It is safe for concurrent use and holds nothing that must be closed: a
// goroutine runs only while a request is unanswered; of a node that is [Single] one more until the
// node timeout has passed without a request; and one for each node's subscription, and one beside
// them, while claims wait and for three seconds after.
type Store struct {
	opts    Options
	peers   []*peer // sorted by name, so that all clients number them alike
	q       int
	inbox   inbox
	scripts scripts
	clock   clock.Clock
	boot    string // boot id for tickets; empty where there is none
	info    store.Info

	contacted atomic.Bool // the first contact with every node has been tried
	meet      sync.Once
	met       chan struct{} // closed when contacted is set

	runIDs   sync.Map     // run id -> name of the node that has it
	offset   atomic.Int64 // us to add to the wall clock: the median of the nodes'
	rtt      atomic.Int64 // ns, smoothed
	began    time.Time
	heard    atomic.Int64 // age, in ns, at which some node last answered
	released recent       // owners that this store value has released
	sending  sending
	deadline sharedDeadline
	short    sharedDeadline
	ttlText  atomic.Pointer[durationText]
	rsvText  atomic.Pointer[durationText]
	calls    sync.Pool // of *directCall
}

// New returns the store of the given nodes, without I/O. With one node it is the plain
// Redis lock, with several independent ones it is Redlock; a quorum is more than half of
// the nodes given. All clients of a deployment must name the same nodes.
//
// It answers a [*store.InvalidError] where there is no node, the same node twice, or an
// option out of range. What only the servers know, such as a replica or one server under
// two names, is refused at the first contact.
func New(o Options, nodes ...Node) (*Store, error) {
	if o.MaxTTL == 0 {
		o.MaxTTL = defaultMaxTTL
	}
	if o.NodeTimeout == 0 {
		o.NodeTimeout = defaultNodeTimeout
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	if len(nodes) == 0 {
		return nil, &store.InvalidError{Field: "nodes", Rule: "there are none, at least one is needed"}
	}
	s := &Store{opts: o, began: time.Now(), q: quorumOf(len(nodes)), scripts: newScripts(), clock: storeClock(), met: make(chan struct{})}
	s.inbox = inbox{s: s, name: newInbox(), claims: map[string]*claim{}}
	s.released.seed = maphash.MakeSeed()
	s.rtt.Store(int64(time.Millisecond))
	sorted := slices.Clone(nodes)
	for i, n := range sorted {
		if n == nil {
			return nil, &store.InvalidError{Field: "node", Value: "number " + strconv.Itoa(i+1), Rule: "must not be nil"}
		}
	}
	slices.SortStableFunc(sorted, func(a, b Node) int { return strings.Compare(a.Name(), b.Name()) })
	hash := sha256.New()
	for i, n := range sorted {
		if i > 0 && n.Name() == sorted[i-1].Name() {
			return nil, &store.InvalidError{Field: "node", Value: n.Name(), Rule: "is given twice; each node must be a server of its own"}
		}
		hash.Write([]byte(n.Name() + "\x00"))
		s.peers = append(s.peers, newPeer(s, i, n))
	}
	hash.Write([]byte(o.Prefix))
	s.boot, _ = clock.BootID()
	s.info = store.Info{
		Name:        "redlock",
		Fingerprint: "redlock:" + hex.EncodeToString(hash.Sum(nil)[:12]),
		Fencing:     store.FencingByClock,
		MinTTL:      store.MinTTL,
		MaxTTL:      o.MaxTTL,
		TTLStep:     time.Millisecond,
	}
	return s, nil
}

func (o Options) check() error {
	bad := func(field, value, rule string) error {
		return &store.InvalidError{Field: field, Value: value, Rule: rule}
	}
	switch {
	case o.MaxTTL < store.MinTTL || o.MaxTTL > ceilingMaxTTL || o.MaxTTL%time.Millisecond != 0:
		return bad("MaxTTL", o.MaxTTL.String(), "must be whole milliseconds from "+store.MinTTL.String()+" to "+ceilingMaxTTL.String())
	case o.NodeTimeout < time.Millisecond || o.NodeTimeout > time.Minute:
		return bad("NodeTimeout", o.NodeTimeout.String(), "must be from 1ms to 1m0s")
	case len(o.Prefix) > store.MaxKeyLen/2:
		return bad("Prefix", o.Prefix, "must have at most "+strconv.Itoa(store.MaxKeyLen/2)+" bytes")
	case strings.IndexByte(o.Prefix, 0) >= 0:
		return bad("Prefix", o.Prefix, "must not contain NUL")
	case strings.HasPrefix(o.Prefix, "{holdfast}:"):
		return bad("Prefix", o.Prefix, "must not begin with {holdfast}:, the names of a node's own records")
	}
	return nil
}

// Info describes the store.
func (s *Store) Info() store.Info { return s.info }

// quarantine is the age at which a server has outlived every promise that it may have
// forgotten.
func (s *Store) quarantine() time.Duration {
	if off(ruleS) {
		return s.opts.MaxTTL * 9 / 10
	}
	return max(s.opts.MaxTTL, 30*time.Second) + time.Second
}

// quorum is the number of nodes that must agree. Answers of a round matter only where
// tests have switched rule A off.
func (s *Store) quorum(answers []answer) int {
	if off(ruleA) {
		return quorumOf(count(answers).answered)
	}
	return s.q
}

func drift(ttl time.Duration) time.Duration {
	if off(ruleC) {
		return 0
	}
	return store.Drift(ttl)
}

// wall is the wall clock in microseconds, corrected to that of the nodes. Only speed and
// fairness depend on it.
func (s *Store) wall() int64 { return wallNow() + s.offset.Load() }

// learn takes a sample of a node's clock, and of the round trip that brought it. One that
// came long after its time does not stretch every pause.
func (s *Store) learn(p *peer, now int64, rtt time.Duration) {
	s.rtt.Store(s.rtt.Load()*7/8 + int64(min(rtt, s.opts.NodeTimeout))/8)
	s.learnClock(p, now, rtt)
}

func (s *Store) learnClock(p *peer, now int64, rtt time.Duration) {
	if now == 0 || rtt > s.opts.NodeTimeout { // it may be wrong by half as much
		return
	}
	p.offset.Store(now + rtt.Microseconds()/2 - wallNow())
	p.sampled.Store(true)
	samples := make([]int64, 0, 8)
	for _, p := range s.peers {
		if p.sampled.Load() {
			samples = append(samples, p.offset.Load())
		}
	}
	s.offset.Store(nthSmallest((len(samples)+1)/2, samples))
}

// roundTrip is the smoothed round trip, by which the pauses of section 2 scale.
func (s *Store) roundTrip() time.Duration { return time.Duration(s.rtt.Load()) }

// age is how long the store value has existed.
func (s *Store) age() time.Duration { return time.Since(s.began) }

// sharedDeadline lends one context with a deadline to all requests of 20 ms: a client
// that honours contexts needs one per request, and making it costs more than the rest of
// the call.
type sharedDeadline struct {
	mu    sync.Mutex
	ctx   context.Context
	until time.Duration // by the age of the store
}

const sharing = 20 * time.Millisecond

// get returns a context that ends d from now, an age of the store, or up to 20 ms later.
func (s *sharedDeadline) get(now, d time.Duration) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx == nil || now > s.until {
		s.until = now + sharing
		ctx, cancel := context.WithTimeout(context.Background(), d+sharing)
		_ = cancel // it ends by its deadline: there is no earlier moment at which all who share it are done
		s.ctx = ctx
	}
	return s.ctx
}

// requestContext bounds one request. It outlives the node timeout, so that an answer that
// is late for its round can still be collected.
func (s *Store) requestContext() context.Context {
	return s.deadline.get(s.age(), 2*s.opts.NodeTimeout)
}

// shortContext ends when the node timeout has passed, or up to 20 ms later.
func (s *Store) shortContext() context.Context { return s.short.get(s.age(), s.opts.NodeTimeout) }

// durationText is a duration as the scripts want it. Most claims ask for the same ttl.
type durationText struct {
	d    time.Duration
	text string
}

func (s *Store) milliseconds(d time.Duration) string { return cachedText(&s.ttlText, d) }

func cachedText(last *atomic.Pointer[durationText], d time.Duration) string {
	t := last.Load()
	if t == nil || t.d != d {
		t = &durationText{d, milliseconds(d)}
		last.Store(t)
	}
	return t.text
}

// recent remembers the last owners that were released: their votes are about to go. It keeps hashes
// of them: one that is wrong costs a round.
type recent struct {
	mu   sync.Mutex
	seed maphash.Seed
	ring [256]uint64
	next int
}

func (r *recent) add(owner string) {
	h := maphash.String(r.seed, owner)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ring[r.next] = h
	r.next = (r.next + 1) % len(r.ring)
}

func (r *recent) has(owner string) bool {
	h := maphash.String(r.seed, owner)
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Contains(r.ring[:], h)
}
