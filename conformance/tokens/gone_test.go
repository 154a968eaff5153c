package tokens_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// A vote that somebody deletes under its holder on the only node is lost at the next
// extension, and never put back.
func TestDeletedVoteIsLostAndNotPutBack(t *testing.T) {
	for _, deletion := range [][]string{{"DEL", "k"}, {"FLUSHALL"}} {
		for _, c := range rig.Clients {
			t.Run(fmt.Sprintf("%s/%v", deletion[0], c), func(t *testing.T) {
				t.Parallel()
				s := servertest.Redis(t, servertest.Aged(time.Hour))
				st := rig.Store(t, redlock.Options{NodeTimeout: 2 * time.Second}, c.Node(t, s.Addr()))
				const ttl = time.Second
				lease := st.Claim("k", store.ClaimOptions{TTL: ttl})
				ctx := context.Background()
				if _, err := lease.Try(ctx); err != nil {
					t.Fatal(err)
				}
				rig.Must(t, s, deletion...)
				var lost *store.LostError
				if _, err := lease.Extend(ctx); !errors.As(err, &lost) || lost.By != nil {
					t.Fatalf("the first extension after %s: %v", deletion[0], err)
				}
				for end := time.Now().Add(3 * ttl); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
					if _, err := lease.Extend(ctx); !errors.Is(err, store.ErrLost) {
						t.Fatalf("a later extension: %v", err)
					}
					absent(t, s, "k")
				}
				if err := lease.Release(ctx); !errors.Is(err, store.ErrLost) {
					t.Errorf("release of a lost lease: %v", err)
				}
				absent(t, s, "k")
				next := st.Claim("k", store.ClaimOptions{TTL: ttl})
				if _, err := next.Try(ctx); err != nil {
					t.Errorf("the key is not free: %v", err)
				}
				if err := next.Release(ctx); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func absent(t *testing.T, s *servertest.RedisServer, key string) {
	t.Helper()
	if n := rig.Must(t, s, "EXISTS", key); n != int64(0) {
		t.Fatalf("%s: the vote was put back", s.Addr())
	}
}

// The same for a lease that is extended by itself: its context ends with the loss.
func TestDeletedVoteEndsTheContext(t *testing.T) {
	for _, deletion := range [][]string{{"DEL", "k"}, {"FLUSHALL"}} {
		t.Run(deletion[0], func(t *testing.T) {
			t.Parallel()
			s := servertest.Redis(t, servertest.Aged(time.Hour))
			const ttl = 1500 * time.Millisecond
			st := rig.Store(t, redlock.Options{NodeTimeout: time.Second}, rig.GoRedis.Node(t, s.Addr()))
			locks, err := holdfast.New(st, &holdfast.Options{TTL: ttl})
			if err != nil {
				t.Fatal(err)
			}
			lease, err := locks.Acquire(context.Background(), "k")
			if err != nil {
				t.Fatal(err)
			}
			ctx := lease.Context(context.Background())
			time.Sleep(ttl * 3 / 2) // it is extended
			if lease.Err() != nil {
				t.Fatalf("lost before: %v", lease.Err())
			}
			rig.Must(t, s, deletion...)
			begin := time.Now()
			select {
			case <-ctx.Done():
			case <-time.After(2 * ttl):
				t.Fatal("the loss is not noticed")
			}
			took := time.Since(begin)
			if !errors.Is(context.Cause(ctx), holdfast.ErrLost) || !errors.Is(lease.Err(), holdfast.ErrLost) {
				t.Errorf("cause %v, lease %v", context.Cause(ctx), lease.Err())
			}
			if took > ttl {
				t.Errorf("noticed only after %v", took)
			}
			t.Logf("noticed after %.2f ttl: %v", float64(took)/float64(ttl), lease.Err())
			for end := time.Now().Add(3 * ttl); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
				absent(t, s, "k")
			}
			if err := lease.Release(context.Background()); !errors.Is(err, holdfast.ErrLost) {
				t.Errorf("release: %v", err)
			}
		})
	}
}

// On five nodes a lease is given back what a minority has lost, and is lost with a majority.
func TestDeletedVotesOfFive(t *testing.T) {
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprintf("%d of 5", n), func(t *testing.T) {
			t.Parallel()
			servers := servertest.RedisN(t, 5, servertest.Aged(time.Hour))
			st := rig.Store(t, redlock.Options{NodeTimeout: 2 * time.Second}, rig.Nodes(t, rig.GoRedis, servers...)...)
			ctx := context.Background()
			lease := st.Claim("k", store.ClaimOptions{TTL: 10 * time.Second})
			g, err := lease.Try(ctx)
			if err != nil {
				t.Fatal(err)
			}
			everywhere := func() error {
				for _, s := range servers {
					if v := rig.Must(t, s, "GET", "k"); v != g.Owner {
						return fmt.Errorf("%s has %v", s.Addr(), v)
					}
				}
				return nil
			}
			servertest.Eventually(t, 5*time.Second, everywhere)
			for _, s := range servers[:n] {
				rig.Must(t, s, "DEL", "k")
			}
			again, err := lease.Extend(ctx)
			if n == 2 {
				if err != nil || again.Token != g.Token {
					t.Fatalf("%v, %v", again, err)
				}
				servertest.Eventually(t, 5*time.Second, everywhere)
				if err := lease.Release(ctx); err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, store.ErrLost) {
				t.Fatalf("three votes are gone: %v", err)
			}
			for range 100 {
				for _, s := range servers[:n] {
					absent(t, s, "k")
				}
				time.Sleep(5 * time.Millisecond)
			}
			if err := lease.Release(ctx); !errors.Is(err, store.ErrLost) {
				t.Errorf("release: %v", err)
			}
		})
	}
}
