package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
)

// fakeNode does in Go what the scripts do, by the clock of a bubble, so that tests can hold
// back single requests and move single clocks.
type fakeNode struct {
	name   string
	before func(op string) error // called before a request is executed: may block, or refuse it

	mu    sync.Mutex
	ahead time.Duration // of its clock
	votes map[string]fakeVote
	marks map[string]int64
	runs  map[string]int // executed calls by kind
	extra map[string]string
	info  string // added to INFO
	mute  bool   // executes, and its answers get lost
	queue map[string][]fakePlace
	subs  map[string]func(string) // by channel; nil where nobody may subscribe
	dumb  bool                    // messages get lost
}

type fakePlace struct {
	owner string
	birth int64
}

type fakeVote struct {
	owner string
	until time.Time
}

func newFake(name string) *fakeNode {
	return &fakeNode{name: name, votes: map[string]fakeVote{}, marks: map[string]int64{}, runs: map[string]int{}, extra: map[string]string{}, queue: map[string][]fakePlace{}}
}

// park gives owner a place, unless it has one.
func (f *fakeNode) park(key, owner string, birth int64) {
	if f.rank(key, owner) >= 0 {
		return
	}
	q := append(f.queue[key], fakePlace{owner, birth})
	slices.SortFunc(q, func(a, b fakePlace) int {
		return cmp.Or(cmp.Compare(a.birth, b.birth), cmp.Compare(a.owner, b.owner))
	})
	f.queue[key] = q
}

// rank is owner's place, from 0, or -1.
func (f *fakeNode) rank(key, owner string) int64 {
	return int64(slices.IndexFunc(f.queue[key], func(p fakePlace) bool { return p.owner == owner }))
}

func (f *fakeNode) unpark(key, owner string) {
	f.queue[key] = slices.DeleteFunc(f.queue[key], func(p fakePlace) bool { return p.owner == owner })
}

func (f *fakeNode) tell(w, text string) bool {
	deliver := f.subs["holdfast:"+strings.Split(w, ".")[2]]
	if deliver != nil && !f.dumb {
		go deliver(text)
	}
	return deliver != nil
}

// handOver reserves the vote for the first live waiter, and tells the one behind it.
func (f *fakeNode) handOver(key, from string, reserve, token, now int64, direct bool) {
	first := func() string {
		if len(f.queue[key]) == 0 {
			return ""
		}
		return f.queue[key][0].owner
	}
	limit := now + aheadLimit.Microseconds()
	what := ""
	w := first()
	for ; w != ""; w = first() {
		if w != from {
			mark := max(f.marks[key], now-markMargin.Microseconds())
			s := token
			if s <= mark || s > limit {
				s = mark + 1
			}
			if what = fmt.Sprintf("w1 wake %d", mark); s <= limit {
				f.marks[key] = s
				f.votes[key] = fakeVote{w, time.Now().Add(time.Duration(reserve) * time.Millisecond)}
				if what = fmt.Sprintf("w1 wake %d", s); direct {
					what = fmt.Sprintf("w1 grant %d %d.%06d %d abc", s, now/1e6, now%1e6, reserve)
				}
			}
			if f.tell(w, fmt.Sprintf("%s %s %s %s", what, w, from, key)) {
				break
			}
			delete(f.votes, key)
		}
		f.unpark(key, w)
	}
	if w == "" {
		return
	}
	f.unpark(key, w)
	if f.votes[key].owner != w {
		return
	}
	for n := first(); n != "" && now-birthOf(n) > 1e6 && !f.tell(n, fmt.Sprintf("w1 next %d %s %s", reserve, n, key)); n = first() {
		f.unpark(key, n)
	}
}

func birthOf(owner string) int64 {
	n, _ := strconv.ParseInt(strings.Split(owner, ".")[1], 10, 64)
	return n
}

func fakes(n int) (fs []*fakeNode, nodes []Node) {
	for i := range n {
		f := newFake("n" + strconv.Itoa(i))
		fs, nodes = append(fs, f), append(nodes, f)
	}
	return fs, nodes
}

// bubble runs f with time that only moves while everybody waits.
func bubble(t *testing.T, f func(t *testing.T)) { synctest.Test(t, f) }

// fakeStore is a store in a bubble.
func fakeStore(t *testing.T, o Options, nodes ...Node) *Store {
	t.Helper()
	s, err := New(o, nodes...)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	s.clock = clock.Clock{Boot: func() time.Duration { return time.Since(start) }}
	return s
}

func (f *fakeNode) Name() string { return f.name }

var fakeOps = map[string]string{"-- VOTE": "vote", "-- KEEP": "keep", "-- RELEASE": "release", "-- The node's": "record", "-- The age": "promoted", "-- Whether": "probe"}

func opOf(text string) string {
	for begin, op := range fakeOps {
		if strings.HasPrefix(text, begin) {
			return op
		}
	}
	return "?"
}

func (f *fakeNode) wait(op string) error {
	f.mu.Lock()
	before := f.before
	f.mu.Unlock()
	if before == nil {
		return nil
	}
	return before(op)
}

func (f *fakeNode) set(before func(op string) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = before
}

func (f *fakeNode) loseReplies(mute bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mute = mute
}

func (f *fakeNode) muted() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mute
}

func (f *fakeNode) owner(key string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if v := f.votes[key]; time.Now().Before(v.until) {
		return v.owner
	}
	return ""
}

// forget loses a key's vote, as a restart does.
func (f *fakeNode) forget(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.votes, key)
}

