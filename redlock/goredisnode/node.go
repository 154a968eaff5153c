package goredisnode

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

// New returns a node over client, which is a [redis.Client] of one server or a
// [redis.ClusterClient]; a Cluster counts as one node. Anything else is refused by a
// [store.InvalidError], a [redis.NewFailoverClient] too, which does not tell the name of its
// master: see [NewNamed]. New does no I/O. The caller closes the client, after the last use
// of the node.
//
// The node's name is the address, with "/" and the number of the database where that is not 0,
// and for a Cluster the sorted addresses that the client was given.
func New(client any) (redlock.Node, error) {
	switch c := client.(type) {
	case *redis.Client:
		if c == nil {
			break
		}
		if c.Options().Addr == failoverAddr {
			return nil, &store.InvalidError{Field: "node", Value: c.Options().Addr,
				Rule: "a Sentinel client does not tell its master; use NewNamed with the master's name"}
		}
		name := c.Options().Addr
		if db := c.Options().DB; db != 0 {
			name += "/" + strconv.Itoa(db)
		}
		return NewNamed(name, c)
	case *redis.ClusterClient:
		if c == nil {
			break
		}
		return NewNamed(strings.Join(slices.Sorted(slices.Values(c.Options().Addrs)), ","), c)
	}
	return nil, unfit(client)
}

// failoverAddr is what go-redis has for an address in clients that ask a Sentinel.
const failoverAddr = "FailoverClient"

// NewNamed is [New] with a name of the caller's choice. All processes must use the same name
// for the same deployment, since it identifies it, and names must not hold credentials. For a
// Sentinel deployment that is the name of the master.
func NewNamed(name string, client any) (redlock.Node, error) {
	if name == "" {
		return nil, &store.InvalidError{Field: "node", Rule: "the name must not be empty"}
	}
	switch c := client.(type) {
	case *redis.Client:
		if c != nil {
			n := &single{name: name, client: c}
			// The timeout bounds the handshake and the writes, not the wait for messages.
			n.subs.Open = opener(c.WithTimeout(handshake))
			return n, nil
		}
	case *redis.ClusterClient:
		if c != nil {
			n := &cluster{name: name, client: c}
			n.subs.Open = opener(c)
			return n, nil
		}
	}
	return nil, unfit(client)
}

func unfit(client any) error {
	return &store.InvalidError{Field: "node", Value: fmt.Sprintf("%T", client),
		Rule: "must be a *redis.Client or a *redis.ClusterClient of go-redis v9, not nil"}
}

// single is one server, or what a Sentinel says is the master.
type single struct {
	name   string
	client *redis.Client
	// timed are clones of client by their timeout. They share its connections.
	timed [16 * 17]atomic.Pointer[redis.Client]
	looks sync.Pool // of *look
	subs  redlock.Subscriptions
}

var _ redlock.Single = (*single)(nil)

func (n *single) Name() string { return n.name }

// within is the client with a timeout that fits the deadline of ctx, or is longer by an eighth
// at the most, so that few clones serve all calls. A shorter timeout of the client's own stays.
func (n *single) within(ctx context.Context) *redis.Client {
	deadline, ok := ctx.Deadline()
	if !ok {
		return n.client
	}
	return n.withTimeout(time.Until(deadline))
}

func (n *single) withTimeout(left time.Duration) *redis.Client {
	if n.client.Options().ContextTimeoutEnabled {
		return n.client
	}
	ms := max(left.Milliseconds(), 1)
	shift := max(bits.Len64(uint64(ms))-4, 0)
	units := (ms-1)>>shift + 1 // 16 at the most
	i := shift*17 + int(units)
	if i >= len(n.timed) {
		return n.client
	}
	timeout := time.Duration(units<<shift) * time.Millisecond
	if own := n.client.Options().ReadTimeout; own > 0 && own <= timeout {
		return n.client
	}
	c := n.timed[i].Load()
	if c == nil {
		c = n.client.WithTimeout(timeout)
		n.timed[i].Store(c)
	}
	return c
}

func (n *single) Run(ctx context.Context, calls ...redlock.Call) []redlock.Reply {
	ctx, stop := n.watch(ctx)
	defer stop()
	return run(ctx, n.within(ctx), calls)
}

// RunOne implements [redlock.Single].
func (n *single) RunOne(ctx context.Context, call *redlock.Call) redlock.Reply {
	if err := ctx.Err(); err != nil {
		return redlock.Reply{Err: err}
	}
	l, ok := n.looks.Get().(*look)
	if !ok {
		l = &look{n: n}
	}
	client := n.client
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		l.begin(deadline, left)
		client = n.withTimeout(left)
	}
	r := one(ctx, client, "evalsha", call)
	if unknown(call, r.Err) {
		r = one(ctx, client, "eval", call)
	}
	unreachable := l.end()
	n.looks.Put(l)
	if unreachable != nil && errors.Is(r.Err, context.DeadlineExceeded) {
		r.Err = unreachable
	}
	return r
}

