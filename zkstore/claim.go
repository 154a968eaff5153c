package zkstore

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// record is the data of a claim's node, for people and for those who wait.
type record struct {
	Label string        `json:"label,omitempty"`
	TTL   time.Duration `json:"ttl,omitempty"`
	// Broken says who took the key from the holder.
	Broken string `json:"broken,omitempty"`
}

const maxLabel = 64

func (r record) bytes() []byte {
	if len(r.Label) > maxLabel {
		r.Label = r.Label[:maxLabel]
	}
	r.Label = strings.ToValidUTF8(r.Label, "")
	b, err := json.Marshal(r)
	if err != nil {
		panic("zkstore: a record of plain values failed to encode: " + err.Error())
	}
	return b
}

func parseRecord(data []byte) (r record) {
	if json.Unmarshal(data, &r) != nil || r.TTL < 0 {
		return record{}
	}
	return r
}

// node is what a claim has in the queue: its name, the number of the transaction that made it, and the
// session that it ends with. Where the answer to its creation was lost, the name is empty and the
// number zero.
type node struct {
	life  *life
	name  string
	czxid int64
}

// claim is one acquisition. Its calls follow one another: slot is full while one runs, also one
// whose caller has left.
//
// A claim that nobody attends to is withdrawn by a timer: one that was granted when its ttl is over,
// one that waits when nobody has tried, or waited, for a while.
type claim struct {
	s    *Store
	key  string
	dir  string
	o    store.ClaimOptions
	slot chan struct{}

	mu       sync.Mutex
	cancel   context.CancelFunc // ends the call that runs; Release calls it
	released bool               // Release was called: nothing is taken any more
	done     bool               // Release has succeeded
	letGo    bool               // the node is being removed, by this claim
	lost     bool               // the grant is gone
	granted  bool
	owner    string
	node     *node // nil where there is none
	token    fence.Token
	until    time.Time // end of the grant
	waiting  int       // calls of Wait
	wake     *watch    // of the node before ours; nil where there is none
	timer    *time.Timer
	unheard  func() bool // stops what OnLoss has asked for; nil where it has not
}

// begin takes the slot for a call that Release may cut short.
func (c *claim) begin(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	c.mu.Lock()
	c.cancel = cancel
	released := c.released
	c.mu.Unlock()
	err := errReleased()
	if !released {
		err = c.take(ctx)
	}
	if err != nil {
		cancel()
	}
	return ctx, cancel, err
}

// take takes the slot. An earlier call that still runs leaves the outcome open.
func (c *claim) take(ctx context.Context) error {
	limit := time.NewTimer(c.s.limit)
	defer limit.Stop()
	select {
	case c.slot <- struct{}{}:
		return nil
	case <-ctx.Done():
		return uncertain(context.Cause(ctx))
	case <-limit.C:
		return uncertain(errNoAnswer)
	}
}

// end gives the slot back and sets the timer anew.
func (c *claim) end() {
	c.mu.Lock()
	switch {
	case c.released && !c.done: // Release may have given up waiting for this call
		c.drop()
	case !c.released:
		c.arm()
	}
	c.mu.Unlock()
	<-c.slot
}

// answer gives way to a Release that came meanwhile.
func (c *claim) answer(g store.Grant, err error) (store.Grant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.released {
		return store.Grant{}, errReleased()
	}
	return g, err
}

// idle is how long a claim that waits keeps its place while nobody waits on it.
func (c *claim) idle() time.Duration { return min(c.o.TTL/4, 2*time.Second) }

// arm sets the timer at which the claim is withdrawn. mu is held.
func (c *claim) arm() {
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	if c.node == nil || c.waiting > 0 {
		return
	}
	d := c.idle()
	if c.granted {
		d = time.Until(c.until)
	}
	c.timer = time.AfterFunc(d, c.expire)
}

// expire withdraws a claim that nobody has attended to. A call that runs now arms the timer anew
// when it ends.
func (c *claim) expire() {
	select {
	case c.slot <- struct{}{}:
	default:
		return
	}
	defer func() { <-c.slot }()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.released && !c.lost, c.waiting > 0:
		return
	case c.granted && time.Now().Before(c.until):
		c.arm() // it was extended meanwhile
		return
	}
	c.lost = c.lost || c.granted
	c.drop()
}

