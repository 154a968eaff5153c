package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/store"
)

// exitFree: nobody holds the key that status or break was asked about.
const exitFree = 2

// inspector is the store as what tells who holds a key.
func (o *opened) inspector() (store.Inspector, error) {
	if i, ok := o.Store.(store.Inspector); ok {
		return i, nil
	}
	return nil, &exit{exitFailed, fmt.Errorf("%w: this store cannot tell who holds a key", store.ErrUnsupported)}
}

// inspector opens the store for a verb that only looks at it, or breaks. Whoever calls it calls
// done in the end.
func (f storeFlags) inspector() (i store.Inspector, done func(), err error) {
	st, err := f.open()
	if err != nil {
		return nil, nil, failure(err)
	}
	if i, err = st.inspector(); err != nil {
		st.close()
		return nil, nil, err
	}
	return i, st.close, nil
}

// A first contact may take longer than a server has for an answer, where that is short. A store that
// has been waited for is not asked again.
const (
	inspectTries = 3
	inspectAgain = time.Second
)

// inspectKey asks who holds a key, and whose vote each server has, where the store
// tells that.
func inspectKey(ctx context.Context, i store.Inspector, key string) (store.Holder, []nodeVote, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	began := time.Now()
	for try := 1; ; try++ {
		var nodes nodeVotes
		h, err := i.Inspect(store.WithTrace(ctx, nodes.tell), key)
		switch {
		case err == nil:
			return h, nodes.sorted(), nil
		case try == inspectTries || time.Since(began) > inspectAgain || !errors.Is(err, store.ErrUnavailable):
			return h, nil, refusal(asked("status", key, answerLimit, err))
		}
	}
}

// refusal is the end of a verb whose store does not do what it was asked for. Where it is
// invalid, that is the store or its key, not the command line.
func refusal(err error) error {
	if text := advice(err); text != "" {
		err = fmt.Errorf("%w; %s", err, text)
	}
	return &exit{exitFailed, err}
}

// What a user can do. The URL stands in theURL, or in theMarks.
const (
	theURL   = "--store (or " + storeVariable + ")"
	theMarks = "--marks (or " + marksVariable + ")"

	reachAdvice  = "check that " + theURL + " names servers that run and can be reached from this machine"
	answerAdvice = "check that " + theURL + " names servers that run, each by its own port, and TLS where that port has it and only there"
	noTLSAdvice  = "the server has no TLS on that port: take it out of " + theURL + " (redis and etcd without the s, sslmode=disable of postgres, no tls= of mysql), or give it to the server"
	loginAdvice  = "look at the user and the password in " + theURL + ", or at its password-file="
)

// advice is what a user of the command can do about an error of the store, or empty.
func advice(err error) string {
	dial, _ := errors.AsType[*net.OpError](err)
	_, unknownHost := errors.AsType[*net.DNSError](err)
	says := func(text string) bool { return strings.Contains(err.Error(), text) }
	saysAny := func(texts ...string) bool { return slices.ContainsFunc(texts, says) }
	switch {
	case says("TLS certificate is not trusted"):
		return "they are tls-ca= and tls-server-name= in the URL"
	case says("x509: "):
		return "see tls-ca= and tls-server-name= (sslrootcert= of postgres) in holdfast run --help"
	case strings.HasSuffix(err.Error(), "server refused TLS connection"), // else pgx has gone on without TLS
		saysAny("server does not support TLS", "does not look like a TLS handshake", "authentication handshake failed"):
		return noTLSAdvice
	case saysAny("NOAUTH", "WRONGPASS", "without any password configured", "refuses the user or its password", "refuses the credentials"):
		return loginAdvice
	case says("is not ZooKeeper's protocol"): // and says what to do
		return ""
	case dial != nil && dial.Op == "dial", unknownHost, says("Error while dialing"):
		return reachAdvice
	case saysAny(wrongProtocol...):
		return answerAdvice
	case says("there is no session with ZooKeeper"):
		return reachAdvice
	}
	return ""
}

// wrongProtocol are words for what servers answer, or do not, to the protocol of another kind of
// server, or to one with TLS where they have none or without it where they have.
var wrongProtocol = []string{"no answer", "no reply in time", "deadline exceeded", "i/o timeout", "unknown message type", "unexpected message", "closed before anything was answered",
	"error reading server preface", "malformed packet", "busy buffer", "unexpected EOF"}

// refusalOfMarks is [refusal] for marks.
func refusalOfMarks(err error) error {
	if text := advice(err); text != "" {
		err = fmt.Errorf("%w; %s", err, strings.ReplaceAll(text, theURL, theMarks))
	}
	return &exit{exitFailed, err}
}

