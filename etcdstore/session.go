package etcdstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast/store"
)

// SessionError is the cause of a loss: the session of a store with Options.Session has ended at
// the servers, and with it all locks on it. An operator has revoked it, or it was not renewed in
// time. The next acquisition opens another one.
type SessionError struct {
	Lease clientv3.LeaseID // of the session
}

func (e *SessionError) Error() string {
	return fmt.Sprintf("the session, etcd lease %x, has ended: revoked, or not renewed in time", int64(e.Lease))
}

// session is an etcd lease that the claims of a store share. Nobody renews it but those who need
// it longer, so that it ends by itself when nobody does. mu is never held while another lock is
// taken.
type session struct {
	s  *Store
	id int64

	mu     sync.Mutex
	made   bool          // the servers have it
	sent   time.Time     // when what they promised last was asked for
	ttl    time.Duration // that they promised then
	asked  time.Time     // when they were last asked for more, with or without an answer
	flight *flight       // the request that runs
	ended  bool          // they have it no more
	claims map[*claim]struct{}
	voids  int // keys that keep late requests from taking a lock
}

// flight is a request whose answer several wait for.
type flight struct {
	done chan struct{}
	err  error
}

// maxVoids is how many void keys a session has at most, give or take: a store whose network is
// that bad then goes on with another one.
const maxVoids = 1000

// current answers the session for new claims.
func (s *Store) current() *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shared == nil || s.shared.over() {
		s.shared = &session{s: s, id: leaseID(), claims: map[*claim]struct{}{}}
	}
	return s.shared
}

// over reports whether nothing new is to be put on the session. One that has ended by the clock,
// and has no claims, has ended.
func (n *session) over() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.made && n.flight == nil && len(n.claims) == 0 && time.Since(n.asked) > n.ttl {
		n.ended = true
	}
	return n.ended || n.voids >= maxVoids
}

func (n *session) add(c *claim) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.ended {
		n.claims[c] = struct{}{}
	}
}

func (n *session) drop(c *claim) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.claims, c)
}

func (n *session) state() (made, ended bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.made, n.ended
}

// mayLive reports whether the servers may have the session still.
func (n *session) mayLive() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.ended && time.Since(n.asked) <= max(n.ttl, n.s.session)
}

// enough answers for how long after start the session lives at least, and whether that does for
// the ttl: a tenth may be missing, so that those who ask one after another ask once.
func (n *session) enough(ttl time.Duration, start time.Time) (left time.Duration, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lasts(ttl, start)
}

func (n *session) lasts(ttl time.Duration, start time.Time) (left time.Duration, ok bool) {
	if _, known := elapsed(n.sent); !n.made || n.ended || !known {
		return 0, false
	}
	left = n.sent.Add(n.ttl).Sub(start)
	return left, left >= ttl-ttl/10
}

// confirm is enough, and asks the servers where it is not; many who do so at once ask once. It
// answers errNoLease where the session has ended.
func (n *session) confirm(ctx context.Context, ttl time.Duration, start time.Time) (time.Duration, error) {
	for range 3 { // a request that began before start may not do
		n.mu.Lock()
		if n.ended {
			n.mu.Unlock()
			return 0, errNoLease
		}
		left, ok := n.lasts(ttl, start)
		f := n.flight
		if !ok && f == nil {
			f = &flight{done: make(chan struct{})}
			n.flight, n.asked = f, time.Now()
			go n.ask(f, n.made, n.asked)
		}
		n.mu.Unlock()
		if ok {
			return left, nil
		}
		select {
		case <-f.done:
			if f.err != nil {
				return 0, f.err
			}
		case <-ctx.Done():
			return 0, uncertain(context.Cause(ctx))
		}
	}
	return 0, &fault{store.ErrUnavailable, errors.New("the clock does not tell how long the session lives")}
}

// doubt forgets what the servers have promised.
func (n *session) doubt() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.sent = time.Time{}
}

