package servertest

import (
	"bytes"
	"context"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Proxy stands between clients and one server and can be told to misbehave, at any time and
// from any goroutine. Every fault counts what it did, so that a test can show that it happened.
//
// It passes chunks: what one read of a socket gave, usually what the other side wrote at once.
type Proxy struct {
	t      testing.TB
	target string
	keep   bool
	addr   string

	mu      sync.Mutex
	faults  faults
	changed chan struct{} // closed and replaced when faults change
	links   map[*link]struct{}
	ln      net.Listener // nil while refusing
	closed  bool
	wg      sync.WaitGroup

	connections, requests, replies                atomic.Int64
	delayed, dropped, blackHoled, held, resetHits atomic.Int64
	cutRequests, cutReplies, redialed             atomic.Int64
}

// faults are the faults in force.
type faults struct {
	delayRequests, delayReplies time.Duration
	dropReplies, blackHole      bool
	holds                       []*Held
	drops                       []*Dropped
	swallows                    []*Swallowed
}

// Counts is what a proxy has done so far.
type Counts struct {
	Connections int64 // accepted
	Requests    int64 // chunks passed to the server
	Replies     int64 // chunks passed to the client
	Delayed     int64 // chunks that Delay made wait
	Dropped     int64 // chunks that DropReplies swallowed
	BlackHoled  int64 // chunks that BlackHole kept
	Held        int64 // chunks that Hold kept
	Reset       int64 // connections that Reset ended
	CutRequests int64 // connections that DropRequest cut
	CutReplies  int64 // connections that DropReplyTo cut
	Redialed    int64 // connections whose server side was opened anew (KeepClients)
}

// ProxyOption changes how a proxy works.
type ProxyOption func(*Proxy)

// KeepClients keeps the connection of a client open when the server ends its side, and opens
// that side again when the client sends something, for as long as it takes. What belonged to
// the connection (authentication, subscriptions) is gone, as behind many real proxies. A client
// that waits for a reply at that moment is disconnected: the next reply would not be its own.
func KeepClients() ProxyOption { return func(p *Proxy) { p.keep = true } }

// NewProxy starts a proxy on a free port of 127.0.0.1 in front of target (host:port). It is
// closed when the test ends.
func NewProxy(t testing.TB, target string, opts ...ProxyOption) *Proxy {
	t.Helper()
	p := &Proxy{t: t, target: target, changed: make(chan struct{}), links: map[*link]struct{}{}}
	for _, o := range opts {
		o(p)
	}
	ln, err := listenFree()
	if err != nil {
		t.Fatal(err)
	}
	p.addr = ln.Addr().String()
	p.serve(ln)
	t.Cleanup(p.Close)
	return p
}

// Addr is host:port; it stays the same over Refuse and Heal.
func (p *Proxy) Addr() string { return p.addr }

// Counts answers what the proxy has done so far.
func (p *Proxy) Counts() Counts {
	return Counts{
		Connections: p.connections.Load(), Requests: p.requests.Load(), Replies: p.replies.Load(),
		Delayed: p.delayed.Load(), Dropped: p.dropped.Load(), BlackHoled: p.blackHoled.Load(),
		Held: p.held.Load(), Reset: p.resetHits.Load(), Redialed: p.redialed.Load(),
		CutRequests: p.cutRequests.Load(), CutReplies: p.cutReplies.Load(),
	}
}

func (p *Proxy) change(f func(*faults)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.faults)
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Proxy) state() (faults, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.faults, p.changed
}

// Delay delays everything by d in each direction.
func (p *Proxy) Delay(d time.Duration) {
	p.change(func(f *faults) { f.delayRequests, f.delayReplies = d, d })
}

// DelayRequests delays what clients send.
func (p *Proxy) DelayRequests(d time.Duration) { p.change(func(f *faults) { f.delayRequests = d }) }

// DelayReplies delays what the server sends.
func (p *Proxy) DelayReplies(d time.Duration) { p.change(func(f *faults) { f.delayReplies = d }) }

// DropReplies passes requests and swallows what the server answers. Connections stay open, but
// one that has lost bytes never delivers any again: Heal ends it, since no client could tell
// which reply belongs to which request.
func (p *Proxy) DropReplies() { p.change(func(f *faults) { f.dropReplies = true }) }

// BlackHole lets nothing pass in either direction. Connections stay open, and new ones are
// accepted. As in a network that breaks and mends, Heal delivers what was sent meanwhile,
// also by clients that have hung up since.
func (p *Proxy) BlackHole() { p.change(func(f *faults) { f.blackHole = true }) }

// Reset ends all connections with a TCP reset, and answers how many. New ones are accepted.
func (p *Proxy) Reset() int {
	links := p.open()
	for _, l := range links {
		l.reset()
		p.resetHits.Add(1)
	}
	return len(links)
}

