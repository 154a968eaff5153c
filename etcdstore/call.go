package etcdstore

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	"github.com/holdfast-go/holdfast/store"
)

const (
	callLimit   = 5 * time.Second        // of a call
	answerGrace = 100 * time.Millisecond // for the client to return after its context is done
)

var (
	errNoWatch  = errors.New("the servers do not tell of changes now")
	errNoAnswer = errors.New("no answer from etcd within " + callLimit.String())
	// What the server says of a lease. These errors do not leave the package.
	errNoLease     = errors.New("no such lease")
	errLeaseExists = errors.New("the lease exists already")
	// errQueue says that a key is not to be had, and that it was not asked why.
	errQueue = errors.New("the key is taken, or others wait for it")
)

// fault is an error of the cluster: what it means to the caller, and what the client said.
type fault struct {
	kind  error // store.ErrUnavailable, store.ErrUncertain or a *store.InvalidError
	cause error
}

func (f *fault) Error() string {
	if f.cause == nil {
		return f.kind.Error()
	}
	return f.kind.Error() + ": " + strings.Join(strings.Fields(f.cause.Error()), " ")
}

func (f *fault) Unwrap() []error {
	if f.cause == nil {
		return []error{f.kind}
	}
	return []error{f.kind, f.cause}
}

func uncertain(cause error) error { return &fault{store.ErrUncertain, cause} }

// race runs op under ctx and callLimit, and returns soon after they end whatever the client
// does; the outcome is then uncertain. end is called when op has returned, before race does
// unless the caller has left.
func race[T any](ctx context.Context, op func(context.Context) (T, error), end func()) (T, error) {
	type answer struct {
		v   T
		err error
	}
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, errNoAnswer)
	defer cancel()
	answers := make(chan answer, 1)
	go func() {
		v, err := op(ctx)
		end()
		answers <- answer{v, err}
	}()
	select {
	case a := <-answers:
		return a.v, a.err
	case <-ctx.Done():
	}
	grace := time.NewTimer(answerGrace)
	defer grace.Stop()
	select {
	case a := <-answers:
		return a.v, a.err
	case <-grace.C:
		var none T
		return none, uncertain(context.Cause(ctx))
	}
}

// method is a call of the client's.
type method[Q, A any] func(context.Context, Q, ...grpc.CallOption) (A, error)

// ask sends a request that changes something. Its error says whether the server may have acted.
func ask[Q, A any](ctx context.Context, send method[Q, A], request Q) (A, error) {
	var none A
	if ctx.Err() != nil {
		return none, notSent(ctx)
	}
	var server peer.Peer
	answer, err := send(ctx, request, grpc.Peer(&server))
	if err != nil {
		return none, classify(ctx, err, server.Addr != nil)
	}
	return answer, nil
}

// look sends a request that changes nothing.
func look[Q, A any](ctx context.Context, send method[Q, A], request Q) (A, error) {
	answer, err := send(ctx, request)
	if err != nil {
		var none A
		return none, classify(ctx, err, false)
	}
	return answer, nil
}

// notSent is the error of a request that a done context has kept back.
func notSent(ctx context.Context) error {
	if cause := context.Cause(ctx); cause == errNoAnswer {
		return &fault{store.ErrUnavailable, cause}
	}
	return ctx.Err()
}

// classify gives an error of the client its meaning. sent says that the request has left, and
// that the server may have acted on it.
func classify(ctx context.Context, err error, sent bool) error {
	err = rpctypes.Error(err)
	switch err {
	case rpctypes.ErrLeaseNotFound:
		return errNoLease
	case rpctypes.ErrLeaseExist:
		return errLeaseExists
	case rpctypes.ErrPermissionDenied:
		return &fault{&store.InvalidError{Field: "server", Rule: "refuses the user: grant it read and write of the store's Prefix"}, err}
	case rpctypes.ErrUserEmpty, rpctypes.ErrAuthFailed, rpctypes.ErrInvalidAuthToken:
		return &fault{&store.InvalidError{Field: "server", Rule: "refuses the credentials: give the client a user and its password"}, err}
	case rpctypes.ErrTooManyRequests, rpctypes.ErrNoSpace, rpctypes.ErrAuthOldRevision:
		return &fault{store.ErrUnavailable, err}
	}
	if cause := context.Cause(ctx); cause != nil {
		if !sent {
			return notSent(ctx)
		}
		return uncertain(cause)
	}
	if sent {
		return uncertain(err)
	}
	return &fault{store.ErrUnavailable, err}
}

// reaper ends what was to be ended and had no answer, such as leases, in one goroutine, until
// each has ended, if only by itself.
type reaper[K comparable] struct {
	life  context.Context // nothing is ended when it is done
	end   func(context.Context, []K) error
	most  int          // that are ended at once
	lasts func(K) bool // whether it may be there though its time is over; nil: it is not

	mu   sync.Mutex
	left map[K]time.Time // until when
	idle chan struct{}   // closed when nothing is left; nil where that is so
}

// Pauses between two rounds of the reaper, and the longest that it cares for what does not last.
const (
	minReap  = 50 * time.Millisecond
	maxReap  = time.Second
	reapTime = time.Minute
)

func (r *reaper[K]) add(k K, ttl time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.left == nil {
		r.left = map[K]time.Time{}
	}
	r.left[k] = time.Now().Add(min(ttl, reapTime))
	if r.idle == nil {
		r.idle = make(chan struct{})
		go r.run()
	}
}

// wait returns when nothing is left to do, or ctx is done.
func (r *reaper[K]) wait(ctx context.Context) error {
	r.mu.Lock()
	idle := r.idle
	r.mu.Unlock()
	if idle == nil {
		return nil
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *reaper[K]) run() {
	for pause := minReap; r.more(); pause = min(2*pause, maxReap) {
		select {
		case <-time.After(pause):
		case <-r.life.Done():
			continue
		}
		for due := range slices.Chunk(r.due(), r.most) {
			ctx, cancel := context.WithTimeout(r.life, maxReap)
			err := r.end(ctx, due)
			cancel()
			if err != nil && err != errNoLease {
				break // the others would not get through either
			}
			r.mu.Lock()
			for _, k := range due {
				delete(r.left, k)
			}
			r.mu.Unlock()
		}
	}
}

// more answers false when nothing is left to do, and no goroutine runs from then on.
func (r *reaper[K]) more() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.life.Err() != nil {
		clear(r.left)
	}
	if len(r.left) > 0 {
		return true
	}
	close(r.idle)
	r.idle = nil
	return false
}

// due answers what has not ended by itself.
func (r *reaper[K]) due() (due []K) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for k, until := range r.left {
		if now.After(until) && (r.lasts == nil || !r.lasts(k)) {
			delete(r.left, k)
			continue
		}
		due = append(due, k)
	}
	return due
}