// look finds out why a call without an answer has none. Calls that are answered do not touch its
// timer: setting one for each would wake another thread each time.
type look struct {
	n *single

	mu    sync.Mutex
	timer *time.Timer
	armed bool      // it will run, or runs
	due   time.Time // when to look; zero where no call runs
	calls int       // that began
	seen  error     // why the server cannot be reached
}

// begin has the server looked at where half of the time until deadline passes without an end.
func (l *look) begin(deadline time.Time, left time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls++
	l.due, l.seen = deadline.Add(-left/2), nil
	if l.armed {
		return
	}
	l.armed = true
	if l.timer == nil {
		l.timer = time.AfterFunc(left/2, l.run)
	} else {
		l.timer.Reset(left / 2)
	}
}

// end returns why the server cannot be reached, if that was seen.
func (l *look) end() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.due = time.Time{}
	return l.seen
}

// run looks if it is time, and else comes again while calls run.
func (l *look) run() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.due.IsZero() && time.Until(l.due) <= 0 {
		call := l.calls
		l.due = time.Time{}
		l.mu.Unlock()
		err := l.n.reach()
		l.mu.Lock()
		if call == l.calls {
			l.seen = err
		}
	}
	if l.armed = !l.due.IsZero(); l.armed {
		l.timer.Reset(max(0, time.Until(l.due)))
	}
}

// reach opens a connection and closes it, which takes a second at most.
func (n *single) reach() error {
	opt := n.client.Options()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn, err := opt.Dialer(ctx, opt.Network, opt.Addr)
	if err != nil {
		return err
	}
	conn.Close()
	return nil
}

func (n *single) Pinned(ctx context.Context, _ string, fn func(do func(...string) (any, error)) error) error {
	ctx, stop := n.watch(ctx)
	defer stop()
	return pinned(ctx, n.within(ctx), fn)
}

// maxLook bounds how long watch waits before it looks.
const maxLook = 100 * time.Millisecond

// watch is ctx, cancelled early where the server cannot be reached, with that as the cause. By
// itself go-redis dials again and again until the deadline, and then tells nothing else. The
// look costs a connection, and only where a quarter of the time, or maxLook, has passed without
// an answer: an admission has more time than those who wait for it.
func (n *single) watch(ctx context.Context) (context.Context, func()) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	look := time.AfterFunc(min(time.Until(deadline)/4, maxLook), func() {
		opt := n.client.Options()
		conn, err := opt.Dialer(ctx, opt.Network, opt.Addr)
		if err != nil {
			cancel(err)
			return
		}
		conn.Close()
	})
	return ctx, func() {
		look.Stop()
		cancel(nil)
	}
}

func (n *single) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	return n.subs.Subscribe(ctx, channel, deliver, up)
}

// cluster is a whole Cluster.
type cluster struct {
	name   string
	client *redis.ClusterClient
	subs   redlock.Subscriptions
}

func (n *cluster) Name() string { return n.name }

func (n *cluster) Run(ctx context.Context, calls ...redlock.Call) []redlock.Reply {
	replies := run(ctx, n.client, calls)
	for i := range replies {
		if n.follow(replies[i].Err) {
			break
		}
	}
	return replies
}

// follow has the client ask who has the slots where a server could not answer: by itself it
// does so only each minute where it sends pipelines. Asked often, it asks once in 200 ms.
func (n *cluster) follow(err error) bool {
	var e *redlock.ServerError
	if err == nil || errors.As(err, &e) && e.Code() != "CLUSTERDOWN" {
		return false
	}
	n.client.ReloadState(context.Background()) // starts it and returns
	return true
}

func (n *cluster) Pinned(ctx context.Context, key string, fn func(do func(...string) (any, error)) error) error {
	c, err := n.client.MasterForKey(ctx, key)
	if err != nil {
		return serverError(err)
	}
	err = pinned(ctx, c, fn)
	n.follow(err)
	return err
}

func (n *cluster) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	return n.subs.Subscribe(ctx, channel, deliver, up)
}

func run(ctx context.Context, client redis.Cmdable, calls []redlock.Call) []redlock.Reply {
	replies := make([]redlock.Reply, len(calls))
	if err := ctx.Err(); err != nil {
		for i := range replies {
			replies[i].Err = err
		}
		return replies
	}
	all := make([]int, len(calls))
	for i := range all {
		all[i] = i
	}
	send(ctx, client, "evalsha", calls, all, replies)
	unknowns := all[:0]
	for i, r := range replies {
		if unknown(&calls[i], r.Err) {
			unknowns = append(unknowns, i)
		}
	}
	if len(unknowns) > 0 {
		send(ctx, client, "eval", calls, unknowns, replies)
	}
	return replies
}

