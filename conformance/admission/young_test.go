package admission_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// A node that was restarted empty while a lease is held votes for nobody: neither for the
// process that knew it, nor for one that reconnects first, nor for a bare EVALSHA.
func TestRestartedEmptyDoesNotVote(t *testing.T) {
	for _, first := range []string{"the holder", "another process"} {
		for _, c := range rig.Clients {
			t.Run(first+" comes first/"+c.String(), func(t *testing.T) {
				t.Parallel()
				s := old(t)
				p, tap := tapped(t, s)
				ours := rig.Store(t, strict, c.Node(t, p.Addr()))
				other := rig.Store(t, strict, c.Node(t, s.Addr()))
				_, before := acquire(t, ours, "k")
				if _, _, err := try(other, "k"); !errors.Is(err, store.ErrHeld) {
					t.Fatalf("before the restart: %v", err)
				}

				restartedEmpty(t, s)
				order := []*redlock.Store{ours, other}
				if first != "the holder" {
					order = []*redlock.Store{other, ours}
				}
				for _, st := range order {
					refusedYoung(t, st, "k", quarantine)
				}
				refusedYoung(t, rig.Store(t, strict, c.Node(t, s.Addr())), "k", quarantine)
				if code := rawVote(t, s, tap, "raw"); code != "NOSCRIPT" {
					t.Errorf("a raw EVALSHA got %s, want NOSCRIPT", code)
				}
				if n := rig.Must(t, s, "EXISTS", "k"); n != int64(0) {
					t.Error("a vote was given")
				}
				votesAfter(t, quarantine, s, c, before)
			})
		}
	}
}

// votesAfter checks, by the server's clock, that it refuses until its age is d and votes from
// then on, with a larger token.
func votesAfter(t *testing.T, d time.Duration, s *servertest.RedisServer, c rig.Client, before store.Grant) {
	t.Helper()
	node := c.Node(t, s.Addr())
	pass(d-2*time.Second-age(t, s), s)
	awaitAge(t, s, d-2*time.Second)
	for {
		was := age(t, s)
		// A fresh store, which has not been told how long to wait.
		st := rig.Store(t, redlock.Options{NodeTimeout: timeout, MaxTTL: max(d-time.Second, 30*time.Second)}, node)
		lease, g, err := try(st, "k")
		if err == nil {
			if is := age(t, s); is < d {
				t.Errorf("it voted at an age of %v, want %v", is, d)
			}
			if g.Token <= before.Token {
				t.Errorf("token %v after %v", g.Token, before.Token)
			}
			release(t, lease)
			return
		}
		var young *redlock.YoungError
		if !errors.As(err, &young) || was >= d {
			t.Fatalf("refused at an age of %v: %v", was, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func age(t *testing.T, s *servertest.RedisServer) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(s.Info("server", "uptime_in_seconds") + "s")
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// awaitAge waits until the server has noticed that its clock was set.
func awaitAge(t *testing.T, s *servertest.RedisServer, d time.Duration) {
	t.Helper()
	servertest.Eventually(t, 5*time.Second, func() error {
		if up := age(t, s); up < d {
			return fmt.Errorf("the server's uptime of %v does not follow its clock", up)
		}
		return nil
	})
}

// A larger MaxTTL makes the quarantine longer.
func TestQuarantineFollowsMaxTTL(t *testing.T) {
	t.Parallel()
	s := old(t)
	o := redlock.Options{NodeTimeout: timeout, MaxTTL: time.Minute}
	_, before := acquire(t, rig.Store(t, o, rig.GoRedis.Node(t, s.Addr())), "k")
	restartedEmpty(t, s)
	refusedYoung(t, rig.Store(t, o, rig.GoRedis.Node(t, s.Addr())), "k", 61*time.Second)
	pass(40*time.Second, s) // more than a store with the default would wait
	awaitAge(t, s, 40*time.Second)
	refusedYoung(t, rig.Store(t, o, rig.GoRedis.Node(t, s.Addr())), "k", 22*time.Second)
	votesAfter(t, 61*time.Second, s, rig.GoRedis, before)
}

// A proxy that keeps the connections of clients hides the restart from them.
func TestRestartBehindAProxyThatKeepsConnections(t *testing.T) {
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			s := old(t)
			p, tap := tapped(t, s, servertest.KeepClients())
			ours, other := rig.Store(t, strict, c.Node(t, p.Addr())), rig.Store(t, strict, c.Node(t, p.Addr()))
			_, before := acquire(t, ours, "k")
			if _, _, err := try(other, "k"); !errors.Is(err, store.ErrHeld) {
				t.Fatalf("before the restart: %v", err)
			}
			restartedEmpty(t, s)
			// The first use of a kept connection may find that its other side has gone.
			refusedYoung(t, other, "k", quarantine)
			refusedYoung(t, ours, "k", quarantine)
			if n := p.Counts().Redialed; n == 0 {
				t.Error("the proxy kept no connection over the restart")
			}
			if code := rawVote(t, s, tap, "raw"); code != "NOSCRIPT" {
				t.Errorf("a raw EVALSHA got %s, want NOSCRIPT", code)
			}
			votesAfter(t, quarantine, s, c, before)
		})
	}
}

// SCRIPT FLUSH makes a server forget that it was admitted, and nothing else.
func TestScriptFlushIsAdmittedAgainAtOnce(t *testing.T) {
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			s := old(t)
			p, tap := tapped(t, s)
			st := rig.Store(t, strict, c.Node(t, p.Addr()))
			lease, first := acquire(t, st, "k")
			rig.Must(t, s, "SCRIPT", "FLUSH")
			if code := rawVote(t, s, tap, "raw"); code != "NOSCRIPT" {
				t.Errorf("a raw EVALSHA got %s, want NOSCRIPT", code)
			}
			if _, err := lease.Extend(context.Background()); err != nil {
				t.Errorf("extend: %v", err)
			}
			release(t, lease)
			rig.Must(t, s, "SCRIPT", "FLUSH")
			lease, second := acquire(t, st, "k")
			if second.Token <= first.Token {
				t.Errorf("token %v after %v", second.Token, first.Token)
			}
			release(t, lease)
		})
	}
}

