// Package redistest holds the conformance suite that every [redlock.Node] runs, against real
// Redis servers which it starts itself: RunNode for one server, RunCluster and RunSentinel for
// those deployments.
//
// It is unstable, as is package servertest beneath it.
package redistest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// patience bounds what must happen, on a busy machine too.
const patience = 30 * time.Second

// RunNode tests nodes of one server. open returns a new node for the server at addr
// (host:port) and closes its client when the test that it is given ends.
func RunNode(t *testing.T, open func(t testing.TB, addr string) redlock.Node) {
	server := servertest.Redis(t)
	node := open(t, server.Addr())
	t.Run("Replies", func(t *testing.T) { testReplies(t, node) })
	t.Run("Order", func(t *testing.T) { testOrder(t, node) })
	t.Run("NoCalls", func(t *testing.T) { testNoCalls(t, node) })
	t.Run("Bytes", func(t *testing.T) { testBytes(t, node) })
	t.Run("Strict", func(t *testing.T) { testStrict(t, server, node) })
	t.Run("NotStrict", func(t *testing.T) { testNotStrict(t, server, node) })
	t.Run("Pinned", func(t *testing.T) { testPinned(t, server, node) })
	t.Run("Reuse", func(t *testing.T) { testReuse(t, server, node) })
	t.Run("DoneContext", func(t *testing.T) { testDoneContext(t, server, node) })
	t.Run("ServerErrors", func(t *testing.T) { testServerErrors(t, open) })
	t.Run("Deadline", func(t *testing.T) { testDeadline(t, server, open) })
	t.Run("Once", func(t *testing.T) { testOnce(t, server, open) })
	t.Run("Single", func(t *testing.T) { testSingle(t, server, open) })
	t.Run("LateReply", func(t *testing.T) { testLateReply(t, server, open) })
	t.Run("Gone", func(t *testing.T) { testGone(t, open) })
	t.Run("Subscribe", func(t *testing.T) { testSubscribe(t, open) })
	t.Run("SubscribeRefused", func(t *testing.T) { testSubscribeRefused(t, open) })
	t.Run("SharedSubscription", func(t *testing.T) { testSharedSubscription(t, open) })
	t.Run("SomeSubscribeRefused", func(t *testing.T) { testSomeSubscribeRefused(t, open) })
	t.Run("SubscribeComeAndGo", func(t *testing.T) { testSubscribeComeAndGo(t, open) })
	t.Run("Leaks", func(t *testing.T) { testLeaks(t, open) })
}

var echo = redlock.NewScript("return ARGV[1]")

// Ask runs one script with the keys and args given and fails the test on an error.
func ask(t *testing.T, n redlock.Node, text string, keys []string, args ...string) any {
	t.Helper()
	r := n.Run(within(t, patience), redlock.Call{Script: redlock.NewScript(text), Keys: keys, Args: args})
	if len(r) != 1 {
		t.Fatalf("%d replies to one call", len(r))
	}
	if r[0].Err != nil {
		t.Fatalf("%s: %v", text, r[0].Err)
	}
	return r[0].Value
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func wantCode(t *testing.T, err error, code string) {
	t.Helper()
	var e *redlock.ServerError
	if !errors.As(err, &e) {
		t.Fatalf("error %v (%T), want a *redlock.ServerError of %s", err, err, code)
	}
	if e.Code() != code {
		t.Fatalf("code %q of %q, want %s", e.Code(), e.Text, code)
	}
}

func do(t *testing.T, s *servertest.RedisServer, args ...string) any {
	t.Helper()
	v, err := s.Do(args...)
	if err != nil {
		t.Fatalf("%s: %v", strings.Join(args, " "), err)
	}
	return v
}

// calls is how often the server has executed a command.
func calls(t *testing.T, s *servertest.RedisServer, command string) int {
	t.Helper()
	stat, _, _ := strings.Cut(s.Info("commandstats", "cmdstat_"+command), ",")
	n, _ := strconv.Atoi(strings.TrimPrefix(stat, "calls="))
	return n
}

func testReplies(t *testing.T, n redlock.Node) {
	for _, tt := range []struct {
		script string
		want   any
	}{
		{"return nil", nil},
		{"return false", nil},
		{"return true", int64(1)},
		{"return 'text'", "text"},
		{"return ''", ""},
		{"return '17'", "17"},
		{"return redis.status_reply('FINE')", "FINE"},
		{"return 0", int64(0)},
		{"return -1", int64(-1)},
		{"return 1790000000000001", int64(1790000000000001)},
		{"return {}", []any{}},
		{"return {'OK', 1790000000000001, false, 'x', {1, {'y'}}}",
			[]any{"OK", int64(1790000000000001), nil, "x", []any{int64(1), []any{"y"}}}},
		{"return redis.call('GET', KEYS[1])", nil},
		{"return redis.call('MGET', KEYS[1], KEYS[1])", []any{nil, nil}},
		{"return redis.call('SET', KEYS[1], 'v', 'PX', 1000)", "OK"},
		{"return redis.call('SET', KEYS[1], 'v', 'NX')", nil},
	} {
		if got := ask(t, n, tt.script, []string{"replies"}); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: %#v, want %#v", tt.script, got, tt.want)
		}
	}
}

