package deploy_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// A deployment that cannot be used as it was configured, from the first contact on. Invalid is
// what waiting cannot mend: Acquire returns at once. Unavailable may end: Acquire goes on until
// its context is done. (RED-03, RED-16)
func TestRefused(t *testing.T) {
	certs := servertest.TLS(t)
	for _, row := range []struct {
		name string
		way  func(t *testing.T) way
		kind error
		says string // the remedy, or what the server said

	}{
		{name: "wrong password", kind: holdfast.ErrInvalid, says: "refuses the credentials", way: func(t *testing.T) way {
			w := to(old(t, servertest.Config("requirepass", "right"), servertest.As("", "right")))
			w.password = "hunter2"
			return w
		}},
		{name: "no password", kind: holdfast.ErrInvalid, says: "wants a password", way: func(t *testing.T) way {
			return to(old(t, servertest.Config("requirepass", "right"), servertest.As("", "right")))
		}},
		{name: "no such user", kind: holdfast.ErrInvalid, says: "refuses the credentials", way: func(t *testing.T) way {
			w := to(old(t))
			w.user, w.password = "nobody", "hunter2"
			return w
		}},
		{name: "no such database", kind: holdfast.ErrInvalid, says: "no database of that number", way: func(t *testing.T) way {
			w := to(old(t, servertest.Config("databases", "4")))
			w.db = 4
			return w
		}},
		{name: "replica", kind: holdfast.ErrInvalid, says: "is a replica of", way: func(t *testing.T) way {
			replica := old(t, servertest.ReplicaOf(old(t)))
			replica.WaitLinked()
			return to(replica)
		}},
		{name: "replicas of a Sentinel deployment", kind: holdfast.ErrInvalid, says: "is a replica of", way: func(t *testing.T) way {
			primary := old(t)
			old(t, servertest.ReplicaOf(primary)).WaitLinked()
			sentinel := servertest.Sentinel(t, "main", primary)
			servertest.Eventually(t, patience, func() error { // before, go-redis asks the primary
				list := rig.Must(t, sentinel, "SENTINEL", "REPLICAS", "main").([]any)[0].([]any)
				for i := 0; i+1 < len(list); i += 2 {
					if list[i] == "master-link-status" && list[i+1] == "ok" {
						return nil
					}
				}
				return errors.New("the Sentinel does not know the replica yet")
			})
			return way{addrs: []string{sentinel.Addr()}, master: "main", replicaReads: true}
		}},
		{name: "protected mode", kind: holdfast.ErrUnavailable, says: "protected mode", way: func(t *testing.T) way {
			return way{addrs: []string{protected(t)}}
		}},
		{name: "unknown authority", kind: holdfast.ErrInvalid, says: "authority (CA)", way: func(t *testing.T) way {
			return way{addrs: []string{old(t, servertest.WithTLS(certs)).TLSAddr()}, tls: servertest.TLS(t).Config(t)}
		}},
		{name: "name not in the certificate", kind: holdfast.ErrInvalid, says: "elsewhere.test", way: func(t *testing.T) way {
			c := certs.Config(t)
			c.ServerName = "elsewhere.test"
			return way{addrs: []string{old(t, servertest.WithTLS(certs)).TLSAddr()}, tls: c}
		}},
		{name: "no client certificate", kind: holdfast.ErrUnavailable, says: "certificate", way: func(t *testing.T) way {
			c := certs.Config(t)
			c.Certificates = nil
			return way{addrs: []string{old(t, servertest.WithTLS(certs), servertest.Config("tls-auth-clients", "yes")).TLSAddr()}, tls: c}
		}},
		{name: "plain text to a TLS port", kind: holdfast.ErrUnavailable, says: "wants TLS", way: func(t *testing.T) way {
			return way{addrs: []string{old(t, servertest.WithTLS(certs)).TLSAddr()}}
		}},
		{name: "TLS to a plain port", kind: holdfast.ErrUnavailable, says: "", way: func(t *testing.T) way {
			w := to(old(t))
			w.tls = certs.Config(t)
			return w
		}},
		{name: "nobody there", kind: holdfast.ErrUnavailable, says: "connection refused", way: func(t *testing.T) way {
			s := old(t)
			s.Kill()
			return to(s)
		}},
		{name: "no such master", kind: holdfast.ErrUnavailable, says: "", way: func(t *testing.T) way {
			return way{addrs: []string{servertest.Sentinel(t, "main", old(t)).Addr()}, master: "other"}
		}},
		{name: "Sentinel's password", kind: holdfast.ErrInvalid, says: "refuses the credentials", way: func(t *testing.T) way {
			s := servertest.Sentinel(t, "main", old(t), servertest.Config("requirepass", "right"), servertest.As("", "right"))
			return way{addrs: []string{s.Addr()}, master: "main", sentinelPassword: "hunter2"}
		}},
		{name: "Cluster member alone", kind: holdfast.ErrUnavailable, says: "slot", way: func(t *testing.T) way {
			w := to(old(t, servertest.Config("cluster-enabled", "yes")))
			w.cluster = true
			return w
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, c client) {
				w := row.way(t)
				locks := c.locker(t, w)
				for range 3 { // a client library may tell more the second time
					attempt := try
					if row.kind == holdfast.ErrInvalid {
						attempt = told
					}
					_, err := attempt(t, locks, "k")
					check(t, "TryAcquire", err, row.kind)
				}
				var err error
				// A library that dials in the background tells why when it has found out.
				servertest.Eventually(t, patience, func() error {
					if _, err = try(t, locks, "k"); row.says == "" || err != nil && contains(err, row.says) {
						return nil
					}
					return err
				})
				check(t, "TryAcquire", err, row.kind, row.says)
				t.Log(err)

				wait := 2 * nodeTimeout
				ctx, cancel := context.WithTimeout(t.Context(), wait)
				defer cancel()
				began := time.Now()
				err = inTime(t, wait+callLimit, "Acquire", func() error {
					_, err := locks.Acquire(ctx, "k")
					return err
				})
				says := row.says
				if row.kind == holdfast.ErrUnavailable && contains(err, "no answer within") {
					says = "" // the last attempt, on a busy machine
				}
				check(t, "Acquire", err, row.kind, says)
				if timedOut := errors.Is(err, context.DeadlineExceeded); timedOut != (row.kind == holdfast.ErrUnavailable) {
					t.Errorf("Acquire returned after %v: %v", time.Since(began), err)
				}
			})
		})
	}
}