func (f *fakeNode) Run(_ context.Context, calls ...Call) []Reply {
	replies := make([]Reply, len(calls))
	for i, c := range calls {
		op := opOf(c.Script.Text)
		if err := f.wait(op); err != nil {
			replies[i].Err = err
			continue
		}
		if op == "release" && strings.Contains(c.Script.Text, "w1 grant") {
			op = "direct"
		}
		replies[i] = f.exec(op, c.Keys, c.Args)
		if f.muted() {
			replies[i] = Reply{Err: errGone}
		}
	}
	return replies
}

func (f *fakeNode) exec(op string, keys, args []string) Reply {
	f.mu.Lock()
	defer f.mu.Unlock()
	direct := op == "direct" // a RELEASE whose hand-over may be a grant
	if direct {
		op = "release"
	}
	f.runs[op]++
	now := time.Now().Add(f.ahead).UnixMicro()
	key := keys[0]
	cur := f.votes[key]
	if !time.Now().Before(cur.until) {
		cur = fakeVote{}
	}
	mark, limit := max(f.marks[key], now-markMargin.Microseconds()), now+aheadLimit.Microseconds()
	num := func(i int) int64 { n, _ := strconv.ParseInt(args[i], 10, 64); return n }
	answer := func(v ...any) Reply { return Reply{Value: v} }
	switch op {
	case "vote":
		s := num(2)
		until := time.Now().Add(time.Duration(num(1)) * time.Millisecond)
		if cur.owner != "" && cur.owner != args[0] {
			rank := int64(-1)
			if len(args) > 3 {
				if mark < s && s <= limit {
					f.park(key, args[0], min(num(3), now))
				}
				rank = f.rank(key, args[0])
			}
			return answer("BUSY", mark, now, cur.owner, time.Until(cur.until).Milliseconds(), rank)
		}
		mine := cur.owner != ""
		if mine && cur.until.Before(until) {
			f.votes[key] = fakeVote{cur.owner, until}
		}
		why := "LOW"
		switch {
		case s > limit:
			why = "AHEAD"
		case s > mark:
			f.marks[key] = s
			if !mine {
				f.votes[key] = fakeVote{args[0], until}
			}
			return Reply{Value: now}
		case mine && s == f.marks[key]:
			return Reply{Value: now}
		}
		if mine {
			why = "KEPT"
		}
		return answer(why, mark, now)
	case "keep":
		switch cur.owner {
		case args[0]:
			if until := time.Now().Add(time.Duration(num(1)) * time.Millisecond); cur.until.Before(until) {
				f.votes[key] = fakeVote{cur.owner, until}
			}
			return Reply{Value: now}
		case "":
			return answer("NONE")
		}
		return answer("BUSY", cur.owner, time.Until(cur.until).Milliseconds())
	case "release":
		freed := int64(0)
		if cur.owner == args[0] {
			delete(f.votes, key)
			freed = 1
		}
		s, did := num(1), freed
		if s > mark && s <= limit {
			f.marks[key], mark = s, s
		}
		if len(args) > 2 && args[2] == "1" {
			f.unpark(key, args[0])
		}
		if len(args) > 5 && mark < num(6) && num(6) <= limit {
			f.park(key, args[5], min(num(7), now))
			did += 2
		}
		if freed == 1 && len(args) > 3 && args[3] != "0" {
			f.handOver(key, args[0], num(3), num(4), now, direct)
		}
		if s > limit {
			return answer("AHEAD", did, now)
		}
		return Reply{Value: did}
	case "probe":
		return Reply{Value: "OK"}
	case "record":
		if f.extra["maxttl"] == "" && args[2] == "1" {
			f.extra["maxttl"], f.extra["trust"] = args[0], args[1]
		}
		if f.extra["maxttl"] != "" {
			return answer(f.extra["maxttl"], f.extra["trust"])
		}
		return answer(args[0], args[1])
	}
	return Reply{Err: &ServerError{"ERR unknown script"}}
}

func (f *fakeNode) Pinned(_ context.Context, _ string, fn func(do func(args ...string) (any, error)) error) error {
	return fn(func(args ...string) (any, error) {
		if err := f.wait("admit"); err != nil {
			return nil, err
		}
		switch args[0] {
		case "INFO":
			f.mu.Lock()
			defer f.mu.Unlock()
			if args[1] == "server" {
				return "redis_version:7.0.15\r\nredis_mode:standalone\r\nrun_id:" + f.name + "\r\nuptime_in_seconds:100000\r\nserver_time_usec:" +
					strconv.FormatInt(time.Now().Add(f.ahead).UnixMicro(), 10) + "\r\n" + f.info, nil
			}
			return "role:master\r\nmaster_replid:abc\r\nsecond_repl_offset:-1\r\n", nil
		case "EVAL":
			n, _ := strconv.Atoi(args[2])
			r := f.exec(opOf(args[1]), args[3:3+n], args[3+n:])
			return r.Value, r.Err
		case "SCRIPT":
			return NewScript(args[2]).SHA1, nil
		}
		return nil, &ServerError{"ERR unknown command"}
	})
}

func (f *fakeNode) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	f.mu.Lock()
	if f.subs == nil {
		f.mu.Unlock()
		return errors.ErrUnsupported
	}
	f.subs[channel] = deliver
	f.mu.Unlock()
	up()
	<-ctx.Done()
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.subs, channel)
	return ctx.Err()
}

// subscribable lets clients subscribe to the nodes.
func subscribable(fs []*fakeNode) {
	for _, f := range fs {
		f.subs = map[string]func(string){}
	}
}
