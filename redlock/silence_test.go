package redlock

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Requests that go unanswered at the same time are one silence, and so are what a timer and,
// later, the client itself say of one of them: the node is asked again after the first pause.
func TestOneSilenceIsCountedOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, nodes := fakes(3)
		s := fakeStore(t, Options{}, nodes...)
		mustGrant(t, s, "first", time.Second).Release(t.Context())
		synctest.Wait()
		fs[2].set(func(string) error {
			time.Sleep(2 * s.opts.NodeTimeout)
			return errGone
		})
		for round := range 3 { // each is one request after the other's pause, and what fell into its silence
			for _, key := range []string{"a", "b", "c"} {
				c := mustGrant(t, s, key, 2*time.Second)
				if _, err := c.Extend(t.Context()); err != nil {
					t.Fatal(err)
				}
				c.Release(t.Context())
			}
			time.Sleep(3 * s.opts.NodeTimeout)
			p := s.peers[2]
			p.mu.Lock()
			misses := p.misses
			p.mu.Unlock()
			if misses < 1 || misses > round+1 {
				t.Errorf("%d missing answers are counted in %d silences", misses, round+1)
			}
			time.Sleep(maxAway)
		}
		time.Sleep(time.Minute)
	})
}

// A RELEASE whose reply is lost is no loss of the lease, though a repeated one finds no vote:
// neither by the repetition, nor by another call of Release after that has ended.
func TestLostReplyOfReleaseIsNoLoss(t *testing.T) {
	for _, n := range []int{1, 3} {
		bubble(t, func(t *testing.T) {
			fs, nodes := fakes(n)
			s := fakeStore(t, Options{}, nodes...)
			c := mustGrant(t, s, "k", time.Second)
			synctest.Wait()
			for _, f := range fs {
				f.loseReplies(true)
			}
			if err := c.Release(t.Context()); !errors.Is(err, store.ErrUncertain) || errors.Is(err, store.ErrLost) {
				t.Errorf("Release without an answer: %v, want ErrUncertain", err)
			}
			time.Sleep(10 * time.Second) // the repetition ends with the ttl
			for _, f := range fs {
				f.loseReplies(false)
			}
			if err := c.Release(t.Context()); err != nil {
				t.Errorf("Release after the nodes have come back: %v", err)
			}
		})
	}
}

// A release that is confirmed in the moment in which the wait for it ends is confirmed: no
// error says of enough nodes that they have answered.
func TestReleaseConfirmedInTheLastMoment(t *testing.T) {
	bubble(t, func(t *testing.T) {
		_, nodes := fakes(3)
		s := fakeStore(t, Options{}, nodes...)
		c := mustGrant(t, s, "k", time.Second)
		if err := c.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := c.last.unconfirmed(nil); err != nil {
			t.Errorf("confirmed, and yet %v", err)
		}
		time.Sleep(time.Minute)
	})
}
