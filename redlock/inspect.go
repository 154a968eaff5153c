package redlock

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/internal/clock"
	"github.com/holdfast-go/holdfast/store"
)

var (
	//go:embed inspect.lua
	inspectText string
	//go:embed scan.lua
	scanText string

	inspectScript = NewScript(inspectText)
	scanScript    = NewScript(scanText)
)

var _ store.Inspector = (*Store)(nil)

// Inspect asks every node whose vote it has and answers who has a quorum of them. Where nobody
// has, it answers the owner of the most votes, as long as a quorum may be on the nodes that
// did not answer, or the votes are split: then nobody holds the key, and nobody can have it
// until they end. [store.WithTrace] tells what each node says. It changes nothing on the
// nodes and needs no admission; it waits for each node for at most the node timeout.
//
// Holder.TTL is the time for which a quorum still has the vote, if it is not extended.
// Holder.Held counts from when the holder's claim was first tried, by the clocks of the nodes, and
// so includes its waiting. Holder.Token is always zero: nodes keep no token, but the highest
// stamp that they accepted, and that only for some minutes; it may be higher than the
// holder's token. A vote that no Holdfast client wrote is answered as Foreign, with the vote
// as Owner, whatever it is.
//
// Holder.Waiting and Holder.Queue tell of the claims that have a place in the queue of at
// least one of the nodes that answered, in the order of their first attempts. One is enough,
// since a claim has places only on the nodes that refused it. Waiting may be too low where it
// is above 100 and there are several nodes. Both are empty where there is no queue, as on a
// Redis Cluster; a node whose queue cannot be read, or is another kind of value, counts as one
// without. A vote that a release has reserved for the next in line looks like any other: its
// owner is answered as the holder, although it may not know yet.
//
// It answers a [*QuorumError] where fewer than a quorum of nodes answered, and a
// [*store.InvalidError] where the key holds another kind of value than a lock.
func (s *Store) Inspect(ctx context.Context, key string) (store.Holder, error) {
	vote, err := s.named(ctx, key)
	if err != nil {
		return store.Holder{}, err
	}
	sights, err := s.look(ctx, "inspect", key, vote)
	if err != nil {
		return store.Holder{}, err
	}
	h, err := s.view("inspect", key, sights)
	if err == nil {
		addQueue(&h, sights)
	}
	return h, err
}

// named returns the name of a key's vote, if the key may be asked for.
func (s *Store) named(ctx context.Context, key string) (string, error) {
	vote := s.opts.Prefix + key
	if err := store.CheckKey(key); err != nil {
		return "", err
	}
	if err := checkVote(vote, key); err != nil {
		return "", err
	}
	return vote, ctx.Err()
}

// sight is what one node says of a vote.
type sight struct {
	kind  kind      // none, busy, or noAnswer
	owner string    // where it is busy
	pttl  int64     // ms that remain of a busy vote; negative where it has no end
	now   int64     // the node's clock
	other string    // the type of what is there, where that is no string; kind is busy
	queue seenQueue // where it was asked for
	err   error     // why there was no answer
}

func (s sight) outcome() string {
	if s.other != "" {
		return "holds a " + s.other
	}
	return s.kind.String()
}

// look asks every node for one vote, and who waits for it.
func (s *Store) look(ctx context.Context, op, key, vote string) ([]sight, error) {
	sent := s.clock.Now()
	all, err := s.askAll(ctx, s.opts.NodeTimeout,
		Call{Script: inspectScript, Keys: []string{vote}}, askWaiting(vote, maxQueued))
	if err != nil {
		return nil, err
	}
	sights := make([]sight, len(s.peers))
	for i, p := range s.peers {
		sights[i] = p.see(vote, all[i][0])
		sights[i].queue = readQueue(all[i][1])
		s.tellSight(ctx, op, key, p, sights[i], sent)
	}
	return sights, nil
}

