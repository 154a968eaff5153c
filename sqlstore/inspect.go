package sqlstore

import (
	"context"
	"iter"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// Inspect answers who holds key. Where nobody does, Holder.Token is the last token of the
// key. Holder.Held goes by the wall clock. See [store.Inspector].
func (s *Store) Inspect(ctx context.Context, key string) (store.Holder, error) {
	if err := store.CheckKey(key); err != nil {
		return store.Holder{}, err
	}
	if err := ctx.Err(); err != nil {
		return store.Holder{}, err
	}
	r, err := race(ctx, func(ctx context.Context) (row, error) { return s.engine.read(ctx, key) }, nil)
	if err != nil {
		return store.Holder{}, noGrant(err)
	}
	if r.live() {
		return r.holder(), nil
	}
	return store.Holder{Key: key, Token: fence.Token(r.token)}, nil
}

// pageSize bounds what [Store.List] reads at once: no connection is in use while the caller
// looks at a holder.
const pageSize = 256

// List answers the holders of all keys that begin with prefix, in the order of their
// bytes. See [store.Inspector].
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) {
		after := ""
		for {
			if err := ctx.Err(); err != nil {
				yield(store.Holder{}, err)
				return
			}
			page, err := race(ctx, func(ctx context.Context) ([]row, error) { return s.engine.list(ctx, after, prefix) }, nil)
			if err != nil {
				yield(store.Holder{}, noGrant(err))
				return
			}
			for _, r := range page {
				if !strings.HasPrefix(r.key, prefix) {
					return // behind the last one
				}
				if r.live() && !yield(r.holder(), nil) {
					return
				}
			}
			if len(page) < pageSize {
				return
			}
			after = page[len(page)-1].key
		}
	}
}

// Break takes the key from h.Owner. From then on its extensions fail; the key becomes
// free when its grant would have ended, so that two never hold. It is idempotent, and
// [store.ErrLost] where nobody holds the key. See [store.Inspector].
func (s *Store) Break(ctx context.Context, h store.Holder) error {
	if err := store.CheckKey(h.Key); err != nil {
		return err
	}
	if h.Owner == "" {
		return &store.InvalidError{Field: "owner", Rule: "must name the holder to take the key from"}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	_, err := race(ctx, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.engine.breakOff(ctx, h.Key, h.Owner)
	}, nil)
	return err
}
