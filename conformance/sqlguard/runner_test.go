package sqlguard_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// outcome is what a schedule came to, by the data and the order of the commits.
type outcome struct {
	bad   string   // why Old's effect came too late, or what New worked on was old; "" where all is well
	stale bool     // a session was refused, since a larger token had been seen
	codes []string // of sessions that the database ended
	waits bool     // a session was seen waiting for another
}

// class is the word that [schedule] has for it.
func (o outcome) class() string {
	switch {
	case o.bad != "":
		return "BAD"
	case o.codes != nil:
		return "abort"
	case o.stale:
		return "stale"
	}
	return "ok"
}

// String is the class with what people want to know beside it.
func (o outcome) String() string {
	s := o.class()
	if s == "abort" {
		s = strings.Join(o.codes, " ")
		if o.stale {
			s += ", stale"
		}
	}
	if o.waits {
		s += ", waits"
	}
	return s
}

// end is how a session's last transaction ended.
type end int

const (
	open end = iota
	committed
	rolledBack
	refused // as stale
	aborted // by the database
)

// checker is how a session checks its token: by hand, or one of the ways of the guard.
type checker interface {
	// do carries a step out, and reports whether it is one that it knows; those that are not
	// about tokens are done in the same way for all.
	do(ctx context.Context, s *session, o op) (known bool, err error)
}

// errStale is what a hand-written check says.
var errStale = errors.New("stale")

// errRollback is a planned rollback.
var errRollback = errors.New("rolled back as planned")

// session is one of the holders.
type session struct {
	run    *run
	name   string
	token  fence.Token
	number int64 // what it adds
	db     *sql.DB
	tx     *sql.Tx
	read   int64

	in      chan *issued
	last    *issued      // the last step it was given
	busy    func() int64 // how often SQLite said that it is locked; nil for the servers
	before  int64        // what that was when the last step was given
	blocked bool         // it was seen waiting in that or an earlier one

	end                    end
	err                    error
	commitBegin, commitEnd int64 // by run.clock, zero where there is none
}

// issued is a step that a session was given.
type issued struct {
	op
	done chan struct{}
	over bool
}

func (i *issued) finish() {
	if !i.over {
		i.over = true
		close(i.done)
	}
}

func (i *issued) isDone() bool {
	select {
	case <-i.done:
		return true
	default:
		return false
	}
}

// run is one schedule at work.
type run struct {
	t        testing.TB
	d        *database
	c        config
	tables   tables
	sessions map[string]*session
	checker  checker
	inTx     func(ctx context.Context, s *session, fn func(*sql.Tx) error) error // not nil: sqlfence's Tx makes the transactions
	clock    atomic.Int64
	waits    bool
}

// tables are those of one configuration.
type tables struct {
	admin          *sql.DB
	doc, mark, log string // names
	suffix         string
}

// play gives the steps to their sessions, one after another, each when the one before is done
// or waits for another session, and answers what has become of it.
func (r *run) play(steps []op) outcome {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	for _, s := range r.sessions {
		s.in = make(chan *issued, len(steps))
		ended := make(chan struct{})
		go func() { defer close(ended); s.loop(ctx) }()
		defer func() { <-ended }()
		defer close(s.in)
	}
	for _, o := range steps {
		s := r.sessions[o.who]
		if s.last == nil || s.last.isDone() {
			s.before = s.busyCount()
		}
		s.last = &issued{op: o, done: make(chan struct{})}
		s.in <- s.last
		r.settle(ctx)
	}
	for _, s := range r.sessions {
		if s.last == nil {
			continue
		}
		select {
		case <-s.last.done:
		case <-ctx.Done():
			r.t.Fatalf("%s waits for ever in %v", s.name, s.last.op)
		}
	}
	return r.outcome()
}

// settle returns when each session has done its steps, or waits for another one.
func (r *run) settle(ctx context.Context) {
	r.t.Helper()
	for ; ctx.Err() == nil; time.Sleep(time.Millisecond) {
		calm := true
		for _, s := range r.sessions {
			switch {
			case s.last == nil || s.last.isDone():
				s.blocked = false
			case !r.isBlocked(s):
				calm = false
			default:
				s.blocked, r.waits = true, true
			}
		}
		if calm {
			return
		}
	}
	r.t.Fatal("the sessions neither work nor wait")
}

// patience is how long a session tries anew what SQLite says is locked.
const patience = 300 * time.Millisecond

func (s *session) busyCount() int64 {
	if s.busy == nil {
		return 0
	}
	return s.busy()
}

// isBlocked reports whether s, which has not done its step, waits for the other session.
func (r *run) isBlocked(s *session) bool {
	need := 1
	for _, other := range r.sessions {
		if other == s {
			continue
		}
		if other.last == nil || other.last.isDone() && other.end != open {
			return false // it holds nothing
		}
		if r.d.engine == mariadb && other.blocked && !other.last.isDone() {
			need = 2 // the count is of both
		}
	}
	if r.d.engine == sqlite3 {
		return s.busyCount() > s.before
	}
	n, err := r.d.waits(r.tables.admin, r.sessionName(s))
	if err != nil {
		r.t.Fatal(err)
	}
	return n >= need
}

// sessionName is the name of its connections in PostgreSQL.
func (r *run) sessionName(s *session) string { return s.name + r.tables.suffix }

