//go:build holdfast_rules

package rules

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// env is one run of a scenario: servers that vote at once, and a time that passes only when
// the scenario says so, for servers and clients alike, beside the few ms that it runs. What it
// relies on has seconds to spare.
type env struct {
	t       *testing.T
	key     string
	servers []*servertest.RedisServer
	faults  []*fault
	ctx     context.Context
	cancel  context.CancelFunc
	over    chan struct{}
	running sync.WaitGroup
	passing atomic.Int64 // requests that a server has

	mu    sync.Mutex
	tales map[string]int // answers that the stores told of, by operation and node
}

// passed is how much time has been let pass in this process: its stores' clock never goes back.
var passed time.Duration

func newEnv(t *testing.T) *env {
	e := &env{t: t, key: "account/1", over: make(chan struct{}), tales: map[string]int{}}
	ctx, cancel := context.WithCancel(context.Background())
	e.ctx, e.cancel = store.WithTrace(ctx, e.trace), cancel
	return e
}

// finish ends what the scenario has left running, and makes sure that its faults happened.
func (e *env) finish() {
	for _, f := range e.faults {
		if e.t.Failed() {
			break // it has ended halfway
		}
		// A request that a round did not wait for may still be on its way.
		e.untilOr(patience, func() bool { return f.hits.Load() > 0 })
		if f.hits.Load() == 0 {
			e.t.Errorf("a fault of %s has met nothing", f.op)
		}
	}
	e.cancel()
	close(e.over)
	e.running.Wait()
	e.untilOr(time.Second, func() bool { return e.passing.Load() == 0 })
	redlock.MoveWallClock(0)
	e.servers = nil
	e.elapse(time.Hour) // no request is worth repeating any more
}

func (e *env) trace(ev store.NodeEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.tales[ev.Op]++
	e.tales[ev.Op+" "+ev.Node]++
}

// told is how many answers to an operation the stores have told of.
func (e *env) told(op string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.tales[op]
}

// healings is how often healing a node has ended, one way or the other.
func (e *env) healings(node int) int { return e.told("heal " + e.server(node).Addr()) }

// start starts n servers that vote at once.
func (e *env) start(n int, opts ...servertest.RedisOption) {
	e.servers = servertest.RedisN(e.t, n, append([]servertest.RedisOption{old}, opts...)...)
	for _, s := range e.servers {
		s.Clock().Set(passed)
	}
}

var old = servertest.Aged(time.Hour)

// server is the server of a node, counted from 1.
func (e *env) server(node int) *servertest.RedisServer { return e.servers[node-1] }

// elapse lets time pass: for the clients first, so that no promise ends early by it.
func (e *env) elapse(d time.Duration) {
	passed += d
	redlock.Elapse(d)
	for _, s := range e.servers {
		s.Clock().Set(s.Clock().Offset() + d)
	}
}

// step makes the clock of one node jump.
func (e *env) step(node int, d time.Duration) {
	c := e.server(node).Clock()
	c.Set(c.Offset() + d)
}

// wall sets the clients' wall clock apart from the right time.
func (e *env) wall(d time.Duration) { redlock.MoveWallClock(d) }

// stamp is the right time, in us.
func (e *env) stamp() int64 { return time.Now().Add(passed).UnixMicro() }

// until waits for something that must happen.
func (e *env) until(what string, f func() bool) {
	e.t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			e.t.Fatalf("waited in vain for: %s", what)
		}
	}
}

// untilOr waits for something that may happen.
func (e *env) untilOr(d time.Duration, f func() bool) {
	for end := time.Now().Add(d); !f() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
}

// time is a node's clock, in us.
func (e *env) time(node int) int64 {
	e.t.Helper()
	v := e.do(node, "TIME").([]any)
	s, _ := strconv.ParseInt(v[0].(string), 10, 64)
	us, _ := strconv.ParseInt(v[1].(string), 10, 64)
	return s*1e6 + us
}

// do sends a command to a node's server.
func (e *env) do(node int, args ...string) any {
	e.t.Helper()
	v, err := e.server(node).Do(args...)
	if err != nil {
		e.t.Fatalf("%v at node %d: %v", args, node, err)
	}
	return v
}

// voted is whose vote a node has, empty where nobody's.
func (e *env) voted(node int) string {
	e.t.Helper()
	owner, _ := e.do(node, "GET", e.key).(string)
	return owner
}

