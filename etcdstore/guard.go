package etcdstore

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// Guard is a [fence.Guard] whose marks are in etcd, with writes of data in the same
// transaction. It need not be the cluster of the locks: any store's tokens will do. It is safe
// for concurrent use, by as many processes as like.
//
// A mark goes back when its cluster is restored from a snapshot, and so do the data that it
// guards. To refuse a holder as soon as its lease has ended, see [Store.Holds].
type Guard struct {
	client *clientv3.Client
	marks  string // prefix of the marks' keys
}

var _ fence.Guard = (*Guard)(nil)

// NewGuard returns a guard, without I/O. Its marks are under the prefix, DefaultPrefix where it is
// empty; all processes use the same one. The caller keeps the client open.
func NewGuard(client *clientv3.Client, prefix string) (*Guard, error) {
	prefix, err := checkTarget(client, prefix)
	if err != nil {
		return nil, err
	}
	return &Guard{client: client, marks: prefix + "fence/"}, nil
}

// Claim implements [fence.Guard].
func (g *Guard) Claim(ctx context.Context, resource string, t fence.Token) error {
	return g.Write(ctx, resource, t)
}

// Write claims and makes the writes, in one transaction: where the token is below the mark it
// writes nothing, and answers a [*fence.StaleError]. After [fence.ErrUncertain] it may have
// written, and may be repeated where the writes may. The keys that it writes to are the
// caller's; each may be written to once. Writes are puts, deletes and transactions of them.
func (g *Guard) Write(ctx context.Context, resource string, t fence.Token, writes ...clientv3.Op) error {
	if err := checkArgs(ctx, resource, t); err != nil {
		return err
	}
	for i, w := range writes {
		if !w.IsPut() && !w.IsDelete() && !w.IsTxn() {
			return &fence.InvalidError{Field: "writes", Value: fmt.Sprint("number ", i), Rule: "must be a put, a delete or a transaction"}
		}
	}
	path, mark := g.path(resource), padded(t)
	// The comparison is the negated one: it does not hold for a mark that is missing.
	resp, err := race(ctx, func(ctx context.Context) (*clientv3.TxnResponse, error) {
		return g.client.Txn(ctx).
			If(clientv3.Compare(clientv3.Value(path), ">", mark)).
			Then(clientv3.OpGet(path)).
			Else(append([]clientv3.Op{clientv3.OpPut(path, mark)}, writes...)...).
			Commit()
	}, func() {})
	switch {
	case err != nil:
		return guardError(resource, err, fence.ErrUncertain)
	case !resp.Succeeded:
		return nil
	}
	seen, err := seenIn(resource, resp.Responses[0].GetResponseRange().Kvs[0].Value)
	if err != nil {
		return err
	}
	return fence.Stale(ctx, resource, t, seen)
}

// Check implements [fence.Guard].
func (g *Guard) Check(ctx context.Context, resource string, t fence.Token) error {
	if err := checkArgs(ctx, resource, t); err != nil {
		return err
	}
	resp, err := race(ctx, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return g.client.Get(ctx, g.path(resource))
	}, func() {})
	if err != nil {
		return guardError(resource, err, fence.ErrUnavailable)
	}
	var seen fence.Token
	if len(resp.Kvs) > 0 {
		if seen, err = seenIn(resource, resp.Kvs[0].Value); err != nil {
			return err
		}
	}
	return fence.Compare(ctx, resource, t, seen)
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

func (g *Guard) path(resource string) string { return g.marks + hashed(resource) }

// padded writes a token so that the order of the bytes is that of the tokens.
func padded(t fence.Token) string { return fmt.Sprintf("%020d", t) }

// seenIn reads a mark.
func seenIn(resource string, value []byte) (fence.Token, error) {
	var t fence.Token
	if _, err := fmt.Sscanf(string(value), "%d", &t); err != nil || t <= 0 || padded(t) != string(value) {
		return 0, &fence.Error{Kind: fence.ErrInvalid, Resource: resource, Err: fmt.Errorf("its mark in etcd is %.40q, which no guard has written", value)}
	}
	return t, nil
}

// tooLarge reports whether the client has refused to send a request for its size.
func tooLarge(err error) bool {
	var s interface{ GRPCStatus() *status.Status }
	return errors.As(err, &s) && s.GRPCStatus().Code() == codes.ResourceExhausted &&
		strings.Contains(s.GRPCStatus().Message(), "trying to send message larger than max")
}

// guardError gives an error of the client its meaning to the user of a guard. unknown is the kind
// of those after which the request may have arrived.
func guardError(resource string, err, unknown error) error {
	var f *fault
	if !errors.As(err, &f) {
		err = classify(context.Background(), err, true)
	}
	var invalid *fence.InvalidError
	var refusal rpctypes.EtcdError
	switch {
	case errors.As(err, &invalid), errors.As(err, &refusal) && refusal.Code() == codes.InvalidArgument,
		err == errNoLease, tooLarge(err):
		if errors.As(err, &f) && f.kind == store.ErrUncertain { // it is certain
			err = f.cause
		}
		return &fence.Error{Kind: fence.ErrInvalid, Resource: resource, Err: err}
	case errors.Is(err, store.ErrUnavailable):
		return &fence.Error{Kind: fence.ErrUnavailable, Resource: resource, Err: err}
	}
	return &fence.Error{Kind: unknown, Resource: resource, Err: err}
}