// Refuse closes the listening socket, so that the system refuses new connections. Connections
// that are open stay; see Reset.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ln != nil {
		p.ln.Close()
		p.ln = nil
	}
}

// Heal ends all faults. What they kept is delivered.
func (p *Proxy) Heal() {
	p.t.Helper()
	p.mu.Lock()
	refusing := p.ln == nil && !p.closed
	p.mu.Unlock()
	p.change(func(f *faults) {
		for _, h := range f.holds {
			h.release()
		}
		*f = faults{}
	})
	for _, l := range p.open() {
		if l.tainted.Load() {
			l.reset()
		}
	}
	if !refusing {
		return
	}
	err := eventually(startTimeout, func() error {
		ln, err := net.Listen("tcp", p.addr)
		if err == nil {
			p.serve(ln)
		}
		return err
	})
	if err != nil {
		p.t.Fatal(err)
	}
}

// Held is a set of requests that are held back; see [Proxy.Hold].
type Held struct {
	p        *Proxy
	match    func([]byte) bool
	count    atomic.Int64
	arrived  chan struct{} // closed at the first one
	first    sync.Once
	released chan struct{}
	once     sync.Once
}

// Hold holds back the chunks from clients for which match answers true, such as those that
// contain a script's digest, and what the same connection sends after them, until Release. They
// are delivered then, also when the client has hung up. match must not keep its argument.
func (p *Proxy) Hold(match func(request []byte) bool) *Held {
	h := &Held{p: p, match: match, arrived: make(chan struct{}), released: make(chan struct{})}
	p.change(func(f *faults) { f.holds = append(f.holds[:len(f.holds):len(f.holds)], h) })
	return h
}

// Wait waits until something is held back.
func (h *Held) Wait(ctx context.Context) error {
	select {
	case <-h.arrived:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Count is how many chunks were held back.
func (h *Held) Count() int { return int(h.count.Load()) }

// Release delivers what was held back and holds nothing more.
func (h *Held) Release() {
	h.release()
	h.p.change(func(f *faults) {
		var rest []*Held
		for _, o := range f.holds {
			if o != h {
				rest = append(rest, o)
			}
		}
		f.holds = rest
	})
}

func (h *Held) release() { h.once.Do(func() { close(h.released) }) }

// Dropped is a fault that cuts connections at requests; see [Proxy.DropReplyTo] and
// [Proxy.DropRequest].
type Dropped struct {
	p     *Proxy
	match func([]byte) bool
	reply bool
	count atomic.Int64
}

// DropReplyTo lets a request for which match answers true reach the server, swallows what the
// server answers, and cuts the connection when that has arrived: the server has acted, and the
// client cannot know. It does so to every such request until Stop or Heal.
//
// The first bytes that come after the request are taken for its reply, so the client must not
// send a request before it has the reply to the one before, on the same connection.
//
// Connections are cut on both sides, by a reset and by an orderly end in turn. match sees
// chunks, must not keep its argument, and may be called by several goroutines at once; see
// [Containing] and [Only].
func (p *Proxy) DropReplyTo(match func(request []byte) bool) *Dropped { return p.drop(match, true) }

// DropRequest cuts the connection at a request for which match answers true, which the server
// never sees. The rest is as in [Proxy.DropReplyTo].
func (p *Proxy) DropRequest(match func(request []byte) bool) *Dropped { return p.drop(match, false) }

func (p *Proxy) drop(match func([]byte) bool, reply bool) *Dropped {
	d := &Dropped{p: p, match: match, reply: reply}
	p.change(func(f *faults) { f.drops = append(slices.Clip(f.drops), d) })
	return d
}

// Count is how many connections were cut. For DropReplyTo this many requests were answered by
// the server.
func (d *Dropped) Count() int { return int(d.count.Load()) }

// Stop ends the fault. A reply that is still to come to a request that was passed already is
// swallowed nevertheless.
func (d *Dropped) Stop() {
	d.p.change(func(f *faults) {
		f.drops = slices.DeleteFunc(slices.Clone(f.drops), func(o *Dropped) bool { return o == d })
	})
}

// Containing matches what contains text, in upper or lower case: Containing("commit") matches
// the end of a transaction in SQL.
func Containing(text string) func([]byte) bool {
	text = strings.ToLower(text)
	return func(b []byte) bool { return bytes.Contains(bytes.ToLower(b), []byte(text)) }
}

// Only answers true for the first n of what match matches.
func Only(n int, match func([]byte) bool) func([]byte) bool {
	var hits atomic.Int64
	return func(b []byte) bool { return match(b) && hits.Add(1) <= int64(n) }
}

// Swallowed is a fault that loses messages; see [Proxy.Swallow].
type Swallowed struct {
	p     *Proxy
	match func([]byte) bool
	count atomic.Int64
}

// Swallow loses the chunks from the server for which match answers true, until Stop or Heal,
// and the connections go on as if they had never been sent. It is for what a server sends
// unasked, such as the messages of Redis channels, which no client can miss: a reply to a
// request must not be lost this way. match must not keep its argument, and may be called by
// several goroutines at once; see [Containing] and [Only].
func (p *Proxy) Swallow(match func(chunk []byte) bool) *Swallowed {
	s := &Swallowed{p: p, match: match}
	p.change(func(f *faults) { f.swallows = append(slices.Clip(f.swallows), s) })
	return s
}

// Count is how many chunks were lost.
func (s *Swallowed) Count() int { return int(s.count.Load()) }

// Stop ends the fault.
func (s *Swallowed) Stop() {
	s.p.change(func(f *faults) {
		f.swallows = slices.DeleteFunc(slices.Clone(f.swallows), func(o *Swallowed) bool { return o == s })
	})
}

// Close ends the proxy and all its connections, and waits for its goroutines.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	if p.ln != nil {
		p.ln.Close()
		p.ln = nil
	}
	p.mu.Unlock()
	for _, l := range p.open() {
		l.close()
	}
	p.wg.Wait()
}

