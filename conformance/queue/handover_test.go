package queue

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// meanwhile is what happens to servers between the moment at which a claim gets its place and the
// release that hands the key over.
type meanwhile struct {
	name string
	happ func(t testing.TB, s *servertest.RedisServer)
	few  bool // at fewer than a quorum of nodes
}

var meanwhiles = []meanwhile{
	{name: "nothing", happ: func(testing.TB, *servertest.RedisServer) {}},
	{name: "scripts forgotten", happ: command("SCRIPT", "FLUSH")},
	{name: "no right to expire by time", happ: command("ACL", "SETUSER", "app", "-pexpireat", "-expireat")},
	{name: "no right to the record of the check", happ: func(t testing.TB, s *servertest.RedisServer) {
		raise(t, s, 4*time.Second)
		rig.Must(t, s, "ACL", "SETUSER", "app", "resetkeys", "~k", "~{k}:*", "~{holdfast}:node")
	}},
	{name: "no right to publish", happ: command("ACL", "SETUSER", "app", "-publish")},
	{name: "mark far ahead", happ: func(t testing.TB, s *servertest.RedisServer) { raise(t, s, 4*time.Second) }},
	{name: "out of memory", few: true, happ: command("CONFIG", "SET", "maxmemory", "1")},
	{name: "too few replicas", few: true, happ: command("CONFIG", "SET", "min-replicas-to-write", "1")},
	{name: "restarted", few: true, happ: func(t testing.TB, s *servertest.RedisServer) { s.Kill(); s.Restart() }},
	{name: "demoted and promoted", few: true, happ: func(t testing.TB, s *servertest.RedisServer) {
		rig.Must(t, s, "REPLICAOF", "127.0.0.1", "1")
		rig.Must(t, s, "REPLICAOF", "NO", "ONE")
	}},
}

var trusts = map[int][]bool{1: {false, true}, 3: {false}}

// raise sets the mark of k to one that is ahead of the server's clock.
func raise(t testing.TB, s *servertest.RedisServer, ahead time.Duration) {
	t.Helper()
	rig.Must(t, s, "SET", "{k}:fence", strconv.FormatInt(time.Now().Add(ahead).UnixMicro(), 10), "PX", "120000")
}

// Whatever happens to the servers between parking and hand-over, the next one gets the key, and no
// mark ever falls.
func TestHandOverAndChanges(t *testing.T) {
	t.Parallel()
	for _, m := range meanwhiles {
		for _, c := range []rig.Client{rig.GoRedis, rig.Rueidis} {
			for _, n := range []int{1, 3} {
				if m.few && n == 1 {
					continue
				}
				for _, trust := range trusts[n] {
					t.Run(fmt.Sprintf("%s %dx%s trust %t", m.name, n, c, trust), func(t *testing.T) {
						t.Parallel()
						handOverAndChange(t, m, c, n, redlock.Options{NodeTimeout: nodeTimeout, TrustRestarts: trust})
					})
				}
			}
		}
	}
}

func handOverAndChange(t *testing.T, m meanwhile, c rig.Client, n int, o redlock.Options) {
	b := newBed(t, kit.GoRedis, n, servertest.Aged(time.Hour))
	for _, s := range b.servers {
		rig.Must(t, s, "ACL", "SETUSER", "app", "reset", "on", ">pass", "~*", "&*", "+@all")
	}
	c.User, c.Password = "app", "pass"
	holder := kit.Locker(t, rig.Store(t, o, rig.Nodes(t, c, b.servers...)...), holdfast.Options{TTL: ttl})
	waiting := kit.Locker(t, rig.Store(t, o, rig.Nodes(t, rig.GoRedis, b.servers...)...), holdfast.Options{TTL: ttl})
	kit.Warm(t, waiting)
	lease := kit.Acquire(t, holder, "k")
	waiter := acquire(t, waiting, "k")
	b.parked("k", 1)
	servers := b.servers
	if m.few {
		servers = servers[:1]
	}
	for _, s := range servers {
		m.happ(t, s)
	}
	before := make([]string, n)
	for i, s := range b.servers {
		before[i] = b.mark(s, "k")
	}
	if err := lease.Release(context.Background()); err != nil && m.name == "nothing" {
		t.Error(err)
	}
	next := waiter.wait(3 * ttl)
	if next.Token() <= lease.Token() {
		t.Errorf("token %v after %v", next.Token(), lease.Token())
	}
	for i, s := range b.servers {
		if after := b.mark(s, "k"); len(after) < len(before[i]) || after < before[i] {
			t.Errorf("the mark of node %d falls from %s to %s", i, before[i], after)
		}
	}
	release(t, next)
}

// elsewhere hears the messages of another server, such as one that has become a replica of the one
// that is asked.
type elsewhere struct {
	redlock.Node
	heard redlock.Node
}

func (n elsewhere) Subscribe(ctx context.Context, channel string, deliver func(string), up func()) error {
	return n.heard.Subscribe(ctx, channel, deliver, up)
}

// A server does not count those who listen at its replicas, who get its messages all the same. The
// vote goes to the next one, and nobody else believes to have it.
func TestListenerAtAReplica(t *testing.T) {
	t.Parallel()
	for _, c := range []rig.Client{rig.GoRedis, rig.Rueidis} {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			b := newBed(t, kit.GoRedis, 1, servertest.Aged(time.Hour))
			replica := servertest.Redis(t, servertest.ReplicaOf(b.servers[0]))
			replica.WaitLinked()
			options := holdfast.Options{TTL: ttl}
			holder, next := b.locker(options), b.locker(options)
			far := elsewhere{c.Node(t, b.servers[0].Addr()), c.Node(t, replica.Addr())}
			waiting := kit.Locker(t, rig.Store(t, redlock.Options{NodeTimeout: nodeTimeout}, far), options)
			kit.Warm(t, waiting)
			lease := kit.Acquire(t, holder, "k")
			first := acquire(t, waiting, "k")
			b.parked("k", 1)
			second := acquire(t, next, "k")
			b.parked("k", 2)
			release(t, lease)
			got := second.wait(ttl)
			time.Sleep(20 * time.Millisecond)
			if !first.waits() {
				t.Errorf("two hold the key: %v beside %v", first.lease, got)
			}
			release(t, got)
			release(t, first.wait(3*ttl))
		})
	}
}
