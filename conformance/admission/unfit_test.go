package admission_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// refusedInvalid checks that an acquisition is refused as what waiting cannot mend, by one
// line, for the given field and with the given parts.
func refusedInvalid(t *testing.T, s *redlock.Store, field string, parts ...string) {
	t.Helper()
	for range 2 { // the second time without asking, or the same
		c, g, err := try(s, "k")
		if err == nil {
			t.Fatalf("granted: token %v", g.Token)
		}
		var invalid *store.InvalidError
		if !errors.Is(err, store.ErrInvalid) || !errors.As(err, &invalid) {
			t.Fatalf("not refused as invalid: %v", err)
		}
		if invalid.Field != field {
			t.Errorf("field %q, want %q: %v", invalid.Field, field, err)
		}
		rig.OneLine(t, err, parts...)
		if err := c.Release(context.Background()); err != nil {
			t.Errorf("release of what was refused: %v", err)
		}
	}
	_, _, err := try(s, "k")
	t.Log(err)
}

// RED-08
func TestReplicaAsANode(t *testing.T) {
	for _, c := range rig.Clients {
		for _, n := range []int{1, 5} {
			t.Run(fmt.Sprintf("%v/%d", c, n), func(t *testing.T) {
				t.Parallel()
				servers := servertest.RedisN(t, n, servertest.Aged(time.Hour))
				primary := old(t)
				rig.Must(t, servers[0], "REPLICAOF", "127.0.0.1", strconv.Itoa(primary.Port()))
				servers[0].WaitLinked()
				st := rig.Store(t, strict, rig.Nodes(t, c, servers...)...)
				refusedInvalid(t, st, "node", servers[0].Addr(), "is a replica of "+primary.Addr(), "must be a primary")
			})
		}
	}
}

// RED-08
func TestOneServerUnderTwoNames(t *testing.T) {
	for _, c := range rig.Clients {
		for _, n := range []int{2, 5} {
			t.Run(fmt.Sprintf("%v/%d", c, n), func(t *testing.T) {
				t.Parallel()
				servers := servertest.RedisN(t, n-1, servertest.Aged(time.Hour))
				second := "localhost:" + strconv.Itoa(servers[0].Port())
				nodes := append(rig.Nodes(t, c, servers...), c.Node(t, second))
				st := rig.Store(t, strict, nodes...)
				refusedInvalid(t, st, "node", servers[0].Addr(), second, "same server")
			})
		}
	}
}

// Clients that disagree about what belongs to the deployment.
func TestClientsDisagree(t *testing.T) {
	a := redlock.Options{NodeTimeout: timeout}
	long := redlock.Options{NodeTimeout: timeout, MaxTTL: time.Minute}
	trusting := redlock.Options{NodeTimeout: timeout, TrustRestarts: true}
	for _, tt := range []struct {
		name          string
		first, second redlock.Options
		parts         []string
	}{
		{"MaxTTL", a, long, []string{"MaxTTL", "30000", "60000", "{holdfast}:node", "1m1s"}},
		{"MaxTTL the other way", long, a, []string{"MaxTTL", "60000", "30000", "{holdfast}:node"}},
		{"strict meets trusting", a, trusting, []string{"TrustRestarts", "{holdfast}:node"}},
		{"trusting meets strict", trusting, a, []string{"TrustRestarts", "{holdfast}:node"}},
	} {
		for _, n := range []int{1, 5} {
			t.Run(fmt.Sprintf("%s/%d", tt.name, n), func(t *testing.T) {
				t.Parallel()
				servers := servertest.RedisN(t, n, servertest.Aged(time.Hour))
				lease, _ := acquire(t, rig.Store(t, tt.first, rig.Nodes(t, rig.GoRedis, servers...)...), "warm")
				release(t, lease)
				recorded(t, servers[:1])
				st := rig.Store(t, tt.second, rig.Nodes(t, rig.Rueidis, servers...)...)
				refusedInvalid(t, st, "node", append(tt.parts, "stop all clients")...)
				if n := rig.Must(t, servers[0], "EXISTS", "k"); n != int64(0) {
					t.Error("it voted all the same")
				}
			})
		}
	}
}