// drop removes the node in the background, and prepares for another. mu is held.
func (c *claim) drop() {
	if c.node == nil {
		return
	}
	c.letGo = true
	go c.s.discard(*c.node, c.dir, c.owner)
	if !c.released {
		c.forget()
	}
}

// OnLoss has f called when the servers have ended the session. See [store.Witness].
func (c *claim) OnLoss(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deaf()
	if c.node != nil {
		c.unheard = context.AfterFunc(c.node.life.ctx, f)
	}
}

// deaf ends what OnLoss has asked for. mu is held.
func (c *claim) deaf() {
	if c.unheard != nil {
		c.unheard()
		c.unheard = nil
	}
}

// forget prepares for another node. mu is held.
func (c *claim) forget() {
	c.deaf()
	c.node, c.wake = nil, nil
	if !c.granted {
		c.owner = newOwner()
	}
}

// discard removes a node for certain: the session's end removes it too.
func (s *Store) discard(n node, dir, owner string) {
	ctx := context.Background()
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		l, err := s.s.await(ctx)
		if n.life.over() || err == nil && l != n.life {
			return
		}
		if err == nil {
			if err = s.remove(l, &n, dir, owner); err == nil || errors.Is(err, zk.ErrNoNode) {
				return
			}
		}
		select {
		case <-time.After(pause):
		case <-n.life.ctx.Done():
			return
		}
	}
}

// remove deletes a node, after it has looked for its name where that is not known.
func (s *Store) remove(l *life, n *node, dir, owner string) error {
	if err := s.find(l, n, dir, owner); err != nil {
		return err
	}
	return s.delete(l, dir+"/"+n.name)
}

// find looks for the name of a node whose creation had no answer. zk.ErrNoNode says that there is
// none, and never will be: what a connection before this one has sent was executed before the
// transaction, or is refused. A sync would not do: a leader that was replaced answers it.
func (s *Store) find(l *life, n *node, dir, owner string) error {
	if n.name != "" {
		return nil
	}
	if err := s.commit(l, dir); err != nil {
		return err
	}
	names, err := s.children(l, dir)
	if err != nil {
		return err
	}
	list := members(names)
	at := place(list, owner)
	if at < 0 {
		return zk.ErrNoNode
	}
	n.name = list[at].name
	return nil
}

// Try makes one attempt. See [store.Claim].
func (c *claim) Try(ctx context.Context) (store.Grant, error) {
	if err := cmp.Or(store.CheckKey(c.key), c.s.info.CheckTTL(c.o.TTL)); err != nil {
		return store.Grant{}, err
	}
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return c.answer(store.Grant{}, err)
	}
	defer cancel()
	c.mu.Lock()
	before := c.granted
	c.mu.Unlock()
	g, err := race(ctx, c.s.limit, c.try, func(left bool) {
		if left && !before { // nobody knows of the grant
			c.mu.Lock()
			c.granted = false
			c.mu.Unlock()
		}
		c.end()
	})
	return c.answer(g, classify(err, true))
}

func (c *claim) try(ctx context.Context) (store.Grant, error) {
	start := time.Now()
	l, err := c.s.s.await(ctx)
	if err != nil {
		return store.Grant{}, err
	}
	for range 3 {
		g, err := c.attempt(ctx, l, start)
		if !errors.Is(err, errGone) {
			return g, err
		}
	}
	return store.Grant{}, unavailable(errGone)
}

// attempt makes sure that the claim has a node, where it may have one, and looks where it stands.
// errGone says that the node has gone, and another may be made.
func (c *claim) attempt(ctx context.Context, l *life, start time.Time) (store.Grant, error) {
	n, err := c.current(l)
	if err != nil {
		return store.Grant{}, err
	}
	if n != nil {
		if err := c.s.find(l, n, c.dir, c.owner); errors.Is(err, zk.ErrNoNode) {
			return store.Grant{}, c.gone()
		} else if err != nil {
			return store.Grant{}, readFailed(err)
		}
		names, shown, err := c.names(l, start)
		return c.look(l, n, names, err, instants{start, shown})
	}
	if !c.o.Wait {
		if held, err := c.peek(l); err != nil || held != nil {
			return store.Grant{}, orHeld(held, readFailed(err))
		}
	}
	n, alone, err := c.enter(ctx, l)
	switch {
	case err != nil:
		return store.Grant{}, err
	case alone:
		return c.grant(l, n.czxid, instants{start, start})
	}
	names, err := c.s.children(l, c.dir)
	return c.look(l, n, names, err, instants{start, start})
}

