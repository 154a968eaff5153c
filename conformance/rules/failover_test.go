//go:build holdfast_rules

package rules

import (
	"time"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// failback: one node is a primary with a replica. P1 keeps its script while it is demoted. P2,
// which joined after the first lock, grants A and dies before it replicates. P1 is promoted,
// and B, who has used it before, asks at once.
func failback(e *env) string {
	e.start(1)
	p1 := e.server(1)
	a, b := e.client("A"), e.client("B")
	p2 := servertest.Redis(e.t, old, servertest.ReplicaOf(p1))
	p2.Clock().Set(passed)
	e.servers = append(e.servers, p2)
	p2.WaitLinked()

	link := servertest.NewProxy(e.t, p2.Addr())
	e.do(2, "REPLICAOF", "NO", "ONE")
	e.do(1, "REPLICAOF", "127.0.0.1", port(link))
	p1.WaitLinked()
	a.wire(1).use(e.node(p2.Addr()))
	la := a.claim(ttl * 2)
	if err := la.try(e.ctx); !young(err) {
		e.t.Fatalf("P2 has just been promoted, and yet: %v", err)
	}
	e.elapse(32 * time.Second) // P2 may vote
	link.BlackHole()
	la.acquire()
	p2.Kill()
	e.servers = e.servers[:1]
	e.do(1, "REPLICAOF", "NO", "ONE")
	if e.voted(1) != "" {
		e.t.Fatal("the vote was replicated")
	}

	lb := b.claim(ttl)
	if err := lb.try(e.ctx); err != nil && !young(err) {
		e.t.Fatal(err)
	}
	return bothValid(la, lb)
}

func port(p *servertest.Proxy) string {
	addr := p.Addr()
	return addr[len("127.0.0.1:"):]
}

// use makes the node another server.
func (w *wire) use(n redlock.Node) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.node = n
}

// scriptSurvives: the server is of a version that keeps scripts in its append-only file, and
// brings them back when it restarts, here without the votes.
func scriptSurvives(e *env) string {
	e.start(1)
	a, b := e.client("A"), e.client("B")
	la := a.claim(ttl)
	la.acquire()
	text := a.wire(1).sent("VOTE").Script.Text
	e.restart(1)
	e.do(1, "SCRIPT", "LOAD", text)

	lb := b.claim(ttl)
	if err := lb.try(e.ctx); err != nil && !young(err) {
		e.t.Fatal(err)
	}
	return bothValid(la, lb)
}
