package sqlstore

import (
	"context"
	"encoding/hex"
	"math/rand/v2"
	"time"
)

// Listener hears what PostgreSQL notifies. The package imports no driver, so that the caller
// writes it, over a connection of its own that no transaction pooler is on the way of: with pgx
// it is Exec of LISTEN and then WaitForNotification in a loop, as in examples/stores/listener.go of
// this repository.
type Listener interface {
	// Listen listens on channel until ctx is done or the connection breaks, and calls deliver
	// with the payload of each notification. It gives its connection up before it returns. A
	// [Store] calls it while claims wait and for some seconds more, and again a while after it has
	// returned.
	//
	// What is heard is a hint and nothing else: one that is lost, or made up, costs time.
	Listen(ctx context.Context, channel string, deliver func(payload string)) error
}

const (
	lingering   = 5 * time.Second // of the listener when nobody waits any more
	listenAgain = time.Second     // after it has failed
)

// listen lets the listener listen, until some time after the last waiter has left.
func (s *Store) listen() (leave func()) {
	if s.listener == nil {
		return func() {}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil {
		s.idle.Stop()
	}
	if s.waiting++; s.listening == nil {
		ctx, cancel := context.WithCancel(context.Background())
		s.listening = cancel
		go s.hear(ctx)
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.waiting--; s.waiting == 0 {
			s.idle = time.AfterFunc(lingering, s.listenNoMore)
		}
	}
}

func (s *Store) listenNoMore() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting == 0 && s.listening != nil {
		s.listening()
		s.listening = nil
	}
}

func (s *Store) hear(ctx context.Context) {
	for ctx.Err() == nil {
		_ = s.listener.Listen(ctx, channel, func(payload string) {
			if key, err := hex.DecodeString(payload); err == nil {
				s.wake(string(key))
			}
		})
		sleep(ctx, listenAgain/2+rand.N(listenAgain))
	}
}
