package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

const (
	callLimit    = 5 * time.Second        // of a call, and of a clean-up behind one
	answerGrace  = 100 * time.Millisecond // for the driver to return after its context is done
	minBusyPause = time.Millisecond
	maxBusyPause = 20 * time.Millisecond
)

var errNoAnswer = errors.New("no answer from the database within " + callLimit.String())

// race runs op under ctx and callLimit, and returns soon after they end whatever the
// driver does; the outcome is then uncertain. settle, where given, is called when op has
// returned, before race does unless the caller has left.
func race[T any](ctx context.Context, op func(context.Context) (T, error), settle func(left bool, err error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit, errNoAnswer)
	defer cancel()
	answers := make(chan answer, 1)
	var decided atomic.Bool // by op, that it answers, or by the caller, that it leaves
	go func() {
		v, err := op(ctx)
		left := !decided.CompareAndSwap(false, true)
		if settle != nil {
			settle(left, err)
		}
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
	}
	if decided.CompareAndSwap(false, true) {
		var none T
		return none, uncertain(context.Cause(ctx))
	}
	a := <-answers
	return a.v, a.err
}

// attempts say what is tried again.
type attempts struct {
	busy    func(error) bool  // nothing was written, and the next attempt may succeed
	text    string            // for people, where the time was over before it did
	meaning func(error) error // of another error of the driver, where nothing was written
	db      *sql.DB
}

// retry runs f while the database is busy, with random pauses that grow, until ctx ends.
func retry(ctx context.Context, a attempts, f func() error) error {
	var busy error
	for pause := minBusyPause; ; pause = min(2*pause, maxBusyPause) {
		err := f()
		switch {
		case err == nil:
			return nil
		case hasKind(err):
			return err
		case a.busy(err):
			busy = err
			if sleep(ctx, time.Duration(rand.Int64N(int64(pause)))) {
				continue
			}
		case ctx.Err() == nil:
			return a.meaning(err)
		}
		// The context has ended, and nothing has been committed.
		switch end := context.Cause(ctx); {
		case busy != nil:
			return unavailable(a.text+": "+end.Error(), errors.Join(ctx.Err(), busy))
		case end == errNoAnswer:
			return unavailable(end.Error()+poolHint(a.db), err)
		}
		return ctx.Err()
	}
}

// poolHint says what else may be the reason of a call that had no answer.
func poolHint(db *sql.DB) string {
	if db == nil {
		return ""
	}
	if s := db.Stats(); s.MaxOpenConnections > 0 && s.InUse >= s.MaxOpenConnections {
		return fmt.Sprintf("; the pool's %d connections are all in use, and SetMaxOpenConns allows no more", s.InUse)
	}
	return ""
}

// sleep reports false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return ctx.Err() == nil
	}
}

// noGrant is for calls that cannot have granted or released anything: what is uncertain for
// others is unavailable.
func noGrant(err error) error {
	var f *fault
	if errors.As(err, &f) && f.kind == store.ErrUncertain {
		return unavailable(f.text, f.cause)
	}
	return err
}
