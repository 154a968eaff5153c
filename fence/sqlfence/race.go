package sqlfence

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// patience is how long a call may take to come back once it was told to end.
const patience = 250 * time.Millisecond

// errSlow says that a call took longer than LockWait.
var errSlow = errors.New("no reply in time")

// errLate says that a transaction had begun, but was given up: the process was stopped, or
// waited for a connection, for longer than LockWait.
var errLate = errors.New("the transaction began too late")

// race makes a call and returns when it does, or a little after ctx has ended or limit has
// passed: drivers may not look at contexts. A call that is left behind is told to end by its
// context and by abort; late gets what it brings.
func race[T any](ctx context.Context, limit time.Duration, abort func(), call func(context.Context) (T, error), late func(T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errSlow)
	defer cancel()
	done := make(chan answer, 1)
	go func() {
		v, err := call(ctx)
		done <- answer{v, err}
	}()
	select {
	case a := <-done:
		return a.v, a.err
	case <-ctx.Done():
	}
	if abort != nil {
		abort()
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case a := <-done:
		if a.err != nil && context.Cause(ctx) == errSlow {
			a.err = fmt.Errorf("%w: %w", errSlow, a.err)
		}
		return a.v, a.err
	case <-timer.C:
	}
	if late != nil {
		go func() {
			a := <-done
			late(a.v, a.err)
		}()
	}
	var none T
	return none, context.Cause(ctx)
}

// pause sleeps for a random time that grows with n, and reports whether ctx still lives.
func pause(ctx context.Context, n int) bool {
	d := min(time.Millisecond<<min(n, 10), 100*time.Millisecond)
	timer := time.NewTimer(d/2 + rand.N(d))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// turns lets one transaction of a resource run at a time: in the database the others would
// wait anyway, and so the last transaction of a token is never one of the same process when
// a commit has to be settled. The zero value is ready.
type turns struct {
	mu sync.Mutex
	m  map[string]*turn
}

type turn struct {
	slot  chan struct{}
	users int
}

// take waits for the turns of all claims, which are sorted, for limit each.
func (t *turns) take(ctx context.Context, limit time.Duration, cs []*claim) (leave func(), err error) {
	var taken []func()
	leave = func() {
		for _, f := range taken {
			f()
		}
	}
	for _, c := range cs {
		f, err := t.one(ctx, limit, c.resource)
		if err != nil {
			leave()
			return nil, err
		}
		taken = append(taken, f)
	}
	return leave, nil
}

func (t *turns) one(ctx context.Context, limit time.Duration, resource string) (func(), error) {
	t.mu.Lock()
	if t.m == nil {
		t.m = map[string]*turn{}
	}
	u := t.m[resource]
	if u == nil {
		u = &turn{slot: make(chan struct{}, 1)}
		t.m[resource] = u
	}
	u.users++
	t.mu.Unlock()
	forget := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if u.users--; u.users == 0 {
			delete(t.m, resource)
		}
	}
	select {
	case u.slot <- struct{}{}:
		return func() { <-u.slot; forget() }, nil
	default:
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case u.slot <- struct{}{}:
		return func() { <-u.slot; forget() }, nil
	case <-ctx.Done():
		forget()
		return nil, ended(ctx, nil)
	case <-timer.C:
		forget()
		return nil, &fence.Error{Kind: fence.ErrBusy, Resource: resource,
			Err: errors.New("another transaction of this process has it")}
	}
}
