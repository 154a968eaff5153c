package queue

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
)

// relay watches the hand-overs of one key between lockers of this process, and fails the test
// where two hold it together or a token does not rise.
type relay struct {
	t testing.TB

	mu     sync.Mutex
	holder *holdfast.Lease
	last   holdfast.Token
	free   time.Time // when its last holder began to give it back
	turns  []int     // of each locker
	order  []int     // who had it
	worst  time.Duration
}

func newRelay(t testing.TB, lockers int) *relay {
	return &relay{t: t, turns: make([]int, lockers), free: time.Now()}
}

func (r *relay) enter(who int, lease *holdfast.Lease) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holder != nil && r.holder.Err() == nil && lease.Err() == nil {
		r.t.Errorf("two holders: tokens %v and %v", r.holder.Token(), lease.Token())
	}
	if lease.Token() <= r.last {
		r.t.Errorf("token %v after %v", lease.Token(), r.last)
	}
	r.holder, r.last = lease, lease.Token()
	r.turns[who]++
	r.order = append(r.order, who)
	r.worst = max(r.worst, now.Sub(r.free))
}

func (r *relay) leave(lease *holdfast.Lease) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holder == lease {
		r.holder = nil
	}
	r.free = time.Now()
}

// total is how many turns there were.
func (r *relay) total() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.order)
}

// gap is the longest time that the key lay idle since the last call.
func (r *relay) gap() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.worst
	r.worst = 0
	return d
}

// idle is for how long nobody has held the key.
func (r *relay) idle() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holder != nil {
		return 0
	}
	return time.Since(r.free)
}

// loop takes turns until ctx ends.
func (r *relay) loop(ctx context.Context, who int, locks *holdfast.Locker, key string, inside time.Duration) {
	for ctx.Err() == nil {
		lease, err := locks.Acquire(ctx, key)
		if err != nil {
			if ctx.Err() == nil {
				r.t.Errorf("locker %d: %v", who, err)
			}
			return
		}
		r.enter(who, lease)
		if inside > 0 {
			time.Sleep(inside)
		}
		r.leave(lease)
		if err := lease.Release(context.Background()); err != nil && !errors.Is(err, holdfast.ErrUncertain) {
			r.t.Errorf("locker %d: Release: %v", who, err)
		}
	}
}

// start lets every locker take turns. stop ends that and waits for them.
func (r *relay) start(lockers []*holdfast.Locker, key string, inside time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i, locks := range lockers {
		wg.Go(func() { r.loop(ctx, i, locks, key, inside) })
	}
	stop = func() { cancel(); wg.Wait() }
	r.t.Cleanup(stop)
	return stop
}

// reach waits until there were n turns, and fails where the key lies idle for too long.
func (r *relay) reach(n int, idle time.Duration) {
	r.t.Helper()
	for r.total() < n {
		time.Sleep(2 * time.Millisecond)
		if d := r.idle(); d > idle {
			r.t.Fatalf("after %d turns nobody takes the key for %v", r.total(), d)
		}
	}
}