// protected answers as a server in protected mode does to those who are not on its machine,
// which no test that stays on 127.0.0.1 is. It returns its address.
func protected(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = bufio.NewReader(c).ReadByte()
				_, _ = c.Write([]byte("-DENIED Redis is running in protected mode because protected mode is enabled and no password is set for the default user.\r\n"))
				time.Sleep(50 * time.Millisecond) // an early end could reset what was written
			}()
		}
	}()
	return l.Addr().String()
}

// Good configurations of every kind: they work. (RED-03, RED-16)
func TestWorks(t *testing.T) {
	certs := servertest.TLS(t)
	for _, row := range []struct {
		name string
		way  func(t *testing.T) way
	}{
		{"TLS", func(t *testing.T) way {
			return way{addrs: []string{old(t, servertest.WithTLS(certs)).TLSAddr()}, tls: certs.Config(t)}
		}},
		{"TLS with a client certificate", func(t *testing.T) way {
			return way{addrs: []string{old(t, servertest.WithTLS(certs), servertest.Config("tls-auth-clients", "yes")).TLSAddr()}, tls: certs.Config(t)}
		}},
		{"TLS by name", func(t *testing.T) way {
			_, port, _ := net.SplitHostPort(old(t, servertest.WithTLS(certs)).TLSAddr())
			return way{addrs: []string{"localhost:" + port}, tls: &tls.Config{RootCAs: certs.Config(t).RootCAs}}
		}},
		{"database", func(t *testing.T) way {
			w := to(old(t))
			w.db = 15
			return w
		}},
		{"Cluster with reads from replicas", func(t *testing.T) way {
			servers := servertest.RedisCluster(t, 3, kit.Old())
			return way{addrs: kit.Addrs(servers), cluster: true, replicaReads: true}
		}},
		{"password for a server without", func(t *testing.T) way {
			w := to(old(t))
			w.password = "any"
			return w
		}},
		{"client limit of the server", func(t *testing.T) way {
			return to(old(t, servertest.Config("maxclients", "100")))
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, c client) {
				w := row.way(t)
				a, b := c.locker(t, w), c.locker(t, w)
				lease := kit.Acquire(t, a, "k")
				if _, err := told(t, b, "k"); !errors.Is(err, holdfast.ErrHeld) {
					t.Errorf("another client: %v", err)
				}
				extend(t, lease)
				release(t, lease)
				if token := comesBack(t, b, "k"); token <= lease.Token() {
					t.Errorf("token %v after %v", token, lease.Token())
				}
			})
		})
	}
}

// The same key in two databases of one server is two locks, and the two are no two nodes.
func TestDatabases(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := old(t)
		one, two := to(s), to(s)
		two.db = 1
		kit.Acquire(t, c.locker(t, one), "k")
		kit.Acquire(t, c.locker(t, two), "k")
		for db, want := range []int64{1, 1, 0} {
			v := rig.Must(t, s, "EVAL", "redis.call('SELECT', ARGV[1]) return redis.call('EXISTS', 'k')", "0", strconv.Itoa(db))
			if v != want {
				t.Errorf("database %d: %v", db, v)
			}
		}
		_, err := told(t, c.lockerOf(t, redlock.Options{NodeTimeout: nodeTimeout}, one, two), "k2")
		check(t, "both as nodes", err, holdfast.ErrInvalid, "is the same server as")
	})
}