// loop does the steps that the session is given, until it has been refused.
func (s *session) loop(ctx context.Context) {
	for i := range s.in {
		if s.end != refused && s.end != aborted {
			if s.run.inTx != nil && s.end == open && claims(i.op) {
				s.whole(ctx, i)
			} else if err := s.do(ctx, i.op); err != nil {
				s.fail(err)
			}
		}
		i.finish()
	}
	if s.tx != nil {
		s.tx.Rollback()
	}
}

// fail ends the session's part.
func (s *session) fail(err error) {
	s.err, s.end = err, aborted
	if errors.Is(err, errStale) || errors.Is(err, fence.ErrStale) {
		s.end = refused
	}
	if s.tx != nil {
		s.tx.Rollback()
		s.tx = nil
	}
}

// whole is a transaction that the guard makes, from its claim to its end. When the guard
// repeats it, the steps are done anew.
func (s *session) whole(ctx context.Context, claim *issued) {
	steps := []*issued{claim}
	err := s.run.inTx(ctx, s, func(tx *sql.Tx) error {
		s.tx = tx
		defer func() { s.tx = nil }()
		for n := 0; ; n++ {
			if n == len(steps) {
				i, more := <-s.in
				if !more {
					return errors.New("the schedule ends within a transaction")
				}
				steps = append(steps, i)
			}
			switch i := steps[n]; i.do {
			case "commit":
				s.commitBegin = s.run.clock.Add(1)
				return nil
			case "rollback":
				return errRollback
			default:
				if err := s.do(ctx, i.op); err != nil {
					return err
				}
				i.finish()
			}
		}
	})
	switch {
	case err == nil:
		s.commitEnd, s.end = s.run.clock.Add(1), committed
	case errors.Is(err, errRollback):
		s.end = rolledBack
	default:
		s.fail(err)
	}
	for _, i := range steps {
		i.finish()
	}
}

// do carries out a step. The connections to SQLite wait for nothing by themselves, so that it
// is seen who waits; but what is in a transaction of the guard's is for that to try anew.
func (s *session) do(ctx context.Context, o op) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		err := s.try(ctx, o)
		if err == nil || s.run.inTx != nil || !isBusy(err) || time.Now().After(deadline) {
			return err
		}
	}
}

func (s *session) try(ctx context.Context, o op) (err error) {
	r := s.run
	if known, err := r.checker.do(ctx, s, o); known || err != nil {
		return err
	}
	switch o.do {
	case "begin":
		s.end, s.commitBegin, s.commitEnd = open, 0, 0
		if r.inTx == nil {
			s.tx, err = s.db.BeginTx(ctx, &sql.TxOptions{Isolation: r.c.level})
		}
		return err
	case "commit":
		s.commitBegin = r.clock.Add(1)
		if err := s.tx.Commit(); err != nil {
			return err
		}
		s.tx, s.end, s.commitEnd = nil, committed, r.clock.Add(1)
		return nil
	case "rollback":
		err := s.tx.Rollback()
		s.tx, s.end = nil, rolledBack
		return err
	case "outside", "read":
		var q querier = s.db
		if o.do == "read" && s.tx != nil {
			q = s.tx
		}
		return q.QueryRowContext(ctx, r.sql("SELECT v FROM {doc} WHERE id = ?"), o.row).Scan(&s.read)
	case "set":
		return s.exec(ctx, "UPDATE {doc} SET v = ? WHERE id = ?", s.read+s.number, o.row)
	case "add":
		return s.exec(ctx, "UPDATE {doc} SET v = v + ? WHERE id = ?", s.number, o.row)
	case "insert":
		return s.exec(ctx, "INSERT INTO {log} (id, v) VALUES (?, ?)", o.row, s.number)
	}
	return fmt.Errorf("no such step: %v", o)
}

func (s *session) exec(ctx context.Context, statement string, args ...any) error {
	_, err := s.tx.ExecContext(ctx, s.run.sql(statement), args...)
	return err
}

// sql puts the names of tables and parameters into a statement.
func (r *run) sql(statement string) string {
	return bind(r.d.engine, strings.NewReplacer("{doc}", r.tables.doc, "{mark}", r.tables.mark, "{log}", r.tables.log).Replace(statement))
}

// outcome looks at the data. Old adds 10 to what was 100, or to nothing, and New 1.
func (r *run) outcome() (o outcome) {
	r.t.Helper()
	o.waits = r.waits
	for _, name := range []string{"O", "N"} {
		s := r.sessions[name]
		switch s.end {
		case refused:
			o.stale = true
		case aborted:
			o.codes = append(o.codes, code(s.err))
		}
	}
	old, new := r.sessions["O"], r.sessions["N"]
	sum := number(r.t, r.tables.admin, r.sql("SELECT (SELECT sum(v) FROM {doc}) + (SELECT coalesce(sum(v), 0) FROM {log})")) % 100
	has := sum/10 > 0 // Old's effect
	switch {
	case old.end != committed && has:
		o.bad = "what Old has not committed is there"
	case old.end != committed || new.end != committed:
	case old.commitBegin > new.commitEnd && has:
		o.bad = "Old's effect was committed after New had committed"
	case old.commitEnd < new.commitBegin && !has:
		o.bad = "New wrote over Old's effect, which it had not read"
	}
	if new.end == committed && sum%10 == 0 {
		o.bad = "New's effect is lost"
	}
	return o
}