// instants belong to a call.
type instants struct {
	start time.Time // when it began
	shown time.Time // before a request of which the answer shows that the leader keeps the session
}

// names are those in the queue. A claim that was not granted yet need not have the leader answer where that
// has just agreed to a transaction of the session, most often the one that made the node: in however old a
// list it is the first, those before it have gone for good.
func (c *claim) names(l *life, start time.Time) (names []string, shown time.Time, err error) {
	read := func() ([]string, error) { return c.s.children(l, c.dir) }
	c.mu.Lock()
	granted := c.granted
	c.mu.Unlock()
	if agreed := l.quorate(); !granted && start.Sub(agreed) < l.trusted()/16 {
		names, err = read()
		return names, agreed, err
	}
	if !l.stale() {
		names, err = synced(c.s, l, c.dir, read)
		return names, start, err
	}
	if err := c.s.commit(l, c.dir); err != nil {
		return nil, start, err
	}
	names, err = read()
	return names, start, err
}

func orHeld(held *store.HeldError, err error) error {
	if held != nil {
		return held
	}
	return err
}

// readFailed is classify for a read, in a call that has changed nothing.
func readFailed(err error) error { return classify(err, false) }

// current is the node that the claim has in the life l, and a loss where its grant has ended.
func (c *claim) current(l *life) (*node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.node != nil && c.node.life != l {
		c.lost = c.lost || c.granted
		c.forget()
	}
	if c.lost {
		return nil, &store.LostError{}
	}
	return c.node, nil
}

// gone takes note that the node does not exist.
func (c *claim) gone() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost = c.lost || c.granted
	c.forget()
	if c.lost {
		return &store.LostError{}
	}
	return errGone
}

// enter makes the node. It also writes to its parent, in the same transaction, because the answer to
// that tells the number of the transaction, which is the token, and whether there are others.
func (c *claim) enter(ctx context.Context, l *life) (n *node, alone bool, err error) {
	data := record{Label: c.o.Label, TTL: c.o.TTL}.bytes()
	for range 3 {
		if err := stopped(ctx); err != nil {
			return nil, false, err
		}
		n := &node{life: l}
		c.mu.Lock()
		if c.released {
			c.mu.Unlock()
			return nil, false, errReleased()
		}
		c.node, c.letGo = n, false
		c.mu.Unlock()
		answers, err := c.s.multi(l,
			&zk.CreateRequest{Path: c.dir + "/" + nodePrefix + c.owner + "-", Data: data, Acl: c.s.acl, Flags: zk.FlagEphemeralSequential},
			&zk.SetDataRequest{Path: c.dir, Data: []byte(c.key), Version: -1})
		_, err = failedAt(answers, err)
		if err == nil || unknown(err) {
			c.moved(n)
		}
		if err == nil {
			made, parent := answers[0].String, answers[1].Stat
			n.name, n.czxid = made[strings.LastIndexByte(made, '/')+1:], parent.Mzxid
			return n, parent.NumChildren == 1 && n.life == l, nil
		}
		if !unknown(err) {
			c.mu.Lock()
			c.node = nil
			c.mu.Unlock()
		}
		if !errors.Is(err, zk.ErrNoNode) {
			return nil, false, classify(err, true)
		}
		if err := c.s.queue(l, c.dir, c.key); err != nil {
			return nil, false, readFailed(err) // no grant is at stake
		}
	}
	return nil, false, unavailable(zk.ErrNoNode)
}

