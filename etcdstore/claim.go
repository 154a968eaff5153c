package etcdstore

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// claim is one acquisition. Its calls follow one another: slot is full while one runs, also one
// whose caller has left, so that none can overtake a later one.
type claim struct {
	s    *Store
	key  string
	path string // of the key in etcd
	o    store.ClaimOptions
	slot chan struct{}

	mu       sync.Mutex
	cancel   context.CancelFunc // ends the call that runs; Release calls it
	released bool               // Release was called: nothing is taken any more
	done     bool               // Release has succeeded
	unsure   bool               // an earlier Release had no answer, and the reaper may have ended the attempt since
	lost     bool               // the grant is gone
	why      error              // of the loss, where it is not the key that has gone
	attempt  attempt
	queue    queue // as the last refusal has found it

	// Of a claim on a session:
	until  time.Time   // when its time ends
	timer  *time.Timer // which ends it then; nil before there is anything to end
	left   bool        // the reaper has what it may have left
	onLoss func()
}

// attempt is what a claim is known by in etcd. Its lease is used by no other one. Where it has a
// session, that is what its keys are on, and nobody makes the lease unless another store adopts
// the grant.
type attempt struct {
	lease    int64 // zero: nothing was asked for yet
	owner    string
	session  *session
	value    string      // of its keys, where they are on a session
	unknown  bool        // a request that takes the key, or queues up, had no answer
	found    bool        // the lease was made
	lent     time.Time   // when it was asked for; zero where that is not known
	kept     time.Time   // when it was last asked for or renewed, with success
	open     bool        // the key may have been taken
	place    int64       // revision at which the claim has queued up; zero where it is not known to have
	revision int64       // at which the key was taken; zero where it is not known to be
	token    fence.Token // of that grant
}

func errReleased() error { return &fault{kind: store.ErrReleased} }

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
	select {
	case c.slot <- struct{}{}:
		return nil
	default:
	}
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, errNoAnswer)
	defer cancel()
	select {
	case c.slot <- struct{}{}:
		return nil
	case <-ctx.Done():
		return uncertain(context.Cause(ctx))
	}
}

func (c *claim) end() {
	c.watchOver()
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

// change changes the claim's state.
func (c *claim) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// state answers the attempt, and whether the claim has been lost.
func (c *claim) state() (attempt, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.attempt, c.lost
}

// on is the etcd lease that the attempt's keys are on.
func (a attempt) on() int64 {
	if a.session != nil {
		return a.session.id
	}
	return a.lease
}

// gone is the error of a grant that is gone.
func (c *claim) gone(by *store.HeldError) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	lost := &store.LostError{By: by}
	if c.why != nil {
		return &fault{lost, c.why}
	}
	return lost
}

// Try takes the key if nobody holds it. See [store.Claim].
func (c *claim) Try(ctx context.Context) (store.Grant, error) {
	if err := cmp.Or(store.CheckKey(c.key), c.s.info.CheckTTL(c.o.TTL)); err != nil {
		return store.Grant{}, err
	}
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return c.answer(store.Grant{}, err)
	}
	defer cancel()
	return c.answer(race(ctx, c.try, c.end))
}

func (c *claim) try(ctx context.Context) (store.Grant, error) {
	start := time.Now()
	a, lost := c.state()
	switch {
	case lost:
		return store.Grant{}, c.gone(nil)
	case a.revision != 0: // granted before, perhaps to a caller who had left
		r := c.s.extend(ctx, []*claim{c})[0]
		return r.Grant, r.Err
	case c.looksFirst(a):
		// A refusal that a read finds out costs no entry in the log.
		resp, err := look(ctx, c.s.kv.Txn, &pb.TxnRequest{Success: c.lookingAround(a)})
		if err != nil {
			return store.Grant{}, err
		}
		if now := c.around(a, resp, 0); now.holder != nil && now.holder.Owner != a.owner && (now.place != 0 || !c.o.Wait) {
			return store.Grant{}, c.refuse(ctx, now)
		}
	}
	for range 4 {
		g, err := c.grab(ctx, start)
		switch err {
		case errNoLease:
			if a, _ := c.state(); a.session != nil {
				a.session.end()
			}
			// Its lease has ended, with all that it took and nobody was told of.
			c.change(func() { c.attempt, c.lost, c.why = attempt{}, false, nil })
		case errQueue:
			c.s.note(c.path, true)
		default:
			return g, err
		}
	}
	return store.Grant{}, &fault{store.ErrUnavailable, errors.New("the lease ended before the key was taken")}
}

