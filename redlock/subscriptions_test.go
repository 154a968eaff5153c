package redlock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// pubSubServer is a server without a network, of one connection after the other.
type pubSubServer struct {
	mu       sync.Mutex
	conns    []*pubSubConn
	commands []string // with the number of channels
	opened   []time.Time
	refused  map[string]bool
	openErr  error
	hangs    bool
	late     bool // a SUBSCRIBE is answered before its confirmations are told
}

type pubSubConn struct {
	server    *pubSubServer
	message   func(channel, payload string)
	confirmed func(channel string)
	broken    chan error

	mu       sync.Mutex // keeps messages and confirmations in order
	channels map[string]bool
	closed   bool
}

const pubSubRTT = time.Millisecond

var errCut = errors.New("cut")

func (s *pubSubServer) open(_ context.Context, message func(channel, payload string), confirmed func(channel string)) (PubSub, error) {
	time.Sleep(pubSubRTT)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened = append(s.opened, time.Now())
	if s.openErr != nil {
		return nil, s.openErr
	}
	c := &pubSubConn{server: s, message: message, confirmed: confirmed, broken: make(chan error, 1), channels: map[string]bool{}}
	s.conns = append(s.conns, c)
	return c, nil
}

// do counts a command and answers its error.
func (c *pubSubConn) do(ctx context.Context, command string, channels []string) error {
	time.Sleep(pubSubRTT)
	s := c.server
	s.mu.Lock()
	s.commands = append(s.commands, fmt.Sprint(command, " ", len(channels)))
	hangs := s.hangs
	refused := slices.ContainsFunc(channels, func(channel string) bool { return s.refused[channel] })
	s.mu.Unlock()
	switch {
	case hangs:
		<-ctx.Done()
		return ctx.Err()
	case refused:
		return &ServerError{Text: "NOPERM no permissions to access one of the channels"}
	}
	return nil
}

func (c *pubSubConn) Subscribe(ctx context.Context, channels ...string) error {
	if err := c.do(ctx, "subscribe", channels); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return errCut
	}
	for _, channel := range channels {
		c.channels[channel] = true
		if c.server.late {
			time.AfterFunc(pubSubRTT/2, func() { c.confirmed(channel) })
		} else {
			c.confirmed(channel)
		}
	}
	return nil
}

func (c *pubSubConn) Unsubscribe(ctx context.Context, channels ...string) error {
	if err := c.do(ctx, "unsubscribe", channels); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, channel := range channels {
		delete(c.channels, channel)
	}
	return nil
}

func (c *pubSubConn) Broken() <-chan error { return c.broken }

func (c *pubSubConn) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
}

// publish answers the number of receivers.
func (s *pubSubServer) publish(channel, payload string) (receivers int) {
	s.mu.Lock()
	conns := slices.Clone(s.conns)
	s.mu.Unlock()
	for _, c := range conns {
		c.mu.Lock()
		if !c.closed && c.channels[channel] {
			receivers++
			c.message(channel, payload)
		}
		c.mu.Unlock()
	}
	return receivers
}

// cut breaks the newest connection, and answers how many were broken.
func (s *pubSubServer) cut() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.conns) == 0 {
		return 0
	}
	c := s.conns[len(s.conns)-1]
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0
	}
	c.closed = true
	c.broken <- errCut
	return 1
}

func (s *pubSubServer) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// take answers the commands since the last time.
func (s *pubSubServer) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	commands := s.commands
	s.commands = nil
	return commands
}

// attempts are the times at which a connection was opened or tried.
func (s *pubSubServer) attempts() []time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.opened)
}

// connections are those that are not closed.
func (s *pubSubServer) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, c := range s.conns {
		c.mu.Lock()
		if !c.closed {
			n++
		}
		c.mu.Unlock()
	}
	return n
}

// heard is one call of Subscribe.
type heard struct {
	cancel   context.CancelFunc
	done     chan error
	ups      atomic.Int64
	messages atomic.Int64
	over     atomic.Bool
}