// recorded waits until the servers have the record: a round may end before all have answered.
func recorded(t *testing.T, servers []*servertest.RedisServer) {
	t.Helper()
	for _, s := range servers {
		servertest.Eventually(t, 5*time.Second, func() error {
			if v, err := s.Do("EXISTS", "{holdfast}:node"); err != nil || v != int64(1) {
				return fmt.Errorf("no record: %v, %v", v, err)
			}
			return nil
		})
	}
}

func TestKeyOfAnotherKind(t *testing.T) {
	for _, make := range [][]string{{"HSET", "k", "f", "v"}, {"RPUSH", "k", "v"}} {
		for _, c := range rig.Clients {
			for _, n := range []int{1, 5} {
				t.Run(fmt.Sprintf("%s/%v/%d", make[0], c, n), func(t *testing.T) {
					t.Parallel()
					servers := servertest.RedisN(t, n, servertest.Aged(time.Hour))
					for _, s := range servers {
						rig.Must(t, s, make...)
					}
					st := rig.Store(t, strict, rig.Nodes(t, c, servers...)...)
					refusedInvalid(t, st, "key", `"k"`, "holds another kind of value", servers[0].Addr())
					for _, s := range servers {
						if n := rig.Must(t, s, "EXISTS", "k"); n != int64(1) {
							t.Error("the user's value was deleted")
						}
					}
				})
			}
		}
	}
}

// restricted gives a server a user of its own.
func restricted(t *testing.T, s *servertest.RedisServer, c rig.Client, rules ...string) rig.Client {
	t.Helper()
	rig.Must(t, s, append([]string{"ACL", "SETUSER", "app", "on", ">pass", "~*", "&*", "+@all"}, rules...)...)
	c.User, c.Password = "app", "pass"
	return c
}

func TestNoRightToINFO(t *testing.T) {
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			s := old(t)
			st := rig.Store(t, strict, restricted(t, s, c, "-info").Node(t, s.Addr()))
			refusedInvalid(t, st, "node", s.Addr(), "+info", "TrustRestarts")
		})
		t.Run(c.String()+"/SCRIPT LOAD", func(t *testing.T) {
			t.Parallel()
			s := old(t)
			st := rig.Store(t, strict, restricted(t, s, c, "-script").Node(t, s.Addr()))
			refusedInvalid(t, st, "node", s.Addr(), "+script|load")
		})
		t.Run(c.String()+"/the keys", func(t *testing.T) {
			t.Parallel()
			s := old(t)
			rig.Must(t, s, "ACL", "SETUSER", "app", "on", ">pass", "~{holdfast}:*", "+@all")
			limited := c
			limited.User, limited.Password = "app", "pass"
			st := rig.Store(t, strict, limited.Node(t, s.Addr()))
			refusedInvalid(t, st, "node", s.Addr(), "NOPERM")
		})
	}
}

// Wrong credentials on two of five: it works, and does not storm them. On three: refused at
// once as what waiting cannot mend. (RED-17)
func TestWrongCredentialsOnSome(t *testing.T) {
	for _, kind := range []string{"WRONGPASS", "NOAUTH"} {
		for _, c := range rig.Clients {
			for _, locked := range []int{2, 3} {
				t.Run(fmt.Sprintf("%s/%v/%d of 5", kind, c, locked), func(t *testing.T) {
					t.Parallel()
					servers := servertest.RedisN(t, 5, servertest.Aged(time.Hour))
					var nodes []redlock.Node
					for i, s := range servers {
						with := c
						if i < locked {
							if kind == "WRONGPASS" {
								with.User, with.Password = "app", "wrong"
							} else {
								rig.Must(t, s, "CONFIG", "SET", "requirepass", "secret")
							}
						}
						nodes = append(nodes, with.Node(t, s.Addr()))
					}
					st := rig.Store(t, strict, nodes...)
					if locked == 3 {
						begin := time.Now()
						refusedInvalid(t, st, "node", servers[0].Addr(), servers[1].Addr(), servers[2].Addr(), kind, map[string]string{"WRONGPASS": "refuses the credentials", "NOAUTH": "wants a password"}[kind])
						if d := time.Since(begin); d > 3*timeout {
							t.Errorf("it took %v to refuse three times, the node timeout is %v", d, timeout)
						}
						return
					}
					worksWithoutStorm(t, st, servers[:locked], kind)
				})
			}
		}
	}
}