// grab creates the key where it is missing. It answers errNoLease where the attempt's lease has
// ended, and errQueue where the key is unexpectedly not to be had.
func (c *claim) grab(ctx context.Context, start time.Time) (store.Grant, error) {
	a := c.begun()
	sent, ttl := time.Now(), c.o.TTL
	renewed := make(chan error, 1)
	if a.session != nil {
		err := c.ride(ctx, a.session, sent, func(left time.Duration, err error) {
			ttl = min(ttl, left)
			renewed <- err
		})
		if err != nil {
			return store.Grant{}, err
		}
	} else if age, ok := elapsed(a.lent); a.found && ok && age < ttl/10 {
		sent = sent.Add(-age)
		renewed <- nil
	} else if a.found {
		// Meanwhile, because a lease that waited has its ttl behind it.
		go func() {
			left, err := c.renew(ctx, a)
			ttl = min(ttl, left)
			renewed <- err
		}()
	} else {
		granted, err := c.s.lend(ctx, a.lease, c.o.TTL)
		if err != nil {
			return store.Grant{}, err
		}
		ttl = min(ttl, granted)
		renewed <- nil
	}
	before, short := c.s.seen.Load(), c.short(a)
	c.change(func() {
		c.attempt.found, c.attempt.open = true, true
		if !a.found {
			c.attempt.lent, c.attempt.kept = sent, sent
		}
		c.until = sent.Add(c.o.TTL)
	})
	resp, err := ask(ctx, c.s.kv.Txn, c.taking(a, short))
	if err == nil {
		err = c.took(ctx, a, resp, before, short)
	} else {
		c.change(func() {
			known := !errors.Is(err, store.ErrUncertain)
			c.attempt.open, c.attempt.unknown = a.open || !known, a.unknown || !known
		})
	}
	unrenewed := <-renewed
	if err == nil && errors.Is(unrenewed, store.ErrUnavailable) { // and yet the key was taken
		unrenewed = uncertain(unrenewed)
	}
	if err := cmp.Or(err, unrenewed); err != nil {
		return store.Grant{}, err
	}
	if a.session != nil {
		if _, ended := a.session.state(); ended { // too early to be told to a holder
			return store.Grant{}, errNoLease
		}
	}
	c.s.note(c.path, true)
	c.change(func() { c.until = sent.Add(ttl) })
	a, _ = c.state()
	return store.Grant{Token: a.token, Owner: a.owner, TTL: ttl + sent.Sub(start)}, nil
}

// begun answers the attempt, a fresh one where there is none.
func (c *claim) begun() attempt {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.attempt.lease == 0 {
		a := attempt{lease: leaseID()}
		a.owner = newOwner(a.lease)
		if c.s.session != 0 {
			a.session = c.s.current()
			a.value = string(newRecord(c.key, a.owner, c.o.Label, c.s.epoch).text())
		}
		c.attempt = a
	}
	return c.attempt
}

// ride has the session live long enough, and tells for how long: now where that is known or the
// session is to be made first, and else while the caller goes on.
func (c *claim) ride(ctx context.Context, n *session, sent time.Time, tell func(time.Duration, error)) error {
	n.add(c)
	left, ok := n.enough(c.o.TTL, sent)
	if made, _ := n.state(); made && !ok {
		go func() { tell(n.confirm(ctx, c.o.TTL, sent)) }()
		return nil
	}
	var err error
	if !ok {
		left, err = n.confirm(ctx, c.o.TTL, sent)
	}
	if err == nil {
		tell(left, nil)
	}
	return err
}

// elapsed is the time since then, not known where the machine may have slept meanwhile: that moves
// the wall clock and not Go's monotonic one.
func elapsed(since time.Time) (d time.Duration, known bool) {
	if since.IsZero() {
		return 0, false
	}
	now := time.Now()
	d = now.Sub(since)
	wall := now.Round(0).Sub(since.Round(0))
	return d, (wall - d).Abs() < 10*time.Millisecond
}

