package redlock

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// PubSub is a connection that a node has opened for its [Subscriptions], which send one command
// at a time.
type PubSub interface {
	// Subscribe sends one SUBSCRIBE and returns when it is answered; a [*ServerError] says that
	// the server has subscribed none of the channels. Any other error ends the connection's use.
	Subscribe(ctx context.Context, channels ...string) error

	// Unsubscribe is the same for UNSUBSCRIBE. It returns after the last of the confirmations.
	Unsubscribe(ctx context.Context, channels ...string) error

	// Broken receives once, or is closed, when the connection has ended.
	Broken() <-chan error

	// Close ends the connection. It does not wait for the server.
	Close()
}

// Subscriptions makes the method Subscribe of a [Node]: all its calls share one connection, which
// is there while there are calls. With Open set, the zero value is ready. It must not be copied
// after first use.
type Subscriptions struct {
	// Open connects. The connection then calls message and confirmed, which do not block, in the
	// order in which the server sends messages and confirmations of SUBSCRIBE, until Close. A
	// [*ServerError] that answers the connecting may end all calls of Subscribe, as [Node] says.
	Open func(ctx context.Context, message func(channel, payload string), confirmed func(channel string)) (PubSub, error)

	mu        sync.Mutex
	listeners map[string][]*listener // by channel; replaced, never changed; none: to be unsubscribed
	todo      map[string]struct{}    // channels to subscribe, or to unsubscribe
	changed   chan struct{}          // todo has grown
	listening int                    // listeners of all channels
	running   bool
	current   *link
}

// listener is one call of Subscribe.
type listener struct {
	deliver func(string)
	up      func()
	refused chan error
	isUp    bool // was told so since the connection was opened; guarded by Subscriptions.mu

	mu   sync.Mutex
	over bool
}

// link is the use of one connection.
type link struct {
	s           *Subscriptions
	heard, good bool // since the last look; ever. Guarded by Subscriptions.mu
}

const (
	channelsAtOnce = 1000 // in one command
	openWithin     = 5 * time.Second
	answerWithin   = 3 * time.Second
	checkEvery     = 3 * time.Second // on a connection that is silent
	minReconnect   = 50 * time.Millisecond
	maxReconnect   = 2 * time.Second
)

// Subscribe does what [Node] says of the method.
func (s *Subscriptions) Subscribe(ctx context.Context, channel string, deliver func(payload string), up func()) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	l := &listener{deliver: deliver, up: up, refused: make(chan error, 1)}
	s.join(channel, l)
	defer l.end()
	defer s.leave(channel, l)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-l.refused:
		return err
	}
}

func (s *Subscriptions) join(channel string, l *listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listeners == nil {
		s.listeners, s.todo = map[string][]*listener{}, map[string]struct{}{}
		s.changed = make(chan struct{}, 1)
	}
	s.listeners[channel] = append(slices.Clip(s.listeners[channel]), l)
	s.listening++
	s.see(channel)
	if !s.running {
		s.running = true
		go s.run()
	}
}

func (s *Subscriptions) leave(channel string, l *listener) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.listeners[channel], l)
	if i < 0 {
		return // refused
	}
	left := slices.Delete(slices.Clone(s.listeners[channel]), i, i+1)
	s.listeners[channel] = left
	s.listening--
	if len(left) == 0 {
		s.see(channel)
	}
}

// see has the loop look at a channel. The caller holds s.mu.
func (s *Subscriptions) see(channel string) {
	s.todo[channel] = struct{}{}
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// end makes sure that nothing is called from now on.
func (l *listener) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
}

func (l *listener) message(payload string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.deliver(payload)
	}
}

func (l *listener) confirmed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.up()
	}
}

// message is what the connection calls.
func (c *link) message(channel, payload string) {
	for _, l := range c.listeners(channel) {
		l.message(payload)
	}
}

func (c *link) listeners(channel string) []*listener {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.heard = true
	if c.s.current != c {
		return nil
	}
	return c.s.listeners[channel]
}

// confirmed is what the connection calls. A listener that has been told already was not meant,
// but one that joined it, or the check of a silent connection.
func (c *link) confirmed(channel string) {
	for _, l := range c.fresh(channel) {
		l.confirmed()
	}
}

func (c *link) fresh(channel string) (fresh []*listener) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.heard, c.good = true, true
	if c.s.current != c {
		return nil
	}
	for _, l := range c.s.listeners[channel] {
		if !l.isUp {
			l.isUp = true
			fresh = append(fresh, l)
		}
	}
	return fresh
}

// run keeps a connection while there are listeners.
func (s *Subscriptions) run() {
	pause := minReconnect
	for {
		c := s.begin()
		if c == nil {
			return
		}
		err := s.serve(c)
		if s.reset(c) {
			pause = minReconnect
		}
		if err != nil {
			s.sleep(time.Duration(float64(pause) * (0.5 + rand.Float64())))
			pause = min(2*pause, maxReconnect)
		}
	}
}