func testOrder(t *testing.T, n redlock.Node) {
	fail := redlock.NewScript("return redis.error_reply('FAILED ' .. ARGV[1])")
	var list []redlock.Call
	for i := range 100 {
		s := echo
		if i%3 == 1 {
			s = fail
		}
		list = append(list, redlock.Call{Script: s, Keys: []string{"k" + strconv.Itoa(i)}, Args: []string{strconv.Itoa(i)}})
	}
	for range 2 { // without the scripts, and with them
		replies := n.Run(within(t, patience), list...)
		if len(replies) != len(list) {
			t.Fatalf("%d replies to %d calls", len(replies), len(list))
		}
		for i, r := range replies {
			if i%3 != 1 {
				if r.Err != nil || r.Value != strconv.Itoa(i) {
					t.Errorf("call %d: %v, %v", i, r.Value, r.Err)
				}
				continue
			}
			var e *redlock.ServerError
			if !errors.As(r.Err, &e) || e.Text != fmt.Sprintf("FAILED %d", i) || r.Value != nil {
				t.Errorf("call %d: %v, %v; want an error", i, r.Value, r.Err)
			}
		}
	}
}

func testNoCalls(t *testing.T, n redlock.Node) {
	if r := n.Run(within(t, patience)); len(r) != 0 {
		t.Errorf("%d replies to no calls", len(r))
	}
}

func testBytes(t *testing.T, n redlock.Node) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	s := string(all) + "\r\n$3\r\nabc\r\n\xff\xfe"
	for _, keys := range [][]string{nil, {s}, {"", s}} {
		got := ask(t, n, "return {#KEYS, KEYS[1] or '', KEYS[2] or '', ARGV[1], ARGV[2], ARGV[3]}", keys, s, "", s+s)
		want := []any{int64(len(keys)), "", "", s, "", s + s}
		for i, k := range keys {
			want[1+i] = k
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%d keys: %q", len(keys), got)
		}
	}
}

func testStrict(t *testing.T, s *servertest.RedisServer, n redlock.Node) {
	script := redlock.NewScript("return 'strict'")
	before := calls(t, s, "eval")
	r := n.Run(within(t, patience), redlock.Call{Script: script, Strict: true})
	wantCode(t, r[0].Err, "NOSCRIPT")

	// In one pipeline with a call that may be sent whole.
	other := redlock.NewScript("return 'other'")
	r = n.Run(within(t, patience),
		redlock.Call{Script: script, Strict: true},
		redlock.Call{Script: other},
		redlock.Call{Script: script, Strict: true})
	wantCode(t, r[0].Err, "NOSCRIPT")
	wantCode(t, r[2].Err, "NOSCRIPT")
	if r[1].Err != nil || r[1].Value != "other" {
		t.Errorf("call beside strict ones: %v, %v", r[1].Value, r[1].Err)
	}
	if got := do(t, s, "SCRIPT", "EXISTS", script.SHA1); !reflect.DeepEqual(got, []any{int64(0)}) {
		t.Errorf("a strict call has loaded the script")
	}
	if got := calls(t, s, "eval") - before; got != 1 {
		t.Errorf("%d EVAL, want 1, of the call that is not strict", got)
	}

	do(t, s, "SCRIPT", "LOAD", script.Text)
	r = n.Run(within(t, patience), redlock.Call{Script: script, Strict: true})
	if r[0].Err != nil || r[0].Value != "strict" {
		t.Errorf("with the script loaded: %v, %v", r[0].Value, r[0].Err)
	}
}