func worksWithoutStorm(t *testing.T, st *redlock.Store, lockedServers []*servertest.RedisServer, kind string) {
	t.Helper()
	var mu sync.Mutex
	told := map[string]int{}
	ctx := store.WithTrace(context.Background(), func(e store.NodeEvent) {
		if e.Err != nil && strings.Contains(e.Err.Error(), kind) {
			mu.Lock()
			told[e.Node]++
			mu.Unlock()
		}
	})
	const rounds = 50
	begin := time.Now()
	for range rounds {
		c := claim(st, "k")
		if _, err := c.Try(ctx); err != nil {
			t.Fatal(err)
		}
		if err := c.Release(ctx); err != nil {
			t.Fatal(err)
		}
	}
	// Once at first and once each 2 s, with the retries of the client.
	limit := 20 * (1 + int(time.Since(begin)/(2*time.Second)))
	for _, s := range lockedServers {
		mu.Lock()
		n := told[s.Addr()]
		mu.Unlock()
		if n == 0 || n > limit {
			t.Errorf("%s was told of %d times in %d rounds", s.Addr(), n, rounds)
		}
		p := s
		if conns := connections(t, p, kind); conns > limit {
			t.Errorf("%s: %d connections in %d rounds", s.Addr(), conns, rounds)
		}
	}
}

func connections(t *testing.T, s *servertest.RedisServer, kind string) int {
	t.Helper()
	if kind == "NOAUTH" {
		return 0 // we are locked out, too
	}
	n, err := strconv.Atoi(s.Info("stats", "total_connections_received"))
	if err != nil {
		t.Fatal(err)
	}
	return n - 10 // ours
}

// unavailable checks that an acquisition fails for now, by one line with the given parts.
func unavailable(t *testing.T, s *redlock.Store, key string, parts ...string) {
	t.Helper()
	_, g, err := try(s, key)
	if err == nil {
		t.Fatalf("granted: token %v", g.Token)
	}
	if !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrInvalid) {
		t.Errorf("not unavailable: %v", err)
	}
	if errors.Is(err, store.ErrUncertain) {
		t.Errorf("a reply of the server is not uncertain: %v", err)
	}
	rig.OneLine(t, err, parts...)
	t.Log(err)
}

// A primary that is demoted while it is used, as in a failover that the client has not
// followed yet. That ends when it has, so Acquire must go on.
func TestNodeBecomesAReplica(t *testing.T) {
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			s, primary := old(t), old(t)
			st := rig.Store(t, strict, c.Node(t, s.Addr()))
			lease, _ := acquire(t, st, "warm")
			release(t, lease)
			rig.Must(t, s, "REPLICAOF", "127.0.0.1", strconv.Itoa(primary.Port()))
			s.WaitLinked()
			for range 3 {
				unavailable(t, st, "k", s.Addr(), "replica")
			}
		})
	}
}

// A full server refuses new locks with its reason, and lets those that exist be extended and
// released.
func TestFullServer(t *testing.T) {
	for _, c := range rig.Clients {
		for _, n := range []int{1, 5} {
			t.Run(fmt.Sprintf("%v/%d", c, n), func(t *testing.T) {
				t.Parallel()
				servers := servertest.RedisN(t, n, servertest.Aged(time.Hour), servertest.Config("maxmemory-policy", "noeviction"))
				st := rig.Store(t, strict, rig.Nodes(t, c, servers...)...)
				lease, g := acquire(t, st, "held")
				for _, s := range servers {
					rig.Must(t, s, "CONFIG", "SET", "maxmemory", "1mb") // it uses more already
				}
				unavailable(t, st, "k", servers[0].Addr(), "OOM")
				for range 3 {
					again, err := lease.Extend(context.Background())
					if err != nil || again.Token != g.Token {
						t.Fatalf("extend on a full server: %v, %v", again, err)
					}
				}
				release(t, lease)
				for _, s := range servers {
					servertest.Eventually(t, 5*time.Second, func() error {
						if v := rig.Must(t, s, "EXISTS", "held", "k"); v != int64(0) {
							return fmt.Errorf("%s has %v votes", s.Addr(), v)
						}
						return nil
					})
					rig.Must(t, s, "CONFIG", "SET", "maxmemory", "0")
				}
				lease, _ = acquire(t, st, "k")
				release(t, lease)
			})
		}
	}
}

// A server that loads its data answers INFO and nothing else.
func TestServerLoads(t *testing.T) {
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			serverLoads(t, c)
		})
	}
}

