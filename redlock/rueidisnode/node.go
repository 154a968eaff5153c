package rueidisnode

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

// New returns a node over client, of one server or of a Cluster, which counts as one node. A
// Sentinel client does not tell the name of its master and is refused by a
// [store.InvalidError]: see [NewNamed], or [Dial]. New does no I/O. The caller closes the
// client, after the last use of the node.
//
// The node's name is the address. A Cluster's is the sorted addresses that the client knows
// now, which change with the Cluster, and a client does not tell the number of its database;
// where that matters, use NewNamed, or Dial, which knows more.
func New(client rueidis.Client) (redlock.Node, error) {
	if client == nil {
		return nil, noClient()
	}
	if client.Mode() == rueidis.ClientModeSentinel {
		return nil, &store.InvalidError{Field: "node", Value: "sentinel",
			Rule: "a Sentinel client does not tell its master; use NewNamed with the master's name, or Dial"}
	}
	return NewNamed(strings.Join(slices.Sorted(maps.Keys(client.Nodes())), ","), client)
}

// NewNamed is [New] with a name of the caller's choice, for a client of any mode. All processes
// must use the same name for the same deployment, since it identifies it, and names must not
// hold credentials. For a Sentinel deployment that is the name of the master.
func NewNamed(name string, client rueidis.Client) (redlock.Node, error) {
	if client == nil {
		return nil, noClient()
	}
	if name == "" {
		return nil, noName()
	}
	n := &node{name: name, pins: make(chan struct{}, maxPinned), client: func(context.Context) (rueidis.Client, error) { return client, nil }}
	n.subs.Open = n.open
	return n, nil
}

func noClient() error {
	return &store.InvalidError{Field: "node", Value: "nil", Rule: "must be a rueidis.Client"}
}

func noName() error {
	return &store.InvalidError{Field: "node", Rule: "the name must not be empty"}
}

var _ redlock.Single = (*node)(nil)

type node struct {
	name   string
	client func(ctx context.Context) (rueidis.Client, error)
	subs   redlock.Subscriptions
	pins   chan struct{} // room for those that have a connection for themselves
}

func (n *node) Name() string { return n.name }

func (n *node) Run(ctx context.Context, calls ...redlock.Call) []redlock.Reply {
	replies := make([]redlock.Reply, len(calls))
	client, err := n.connect(ctx)
	switch {
	case err != nil:
		for i := range replies {
			replies[i].Err = err
		}
	case len(calls) == 1:
		replies[0] = one(ctx, client, &calls[0])
	case len(calls) > 1:
		many(ctx, client, calls, replies)
	}
	return replies
}

// RunOne implements [redlock.Single]: rueidis sets the deadline of ctx on the connection, or
// waits for the shared one no longer than that.
func (n *node) RunOne(ctx context.Context, call *redlock.Call) redlock.Reply {
	client, err := n.connect(ctx)
	if err != nil {
		return redlock.Reply{Err: err}
	}
	return one(ctx, client, call)
}

// connect answers the client, unless ctx is done.
func (n *node) connect(ctx context.Context) (rueidis.Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return n.client(ctx)
}

// one is many for one call: rueidis spends less on it.
func one(ctx context.Context, client rueidis.Client, c *redlock.Call) redlock.Reply {
	r := sent(ctx, client, c, evalsha)
	if unknown(c, &r) {
		r = sent(ctx, client, c, eval)
	}
	return r
}

// sent sends a call, again where it met connections that the server had closed: rueidis has
// several, of which it takes any.
func sent(ctx context.Context, client rueidis.Client, c *redlock.Call, cmd func(rueidis.Client, *redlock.Call) rueidis.Completed) redlock.Reply {
	r := answer(client.Do(ctx, cmd(client, c)))
	for i := 0; i < maxStale && !c.Once && stale(ctx, r.Err); i++ {
		pause(ctx, time.Millisecond<<i) // rueidis takes a moment to see that the connection is gone
		r = answer(client.Do(ctx, cmd(client, c)))
	}
	return r
}