func testNotStrict(t *testing.T, s *servertest.RedisServer, n redlock.Node) {
	do(t, s, "SCRIPT", "FLUSH")
	incr := "return redis.call('INCRBY', KEYS[1], ARGV[1])"
	evals := calls(t, s, "eval")
	for i := range 3 {
		if got := ask(t, n, incr, []string{"counter"}, "10"); got != int64(10*(i+1)) {
			t.Errorf("call %d: %v", i, got)
		}
	}
	if got := calls(t, s, "eval") - evals; got != 1 {
		t.Errorf("%d EVAL for three calls, want 1", got)
	}
	// An error of the script itself that speaks of NOSCRIPT within is none.
	r := n.Run(within(t, patience), redlock.Call{Script: redlock.NewScript("return redis.error_reply('X NOSCRIPT')")})
	wantCode(t, r[0].Err, "X")
}

// testReuse: calls that are answered in time open no new connections.
func testReuse(t *testing.T, s *servertest.RedisServer, n redlock.Node) {
	opened := func() int {
		c, _ := strconv.Atoi(s.Info("stats", "total_connections_received"))
		return c
	}
	ask(t, n, "return 1", nil)
	before := opened()
	for range 20 {
		ask(t, n, "return redis.call('GET', KEYS[1])", []string{"nothing"})
		n.Run(within(t, patience), redlock.Call{Script: redlock.NewScript("return redis.error_reply('NO')")})
	}
	if n := opened() - before - 1; n > 0 { // less the one that looks
		t.Errorf("%d new connections for 40 calls", n)
	}
}

