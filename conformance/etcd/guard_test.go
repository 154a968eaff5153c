package etcd

import (
	"context"
	"errors"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/servertest"
)

func newGuard(t testing.TB, c *clientv3.Client) *etcdstore.Guard {
	t.Helper()
	g, err := etcdstore.NewGuard(c, "")
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestGuard(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	fencetest.Run(t, fencetest.Harness{
		New:    func(t testing.TB) fence.Guard { return newGuard(t, connect(t, server.Addr())) },
		Reopen: func(t testing.TB, _ fence.Guard) fence.Guard { return newGuard(t, connect(t, server.Addr())) },
	})
}

// A write and its check are one transaction: a stale one changes nothing.
func TestGuardedWrite(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	c := connect(t, server.Addr())
	g := newGuard(t, c)
	ctx := t.Context()
	value := func(key string) string {
		t.Helper()
		resp, err := c.Get(ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		if len(resp.Kvs) == 0 {
			return ""
		}
		return string(resp.Kvs[0].Value)
	}
	if err := g.Write(ctx, "r", 9, clientv3.OpPut("data", "a"), clientv3.OpPut("more", "a")); err != nil {
		t.Fatal(err)
	}
	if err := g.Write(ctx, "r", 9, clientv3.OpPut("data", "b")); err != nil {
		t.Errorf("a second write of the same token: %v", err)
	}
	if err := g.Write(ctx, "r", 10, clientv3.OpDelete("more")); err != nil {
		t.Errorf("a write of the next token: %v", err)
	}
	var stale *fence.StaleError
	if err := g.Write(ctx, "r", 9, clientv3.OpPut("data", "late"), clientv3.OpPut("more", "late")); !errors.As(err, &stale) || stale.Seen != 10 {
		t.Errorf("a late write answers %v, want a *StaleError that has seen 10", err)
	}
	if d, m := value("data"), value("more"); d != "b" || m != "" {
		t.Errorf("the data are %q and %q, want b and nothing", d, m)
	}
	// What etcd refuses raises no mark.
	if err := g.Write(ctx, "r", 20, clientv3.OpPut("data", "c"), clientv3.OpPut("data", "d")); !errors.Is(err, fence.ErrInvalid) {
		t.Errorf("a key that is written to twice answers %v, want ErrInvalid", err)
	}
	if err := g.Check(ctx, "r", 10); err != nil {
		t.Errorf("the mark has moved without a write: %v", err)
	}
	// A mark that no guard has written is not overwritten, nor taken for one.
	if err := g.Claim(ctx, "odd", 5); err != nil {
		t.Fatal(err)
	}
	resp, err := c.Get(ctx, etcdstore.DefaultPrefix+"fence/", clientv3.WithPrefix(), clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend), clientv3.WithLimit(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Put(ctx, string(resp.Kvs[0].Key), "x"); err != nil {
		t.Fatal(err)
	}
	for op, err := range map[string]error{"Claim": g.Claim(ctx, "odd", 6), "Check": g.Check(ctx, "odd", 6)} {
		if !errors.Is(err, fence.ErrInvalid) {
			t.Errorf("%s of a mark that no guard has written answers %v, want ErrInvalid", op, err)
		}
	}
}

// Lost replies: the write may have been made, and says so; a check has changed nothing.
func TestGuardWithoutAnswers(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	p := servertest.NewProxy(t, server.Addr())
	g := newGuard(t, connect(t, p.Addr()))
	if err := g.Claim(t.Context(), "r", 5); err != nil {
		t.Fatal(err)
	}
	p.DropReplies()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := g.Claim(ctx, "r", 6); !errors.Is(err, fence.ErrUncertain) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Claim without an answer: %v, want ErrUncertain", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := g.Check(ctx, "r", 6); !errors.Is(err, fence.ErrUnavailable) {
		t.Errorf("Check without an answer: %v, want ErrUnavailable", err)
	}
	if p.Counts().Dropped == 0 {
		t.Error("no reply was lost: the test shows nothing")
	}
	p.Heal()
	servertest.Eventually(t, time.Minute, func() error { return g.Claim(t.Context(), "r", 6) })
	if err := g.Check(t.Context(), "r", 6); err != nil {
		t.Error(err)
	}
}