// maxStale is how often a call is sent again, within 63 ms in all, where it meets a connection that the
// server has closed.
const maxStale = 6

// pause waits for d, or until ctx is done.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// stale says that the server had most likely closed the connection while it was idle. Rueidis does
// not send scripts again by itself; sent again without harm is every call but those with Once.
func stale(ctx context.Context, err error) bool {
	return ctx.Err() == nil &&
		(errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE))
}

func many(ctx context.Context, client rueidis.Client, calls []redlock.Call, replies []redlock.Reply) {
	cmds := make(rueidis.Commands, len(calls))
	for i := range calls {
		cmds[i] = evalsha(client, &calls[i])
	}
	for i, r := range client.DoMulti(ctx, cmds...) {
		replies[i] = answer(r)
	}
	for i := range calls {
		if c := &calls[i]; unknown(c, &replies[i]) || !c.Once && stale(ctx, replies[i].Err) {
			replies[i] = one(ctx, client, c)
		}
	}
}

// The first key decides where a script goes. rueidis panics where it is told of another slot; the
// server answers CROSSSLOT.
func evalsha(client rueidis.Client, c *redlock.Call) rueidis.Completed {
	first := min(1, len(c.Keys))
	return client.B().Evalsha().Sha1(c.Script.SHA1).Numkeys(int64(len(c.Keys))).Key(c.Keys[:first]...).Arg(c.Keys[first:]...).Arg(c.Args...).Build()
}

func eval(client rueidis.Client, c *redlock.Call) rueidis.Completed {
	first := min(1, len(c.Keys))
	return client.B().Eval().Script(c.Script.Text).Numkeys(int64(len(c.Keys))).Key(c.Keys[:first]...).Arg(c.Keys[first:]...).Arg(c.Args...).Build()
}

// unknown says that the server does not have the script of a call that may be sent whole.
func unknown(c *redlock.Call, r *redlock.Reply) bool {
	if c.Strict || r.Err == nil {
		return false
	}
	var e *redlock.ServerError
	return errors.As(r.Err, &e) && e.Code() == "NOSCRIPT"
}

func answer(r rueidis.RedisResult) redlock.Reply {
	m, err := r.ToMessage()
	if err != nil {
		if rueidis.IsRedisNil(err) {
			return redlock.Reply{} // the server's nil is a value
		}
		return redlock.Reply{Err: serverError(err)}
	}
	return redlock.Reply{Value: plain(&m)}
}

// serverError turns a reply of the server that is an error into a [redlock.ServerError].
func serverError(err error) error {
	e, ok := rueidis.IsRedisErr(err)
	if !ok {
		return err
	}
	text := e.Error()
	// rueidis cuts "ERR " off; every other code is one word of capitals, as is the first word of
	// some texts after ERR.
	switch code, _, _ := strings.Cut(text, " "); code {
	case strings.ToUpper(code):
		if !slices.Contains([]string{"DB", "AUTH", "SELECT", "HELLO", "EVAL", "SCRIPT"}, code) {
			break
		}
		fallthrough
	default:
		text = "ERR " + text
	}
	return &redlock.ServerError{Text: text}
}

// plain reduces a message to the types of RESP2.
func plain(m *rueidis.RedisMessage) any {
	switch {
	case m.IsInt64():
		v, _ := m.ToInt64()
		return v
	case m.IsString():
		v, _ := m.ToString()
		return v
	case m.IsArray():
		values, _ := m.ToArray()
		list := make([]any, len(values))
		for i := range values {
			list[i] = plain(&values[i])
		}
		return list
	case m.IsNil():
		return nil
	case m.IsMap():
		values, _ := m.ToMap()
		list := make([]any, 0, 2*len(values))
		for k, v := range values {
			list = append(list, k, plain(&v))
		}
		return list
	case m.IsBool():
		if v, _ := m.ToBool(); v {
			return int64(1)
		}
		return int64(0)
	case m.IsFloat64():
		v, _ := m.ToFloat64()
		return strconv.FormatFloat(v, 'g', -1, 64)
	}
	if err := m.Error(); err != nil {
		return serverError(err)
	}
	v, _ := m.ToString() // a verbatim string, such as INFO's, or a big number
	if len(v) > 3 && v[3] == ':' {
		v = v[4:] // after the format
	}
	return v
}

