package redisguard_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// commands is how many commands of that name a server has executed.
func commands(t testing.TB, s *servertest.RedisServer, name string) (n int) {
	t.Helper()
	for line := range strings.Lines(rig.Must(t, s, "INFO", "commandstats").(string)) {
		if rest, ok := strings.CutPrefix(line, "cmdstat_"+name+":calls="); ok {
			calls, _, _ := strings.Cut(rest, ",")
			var err error
			if n, err = strconv.Atoi(calls); err != nil {
				t.Fatal(err)
			}
		}
	}
	return n
}

// unavailable says that everything is refused, with the server's words, and that nothing was
// written.
func unavailable(t *testing.T, s *servertest.RedisServer, g *redisfence.Guard, tok fence.Token, except string, words ...string) {
	t.Helper()
	before := state(t, s)
	for _, w := range writes(t, "r") {
		if w.name != except {
			want(t, w.name, w.do(g, t.Context(), "r", tok), fence.ErrUnavailable, words...)
		}
	}
	want(t, "Claim", g.Claim(t.Context(), "r", tok), fence.ErrUnavailable, words...)
	if now := state(t, s); now != before {
		t.Errorf("it was %s, and is %s", before, now)
	}
}

// state is all that a server holds, but for marks.
func state(t testing.TB, s *servertest.RedisServer) string {
	t.Helper()
	var b strings.Builder
	for _, w := range writes(t, "r") {
		fmt.Fprintf(&b, "%q ", rig.Must(t, s, w.look...))
	}
	return b.String()
}

// filled starts a server that holds what the writes change, and a mark of 5.
func filled(t *testing.T, opts ...servertest.RedisOption) *servertest.RedisServer {
	t.Helper()
	s := servertest.Redis(t, opts...)
	fill(t, s, "r")
	rig.Must(t, s, "SET", "fence:{r}r", "5")
	return s
}

// What the server refuses as a whole.
func TestServerRefuses(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := filled(t)
		g := guard(t, c.eval(t, s.Addr()))
		config := func(name, value string) { t.Helper(); rig.Must(t, s, "CONFIG", "SET", name, value) }
		raised := func(words ...string) { // the mark cannot be raised, or stands already
			t.Helper()
			unavailable(t, s, g, 6, "", words...)
			unavailable(t, s, g, 5, "", words...)
			if v := value(t, s, "fence:{r}r"); v != "5" {
				t.Errorf("the mark is %v", v)
			}
			want(t, "a stale Claim", g.Claim(t.Context(), "r", 4), fence.ErrStale)
		}

		config("maxmemory", "1")
		unavailable(t, s, g, 6, "", "OOM")
		unavailable(t, s, g, 5, "Del", "OOM") // which needs no memory
		config("maxmemory", "0")

		config("min-replicas-to-write", "1")
		raised("NOREPLICAS")
		config("min-replicas-to-write", "0")

		want(t, "Claim", g.Claim(t.Context(), "r", 5), nil)
	})
}

func TestReplicaRefuses(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		primary := filled(t)
		replica := servertest.Redis(t, servertest.ReplicaOf(primary))
		replica.WaitLinked()
		g := guard(t, c.eval(t, replica.Addr()))
		unavailable(t, replica, g, 6, "", "READONLY")
		unavailable(t, replica, g, 5, "", "READONLY")
		_, err := newScript(t, g, "return redis.call('GET', KEYS[1])").Run(t.Context(), "r", 5, []string{"{r}set"}, nil)
		want(t, "a script that only reads", err, fence.ErrUnavailable, "READONLY")
		want(t, "Check, of a mark that may be old", g.Check(t.Context(), "r", 5), fence.ErrUnavailable, "READONLY")
		want(t, "Check of a stale one", g.Check(t.Context(), "r", 4), fence.ErrStale)
		counter, err := redisfence.NewCounter(c.eval(t, replica.Addr()), "n")
		if err != nil {
			t.Fatal(err)
		}
		_, err = counter.Next(t.Context())
		want(t, "Counter", err, fence.ErrUnavailable, "READONLY")
	})
}

