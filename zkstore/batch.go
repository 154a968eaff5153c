package zkstore

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// readers is how many nodes a batch reads at the same time.
const readers = 16

// ExtendMany extends the claims by one answer of the leader, and a read of each. See [store.BatchExtender].
func (s *Store) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	results := make([]store.Result, len(claims))
	var ours []*claim
	var at []int
	for i, any := range claims {
		c, err := s.join(ctx, any)
		if err != nil {
			results[i].Err = err
			continue
		}
		ours, at = append(ours, c), append(at, i)
	}
	if len(ours) == 0 {
		return results
	}
	answers, err := race(ctx, s.limit, func(ctx context.Context) ([]store.Result, error) {
		return s.extend(ctx, ours), nil
	}, func(bool) {
		for _, c := range ours {
			c.end()
		}
	})
	for i, c := range ours {
		if err != nil {
			results[at[i]].Err = err
			continue
		}
		results[at[i]].Grant, results[at[i]].Err = c.answer(answers[i].Grant, answers[i].Err)
	}
	return results
}

// join takes the slot of a claim for a batch.
func (s *Store) join(ctx context.Context, any store.Claim) (*claim, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c, ok := any.(*claim)
	if !ok || c.s != s {
		return nil, &store.InvalidError{Field: "claim", Rule: "must be of this store"}
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
		return nil, unavailable(errors.New("an earlier call of the claim still runs"))
	}
}

// extend extends claims whose slots are taken.
func (s *Store) extend(ctx context.Context, claims []*claim) []store.Result {
	start := time.Now()
	results := make([]store.Result, len(claims))
	for i, c := range claims {
		results[i].Err = c.standing(nil)
	}
	if !slices.ContainsFunc(results, func(r store.Result) bool { return r.Err == nil }) {
		return results // what is known to be lost needs no session
	}
	l, err := s.s.await(ctx)
	if err == nil {
		err = classify(s.confirm(l, s.base), true)
	}
	var wg sync.WaitGroup
	free := make(chan struct{}, readers)
	for i, c := range claims {
		if results[i].Err != nil {
			continue
		}
		if err != nil {
			results[i].Err = c.standing(err)
			continue
		}
		free <- struct{}{}
		wg.Go(func() {
			results[i].Grant, results[i].Err = c.extend(l, start)
			<-free
		})
	}
	wg.Wait()
	return results
}

// standing is err, or a loss that is known already.
func (c *claim) standing(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.node != nil && c.node.life.over() {
		c.lost = c.lost || c.granted
	}
	if c.lost || !c.granted {
		return &store.LostError{}
	}
	return err
}

// extend reads the node. The leader has answered since start.
func (c *claim) extend(l *life, start time.Time) (store.Grant, error) {
	n, err := c.current(l)
	if err != nil {
		return store.Grant{}, err
	}
	if err := c.standing(nil); err != nil {
		return store.Grant{}, err
	}
	return c.reread(l, n, instants{start, start})
}