// open answers the connections that are open.
func (p *Proxy) open() []*link {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.links))
}

// serve accepts until the listener is closed.
func (p *Proxy) serve(ln net.Listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.ln != nil {
		ln.Close()
		return
	}
	p.ln = ln
	p.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.link(ln, c)
		}
	})
}

func (p *Proxy) link(ln net.Listener, client net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.ln != ln { // refused since it was accepted
		client.Close()
		return
	}
	l := &link{
		p: p, client: client, done: make(chan struct{}),
		up: make(chan chunk, 64), down: make(chan chunk, 64),
	}
	p.links[l] = struct{}{}
	p.connections.Add(1)
	p.wg.Go(l.readClient)
	p.wg.Go(l.writeServer)
	p.wg.Go(l.writeClient)
}

// link is one connection of a client and one to the server. For each direction one goroutine
// reads and stamps chunks and one delivers them when they are due, so that a delay costs time
// and not throughput.
type link struct {
	p        *Proxy
	client   net.Conn
	up, down chan chunk
	done     chan struct{}
	once     sync.Once

	mu     sync.Mutex
	server net.Conn // nil before it is open, and after the server hung up
	dialed bool     // the server side is or was open
	gone   bool     // the client has hung up

	asked   atomic.Bool             // the last chunk that passed was a request
	tainted atomic.Bool             // bytes of the server were swallowed
	cutAt   atomic.Pointer[Dropped] // cuts the link when the server answers
}

type chunk struct {
	data []byte // nil: the other side has hung up
	at   time.Time
}

func (l *link) close() {
	l.once.Do(func() {
		close(l.done)
		l.client.Close()
		l.mu.Lock()
		if l.server != nil {
			l.server.Close()
		}
		l.mu.Unlock()
		l.p.mu.Lock()
		delete(l.p.links, l)
		l.p.mu.Unlock()
	})
}

// reset is close by TCP RST on both sides.
func (l *link) reset() {
	_ = l.client.(*net.TCPConn).SetLinger(0)
	l.mu.Lock()
	if s, ok := l.server.(*net.TCPConn); ok {
		_ = s.SetLinger(0)
	}
	l.mu.Unlock()
	l.close()
}

// read sends what it reads to out, and then an empty chunk.
func (l *link) read(c net.Conn, out chan<- chunk) {
	buf := make([]byte, 64<<10)
	for {
		n, err := c.Read(buf)
		if n > 0 && !l.send(out, chunk{append([]byte(nil), buf[:n]...), time.Now()}) {
			return
		}
		if err != nil {
			return
		}
	}
}

func (l *link) send(out chan<- chunk, c chunk) bool {
	select {
	case out <- c:
		return true
	case <-l.done:
		return false
	}
}

func (l *link) readClient() {
	l.read(l.client, l.up)
	l.mu.Lock()
	l.gone = true
	l.mu.Unlock()
	l.send(l.up, chunk{at: time.Now()})
}

func (l *link) readServer(s net.Conn) {
	l.read(s, l.down)
	l.mu.Lock()
	keep := l.p.keep && !l.gone && !l.asked.Load()
	if keep {
		l.server = nil
		s.Close()
	}
	l.mu.Unlock()
	if !keep {
		l.send(l.down, chunk{at: time.Now()})
	}
}

