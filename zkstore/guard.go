package zkstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// Guard is a [fence.Guard] whose marks are in ZooKeeper, with writes of data in the same step. It is
// safe for concurrent use, by as many processes as like.
type Guard struct {
	s *Store
}

var _ fence.Guard = (*Guard)(nil)

// NewGuard returns a guard over the connection of s, without I/O. The locks need not be those of s:
// where they are of another store, s serves for the guard alone. Marks are under s's Chroot and are
// never deleted.
func NewGuard(s *Store) (*Guard, error) {
	if s == nil {
		return nil, &fence.InvalidError{Field: "store", Rule: "must not be nil"}
	}
	return &Guard{s}, nil
}

// Claim implements [fence.Guard].
func (g *Guard) Claim(ctx context.Context, resource string, t fence.Token) error {
	_, err := g.write(ctx, resource, t, nil)
	return err
}

// Write claims and makes the writes, in one transaction: where the token is below the mark it
// writes nothing, and answers a [*fence.StaleError]. Where ZooKeeper refuses one of the writes, such
// as one to a node that is missing, nothing is written and the mark is not raised; the error is
// the client library's, as [fence.ErrInvalid]. After [fence.ErrUncertain] it may have written.
//
// Writes are those that [zk.Conn.Multi] takes: *zk.CreateRequest, *zk.SetDataRequest,
// *zk.DeleteRequest, *zk.CheckVersionRequest. Their paths are the caller's own, not below the
// store's Chroot. The answers stand in their order.
func (g *Guard) Write(ctx context.Context, resource string, t fence.Token, writes ...any) ([]zk.MultiResponse, error) {
	return g.write(ctx, resource, t, writes)
}

func (g *Guard) write(ctx context.Context, resource string, t fence.Token, writes []any) ([]zk.MultiResponse, error) {
	if err := checkArgs(ctx, resource, t); err != nil {
		return nil, err
	}
	if err := checkWrites(writes); err != nil {
		return nil, err
	}
	answers, seen, err := g.raise(ctx, resource, t, writes)
	switch {
	case err != nil:
		return nil, guardError(resource, err)
	case seen > t:
		return nil, fence.Stale(ctx, resource, t, seen)
	}
	return answers, nil
}

// maxWrites is how much the servers take in one transaction unless their jute.maxbuffer is set, less
// what the store adds. They would end the connection, and the client library may panic.
const maxWrites = 1<<20 - 1<<12

func checkWrites(writes []any) error {
	total := 0
	for _, w := range writes {
		n := sizeOf(w)
		if n < 0 {
			return &fence.InvalidError{Field: "write", Value: fmt.Sprintf("%T", w), Rule: "must be one that zk.Conn.Multi takes, and not nil"}
		}
		total += n
	}
	if total > maxWrites {
		return &fence.InvalidError{Field: "writes", Value: strconv.Itoa(total) + " bytes",
			Rule: "must be at most " + strconv.Itoa(maxWrites) + " bytes together, with paths and ACLs, which is what servers take in one transaction"}
	}
	return nil
}

// sizeOf is at least how many bytes an operation has in a request, and negative for what is none.
func sizeOf(w any) int {
	const fixed = 32 // more than its header, lengths, flags and version
	switch w := w.(type) {
	case *zk.CreateRequest:
		if w == nil {
			return -1
		}
		n := fixed + len(w.Path) + len(w.Data)
		for _, a := range w.Acl {
			n += fixed + len(a.Scheme) + len(a.ID)
		}
		return n
	case *zk.SetDataRequest:
		if w == nil {
			return -1
		}
		return fixed + len(w.Path) + len(w.Data)
	case *zk.DeleteRequest:
		if w == nil {
			return -1
		}
		return fixed + len(w.Path)
	case *zk.CheckVersionRequest:
		if w == nil {
			return -1
		}
		return fixed + len(w.Path)
	}
	return -1
}

type raised struct {
	answers []zk.MultiResponse
	seen    fence.Token
}

