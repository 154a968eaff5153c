package sqlstore

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/store"
)

type state string

func (s state) SQLState() string { return string(s) }
func (state) Error() string      { return "words\nthat say nothing" }

type numbered struct{ Number uint16 }

func (*numbered) Error() string { return "words that say nothing" }

// Errors of servers say what to do, in one line.
func TestMeaning(t *testing.T) {
	pg, my := &server{statements: postgres{}}, &server{statements: mysql{}}
	for _, test := range []struct {
		e    *server
		err  error
		want error
		text string
	}{
		{pg, state("25006"), store.ErrUnavailable, "primary"},
		{pg, state("53300"), store.ErrUnavailable, ""},
		{pg, state("57014"), store.ErrUnavailable, ""},
		{pg, state("57P03"), store.ErrUnavailable, ""},
		{pg, state("42P01"), store.ErrInvalid, "EnsureSchema"},
		{pg, state("42703"), store.ErrInvalid, "tables of this program"},
		{pg, state("42501"), store.ErrInvalid, "role"},
		{pg, state("28P01"), store.ErrInvalid, "refuses the user"},
		{pg, state("3D000"), store.ErrInvalid, "create it"},
		{pg, &numbered{1064}, store.ErrInvalid, "set the Dialect"},
		{my, state("42703"), store.ErrInvalid, "set the Dialect"},
		{my, &numbered{1044}, store.ErrInvalid, "grant SELECT"},
		{my, &numbered{1049}, store.ErrInvalid, "create it"},
		{pg, state("26000"), store.ErrInvalid, "default_query_exec_mode"},
		{pg, state("42P05"), store.ErrInvalid, "default_query_exec_mode"},
		{pg, state("22003"), store.ErrInvalid, "used up"},
		{pg, io.EOF, store.ErrUnavailable, ""},
		{pg, driver.ErrBadConn, store.ErrUnavailable, ""},
		{my, &numbered{1290}, store.ErrUnavailable, "primary"},
		{my, &numbered{1040}, store.ErrUnavailable, ""},
		{my, &numbered{1142}, store.ErrInvalid, "user"},
		{my, &numbered{1045}, store.ErrInvalid, "refuses the user"},
		{my, &numbered{1146}, store.ErrInvalid, "EnsureSchema"},
		{my, &numbered{1690}, store.ErrInvalid, "used up"},
	} {
		got := test.e.meaning(fmt.Errorf("exec: %w", test.err))
		if !errors.Is(got, test.want) || errors.Is(got, store.ErrUncertain) || !errors.Is(got, test.err) {
			t.Errorf("%v: %v, want %v", test.err, got, test.want)
		}
		if !strings.Contains(got.Error(), test.text) || strings.Contains(got.Error(), "\n") {
			t.Errorf("%v: %q, want one line with %q", test.err, got, test.text)
		}
	}
	for _, err := range []error{state("40001"), state("40P01"), state("55P03")} {
		if !pg.busy(err) {
			t.Errorf("%v is not tried again", err)
		}
	}
	for _, n := range []uint16{1213, 1020, 1205} {
		if !my.busy(&numbered{n}) {
			t.Errorf("%d is not tried again", n)
		}
	}
	if pg.busy(state("08006")) || my.busy(io.EOF) || pg.fault(state("57014")) != sqlerr.Unavailable {
		t.Error("an error without an answer is tried again, or a cancelled statement has no answer")
	}
}

func TestSchema(t *testing.T) {
	if Schema(SQLite) != nil || Schema(0) != nil {
		t.Error("SQLite has statements")
	}
	for _, d := range []Dialect{PostgreSQL, MySQL} {
		if text := strings.Join(Schema(d), "\n"); !strings.Contains(text, fmt.Sprintf("'version', '%d'", schemaVersion)) {
			t.Errorf("the statements of %v make no tables of version %d: %s", d, schemaVersion, text)
		}
	}
}

