package etcd

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// A request to break a lock arrives late, and whoever sent it does nothing more. The holder was
// extended meanwhile: nobody else gets the key while it may trust that.
func TestBreakArrivesLate(t *testing.T) {
	t.Parallel()
	const ttl = 2 * minTTL
	server := servertest.Etcd(t, module)
	s := open(t, etcdstore.Options{}, server.Addr())
	p := servertest.NewProxy(t, server.Addr())
	breaker := open(t, etcdstore.Options{}, p.Addr())
	holder := s.Claim("k", store.ClaimOptions{TTL: ttl})
	if _, err := holder.Try(t.Context()); err != nil {
		t.Fatal(err)
	}
	h, err := s.Inspect(t.Context(), "k")
	if err != nil {
		t.Fatal(err)
	}
	breaks := servertest.Containing(`"broken:`)
	late := p.Hold(breaks)
	began := time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() { answer <- breaker.Break(ctx, h) }()
	if err := late.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	var sent time.Time
	for sent.Sub(began) < ttl+ttl/16 {
		time.Sleep(ttl / 16)
		sent = time.Now()
		if _, err := holder.Extend(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	defer p.Hold(func(b []byte) bool { return !breaks(b) }).Release() // nothing comes after it
	late.Release()
	servertest.Eventually(t, ttl/2, func() error {
		h, err := s.Inspect(t.Context(), "k")
		if err == nil && !h.Broken {
			err = errors.New("the request has not arrived")
		}
		return err
	})
	other := s.Claim("k", store.ClaimOptions{TTL: minTTL})
	servertest.Eventually(t, 4*ttl, func() error { _, err := other.Try(t.Context()); return err })
	if early := ttl - time.Since(sent); early > 0 {
		t.Errorf("another is granted the key %v before the end of what its holder was promised", early)
	}
	if _, err := holder.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
		t.Errorf("Extend of a holder whose lock was broken answers %v, want ErrLost", err)
	}
	cancel()
	<-answer
}
