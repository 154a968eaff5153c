package admission_test

import (
	"errors"
	"net"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// pair is a deployment of a primary and a replica behind one name.
type pair struct {
	t      *testing.T
	one    *servertest.RedisServer // the first primary
	two    *servertest.RedisServer
	name   *rig.Switch
	client rig.Client
}

func newPair(t *testing.T, c rig.Client, opts ...servertest.RedisOption) *pair {
	p := &pair{t: t, client: c}
	p.one, p.two = old(t), old(t, opts...)
	p.name = rig.NewSwitch(p.one.Addr())
	p.client.Dial = p.name.Dial
	return p
}

// follow makes one server a replica of the other, over a wire that can be cut.
func (p *pair) follow(replica, primary *servertest.RedisServer) *servertest.Proxy {
	p.t.Helper()
	wire := servertest.NewProxy(p.t, primary.Addr())
	_, port, _ := net.SplitHostPort(wire.Addr())
	rig.Must(p.t, replica, "REPLICAOF", "127.0.0.1", port)
	replica.WaitLinked()
	return wire
}

// keptBack waits until a wire has kept something from the replica.
func keptBack(t *testing.T, wire *servertest.Proxy) {
	t.Helper()
	servertest.Eventually(t, 5*time.Second, func() error {
		if wire.Counts().BlackHoled == 0 {
			return errors.New("nothing was kept from the replica")
		}
		return nil
	})
}

// promote makes the server the primary and leads the name there.
func (p *pair) promote(s *servertest.RedisServer) {
	p.t.Helper()
	id, replid := s.Info("server", "run_id"), s.Info("replication", "master_replid")
	rig.Must(p.t, s, "REPLICAOF", "NO", "ONE")
	if s.Info("replication", "role") != "master" || s.Info("server", "run_id") != id ||
		s.Info("replication", "master_replid") == replid || age(p.t, s) < quarantine {
		p.t.Fatal("this was no promotion of a server that has been up for long")
	}
	p.name.To(s.Addr())
}

// pass lets time pass for both.
func (p *pair) pass(d time.Duration) { pass(d, p.one, p.two) }

// A replica that is promoted may have missed the last votes. It has been up for long, so its
// uptime says nothing.
func TestPromotedReplicaDoesNotVote(t *testing.T) {
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			p := newPair(t, c)
			wire := p.follow(p.two, p.one)
			st := rig.Store(t, strict, p.client.Node(t, "name:1"))
			warm, _ := acquire(t, st, "warm")
			release(t, warm)
			replicated(t, p.one, p.two)

			wire.BlackHole() // the replica misses the vote
			_, before := acquire(t, st, "k")
			keptBack(t, wire)
			p.one.Kill()
			p.promote(p.two)
			if n := rig.Must(t, p.two, "EXISTS", "k"); n != int64(0) {
				t.Fatal("the replica has the vote")
			}
			refusedYoung(t, st, "k", quarantine)
			refusedYoung(t, rig.Store(t, strict, p.client.Node(t, "name:1")), "k", quarantine)

			p.pass(quarantine - 15*time.Second)
			refusedYoung(t, rig.Store(t, strict, p.client.Node(t, "name:1")), "k", 15*time.Second)
			p.pass(15 * time.Second)
			lease, g := acquire(t, rig.Store(t, strict, p.client.Node(t, "name:1")), "k")
			if g.Token <= before.Token {
				t.Errorf("token %v after %v", g.Token, before.Token)
			}
			release(t, lease)
		})
	}
}

// A restart from a file that was written while there were replicas is a restart, and the age
// of the server is the smaller of the two.
func TestRestartWithReplicationHistoryDoesNotVote(t *testing.T) {
	t.Parallel()
	p := newPair(t, rig.GoRedis)
	p.follow(p.two, p.one)
	st := rig.Store(t, strict, rig.GoRedis.Node(t, p.one.Addr()))
	_, before := acquire(t, st, "k")
	servertest.Eventually(t, 10*time.Second, func() error { // the replica's copy may be on its way
		_, err := p.one.Do("SAVE")
		return err
	})
	p.one.Kill()
	// Its uptime is past the quarantine, as if somebody had set the clock at boot.
	p.one.Restart(servertest.Aged(time.Hour))
	if p.one.Info("replication", "second_repl_offset") == "-1" {
		t.Fatal("the server has no replication history")
	}
	refusedYoung(t, rig.Store(t, strict, rig.GoRedis.Node(t, p.one.Addr())), "k", quarantine)
	votesAfterAge(t, p, before)
}