// see reads a node's answer to INSPECT or BREAK.
func (p *peer) see(vote string, r Reply) sight {
	if r.Err != nil {
		return sight{err: permanent(p.name, vote, r.Err)}
	}
	s, err := parseSight(r.Value)
	if err != nil {
		return sight{err: err}
	}
	return s
}

func parseSight(v any) (sight, error) {
	r, isArray := v.([]any)
	if !isArray || len(r) < 2 {
		return sight{}, errReply
	}
	now, isTime := r[1].(int64)
	if !isTime {
		return sight{}, errReply
	}
	s := sight{now: now}
	switch r[0] {
	case "NONE":
		s.kind = none
	case "BROKEN":
		s.kind = ok
	case "BUSY":
		a, err := parseBusy(answer{}, r[2:])
		if err != nil {
			return sight{}, err
		}
		s.kind, s.owner, s.pttl = busy, a.owner, a.pttl
	case "OTHER":
		if len(r) < 3 {
			return sight{}, errReply
		}
		s.kind = busy
		if s.other, _ = r[2].(string); s.other == "" {
			return sight{}, errReply
		}
	default:
		return sight{}, errReply
	}
	return s, nil
}

// tellSight reports what a node says to the trace of a call, if it has one.
func (s *Store) tellSight(ctx context.Context, op, key string, p *peer, seen sight, sent clock.Instant) {
	trace := store.Trace(ctx)
	if trace == nil {
		return
	}
	e := store.NodeEvent{Node: p.name, Op: op, Key: key, Outcome: seen.outcome(), Err: seen.err, Elapsed: s.clock.Since(sent)}
	if seen.kind == busy && seen.other == "" {
		e.Holder = describe(key, seen.owner, seen.now)
		e.Holder.TTL, e.Holder.NoTTL = lifeOf(seen.pttl)
	}
	trace(e)
}

// describe is who an owner is; now is the nodes' clock.
func describe(key, text string, now int64) store.Holder {
	o := parseOwner(text)
	h := store.Holder{Key: key, Owner: text, Label: o.label, Foreign: text != "" && o.foreign(), Broken: o.broken()}
	if !o.foreign() && now > o.birth {
		h.Held = time.Duration(now-o.birth) * time.Microsecond
	}
	return h
}

// lifeOf is what a node's PTTL says; a vote that is there never has zero left.
func lifeOf(pttl int64) (ttl time.Duration, endless bool) {
	if pttl < 0 {
		return 0, true
	}
	return time.Duration(max(pttl, 1)) * time.Millisecond, false
}

// view is what the nodes say together of who holds a key: the owner is empty where no
// quorum can have voted for anybody.
func (s *Store) view(op, key string, sights []sight) (store.Holder, error) {
	votes, free, answered := map[string]int{}, 0, 0
	var other error
	for i, n := range sights {
		if n.kind != noAnswer {
			answered++
		}
		switch {
		case n.other != "":
			other = &store.InvalidError{Field: "key", Value: key,
				Rule: "holds a " + n.other + " on node " + s.peers[i].name + "; a lock needs a key of its own"}
		case n.kind == busy:
			votes[n.owner]++
		case n.kind == none:
			free++
		}
	}
	leader := leading(votes)
	switch {
	case answered < s.q:
		return store.Holder{}, s.undecided(op, sights)
	case votes[leader] < s.q && free > len(sights)-s.q:
		return store.Holder{Key: key}, nil
	case len(votes) == 0 && other != nil:
		return store.Holder{}, other
	case len(votes) == 0:
		return store.Holder{Key: key}, nil
	}
	return s.held(key, leader, sights), nil
}

// leading is the owner of the most votes; of several the one that came first.
func leading(votes map[string]int) (leader string) {
	most := 0
	for w, n := range votes {
		if n > most || n == most && before(parseOwner(w), parseOwner(leader)) {
			leader, most = w, n
		}
	}
	return leader
}

