package sqlstore

import (
	"context"
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

// batchSize bounds a transaction, or a statement, so that it is short.
const batchSize = 256

var (
	_ store.Store         = (*Store)(nil)
	_ store.BatchExtender = (*Store)(nil)
	_ store.Adopter       = (*Store)(nil)
	_ store.Inspector     = (*Store)(nil)
	_ store.Waiter        = (*claim)(nil)
)

// ExtendMany extends up to 256 claims by one transaction. See [store.BatchExtender].
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
	}, func(bool, error) {
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
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c, err := s.own(any)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.released {
		return nil, errReleased()
	}
	select {
	case c.slot <- struct{}{}:
		return c, nil
	default:
		return nil, unavailable("an earlier call of the claim still runs", nil)
	}
}

func (s *Store) own(any store.Claim) (*claim, error) {
	if c, ok := any.(*claim); ok && c.s == s {
		return c, nil
	}
	return nil, &store.InvalidError{Field: "claim", Rule: "must be of this store"}
}

// extend extends claims whose slots are taken.
func (s *Store) extend(ctx context.Context, claims []*claim) []store.Result {
	start := s.clock.Now()
	results := make([]store.Result, len(claims))
	for at := 0; at < len(claims); at += batchSize {
		end := min(at+batchSize, len(claims))
		s.extendBatch(ctx, start, claims[at:end], results[at:end])
	}
	return results
}

func (s *Store) extendBatch(ctx context.Context, start clock.Instant, claims []*claim, results []store.Result) {
	var leases []lease
	var place []int
	for i, c := range claims {
		l, err := c.lease()
		if err != nil {
			results[i].Err = err
			continue
		}
		leases, place = append(leases, l), append(place, i)
	}
	if len(leases) == 0 {
		return
	}
	x, err := s.engine.extend(ctx, leases)
	for i, at := range place {
		c, err := claims[at], err
		if err == nil {
			err = x.errs[i]
		}
		if err != nil {
			results[at].Err = c.failed(err)
			continue
		}
		results[at].Grant = c.extended(x.now, x.sent.Sub(start))
	}
}

// lease is what the claim holds, as far as it knows.
func (c *claim) lease() (lease, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.token == 0 || c.lost {
		return lease{}, &store.LostError{}
	}
	return lease{c.key, c.owner, c.token, c.o.TTL}, nil
}

func (c *claim) extended(now, passed time.Duration) store.Grant {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.until = max(c.until, now+c.o.TTL)
	return store.Grant{Token: c.token, Owner: c.owner, TTL: c.o.TTL + passed}
}

// failed remembers a loss, which is final.
func (c *claim) failed(err error) error {
	if errors.Is(err, store.ErrLost) {
		c.mu.Lock()
		c.lost = true
		c.mu.Unlock()
	}
	return err
}
