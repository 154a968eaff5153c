package zkstore

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast/store"
)

// session is the connection of a Store, over as many ZooKeeper sessions as there have to be: one
// at a time, each a life.
type session struct {
	conn  *zk.Conn
	asked time.Duration // the timeout
	auth  []byte        // of the scheme digest; nil for none
	tls   *tls.Config   // nil for none

	closing chan struct{} // closed by Close

	mu      sync.Mutex
	link    *link
	life    *life         // nil where no session stands
	up      bool          // requests are sent
	changed chan struct{} // closed and replaced when up changes
	synced  chan struct{} // closed and replaced when a sync has been sent
	reason  error         // why there is no session; nil where that is not known
	refused error         // what the last server has said of the credentials; nil where it took them
	watches map[string]*watch
}

// life is one ZooKeeper session. Its ephemeral nodes end with it.
type life struct {
	id  int64
	ctx context.Context // done when the servers have said that it has ended
	end context.CancelFunc

	mu      sync.Mutex
	timeout time.Duration // as the last server has granted it
	least   bool          // which is their least: two ticks, unless configured otherwise
	agreed  time.Time     // start of the last request that a quorum has agreed to
}

// grant takes note of the timeout.
func (l *life) grant(timeout time.Duration, least bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timeout, l.least = timeout, least
}

// lasts is the timeout.
func (l *life) lasts() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.timeout
}

// trusted is how long a lease may be trusted from before the request that confirmed it. The client
// library pings each third of the timeout, and the leader hears of that half a tick later: an answer
// of the leader proves a life of two thirds of the timeout, less half a tick. That is a half where
// the timeout has three ticks, and five twelfths where it has two.
func (l *life) trusted() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.least {
		return l.timeout * 5 / 12
	}
	return l.timeout / 2
}

// agree takes note that a quorum has agreed to a request of the session that began at start.
func (l *life) agree(start time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if start.After(l.agreed) {
		l.agreed = start
	}
}

// quorate is when a quorum has last agreed to a request of the session.
func (l *life) quorate() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.agreed
}

// stale reports whether the leader must show by a transaction that it still leads. A sync does not
// show it: a leader that the others have replaced, and that has not noticed, answers one by itself.
func (l *life) stale() bool { return time.Since(l.quorate()) > l.lasts()/4 }

// until is the end of the trust in a lease that was confirmed by a request which began at start. A
// leader that was elected since a quorum last agreed gives each session its whole timeout anew.
func (l *life) until(start time.Time) time.Time {
	end, elected := start.Add(l.trusted()), l.quorate().Add(l.lasts())
	if elected.Before(end) {
		return elected
	}
	return end
}

// over reports whether the session has ended.
func (l *life) over() bool { return l.ctx.Err() != nil }

func dial(servers []string, timeout time.Duration, auth []byte, config *tls.Config) (*session, error) {
	s := &session{
		asked: timeout, auth: auth, tls: config, closing: make(chan struct{}), changed: make(chan struct{}), synced: make(chan struct{}),
		watches: map[string]*watch{},
	}
	conn, _, err := zk.Connect(servers, timeout,
		zk.WithDialer(s.dial), zk.WithHostProvider(&hosts{}), zk.WithEventCallback(s.event),
		zk.WithLogger(silent{}), zk.WithLogInfo(false), zk.WithMaxConnBufferSize(connBuffer), zk.WithMaxBufferSize(1<<20+1<<16))
	if err != nil {
		return nil, &store.InvalidError{Field: "Servers", Rule: oneLine(err)}
	}
	s.conn = conn
	return s, nil
}

// connBuffer holds the largest request: the marks and nodes are small, the operations of a guarded
// write at most what a server takes by default.
const connBuffer = 1<<20 + 1<<16

// silent keeps the client library from writing to standard error: a library has no log.
type silent struct{}

func (silent) Printf(string, ...any) {}

func (s *session) close() {
	s.mu.Lock()
	if s.closed() {
		s.mu.Unlock()
		return
	}
	close(s.closing)
	s.down()
	s.end() // the leases first: the servers let others in when the session is closed, before they say so
	s.mu.Unlock()
	s.conn.Close()
	s.mu.Lock()
	l := s.link
	s.mu.Unlock()
	if l != nil {
		l.Close()
	}
}