// asRedis6 makes a server say that it is a Redis 6, which writes scripts to its AOF.
type asRedis6 struct{ redlock.Node }

func (n asRedis6) Pinned(ctx context.Context, key string, fn func(do func(args ...string) (any, error)) error) error {
	return n.Node.Pinned(ctx, key, func(do func(args ...string) (any, error)) error {
		return fn(func(args ...string) (any, error) {
			v, err := do(args...)
			if text, ok := v.(string); ok && args[0] == "INFO" {
				v = strings.Replace(text, "redis_version:7.", "redis_version:6.", 1)
			}
			return v, err
		})
	})
}

// Redis 6 brings scripts back with its AOF, Redis 5 replicates them. That is played by loading
// the script again after the restart. The text sees for itself that this is another server.
func TestScriptThatSurvivesARestartDoesNotVote(t *testing.T) {
	for _, version := range []string{"6", "7"} {
		for _, data := range []string{"kept", "lost"} {
			t.Run("Redis "+version+"/data "+data, func(t *testing.T) {
				t.Parallel()
				s := old(t, servertest.AppendOnly("always"))
				p, tap := tapped(t, s)
				node := rig.GoRedis.Node(t, p.Addr())
				if version == "6" {
					node = asRedis6{node}
				}
				st := rig.Store(t, strict, node)
				_, before := acquire(t, st, "k")
				text, sha := tap.Script()
				if caches := strings.Contains(text, "SET', '{holdfast}:checked'"); caches != (version == "7") {
					t.Fatalf("remembers its comparison: %v", caches)
				}

				s.Kill()
				if data == "lost" {
					s.Wipe()
				}
				s.Restart()
				if version == "7" {
					// What a restart keeps for up to a second is the memory of the comparison.
					// Redis 7 does not bring scripts back, so nothing can use it.
					rig.Must(t, s, "DEL", "{holdfast}:checked")
				}
				if got := rig.Must(t, s, "SCRIPT", "LOAD", text); got != sha {
					t.Fatalf("loaded %v, want %v", got, sha)
				}
				if code := rawVote(t, s, tap, "raw"); code != "NOTADMITTED" {
					t.Errorf("a raw EVALSHA got %s, want NOTADMITTED", code)
				}
				refusedYoung(t, st, "other", quarantine)
				if n := rig.Must(t, s, "EXISTS", "other"); n != int64(0) {
					t.Error("a vote was given")
				}
				votesAfter(t, quarantine, s, rig.GoRedis, before)
			})
		}
	}
}

