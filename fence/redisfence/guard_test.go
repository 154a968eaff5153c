package redisfence_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
)

// reply is an error of the server.
type reply string

func (r reply) Error() string { return string(r) }
func (r reply) Code() string  { code, _, _ := strings.Cut(string(r), " "); return code }

// answer is an Eval that always answers the same.
func answer(v any, err error) redisfence.Eval {
	return func(context.Context, string, []string, []string) (any, error) { return v, err }
}

func guard(t testing.TB, e redisfence.Eval) *redisfence.Guard {
	t.Helper()
	g, err := redisfence.New(e, redisfence.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func script(t testing.TB, g *redisfence.Guard, src string) *redisfence.Script {
	t.Helper()
	s, err := g.NewScript(src)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// op is something that a guard does.
type op struct {
	name string
	do   func(ctx context.Context, resource string, t fence.Token) error
}

// ops are all of them, with good arguments but for those of the guard.
func ops(t testing.TB, g *redisfence.Guard) []op {
	user := script(t, g, "return 1")
	type ctx = context.Context
	return []op{
		{"Claim", func(ctx ctx, r string, t fence.Token) error { return g.Claim(ctx, r, t) }},
		{"Check", func(ctx ctx, r string, t fence.Token) error { return g.Check(ctx, r, t) }},
		{"Set", func(ctx ctx, r string, t fence.Token) error { return g.Set(ctx, r, t, "k", "", 0) }},
		{"HSet", func(ctx ctx, r string, t fence.Token) error {
			return g.HSet(ctx, r, t, "k", map[string]string{"": ""})
		}},
		{"Del", func(ctx ctx, r string, t fence.Token) error { return g.Del(ctx, r, t, "k") }},
		{"IncrBy", func(ctx ctx, r string, t fence.Token) error { _, err := g.IncrBy(ctx, r, t, "k", 1); return err }},
		{"IncrBySeq", func(ctx ctx, r string, t fence.Token) error { _, err := g.IncrBySeq(ctx, r, t, 1, "k", 1); return err }},
		{"Run", func(ctx ctx, r string, t fence.Token) error { _, err := user.Run(ctx, r, t, nil, nil); return err }},
		{"RunSeq", func(ctx ctx, r string, t fence.Token) error {
			_, err := user.RunSeq(ctx, r, t, 1, nil, nil)
			return err
		}},
	}
}

func wantInvalid(t testing.TB, what string, err error, field string) {
	t.Helper()
	var invalid *fence.InvalidError
	if !errors.As(err, &invalid) || !errors.Is(err, fence.ErrInvalid) || invalid.Field != field || invalid.Rule == "" || strings.ContainsAny(err.Error(), "\r\n") {
		t.Errorf("%s: %v, want an *InvalidError about %s", what, err, field)
	}
}

// Bad input is refused before anything is sent.
func TestBadInput(t *testing.T) {
	var sent atomic.Int64
	g := guard(t, func(context.Context, string, []string, []string) (any, error) { sent.Add(1); return nil, nil })
	ctx := t.Context()
	done, cancel := context.WithCancel(ctx)
	cancel()
	for _, o := range ops(t, g) {
		for _, tok := range []fence.Token{0, -1, math.MinInt64} {
			wantInvalid(t, o.name, o.do(ctx, "r", tok), "token")
		}
		for _, r := range []string{"", "a\x00", "\xff", strings.Repeat("x", fence.MaxResourceLen+1)} {
			wantInvalid(t, o.name, o.do(done, r, 1), "resource")
		}
		if err := o.do(done, "r", 1); !errors.Is(err, context.Canceled) {
			t.Errorf("%s with a done ctx: %v", o.name, err)
		}
	}
	user := script(t, g, "return 1")
	wantInvalid(t, "negative ttl", g.Set(ctx, "r", 1, "k", "v", -1), "ttl")
	wantInvalid(t, "no fields", g.HSet(ctx, "r", 1, "k", nil), "fields")
	wantInvalid(t, "no keys", g.Del(ctx, "r", 1), "key")
	for _, seq := range []int64{0, -1, math.MinInt64} {
		_, err := g.IncrBySeq(ctx, "r", 1, seq, "k", 1)
		wantInvalid(t, "IncrBySeq", err, "seq")
		_, err = user.RunSeq(ctx, "r", 1, seq, nil, nil)
		wantInvalid(t, "RunSeq", err, "seq")
	}
	for _, key := range []string{"", "fence:{r}r", "fence:seq:{r}r"} {
		wantInvalid(t, "Set", g.Set(ctx, "r", 1, key, "v", 0), "key")
		wantInvalid(t, "HSet", g.HSet(ctx, "r", 1, key, map[string]string{"a": "b"}), "key")
		wantInvalid(t, "Del", g.Del(ctx, "r", 1, "k", key), "key")
		_, err := g.IncrBy(ctx, "r", 1, key, 1)
		wantInvalid(t, "IncrBy", err, "key")
		_, err = user.Run(ctx, "r", 1, []string{"k", key}, nil)
		wantInvalid(t, "Run", err, "key")
	}
	for _, key := range []string{"fence:{q}q", "fence:seq:{q}q", "fence:{r}{r}q", g.MarkKey("}")} { // of others
		wantInvalid(t, "Set of "+key, g.Set(ctx, "r", 1, key, "v", 0), "key")
		wantInvalid(t, "Del of "+key, g.Del(ctx, "r", 1, "k", key), "key")
	}
	n, err := redisfence.NewCounter(answer(nil, nil), "n")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Next(done); !errors.Is(err, context.Canceled) {
		t.Errorf("Next with a done ctx: %v", err)
	}
	if sent.Load() != 0 {
		t.Errorf("%d requests were sent", sent.Load())
	}
	for _, key := range []string{"fence:", "fence:{", "fence:{q", "fence:{q}", "fence:{q}x", "fence:seq:{q}x", "fence:{}q"} { // nobody's
		if err := g.Set(ctx, "r", 1, key, "v", 0); err != nil {
			t.Errorf("Set of %q: %v", key, err)
		}
	}
	if _, err := user.Run(ctx, "r", 1, []string{"fence:{q}q"}, nil); err != nil {
		t.Errorf("a script that looks at another mark: %v", err)
	}
}

func TestBadOptions(t *testing.T) {
	ok := answer(nil, nil)
	for _, tt := range []struct {
		eval  redisfence.Eval
		o     redisfence.Options
		field string
	}{
		{nil, redisfence.Options{}, "eval"},
		{ok, redisfence.Options{Prefix: "a{b"}, "prefix"},
		{ok, redisfence.Options{Prefix: "}"}, "prefix"},
		{ok, redisfence.Options{Prefix: strings.Repeat("x", 129)}, "prefix"},
		{ok, redisfence.Options{Timeout: -1}, "timeout"},
	} {
		g, err := redisfence.New(tt.eval, tt.o)
		wantInvalid(t, fmt.Sprint(tt.o), err, tt.field)
		if g != nil {
			t.Errorf("%v: a guard", tt.o)
		}
	}
	_, err := redisfence.NewCounter(nil, "n")
	wantInvalid(t, "NewCounter", err, "eval")
	_, err = redisfence.NewCounter(ok, "")
	wantInvalid(t, "NewCounter", err, "key")
	g, err := redisfence.New(ok, redisfence.Options{Prefix: "app/"})
	if err != nil || g.MarkKey("r") != "app/{r}r" {
		t.Errorf("MarkKey = %q, %v", g.MarkKey("r"), err)
	}
}

var kinds = []error{fence.ErrStale, fence.ErrNoResource, fence.ErrUnclaimed, fence.ErrApplied, fence.ErrBusy, fence.ErrUncertain,
	fence.ErrUnavailable, fence.ErrInvalid}

// What an Eval answers, and what the guard makes of it.
func TestErrors(t *testing.T) {
	wrong := errors.New("something")
	for _, tt := range []struct {
		err                       error
		write, user, check, count error
	}{
		// Refused before anything ran.
		{reply("LOADING Redis is loading the dataset in memory"), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("READONLY You can't write against a read only replica."), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("CLUSTERDOWN The cluster is down"), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("TRYAGAIN Multiple keys request during rehashing of slot"), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("MOVED 1 127.0.0.1:1"), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("NOAUTH Authentication required."), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("BUSY Redis is busy running a script."), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("NOPERM User x has no permissions to run the 'evalsha' command"), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("CROSSSLOT Keys in request don't hash to the same slot"), fence.ErrInvalid, fence.ErrInvalid, fence.ErrInvalid, fence.ErrUnavailable},
		// By the guard's part of the script.
		{reply("FENCE refused OOM command not allowed"), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("FENCE mark 007"), fence.ErrInvalid, fence.ErrInvalid, fence.ErrInvalid, fence.ErrInvalid},
		{reply("FENCE type WRONGTYPE Operation"), fence.ErrInvalid, fence.ErrInvalid, fence.ErrInvalid, fence.ErrInvalid},
		{reply("FENCE stale 9"), fence.ErrStale, fence.ErrStale, fence.ErrStale, fence.ErrInvalid},
		{reply("FENCE applied 9"), fence.ErrApplied, fence.ErrApplied, fence.ErrApplied, fence.ErrInvalid},
		// By what comes after it: the guard's own write is one command, the user's may be many.
		{reply("ERR something"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("MINE something"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("BUSY come again"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("READONLY the account is frozen"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("ERR no such shebang, Error compiling script"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("FENCE stale x"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrInvalid},
		{reply("WRONGTYPE Operation against a key script: 12, on @user_script:1."), fence.ErrInvalid, fence.ErrUncertain, fence.ErrInvalid, fence.ErrUnavailable},
		{reply("NOPERM ACL failure in script: No permissions to access a key"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("ERR Error running script (call to f_12): @user_script:1: -CROSSSLOT"), fence.ErrUnavailable, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUnavailable},
		{reply("ERR Error compiling script (new function): user_script:1: unexpected symbol"), fence.ErrUnavailable, fence.ErrInvalid, fence.ErrUnavailable, fence.ErrUnavailable},
		// Of the way to the server.
		{&net.OpError{Op: "dial", Err: errors.New("connection refused")}, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{fmt.Errorf("pool: %w", &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{fmt.Errorf("no connection: %w", fence.ErrUnavailable), fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable, fence.ErrUnavailable},
		{&net.OpError{Op: "read", Err: errors.New("connection reset")}, fence.ErrUncertain, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUncertain},
		{&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}, fence.ErrUncertain, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUncertain},
		{wrong, fence.ErrUncertain, fence.ErrUncertain, fence.ErrUnavailable, fence.ErrUncertain},
		{&fence.InvalidError{Field: "x", Rule: "y"}, fence.ErrInvalid, fence.ErrInvalid, fence.ErrInvalid, fence.ErrInvalid},
	} {
		e := answer(nil, tt.err)
		n, err := redisfence.NewCounter(e, "n")
		if err != nil {
			t.Fatal(err)
		}
		_, countErr := n.Next(t.Context())
		check := func(what string, err, want error) {
			t.Helper()
			for _, k := range kinds {
				if errors.Is(err, k) != (k == want) {
					t.Errorf("%s answers %q: %t, to %v: %v", what, k, k != want, tt.err, err)
				}
			}
			if err != nil && strings.ContainsAny(err.Error(), "\r\n") {
				t.Errorf("%s: more than one line: %v", what, err)
			}
			if want == fence.ErrUncertain && !errors.Is(err, tt.err) && !errors.Is(tt.err, os.ErrDeadlineExceeded) {
				t.Errorf("%s: %v does not lead to the client's error", what, err)
			}
		}
		check("Next", countErr, tt.count)
		for _, o := range ops(t, guard(t, e)) {
			want := tt.write
			switch o.name {
			case "Check":
				want = tt.check
			case "Run", "RunSeq":
				want = tt.user
			}
			check(o.name, o.do(t.Context(), "r", 5), want)
		}
	}
}

// Replies that no server gives are no success where they carry a value.
func TestStrangeReplies(t *testing.T) {
	for _, v := range []any{nil, "x", int64(5), []any{}, "-", "007", "1.5", 5, map[string]string{}} {
		g := guard(t, answer(v, nil))
		if err := g.Check(t.Context(), "r", 5); !errors.Is(err, fence.ErrUnavailable) {
			t.Errorf("Check of %#v: %v", v, err)
		}
		if v != "007" {
			if n, err := g.IncrBy(t.Context(), "r", 5, "k", 1); !errors.Is(err, fence.ErrUncertain) || n != 0 {
				t.Errorf("IncrBy of %#v: %v, %v", v, n, err)
			}
		}
		n, err := redisfence.NewCounter(answer(v, nil), "n")
		if err != nil {
			t.Fatal(err)
		}
		if tok, err := n.Next(t.Context()); !errors.Is(err, fence.ErrUncertain) || tok != 0 {
			t.Errorf("Next of %#v: %v, %v", v, tok, err)
		}
	}
}

// The holder is told of a stale answer.
func TestStaleTellsTheHolder(t *testing.T) {
	for _, o := range ops(t, guard(t, answer(nil, reply("FENCE stale 9")))) {
		told := 0
		ctx := fence.WithHolder(t.Context(), "lock", 5, func(e *fence.StaleError) {
			told++
			if *e != (fence.StaleError{Resource: "r", Token: 5, Seen: 9}) {
				t.Errorf("%s: %+v", o.name, e)
			}
		})
		var stale *fence.StaleError
		if err := o.do(ctx, "r", 5); !errors.As(err, &stale) || told != 1 {
			t.Errorf("%s: told %d times: %v", o.name, told, err)
		}
	}
}

// The user's source follows the guard's part on the same line, and is not touched.
// A script says by its number which of the keys holds a lock.
func TestKeyThatHoldsALock(t *testing.T) {
	for text, key := range map[string]string{"1": "a", "3": "c", "0": "", "4": "", "x": "", "": ""} {
		err := guard(t, answer(nil, reply("FENCE vote "+text))).Del(t.Context(), "r", 1, "a", "b", "c")
		var invalid *fence.InvalidError
		if errors.As(err, &invalid) != (key != "") || key != "" && (invalid.Field != "key" || invalid.Value != key) ||
			key == "" && !errors.Is(err, fence.ErrUnavailable) {
			t.Errorf("vote %q: %v", text, err)
		}
	}
}

func TestScriptSource(t *testing.T) {
	var text string
	var keys, args []string
	g := guard(t, func(_ context.Context, s string, k, a []string) (any, error) {
		text, keys, args = s, k, a
		return nil, nil
	})
	src := "-- first line\nreturn KEYS[1] -- last line, \"quoted\"\t\n\n"
	mine, more := []string{"k1", "k2"}, []string{"a1", ""}
	for head, src := range map[string]string{"": src, "#!lua flags=allow-oom\n": "#!lua flags=allow-oom\n" + src} {
		_, err := script(t, g, src).RunSeq(t.Context(), "r", 5, 3, mine, more)
		if err != nil {
			t.Fatal(err)
		}
		rest, ok := strings.CutPrefix(text, head)
		if !ok || !strings.HasSuffix(text, " "+strings.TrimPrefix(src, head)) {
			t.Errorf("%q was sent", text)
		}
		if first, _, _ := strings.Cut(rest, "\n"); !strings.HasSuffix(first, "end -- first line") {
			t.Errorf("the first line is %q", first)
		}
		if strings.Contains(text, "--[[") || strings.Contains(text, "@PROBE@") {
			t.Errorf("a place was not filled: %q", text)
		}
		if !slices.Equal(keys, []string{"k1", "k2", "fence:seq:{r}r", "fence:{r}r"}) || !slices.Equal(args, []string{"a1", "", "3", "5"}) {
			t.Errorf("KEYS %q, ARGV %q", keys, args)
		}
	}
	if len(mine) != 2 || len(more) != 2 {
		t.Error("the caller's arguments were changed")
	}
}

// hang is an Eval that does not look at its ctx. A bubble waits for its end by letGo.
func hang(d time.Duration) redisfence.Eval {
	return func(context.Context, string, []string, []string) (any, error) { time.Sleep(d); return "5", nil }
}

// letGo waits for what hangs.
func letGo() { time.Sleep(2 * time.Hour) }

// Every call is raced against a timer, whatever the client does.
func TestTimeouts(t *testing.T) {
	for _, tt := range []struct {
		name              string
		timeout, deadline time.Duration // of the guard, of ctx
		eval              redisfence.Eval
		after             time.Duration
		deadlineExceeded  bool
	}{
		{"default", 0, 0, hang(time.Hour), 5 * time.Second, false},
		{"timeout", time.Minute, 0, hang(time.Hour), time.Minute, false},
		{"deadline", time.Minute, time.Second, hang(time.Hour), time.Second, true},
		{"later deadline", time.Second, time.Minute, hang(time.Hour), time.Second, false},
		{"client with a deadline of its own", 0, 0, func(ctx context.Context, _ string, _, _ []string) (any, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, 4900 * time.Millisecond, false},
		{"the same, with a deadline", 0, 400 * time.Millisecond, func(ctx context.Context, _ string, _, _ []string) (any, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, 350 * time.Millisecond, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i := range ops(t, guard(t, tt.eval)) {
				synctest.Test(t, func(t *testing.T) {
					defer letGo()
					g, err := redisfence.New(tt.eval, redisfence.Options{Timeout: tt.timeout})
					if err != nil {
						t.Fatal(err)
					}
					o := ops(t, g)[i]
					ctx := t.Context()
					if tt.deadline > 0 {
						var cancel context.CancelFunc
						ctx, cancel = context.WithTimeout(ctx, tt.deadline)
						defer cancel()
					}
					began := time.Now()
					err = o.do(ctx, "r", 5)
					if d := time.Since(began); d != tt.after {
						t.Errorf("%s took %v, want %v", o.name, d, tt.after)
					}
					kind := fence.ErrUncertain
					if o.name == "Check" {
						kind = fence.ErrUnavailable
					}
					if !errors.Is(err, kind) || errors.Is(err, context.DeadlineExceeded) != tt.deadlineExceeded {
						t.Errorf("%s: %v", o.name, err)
					}
				})
			}
		})
	}
}

func TestCancel(t *testing.T) {
	why := errors.New("the lease has ended")
	synctest.Test(t, func(t *testing.T) {
		defer letGo()
		for _, o := range ops(t, guard(t, hang(time.Hour))) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(why) })
			began := time.Now()
			err := o.do(ctx, "r", 5)
			if d := time.Since(began); d != time.Second || !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
				t.Errorf("%s: %v after %v", o.name, err, d)
			}
		}
		n, err := redisfence.NewCounter(hang(time.Hour), "n")
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if _, err := n.Next(t.Context()); !errors.Is(err, fence.ErrUncertain) || time.Since(began) != 5*time.Second {
			t.Errorf("Next: %v after %v", err, time.Since(began))
		}
	})
}
