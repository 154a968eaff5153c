package etcdstore

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast/store"
)

// Claims that wait queue up at a key: each has a key of its own below that of the lock, on its
// lease. The order is that of the revisions. It says who comes first and no more: the lock is
// who creates its key. One that does not come when the key is free loses its turn to the next after
// a while, and its place with it.

const (
	// turn is for how long a free key is left to one waiter before the next one takes it.
	turn = 200 * time.Millisecond
	// maxAhead bounds what is looked at of a queue.
	maxAhead = 100
)

// queue is what surrounds a claim at one revision.
type queue struct {
	holder  *entry   // nil where the key is free
	place   int64    // revision at which the claim has queued up; zero where it has not
	ahead   []string // keys of those before it, the first one first, at most maxAhead
	skipped []string // those whose turns have passed while the key was free; nil before
}

// grace is for how long a free key is left to those ahead.
func (q queue) grace() time.Duration { return turn * time.Duration(max(1, len(q.ahead))) }

// waitPath is the claim's own key in the queue.
func (c *claim) waitPath(a attempt) string { return waitPath(c.path, a.owner) }

func waitPath(path, owner string) string { return path + "/" + owner }

// waitRange is the range of the queue's keys.
func waitRange(path string) (from, to []byte) { return []byte(path + "/"), after(path + "/") }

// looksFirst reports whether the key is likely held and a read tells all that is of use.
func (c *claim) looksFirst(a attempt) bool {
	c.mu.Lock()
	skipped := c.queue.skipped != nil
	c.mu.Unlock()
	return !skipped && (a.place != 0 || !c.o.Wait) && c.s.likelyHeld(c.path)
}

// nobodyAhead is the condition that no waiter came before the claim: all have later
// revisions than its own, which is among them; and where it has not queued up, there is none.
func (c *claim) nobodyAhead(a attempt) *pb.Compare {
	from, to := waitRange(c.path)
	cmp := &pb.Compare{Key: from, RangeEnd: to, Target: pb.Compare_CREATE, Result: pb.Compare_EQUAL,
		TargetUnion: &pb.Compare_CreateRevision{CreateRevision: 0}}
	if a.place != 0 {
		cmp.Result, cmp.TargetUnion = pb.Compare_GREATER, &pb.Compare_CreateRevision{CreateRevision: a.place - 1}
	}
	return cmp
}

// lookingAround reads what a queue is made of.
func (c *claim) lookingAround(a attempt) []*pb.RequestOp {
	ops := []*pb.RequestOp{reading([]byte(c.path))}
	if c.o.Wait {
		ops = append(ops, reading([]byte(c.waitPath(a))), waiters(c.path, true))
	}
	return ops
}

// waiters reads the first of the queue of a lock.
func waiters(path string, keysOnly bool) *pb.RequestOp {
	from, to := waitRange(path)
	return &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: &pb.RangeRequest{
		Key: from, RangeEnd: to, Limit: maxAhead, KeysOnly: keysOnly,
		SortTarget: pb.RangeRequest_CREATE, SortOrder: pb.RangeRequest_ASCEND}}}
}

// around is what lookingAround has found, whose answers begin at that place.
func (c *claim) around(a attempt, resp *pb.TxnResponse, first int) queue {
	q := queue{holder: newEntry(found(resp, first))}
	if own := found(resp, first+1); own != nil && c.o.Wait {
		q.place = own.CreateRevision
		for _, kv := range resp.Responses[first+2].GetResponseRange().GetKvs() {
			if kv.CreateRevision < q.place {
				q.ahead = append(q.ahead, string(kv.Key))
			}
		}
	}
	return q
}

// Wait returns when it is the claim's turn: the key is free, and those before it have gone or
// not come. It returns at the latest when held says that the holder's time ends, and when
// watching fails. See [store.Waiter].
func (c *claim) Wait(ctx context.Context, held *store.HeldError) error {
	c.mu.Lock()
	q, a := c.queue, c.attempt
	c.queue.skipped = nil
	c.mu.Unlock()
	if ctx.Err() != nil || q.place == 0 { // not queued up: Try finds out
		return ctx.Err()
	}
	limit := c.o.TTL
	if q.holder != nil && held != nil && held.Holder.TTL > 0 {
		limit = held.Holder.TTL
	}
	if q.holder == nil {
		limit += q.grace()
	}
	watching, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// Its place lasts as long as its lease, over any number of short waits.
	every := c.o.TTL / 3
	if time.Since(a.kept) >= every {
		go c.keep(watching, a)
	}
	keep := time.NewTicker(every)
	defer keep.Stop()
	for again := true; again; {
		again, q = c.waitAt(watching, a, q, keep.C)
	}
	return ctx.Err() // Try finds out
}