// moved gives a node that was sent late to the session through which it went: the client library keeps
// what it could not send, also for the next session. Where none stands, the node has ended with its own.
func (c *claim) moved(n *node) {
	now := c.s.s.current()
	c.mu.Lock()
	defer c.mu.Unlock()
	if now != nil {
		n.life = now
	}
}

// peek answers who holds the key, without a transaction, and nil where nobody does.
func (c *claim) peek(l *life) (*store.HeldError, error) {
	list, err := c.listed(c.s.children(l, c.dir))
	if err == nil && len(list) > 0 { // the server may lag behind; a refusal must be true
		list, err = c.listed(synced(c.s, l, c.dir, func() ([]string, error) { return c.s.children(l, c.dir) }))
	}
	if err != nil || len(list) == 0 {
		return nil, err
	}
	w, err := c.s.s.watch(l, c.dir+"/"+list[0].name)
	if errors.Is(err, zk.ErrNoNode) {
		return nil, nil // free, or the next one's: the node that is made now tells
	}
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.wake = w
	c.mu.Unlock()
	return &store.HeldError{Holder: holder(c.key, list[0], w.data, w.stat)}, nil
}

// listed is the queue whose nodes have the names.
func (c *claim) listed(names []string, err error) ([]member, error) {
	if errors.Is(err, zk.ErrNoNode) {
		return nil, nil
	}
	return members(names), err
}

// look says where the node stands among the names in the queue, or what reading those has answered. They are
// at least as new as the node.
func (c *claim) look(l *life, n *node, names []string, err error, at instants) (store.Grant, error) {
	if errors.Is(err, zk.ErrNoNode) {
		return store.Grant{}, c.gone()
	}
	if err != nil {
		return store.Grant{}, classify(err, true)
	}
	list := members(names)
	switch i := place(list, c.owner); {
	case i < 0:
		return store.Grant{}, c.gone()
	case i == 0:
		return c.first(l, n, at)
	default:
		return store.Grant{}, c.refused(l, list, i)
	}
}

// first grants to the first in the queue. Whose number is known and who was not granted before need
// not be read: nobody takes a key away that is not held.
func (c *claim) first(l *life, n *node, at instants) (store.Grant, error) {
	c.mu.Lock()
	granted := c.granted
	c.mu.Unlock()
	if n.czxid != 0 && !granted {
		return c.grant(l, n.czxid, at)
	}
	return c.reread(l, n, at)
}

// reread grants to a node that is there and has not been broken.
func (c *claim) reread(l *life, n *node, at instants) (store.Grant, error) {
	own, err := c.s.get(l, c.dir+"/"+n.name)
	switch {
	case errors.Is(err, zk.ErrNoNode):
		return store.Grant{}, c.gone()
	case err != nil:
		return store.Grant{}, classify(err, true)
	case parseRecord(own.data).Broken != "":
		return store.Grant{}, c.broken()
	}
	n.czxid = own.stat.Czxid
	return c.grant(l, n.czxid, at)
}

// broken takes note that an operator has taken the key away. The node stays until its ttl is over.
func (c *claim) broken() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost = true
	return &store.LostError{}
}

func (c *claim) grant(l *life, czxid int64, at instants) (store.Grant, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ttl := min(c.o.TTL, l.until(at.shown).Sub(at.start))
	c.granted, c.token, c.wake = true, fence.Token(czxid), nil
	c.until = at.start.Add(ttl)
	return store.Grant{Token: c.token, Owner: c.owner, TTL: ttl}, nil
}

// refused answers who holds the key, and watches the node before ours. A claim that does not wait
// leaves.
func (c *claim) refused(l *life, list []member, at int) error {
	before, err := c.s.s.watch(l, c.dir+"/"+list[at-1].name)
	h := holder(c.key, list[0], nil, zk.Stat{})
	switch {
	case err != nil && !errors.Is(err, zk.ErrNoNode):
		return readFailed(err)
	case err == nil && at == 1:
		h = holder(c.key, list[0], before.data, before.stat)
	case at > 1:
		if first, err := c.s.get(l, c.dir+"/"+list[0].name); err == nil {
			h = holder(c.key, list[0], first.data, first.stat)
		}
	}
	h.TTL = cmp.Or(h.TTL, c.o.TTL)
	c.mu.Lock()
	c.wake = before
	c.mu.Unlock()
	if c.o.Wait {
		return &store.HeldError{Holder: h, Place: at}
	}
	c.mu.Lock()
	c.drop()
	c.mu.Unlock()
	return &store.HeldError{Holder: h}
}

