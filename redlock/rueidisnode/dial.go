package rueidisnode

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/store"
)

// Conn is a [redlock.Node] that opens its own client at the first use, and again after that
// has failed, so that a node which is away at first can come later. It is safe for concurrent
// use.
type Conn struct {
	node
	opt rueidis.ClientOption

	mu      sync.Mutex
	client  rueidis.Client
	dialing *dialing
	closed  bool
}

var _ redlock.Node = (*Conn)(nil)

// dialing is one attempt to connect, shared by those who wait for it.
type dialing struct {
	done   chan struct{}
	client rueidis.Client
	err    error
}

// Dial returns a node for the server, the Cluster or the Sentinel deployment of opt. It does no
// I/O: a node that cannot be reached says so when it is used. The caller closes it.
//
// The node's name is the address, with "/" and the number of the database where that is not
// 0; of a Cluster the sorted addresses; of a Sentinel deployment its master's name.
//
// Where opt leaves them zero, Dial sets Dialer.Timeout, of connecting, to 2 s, Dialer.KeepAlive,
// the interval of PINGs on a quiet connection, to 30 s, and ConnWriteTimeout, after which a
// connection without an answer is closed, to 5 s. It turns off client-side caching, which no
// lock needs.
func Dial(opt rueidis.ClientOption) (*Conn, error) {
	name := opt.Sentinel.MasterSet
	if name == "" {
		name = strings.Join(slices.Sorted(slices.Values(opt.InitAddress)), ",")
	}
	if name == "" {
		return nil, &store.InvalidError{Field: "node", Rule: "InitAddress must name at least one address"}
	}
	if opt.SelectDB != 0 {
		name += "/" + strconv.Itoa(opt.SelectDB)
	}
	if opt.Dialer.Timeout == 0 {
		opt.Dialer.Timeout = 2 * time.Second
	}
	if opt.Dialer.KeepAlive == 0 {
		opt.Dialer.KeepAlive = 30 * time.Second
	}
	if opt.ConnWriteTimeout == 0 {
		opt.ConnWriteTimeout = 5 * time.Second
	}
	if opt.Sentinel.MasterSet != "" && opt.Sentinel.TopologyRefreshInterval == 0 {
		opt.Sentinel.TopologyRefreshInterval = 5 * time.Second
	}
	if opt.BlockingPoolCleanup == 0 {
		opt.BlockingPoolCleanup = time.Minute
	}
	opt.DisableCache = true
	opt.InitAddress = slices.Clone(opt.InitAddress)
	c := &Conn{opt: opt}
	c.name, c.node.client, c.subs.Open = name, c.connect, c.open
	c.pins = make(chan struct{}, maxPinned)
	return c, nil
}

// connect answers the client, connecting where there is none. An attempt that outlives ctx
// goes on for the next caller.
func (c *Conn) connect(ctx context.Context) (rueidis.Client, error) {
	c.mu.Lock()
	if c.client != nil || c.closed {
		defer c.mu.Unlock()
		if c.closed {
			return nil, rueidis.ErrClosing
		}
		return c.client, nil
	}
	d := c.dialing
	if d == nil {
		d = &dialing{done: make(chan struct{})}
		c.dialing = d
		go c.dial(d)
	}
	c.mu.Unlock()
	select {
	case <-d.done:
		return d.client, d.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *Conn) dial(d *dialing) {
	d.client, d.err = rueidis.NewClient(c.opt)
	if d.err != nil {
		d.err = serverError(d.err)
	}
	c.mu.Lock()
	c.dialing = nil
	stray := d.client
	if d.err == nil && !c.closed {
		c.client, stray = d.client, nil
	}
	if stray != nil && d.err == nil {
		d.client, d.err = nil, rueidis.ErrClosing
	}
	close(d.done)
	c.mu.Unlock()
	if stray != nil {
		stray.Close()
	}
}

// Close closes the client, if there is one. Calls after it fail. It answers nil.
func (c *Conn) Close() error {
	c.mu.Lock()
	client := c.client
	c.client, c.closed = nil, true
	c.mu.Unlock()
	if client != nil {
		client.Close()
	}
	return nil
}
