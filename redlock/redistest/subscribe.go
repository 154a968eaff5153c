package redistest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// subscribers are the connections of the server that subscribe, as CLIENT LIST has them.
func subscribers(t *testing.T, s *servertest.RedisServer) []string {
	t.Helper()
	text, _ := do(t, s, "CLIENT", "LIST", "TYPE", "pubsub").(string)
	return slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool { return line == "" })
}

// oneSubscriber waits until one connection subscribes that many channels, or none for 0, and
// answers its id.
func oneSubscriber(t *testing.T, s *servertest.RedisServer, channels int) (id string) {
	t.Helper()
	servertest.Eventually(t, patience, func() error {
		all := subscribers(t, s)
		if channels == 0 && len(all) == 0 {
			return nil
		}
		if len(all) != 1 || !strings.Contains(all[0], fmt.Sprintf(" sub=%d ", channels)) {
			return fmt.Errorf("want one connection with %d channels:\n%s", channels, strings.Join(all, "\n"))
		}
		id, _, _ = strings.Cut(strings.TrimPrefix(all[0], "id="), " ")
		return nil
	})
	return id
}

// testSharedSubscription: all channels of one node are one connection, which nearly nothing is
// sent over, which everybody is told of when it breaks, and which goes with the last.
func testSharedSubscription(t *testing.T, open func(testing.TB, string) redlock.Node) {
	server := servertest.Redis(t)
	p := servertest.NewProxy(t, server.Addr())
	n := open(t, p.Addr())
	ask(t, n, "return 1", nil)
	before := len(goroutines())
	const count = 200
	var all []*subscription
	for i := range count {
		all = append(all, subscribe(t, n, "holdfast:"+strconv.Itoa(i)))
	}
	twice := subscribe(t, n, "holdfast:0")
	twice.get(t, twice.up, "confirmation of another call")
	for _, s := range all {
		s.get(t, s.up, "confirmation")
	}
	oneSubscriber(t, server, count)
	everybody := func(payload string) {
		t.Helper()
		for i := range all {
			if v := do(t, server, "PUBLISH", "holdfast:"+strconv.Itoa(i), payload+strconv.Itoa(i)); v != int64(1) {
				t.Errorf("%v receivers", v)
			}
		}
		for i, s := range all {
			if v := s.get(t, s.messages, "message"); v != payload+strconv.Itoa(i) {
				t.Errorf("channel %d got %q", i, v)
			}
		}
		if v := twice.get(t, twice.messages, "message of a shared channel"); v != payload+"0" {
			t.Errorf("message %q", v)
		}
	}
	everybody("a")

	// Silence: PINGs, and what looks.
	processed := func() (int, time.Time) {
		c, _ := strconv.Atoi(server.Info("stats", "total_commands_processed"))
		return c, time.Now()
	}
	from, start := processed()
	time.Sleep(2 * time.Second)
	to, end := processed()
	if rate := float64(to-from-1) / end.Sub(start).Seconds(); rate > 10 {
		t.Errorf("%.1f commands per second while nothing happens", rate)
	}

	if v := do(t, server, "CLIENT", "KILL", "TYPE", "pubsub"); v != int64(1) {
		t.Errorf("%v connections killed", v)
	}
	for _, s := range append(all, twice) {
		s.get(t, s.up, "confirmation after the connection was killed")
	}
	everybody("b")

	// A server that does not answer is found out, by a new connection.
	p.BlackHole()
	connections := p.Counts().Connections
	servertest.Eventually(t, patience, func() error {
		if p.Counts().Connections == connections {
			return errors.New("no new connection is tried")
		}
		return nil
	})
	p.Heal()
	for _, s := range append(all, twice) {
		s.get(t, s.up, "confirmation after a black hole")
	}
	oneSubscriber(t, server, count)
	everybody("c")

	for _, s := range append(all, twice) {
		if len(s.up)+len(s.messages) > 0 {
			t.Errorf("%d confirmations and %d messages too many", len(s.up), len(s.messages))
		}
	}
	twice.end(t)
	for _, s := range all[1:] {
		s.end(t)
	}
	oneSubscriber(t, server, 1)
	do(t, server, "PUBLISH", "holdfast:0", "last")
	if v := all[0].get(t, all[0].messages, "message for the last"); v != "last" {
		t.Errorf("message %q", v)
	}
	all[0].end(t)
	oneSubscriber(t, server, 0)
	settles(t, before)
}