// holder describes the first in the queue. Nobody but the holder knows when it last extended, so
// TTL is the most that can be left.
func holder(key string, m member, data []byte, stat zk.Stat) store.Holder {
	r := parseRecord(data)
	h := store.Holder{Key: key, Owner: m.owner, Label: r.Label, Token: fence.Token(stat.Czxid), TTL: r.TTL, Session: true, Held: since(stat.Ctime)}
	if r.Broken != "" {
		h.Owner, h.Label, h.Broken, h.Token = brokenBy+m.owner, r.Broken, true, 0
	}
	return h
}

// since is the time since a server's clock showed ms, by the wall clock of this machine.
func since(ms int64) time.Duration {
	if ms == 0 {
		return 0
	}
	return max(0, time.Since(time.UnixMilli(ms)))
}

// Extend asks for the ttl anew. See [store.Claim].
func (c *claim) Extend(ctx context.Context) (store.Grant, error) {
	r := c.s.ExtendMany(ctx, []store.Claim{c})[0]
	return r.Grant, r.Err
}

// Release gives the key back. See [store.Claim].
func (c *claim) Release(ctx context.Context) error {
	c.mu.Lock()
	c.released = true
	c.deaf()
	if c.cancel != nil {
		c.cancel()
	}
	if c.timer != nil && !c.lost {
		c.timer.Stop()
	}
	c.mu.Unlock()
	if err := ctx.Err(); err != nil {
		c.abandon()
		return uncertain(err)
	}
	if err := c.take(ctx); err != nil {
		return err
	}
	lost, err := race(ctx, c.s.limit, c.release, func(bool) { <-c.slot })
	if err != nil && !errors.Is(err, store.ErrUncertain) {
		err = uncertain(err)
	}
	return cmp.Or(err, lost)
}

// abandon removes the node of a released claim in the background. A call that runs does so when it
// ends.
func (c *claim) abandon() {
	select {
	case c.slot <- struct{}{}:
	default:
		return
	}
	c.mu.Lock()
	if !c.done && !c.lost && !c.letGo {
		c.drop()
	}
	c.mu.Unlock()
	<-c.slot
}

func (c *claim) release(ctx context.Context) (lost, err error) {
	c.mu.Lock()
	n, owner, letGo := c.node, c.owner, c.letGo
	switch {
	case c.lost:
		c.mu.Unlock()
		return &store.LostError{}, nil
	case c.done, n == nil, n.life.over():
		c.done = true
		if n != nil && c.granted && n.life.over() && !letGo {
			c.lost = true
			lost = &store.LostError{}
		}
		c.mu.Unlock()
		return lost, nil
	}
	c.letGo = true
	c.mu.Unlock()
	l, err := c.s.s.await(ctx)
	if err == nil && l == n.life {
		err = c.s.remove(l, n, c.dir, owner)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil && l == n.life:
		c.done = true
	case err == nil, errors.Is(err, zk.ErrNoNode):
		if c.done = true; c.granted && !letGo {
			c.lost = true
			return &store.LostError{}, nil
		}
	default:
		go c.s.discard(*n, c.dir, owner)
		return nil, classify(err, true)
	}
	return nil, nil
}

// Wait returns when the claim before this one in the queue has gone. See [store.Waiter].
func (c *claim) Wait(ctx context.Context, held *store.HeldError) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	c.mu.Lock()
	w := c.wake
	c.waiting++
	c.arm()
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.waiting--; !c.released {
			c.arm()
		}
	}()
	left := held.Holder.TTL
	var fired <-chan struct{}
	if w != nil && w.err == nil {
		fired = w.fired
	} else {
		left = min(left, pollEvery)
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-fired:
	case <-timer.C:
	case <-c.s.s.closing:
	}
	return nil
}

// pollEvery is how long a claim waits that has nothing to watch.
const pollEvery = 100 * time.Millisecond