func votesAfterAge(t *testing.T, p *pair, before store.Grant) {
	t.Helper()
	p.pass(quarantine)
	_, g := acquire(t, rig.Store(t, strict, rig.GoRedis.Node(t, p.one.Addr())), "k")
	if g.Token <= before.Token {
		t.Errorf("token %v after %v", g.Token, before.Token)
	}
}

// Failback: the first primary is demoted, never restarts, keeps its scripts, and is promoted
// again when the second one dies before it has replicated its last vote. The replica joined
// after the first lock, so the server had no replication history when it was admitted.
func TestFailbackToADemotedPrimaryDoesNotVote(t *testing.T) {
	for _, version := range []string{"6", "7"} {
		for _, c := range rig.Clients {
			t.Run("Redis "+version+"/"+c.String(), func(t *testing.T) {
				t.Parallel()
				p := newPair(t, c)
				wire := servertest.NewProxy(t, p.one.Addr())
				tap := rig.NewTap(wire)
				p.name.To(wire.Addr())
				node := p.client.Node(t, "name:1")
				if version == "6" {
					node = asRedis6{node}
				}
				st := rig.Store(t, strict, node)
				warm, _ := acquire(t, st, "warm")
				release(t, warm)
				_, admitted := tap.Script()
				run := p.one.Info("server", "run_id")
				p.follow(p.two, p.one)

				p.promote(p.two)
				wire2 := p.follow(p.one, p.two)
				refusedYoung(t, st, "k", quarantine)
				p.pass(quarantine)
				// A process that meets the second primary when it is old enough.
				node2 := p.client.Node(t, "name:1")
				if version == "6" {
					node2 = asRedis6{node2}
				}
				second := rig.Store(t, strict, node2)
				_, _ = acquire(t, second, "other") // also the record of the comparison is replicated
				replicated(t, p.two, p.one)
				p.pass(2 * time.Second) // beyond what a double failover within a second leaves open

				wire2.BlackHole() // the first primary misses the vote
				_, a := acquire(t, second, "k")
				keptBack(t, wire2)
				p.two.Kill()
				p.promote(p.one)
				if n := rig.Must(t, p.one, "EXISTS", "k"); n != int64(0) || p.one.Info("server", "run_id") != run {
					t.Fatal("the first primary has the vote, or was restarted")
				}
				if n := rig.Must(t, p.one, "SCRIPT", "EXISTS", admitted).([]any); n[0] != int64(1) {
					t.Fatal("the first primary has lost the script; nothing is shown")
				}
				if code := rawVote(t, p.one, tap, "raw"); code != "NOTADMITTED" {
					t.Errorf("a raw EVALSHA got %s, want NOTADMITTED", code)
				}
				for _, s := range []int{0, 1} {
					from := second
					if s == 1 {
						from = rig.Store(t, strict, p.client.Node(t, "name:1"))
					}
					refusedYoung(t, from, "k", quarantine)
				}
				pass(quarantine, p.one)
				_, b := acquire(t, rig.Store(t, strict, p.client.Node(t, "name:1")), "k")
				if b.Token <= a.Token {
					t.Errorf("token %v after %v", b.Token, a.Token)
				}
			})
		}
	}
}

// replicated waits until a replica has all that its primary has.
func replicated(t *testing.T, primary, replica *servertest.RedisServer) {
	t.Helper()
	servertest.Eventually(t, 10*time.Second, func() error {
		if primary.Info("replication", "master_repl_offset") != replica.Info("replication", "slave_repl_offset") {
			return errors.New("the replica lags")
		}
		return nil
	})
}
