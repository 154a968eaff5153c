package zkstore

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// A create is sent late, through the session after the one that it was meant for, and its answer is
// lost as well. The claim finds that node: it does not queue behind itself, for as long as the session
// lives.
func TestCreateThatTheNextSessionSends(t *testing.T) {
	server := servertest.ZooKeeper(t)
	proxy := servertest.NewProxy(t, server.Addr())
	s, err := Dial(Options{Servers: []string{proxy.Addr()}, SessionTimeout: 4 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	try := func(c store.Claim) (g store.Grant, err error) {
		for range 100 {
			g, err = c.Try(t.Context())
			if !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
		return g, err
	}
	first := s.Claim("k", store.ClaimOptions{TTL: time.Second}) // so that the queue is there
	if _, err := try(first); err != nil {
		t.Fatal(err)
	}
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, release := range []bool{false, true} {
		c := s.Claim("k", store.ClaimOptions{TTL: time.Second, Wait: true}).(*claim)
		former := &life{id: 1, timeout: 4 * time.Second}
		former.ctx, former.end = context.WithCancel(t.Context())
		former.end()
		multi := func(b []byte) bool { return len(b) >= 12 && binary.BigEndian.Uint32(b[8:]) == 14 }
		lost := proxy.DropReplyTo(servertest.Only(1, multi))
		_, _, err = c.enter(t.Context(), former) // as one that was paused since it had looked for the session
		lost.Stop()
		if !errors.Is(err, store.ErrUncertain) || lost.Count() != 1 {
			t.Fatalf("a create whose answer is lost answers %v; %d answers were lost", err, lost.Count())
		}
		if release {
			if err := c.Release(t.Context()); err != nil && !errors.Is(err, store.ErrUncertain) {
				t.Errorf("Release answers %v", err)
			}
		} else {
			g, err := try(c)
			if err != nil {
				t.Fatalf("Try of a claim whose node is there answers %v", err)
			}
			if h, err := s.Inspect(t.Context(), "k"); err != nil || h.Owner != g.Owner || h.Waiting != 0 {
				t.Errorf("the key has %+v, %v, want the claim alone", h, err)
			}
			if err := c.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
		servertest.Eventually(t, 2*time.Second, func() error { // the session lives on
			if h, err := s.Inspect(t.Context(), "k"); err != nil || h.Owner != "" {
				return errors.New("the node is still there")
			}
			return nil
		})
	}
}