// event is called by the client library, in its loops: it does not block.
func (s *session) event(e zk.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Type != zk.EventSession {
		s.fire(e.Path)
		return
	}
	switch e.State {
	case zk.StateHasSession:
		s.begin()
	case zk.StateExpired:
		s.down()
		s.end()
	case zk.StateDisconnected:
		s.down()
	}
}

// begin takes note of the session that the handshake has answered. mu is held.
func (s *session) begin() {
	if s.closed() {
		return
	}
	s.reason = nil
	id, timeout := s.link.session()
	if s.life == nil || s.life.id != id {
		s.end()
		ctx, cancel := context.WithCancel(context.Background())
		s.life = &life{id: id, ctx: ctx, end: cancel}
	}
	s.life.grant(timeout, timeout > s.asked)
	if len(s.watches) == 0 {
		s.set(true)
		return
	}
	// The client library sets its watches again first; it does not bear answers to other requests
	// before. Where it has none after all, nothing says so.
	l := s.link
	time.AfterFunc(watchesLimit, func() { s.watching(l) })
}

// watchesLimit is how long a connection waits for the request that sets watches again.
const watchesLimit = 100 * time.Millisecond

// watching takes note that watches have been set again.
func (s *session) watching(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.link == l && s.life != nil && len(l.head) == headLen && !l.down {
		s.set(true)
	}
}

// down takes note that the connection has gone. mu is held.
func (s *session) down() {
	if s.link != nil {
		s.link.down = true
	}
	s.set(false)
}

// end ends the life. mu is held.
func (s *session) end() {
	if s.life == nil {
		return
	}
	s.life.end()
	s.life = nil
	for path := range s.watches {
		s.fire(path)
	}
}

func (s *session) set(up bool) {
	if s.up != up {
		s.up = up
		close(s.changed)
		s.changed = make(chan struct{})
	}
}

// connectLimit bounds the wait for a session.
const connectLimit = 2 * time.Second

// noSession is why there is none, and what to do.
func (s *session) noSession() error {
	const text = "there is no session with ZooKeeper; a quorum of its servers must be reachable"
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reason == nil {
		return errors.New(text)
	}
	return fmt.Errorf("%s: %w", text, s.reason)
}

