//go:build holdfast_rules

package rules

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/redlock"
)

// wire stands between one store and one server. Faults keep single requests or replies.
type wire struct {
	e      *env
	number int // of the node, from 1
	name   string

	mu     sync.Mutex
	node   redlock.Node
	faults []*fault
	done   map[string]int // executed requests, by operation
	last   map[string]redlock.Call
	words  map[string]string // first word of the last answer
	mail   chan func()       // messages that are held back
}

func (w *wire) Name() string { return w.name }

func (w *wire) behind() redlock.Node {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.node
}

// Run meets at most one fault.
func (w *wire) Run(_ context.Context, calls ...redlock.Call) []redlock.Reply {
	if f := w.meet(calls); f != nil {
		return f.apply(w, calls)
	}
	return w.pass(calls)
}

func (w *wire) Pinned(ctx context.Context, key string, fn func(do func(args ...string) (any, error)) error) error {
	return w.behind().Pinned(ctx, key, fn)
}

func (w *wire) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	return w.behind().Subscribe(ctx, channel, func(payload string) {
		w.mu.Lock()
		mail := w.mail
		w.mu.Unlock()
		if mail == nil {
			deliver(payload)
			return
		}
		mail <- func() { deliver(payload) }
	}, up)
}

// holdMail keeps messages back; what is received from the channel delivers one.
func (w *wire) holdMail() <-chan func() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.mail = make(chan func(), 16)
	return w.mail
}

// pass sends calls to the server. It goes by its own limit: what was held back arrives
// although nobody waits for it any more.
func (w *wire) pass(calls []redlock.Call) []redlock.Reply {
	w.e.passing.Add(1)
	defer w.e.passing.Add(-1)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	replies := w.behind().Run(ctx, calls...)
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, c := range calls {
		if replies[i].Err == nil {
			w.done[operation(c)]++
			w.last[operation(c)] = c
			switch v := replies[i].Value.(type) {
			case []any:
				w.words[operation(c)], _ = v[0].(string)
			case int64:
				w.words[operation(c)] = "DONE"
			}
		}
	}
	return replies
}

// count is how many requests of an operation the server has executed.
func (w *wire) count(op string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.done[op]
}

// word is what the server answered to the last request of an operation.
func (w *wire) word(op string) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.words[op]
}

// sent is the last executed request of an operation.
func (w *wire) sent(op string) redlock.Call {
	w.mu.Lock()
	defer w.mu.Unlock()
	c, found := w.last[op]
	if !found {
		w.e.t.Fatalf("node %d has executed no %s", w.number, op)
	}
	return c
}

// resend sends the last request of an operation again, with one argument changed.
func (w *wire) resend(op string, arg int, value string) {
	c := w.sent(op)
	c.Args = slices.Clone(c.Args)
	c.Args[arg] = value
	if r := w.pass([]redlock.Call{c})[0]; r.Err != nil {
		w.e.t.Fatalf("%s again: %v", op, r.Err)
	}
}

// operation is the first word of a script: VOTE, KEEP, RELEASE.
func operation(c redlock.Call) string {
	word, _, _ := strings.Cut(strings.TrimPrefix(c.Script.Text, "-- "), " ")
	return word
}

// Arguments of the scripts.
const (
	argTTL   = 1 // of VOTE and KEEP
	argStamp = 2 // of VOTE
)

// fault is what happens to the requests of one operation, at some of a store's nodes, until
// it ends.
type fault struct {
	e       *env
	op      string
	wires   []*wire
	from    int64 // VOTE: of this stamp or a later one
	refuses bool
	twice   bool
	before  bool // holds requests
	after   bool // holds replies
	gate    chan struct{}
	once    sync.Once
	hits    atomic.Int64
	last    atomic.Int64 // stamp of the last VOTE that it held
}

// stamp is that of the VOTE which is held.
func (f *fault) stamp() int64 { return f.last.Load() }

// fault makes one for the given nodes, or for all where none is named. It does nothing until
// it is told what.
func (c *client) fault(op string, nodes ...int) *fault {
	f := &fault{e: c.e, op: op, gate: make(chan struct{})}
	for _, w := range c.wires {
		if len(nodes) == 0 || slices.Contains(nodes, w.number) {
			f.wires = append(f.wires, w)
		}
	}
	c.e.faults = append(c.e.faults, f)
	return f
}

// since limits the fault to stamps of s and above.
func (f *fault) since(s int64) *fault { f.from = s; return f }

// refuse answers an error of the server: no vote, and nothing has happened.
func (f *fault) refuse() *fault { f.refuses = true; return f.begin() }

// hold keeps requests until the fault ends.
func (f *fault) hold() *fault { f.before = true; return f.begin() }

// holdReplies lets the requests be executed and keeps the replies until the fault ends.
func (f *fault) holdReplies() *fault { f.after = true; return f.begin() }

// repeat holds requests, and has them executed twice then, as a retransmission is; the second
// reply counts.
func (f *fault) repeat() *fault { f.twice = true; return f.hold() }

func (f *fault) begin() *fault {
	for _, w := range f.wires {
		w.mu.Lock()
		w.faults = append(w.faults, f)
		w.mu.Unlock()
	}
	return f
}

// end lets what is held go on, and later requests pass.
func (f *fault) end() {
	f.stop()
	f.once.Do(func() { close(f.gate) })
}

// stop lets later requests pass.
func (f *fault) stop() {
	for _, w := range f.wires {
		w.mu.Lock()
		w.faults = slices.DeleteFunc(w.faults, func(o *fault) bool { return o == f })
		w.mu.Unlock()
	}
}

// await waits until the fault has met a request at each of its nodes.
func (f *fault) await() {
	f.e.t.Helper()
	f.e.until(fmt.Sprintf("a fault of %s at %d nodes", f.op, len(f.wires)), func() bool { return int(f.hits.Load()) >= len(f.wires) })
}

func (w *wire) meet(calls []redlock.Call) *fault {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.faults {
		if f.matches(calls[0]) {
			return f
		}
	}
	return nil
}

func (f *fault) matches(c redlock.Call) bool {
	if operation(c) != f.op {
		return false
	}
	if f.from == 0 {
		return true
	}
	stamp, err := strconv.ParseInt(c.Args[argStamp], 10, 64)
	return err == nil && stamp >= f.from
}

var errOver = errors.New("the test is over")

func (f *fault) apply(w *wire, calls []redlock.Call) []redlock.Reply {
	if f.before {
		if f.op == "VOTE" {
			stamp, _ := strconv.ParseInt(calls[0].Args[argStamp], 10, 64)
			f.last.Store(stamp)
		}
		f.hits.Add(1)
		if !f.wait() {
			return failed(calls, errOver)
		}
	}
	if f.refuses {
		f.hits.Add(1)
		return failed(calls, &redlock.ServerError{Text: "LOADING refused by the test"})
	}
	replies := w.pass(calls)
	if f.twice {
		replies = w.pass(calls)
	}
	if f.after {
		f.hits.Add(1)
		if !f.wait() {
			return failed(calls, errOver)
		}
	}
	return replies
}

// wait answers false where the fault outlives its scenario.
func (f *fault) wait() bool {
	select {
	case <-f.gate:
		return true
	case <-f.e.over:
		return false
	}
}

func failed(calls []redlock.Call, err error) []redlock.Reply {
	replies := make([]redlock.Reply, len(calls))
	for i := range replies {
		replies[i].Err = err
	}
	return replies
}

// patience bounds every wait for something that must happen.
const patience = 20 * time.Second