// renew renews the lease of an attempt, or confirms its session.
func (c *claim) renew(ctx context.Context, a attempt) (left time.Duration, err error) {
	sent := time.Now()
	if a.session != nil {
		left, err = a.session.confirm(ctx, c.o.TTL, sent)
	} else {
		left, err = c.s.renew(ctx, a.lease)
	}
	if err == nil {
		c.change(func() {
			if c.attempt.owner == a.owner {
				c.attempt.kept = sent
			}
		})
	}
	return left, err
}

// short reports whether the transaction has no part for a key that is taken: none is expected.
func (c *claim) short(a attempt) bool {
	return c.o.Wait && a.place == 0 && !a.open && !c.s.likelyHeld(c.path)
}

// taking is the transaction that creates the key, and else queues up, unless it is short, and looks
// around.
func (c *claim) taking(a attempt, short bool) *pb.TxnRequest {
	path, waiting := []byte(c.path), []byte(c.waitPath(a))
	value := []byte(a.value)
	if a.session == nil {
		value = newRecord(c.key, a.owner, c.o.Label, c.s.epoch).text()
	}
	r := &pb.TxnRequest{
		Compare: []*pb.Compare{isMissing(c.path)},
		Success: []*pb.RequestOp{putting(path, value, a.on())},
	}
	queueUp := putting(waiting, value, a.on())
	if a.session != nil { // whose end does not wait for late requests
		void := isMissing(c.s.voidPath(a.owner))
		r.Compare = append(r.Compare, void)
		queueUp = &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: &pb.TxnRequest{
			Compare: []*pb.Compare{void}, Success: []*pb.RequestOp{queueUp}}}}
	}
	if !c.o.Wait {
		r.Failure = c.lookingAround(a)
		return r
	}
	c.mu.Lock()
	skipped := c.queue.skipped
	c.mu.Unlock()
	if skipped == nil {
		r.Compare = append(r.Compare, c.nobodyAhead(a))
	}
	if short {
		return r
	}
	for _, dead := range skipped {
		r.Success = append(r.Success, deleting([]byte(dead)))
	}
	if a.open || a.place != 0 {
		r.Success = append(r.Success, deleting(waiting))
	}
	r.Failure = append([]*pb.RequestOp{queueUp}, c.lookingAround(a)...)
	return r
}

func putting(path, value []byte, lease int64) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestPut{RequestPut: &pb.PutRequest{Key: path, Value: value, Lease: lease}}}
}

func deleting(path []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestDeleteRange{RequestDeleteRange: &pb.DeleteRangeRequest{Key: path}}}
}

func reading(path []byte) *pb.RequestOp {
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{Key: path}}}
}

// found answers what the reading of that place in a transaction has found, nil where nothing.
func found(resp *pb.TxnResponse, place int) *mvccpb.KeyValue {
	if place >= len(resp.Responses) {
		return nil
	}
	if kvs := resp.Responses[place].GetResponseRange().GetKvs(); len(kvs) > 0 {
		return kvs[0]
	}
	return nil
}

// took looks what the transaction has done, and answers nil where the key is ours.
func (c *claim) took(ctx context.Context, a attempt, resp *pb.TxnResponse, before int64, short bool) error {
	revision, epoch := resp.Header.Revision, c.s.epoch
	if resp.Succeeded {
		before++ // by the key itself
	}
	if err := c.s.grew(before, revision); err != nil {
		a.unknown = true
		c.clearLater(a)
		c.change(func() { c.attempt = attempt{} })
		return err
	}
	if !resp.Succeeded && short {
		c.change(func() { c.attempt.open = false })
		return errQueue
	}
	if !resp.Succeeded {
		first := 0
		if c.o.Wait {
			first = 1 // behind the put
		}
		now := c.around(a, resp, first)
		if now.holder == nil || now.holder.Owner != a.owner {
			c.change(func() { c.attempt.open = false })
			return c.refuse(ctx, now)
		}
		revision, epoch = now.holder.created, now.holder.Epoch // an earlier request has taken it
	}
	c.change(func() { c.attempt.revision, c.attempt.token = revision, token(epoch, revision) })
	return nil
}