// testSomeSubscribeRefused: who is refused ends alone.
func testSomeSubscribeRefused(t *testing.T, open func(testing.TB, string) redlock.Node) {
	server := servertest.Redis(t)
	do(t, server, "ACL", "SETUSER", "default", "resetchannels", "&allowed*")
	n := open(t, server.Addr())
	var allowed, refused []*subscription
	for i := range 20 {
		allowed = append(allowed, subscribe(t, n, "allowed"+strconv.Itoa(i)))
		if i%5 == 0 {
			refused = append(refused, subscribe(t, n, "refused"+strconv.Itoa(i)))
		}
	}
	check := func() {
		t.Helper()
		for _, s := range refused {
			select {
			case err := <-s.done:
				wantCode(t, err, "NOPERM")
			case <-time.After(patience):
				t.Error("Subscribe does not tell that it is not allowed")
			}
			if len(s.up) != 0 {
				t.Error("confirmed without the right")
			}
		}
	}
	check()
	for _, s := range allowed {
		s.get(t, s.up, "confirmation beside those who are refused")
	}
	id := oneSubscriber(t, server, len(allowed))
	refused = []*subscription{subscribe(t, n, "refused"), subscribe(t, n, "refused")}
	check()
	late := subscribe(t, n, "allowed")
	late.get(t, late.up, "confirmation")
	if now := oneSubscriber(t, server, len(allowed)+1); now != id {
		t.Errorf("connection %s, before %s", now, id)
	}
	for i, s := range allowed {
		do(t, server, "PUBLISH", "allowed"+strconv.Itoa(i), "x")
		s.get(t, s.messages, "message")
		if len(s.up) != 0 {
			t.Error("told twice")
		}
		s.end(t)
	}

	// A right that is taken away: the server cuts the connection.
	do(t, server, "ACL", "SETUSER", "default", "resetchannels")
	select {
	case err := <-late.done:
		wantCode(t, err, "NOPERM")
	case <-time.After(patience):
		t.Error("Subscribe goes on without the right")
	}
}

// testSubscribeComeAndGo: calls come and go at random, and connections break, while messages
// flow; who is up gets what is published from then on, or is told again.
func testSubscribeComeAndGo(t *testing.T, open func(testing.TB, string) redlock.Node) {
	server := servertest.Redis(t)
	n := open(t, server.Addr())
	const kills = 5
	var killed atomic.Int64
	var calls sync.WaitGroup
	ctx := within(t, patience)
	for i := range 10 {
		calls.Go(func() {
			for round := 0; killed.Load() < kills && ctx.Err() == nil; round++ {
				comeAndGo(t, server, n, "holdfast:"+strconv.Itoa(i/2), fmt.Sprint(i, "/", round))
			}
		})
	}
	for killed.Load() < kills && ctx.Err() == nil {
		time.Sleep(time.Duration(rand.IntN(50)) * time.Millisecond)
		count, _ := do(t, server, "CLIENT", "KILL", "TYPE", "pubsub").(int64)
		killed.Add(count)
	}
	calls.Wait()
	if killed.Load() < kills {
		t.Errorf("%d connections killed, want %d", killed.Load(), kills)
	}
	oneSubscriber(t, server, 0)
}

// comeAndGo subscribes until its own message has come, which is published when it is up.
func comeAndGo(t *testing.T, server *servertest.RedisServer, n redlock.Node, channel, mine string) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var over, got atomic.Bool
	up := make(chan struct{}, 100)
	var publishing sync.WaitGroup
	publishing.Go(func() {
		for {
			select {
			case <-up:
				if _, err := server.Do("PUBLISH", channel, mine); err != nil {
					t.Error(err)
				}
			case <-ctx.Done():
				return
			}
		}
	})
	err := n.Subscribe(ctx, channel, func(payload string) {
		if over.Load() {
			t.Error("a message after the end")
		}
		if payload == mine && !got.Swap(true) {
			time.AfterFunc(time.Duration(rand.IntN(3))*time.Millisecond, cancel)
		}
	}, func() {
		if over.Load() {
			t.Error("up after the end")
		}
		up <- struct{}{}
	})
	over.Store(true)
	if !got.Load() {
		t.Errorf("%s: no message, %v", channel, err)
	}
	publishing.Wait()
}

// BenchmarkSubscribe measures the way from PUBLISH to deliver: one call publishes by itself and
// waits for the message, beside 100 other channels of the node.
func BenchmarkSubscribe(b *testing.B, open func(t testing.TB, addr string) redlock.Node) {
	server := servertest.Redis(b)
	n := open(b, server.Addr())
	ctx, cancel := context.WithCancel(b.Context())
	var calls sync.WaitGroup
	messages := make(chan struct{}, 1)
	up := make(chan struct{}, 101)
	for i := range 101 {
		calls.Go(func() {
			_ = n.Subscribe(ctx, "holdfast:"+strconv.Itoa(i), func(string) { messages <- struct{}{} }, func() { up <- struct{}{} })
		})
	}
	for range 101 {
		<-up
	}
	publish := redlock.Call{Script: redlock.NewScript("return redis.call('PUBLISH', ARGV[1], 'x')"), Args: []string{"holdfast:50"}}
	for b.Loop() {
		if r := n.Run(ctx, publish); r[0].Err != nil {
			b.Fatal(r[0].Err)
		}
		<-messages
	}
	cancel()
	calls.Wait()
}