// A server that cannot save refuses writes (stop-writes-on-bgsave-error).
func TestMisconf(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := filled(t)
		g := guard(t, c.eval(t, s.Addr()))
		rig.Must(t, s, "CONFIG", "SET", "save", "3600 1")
		if err := os.Mkdir(filepath.Join(s.Dir(), "dump.rdb"), 0o700); err != nil { // where the file is to be
			t.Fatal(err)
		}
		rig.Must(t, s, "BGSAVE")
		servertest.Eventually(t, patience, func() error {
			if s.Info("persistence", "rdb_last_bgsave_status") != "err" {
				return errors.New("not failed yet")
			}
			return nil
		})
		unavailable(t, s, g, 6, "", "MISCONF")
		unavailable(t, s, g, 5, "", "MISCONF")
	})
}

// Rights that are missing: for everything, for the mark, for the data.
func TestNoPermission(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := filled(t)
		user := func(rules ...string) redisfence.Eval {
			t.Helper()
			rig.Must(t, s, append([]string{"ACL", "SETUSER", "user", "reset", "on", ">secret"}, rules...)...)
			if c.name == "goredis" {
				return goRedis(t, &goredis.Options{Addr: s.Addr(), Username: "user", Password: "secret"})
			}
			return dialed(t, rueidis.ClientOption{InitAddress: []string{s.Addr()}, Username: "user", Password: "secret"})
		}
		g := guard(t, user("~*", "+@all", "-eval", "-evalsha"))
		unavailable(t, s, g, 6, "", "NOPERM", "eval")
		g = guard(t, user("~{r}*", "+@all")) // not the mark
		unavailable(t, s, g, 6, "", "permission")
		g = guard(t, user("~*", "+@all", "-set"))
		unavailable(t, s, g, 6, "", "run this command")
		g = guard(t, user("~*", "+@all", "-hset", "-incrby", "-del", "-rpush"))
		for _, w := range writes(t, "r") {
			err := w.do(g, t.Context(), "r", 6)
			switch w.name {
			case "Set":
				want(t, w.name, err, nil)
			case "script": // nobody knows what it did before
				want(t, w.name, err, fence.ErrUncertain, "run this command")
			default:
				want(t, w.name, err, fence.ErrUnavailable, "run this command")
			}
		}
		g = guard(t, user("resetkeys", "~fence:{r}r", "~fence:seq:{r}r", "~{r}int", "+eval", "+evalsha", "+get", "+set", "+incrby"))
		_, err := g.IncrBySeq(t.Context(), "r", 6, 1, "{r}int", 1)
		want(t, "IncrBySeq with the rights that it needs", err, nil)
		g = guard(t, user("+eval", "+evalsha", "~*", "(+get +set ~fence:*)", "(+incrby ~{r}int)")) // not GET of the data
		before := value(t, s, "{r}int")
		_, err = g.IncrBySeq(t.Context(), "r", 6, 2, "{r}int", 1)
		want(t, "IncrBySeq without the right to read", err, fence.ErrUnavailable, "access")
		if v := value(t, s, "{r}int"); v != before {
			t.Errorf("an IncrBySeq that was refused made %v of %v", v, before)
		}
		rig.Must(t, s, "ACL", "SETUSER", "user", ">other", "<secret")
		g = guard(t, user("~*", "+@all", "<secret"))
		want(t, "Claim with a wrong password", g.Claim(t.Context(), "r", 6), fence.ErrUnavailable, "WRONGPASS")
	})
}