func testPinned(t *testing.T, s *servertest.RedisServer, n redlock.Node) {
	ctx := within(t, patience)
	mine := errors.New("mine")
	err := n.Pinned(ctx, "key", func(do func(...string) (any, error)) error {
		first, err := do("CLIENT", "ID")
		if err != nil {
			return err
		}
		if _, ok := first.(int64); !ok {
			t.Errorf("CLIENT ID = %#v", first)
		}
		for range 3 {
			if id, err := do("CLIENT", "ID"); err != nil || id != first {
				t.Errorf("connection %v, before %v: %v", id, first, err)
			}
			if r := n.Run(ctx, redlock.Call{Script: echo, Args: []string{"x"}}); r[0].Err != nil {
				t.Errorf("beside it: %v", r[0].Err)
			}
		}
		if v, err := do("INFO", "server"); err != nil {
			t.Error(err)
		} else if text, _ := v.(string); !strings.Contains(text, "\r\nrun_id:") || !strings.HasPrefix(text, "# Server") {
			t.Errorf("INFO = %q", v)
		}
		if v, err := do("GET", "nothing"); v != nil || err != nil {
			t.Errorf("GET of nothing: %v, %v", v, err)
		}
		if v, err := do("HSET", "hash", "a", "1"); v != int64(1) || err != nil {
			t.Errorf("HSET: %v, %v", v, err)
		}
		if v, err := do("HGETALL", "hash"); !reflect.DeepEqual(v, []any{"a", "1"}) || err != nil {
			t.Errorf("HGETALL: %v, %v", v, err)
		}
		_, err = do("GET", "hash")
		wantCode(t, err, "WRONGTYPE")
		if v, err := do("SCRIPT", "LOAD", echo.Text); v != echo.SHA1 || err != nil {
			t.Errorf("SCRIPT LOAD: %v, %v", v, err)
		}
		return mine
	})
	if !errors.Is(err, mine) {
		t.Errorf("the function's error became %v", err)
	}

	// A connection that breaks is not replaced behind the caller's back.
	err = n.Pinned(ctx, "key", func(send func(...string) (any, error)) error {
		id, err := send("CLIENT", "ID")
		if err != nil {
			return err
		}
		if v := do(t, s, "CLIENT", "KILL", "ID", fmt.Sprint(id)); v != int64(1) {
			t.Errorf("%v connections killed", v)
		}
		for range 3 {
			if now, err := send("CLIENT", "ID"); err == nil {
				t.Errorf("connection %v goes on as %v", id, now)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if v := ask(t, n, "return 'on'", nil); v != "on" {
		t.Error("the node does not work any more")
	}
}

func testDoneContext(t *testing.T, s *servertest.RedisServer, n redlock.Node) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	before := calls(t, s, "evalsha") + calls(t, s, "eval")
	for _, r := range n.Run(ctx, redlock.Call{Script: echo, Args: []string{"x"}}, redlock.Call{Script: echo, Args: []string{"y"}}) {
		if !errors.Is(r.Err, context.Canceled) {
			t.Errorf("Run: %v", r.Err)
		}
	}
	if after := calls(t, s, "evalsha") + calls(t, s, "eval"); after != before {
		t.Errorf("%d calls were sent", after-before)
	}
	err := n.Pinned(ctx, "key", func(do func(...string) (any, error)) error {
		_, err := do("PING")
		return err
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Pinned: %v", err)
	}
	if err := n.Subscribe(ctx, "channel", func(string) {}, func() {}); !errors.Is(err, context.Canceled) {
		t.Errorf("Subscribe: %v", err)
	}
}

func testServerErrors(t *testing.T, open func(testing.TB, string) redlock.Node) {
	s := servertest.Redis(t)
	n := open(t, s.Addr())
	set := redlock.Call{Script: redlock.NewScript("return redis.call('SET', KEYS[1], 'x')"), Keys: []string{"key"}}
	get := redlock.Call{Script: redlock.NewScript("return redis.call('GET', KEYS[1])"), Keys: []string{"list"}}
	custom := redlock.Call{Script: redlock.NewScript("return redis.error_reply('ERR own words')")}
	run := func(c redlock.Call) error {
		t.Helper()
		r := n.Run(within(t, patience), c)
		if r[0].Value != nil {
			t.Errorf("value %v beside an error", r[0].Value)
		}
		return r[0].Err
	}
	do(t, s, "RPUSH", "list", "x")
	wantCode(t, run(get), "WRONGTYPE")
	err := run(custom)
	wantCode(t, err, "ERR")
	if err.Error() != "ERR own words" {
		t.Errorf("text %q", err)
	}
	do(t, s, "CONFIG", "SET", "maxmemory", "1")
	wantCode(t, run(set), "OOM")
	do(t, s, "CONFIG", "SET", "maxmemory", "0")

	do(t, s, "REPLICAOF", "127.0.0.1", "1")
	wantCode(t, run(set), "READONLY")
	do(t, s, "REPLICAOF", "NO", "ONE")

	do(t, s, "ACL", "SETUSER", "default", "-evalsha")
	wantCode(t, run(set), "NOPERM")
	do(t, s, "ACL", "SETUSER", "default", "+evalsha")
	recovers(t, n)
}

// testDeadline: a call that gets no answer ends, soon after its deadline, and the node works
// when the server answers again.
func testDeadline(t *testing.T, s *servertest.RedisServer, open func(testing.TB, string) redlock.Node) {
	p := servertest.NewProxy(t, s.Addr())
	n := open(t, p.Addr())
	ask(t, n, "return 1", nil)
	p.BlackHole()
	const deadline = 100 * time.Millisecond
	for i := range 3 {
		start := time.Now()
		r := n.Run(within(t, deadline), redlock.Call{Script: echo, Args: []string{"lost"}})
		if r[0].Err == nil {
			t.Fatalf("%v came through a black hole", r[0].Value)
		}
		var e *redlock.ServerError
		if errors.As(r[0].Err, &e) {
			t.Errorf("no answer is told as an answer: %v", e)
		}
		if d := time.Since(start); d > 20*deadline {
			t.Errorf("call %d: Run came back after %v, its deadline was %v", i, d, deadline)
		}
	}
	err := n.Pinned(within(t, deadline), "key", func(do func(...string) (any, error)) error {
		_, err := do("PING")
		return err
	})
	if err == nil {
		t.Error("Pinned: an answer came through a black hole")
	}
	if p.Counts().BlackHoled == 0 {
		t.Error("the black hole met nothing")
	}
	p.Heal()
	p.Reset()
	recovers(t, n)
}

// recovers waits until the node works again.
func recovers(t *testing.T, n redlock.Node) {
	t.Helper()
	servertest.Eventually(t, patience, func() error {
		r := n.Run(within(t, time.Second), redlock.Call{Script: echo, Args: []string{"back"}})
		if r[0].Err == nil && r[0].Value != "back" {
			t.Fatalf("a wrong reply: %v", r[0].Value)
		}
		return r[0].Err
	})
}

// A call that is to be sent once is not sent again where its connection breaks before the
// reply has come, alone and in a pipeline.
func testOnce(t *testing.T, s *servertest.RedisServer, open func(testing.TB, string) redlock.Node) {
	p := servertest.NewProxy(t, s.Addr())
	n := open(t, p.Addr())
	count := redlock.Call{Script: redlock.NewScript("return redis.call('INCR', KEYS[1])"), Keys: []string{"once"}, Once: true}
	counted := func() int64 {
		t.Helper()
		v, err := s.Do("EVAL", "return tonumber(redis.call('GET', KEYS[1]) or '0')", "1", "once")
		if err != nil {
			t.Fatal(err)
		}
		return v.(int64)
	}
	for _, calls := range [][]redlock.Call{{count}, {{Script: echo, Args: []string{"x"}}, count}} {
		for range 40 { // all connections that the client may use are open, and the script is known
			for _, r := range n.Run(within(t, patience), calls...) {
				if r.Err != nil {
					t.Fatal(r.Err)
				}
			}
		}
		before, dropped := counted(), p.Counts().Dropped
		p.DropReplies()
		replies := make(chan []redlock.Reply, 1)
		go func() { replies <- n.Run(within(t, patience), calls...) }()
		servertest.Eventually(t, patience, func() error {
			if counted() == before || p.Counts().Dropped == dropped {
				return errors.New("the call was not executed, or its reply not lost")
			}
			return nil
		})
		p.Heal() // which ends the connection
		if r := (<-replies)[len(calls)-1]; r.Err == nil {
			t.Errorf("a call whose reply was lost is answered %v", r.Value)
		}
		time.Sleep(200 * time.Millisecond)
		if more := counted() - before; more != 1 {
			t.Errorf("it was executed %d times", more)
		}
	}
}

// testLateReply: the reply to a call that was given up is never another call's.
// testSingle tests a node that makes single calls for whoever waits for them.
func testSingle(t *testing.T, s *servertest.RedisServer, open func(testing.TB, string) redlock.Node) {
	p := servertest.NewProxy(t, s.Addr())
	n := open(t, p.Addr())
	one, ok := n.(redlock.Single)
	if !ok {
		return
	}
	unknown := redlock.NewScript(fmt.Sprintf("return 'unknown until %d'", time.Now().UnixNano()))
	wantCode(t, one.RunOne(within(t, patience), &redlock.Call{Script: unknown, Strict: true}).Err, "NOSCRIPT")
	for _, once := range []bool{false, true} {
		if r := one.RunOne(within(t, patience), &redlock.Call{Script: echo, Args: []string{"x"}, Once: once}); r.Err != nil || r.Value != "x" {
			t.Errorf("RunOne answers %v, %v", r.Value, r.Err)
		}
	}
	wantCode(t, one.RunOne(within(t, patience), &redlock.Call{Script: redlock.NewScript("return redis.error_reply('MINE of the test')")}).Err, "MINE")
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if r := one.RunOne(done, &redlock.Call{Script: echo, Args: []string{"x"}}); r.Err == nil {
		t.Error("RunOne goes on though its context is done")
	}
	p.BlackHole()
	const deadline = 100 * time.Millisecond
	for i := range 3 {
		start := time.Now()
		r := one.RunOne(within(t, deadline), &redlock.Call{Script: echo, Args: []string{"lost"}})
		var e *redlock.ServerError
		if r.Err == nil || errors.As(r.Err, &e) {
			t.Fatalf("through a black hole came %v, %v", r.Value, r.Err)
		}
		if d := time.Since(start); d > 20*deadline {
			t.Errorf("call %d: RunOne came back after %v, its deadline was %v", i, d, deadline)
		}
	}
	if p.Counts().BlackHoled == 0 {
		t.Error("the black hole met nothing")
	}
	p.Heal()
	p.Reset()
	recovers(t, n)
}

func testLateReply(t *testing.T, s *servertest.RedisServer, open func(testing.TB, string) redlock.Node) {
	for _, callers := range []int{1, 4} {
		t.Run(fmt.Sprintf("callers=%d", callers), func(t *testing.T) {
			p := servertest.NewProxy(t, s.Addr())
			n := open(t, p.Addr())
			ask(t, n, "return 1", nil)
			late := 0
			for round := range 10 {
				p.DelayReplies(150 * time.Millisecond)
				late += errs(t, n, 20*time.Millisecond, callers, fmt.Sprint("late ", round))
				p.DelayReplies(0)
				// At once: late replies are on their way.
				errs(t, n, 5*time.Second, callers, fmt.Sprint("good ", round))
			}
			if late < 5*callers {
				t.Errorf("only %d calls were late", late)
			}
			if c := p.Counts(); c.Delayed == 0 {
				t.Errorf("no reply was delayed: %+v", c)
			}
			recovers(t, n)
		})
	}
}

// errs lets callers ask at once, each for its own words, and counts the errors.
func errs(t *testing.T, n redlock.Node, d time.Duration, callers int, words string) int {
	t.Helper()
	results := make(chan error, callers)
	for i := range callers {
		go func() {
			mine := fmt.Sprint(words, " of ", i)
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			// Two calls, so that a shift by one within a pipeline shows.
			replies := n.Run(ctx, redlock.Call{Script: echo, Args: []string{mine + "/1"}}, redlock.Call{Script: echo, Args: []string{mine + "/2"}})
			for j, r := range replies {
				if want := fmt.Sprint(mine, "/", j+1); r.Err == nil && r.Value != want {
					t.Errorf("the reply to %q was %q", want, r.Value)
				}
			}
			results <- replies[0].Err
		}()
	}
	failed := 0
	for range callers {
		if err := <-results; err != nil {
			failed++
		}
	}
	return failed
}

// testGone: a server that is away is an error and no answer, and is used again when it is back.
func testGone(t *testing.T, open func(testing.TB, string) redlock.Node) {
	s := servertest.Redis(t)
	n := open(t, s.Addr())
	ask(t, n, "return 1", nil)
	s.Kill()
	r := n.Run(within(t, time.Second), redlock.Call{Script: echo, Args: []string{"x"}}, redlock.Call{Script: echo, Args: []string{"y"}})
	for _, r := range r {
		var e *redlock.ServerError
		if r.Err == nil || errors.As(r.Err, &e) {
			t.Errorf("from a server that is gone: %v, %v", r.Value, r.Err)
		}
	}
	// The connection that was open may end in another way; a new one is refused.
	r = n.Run(within(t, time.Second), redlock.Call{Script: echo, Args: []string{"x"}})
	if !errors.Is(r[0].Err, syscall.ECONNREFUSED) && runtime.GOOS != "windows" {
		t.Errorf("error %v, want one that says that the connection was refused", r[0].Err)
	}
	s.Restart()
	recovers(t, n)
}

// subscription runs Subscribe and counts what it says.
type subscription struct {
	up, messages chan string
	done         chan error
	cancel       context.CancelFunc
}

func subscribe(t *testing.T, n redlock.Node, channel string) *subscription {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	s := &subscription{
		up: make(chan string, 100), messages: make(chan string, 100),
		done: make(chan error, 1), cancel: cancel,
	}
	go func() {
		s.done <- n.Subscribe(ctx, channel, func(p string) { s.messages <- p }, func() { s.up <- "up" })
	}()
	return s
}

func (s *subscription) get(t *testing.T, ch chan string, what string) string {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case err := <-s.done:
		t.Fatalf("Subscribe returned while waiting for %s: %v", what, err)
	case <-time.After(patience):
		t.Fatalf("no %s", what)
	}
	return ""
}

func (s *subscription) end(t *testing.T) {
	t.Helper()
	s.cancel()
	select {
	case err := <-s.done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Subscribe returned %v", err)
		}
	case <-time.After(patience):
		t.Fatal("Subscribe does not return")
	}
}

func testSubscribe(t *testing.T, open func(testing.TB, string) redlock.Node) {
	server := servertest.Redis(t)
	n := open(t, server.Addr())
	const channel = "holdfast:test"
	a, other := subscribe(t, n, channel), subscribe(t, n, channel+":other")
	a.get(t, a.up, "confirmation")
	other.get(t, other.up, "confirmation")
	publish := func(payload string, receivers int64) {
		t.Helper()
		if v := do(t, server, "PUBLISH", channel, payload); v != receivers {
			t.Errorf("%v receivers, want %d", v, receivers)
		}
	}
	for _, payload := range []string{"one", "", "two\r\n\x00\xff", strings.Repeat("x", 100_000)} {
		publish(payload, 1)
		if v := a.get(t, a.messages, "message"); v != payload {
			t.Errorf("message %.40q, want %.40q", v, payload)
		}
	}
	// In a script, as a release does.
	if v := ask(t, n, "return redis.call('PUBLISH', ARGV[1], 'from a script')", nil, channel); v != int64(1) {
		t.Errorf("%v receivers", v)
	}
	if v := a.get(t, a.messages, "message"); v != "from a script" {
		t.Errorf("message %q", v)
	}

	server.Restart()
	a.get(t, a.up, "confirmation after a restart")
	publish("after", 1)
	if v := a.get(t, a.messages, "message"); v != "after" {
		t.Errorf("message %q", v)
	}
	if len(other.messages) != 0 {
		t.Error("a message came on another channel")
	}
	a.end(t)
	servertest.Eventually(t, patience, func() error {
		if v := do(t, server, "PUBSUB", "NUMSUB", channel).([]any)[1]; v != int64(0) {
			return fmt.Errorf("%v subscriptions are left", v)
		}
		return nil
	})
	publish("nobody", 0)
	if len(a.messages) != 0 {
		t.Error("a message came after the end")
	}

	// While the server is away, too.
	other.get(t, other.up, "confirmation after a restart")
	server.Kill()
	time.Sleep(100 * time.Millisecond)
	other.end(t)
}

func testSubscribeRefused(t *testing.T, open func(testing.TB, string) redlock.Node) {
	server := servertest.Redis(t)
	do(t, server, "ACL", "SETUSER", "default", "resetchannels")
	s := subscribe(t, open(t, server.Addr()), "holdfast:test")
	select {
	case err := <-s.done:
		wantCode(t, err, "NOPERM")
	case <-s.up:
		t.Error("confirmed without the right")
	case <-time.After(patience):
		t.Error("Subscribe does not tell that it is not allowed")
	}
}

// testLeaks: when the client is closed, nothing is left, whatever happened before; and a
// server that hangs gathers no goroutines for good.
func testLeaks(t *testing.T, open func(testing.TB, string) redlock.Node) {
	server := servertest.Redis(t)
	p := servertest.NewProxy(t, server.Addr())
	before := len(goroutines())
	t.Run("use", func(t *testing.T) {
		n := open(t, p.Addr())
		s := subscribe(t, n, "holdfast:test")
		s.get(t, s.up, "confirmation")
		errs(t, n, patience, 20, "many")
		_ = n.Pinned(within(t, patience), "key", func(do func(...string) (any, error)) error {
			_, err := do("PING")
			return err
		})
		used := len(goroutines())
		p.BlackHole()
		if failed := errs(t, n, 50*time.Millisecond, 100, "lost"); failed != 100 {
			t.Errorf("%d of 100 calls failed in a black hole", failed)
		}
		_ = n.Pinned(within(t, 50*time.Millisecond), "key", func(do func(...string) (any, error)) error {
			_, err := do("PING")
			return err
		})
		settles(t, used+10) // while the server hangs
		p.Heal()
		p.Reset()
		recovers(t, n)
		settles(t, used+10)
		s.get(t, s.up, "confirmation after a reset")
		s.end(t)
	})
	p.Reset()
	settles(t, before)
}

// settles waits until at most that many goroutines are left.
func settles(t *testing.T, most int) {
	t.Helper()
	servertest.Eventually(t, patience, func() error {
		if now := goroutines(); len(now) > most {
			return fmt.Errorf("%d goroutines, want at most %d:\n%s", len(now), most, strings.Join(now, "\n\n"))
		}
		return nil
	})
}

// goroutines are the stacks of all goroutines but the proxy's.
func goroutines() []string {
	buf := make([]byte, 4<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	return slices.DeleteFunc(all, func(s string) bool {
		return strings.Contains(s, "servertest.(*link)") || strings.Contains(s, "servertest.(*Proxy)")
	})
}