// begin answers nil where nobody is left to listen.
func (s *Subscriptions) begin() *link {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listening == 0 {
		s.running = false
		return nil
	}
	s.current = &link{s: s}
	return s.current
}

// reset has everybody subscribed by the next connection. It answers whether this one was of use.
func (s *Subscriptions) reset(c *link) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current = nil
	clear(s.todo)
	maps.DeleteFunc(s.listeners, func(_ string, all []*listener) bool { return len(all) == 0 })
	for channel, all := range s.listeners {
		s.todo[channel] = struct{}{}
		down(all)
	}
	return c.good
}

func down(all []*listener) {
	for _, l := range all {
		l.isUp = false
	}
}

func (s *Subscriptions) sleep(d time.Duration) {
	over := time.After(d)
	for !s.idle() {
		select {
		case <-over:
			return
		case <-s.changed:
		}
	}
}

func (s *Subscriptions) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listening == 0
}

// serve opens a connection and does what there is to do, until nobody is left, or until the error.
func (s *Subscriptions) serve(c *link) error {
	ctx, cancel := context.WithTimeout(context.Background(), openWithin)
	conn, err := s.Open(ctx, c.message, c.confirmed)
	cancel()
	if err != nil {
		if refusal(err) {
			s.refuse(err, s.all()...)
		}
		return err
	}
	defer conn.Close()
	for err == nil && !s.idle() {
		join, leave := s.next()
		switch {
		case len(join)+len(leave) == 0:
			err = s.wait(c, conn)
		default:
			if err = s.subscribe(conn, join); err == nil {
				err = s.unsubscribe(conn, leave)
			}
		}
	}
	return err
}

// next takes channels to subscribe and to unsubscribe, as many as fit in a command.
func (s *Subscriptions) next() (join, leave []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for channel := range s.todo {
		if len(join) == channelsAtOnce || len(leave) == channelsAtOnce {
			break
		}
		delete(s.todo, channel)
		switch all, ok := s.listeners[channel]; {
		case len(all) > 0:
			join = append(join, channel)
		case ok: // else refused
			leave = append(leave, channel)
		}
	}
	return join, leave
}

// subscribe finds out who is refused: the server refuses all channels of a command for one.
func (s *Subscriptions) subscribe(conn PubSub, channels []string) error {
	err := command(conn.Subscribe, channels)
	if !refusal(err) {
		return err
	}
	half := len(channels) / 2
	if half == 0 {
		s.refuse(err, channels...)
		return nil
	}
	if err := s.subscribe(conn, channels[:half]); err != nil {
		return err
	}
	return s.subscribe(conn, channels[half:])
}

func (s *Subscriptions) unsubscribe(conn PubSub, channels []string) error {
	err := command(conn.Unsubscribe, channels)
	if err != nil && !refusal(err) { // refused: what still comes is for nobody
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, channel := range channels {
		if all := s.listeners[channel]; len(all) > 0 {
			down(all) // who came meanwhile may have been told of a SUBSCRIBE before
		} else {
			delete(s.listeners, channel)
		}
	}
	return nil
}

func command(send func(context.Context, ...string) error, channels []string) error {
	if len(channels) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), answerWithin)
	defer cancel()
	return send(ctx, channels...)
}

var errBroken = errors.New("the connection has ended")

// wait returns when there is something to do. A connection that is silent is asked for an answer,
// by subscribing a channel once more: every client can send that on the right connection.
func (s *Subscriptions) wait(c *link, conn PubSub) error {
	select {
	case <-s.changed:
		return nil
	case err := <-conn.Broken():
		return cmp.Or(err, errBroken)
	case <-time.After(checkEvery / 2):
		return s.subscribe(conn, s.check(c))
	}
}

// check is a channel to check with, where nothing was heard since the last look.
func (s *Subscriptions) check(c *link) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.heard {
		c.heard = false
		return nil
	}
	for channel, all := range s.listeners {
		if len(all) > 0 {
			return []string{channel}
		}
	}
	return nil
}

// refuse ends the calls for the channels.
func (s *Subscriptions) refuse(err error, channels ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, channel := range channels {
		for _, l := range s.listeners[channel] {
			l.refused <- err
		}
		s.listening -= len(s.listeners[channel])
		delete(s.listeners, channel)
	}
}

func (s *Subscriptions) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.listeners))
}

// refusal says that asking again is useless.
func refusal(err error) bool {
	var e *ServerError
	if !errors.As(err, &e) {
		return false
	}
	switch e.Code() {
	case "NOPERM", "NOAUTH", "WRONGPASS", "ERR":
		return true
	}
	return false
}