// raise makes the writes with the mark, and answers a larger one where there is one.
func (g *Guard) raise(ctx context.Context, resource string, t fence.Token, writes []any) ([]zk.MultiResponse, fence.Token, error) {
	r, err := race(ctx, g.s.limit, func(ctx context.Context) (raised, error) {
		l, err := g.s.s.await(ctx)
		if err != nil {
			return raised{}, err
		}
		for {
			if err := stopped(ctx); err != nil {
				return raised{}, err
			}
			m, err := g.mark(l, resource, g.s.sync) // the transaction tells whether that was new enough
			if err != nil || m.token > t {
				return raised{seen: m.token}, err
			}
			answers, err := g.multi(l, m, resource, t, writes)
			if !errors.Is(err, errMoved) {
				return raised{answers: answers}, err
			}
		}
	}, nil)
	return r.answers, r.seen, err
}

// errMoved says that another has changed the mark in between.
var errMoved = errors.New("the mark has changed")

// mark is what a resource has seen.
type mark struct {
	token   fence.Token // zero where there is none
	version int32
}

func (g *Guard) path(resource string) string { return hashed(g.s.base+"/marks", resource) }

// mark reads a mark, as new as what renew makes the session see.
func (g *Guard) mark(l *life, resource string, renew func(*life, string) error) (mark, error) {
	path := g.path(resource)
	if err := renew(l, path); err != nil {
		return mark{}, readFailed(err)
	}
	now, err := g.s.get(l, path)
	if errors.Is(err, zk.ErrNoNode) {
		return mark{}, nil
	}
	if err != nil {
		return mark{}, readFailed(err)
	}
	t, err := parseMark(now.data, resource)
	if err != nil {
		return mark{}, &fence.Error{Kind: fence.ErrInvalid, Resource: resource, Err: err}
	}
	return mark{t, now.stat.Version}, nil
}

// The data of a mark: the token, and behind a space the name of the resource, for people.
func markData(resource string, t fence.Token) []byte { return []byte(t.String() + " " + resource) }

func parseMark(data []byte, resource string) (fence.Token, error) {
	text, name, _ := strings.Cut(string(data), " ")
	t, err := fence.ParseToken(text)
	if err != nil || name != resource {
		return 0, errors.New("its mark in ZooKeeper is " + strconv.Quote(fmt.Sprintf("%.40s", data)) + ", which no guard has written")
	}
	return t, nil
}

// multi is one transaction: the mark is as it was read, or is raised, and the writes are made.
func (g *Guard) multi(l *life, m mark, resource string, t fence.Token, writes []any) ([]zk.MultiResponse, error) {
	path := g.path(resource)
	var first any
	switch {
	case m.token == 0:
		first = &zk.CreateRequest{Path: path, Data: markData(resource, t), Acl: g.s.acl}
	case m.token < t:
		first = &zk.SetDataRequest{Path: path, Data: markData(resource, t), Version: m.version}
	default:
		first = &zk.CheckVersionRequest{Path: path, Version: m.version}
	}
	answers, err := g.s.multi(l, append([]any{first}, writes...)...)
	switch failed, why := failedAt(answers, err); {
	case why == nil:
		return answers[1:], nil
	case failed > 0:
		return nil, refused(failed, why)
	case errors.Is(why, zk.ErrNoNode) && m.token == 0:
		parent := path[:strings.LastIndexByte(path, '/')]
		if err := g.s.mkdir(l, parent); err != nil {
			return nil, readFailed(err)
		}
		return nil, errMoved
	case errors.Is(why, zk.ErrNodeExists), errors.Is(why, zk.ErrBadVersion):
		return nil, errMoved
	default:
		return nil, classify(why, true)
	}
}

// failedAt answers the operation of a transaction that failed, and how. Those before it answer
// nothing, those behind it that they were not reached.
func failedAt(answers []zk.MultiResponse, err error) (int, error) {
	for i, a := range answers {
		if a.Error != nil {
			return i, a.Error
		}
	}
	return 0, err
}