// waitAt waits at one place. It answers true, and the queue, where the claim is to wait at another
// one, and false where Try is worth it.
func (c *claim) waitAt(ctx context.Context, a attempt, q queue, keep <-chan time.Time) (again bool, _ queue) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The look comes when the watch stands: a server tells a watch that begins in the past of it
	// only ten times a second.
	key, end := c.watched(q)
	events, err := c.s.watch(ctx, key, end)
	if err != nil {
		return false, q
	}
	now, err := race(ctx, func(ctx context.Context) (queue, error) { return c.lookAgain(ctx, a) }, func() {})
	switch {
	case err != nil, now.place == 0:
		return false, now
	case now.free() && len(now.ahead) == 0:
		c.s.note(c.path, false)
		return false, now
	}
	if other, all := c.watched(now); other != key || all != "" && end == "" { // the watch misses what counts
		return true, now
	}
	return c.waitHere(ctx, a, now, events, keep)
}

func (c *claim) waitHere(ctx context.Context, a attempt, q queue, events <-chan []*clientv3.Event, keep <-chan time.Time) (again bool, _ queue) {
	free, far := q.free(), q.far()
	due := time.NewTimer(q.grace())
	defer due.Stop()
	if far {
		due.Reset(farLook(len(q.ahead)))
	}
	for {
		timer := due.C
		if !free && !far {
			timer = nil
		}
		select {
		case <-ctx.Done():
			return false, q
		case <-timer:
			if !far {
				c.change(func() { c.queue.skipped = append([]string{}, q.ahead...) })
			}
			return far, q
		case <-keep:
			go c.keep(ctx, a)
		case list, ok := <-events:
			switch {
			case !ok:
				return false, q
			case far && len(list) > 0: // the one before has gone: the claim is likely the first
				q.ahead = nil
				return true, q
			}
			was := free
			if free, ok = q.follow(list, c.path, c.waitPath(a), free); !ok {
				return false, q // its place is gone
			}
			if free && len(q.ahead) == 0 {
				c.s.note(c.path, false)
				return false, q
			}
			if free && !was {
				due.Reset(q.grace())
			}
		}
	}
}

func (c *claim) lookAgain(ctx context.Context, a attempt) (queue, error) {
	resp, err := look(ctx, c.s.kv.Txn, &pb.TxnRequest{Success: c.lookingAround(a)})
	if err != nil {
		return queue{}, err
	}
	return c.around(a, resp, 0), nil
}

// far reports whether the claim is so far behind that its turn comes by the one before it.
func (q queue) far() bool { return len(q.ahead) > 2 && !q.free() }

// watched is what a claim watches at its place. The first one watches the lock; the two behind
// it, who come where it does not, all that happens; and the others the one before them, so that a
// hand-over concerns few. end is that of a range, and empty where it is one key, of which only the
// end counts.
func (c *claim) watched(q queue) (key, end string) {
	switch n := len(q.ahead); {
	case n == 0:
		return c.path, ""
	case q.far():
		return q.ahead[n-1], ""
	}
	_, after := waitRange(c.path)
	return c.path, string(after)
}

// farLook is when a claim that has so many before it looks whether some have not come at
// their turns.
func farLook(ahead int) time.Duration {
	d := time.Second + time.Duration(ahead)*turn/2
	return d + rand.N(d/4)
}

func (q queue) free() bool { return q.holder == nil }

// follow brings the queue up to date. ok is false where the claim's own place is gone.
func (q *queue) follow(list []*clientv3.Event, lock, own string, was bool) (free, ok bool) {
	free = was
	for _, e := range list {
		switch key := string(e.Kv.Key); {
		case key == lock:
			free = e.Type == mvccpb.DELETE
		case e.Type != mvccpb.DELETE:
		case key == own:
			return free, false
		default:
			q.ahead = slices.DeleteFunc(q.ahead, func(ahead string) bool { return ahead == key })
		}
	}
	return free, true
}

// watch tells what happens to keys from the time on at which it returns, at the latest after
// callLimit. The channel is closed when ctx is done, and when it cannot tell.
func (s *Store) watch(ctx context.Context, key, end string) (<-chan []*clientv3.Event, error) {
	options := []clientv3.OpOption{clientv3.WithCreatedNotify()}
	if end != "" {
		options = append(options, clientv3.WithRange(end))
	} else {
		options = append(options, clientv3.WithFilterPut())
	}
	events, created := make(chan []*clientv3.Event, 16), make(chan struct{})
	go func() {
		defer close(events)
		// A member without a leader would stay silent.
		for resp := range s.events.Watch(clientv3.WithRequireLeader(ctx), key, options...) {
			switch {
			case resp.Err() != nil:
				return
			case resp.Created:
				close(created)
				continue
			}
			select {
			case events <- resp.Events:
			case <-ctx.Done():
				return
			}
		}
	}()
	silent := time.NewTimer(callLimit) // the client waits for a server that is cut off
	defer silent.Stop()
	select {
	case <-created:
		return events, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-silent.C:
		return nil, errNoWatch
	case <-events: // closed: it cannot tell
		return nil, errNoWatch
	}
}