func hear(t *testing.T, s *Subscriptions, channel string) *heard {
	ctx, cancel := context.WithCancel(t.Context())
	h := &heard{cancel: cancel, done: make(chan error, 1)}
	check := func() {
		if h.over.Load() {
			t.Error("called after Subscribe has returned")
		}
	}
	go func() {
		err := s.Subscribe(ctx, channel,
			func(string) { check(); h.messages.Add(1) },
			func() { check(); h.ups.Add(1) })
		h.over.Store(true)
		h.done <- err
	}()
	return h
}

func (h *heard) want(t *testing.T, ups, messages int64) {
	t.Helper()
	if h.ups.Load() != ups || h.messages.Load() != messages {
		t.Errorf("%d times up and %d messages, want %d and %d", h.ups.Load(), h.messages.Load(), ups, messages)
	}
}

func (h *heard) end(t *testing.T) {
	t.Helper()
	h.cancel()
	if err := <-h.done; !errors.Is(err, context.Canceled) {
		t.Errorf("Subscribe returned %v", err)
	}
}

// subscriptions runs test with a server, and sees that nothing is left of it: a bubble waits for
// its goroutines.
func subscriptions(t *testing.T, test func(t *testing.T, server *pubSubServer, s *Subscriptions)) {
	synctest.Test(t, func(t *testing.T) {
		server := &pubSubServer{refused: map[string]bool{}}
		test(t, server, &Subscriptions{Open: server.open})
		time.Sleep(time.Minute)
		if n := server.connections(); n != 0 {
			t.Errorf("%d connections are left", n)
		}
	})
}

func TestSubscriptionsShareAConnection(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		var all []*heard
		for i := range 2500 {
			all = append(all, hear(t, s, fmt.Sprint("c", i)))
		}
		time.Sleep(time.Second)
		if got := server.take(); !slices.Equal(got, []string{"subscribe 1000", "subscribe 1000", "subscribe 500"}) {
			t.Errorf("commands %v", got)
		}
		for i, h := range all {
			if n := server.publish(fmt.Sprint("c", i), "x"); n != 1 {
				t.Errorf("%d receivers", n)
			}
			h.want(t, 1, 1)
		}

		// While nothing happens, one command in 3 s.
		time.Sleep(5 * time.Minute)
		if got := server.take(); len(got) > 101 || len(got) < 90 || !strings.HasPrefix(got[0], "subscribe 1") {
			t.Errorf("%d commands in 5 minutes: %v", len(got), got)
		}
		all[7].want(t, 1, 1)
		for range 300 {
			time.Sleep(time.Second)
			server.publish("c7", "x")
		}
		if got := server.take(); len(got) != 0 {
			t.Errorf("a connection that is not silent is checked: %v", got)
		}

		for _, h := range all[1:] {
			h.end(t)
		}
		time.Sleep(time.Second)
		if n := server.connections(); n != 1 {
			t.Errorf("%d connections", n)
		}
		for _, got := range server.take() {
			if !strings.HasPrefix(got, "unsubscribe") {
				t.Errorf("command %s", got)
			}
		}
		if n := server.publish("c7", "x"); n != 0 {
			t.Errorf("%d receivers on a channel that was left", n)
		}
		all[0].end(t)
		time.Sleep(time.Second)
		if n := server.connections(); n != 0 {
			t.Errorf("%d connections without a listener", n)
		}
		if got := server.take(); len(got) != 0 {
			t.Errorf("commands %v on a connection that closes", got)
		}
		again := hear(t, s, "c0")
		time.Sleep(time.Second)
		again.want(t, 1, 0)
		again.end(t)
	})
}

func TestSubscriptionJoinsAChannel(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		a := hear(t, s, "c")
		time.Sleep(time.Second)
		server.take()
		b := hear(t, s, "c")
		time.Sleep(time.Second)
		if got := server.take(); !slices.Equal(got, []string{"subscribe 1"}) {
			t.Errorf("commands %v, want one for the one that joined", got)
		}
		server.publish("c", "x")
		a.want(t, 1, 1)
		b.want(t, 1, 1)
		a.end(t)
		time.Sleep(time.Second)
		if got := server.take(); len(got) != 0 {
			t.Errorf("commands %v while the channel has a listener", got)
		}
		server.publish("c", "x")
		a.want(t, 1, 1)
		b.want(t, 1, 2)
		server.cut()
		time.Sleep(time.Second)
		b.want(t, 2, 2)
		b.end(t)
	})
}