// ask makes or renews the session, for all who wait for the answer, whoever of them gives up.
func (n *session) ask(f *flight, made bool, sent time.Time) {
	ctx, cancel := context.WithTimeoutCause(n.s.life, callLimit, errNoAnswer)
	defer cancel()
	renew := n.s.renew
	if !made {
		renew = func(ctx context.Context, id int64) (time.Duration, error) { return n.s.lend(ctx, id, n.s.session) }
	}
	ttl, err := renew(ctx, n.id)
	n.mu.Lock()
	n.flight = nil
	if err == nil {
		n.made, n.sent, n.ttl = true, sent, ttl
	}
	n.mu.Unlock()
	if err == errNoLease {
		n.end()
	}
	f.err = err
	close(f.done)
}

// end says that the servers have the session no more: all claims on it are lost.
func (n *session) end() {
	n.mu.Lock()
	claims := n.claims
	n.ended, n.claims = true, nil
	n.mu.Unlock()
	for c := range claims {
		c.bereave(n)
	}
}

// leftover is what a claim may have left on a living session.
type leftover struct {
	n           *session
	path, owner string
	value       string // of the key
	waits       bool   // it may have a place in the queue
	unknown     bool   // a request that takes the key, or queues up, had no answer
}

func (c *claim) leftover(a attempt) leftover {
	return leftover{a.session, c.path, a.owner, a.value, a.unknown || a.revision == 0, a.unknown || a.revision == 0 && a.open}
}

// voidPath is a key that keeps an attempt from taking its lock when its request arrives late.
func (s *Store) voidPath(owner string) string { return s.voids + owner }

// clearing is the transaction that deletes a leftover: only the key that is its own, and not one
// that was adopted, which is on another lease. It succeeds where that was there, and else reads what
// is, as the last thing.
func (s *Store) clearing(l leftover) *pb.TxnRequest {
	path := []byte(l.path)
	var other []*pb.RequestOp
	if l.unknown {
		other = append(other, putting([]byte(s.voidPath(l.owner)), nil, l.n.id))
	}
	if l.waits {
		other = append(other, deleting([]byte(waitPath(l.path, l.owner))))
	}
	return &pb.TxnRequest{
		Compare: []*pb.Compare{
			{Key: path, Target: pb.Compare_VALUE, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_Value{Value: []byte(l.value)}},
			{Key: path, Target: pb.Compare_LEASE, Result: pb.Compare_EQUAL, TargetUnion: &pb.Compare_Lease{Lease: l.n.id}},
		},
		Success: append(slices.Clone(other), deleting(path)),
		Failure: append(slices.Clone(other), reading(path)),
	}
}

// clear deletes what claims have left, at most batchSize of them in one request, and answers
// which had their keys still. One that was broken is deleted as well, and not had. With a session
// its keys have gone. Nobody trusts a claim that is cleared.
func (s *Store) clear(ctx context.Context, left []leftover) ([]bool, error) {
	had := make([]bool, len(left))
	r := &pb.TxnRequest{}
	for _, l := range left {
		r.Success = append(r.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestTxn{RequestTxn: s.clearing(l)}})
	}
	if len(left) == 1 { // a plain transaction
		r = s.clearing(left[0])
	}
	resp, err := ask(ctx, s.kv.Txn, r)
	switch {
	case err == errNoLease && len(left) == 1:
		left[0].n.end()
		return had, nil
	case err == errNoLease: // one of the sessions
		for i := range left {
			one, err := s.clear(ctx, left[i:i+1])
			if err != nil {
				return nil, err
			}
			had[i] = one[0]
		}
		return had, nil
	case err != nil:
		return nil, err
	}
	var broken []leftover
	for i, l := range left {
		one := resp
		if len(left) > 1 {
			one = resp.Responses[i].GetResponseTxn()
		}
		had[i] = one.Succeeded
		if l.unknown {
			l.n.mu.Lock()
			l.n.voids++
			l.n.mu.Unlock()
		}
		if e := newEntry(found(one, len(one.Responses)-1)); e != nil && e.lease == l.n.id && e.Owner == brokenOwner(l.owner) {
			broken = append(broken, leftover{n: l.n, path: l.path, owner: l.owner, value: string(e.value)})
		}
	}
	if len(broken) > 0 {
		_, err = s.clear(ctx, broken)
	}
	return had, err
}