// refuse is the answer where another holds the key, or is to have it first.
func (c *claim) refuse(ctx context.Context, now queue) error {
	a, _ := c.state()
	if now.holder != nil && now.holder.Owner == brokenOwner(a.owner) { // it was taken by a request without an answer
		c.change(func() { c.lost = true })
		c.clearLater(a)
		return c.gone(nil)
	}
	c.change(func() { c.queue, c.attempt.place = now, now.place })
	held := &store.HeldError{Holder: store.Holder{Key: c.key, TTL: now.grace()}}
	if now.place != 0 {
		held.Place = len(now.ahead) + 1
	}
	if now.holder != nil {
		c.s.note(c.path, true)
		left, _ := c.s.left(ctx, now.holder) // without an answer it is not known
		held.Holder = now.holder.holder(c.key, left)
	}
	return held
}

// Extend asks for the ttl anew. See [store.Claim].
func (c *claim) Extend(ctx context.Context) (store.Grant, error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return c.answer(store.Grant{}, err)
	}
	defer cancel()
	return c.answer(race(ctx, func(ctx context.Context) (store.Grant, error) {
		r := c.s.extend(ctx, []*claim{c})[0]
		return r.Grant, r.Err
	}, c.end))
}

// Release gives the key back. See [store.Claim].
func (c *claim) Release(ctx context.Context) error {
	c.mu.Lock()
	c.released = true
	if c.cancel != nil {
		c.cancel()
	}
	c.mu.Unlock()
	err := ctx.Err()
	if err == nil {
		err = c.take(ctx)
	}
	if err != nil {
		if a, _ := c.state(); a.session == nil { // on a session its time ends all the same
			c.leave()
		}
		if !errors.Is(err, store.ErrUncertain) {
			err = uncertain(err)
		}
		return err
	}
	lost, err := race(ctx, c.release, c.end)
	if err != nil {
		c.leave()
	}
	return cmp.Or(err, lost)
}

// leave lets the reaper go on with a Release that had no answer, or did not get to ask. A call that
// still runs takes nothing after it: its context is done, and its lease ends.
func (c *claim) leave() {
	c.mu.Lock()
	a, idle := c.attempt, c.done || c.attempt.lease == 0
	c.left, c.unsure = true, c.unsure || !idle
	c.mu.Unlock()
	if !idle {
		c.clearLater(a)
	}
}

// clearLater lets the reaper end an attempt.
func (c *claim) clearLater(a attempt) {
	if a.session == nil {
		c.s.reaper.add(a.lease, c.o.TTL)
	} else {
		c.s.leftovers.add(c.leftover(a), c.o.TTL)
	}
}

func (c *claim) release(ctx context.Context) (lost, err error) {
	c.mu.Lock()
	a, idle, unsure, gone := c.attempt, c.done || c.attempt.lease == 0, c.unsure, c.lost
	c.mu.Unlock()
	switch {
	case idle:
		return nil, nil
	case a.empty(): // no key to give back
		if a.session == nil {
			c.s.reaper.add(a.lease, c.o.TTL)
		}
		c.change(func() { c.done = true })
		return nil, nil
	}
	had, err := c.giveBack(ctx, a)
	if err != nil {
		if !errors.Is(err, store.ErrUncertain) {
			err = uncertain(err)
		}
		return nil, err
	}
	c.s.note(c.path, a.place != 0) // where one had to wait others likely do
	if gone || !had && a.revision != 0 && !unsure {
		lost = c.gone(nil)
	}
	c.change(func() { c.done, c.unsure = lost == nil, false })
	return lost, nil
}

// empty reports whether the attempt has no keys, whatever becomes of its requests.
func (a attempt) empty() bool { return a.revision == 0 && !a.open && a.place == 0 && !a.unknown }

// giveBack ends what the attempt has, and answers whether it had something still.
func (c *claim) giveBack(ctx context.Context, a attempt) (had bool, err error) {
	if a.session != nil {
		one, err := c.s.clear(ctx, []leftover{c.leftover(a)})
		return err == nil && one[0], err
	}
	err = c.s.revoke(ctx, a.lease)
	if err == errNoLease {
		return false, nil
	}
	return err == nil, err
}
