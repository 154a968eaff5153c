package etcdstore

import (
	"context"
	"errors"
	"iter"
	"strings"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/holdfast-go/holdfast/store"
)

// Inspect answers who holds key and who waits for it. Holder.Held and Queued.Waited go by the wall
// clocks of the claims and of this machine. See [store.Inspector].
func (s *Store) Inspect(ctx context.Context, key string) (store.Holder, error) {
	if err := store.CheckKey(key); err != nil {
		return store.Holder{}, err
	}
	if err := ctx.Err(); err != nil {
		return store.Holder{}, err
	}
	return race(ctx, func(ctx context.Context) (store.Holder, error) { return s.inspect(ctx, key) }, func() {})
}

func (s *Store) inspect(ctx context.Context, key string) (store.Holder, error) {
	path := s.path(key)
	h := store.Holder{Key: key}
	resp, err := look(ctx, s.kv.Txn, &pb.TxnRequest{Success: []*pb.RequestOp{reading([]byte(path)), waiters(path, false)}})
	if err != nil {
		return h, err
	}
	if e := newEntry(found(resp, 0)); e != nil {
		left, err := s.left(ctx, e)
		if err != nil {
			return h, err
		}
		h = e.holder(key, left)
	}
	line := resp.Responses[1].GetResponseRange()
	h.Waiting = int(line.GetCount())
	for _, kv := range line.GetKvs() {
		e := newEntry(kv)
		h.Queue = append(h.Queue, store.Queued{Owner: e.Owner, Label: e.Label, Waited: e.age()})
	}
	return h, nil
}

const (
	// pageSize bounds what [Store.List] reads at once.
	pageSize = 256
	// maxLooks is how many leases it asks for at once: a server that is far away answers
	// for a page well within the limit of a call.
	maxLooks = 32
)

// List answers the holders of all keys that begin with prefix, in no order, without those who wait.
// It reads all locks of the store: their names are hashed. See [store.Inspector].
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) {
		from := s.locks
		for {
			if err := ctx.Err(); err != nil {
				yield(store.Holder{}, err)
				return
			}
			page, err := race(ctx, func(ctx context.Context) (page, error) { return s.page(ctx, from, prefix) }, func() {})
			if err != nil {
				yield(store.Holder{}, err)
				return
			}
			for _, h := range page.holders {
				if !yield(h, nil) {
					return
				}
			}
			if from = page.next; from == "" {
				return
			}
		}
	}
}

// page is a part of the locks; next is where the following one begins, empty at the end.
type page struct {
	holders []store.Holder
	next    string
}

func (s *Store) page(ctx context.Context, from, prefix string) (p page, err error) {
	resp, err := look(ctx, s.kv.Range, &pb.RangeRequest{Key: []byte(from), RangeEnd: after(s.locks), Limit: pageSize})
	if err != nil {
		return p, err
	}
	var entries []*entry
	for _, kv := range resp.Kvs {
		e := newEntry(kv)
		if strings.Contains(string(kv.Key[len(s.locks):]), "/") || e.foreign || !strings.HasPrefix(e.Key, prefix) {
			continue // who waits, and what is foreign and has a hash for a name
		}
		entries = append(entries, e)
	}
	if resp.More {
		p.next = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
	p.holders, err = s.holders(ctx, entries)
	return p, err
}

// holders asks for the leases of the entries.
func (s *Store) holders(ctx context.Context, entries []*entry) ([]store.Holder, error) {
	holders, errs := make([]store.Holder, len(entries)), make([]error, len(entries))
	free := make(chan struct{}, maxLooks)
	var wg sync.WaitGroup
	for i, e := range entries {
		free <- struct{}{}
		wg.Go(func() {
			defer func() { <-free }()
			left, err := s.left(ctx, e)
			holders[i], errs[i] = e.holder(e.Key, left), err
		})
	}
	wg.Wait()
	return holders, errors.Join(errs...)
}

// after is the end of the range of all keys with that prefix, whose last byte is a slash.
func after(prefix string) []byte {
	end := []byte(prefix)
	end[len(end)-1]++
	return end
}

// brokenPrefix stands before the owner of a lock that was broken. Nobody holds it under that name.
const brokenPrefix = "broken:"

func brokenOwner(owner string) string { return brokenPrefix + owner }

// Break takes the key from h.Owner: its extensions fail from then on. The key is kept until its
// lease ends, or its store deletes it at the end of what the holder may trust, so that two never hold.
// On a session whose process has died, or is cut off, it is kept until that ends. A foreign key, and
// one without a lease, is deleted. See [store.Inspector].
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
	_, err := race(ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, s.breakOff(ctx, h) }, func() {})
	return err
}

func (s *Store) breakOff(ctx context.Context, h store.Holder) error {
	for range 3 { // it may change while we look
		e, err := s.read(ctx, s.path(h.Key))
		if err != nil {
			return err
		}
		broken := brokenOwner(strings.TrimPrefix(h.Owner, brokenPrefix))
		switch {
		case e == nil:
			return &store.LostError{}
		case e.Broken && e.Owner == broken:
			return nil
		case e.Owner != h.Owner:
			left, _ := s.left(ctx, e)
			return &store.HeldError{Holder: e.holder(h.Key, left)}
		}
		done, err := s.breakEntry(ctx, h.Key, e, broken)
		if done || err != nil {
			return err
		}
	}
	return &fault{store.ErrUnavailable, errors.New("the key changes all the time")}
}

// breakEntry changes the key, if it is still e, and leaves it on the lease that it is on. The holder's
// next look finds another revision; until then each of its extensions renews the lease before it
// looks, so that the key outlives what the holder trusts, however late this transaction arrives and
// whatever becomes of its sender. On a session, which others keep alive, the holder's store deletes
// it when that is over: see [Store.clear].
func (s *Store) breakEntry(ctx context.Context, key string, e *entry, broken string) (done bool, err error) {
	path := s.path(key)
	then := deleting([]byte(path))
	if !e.foreign && e.lease != 0 {
		r := newRecord(key, broken, brokenBy(), e.Epoch)
		r.Broken = true
		then = putting([]byte(path), r.text(), 0)
		then.GetRequestPut().IgnoreLease = true
	}
	resp, err := ask(ctx, s.kv.Txn, &pb.TxnRequest{Compare: []*pb.Compare{isAt(path, e.change)}, Success: []*pb.RequestOp{then}})
	return err == nil && resp.Succeeded, err
}