// A lease on one node lives through a restart of that node which keeps its data: it is
// extended and released, while nobody is granted anything.
func TestLeaseSurvivesARestartWithAOF(t *testing.T) {
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			s := old(t, servertest.AppendOnly("always"))
			p, tap := tapped(t, s)
			st := rig.Store(t, strict, c.Node(t, p.Addr()))
			lease, g := acquire(t, st, "k")
			s.Kill()
			s.Restart()
			if up := age(t, s); up > 10*time.Second {
				t.Fatalf("the server says it is %v old", up)
			}
			for range 3 {
				servertest.Eventually(t, ttl/2, func() error { // the client reconnects
					again, err := lease.Extend(context.Background())
					if errors.Is(err, store.ErrLost) {
						t.Fatalf("the lease did not survive: %v", err)
					}
					if err == nil && (again.Token != g.Token || again.Owner != g.Owner) {
						t.Fatalf("%v became %v", g, again)
					}
					return err
				})
			}
			if left := rig.Must(t, s, "PTTL", "k").(int64); left <= (ttl / 2).Milliseconds() {
				t.Errorf("the vote has %d ms left after an extension", left)
			}
			refusedYoung(t, st, "other", quarantine)
			refusedYoung(t, rig.Store(t, strict, c.Node(t, s.Addr())), "k", quarantine)
			if code := rawVote(t, s, tap, "raw"); code != "NOSCRIPT" {
				t.Errorf("a raw EVALSHA got %s, want NOSCRIPT", code)
			}
			release(t, lease)
			if n := rig.Must(t, s, "EXISTS", "k"); n != int64(0) {
				t.Error("the vote was not given back")
			}
			votesAfter(t, quarantine, s, c, g)
		})
	}
}

// Five nodes: a lease has votes on three of them, one of which restarts empty. The two that
// had none and the one that forgot are three, and must not be a quorum for another.
func TestRestartedNodeOfFiveDoesNotMakeAQuorum(t *testing.T) {
	for _, trust := range []bool{false, true} {
		name := "strict"
		if trust {
			name = "TrustRestarts, for contrast"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			servers := servertest.RedisN(t, 5, servertest.Aged(time.Hour))
			o := redlock.Options{NodeTimeout: 500 * time.Millisecond, TrustRestarts: trust}
			// A cannot reach two of the nodes.
			nodes := rig.Nodes(t, rig.GoRedis, servers[:3]...)
			for _, p := range kit.Proxies(t, servers[3:]) {
				p.Refuse()
				nodes = append(nodes, rig.GoRedis.Node(t, p.Addr()))
			}
			a, g := acquire(t, rig.Store(t, o, nodes...), "k")
			for i, s := range servers {
				if n := rig.Must(t, s, "EXISTS", "k"); (n == int64(1)) != (i < 3) {
					t.Fatalf("node %d has %v votes", i, n)
				}
			}
			restartedEmpty(t, servers[2])

			b := rig.Store(t, o, rig.Nodes(t, rig.GoRedis, servers...)...)
			if trust { // two holders, as documented: three of five nodes know of none
				servertest.Eventually(t, 5*time.Second, func() error {
					_, _, err := try(b, "k")
					return err
				})
				return
			}
			_, got, err := try(b, "k")
			if err == nil {
				t.Fatalf("two holders: tokens %v and %v", g.Token, got.Token)
			}
			var young *redlock.YoungError
			if !errors.As(err, &young) || errors.Is(err, store.ErrInvalid) {
				t.Errorf("not told that a node is young: %v", err)
			}
			rig.OneLine(t, err, servers[2].Addr()+": started or promoted", "votes in", "busy")
			t.Log(err)
			// A has two votes that are known, too few to extend, and nothing proves that it lost.
			if _, err := a.Extend(context.Background()); !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrLost) {
				t.Errorf("A's extension: %v", err)
			}
		})
	}
}

// The whole quarantine in real time, on a server that was started the usual way.
func TestFreshServerInRealTime(t *testing.T) {
	if !kit.Soak() {
		t.Log("31 s in real time: only with HOLDFAST_SOAK=1")
		return
	}
	t.Parallel()
	s := servertest.Redis(t)
	st := rig.Store(t, strict, rig.GoRedis.Node(t, s.Addr()))
	begin := time.Now()
	refusedYoung(t, st, "k", quarantine)
	refused := 0
	for {
		_, _, err := try(st, "k")
		if err == nil {
			break
		}
		var young *redlock.YoungError
		if !errors.As(err, &young) {
			t.Fatal(err)
		}
		if refused++; time.Since(begin) > 2*quarantine {
			t.Fatalf("still young after %v: %v", time.Since(begin), err)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if up := age(t, s); up < quarantine {
		t.Errorf("it voted at an age of %v", up)
	}
	t.Logf("a fresh server voted after %v and %d refusals", time.Since(begin).Round(time.Millisecond), refused)
}