// held describes an owner by its votes: with the time until which a quorum has them.
func (s *Store) held(key, owner string, sights []sight) store.Holder {
	var left, clocks []int64
	for _, n := range sights {
		if n.kind != noAnswer {
			clocks = append(clocks, n.now)
		}
		if n.kind == busy && n.other == "" && n.owner == owner {
			if n.pttl < 0 {
				n.pttl = math.MaxInt64
			}
			left = append(left, n.pttl)
		}
	}
	h := describe(key, owner, nthSmallest((len(clocks)+1)/2, clocks))
	pttl := nthSmallest(len(left)-min(s.q, len(left))+1, left)
	if pttl == math.MaxInt64 {
		pttl = -1
	}
	h.TTL, h.NoTTL = lifeOf(pttl)
	return h
}

// undecided says what each node answered where that is not enough. Nothing has been changed.
func (s *Store) undecided(op string, sights []sight) *QuorumError {
	e := &QuorumError{Op: op, Needed: s.q}
	dead := 0
	var bad refused
	for i, n := range sights {
		e.Nodes = append(e.Nodes, NodeError{Node: s.peers[i].name, Outcome: n.outcome(), Err: n.err})
		if errors.As(n.err, &bad) {
			dead++
		}
	}
	if dead > len(s.peers)-s.q {
		e.kinds = []error{store.ErrInvalid, bad.InvalidError}
	} else {
		e.kinds = []error{store.ErrUnavailable}
	}
	return e
}

// askAll sends the calls to every node, and answers what each one replied within the given
// time. It fails only with the context.
func (s *Store) askAll(ctx context.Context, limit time.Duration, calls ...Call) ([][]Reply, error) {
	all := make([][]Reply, len(s.peers))
	var asking sync.WaitGroup
	for i, p := range s.peers {
		asking.Go(func() { all[i] = p.ask(ctx, limit, calls...) })
	}
	asking.Wait()
	return all, ctx.Err()
}

// ask sends calls and answers within the given time, or when ctx is done, whatever the node's
// client does.
func (p *peer) ask(ctx context.Context, limit time.Duration, calls ...Call) []Reply {
	if err := p.crowded(); err != nil {
		return failed(calls, notAsked{err})
	}
	sent := p.s.clock.Now()
	replied := make(chan []Reply, 1)
	go func() { replied <- p.run(calls...) }()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case r := <-replied:
		if r[0].Err == nil || codeOf(r[0].Err) != "" {
			p.answered()
		}
		return r
	case <-timer.C:
		err := errNoAnswer{limit}
		if limit >= p.s.opts.NodeTimeout {
			p.note(err, sent)
		}
		return failed(calls, err)
	case <-ctx.Done():
		return failed(calls, ctx.Err())
	}
}

func failed(calls []Call, err error) []Reply {
	replies := make([]Reply, len(calls))
	for i := range replies {
		replies[i].Err = err
	}
	return replies
}

const (
	scanCount = 512 // keys that a server looks at in one go
	scanTries = 3   // of a page that is not answered
	listBatch = 128 // keys of which the nodes are asked at once
)

// List answers the holders of all keys that begin with prefix, in the order of their bytes,
// without Options.Prefix. It looks through all keys of a quorum of nodes, page by page, and
// then asks every node about those found, some at a time while the caller goes on. It tells
// of keys that a Holdfast client holds or, where nobody has a quorum of votes, competes
// for; a lock of another library cannot be told from data and is left out, as is a key that
// the nodes' user may not read. A key that changes hands meanwhile is answered as it was
// found, or not. See [Store.Inspect] for what is answered; Holder.Waiting is the length of the
// longest queue of a node here, and Holder.Queue is empty. A Redis Cluster is
// [store.ErrUnsupported]: no server of it has all keys.
func (s *Store) List(ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) {
		keys, err := s.scan(ctx, prefix)
		for batch := range slices.Chunk(keys, listBatch) {
			if err != nil {
				break
			}
			var held []store.Holder
			held, err = s.holders(ctx, batch)
			for _, h := range held {
				if !yield(h, nil) {
					return
				}
			}
		}
		if err != nil {
			yield(store.Holder{}, err)
		}
	}
}