// A call that comes while the channel is being unsubscribed is told of the SUBSCRIBE afterwards.
func TestSubscriptionComesBackToAChannel(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		other, first := hear(t, s, "other"), hear(t, s, "c")
		time.Sleep(time.Second)
		server.take()
		first.end(t)
		synctest.Wait() // UNSUBSCRIBE is on its way
		again := hear(t, s, "c")
		time.Sleep(time.Second)
		if got := server.take(); !slices.Equal(got, []string{"unsubscribe 1", "subscribe 1"}) {
			t.Errorf("commands %v", got)
		}
		if n := server.publish("c", "x"); n != 1 {
			t.Errorf("%d receivers", n)
		}
		again.want(t, 1, 1)
		other.want(t, 1, 0)
		again.end(t)
		other.end(t)
	})
}

// The same where it is told of a SUBSCRIBE that came before the UNSUBSCRIBE: it is told again.
func TestSubscriptionIsToldAgainAfterUnsubscribe(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		server.late = true
		other, first := hear(t, s, "other"), hear(t, s, "c")
		time.Sleep(2*pubSubRTT + pubSubRTT/4) // connected, and the command answered
		first.end(t)
		synctest.Wait()
		again := hear(t, s, "c")
		time.Sleep(pubSubRTT / 2)
		again.want(t, 1, 0)
		time.Sleep(time.Second)
		again.want(t, 2, 0)
		other.want(t, 1, 0)
		if got := server.take(); !slices.Equal(got, []string{"subscribe 2", "unsubscribe 1", "subscribe 1"}) {
			t.Errorf("commands %v", got)
		}
		again.end(t)
		other.end(t)
	})
}

func TestRefusedSubscriptionEndsAlone(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		server.refused["c333"], server.refused["c500"] = true, true
		var all []*heard
		for i := range 1000 {
			all = append(all, hear(t, s, fmt.Sprint("c", i)))
		}
		time.Sleep(time.Second)
		if got := server.take(); len(got) > 45 {
			t.Errorf("%d commands to find two of 1000: %v", len(got), got)
		}
		late := hear(t, s, "c333")
		time.Sleep(time.Second)
		for i, h := range append(all, late) {
			if i == 333 || i == 500 || h == late {
				var e *ServerError
				if err := <-h.done; !errors.As(err, &e) || e.Code() != "NOPERM" {
					t.Errorf("refused with %v", err)
				}
				h.want(t, 0, 0)
				continue
			}
			server.publish(fmt.Sprint("c", i), "x")
			h.want(t, 1, 1)
			h.end(t)
		}
		if n := len(server.attempts()); n != 1 {
			t.Errorf("%d connections were opened", n)
		}
	})
}

func TestServerThatRefusesToConnectEndsAllSubscriptions(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		server.openErr = &ServerError{Text: "WRONGPASS no"}
		a, b := hear(t, s, "a"), hear(t, s, "b")
		for _, h := range []*heard{a, b} {
			var e *ServerError
			if err := <-h.done; !errors.As(err, &e) || e.Code() != "WRONGPASS" {
				t.Errorf("refused with %v", err)
			}
		}
	})
}

func TestSubscriptionsReconnect(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		a, b := hear(t, s, "a"), hear(t, s, "b")
		time.Sleep(time.Second)
		server.set(func() { server.openErr, server.opened = errCut, nil })
		start := time.Now()
		server.cut()
		time.Sleep(time.Minute)
		want := minReconnect
		for i, at := range server.attempts() {
			if pause := at.Sub(start) - pubSubRTT; pause < want/2 || pause > want*3/2 {
				t.Errorf("attempt %d after %v, want %v +-50 %%", i, pause, want)
			}
			start, want = at, min(2*want, maxReconnect)
		}
		a.want(t, 1, 0)
		server.set(func() { server.openErr = nil })
		time.Sleep(2 * maxReconnect)
		server.publish("a", "x")
		a.want(t, 2, 1)
		b.want(t, 2, 0)

		// After a confirmation the pauses are short again.
		server.cut()
		time.Sleep(2 * minReconnect)
		a.want(t, 3, 1)
		b.end(t)
		server.set(func() { server.openErr = errCut })
		server.cut()
		time.Sleep(time.Second)
		a.end(t) // while nobody can connect
	})
}

