package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

// record is one line of --json. Times are Unix times, and both they and durations are in
// seconds.
type record struct {
	Time  float64 `json:"time"`
	Event string  `json:"event"`
	keyJSON
	Token    holdfast.Token `json:"token,omitempty"`
	Owner    string         `json:"owner,omitempty"`
	Deadline float64        `json:"deadline,omitempty"` // the lease holds until then if it is never extended again
	Waited   float64        `json:"waited,omitempty"`
	Held     float64        `json:"held,omitempty"`
	Left     float64        `json:"left,omitempty"` // validity
	Holder   *holderRecord  `json:"holder,omitempty"`
	Cause    string         `json:"cause,omitempty"` // of a loss; see lossCause
	Code     *int           `json:"code,omitempty"`
	Error    string         `json:"error,omitempty"`
}

// holderRecord is who holds the key that is waited for. Its owner stays out: whoever
// knows it could release the key.
type holderRecord struct {
	Label string         `json:"label,omitempty"`
	Token holdfast.Token `json:"token,omitempty"`
	Since float64        `json:"since,omitempty"`
	TTL   float64        `json:"ttl,omitempty"`
}

// reporter tells stderr for what we wait, and what becomes of the lease. It is the
// Observer of the run.
type reporter struct {
	key     string
	json    bool     // records instead of text
	verbose bool     // also what goes well
	outer   []string // owners of the leases around us

	lost     chan loss     // gets the loss of the lease
	nested   chan struct{} // gets word that a lease around us holds the key
	waits    chan struct{} // gets word of a refusal
	acquired chan struct{} // closed when the wait is over
	told     chan struct{} // closed when the goroutine that tells of it has ended

	mu      sync.Mutex
	why     error             // of the last attempt to acquire; nil before the first
	faults  map[string]string // of each node, as last seen
	failing bool              // extensions fail, and that has been told
}

// newReporter begins to tell people of a wait.
func newReporter(key string) *reporter {
	r := makeReporter(key)
	go (&teller{r: r, began: time.Now()}).tell()
	return r
}

func makeReporter(key string) *reporter {
	return &reporter{key: key, outer: outerOwners(), faults: map[string]string{},
		lost: make(chan loss, 1), nested: make(chan struct{}, 1), waits: make(chan struct{}, 1),
		acquired: make(chan struct{}), told: make(chan struct{})}
}

// reporter begins to tell of a wait, if there is to be one. The store is asked who holds the key,
// if it can tell.
func (f *claimFlags) reporter(key string, st store.Store, json, verbose bool) *reporter {
	r := makeReporter(key)
	r.json, r.verbose = json, verbose
	t := &teller{r: r, began: time.Now(), still: f.nonblock}
	if !r.json && stderr.isTerminal() {
		inspector, _ := st.(store.Inspector)
		t.asker = &asker{inspector: inspector, key: key}
	}
	go t.tell()
	return r
}

// tell writes a record, or the text that says the same to people; an empty one says
// nothing.
func (r *reporter) tell(rec record, text string) {
	if !r.json {
		if text != "" {
			say("%s", text)
		}
		return
	}
	rec.Time, rec.keyJSON = unixTime(time.Now()), jsonKey(r.key)
	if line, err := json.Marshal(rec); err == nil { // it holds nothing that JSON cannot say
		stderr.say(string(line))
	}
}

// aside is a text of what goes well.
func (r *reporter) aside(format string, args ...any) string {
	if !r.verbose {
		return ""
	}
	return fmt.Sprintf(format, args...)
}

// failed tells why there is no exit code of CMD to pass on. Where that has been told, what
// it returns has the code only.
func (r *reporter) failed(err error) error {
	e, ok := errors.AsType[*exit](err)
	if !r.json || !ok || e.err == nil {
		return err
	}
	r.tell(record{Event: "failed", Code: &e.code, Error: e.err.Error()}, "")
	return &exit{code: e.code}
}

