package zkstore

import (
	"context"
	"errors"
	"iter"
	"os"
	"strconv"
	"strings"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast/store"
)

// brokenBy marks an owner whose grant was broken. Nobody holds the key under that name.
const brokenBy = "broken:"

// maxQueue bounds what Inspect tells of a queue.
const maxQueue = 100

// Inspect answers who holds key, and who waits for it. Holder.TTL is the most that can be left
// where the holder's process lives; where that died, its session lasts for up to its timeout and a tick
// of the servers. Held, which begins with the wait, and Waited go by the wall clocks of this machine and the
// servers. See [store.Inspector].
func (s *Store) Inspect(ctx context.Context, key string) (store.Holder, error) {
	if err := store.CheckKey(key); err != nil {
		return store.Holder{}, err
	}
	return ask(ctx, s, false, func(ctx context.Context, l *life) (store.Holder, error) {
		if err := s.sync(l, s.base); err != nil {
			return store.Holder{}, err
		}
		h, list, err := s.first(l, hashed(s.base+"/locks", key), key)
		if err != nil || len(list) == 0 {
			return store.Holder{Key: key}, err
		}
		for _, m := range list[1:min(len(list), 1+maxQueue)] {
			w, err := s.get(l, hashed(s.base+"/locks", key)+"/"+m.name)
			if errors.Is(err, zk.ErrNoNode) {
				continue
			}
			if err != nil {
				return store.Holder{}, err
			}
			h.Queue = append(h.Queue, store.Queued{Owner: m.owner, Label: parseRecord(w.data).Label, Waited: since(w.stat.Ctime)})
		}
		return h, nil
	})
}

// first answers the first of a queue, and the whole queue.
func (s *Store) first(l *life, dir, key string) (store.Holder, []member, error) {
	for {
		names, err := s.children(l, dir)
		if errors.Is(err, zk.ErrNoNode) {
			return store.Holder{}, nil, nil
		}
		if err != nil {
			return store.Holder{}, nil, err
		}
		list := members(names)
		if len(list) == 0 {
			return store.Holder{}, nil, nil
		}
		own, err := s.get(l, dir+"/"+list[0].name)
		if errors.Is(err, zk.ErrNoNode) {
			continue // it left in between
		}
		if err != nil {
			return store.Holder{}, nil, err
		}
		h := holder(key, list[0], own.data, own.stat)
		h.Waiting = len(list) - 1
		return h, list, nil
	}
}

// ask runs what concerns no claim of this store, within the limit of a call. Where it does not act, it
// has changed nothing, however it fails.
func ask[T any](ctx context.Context, s *Store, acts bool, f func(context.Context, *life) (T, error)) (T, error) {
	var none T
	if err := ctx.Err(); err != nil {
		return none, err
	}
	v, err := race(ctx, s.limit, func(ctx context.Context) (T, error) {
		l, err := s.s.await(ctx)
		if err != nil {
			return none, err
		}
		return f(ctx, l)
	}, nil)
	if err == nil {
		return v, nil
	}
	var open *fault
	if !acts && errors.As(err, &open) && open.kind == store.ErrUncertain {
		return none, unavailable(open.cause)
	}
	return none, classify(err, acts)
}

// List answers the holders of all keys that begin with prefix, in any order. See [store.Inspector].
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) {
		base := s.base + "/locks"
		parts, err := s.names(ctx, base)
		if err != nil {
			yield(store.Holder{}, err)
			return
		}
		for _, part := range parts {
			hashes, err := s.names(ctx, base+"/"+part)
			if err != nil {
				yield(store.Holder{}, err)
				return
			}
			for _, hash := range hashes {
				h, err := s.held(ctx, base+"/"+part+"/"+hash, prefix)
				if err != nil {
					yield(store.Holder{}, err)
					return
				}
				if h.Owner != "" && !yield(h, nil) {
					return
				}
			}
		}
	}
}

// names are the children of a node, none where it does not exist.
func (s *Store) names(ctx context.Context, path string) ([]string, error) {
	return ask(ctx, s, false, func(ctx context.Context, l *life) ([]string, error) {
		if err := s.sync(l, path); err != nil {
			return nil, err
		}
		names, err := s.children(l, path)
		if errors.Is(err, zk.ErrNoNode) {
			return nil, nil
		}
		return names, err
	})
}

// held answers the holder of the key whose queue dir is, if the key begins with prefix.
func (s *Store) held(ctx context.Context, dir, prefix string) (store.Holder, error) {
	return ask(ctx, s, false, func(ctx context.Context, l *life) (store.Holder, error) {
		queue, err := s.get(l, dir)
		if errors.Is(err, zk.ErrNoNode) || err == nil && !strings.HasPrefix(string(queue.data), prefix) {
			return store.Holder{}, nil
		}
		if err != nil {
			return store.Holder{}, err
		}
		h, _, err := s.first(l, dir, string(queue.data))
		return h, err
	})
}

// Break takes the key from h.Owner, by a word in its node. From then on its extensions fail; the key
// becomes free when its process notices that the ttl is over, or its session ends, so that two never
// hold. It is idempotent, and [store.ErrLost] where nobody holds the key. See [store.Inspector].
func (s *Store) Break(ctx context.Context, h store.Holder) error {
	if err := store.CheckKey(h.Key); err != nil {
		return err
	}
	if h.Owner == "" {
		return &store.InvalidError{Field: "owner", Rule: "must name the holder to take the key from"}
	}
	_, err := ask(ctx, s, true, func(ctx context.Context, l *life) (struct{}, error) {
		return struct{}{}, s.breakOff(ctx, l, h.Key, h.Owner)
	})
	return err
}

func (s *Store) breakOff(ctx context.Context, l *life, key, owner string) error {
	dir := hashed(s.base+"/locks", key)
	for {
		if err := s.sync(l, dir); err != nil {
			return err
		}
		now, list, err := s.first(l, dir, key)
		switch {
		case err != nil:
			return err
		case len(list) == 0:
			return &store.LostError{}
		case now.Owner == brokenBy+strings.TrimPrefix(owner, brokenBy):
			return nil
		case now.Owner != owner:
			return &store.HeldError{Holder: now}
		}
		path := dir + "/" + list[0].name
		own, err := s.get(l, path)
		if err == nil && ctx.Err() == nil {
			r := parseRecord(own.data)
			r.Broken = brokenByWhom()
			_, err = call(s.s, l, func() (*zk.Stat, error) { return s.s.conn.Set(path, r.bytes(), own.stat.Version) })
			if err == nil {
				return nil
			}
			err = classify(err, true)
		}
		if err == nil {
			err = stopped(ctx)
		}
		if !errors.Is(err, zk.ErrNoNode) && !errors.Is(err, zk.ErrBadVersion) {
			return err
		}
	}
}

// brokenByWhom is what the place of a holder says whose key was broken by this process.
func brokenByWhom() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	pid := ":" + strconv.Itoa(os.Getpid())
	const by, most = "broken by ", 60
	return by + host[:min(len(host), most-len(by)-len(pid))] + pid
}
