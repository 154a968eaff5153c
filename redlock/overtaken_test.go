package redlock

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// lateAnswers is a node whose answers to VOTE come a while after it has executed them.
type lateAnswers struct {
	*fakeNode
	by atomic.Int64
}

func (f *lateAnswers) Run(ctx context.Context, calls ...Call) []Reply {
	replies := f.fakeNode.Run(ctx, calls...)
	if opOf(calls[0].Script.Text) == "vote" {
		time.Sleep(time.Duration(f.by.Load()))
	}
	return replies
}

// A wake-up that comes before the answer BUSY, by which the claim knows that it waits, is not lost.
func TestWakeUpOvertakesTheAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, list := fakes(1)
		subscribable(fs)
		defer settle()
		late := &lateAnswers{fakeNode: fs[0]}
		holder, waiter := fakeStore(t, Options{}, list...), fakeStore(t, Options{}, late)
		held := mustGrant(t, holder, "k", 10*time.Second)

		// It has waited for another key, so it is subscribed, and parked in its first round.
		mustGrant(t, holder, "other", 10*time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		arrive(t, ctx, []*Store{waiter}, "other")
		cancel()
		synctest.Wait()

		const delay = 20 * time.Millisecond
		late.by.Store(int64(delay))
		time.AfterFunc(delay/2, func() { held.Release(context.Background()) })
		began := time.Now()
		c := waiterOf(waiter, "k")
		if _, err := acquire(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > 3*delay {
			t.Errorf("granted after %v; the second answer comes after %v", took, 2*delay)
		}
		c.Release(t.Context())
	})
}