// failed takes note of why a server gave no session.
func (s *session) failed(addr string, err error) {
	if err == io.EOF {
		err = errors.New("it ended the connection; it may be without its quorum, or have too many clients")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reason = fmt.Errorf("%s: %w", addr, err)
}

var errClosed = &fault{kind: &store.InvalidError{Field: "store", Rule: "was closed; open another one"}}

// await waits for a session through which requests can be sent, for at most [connectLimit].
// Its errors say that nothing was sent.
func (s *session) await(ctx context.Context) (*life, error) {
	var limit *time.Timer
	for {
		s.mu.Lock()
		l, up, changed, refused := s.life, s.up, s.changed, s.refused
		s.mu.Unlock()
		switch {
		case s.closed():
			return nil, errClosed
		case refused != nil:
			return nil, refused
		case context.Cause(ctx) == errNoAnswer:
			return nil, unavailable(s.noSession())
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case up && l != nil:
			return l, nil
		}
		if limit == nil {
			limit = time.NewTimer(connectLimit)
			defer limit.Stop()
		}
		select {
		case <-changed:
		case <-s.closing:
		case <-ctx.Done():
		case <-limit.C:
			return nil, unavailable(s.noSession())
		}
	}
}

func (s *session) closed() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// patience is how long one request may take before its server is given up for another one:
// early enough that a lease which is extended each third of its ttl survives a server that has
// stopped, or is cut off from its leader.
func patience(timeout time.Duration) time.Duration {
	return min(max(timeout/6, 200*time.Millisecond), 5*time.Second)
}

// watchdog cuts the connection unless it is stopped in time. The client library then goes to the
// next server, with the same session.
func (s *session) watchdog(timeout time.Duration) (stop func()) {
	t := time.AfterFunc(patience(timeout), func() {
		s.mu.Lock()
		l := s.link
		s.mu.Unlock()
		if l != nil {
			l.Close()
		}
	})
	return func() { t.Stop() }
}

// watch is one watch of a node, which all who wait for that node share.
type watch struct {
	fired chan struct{} // closed at the first change of the node, or with the session
	once  sync.Once
	data  []byte
	stat  zk.Stat
	err   error
}

// watch reads a node and watches it, unless it is watched already.
func (s *session) watch(l *life, path string) (*watch, error) {
	s.mu.Lock()
	w := s.watches[path]
	if w == nil {
		w = &watch{fired: make(chan struct{})}
		s.watches[path] = w
	}
	s.mu.Unlock()
	w.once.Do(func() {
		defer s.watchdog(l.lasts())()
		data, stat, _, err := s.conn.GetW(path)
		if w.err = err; err == nil {
			w.data, w.stat = data, *stat
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.watches[path] == w {
			s.fire(path)
		}
	})
	return w, w.err
}

// fire tells those who watch a node. mu is held.
func (s *session) fire(path string) {
	if w := s.watches[path]; w != nil {
		delete(s.watches, path)
		close(w.fired)
	}
}

// dial is the dialer of the client library.
func (s *session) dial(network, addr string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	go func() {
		select {
		case <-s.closing:
			cancel()
		case <-ctx.Done():
		}
	}()
	c, err := s.connect(ctx, network, addr)
	if err != nil {
		s.failed(addr, err)
		return nil, err
	}
	l := &link{Conn: c, s: s, addr: addr, limit: patience(s.asked)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed() {
		c.Close()
		return nil, errClosed
	}
	s.link = l
	if s.reason == nil {
		s.reason = fmt.Errorf("%s: no answer to the handshake yet", addr)
	}
	return l, nil
}

// connect opens a connection, and TLS on it where that is asked for.
func (s *session) connect(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil || s.tls == nil {
		return c, err
	}
	config := s.tls.Clone()
	if config.ServerName == "" {
		config.ServerName, _, _ = net.SplitHostPort(addr)
	}
	t := tls.Client(c, config)
	if err := t.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("no TLS: %w", err)
	}
	return t, nil
}

// link is a connection. It reads the server's answer to the handshake along, because the client
// library does not tell the timeout that the server has granted, and checks the length of each
// message, because the library would panic at one that is too short.
type link struct {
	net.Conn
	addr  string
	limit time.Duration // for the answer to the handshake; the library would wait for many timeouts
	s     *session
	asked bool // the handshake has been sent
	down  bool // the client library has given it up; session.mu guards it

	head   []byte  // of the answer to the handshake
	known  bool    // its length has come
	length [4]byte // of a message
	have   int     // bytes of it that have come
	left   int     // bytes of the message that are still to come
	begun  []byte  // the first of those that have come, up to minMessage
}

// headLen is up to the end of the session's id: length, version, timeout, id.
const headLen = 4 + 4 + 4 + 8

func (l *link) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	greeted := len(l.head) == headLen
	if bad := l.follow(b[:n]); bad != nil {
		n, err = 0, bad
	}
	if err != nil && !greeted {
		l.s.failed(l.addr, err)
	}
	return n, err
}

// Lengths of messages: of the answer to the handshake, which is behind its head a password, and of any
// other, which begins with 16 bytes.
const (
	minGreeting, maxGreeting = 20, 256
	minMessage               = 16
)

var errProtocol = errors.New("what it answers is not ZooKeeper's protocol; look whether the port is the one for clients, with or without TLS as you ask for")

// follow reads along what the server says.
func (l *link) follow(b []byte) error {
	if rest := headLen - len(l.head); rest > 0 {
		l.head = append(l.head, b[:min(len(b), rest)]...)
	}
	for len(b) > 0 {
		if l.left == 0 {
			n := copy(l.length[l.have:], b)
			b = b[n:]
			if l.have += n; l.have < len(l.length) {
				break
			}
			l.have, l.left = 0, int(int32(binary.BigEndian.Uint32(l.length[:])))
			if !l.known && (l.left < minGreeting || l.left > maxGreeting) || l.left < minMessage {
				return errProtocol
			}
			l.known, l.begun = true, l.begun[:0]
			continue
		}
		n := min(l.left, len(b))
		if rest := minMessage - len(l.begun); rest > 0 {
			if l.begun = append(l.begun, b[:min(n, rest)]...); len(l.begun) == minMessage {
				l.heard()
			}
		}
		l.left, b = l.left-n, b[n:]
	}
	if len(l.head) < headLen {
		return nil
	}
	if id, timeout := l.session(); id != 0 && timeout <= 0 {
		return fmt.Errorf("it grants a session with a timeout of %v; set its maxSessionTimeout", timeout)
	}
	return nil
}

// heard takes note of the answer to the credentials, of which the client library takes none.
func (l *link) heard() {
	if number := int32(binary.BigEndian.Uint32(l.begun)); number != authXid {
		return
	}
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	if l.s.refused = nil; binary.BigEndian.Uint32(l.begun[12:]) != 0 {
		l.s.refused = &fault{&store.InvalidError{Field: "credentials",
			Rule: "were refused by " + l.addr + "; look whether its servers take the scheme digest"}, "", zk.ErrAuthFailed}
	}
	close(l.s.changed) // for those who wait
	l.s.changed = make(chan struct{})
}

// Kinds of requests. What the client library writes at once is a request, of which the third word is
// the kind, but for the first one.
const (
	opSync       = 9
	opAuth       = 100
	opSetWatches = 101
)

// Write sends the credentials right behind the handshake, before any other request: the client
// library would wait for an answer to them. The answer is passed over by its number.
func (l *link) Write(b []byte) (int, error) {
	if !l.asked {
		l.asked = true
		n, err := l.Conn.Write(append(b[:len(b):len(b)], l.s.credentials()...))
		return min(n, len(b)), err
	}
	n, err := l.Conn.Write(b)
	if len(b) >= 12 {
		switch binary.BigEndian.Uint32(b[8:]) {
		case opSync:
			l.s.sent()
		case opSetWatches:
			l.s.watching(l)
		}
	}
	return n, err
}

// authXid is the number of a request with credentials.
const authXid = -4

// credentials are a request, or nothing.
func (s *session) credentials() []byte {
	if s.auth == nil {
		return nil
	}
	const scheme = "digest"
	number := int32(authXid)
	b := make([]byte, 4, 64)
	b = binary.BigEndian.AppendUint32(b, uint32(number))
	b = binary.BigEndian.AppendUint32(b, opAuth)
	b = binary.BigEndian.AppendUint32(b, 0)
	b = append(binary.BigEndian.AppendUint32(b, uint32(len(scheme))), scheme...)
	b = append(binary.BigEndian.AppendUint32(b, uint32(len(s.auth))), s.auth...)
	binary.BigEndian.PutUint32(b, uint32(len(b)-4))
	return b
}

func (l *link) SetReadDeadline(t time.Time) error {
	if len(l.head) < headLen {
		t = time.Now().Add(l.limit)
	}
	return l.Conn.SetReadDeadline(t)
}

// session is what the server has answered.
func (l *link) session() (id int64, timeout time.Duration) {
	ms := int32(binary.BigEndian.Uint32(l.head[8:]))
	return int64(binary.BigEndian.Uint64(l.head[12:])), time.Duration(ms) * time.Millisecond
}

// hosts gives the client library its servers in turn. It looks no name up: dialling does, each
// time. After a connection is lost the next server is tried at once, and after a whole turn the
// library pauses for a second, and gives up what it has not sent.
//
// It also pauses where connections end as soon as they stand, again and again.
type hosts struct {
	mu      sync.Mutex
	servers []string
	next    int
	tried   int
	since   time.Time // of the connection; zero where there is none
	brief   int       // connections in a row that have ended at once
}

// briefly is what a connection lasts that ends at once.
const briefly = 20 * time.Millisecond

func (h *hosts) Init(servers []string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.servers = servers
	return nil
}

func (h *hosts) Len() int { return len(h.servers) }

func (h *hosts) Next() (server string, pause bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.since.IsZero() {
		if h.brief++; time.Since(h.since) > briefly {
			h.brief = 0
		}
		h.since = time.Time{}
	}
	pause = h.tried%len(h.servers) == 0 && (h.tried > 0 || h.brief > len(h.servers)+2)
	h.tried++
	server = h.servers[h.next%len(h.servers)]
	h.next++
	return server, pause
}

func (h *hosts) Connected() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tried, h.since = 0, time.Now()
}

// syncing is the connection, and a channel that is closed when a sync has been sent after this call.
func (s *session) syncing() (*link, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.link, s.synced
}

// sent takes note of a sync.
func (s *session) sent() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.synced)
	s.synced = make(chan struct{})
}

// current is the session that stands, or nil.
func (s *session) current() *life {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.life
}