// dedicate takes a connection for itself. rueidis may dial here and does not look at ctx.
func (n *node) dedicate(ctx context.Context) (rueidis.DedicatedClient, func(), error) {
	client, err := n.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	type taken struct {
		client rueidis.DedicatedClient
		free   func()
	}
	ch := make(chan taken, 1)
	go func() {
		d, free := client.Dedicate()
		ch <- taken{d, free}
	}()
	select {
	case t := <-ch:
		return t.client, t.free, nil
	case <-ctx.Done():
		go func() { (<-ch).free() }()
		return nil, nil, ctx.Err()
	}
}

// maxPinned bounds the connections that are taken at the same time: many stores that share a node
// meet it at once, and rueidis keeps each connection that it has made, with buffers and PINGs.
const maxPinned = 4

func (n *node) Pinned(ctx context.Context, key string, fn func(do func(...string) (any, error)) error) error {
	select {
	case n.pins <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-n.pins }()
	conn, free, err := n.dedicate(ctx)
	if err != nil {
		return err
	}
	defer func() { go free() }() // may wait for a server that hangs
	if client, _ := n.connect(ctx); client != nil && client.Mode() == rueidis.ClientModeCluster {
		// The first command of a key decides which server it is. Its answer does not matter.
		if err := conn.Do(ctx, conn.B().Exists().Key(key).Build()).NonRedisError(); err != nil {
			return err
		}
	}
	return fn(func(args ...string) (any, error) {
		r := answer(conn.Do(ctx, conn.B().Arbitrary(args...).Build()))
		return r.Value, r.Err
	})
}

func (n *node) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	return n.subs.Subscribe(ctx, channel, deliver, up)
}

// pubsub is one connection for messages.
type pubsub struct {
	conn   rueidis.DedicatedClient
	broken <-chan error
}

// open is the Open of [redlock.Subscriptions].
func (n *node) open(ctx context.Context, message func(channel, payload string), confirmed func(channel string)) (redlock.PubSub, error) {
	conn, _, err := n.dedicate(ctx)
	if err != nil {
		return nil, err
	}
	return &pubsub{conn: conn, broken: conn.SetPubSubHooks(rueidis.PubSubHooks{
		OnMessage: func(m rueidis.PubSubMessage) { message(m.Channel, m.Message) },
		OnSubscription: func(s rueidis.PubSubSubscription) {
			if s.Kind == "subscribe" {
				confirmed(s.Channel)
			}
		},
	})}, nil
}

func (p *pubsub) Subscribe(ctx context.Context, channels ...string) error {
	return p.do(ctx, p.conn.B().Subscribe().Channel(channels...).Build())
}

func (p *pubsub) Unsubscribe(ctx context.Context, channels ...string) error {
	return p.do(ctx, p.conn.B().Unsubscribe().Channel(channels...).Build())
}

var errBroken = errors.New("the connection for messages has ended")

// do ends with the connection: with RESP2 rueidis has another one beside it, by which it judges
// that it should try again.
func (p *pubsub) do(ctx context.Context, cmd rueidis.Completed) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- serverError(p.conn.Do(ctx, cmd).Error()) }()
	select {
	case err := <-answer:
		return err
	case <-p.broken:
		return errBroken
	}
}

func (p *pubsub) Broken() <-chan error { return p.broken }

func (p *pubsub) Close() { go p.conn.Close() } // may wait for a server that hangs
