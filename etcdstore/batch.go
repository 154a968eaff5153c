package etcdstore

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/holdfast-go/holdfast/store"
)

const (
	batchSize  = 100 // below the 128 operations that a server takes in one transaction
	maxBatches = 4   // at once
)

// ExtendMany extends the claims, up to a hundred in one exchange. See [store.BatchExtender].
func (s *Store) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	results := make([]store.Result, len(claims))
	var ours []*claim
	var place []int
	for i, c := range claims {
		c, err := s.join(ctx, c)
		if err != nil {
			results[i].Err = err
			continue
		}
		ours, place = append(ours, c), append(place, i)
	}
	if len(ours) == 0 {
		return results
	}
	answers, err := race(ctx, func(ctx context.Context) ([]store.Result, error) {
		return s.extend(ctx, ours), nil
	}, func() {
		for _, c := range ours {
			c.end()
		}
	})
	for i, at := range place {
		if err != nil {
			results[at].Err = err
			continue
		}
		results[at].Grant, results[at].Err = ours[i].answer(answers[i].Grant, answers[i].Err)
	}
	return results
}

// join takes the slot of a claim for a batch.
func (s *Store) join(ctx context.Context, any store.Claim) (*claim, error) {
	c, err := s.own(any)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.mu.Lock()
	released := c.released
	c.mu.Unlock()
	if released {
		return nil, errReleased()
	}
	return c, c.take(ctx)
}

func (s *Store) own(any store.Claim) (*claim, error) {
	if c, ok := any.(*claim); ok && c.s == s {
		return c, nil
	}
	return nil, &store.InvalidError{Field: "claim", Rule: "belongs to another store"}
}

// extend extends claims whose slots are taken.
func (s *Store) extend(ctx context.Context, claims []*claim) []store.Result {
	results := make([]store.Result, len(claims))
	free := make(chan struct{}, maxBatches)
	var wg sync.WaitGroup
	for from := 0; from < len(claims); from += batchSize {
		to := min(from+batchSize, len(claims))
		if to-from == len(claims) {
			s.extendBatch(ctx, claims, results)
			break
		}
		free <- struct{}{}
		wg.Go(func() {
			defer func() { <-free }()
			s.extendBatch(ctx, claims[from:to], results[from:to])
		})
	}
	wg.Wait()
	return results
}

// extendBatch renews the leases and then looks whether they still have their keys: whoever
// deletes a key, or breaks a lock, does not end the lease. The look comes after the renewal
// was asked for, so that a lock which is broken later is kept for the whole ttl.
func (s *Store) extendBatch(ctx context.Context, claims []*claim, results []store.Result) {
	start := time.Now()
	var ids []int64
	longest := map[*session]time.Duration{} // ttl on each
	states := make([]attempt, len(claims))
	for i, c := range claims {
		a, lost := c.state()
		if states[i] = a; lost || a.revision == 0 {
			results[i].Err = c.gone(nil)
			continue
		}
		if a.session != nil {
			longest[a.session] = max(longest[a.session], c.o.TTL)
		} else {
			ids = append(ids, a.lease)
		}
	}
	if len(ids)+len(longest) == 0 {
		return
	}
	sent := time.Now()
	passed := sent.Sub(start)
	left, err := s.renewAll(ctx, ids)
	for n, ttl := range longest {
		if err == nil {
			left[n.id], err = n.confirm(ctx, ttl, sent)
		}
		if err == errNoLease {
			err = nil
		}
	}
	var resp *pb.TxnResponse
	if err == nil {
		resp, err = look(ctx, s.kv.Txn, readAll(claims))
		if err != nil { // the leases were renewed, or are known to live
			err = uncertain(err)
		}
	}
	if err == nil {
		s.explain(ctx, states, resp)
	}
	for i, c := range claims {
		a := states[i]
		switch {
		case results[i].Err != nil:
		case err != nil:
			results[i].Err = err
		default:
			results[i] = c.extended(a, left[a.on()], sent, passed, newEntry(found(resp, i)))
		}
	}
}

// explain looks whether a session has ended where a key on it is missing, so that all its claims
// learn of it.
func (s *Store) explain(ctx context.Context, states []attempt, resp *pb.TxnResponse) {
	asked := map[*session]bool{}
	for i, a := range states {
		if n := a.session; n != nil && found(resp, i) == nil && !asked[n] {
			asked[n] = true
			n.doubt()
			_, _ = n.confirm(ctx, minTTL, time.Now())
		}
	}
}

// extended is the answer to one claim: its lease has that ttl, and the key is as it is now.
func (c *claim) extended(a attempt, left time.Duration, sent time.Time, passed time.Duration, now *entry) store.Result {
	ttl, ours := min(left, c.o.TTL), now != nil && now.change == a.revision
	if ours && c.prolong(a, sent, ttl) {
		return store.Result{Grant: store.Grant{Token: a.token, Owner: a.owner, TTL: ttl + passed}}
	}
	if a.session != nil && (ours || now == nil && a.unknown) { // it has ended by its time; or a late request may take the key
		c.clearLater(a)
	}
	if now == nil || ours {
		return store.Result{Err: c.gone(nil)}
	}
	return store.Result{Err: c.gone(&store.HeldError{Holder: now.holder(c.key, 0)})}
}

// prolong gives a grant more time, and else books that it is lost: where there is none to give, and
// on a session also where the time that it had is over, because its key may be on its way out.
func (c *claim) prolong(a attempt, sent time.Time, ttl time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ttl <= 0 || a.session != nil && !time.Now().Before(c.until) {
		c.lost = true
	}
	if c.lost {
		return false
	}
	c.until = sent.Add(ttl)
	return true
}

func readAll(claims []*claim) *pb.TxnRequest {
	r := &pb.TxnRequest{}
	for _, c := range claims {
		r.Success = append(r.Success, reading([]byte(c.path)))
	}
	return r
}

// renew renews a lease and answers its ttl. It answers errNoLease where there is none.
func (s *Store) renew(ctx context.Context, lease int64) (time.Duration, error) {
	left, err := s.renewAll(ctx, []int64{lease})
	if err == nil && left[lease] == 0 {
		err = errNoLease
	}
	return left[lease], err
}

// renewAll renews leases and answers their ttls; zero where there is no such lease.
func (s *Store) renewAll(ctx context.Context, leases []int64) (map[int64]time.Duration, error) {
	if len(leases) == 0 {
		return map[int64]time.Duration{}, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	stream, err := s.once.LeaseKeepAlive(ctx)
	if err != nil {
		return nil, classify(ctx, err, false)
	}
	for _, lease := range leases {
		if stream.Send(&pb.LeaseKeepAliveRequest{ID: lease}) != nil {
			break // Recv says why
		}
	}
	left := make(map[int64]time.Duration, len(leases))
	for range leases {
		resp, err := stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, classify(ctx, err, true)
		}
		left[resp.ID] = time.Duration(min(max(0, resp.TTL), seconds(maxTTL))) * time.Second
	}
	return left, nil
}