func TestConnectionRefused(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := filled(t)
		g := guardWith(t, c.eval(t, s.Addr()), 0)
		want(t, "Claim", g.Claim(t.Context(), "r", 5), nil)
		script := newScript(t, g, "return 1")
		s.Kill()
		for name, do := range map[string]func() error{
			"Claim":  func() error { return g.Claim(t.Context(), "r", 6) },
			"Check":  func() error { return g.Check(t.Context(), "r", 6) },
			"Set":    func() error { return g.Set(t.Context(), "r", 6, "r", "x", 0) },
			"script": func() error { _, err := script.Run(t.Context(), "r", 6, nil, nil); return err },
		} {
			var err error
			servertest.Eventually(t, patience, func() error { // each connection that the client has may break at its first use
				if err = do(); err == nil || !strings.Contains(err.Error(), "refused") {
					return fmt.Errorf("%s: %w", name, err)
				}
				return nil
			})
			want(t, name, err, fence.ErrUnavailable, "refused")
		}
		s.Restart()
		servertest.Eventually(t, patience, func() error { return g.Claim(t.Context(), "r", 6) })
	})
}

// A server that stands still, and a ctx that ends, whatever the client does: what was sent may
// have been executed.
func TestSilence(t *testing.T) {
	servertest.CanPause(t)
	each(t, func(t *testing.T, c client) {
		s := filled(t)
		eval := c.eval(t, s.Addr())
		g := guardWith(t, eval, 700*time.Millisecond)
		for range 20 { // all its connections
			want(t, "Claim", guard(t, eval).Claim(t.Context(), "r", 5), nil)
		}
		s.Stop()
		for i, w := range writes(t, "r") {
			began := time.Now()
			err := w.do(g, t.Context(), "r", 6)
			if i == 0 {
				want(t, w.name, err, fence.ErrUncertain, "no answer")
			} else if !errors.Is(err, fence.ErrUncertain) && !errors.Is(err, fence.ErrUnavailable) { // as it connects anew
				t.Errorf("%s: %v", w.name, err)
			}
			if errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: the caller's ctx has no deadline: %v", w.name, err)
			}
			if d := time.Since(began); d > patience {
				t.Errorf("%s took %v", w.name, d)
			}
		}
		want(t, "Check", g.Check(t.Context(), "r", 5), fence.ErrUnavailable)

		g = guard(t, eval)
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err := g.Set(ctx, "r", 6, "{r}set", "x", 0)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Set: %v", err)
		}

		why := errors.New("the lease has ended")
		canceled, end := context.WithCancelCause(t.Context())
		time.AfterFunc(300*time.Millisecond, func() { end(why) })
		began := time.Now()
		err = g.Set(canceled, "r", 6, "{r}set", "x", 0)
		if !errors.Is(err, context.Canceled) || !errors.Is(err, why) {
			t.Errorf("Set: %v", err)
		}
		if d := time.Since(began); d > patience/2 {
			t.Errorf("a canceled Set took %v", d)
		}
		s.Cont()
	})
}

