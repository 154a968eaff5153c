package goredisnode

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/redlock"
)

// handshake bounds each step of connecting for Subscribe after the dialling, and each write.
const handshake = time.Second

// pubsub is one connection. go-redis replaces a connection that breaks by itself, after which
// nobody knows what an error of the server answers; so the first break is the end.
type pubsub struct {
	sub       *redis.PubSub
	message   func(channel, payload string)
	confirmed func(channel string)
	stop      context.CancelFunc
	broken    chan error // closed

	mu     sync.Mutex
	left   int        // confirmations that the command on its way still gets
	answer chan error // of it
}

// opener makes the Open of [redlock.Subscriptions].
func opener(client interface {
	Subscribe(ctx context.Context, channels ...string) *redis.PubSub
}) func(context.Context, func(channel, payload string), func(channel string)) (redlock.PubSub, error) {
	return func(ctx context.Context, message func(channel, payload string), confirmed func(channel string)) (redlock.PubSub, error) {
		life, stop := context.WithCancel(context.Background())
		p := &pubsub{
			sub:     client.Subscribe(ctx), // which sends nothing yet
			message: message, confirmed: confirmed, stop: stop, broken: make(chan error),
		}
		pong := p.expect(1)
		if err := p.sub.Ping(ctx); err != nil { // which connects
			p.Close()
			return nil, serverError(err)
		}
		go p.read(life)
		var e *redlock.ServerError
		if err := p.await(ctx, pong); err != nil && !errors.As(err, &e) { // who may not PING is connected
			p.Close()
			return nil, err
		}
		return p, nil
	}
}

// expect says how many answers the next command gets.
func (p *pubsub) expect(answers int) <-chan error {
	answer := make(chan error, 1)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left, p.answer = answers, answer
	return answer
}

var errBroken = errors.New("the connection for messages has ended")

func (p *pubsub) await(ctx context.Context, answer <-chan error) error {
	select {
	case err := <-answer:
		return err
	case <-p.broken:
		return errBroken
	case <-ctx.Done():
		return ctx.Err()
	}
}

// answered counts an answer. It says false where no command waits for one: then go-redis has
// connected anew.
func (p *pubsub) answered(err error) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left == 0 {
		return false
	}
	if p.left--; err != nil {
		p.left = 0
	}
	if p.left == 0 {
		p.answer <- err
	}
	return true
}

func (p *pubsub) Subscribe(ctx context.Context, channels ...string) error {
	answer := p.expect(len(channels))
	if err := p.sub.Subscribe(ctx, channels...); err != nil {
		return err
	}
	return p.await(ctx, answer)
}

func (p *pubsub) Unsubscribe(ctx context.Context, channels ...string) error {
	answer := p.expect(len(channels))
	if err := p.sub.Unsubscribe(ctx, channels...); err != nil {
		return err
	}
	return p.await(ctx, answer)
}

func (p *pubsub) Broken() <-chan error { return p.broken }

func (p *pubsub) Close() {
	p.stop() // first: go-redis may hold its lock while it connects
	p.sub.Close()
}

func (p *pubsub) read(ctx context.Context) {
	defer close(p.broken)
	defer p.Close()
	for ok := true; ok; {
		m, err := p.sub.Receive(ctx)
		switch m := m.(type) {
		case *redis.Message:
			p.message(m.Channel, m.Payload)
		case *redis.Subscription:
			if m.Kind == "subscribe" {
				p.confirmed(m.Channel)
			}
			ok = p.answered(nil)
		case *redis.Pong:
			ok = p.answered(nil)
		default:
			var e redis.Error
			ok = errors.As(err, &e) && p.answered(serverError(err))
		}
	}
}
