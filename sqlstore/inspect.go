package sqlstore

import (
	"context"
	"iter"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/label"
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
	r, err := race(ctx, func(ctx context.Context) (row, error) { return s.peek(ctx, key) }, nil)
	if err != nil {
		return store.Holder{}, err
	}
	if now := s.clock.now(); r.live(s.clock, now) {
		return r.holder(now), nil
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
			page, err := race(ctx, func(ctx context.Context) ([]row, error) { return s.page(ctx, after, prefix) }, nil)
			if err != nil {
				yield(store.Holder{}, err)
				return
			}
			now := s.clock.now()
			for _, r := range page {
				if !strings.HasPrefix(r.key, prefix) {
					return // behind the last one
				}
				if r.live(s.clock, now) && !yield(r.holder(now), nil) {
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

// page reads the rows with an owner that follow after, from prefix on.
func (s *Store) page(ctx context.Context, after, prefix string) (page []row, err error) {
	if err := s.checked(ctx); err != nil {
		return nil, err
	}
	err = s.retry(ctx, func() error {
		page = nil
		rows, err := s.db.QueryContext(ctx, listSQL, []byte(after), []byte(prefix), pageSize)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var r row
			var key []byte
			if err := rows.Scan(&key, &r.owner, &r.token, &r.boot, &r.expires, &r.label); err != nil {
				return err
			}
			r.key = string(key)
			page = append(page, r)
		}
		return rows.Err()
	})
	return page, err
}

// brokenBy marks an owner whose grant was broken. Nobody holds the key under that name.
const brokenBy = "broken:"

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
		return struct{}{}, s.write(ctx, func(t *tx) error { return t.breakOff(h.Key, h.Owner) })
	}, nil)
	return err
}

func (t *tx) breakOff(key, owner string) error {
	broken := brokenBy + strings.TrimPrefix(owner, brokenBy)
	r, err := readRow(t.ctx, t.conn, key)
	switch {
	case err != nil:
		return err
	case !r.live(t.s.clock, t.now):
		return &store.LostError{}
	case r.owner == broken:
		return nil
	case r.owner != owner:
		return r.held(t.now)
	}
	token, err := r.nextToken()
	if err != nil {
		return err
	}
	_, err = t.conn.ExecContext(t.ctx, breakSQL, broken, token, label.BrokenBy(), []byte(key), owner)
	return err
}