// Replies that are lost: the guard says that it does not know, nothing is sent again, and what is
// numbered is applied once, however often the caller repeats it. (HTP-04)
func TestLostReplies(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		proxy := servertest.NewProxy(t, s.Addr())
		g := guardWith(t, c.eval(t, proxy.Addr()), 600*time.Millisecond)
		direct := guard(t, c.eval(t, s.Addr()))
		script := newScript(t, g, "return redis.call('INCR', KEYS[1])")
		ops := []struct {
			name string
			do   func(seq int64) error
		}{
			{"IncrBySeq", func(seq int64) error { _, err := g.IncrBySeq(t.Context(), "r", 1, seq, "{r}n", 1); return err }},
			{"RunSeq", func(seq int64) error {
				_, err := script.RunSeq(t.Context(), "r", 1, seq, []string{"{r}n"}, nil)
				return err
			}},
			{"IncrBy", func(int64) error { _, err := g.IncrBy(t.Context(), "r", 1, "{r}n", 1); return err }},
			{"Run", func(int64) error { _, err := script.Run(t.Context(), "r", 1, []string{"{r}n"}, nil); return err }},
		}
		warm := func() { // the next request is sent at once, and its script is known
			t.Helper()
			servertest.Eventually(t, patience, func() error {
				rig.Must(t, s, "SET", "{r}n", "0")
				for _, op := range ops {
					if err := op.do(1 << 62); err != nil && !errors.Is(err, fence.ErrApplied) {
						return err
					}
				}
				rig.Must(t, s, "DEL", "fence:seq:{r}r")
				return nil
			})
		}
		lost, resets := 0, 0
		for i := range kit.Count(6, 150) {
			for _, op := range ops {
				warm()
				rig.Must(t, s, "SET", "{r}n", "0")
				before, dropped := commands(t, s, "incrby")+commands(t, s, "incr"), proxy.Counts().Dropped
				proxy.DropReplies()
				healed := make(chan struct{})
				time.AfterFunc(200*time.Millisecond, func() {
					if i%2 == 1 { // the connection breaks, and a new one would do
						proxy.Reset()
						proxy.Heal()
						resets++
					}
					close(healed)
				})
				err := op.do(1)
				<-healed
				time.Sleep(50 * time.Millisecond) // for what a client may send again
				hit := proxy.Counts().Dropped > dropped
				proxy.Heal()
				n := commands(t, s, "incrby") + commands(t, s, "incr") - before
				if err == nil || n > 1 {
					t.Fatalf("%s was executed %d times: %v", op.name, n, err)
				}
				if n == 1 && hit {
					lost++
					want(t, op.name, err, fence.ErrUncertain)
				} // else the request itself did not get through: the client was connecting, or the machine busy
				if strings.HasSuffix(op.name, "Seq") {
					servertest.Eventually(t, patience, func() error {
						if err := op.do(1); n == 1 && !errors.Is(err, fence.ErrApplied) || n == 0 && err != nil {
							return fmt.Errorf("%s again: %w", op.name, err)
						}
						return nil
					})
					n = 1
				}
				if v := value(t, s, "{r}n"); v != strconv.Itoa(n) {
					t.Errorf("%s: applied %v times, want %d", op.name, v, n)
				}
			}
		}
		if lost < kit.Count(12, 400) {
			t.Errorf("only %d replies were lost", lost)
		}
		t.Logf("%d replies lost, %d of them with the connection", lost, resets)

		// What writes the same again may be repeated, unless another has come.
		warm()
		proxy.DropReplies()
		want(t, "Claim", g.Claim(t.Context(), "r", 2), fence.ErrUncertain)
		want(t, "Set", g.Set(t.Context(), "r", 2, "r", "two", 0), fence.ErrUncertain)
		proxy.Heal()
		servertest.Eventually(t, patience, func() error { return g.Set(t.Context(), "r", 2, "r", "two", 0) })
		want(t, "another's Claim", direct.Claim(t.Context(), "r", 3), nil)
		want(t, "Set", g.Set(t.Context(), "r", 2, "r", "two", 0), fence.ErrStale)
	})
}

// A connection that breaks while requests are under way: each step is applied once.
func TestResets(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		proxy := servertest.NewProxy(t, s.Addr())
		g := guardWith(t, c.eval(t, proxy.Addr()), 0)
		stop := make(chan struct{})
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				select {
				case <-stop:
					return
				case <-time.After(3 * time.Millisecond):
					proxy.Reset()
				}
			}
		}()
		uncertain, applied := 0, 0
		n := kit.Count(300, 5000)
		for seq := int64(1); seq <= int64(n); {
			_, err := g.IncrBySeq(t.Context(), "r", 1, seq, "r", 1)
			switch {
			case err == nil:
				seq++
			case errors.Is(err, fence.ErrApplied):
				applied++
				seq++
			case errors.Is(err, fence.ErrUncertain):
				uncertain++
			case !errors.Is(err, fence.ErrUnavailable):
				t.Fatal(err)
			}
		}
		close(stop)
		<-done
		if v := value(t, s, "r"); v != strconv.Itoa(n) {
			t.Errorf("the sum is %v, want %d", v, n)
		}
		if uncertain == 0 {
			t.Error("no reply was uncertain")
		}
		t.Logf("%d connections reset, %d replies uncertain, %d of them applied", proxy.Counts().Reset, uncertain, applied)
	})
}