// writeServer delivers requests in order, when no fault keeps them.
func (l *link) writeServer() {
	// Some servers speak first.
	if _, err := l.dial(); err != nil && !l.p.keep {
		l.close()
		return
	}
	for {
		var c chunk
		select {
		case c = <-l.up:
		case <-l.done:
			return
		}
		if c.data != nil && !l.waitHeld(c) || !l.waitDue(c, true) {
			return
		}
		if c.data == nil {
			l.hangUp()
			return
		}
		if d := l.dropAt(c.data); d != nil && !d.reply {
			l.cut(d, &l.p.cutRequests)
			return
		} else if d != nil {
			l.cutAt.Store(d)
		}
		if !l.forward(c.data) {
			l.close()
			return
		}
	}
}

// hangUp tells the server that the client has gone, after all that the client has sent. The
// server reads that, answers into the void and closes.
func (l *link) hangUp() {
	l.mu.Lock()
	s, ok := l.server.(*net.TCPConn)
	l.mu.Unlock()
	if !ok || s.CloseWrite() != nil {
		l.close()
	}
}

// forward writes to the server, after opening the connection where there is none.
func (l *link) forward(data []byte) bool {
	l.asked.Store(true)
	for {
		s, err := l.dial()
		if err == nil {
			if _, err = s.Write(data); err == nil {
				l.p.requests.Add(1)
				return true
			}
			// Not again: the server may have read a part.
			return false
		}
		l.mu.Lock()
		gone := l.gone
		l.mu.Unlock()
		if !l.p.keep || gone {
			return false
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-l.done:
			return false
		}
	}
}

func (l *link) dial() (net.Conn, error) {
	l.mu.Lock()
	s := l.server
	l.mu.Unlock()
	if s != nil {
		return s, nil
	}
	s, err := net.DialTimeout("tcp", l.p.target, 5*time.Second)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.done:
		s.Close()
		return nil, net.ErrClosed
	default:
	}
	if l.dialed {
		l.p.redialed.Add(1)
	}
	l.server, l.dialed = s, true
	l.p.wg.Go(func() { l.readServer(s) })
	return s, nil
}

// writeClient delivers replies in order, when no fault keeps them.
func (l *link) writeClient() {
	for {
		var c chunk
		select {
		case c = <-l.down:
		case <-l.done:
			return
		}
		if !l.waitDue(c, false) {
			return
		}
		if c.data == nil {
			l.close()
			return
		}
		if d := l.cutAt.Load(); d != nil {
			l.cut(d, &l.p.cutReplies)
			return
		}
		if f, _ := l.p.state(); f.dropReplies || l.tainted.Load() {
			l.tainted.Store(true)
			l.p.dropped.Add(1)
			continue
		}
		if l.swallow(c.data) {
			continue
		}
		// A client that has hung up does not keep its requests from the server.
		if _, err := l.client.Write(c.data); err == nil {
			l.p.replies.Add(1)
		}
		l.asked.Store(false)
	}
}

// swallow reports whether the chunk is to be lost.
func (l *link) swallow(chunk []byte) bool {
	f, _ := l.p.state()
	for _, s := range f.swallows {
		if s.match(chunk) {
			s.count.Add(1)
			return true
		}
	}
	return false
}

// dropAt answers the first fault that cuts at the request.
func (l *link) dropAt(request []byte) *Dropped {
	f, _ := l.p.state()
	for _, d := range f.drops {
		if d.match(request) {
			return d
		}
	}
	return nil
}

func (l *link) cut(d *Dropped, total *atomic.Int64) {
	total.Add(1)
	if d.count.Add(1)%2 == 1 {
		l.reset()
	} else {
		l.close()
	}
}

// waitHeld waits while a Hold keeps the chunk. It answers false when the link is closed.
func (l *link) waitHeld(c chunk) bool {
	f, _ := l.p.state()
	for _, h := range f.holds {
		if !h.match(c.data) {
			continue
		}
		h.count.Add(1)
		l.p.held.Add(1)
		h.first.Do(func() { close(h.arrived) })
		select {
		case <-h.released:
		case <-l.done:
			return false
		}
	}
	return true
}

// waitDue waits until no delay and no black hole keeps the chunk. It answers false when the
// link is closed.
func (l *link) waitDue(c chunk, request bool) bool {
	delayed, swallowed := false, false
	for {
		f, changed := l.p.state()
		delay := f.delayReplies
		if request {
			delay = f.delayRequests
		}
		var due <-chan time.Time
		switch wait := time.Until(c.at.Add(delay)); {
		case f.blackHole:
			if !swallowed && c.data != nil {
				swallowed = true
				l.p.blackHoled.Add(1)
			}
		case delay > 0 && wait > 0:
			if !delayed && c.data != nil {
				delayed = true
				l.p.delayed.Add(1)
			}
			due = time.After(wait)
		default:
			return true
		}
		select {
		case <-due:
		case <-changed:
		case <-l.done:
			return false
		}
	}
}