// Observe implements [holdfast.Observer].
func (r *reporter) Observe(_ context.Context, e holdfast.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch e := e.(type) {
	case holdfast.Waiting:
		r.why = e.Err
		poke(r.waits)
		if heldAround(e.Err, r.outer) {
			poke(r.nested)
		}
	case holdfast.Acquired:
		r.tell(record{Event: "acquired", Token: e.Token, Owner: e.Owner, Deadline: unixTime(time.Now().Add(e.Validity)), Waited: e.Waited.Seconds()},
			r.aside("acquired %q after %v, token %v", e.Key, rounded(e.Waited), e.Token))
	case holdfast.AtRisk:
		text := ""
		if !r.failing {
			text = fmt.Sprintf("cannot extend the lease on %q, %v left: %v", e.Key, rounded(e.Left), e.Err)
		}
		r.failing = true
		r.tell(record{Event: "at-risk", Token: e.Token, Left: e.Left.Seconds(), Error: e.Err.Error()}, text)
	case holdfast.Extended:
		if r.failing {
			r.tell(record{Event: "extended", Token: e.Token, Left: e.Validity.Seconds()}, fmt.Sprintf("the lease on %q is extended again", e.Key))
		}
		r.failing = false
	case holdfast.Lost:
		select {
		case r.lost <- loss{e, time.Now().Add(-e.Overrun)}:
		default: // there is one lease, which is lost once
		}
	}
}

// loss is the loss of a lease, and when its validity ended.
type loss struct {
	holdfast.Lost
	ended time.Time
}

// loss tells of the loss of the lease.
func (r *reporter) loss(l loss, text string) {
	r.tell(record{Event: "lost", Token: l.Token, Held: l.Held.Seconds(), Cause: lossCause(l.Err), Error: l.Err.Error()}, text)
}

// lossCause is a word for why a lease was lost; there is max-hold beside these.
func lossCause(err error) string {
	if _, ok := errors.AsType[*holdfast.ExpiredError](err); ok {
		return "expired"
	}
	if lost, ok := errors.AsType[*holdfast.LostError](err); ok && lost.By != nil {
		return "taken"
	}
	return "gone"
}

// waited ends the telling of a wait.
func (r *reporter) waited() {
	close(r.acquired)
	<-r.told
}

// held is who refused the last attempt; nil where something else did.
func (r *reporter) held() *holdfast.HeldError {
	r.mu.Lock()
	defer r.mu.Unlock()
	held, _ := errors.AsType[*holdfast.HeldError](r.why)
	return held
}

// advice is what people can do about what we wait for.
func (r *reporter) advice() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why == nil {
		return answerAdvice
	}
	return advice(r.why)
}

var durations = regexp.MustCompile(`\b([0-9.]+(h|m|s|ms|µs|ns))+\b`)

// reason says why we wait, and in sort the same without what changes all the time.
func (r *reporter) reason() (text, sort string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why == nil {
		return "no answer from the store yet", ""
	}
	text = r.why.Error()
	if held, ok := errors.AsType[*holdfast.HeldError](r.why); ok && held.Holder.Owner != "" {
		return text, "held by " + held.Holder.Owner
	}
	nodes, ok := errors.AsType[*redlock.QuorumError](r.why)
	if !ok {
		return text, durations.ReplaceAllString(text, "")
	}
	// Not every attempt hears of every node: what is new is a fault that is new for its node.
	for _, n := range nodes.Nodes {
		if n.Err != nil {
			r.faults[n.Node] = durations.ReplaceAllString(n.Error(), "")
		}
	}
	return text, strings.Join(slices.Sorted(maps.Values(r.faults)), "; ")
}

// poke leaves word in a channel with room for one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// rounded cuts a duration to what people read.
func rounded(d time.Duration) time.Duration { return d.Round(100 * time.Millisecond) }

// unixTime is a time as records have it.
func unixTime(t time.Time) float64 { return float64(t.UnixMilli()) / 1000 }