// Check implements [fence.Guard].
func (g *Guard) Check(ctx context.Context, resource string, t fence.Token) error {
	if err := checkArgs(ctx, resource, t); err != nil {
		return err
	}
	m, err := ask(ctx, g.s, false, func(ctx context.Context, l *life) (mark, error) { return g.mark(l, resource, g.s.commit) })
	if err != nil {
		return guardError(resource, &fault{kind: store.ErrUnavailable, cause: err})
	}
	return fence.Compare(ctx, resource, t, m.token)
}

func checkArgs(ctx context.Context, resource string, t fence.Token) error {
	if err := fence.CheckResource(resource); err != nil {
		return err
	}
	if err := fence.CheckToken(t); err != nil {
		return err
	}
	return ctx.Err()
}

// guardError puts a failure into the words of guards.
func guardError(resource string, err error) error {
	var f *fence.Error
	if errors.As(err, &f) {
		return f
	}
	kind := fence.ErrUnavailable
	switch {
	case errors.Is(err, store.ErrUnavailable):
	case errors.Is(err, fence.ErrInvalid):
		kind = fence.ErrInvalid
	case errors.Is(err, store.ErrUncertain):
		kind = fence.ErrUncertain
	}
	return &fence.Error{Kind: kind, Resource: resource, Err: err}
}

// WriteHeld makes the writes, in one transaction, if the lease with the token holds the key; else it
// writes nothing and answers [store.ErrLost], also where nobody has the key since. It needs no mark
// and no Claim: the node that the lock is, is looked at in the transaction. After
// [store.ErrUncertain] the writes may have been made, and may yet be, while the lease lasts. Writes,
// their refusal and the answers are those of [Guard.Write].
func (s *Store) WriteHeld(ctx context.Context, key string, t fence.Token, writes ...any) ([]zk.MultiResponse, error) {
	if err := cmp.Or(store.CheckKey(key), fence.CheckToken(t), checkWrites(writes), ctx.Err()); err != nil {
		return nil, err
	}
	answers, err := race(ctx, s.limit, func(ctx context.Context) ([]zk.MultiResponse, error) {
		l, err := s.s.await(ctx)
		if err != nil {
			return nil, err
		}
		return s.writeHeld(ctx, l, key, t, writes)
	}, nil)
	return answers, classify(err, true)
}

func (s *Store) writeHeld(ctx context.Context, l *life, key string, t fence.Token, writes []any) ([]zk.MultiResponse, error) {
	dir := hashed(s.base+"/locks", key)
	if err := s.sync(l, dir); err != nil { // the server may not have seen the grant yet
		return nil, readFailed(err)
	}
	h, list, err := s.first(l, dir, key)
	switch {
	case err != nil:
		return nil, readFailed(err)
	case len(list) == 0:
		return nil, &store.LostError{}
	case h.Token != t:
		return nil, &store.LostError{By: &store.HeldError{Holder: h}}
	case ctx.Err() != nil:
		return nil, stopped(ctx)
	}
	// Version 0: a node that was broken has been written to.
	first := &zk.CheckVersionRequest{Path: dir + "/" + list[0].name, Version: 0}
	answers, err := s.multi(l, append([]any{first}, writes...)...)
	switch failed, why := failedAt(answers, err); {
	case why == nil:
		return answers[1:], nil
	case failed > 0:
		return nil, refused(failed, why)
	case errors.Is(why, zk.ErrNoNode), errors.Is(why, zk.ErrBadVersion):
		return nil, &store.LostError{}
	default:
		return nil, classify(why, true)
	}
}

// refused is how a transaction ends that ZooKeeper refuses because of one of the caller's writes.
func refused(n int, why error) error {
	return &fault{&store.InvalidError{Field: "write", Value: strconv.Itoa(n), Rule: "was refused: " + oneLine(why)}, "", why}
}
