package zookeeper

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/fencetest"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/zkstore"
)

func newGuard(t testing.TB, o zkstore.Options) *zkstore.Guard {
	t.Helper()
	g, err := zkstore.NewGuard(open(t, o))
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestGuard(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	guard := func(t testing.TB) fence.Guard { return newGuard(t, at(sessionTimeout, server)) }
	fencetest.Run(t, fencetest.Harness{
		New:    guard,
		Reopen: func(t testing.TB, _ fence.Guard) fence.Guard { return guard(t) },
	})
}

// client connects the client library itself: to data that is not the store's.
func client(t testing.TB, addr string) *zk.Conn {
	t.Helper()
	c, _, err := zk.Connect([]string{addr}, sessionTimeout, zk.WithLogInfo(false), zk.WithLogger(quiet{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

type quiet struct{}

func (quiet) Printf(string, ...any) {}

// A guarded write is made with the mark or not at all.
func TestGuardedWrite(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	g, c, ctx := newGuard(t, at(sessionTimeout, server)), client(t, server.Addr()), t.Context()
	set := func(text string) *zk.SetDataRequest {
		return &zk.SetDataRequest{Path: "/data", Data: []byte(text), Version: -1}
	}
	if _, err := g.Write(ctx, "r", 5, set("none")); !errors.Is(err, fence.ErrInvalid) || !errors.Is(err, zk.ErrNoNode) {
		t.Errorf("a write to a node that is missing answers %v, want ErrInvalid and zk.ErrNoNode", err)
	}
	if err := g.Check(ctx, "r", 5); !errors.Is(err, fence.ErrNoResource) {
		t.Errorf("after a refused write, Check answers %v, want ErrNoResource", err)
	}
	answers, err := g.Write(ctx, "r", 5, &zk.CreateRequest{Path: "/data", Data: []byte("five"), Acl: zk.WorldACL(zk.PermAll)})
	if err != nil || len(answers) != 1 || answers[0].String != "/data" {
		t.Fatalf("the first write answers %v, %v", answers, err)
	}
	for _, w := range []struct {
		t    fence.Token
		want error
	}{{5, nil}, {7, nil}, {6, fence.ErrStale}, {5, fence.ErrStale}, {7, nil}} {
		answers, err := g.Write(ctx, "r", w.t, set(w.t.String()))
		if !errors.Is(err, w.want) || err == nil && (len(answers) != 1 || answers[0].Stat == nil) {
			t.Errorf("a write with token %v answers %v, %v, want %v", w.t, answers, err, w.want)
		}
	}
	if data, stat, err := c.Get("/data"); err != nil || string(data) != "7" || stat.Version != 3 {
		t.Errorf("the data is %q, version %v, %v", data, stat, err)
	}
	if _, err := g.Write(ctx, "r", 7, "text"); !errors.Is(err, fence.ErrInvalid) {
		t.Errorf("a write that is none answers %v", err)
	}
}

// Many holders write to one resource at once: no accepted write comes after one with a larger token.
func TestGuardedWritesAreOrdered(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	c := client(t, server.Addr())
	if _, err := c.Create("/data", []byte("0"), 0, zk.WorldACL(zk.PermAll)); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for w := range 4 {
		g := newGuard(t, at(sessionTimeout, server))
		wg.Go(func() {
			for i := range 20 {
				token := fence.Token(1 + 4*i + w)
				_, err := g.Write(t.Context(), "r", token, &zk.SetDataRequest{Path: "/data", Data: []byte(token.String()), Version: -1})
				if err != nil && !errors.Is(err, fence.ErrStale) {
					t.Errorf("token %v: %v", token, err)
				}
			}
		})
	}
	last := fence.Token(0)
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	for open := true; open; {
		select {
		case <-done:
			open = false
		default:
		}
		data, _, err := c.Get("/data")
		if err != nil {
			t.Fatal(err)
		}
		now, _ := fence.ParseToken(string(data))
		if now < last {
			t.Fatalf("the write of token %v came after that of token %v", now, last)
		}
		last = now
	}
	if last != 80 {
		t.Errorf("the last write is that of token %v, want 80", last)
	}
}

// WriteHeld writes for the holder alone: not for one that has not the key yet, nor any more, nor for
// one whose lease was broken though nobody else holds.
func TestWriteHeld(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	s, c, ctx := open(t, at(sessionTimeout, server)), client(t, server.Addr()), t.Context()
	if _, err := c.Create("/data", nil, 0, zk.WorldACL(zk.PermAll)); err != nil {
		t.Fatal(err)
	}
	write := func(token fence.Token) error {
		_, err := s.WriteHeld(ctx, "k", token, &zk.SetDataRequest{Path: "/data", Data: []byte(token.String()), Version: -1})
		return err
	}
	if err := write(5); !errors.Is(err, store.ErrLost) {
		t.Errorf("a write to a key that nobody holds answers %v", err)
	}
	locks, err := holdfast.New(s, &holdfast.Options{TTL: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	lease := kit.Acquire(t, locks, "k")
	if err := write(lease.Token()); err != nil {
		t.Errorf("the holder's write answers %v", err)
	}
	if err := write(lease.Token() + 1); !errors.Is(err, store.ErrLost) {
		t.Errorf("another's write answers %v", err)
	}
	if _, err := s.WriteHeld(ctx, "k", lease.Token(), &zk.DeleteRequest{Path: "/none", Version: -1}); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("a write that ZooKeeper refuses answers %v", err)
	}
	if err := s.Break(context.Background(), store.Holder{Key: "k", Owner: lease.Owner()}); err != nil {
		t.Fatal(err)
	}
	if err := write(lease.Token()); !errors.Is(err, store.ErrLost) {
		t.Errorf("the write of a holder whose lease was broken answers %v", err)
	}
	if data, stat, err := c.Get("/data"); err != nil || string(data) != lease.Token().String() || stat.Version != 1 {
		t.Errorf("the data is %q, version %v, %v", data, stat, err)
	}
}