// isAt is the condition that a key was last changed at that revision.
func isAt(path string, revision int64) *pb.Compare {
	return &pb.Compare{Key: []byte(path), Target: pb.Compare_MOD, Result: pb.Compare_EQUAL,
		TargetUnion: &pb.Compare_ModRevision{ModRevision: revision}}
}

// isMissing is the condition that there is no such key.
func isMissing(path string) *pb.Compare {
	return &pb.Compare{Key: []byte(path), Target: pb.Compare_CREATE, Result: pb.Compare_EQUAL,
		TargetUnion: &pb.Compare_CreateRevision{CreateRevision: 0}}
}

// watchOver sees to it that what the claim has on a session goes at the end of its time, whether
// anybody asks for it or not. The slot is taken.
func (c *claim) watchOver() {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.attempt.session
	if n == nil {
		return
	}
	a := c.attempt
	if c.done || c.lost || c.left || a.empty() {
		if c.timer != nil {
			c.timer.Stop()
		}
		defer n.drop(c)
		return
	}
	if a.revision == 0 {
		c.until = time.Now().Add(c.o.TTL)
	}
	if c.timer == nil {
		c.timer = time.AfterFunc(time.Until(c.until), c.expire)
	} else {
		c.timer.Reset(time.Until(c.until))
	}
}

// expire ends a claim whose time is over.
func (c *claim) expire() {
	select {
	case c.slot <- struct{}{}:
	default: // a call runs, which may give it more time
		c.mu.Lock()
		defer c.mu.Unlock()
		c.timer.Reset(c.o.TTL / 20)
		return
	}
	defer func() { <-c.slot }()
	c.mu.Lock()
	a := c.attempt
	switch left := time.Until(c.until); {
	case a.session == nil || c.done || c.lost || c.left:
		c.mu.Unlock()
		return
	case left > 0:
		c.timer.Reset(left)
		c.mu.Unlock()
		return
	case a.revision != 0:
		c.lost = true
	default: // another Try begins anew
		c.attempt, c.queue = attempt{}, queue{}
	}
	c.mu.Unlock()
	a.session.drop(c)
	c.clearLater(a)
}

// bereave ends a grant whose session has ended.
func (c *claim) bereave(n *session) {
	c.mu.Lock()
	if c.attempt.session != n || c.attempt.revision == 0 || c.lost || c.done {
		c.mu.Unlock()
		return
	}
	c.lost, c.why = true, &SessionError{clientv3.LeaseID(n.id)}
	if c.timer != nil {
		c.timer.Stop()
	}
	tell := c.onLoss
	c.mu.Unlock()
	if tell != nil {
		tell()
	}
}

// OnLoss has f called when the session of the claim is found to have ended. A claim that has an
// etcd lease of its own only learns of its loss when it is extended. See [store.Witness].
func (c *claim) OnLoss(f func()) {
	c.mu.Lock()
	c.onLoss = f
	told := c.why != nil
	c.mu.Unlock()
	if told {
		f()
	}
}

// keep makes the place of a claim that waits last.
func (c *claim) keep(ctx context.Context, a attempt) {
	if a.session != nil {
		start := time.Now()
		c.change(func() {
			if c.attempt.owner == a.owner && c.attempt.revision == 0 {
				c.until = start.Add(c.o.TTL)
			}
		})
	}
	_, _ = c.renew(ctx, a)
}