// unknown says that the server does not have the script of a call that may be sent whole.
func unknown(c *redlock.Call, err error) bool {
	if c.Strict || err == nil {
		return false
	}
	var e *redlock.ServerError
	return errors.As(err, &e) && e.Code() == "NOSCRIPT"
}

// one sends one call.
func one(ctx context.Context, client *redis.Client, command string, c *redlock.Call) (r redlock.Reply) {
	cmd := newCmd(ctx, command, c)
	var err error
	if c.Once {
		err = client.Process(ctx, once{cmd})
	} else {
		err = client.Process(ctx, cmd)
	}
	if cmd.Err() == nil && cmd.Val() == nil && err != nil {
		cmd.SetErr(err)
	}
	r.Value, r.Err = answer(ctx, cmd)
	return r
}

func newCmd(ctx context.Context, command string, c *redlock.Call) *redis.Cmd {
	script := c.Script.SHA1
	if command == "eval" {
		script = c.Script.Text
	}
	args := make([]any, 0, 3+len(c.Keys)+len(c.Args))
	args = append(args, command, script, len(c.Keys))
	for _, k := range c.Keys {
		args = append(args, k)
	}
	for _, a := range c.Args {
		args = append(args, a)
	}
	return redis.NewCmd(ctx, args...)
}

// send sends the calls with the given indices as one pipeline and sets their replies.
func send(ctx context.Context, client redis.Cmdable, command string, calls []redlock.Call, indices []int, replies []redlock.Reply) {
	switch len(indices) {
	case 0:
		return
	case 1: // go-redis spends less on it
		if c, ok := client.(*redis.Client); ok {
			i := indices[0]
			replies[i] = one(ctx, c, command, &calls[i])
			return
		}
	}
	pipe := client.Pipeline()
	cmds := make([]*redis.Cmd, len(indices))
	for j, i := range indices {
		cmds[j] = newCmd(ctx, command, &calls[i])
		if calls[i].Once {
			_ = pipe.Process(ctx, once{cmds[j]}) // which only queues it
		} else {
			_ = pipe.Process(ctx, cmds[j])
		}
	}
	_, err := pipe.Exec(ctx) // the first of the commands' errors, or that of connecting
	for j, i := range indices {
		// A command with neither was never answered: where connecting fails by an answer of
		// the server, such as a wrong password, go-redis does not tell the commands.
		if cmds[j].Err() == nil && cmds[j].Val() == nil {
			cmds[j].SetErr(cmp.Or(err, errNoReply))
		}
		replies[i].Value, replies[i].Err = answer(ctx, cmds[j])
	}
}

// once is a command that go-redis does not send again, and neither the pipeline it is in.
type once struct{ *redis.Cmd }

func (once) NoRetry() bool { return true }

var errNoReply = errors.New("go-redis gave no reply and no error")

func pinned(ctx context.Context, client *redis.Client, fn func(do func(...string) (any, error)) error) error {
	conn := client.Conn()
	defer conn.Close()
	return fn(func(args ...string) (any, error) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		list := make([]any, len(args))
		for i, a := range args {
			list[i] = a
		}
		return answer(ctx, conn.Do(ctx, list...))
	})
}

func answer(ctx context.Context, cmd *redis.Cmd) (any, error) {
	v, err := cmd.Result()
	switch {
	case err == nil:
		return plain(v), nil
	case err == redis.Nil: // as it is: in another error it is a Sentinel's, which knows no such master
		return nil, nil // the server's nil is a value
	case errors.Is(err, context.Canceled):
		return nil, serverError(cmp.Or(context.Cause(ctx), err))
	}
	return nil, serverError(err)
}

// serverError turns a reply of the server that is an error into a [redlock.ServerError].
func serverError(err error) error {
	var e redis.Error
	if errors.As(err, &e) && e != redis.Nil {
		return &redlock.ServerError{Text: e.Error()}
	}
	return err
}

// plain reduces the types of RESP3 to those of RESP2.
func plain(v any) any {
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = plain(v[i])
		}
		return v
	case map[any]any:
		list := make([]any, 0, 2*len(v))
		for k, e := range v {
			list = append(list, plain(k), plain(e))
		}
		return list
	case bool:
		if v {
			return int64(1)
		}
		return int64(0)
	case nil, string, int64:
		return v
	case error:
		return serverError(v)
	default: // a float or a big number
		return fmt.Sprint(v)
	}
}