func TestMicros(t *testing.T) {
	for d, want := range map[time.Duration]int64{time.Nanosecond: 1, time.Microsecond: 1, 1500 * time.Nanosecond: 2, maxTTL: maxTTL.Microseconds()} {
		if got := micros(d); got != want {
			t.Errorf("micros(%v) = %d, want %d: never less than was promised", d, got, want)
		}
	}
}

// heldEngine has every key held by the same holder.
type heldEngine struct {
	engine
	reads atomic.Int32
	owner func() string
}

func (e *heldEngine) read(_ context.Context, key string) (row, error) {
	e.reads.Add(1)
	return row{exists: true, key: key, owner: e.owner(), token: 1, left: time.Hour}, nil
}

type fakeListener struct {
	calls, open atomic.Int32
	deliver     func(string)
	fail        bool
}

func (l *fakeListener) Listen(ctx context.Context, channel string, deliver func(string)) error {
	l.calls.Add(1)
	if l.fail {
		return errors.New("refused")
	}
	l.open.Add(1)
	defer l.open.Add(-1)
	l.deliver = deliver
	<-ctx.Done()
	return ctx.Err()
}

func waiting(e engine, l Listener) (*Store, store.Waiter, *store.HeldError) {
	s := newStore(e, leaseClock{}, "test", "test")
	s.listener = l
	c := s.Claim("k", store.ClaimOptions{TTL: time.Minute, Wait: true}).(*claim)
	return s, c, &store.HeldError{Holder: store.Holder{Key: "k", Owner: "other", TTL: time.Hour}}
}

// What is notified wakes the waiters of that key at once, and nothing else does; the listener
// listens while somebody waits, and some time longer.
func TestListener(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &fakeListener{}
		_, w, held := waiting(&heldEngine{owner: func() string { return "other" }}, l)
		for round := range 3 {
			done := make(chan error, 1)
			go func() { done <- w.Wait(t.Context(), held) }()
			synctest.Wait()
			for _, payload := range []string{"", "zz", "6b6b", "k"} {
				l.deliver(payload)
			}
			time.Sleep(10 * time.Millisecond) // less than a poll takes
			if synctest.Wait(); len(done) > 0 {
				t.Fatal("a notification of nothing wakes")
			}
			begun := time.Now()
			l.deliver("6b")
			if err := <-done; err != nil || time.Since(begun) != 0 {
				t.Errorf("Wait = %v, %v after the notification", err, time.Since(begun))
			}
			if n := l.calls.Load(); n != 1 || l.open.Load() != 1 {
				t.Errorf("round %d: Listen was called %d times", round, n)
			}
			time.Sleep(lingering / 2)
		}
		time.Sleep(lingering)
		if synctest.Wait(); l.open.Load() != 0 {
			t.Error("the listener goes on when nobody waits")
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := w.Wait(ctx, held); !errors.Is(err, context.DeadlineExceeded) || l.calls.Load() != 2 {
			t.Errorf("Wait = %v, Listen was called %d times", err, l.calls.Load())
		}
		time.Sleep(2 * lingering)
	})
}

// A listener that fails is asked again, seldom, and waiters poll.
func TestListenerThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &fakeListener{fail: true}
		e := &heldEngine{owner: func() string { return "other" }}
		_, w, held := waiting(e, l)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if err := w.Wait(ctx, held); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait = %v", err)
		}
		if n := l.calls.Load(); n < 15 || n > 70 {
			t.Errorf("a listener that fails was asked %d times in 30 s", n)
		}
		if n := e.reads.Load(); n < 40 || n > 150 {
			t.Errorf("the row was read %d times in 30 s", n)
		}
		time.Sleep(2 * lingering)
	})
}

// A key that changes hands is looked at most often, however long the claim has waited.
func TestWaitersOfABusyKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turn := 0
		e := &heldEngine{owner: func() string { turn++; return fmt.Sprint(turn) }}
		_, w, held := waiting(e, nil)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		if err := w.Wait(ctx, held); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait = %v", err)
		}
		if n := e.reads.Load(); n < 400 || n > 1200 {
			t.Errorf("the row was read %d times in 30 s, want one every 25 to 75 ms", n)
		}
	})
}