func serverLoads(t *testing.T, c rig.Client) {
	t.Helper()
	s := old(t, servertest.Config("rdbcompression", "no"))
	junk := strings.Repeat("x", 2048) // the server looks at its clients after each KB
	for i := range 500 {
		rig.Must(t, s, "SET", "junk"+strconv.Itoa(i), junk)
	}
	rig.Must(t, s, "SAVE")
	s.Kill()
	var wg sync.WaitGroup
	wg.Go(func() { // returns when the data is loaded
		s.Restart(servertest.Aged(time.Hour), servertest.Config("key-load-delay", "20000"),
			servertest.Config("loading-process-events-interval-bytes", "1024"))
	})
	servertest.Eventually(t, 5*time.Second, func() error {
		if v, err := s.Do("INFO", "persistence"); err != nil || servertest.InfoField(v.(string), "loading") != "1" {
			return fmt.Errorf("the server does not load: %v", err)
		}
		return nil
	})
	st := rig.Store(t, strict, c.Node(t, s.Addr()))
	unavailable(t, st, "k", s.Addr(), "LOADING")
	rig.Must(t, s, "CONFIG", "SET", "key-load-delay", "0")
	wg.Wait()
	servertest.Eventually(t, 30*time.Second, func() error {
		_, _, err := try(st, "k")
		return err
	})
}

// A server that runs somebody's endless script answers BUSY.
func TestServerRunsAScript(t *testing.T) {
	t.Parallel()
	s := old(t, servertest.Config("busy-reply-threshold", "50"))
	st := rig.Store(t, strict, rig.GoRedis.Node(t, s.Addr()))
	lease, _ := acquire(t, st, "warm")
	release(t, lease)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = s.Do("EVAL", "while true do end", "0") })
	servertest.Eventually(t, 5*time.Second, func() error {
		if _, err := s.Do("PING"); err == nil || !strings.HasPrefix(err.Error(), "BUSY ") {
			return errors.New("the server is not busy")
		}
		return nil
	})
	unavailable(t, st, "k", s.Addr(), "BUSY")
	rig.Must(t, s, "SCRIPT", "KILL")
	wg.Wait()
	servertest.Eventually(t, 5*time.Second, func() error {
		_, _, err := try(st, "k")
		return err
	})
}

// TrustRestarts asks for nothing but scripts, and votes at once after a restart.
func TestTrustRestarts(t *testing.T) {
	trusting := redlock.Options{NodeTimeout: timeout, TrustRestarts: true}
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			s := servertest.Redis(t, servertest.AppendOnly("always"))
			user := restricted(t, s, c, "-info", "-script")
			if _, err := s.Do("AUTH", "app", "pass"); err != nil {
				t.Fatal(err)
			}
			st := rig.Store(t, trusting, user.Node(t, s.Addr()))
			if up := age(t, s); up > quarantine/2 {
				t.Fatalf("the server is %v old", up)
			}
			lease, first := acquire(t, st, "k")
			if _, err := lease.Extend(context.Background()); err != nil {
				t.Error(err)
			}
			release(t, lease)
			if v := rig.Must(t, s, "HMGET", "{holdfast}:node", "maxttl", "trust").([]any); !slices.Equal(v, []any{"30000", "1"}) {
				t.Errorf("record %v", v)
			}
			refusals := 0
			for _, line := range strings.Split(rig.Must(t, s, "INFO", "errorstats").(string), "\n") {
				if strings.HasPrefix(line, "errorstat_NOPERM") {
					refusals++
				}
			}
			if refusals > 0 {
				t.Error("it asked for what it may not have")
			}

			s.Kill()
			s.Restart()
			restricted(t, s, c, "-info", "-script")
			servertest.Eventually(t, 5*time.Second, func() error { // the client reconnects
				again, g, err := try(st, "k")
				if err != nil {
					var young *redlock.YoungError
					if errors.As(err, &young) {
						t.Fatal(err)
					}
					return err
				}
				if g.Token <= first.Token {
					t.Errorf("token %v after %v", g.Token, first.Token)
				}
				release(t, again)
				return nil
			})
			if up := age(t, s); up > quarantine/2 {
				t.Fatalf("the server is %v old", up)
			}
			refusedInvalid(t, rig.Store(t, strict, rig.GoRedis.Node(t, s.Addr())), "node", s.Addr(), "TrustRestarts")
		})
	}
}