// What a connection says that was given up, or that is on its way when a call ends, is for nobody.
func TestSubscriptionsHearNothingLate(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		a := hear(t, s, "a")
		time.Sleep(time.Second)
		server.set(func() { server.openErr = errCut })
		server.cut()
		time.Sleep(time.Second)
		old := server.conns[0]
		old.confirmed("a")
		old.message("a", "x")
		a.want(t, 1, 0)
		server.set(func() { server.openErr = nil })
		time.Sleep(2 * maxReconnect)
		a.want(t, 2, 0)

		s.mu.Lock()
		l := s.listeners["a"][0]
		s.mu.Unlock()
		a.end(t)
		l.confirmed()
		l.message("x")
		a.want(t, 2, 0)
	})
}

func TestSubscriptionsLeaveAServerThatHangs(t *testing.T) {
	subscriptions(t, func(t *testing.T, server *pubSubServer, s *Subscriptions) {
		a := hear(t, s, "a")
		time.Sleep(time.Second)
		server.set(func() { server.hangs = true })
		time.Sleep(checkEvery + answerWithin + time.Second)
		if len(server.attempts()) < 2 {
			t.Error("no other connection was tried")
		}
		start := time.Now()
		b := hear(t, s, "b")
		b.end(t)
		if d := time.Since(start); d > 0 {
			t.Errorf("Subscribe returned %v after its context was done", d)
		}
		server.set(func() { server.hangs = false })
		time.Sleep(2 * (answerWithin + maxReconnect))
		a.want(t, 2, 0)
		a.end(t)
	})
}

func TestSubscriptionsPassPanicsOn(t *testing.T) {
	s := &Subscriptions{}
	l := &listener{deliver: func(string) { panic("mine") }}
	s.listeners = map[string][]*listener{"c": {l}}
	s.current = &link{s: s}
	defer func() {
		if r := recover(); r != "mine" {
			t.Errorf("recovered %v", r)
		}
		l.end() // no lock is held
		s.idle()
	}()
	s.current.message("c", "x")
}

// Calls come and go at random, and connections break, while messages flow: who is up gets what is
// published from then on, unless the connection breaks, and then is told so.
func TestSubscriptionsComeAndGo(t *testing.T) {
	server := &pubSubServer{}
	s := &Subscriptions{Open: server.open}
	stop := make(chan struct{})
	cuts := 0
	var cutting, calls sync.WaitGroup
	cutting.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(30 * time.Millisecond):
				cuts += server.cut()
			}
		}
	})
	for i := range 20 {
		calls.Go(func() {
			for round := range 20 {
				// Two callers of each channel.
				comeAndGo(t, server, s, fmt.Sprint("c", i/2), fmt.Sprint(i, "/", round))
			}
		})
	}
	calls.Wait()
	close(stop)
	cutting.Wait()
	for range 1000 {
		if server.connections() == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if n := server.connections(); n != 0 {
		t.Errorf("%d connections are left", n)
	}
	if cuts == 0 {
		t.Error("no connection was cut")
	}
}

// comeAndGo subscribes until it has got its own message, which is published when it is up.
func comeAndGo(t *testing.T, server *pubSubServer, s *Subscriptions, channel, mine string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var over, got atomic.Bool
	ups := make(chan struct{}, 1000)
	go func() {
		for {
			select {
			case <-ups:
				server.publish(channel, mine)
			case <-ctx.Done():
				return
			}
		}
	}()
	_ = s.Subscribe(ctx, channel, func(payload string) {
		if over.Load() {
			t.Error("a message after the end")
		}
		if payload == mine {
			got.Store(true)
			time.AfterFunc(time.Duration(rand.IntN(3))*time.Millisecond, cancel)
		}
	}, func() {
		if over.Load() {
			t.Error("up after the end")
		}
		ups <- struct{}{}
	})
	over.Store(true)
	if !got.Load() {
		t.Errorf("%s: no message", channel)
	}
}