// lapse lets time pass until the votes of the given nodes have ended.
func (e *env) lapse(nodes ...int) {
	e.t.Helper()
	for _, n := range nodes {
		for {
			left := e.do(n, "PTTL", e.key).(int64)
			if left < 0 {
				break
			}
			e.elapse(time.Duration(left+1) * time.Millisecond)
		}
	}
}

// marks puts the marks of all nodes d ahead of their clocks, as a client with such a clock
// leaves them: so two clients that see them propose the same next stamp.
func (e *env) marks(d time.Duration) int64 {
	e.t.Helper()
	m := e.stamp() + d.Microseconds()
	for i := range e.servers {
		e.mark(i+1, m)
	}
	return m
}

func (e *env) mark(node int, m int64) {
	e.t.Helper()
	e.do(node, "SET", "{"+e.key+"}:fence", strconv.FormatInt(m, 10), "PX", "120000")
}

// marked is the mark of a node, zero where it has none.
func (e *env) marked(node int) int64 {
	e.t.Helper()
	text, _ := e.do(node, "GET", "{"+e.key+"}:fence").(string)
	m, _ := strconv.ParseInt(text, 10, 64)
	return m
}

// unvoted waits until nobody has a vote.
func (e *env) unvoted() {
	e.t.Helper()
	for n := range e.servers {
		e.until("the release", func() bool { return e.voted(n+1) == "" })
	}
}

// restart starts a server anew, empty and young.
func (e *env) restart(node int, opts ...servertest.RedisOption) {
	e.t.Helper()
	e.server(node).Restart(opts...)
	if v := e.voted(node); v != "" {
		e.t.Fatalf("node %d has kept its data", node)
	}
}

// aged waits until a server says that it has been up for that long.
func (e *env) aged(s *servertest.RedisServer, d time.Duration) {
	e.t.Helper()
	e.until("uptime", func() bool {
		up, _ := strconv.Atoi(s.Info("server", "uptime_in_seconds"))
		return time.Duration(up)*time.Second >= d
	})
}

// client is a store, as in a process of its own.
type client struct {
	e     *env
	name  string
	store *redlock.Store
	wires []*wire
}

// client opens a store over all servers and meets them, so that it knows their clocks.
func (e *env) client(name string, o ...redlock.Options) *client {
	e.t.Helper()
	c := e.stranger(name, o...)
	l := c.claim(time.Second)
	l.claim = c.store.Claim("met by "+name, store.ClaimOptions{TTL: time.Second})
	l.acquire()
	l.release()
	c.arrived("VOTE", 1)
	c.arrived("RELEASE", 1)
	for _, w := range c.wires {
		w.mu.Lock()
		clear(w.done)
		clear(w.words)
		w.mu.Unlock()
	}
	return c
}

// stranger opens a store that has not met the servers yet.
func (e *env) stranger(name string, o ...redlock.Options) *client {
	e.t.Helper()
	c := &client{e: e, name: name}
	opts := redlock.Options{NodeTimeout: patience}
	if len(o) > 0 {
		opts = o[0]
		opts.NodeTimeout = patience
	}
	var nodes []redlock.Node
	for i, s := range e.servers {
		n := e.node(s.Addr())
		w := &wire{e: e, number: i + 1, name: n.Name(), node: n, done: map[string]int{}, last: map[string]redlock.Call{}, words: map[string]string{}}
		c.wires = append(c.wires, w)
		nodes = append(nodes, w)
	}
	var err error
	if c.store, err = redlock.New(opts, nodes...); err != nil {
		e.t.Fatal(err)
	}
	return c
}

func (e *env) node(addr string) redlock.Node {
	db := goredis.NewClient(&goredis.Options{Addr: addr})
	e.t.Cleanup(func() { db.Close() })
	n, err := goredisnode.New(db)
	if err != nil {
		e.t.Fatal(err)
	}
	return n
}

func (c *client) wire(node int) *wire { return c.wires[node-1] }

// arrived waits until each server has executed n requests of an operation: none of them comes
// late by chance.
func (c *client) arrived(op string, n int) {
	c.e.t.Helper()
	for _, w := range c.wires {
		c.e.until(fmt.Sprintf("%d of %s at node %d", n, op, w.number), func() bool { return w.count(op) >= n })
	}
}

// lease is one acquisition and what its holder knows of it.
type lease struct {
	c     *client
	claim store.Claim
	grant store.Grant
	until time.Duration // on the clients' clock; zero while it is not granted
}

func (c *client) claim(ttl time.Duration) *lease {
	return &lease{c: c, claim: c.store.Claim(c.e.key, store.ClaimOptions{TTL: ttl, Label: c.name})}
}

