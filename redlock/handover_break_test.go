package redlock

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// sleeper has the machine of s sleep: Go's clock stands still, and the nodes go on.
func sleeper(s *Store, fs []*fakeNode) (sleep func(d time.Duration)) {
	var slept atomic.Int64
	start := time.Now()
	s.clock = clock.Clock{Boot: func() time.Duration { return time.Since(start) + time.Duration(slept.Load()) }}
	return func(d time.Duration) {
		slept.Add(int64(d))
		for _, f := range fs {
			f.mu.Lock()
			f.ahead += d
			for key, v := range f.votes {
				f.votes[key] = fakeVote{v.owner, v.until.Add(-d)}
			}
			f.mu.Unlock()
		}
	}
}

// A machine that slept while its claim waited, and was handed the key meanwhile, hears of that when
// it wakes: at a moment at which the reservation has ended.
func TestHandedOverInSleep(t *testing.T) {
	for _, n := range []int{1, 3} {
		bubble(t, func(t *testing.T) {
			fs, stores := queued(t, 3, n)
			sleep := sleeper(stores[1], fs)
			holder := hold(t, stores[0])
			c, got := await(t, stores[1])
			for _, f := range fs {
				f.mu.Lock()
				channel := "holdfast:" + stores[1].inbox.name
				deliver := f.subs[channel]
				f.subs[channel] = func(text string) { time.Sleep(time.Millisecond); deliver(text) }
				f.mu.Unlock()
			}
			sleep(3 * time.Second)
			holder.Release(t.Context())
			sleep(5 * time.Second)
			other := hold(t, stores[2])
			time.Sleep(2 * time.Millisecond)
			synctest.Wait()
			c.mu.Lock()
			if c.held {
				t.Errorf("%d nodes: two hold the key", n)
			}
			c.mu.Unlock()
			other.Release(t.Context())
			if h := <-got; h.err != nil {
				t.Error(h.err)
			}
			c.Release(t.Context())
		})
	}
}

// The same, where one of two nodes was heard of before the machine slept.
func TestSleepBetweenMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		fs, stores := queued(t, 3, 3)
		sleep := sleeper(stores[1], fs)
		holder := hold(t, stores[0])
		c, got := await(t, stores[1])
		stores[1].rtt.Store(int64(50 * time.Millisecond)) // the grace
		for i, f := range fs[:2] {
			f.mu.Lock()
			channel := "holdfast:" + stores[1].inbox.name
			deliver := f.subs[channel]
			f.subs[channel] = func(text string) { time.Sleep(time.Duration(1+4*i) * time.Millisecond); deliver(text) }
			f.mu.Unlock()
		}
		fs[2].mu.Lock()
		fs[2].dumb = true
		fs[2].mu.Unlock()
		held := make(chan struct{})
		fs[1].set(func(op string) error { // the second node's release is late
			if op == "release" {
				<-held
			}
			return nil
		})
		go holder.Release(t.Context())
		time.Sleep(2 * time.Millisecond)
		sleep(3 * time.Second)
		close(held)
		time.Sleep(6 * time.Millisecond)
		synctest.Wait()
		c.mu.Lock()
		if c.handed {
			t.Error("granted, and the reservation of a node that made the quorum has ended")
		}
		c.mu.Unlock()
		<-got
		c.Release(t.Context())
	})
}