// asked wraps an error of a store with what was asked.
func asked(verb, key string, limit time.Duration, err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: no answer within %v: %w", store.ErrUnavailable, limit, err)
	}
	if key == "" {
		return fmt.Errorf("%s: %w", verb, err)
	}
	return fmt.Errorf("%s %s: %w", verb, strconv.Quote(key), err)
}

// nodeVote is whose vote one server of a store has.
type nodeVote struct {
	Node   string   `json:"node"`
	Answer string   `json:"answer"` // the store's word
	Error  string   `json:"error,omitempty"`
	Label  string   `json:"label,omitempty"`
	Owner  string   `json:"owner,omitempty"`
	TTL    *float64 `json:"ttl,omitempty"`
	err    error
	holder store.Holder
}

// nodeVotes collects what the servers say.
type nodeVotes struct {
	mu  sync.Mutex
	all []nodeVote
}

func (n *nodeVotes) tell(e store.NodeEvent) {
	if e.Op != "inspect" {
		return
	}
	v := nodeVote{Node: e.Node, Answer: e.Outcome, Label: e.Holder.Label, Owner: e.Holder.Owner, TTL: seconds(e.Holder), err: e.Err, holder: e.Holder}
	if e.Err != nil {
		v.Error = e.Err.Error()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, v)
}

func (n *nodeVotes) sorted() []nodeVote {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := slices.Clone(n.all)
	slices.SortStableFunc(all, func(a, b nodeVote) int { return strings.Compare(a.Node, b.Node) })
	return all
}

func (v nodeVote) String() string {
	switch {
	case v.err != nil:
		return shown(v.Error)
	case v.Owner != "":
		return "vote of " + whose(v.holder) + ", ends " + ends(v.holder)
	case v.Answer == "none":
		return "no vote"
	}
	return shown(v.Answer)
}

// holderJSON is a holder as --json prints it.
type holderJSON struct {
	keyJSON
	State   string     `json:"state"`
	Label   string     `json:"label,omitempty"`
	Owner   string     `json:"owner,omitempty"`
	Token   int64      `json:"token,omitempty"`
	Since   float64    `json:"since,omitempty"`
	TTL     *float64   `json:"ttl,omitempty"`
	NoTTL   bool       `json:"no_ttl,omitempty"`
	Session bool       `json:"session,omitempty"`
	Foreign bool       `json:"foreign,omitempty"`
	Waiting int        `json:"waiting,omitempty"`
	Queue   []queued   `json:"queue,omitempty"`
	Nodes   []nodeVote `json:"nodes,omitempty"`
}

// queued is who waits for a key, as --json prints it.
type queued struct {
	Label  string  `json:"label,omitempty"`
	Owner  string  `json:"owner"`
	Waited float64 `json:"waited"`
}

func jsonHolder(h store.Holder, nodes []nodeVote) holderJSON {
	j := holderJSON{keyJSON: jsonKey(h.Key), State: state(h), Label: h.Label, Owner: h.Owner, Token: int64(h.Token),
		TTL: seconds(h), NoTTL: h.NoTTL, Session: h.Session, Foreign: h.Foreign, Waiting: h.Waiting, Nodes: nodes}
	for _, q := range h.Queue {
		j.Queue = append(j.Queue, queued{q.Label, q.Owner, q.Waited.Seconds()})
	}
	if h.Held > 0 {
		j.Since = unixTime(time.Now().Add(-h.Held))
	}
	return j
}

// state is held, free, or broken: taken from its holder, and not free yet.
func state(h store.Holder) string {
	switch {
	case h.Owner == "":
		return "free"
	case h.Broken:
		return "broken"
	}
	return "held"
}

// seconds is what is left of a grant; nil where there is none, or it has no end.
func seconds(h store.Holder) *float64 {
	if h.Owner == "" || h.NoTTL {
		return nil
	}
	left := h.TTL.Seconds()
	return &left
}

// whose says in words who a holder is.
func whose(h store.Holder) string {
	switch {
	case h.Foreign:
		return "another library's lock"
	case h.Label != "":
		return shown(h.Label)
	}
	return "unknown"
}

// ends says in words when a grant ends.
func ends(h store.Holder) string {
	switch {
	case h.NoTTL:
		return "never by itself"
	case h.Session:
		return "with its session"
	}
	return "in " + rounded(h.TTL).String()
}

// shown is text of a store as a terminal may see it, on one line.
func shown(s string) string {
	plain := func(r rune) bool { return unicode.IsPrint(r) && r != '"' && r != '\\' && r != utf8.RuneError }
	if s != "" && strings.TrimSpace(s) == s && strings.IndexFunc(s, func(r rune) bool { return !plain(r) }) < 0 {
		return s
	}
	return strconv.Quote(s)
}