// token is zero where the lease was not granted.
func (l *lease) token() fence.Token { return l.grant.Token }

func (l *lease) granted() bool { return l.until != 0 }

// take books a grant as the Locker does.
func (l *lease) take(sent time.Duration, g store.Grant, err error) error {
	if err == nil {
		l.grant, l.until = g, max(l.until, sent+store.Validity(g.TTL, 0))
	}
	return err
}

func (l *lease) try(ctx context.Context) error {
	sent := redlock.Now()
	g, err := l.claim.Try(ctx)
	return l.take(sent, g, err)
}

func (l *lease) extend(ctx context.Context) error {
	sent := redlock.Now()
	g, err := l.claim.Extend(ctx)
	return l.take(sent, g, err)
}

// acquire tries until it is granted, which must happen.
func (l *lease) acquire() {
	l.c.e.t.Helper()
	var err error
	for range 20 {
		if err = l.try(l.c.e.ctx); err == nil {
			return
		}
		var young *redlock.YoungError
		if errors.As(err, &young) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	l.c.e.t.Fatalf("%s does not get the lease: %v", l.c.name, err)
}

func (l *lease) mustExtend() {
	l.c.e.t.Helper()
	if err := l.extend(l.c.e.ctx); err != nil {
		l.c.e.t.Fatalf("%s cannot extend: %v", l.c.name, err)
	}
}

func (l *lease) release() {
	l.c.e.t.Helper()
	if err := l.claim.Release(l.c.e.ctx); err != nil && !errors.Is(err, store.ErrLost) {
		l.c.e.t.Fatalf("%s cannot release: %v", l.c.name, err)
	}
}

// call is an operation that runs while the scenario goes on.
type call struct {
	e      *env
	cancel context.CancelFunc
	result chan error
}

func (e *env) begin(f func(ctx context.Context) error) *call {
	ctx, cancel := context.WithCancel(e.ctx)
	c := &call{e, cancel, make(chan error, 1)}
	e.running.Go(func() { c.result <- f(ctx) })
	return c
}

// wait answers what the operation answered.
func (c *call) wait() error {
	c.e.t.Helper()
	defer c.cancel()
	select {
	case err := <-c.result:
		return err
	case <-time.After(patience):
		c.e.t.Fatal("a call does not return")
		return nil
	}
}

// giveUp ends the operation as a caller does who will not wait longer.
func (c *call) giveUp() error {
	c.e.t.Helper()
	c.cancel()
	return c.wait()
}

// waitOr gives the operation some time, and then up.
func (c *call) waitOr(d time.Duration) error {
	c.e.t.Helper()
	limit := time.AfterFunc(d, c.cancel)
	defer limit.Stop()
	return c.wait()
}

// soon is time enough for what the present answers decide.
const soon = 500 * time.Millisecond

// ticket hands the lease over, and answers until when the ticket says that it holds.
func (l *lease) ticket() (string, time.Duration) {
	l.c.e.t.Helper()
	text, err := l.c.store.Ticket(l.claim)
	if err != nil {
		l.c.e.t.Fatal(err)
	}
	t, err := store.ParseTicket(text)
	if err != nil {
		l.c.e.t.Fatal(err)
	}
	return text, t.Until
}

// adopt takes a ticket over.
func (c *client) adopt(ctx context.Context, ticket string) (*lease, error) {
	l := &lease{c: c}
	sent := redlock.Now()
	claim, g, err := c.store.Adopt(ctx, ticket)
	l.claim = claim
	return l, l.take(sent, g, err)
}

// valid reports whether the holder trusts the lease now.
func (l *lease) valid() bool { return l.granted() && redlock.Now() < l.until }

// bothValid is the violation of G3.
func bothValid(a, b *lease) string {
	if !a.valid() || !b.valid() {
		return ""
	}
	now := redlock.Now()
	return fmt.Sprintf("two valid holders: %s for another %v (token %d), and %s for another %v (token %d)",
		a.c.name, (a.until - now).Round(time.Millisecond), a.token(), b.c.name, (b.until - now).Round(time.Millisecond), b.token())
}

// rising is the violation of G1 and G2, for leases in the order in which they were granted.
func rising(leases ...*lease) string {
	var before *lease
	for _, l := range leases {
		if !l.granted() {
			continue
		}
		if before != nil && l.token() <= before.token() {
			word := "lower than"
			if l.token() == before.token() {
				word = "the same as"
			}
			return fmt.Sprintf("%s got token %d after %s: %s its token %d", l.c.name, l.token(), before.c.name, word, before.token())
		}
		before = l
	}
	return ""
}