// holders tells of those of the keys that somebody holds.
func (s *Store) holders(ctx context.Context, keys []string) ([]store.Holder, error) {
	calls := make([]Call, 0, 2*len(keys))
	for _, key := range keys {
		vote := s.opts.Prefix + key
		calls = append(calls, Call{Script: inspectScript, Keys: []string{vote}}, askWaiting(vote, 0))
	}
	sent := s.clock.Now()
	all, err := s.askAll(ctx, s.opts.NodeTimeout, calls...)
	if err != nil {
		return nil, err
	}
	var held []store.Holder
	for k, key := range keys {
		sights := make([]sight, len(s.peers))
		for i, p := range s.peers {
			sights[i] = p.see(s.opts.Prefix+key, all[i][2*k])
			sights[i].queue = readQueue(all[i][2*k+1])
			s.tellSight(ctx, "list", key, p, sights[i], sent)
		}
		h, err := s.view("list", key, sights)
		var other *store.InvalidError
		switch {
		case errors.As(err, &other) && other.Field == "key": // replaced meanwhile
		case err != nil:
			return held, err
		case h.Owner != "" && !h.Foreign:
			addQueue(&h, sights)
			held = append(held, h)
		}
	}
	return held, nil
}

// scan finds the keys of votes on a quorum of nodes: what a quorum has voted for is on one of
// those at least.
func (s *Store) scan(ctx context.Context, prefix string) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	type result struct {
		p    *peer
		keys []string
		err  error
	}
	scanning, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan result, len(s.peers))
	for _, p := range s.peers {
		go func() {
			keys, err := p.scan(scanning, s.opts.Prefix+prefix)
			results <- result{p, keys, err}
		}()
	}
	found := map[string]bool{}
	sights := make([]sight, len(s.peers))
	complete := 0
	for range s.peers {
		r := <-results
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if codeOf(r.err) == "ISCLUSTER" {
			return nil, fmt.Errorf("%w: %s is a Redis Cluster, whose keys cannot be listed", store.ErrUnsupported, r.p.name)
		}
		if r.err != nil {
			sights[r.p.index].err = permanent(r.p.name, "", r.err)
			continue
		}
		sights[r.p.index].kind = ok
		for _, vote := range r.keys {
			key, ours := strings.CutPrefix(vote, s.opts.Prefix)
			if ours && strings.HasPrefix(key, prefix) && store.CheckKey(key) == nil && checkVote(vote, key) == nil {
				found[key] = true
			}
		}
		if complete++; complete == s.q {
			keys := make([]string, 0, len(found))
			for key := range found {
				keys = append(keys, key)
			}
			slices.Sort(keys)
			return keys, nil
		}
	}
	return nil, s.undecided("list", sights)
}

// scan goes through one server's keys.
func (p *peer) scan(ctx context.Context, prefix string) (keys []string, err error) {
	pattern := strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`, "]", `\]`).Replace(prefix) + "*"
	for cursor, tries := "0", 0; ; {
		r := p.ask(ctx, p.s.opts.NodeTimeout, Call{Script: scanScript, Args: []string{cursor, pattern, strconv.Itoa(scanCount)}})[0]
		if tries++; r.Err != nil && codeOf(r.Err) == "" && tries < scanTries && ctx.Err() == nil {
			continue
		}
		if r.Err != nil {
			return nil, r.Err
		}
		page, isArray := r.Value.([]any)
		if !isArray || len(page) == 0 {
			return nil, errReply
		}
		for _, k := range page[1:] {
			key, isText := k.(string)
			if !isText {
				return nil, errReply
			}
			keys = append(keys, key)
		}
		tries = 0
		if cursor, _ = page[0].(string); cursor == "0" {
			return keys, nil
		}
		if cursor == "" {
			return nil, errReply
		}
	}
}
