package faults

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// eachFault runs f for each client, with each fault, on five nodes.
func eachFault(t *testing.T, f func(t *testing.T, b *bed, fault kit.Fault)) {
	for _, fault := range kit.Faults {
		for _, c := range kit.Clients {
			t.Run(fault.Name+"/"+c.Name, func(t *testing.T) {
				t.Parallel()
				if fault.Name == "frozen" {
					servertest.CanPause(t)
				}
				f(t, newBed(t, c, 5, holdfast.Options{}), fault)
			})
		}
	}
}

// Two of five nodes do not answer: a lease is acquired, extended and released as always, and
// none of it waits for those nodes. QUO-04, R1, class 2.
func TestMinorityAway(t *testing.T) {
	eachFault(t, func(t *testing.T, b *bed, fault kit.Fault) {
		kit.Warm(t, b.locks)
		b.fault(t, fault, 2)
		for range 3 {
			var lease *holdfast.Lease
			ops := []struct {
				name string
				do   func() error
			}{
				{"TryAcquire", func() (err error) { lease, err = b.locks.TryAcquire(t.Context(), "k"); return err }},
				{"Extend", func() error { return lease.Extend(t.Context()) }},
				{"Release", func() error { return lease.Release(t.Context()) }},
			}
			for _, op := range ops {
				var err error
				d := took(func() { err = op.do() })
				if err != nil {
					t.Fatalf("%s with two nodes %s: %v", op.name, fault.Name, err)
				}
				if d >= nodeTimeout {
					t.Errorf("%s took %v: it waited for the nodes that are %s", op.name, d, fault.Name)
				}
			}
		}
		b.hit(t, fault, 2)
	})
}

// The same where the store has never met the nodes: the first contact waits for them once.
func TestMinorityAwayFromTheStart(t *testing.T) {
	eachFault(t, func(t *testing.T, b *bed, fault kit.Fault) {
		b.fault(t, fault, 2)
		var lease *holdfast.Lease
		var err error
		d := took(func() { lease, err = b.locks.TryAcquire(t.Context(), "k") })
		if err != nil {
			t.Fatalf("TryAcquire: %v", err)
		}
		if limit := nodeTimeout + nodeTimeout/2; d > limit {
			t.Errorf("the first TryAcquire took %v, want less than %v", d, limit)
		}
		b.hit(t, fault, 2)
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
}

// Three of five do not answer: TryAcquire says so within the node timeout, and names what is
// wrong with each; nothing is left on the two others; Acquire goes on and succeeds when one
// node is back.
func TestMajorityAway(t *testing.T) {
	eachFault(t, func(t *testing.T, b *bed, fault kit.Fault) {
		kit.Warm(t, b.locks)
		undo := b.fault(t, fault, 3)
		for range 2 {
			var err error
			d := took(func() { _, err = b.locks.TryAcquire(t.Context(), "k") })
			wantAway(t, b, err, 3)
			if d > 2*nodeTimeout { // on a busy machine
				t.Errorf("TryAcquire took %v, more than the node timeout of %v", d, nodeTimeout)
			}
			t.Logf("after %v: %v", d.Round(100*time.Microsecond), err)
		}
		b.hit(t, fault, 3)
		kit.NoKeys(t, ttl/2, b.servers[3:])

		acquired := make(chan error, 1)
		go func() {
			lease, err := b.locks.Acquire(t.Context(), "k")
			if err == nil {
				err = lease.Release(t.Context())
			}
			acquired <- err
		}()
		waiting := len(kit.Select[holdfast.Waiting](b.events))
		servertest.Eventually(t, ttl, func() error {
			if len(kit.Select[holdfast.Waiting](b.events)) < waiting+2 {
				return errors.New("Acquire does not tell that it waits")
			}
			return nil
		})
		select {
		case err := <-acquired:
			t.Fatalf("Acquire returned with three of five nodes away: %v", err)
		default:
		}
		undo()
		back := time.Now()
		select {
		case err := <-acquired:
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("acquired %v after the nodes were back", time.Since(back).Round(time.Millisecond))
		case <-time.After(ttl / 2):
			t.Fatal("Acquire does not return though the nodes are back")
		}
	})
}

// wantAway wants an error that tells of n nodes that did not answer.
func wantAway(t *testing.T, b *bed, err error, n int) {
	t.Helper()
	if !errors.Is(err, holdfast.ErrUnavailable) {
		t.Fatalf("TryAcquire with %d nodes away: %v, want ErrUnavailable", n, err)
	}
	faults := kit.Faulty(t, err)
	for i, p := range b.proxies {
		if !strings.Contains(err.Error(), p.Addr()) {
			t.Errorf("the error does not name node %s: %v", p.Addr(), err)
		}
		if i < n && faults[p.Addr()] == nil {
			t.Errorf("the error does not say what is wrong with node %s: %v", p.Addr(), err)
		}
		if i >= n && faults[p.Addr()] != nil {
			t.Errorf("the error blames node %s, which is well: %v", p.Addr(), err)
		}
	}
}

// A killed node that is started again votes when it is old enough, and not before.
func TestRestartedNodesVoteAfterTheirQuarantine(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 5, holdfast.Options{})
			kit.Warm(t, b.locks)
			for _, s := range b.servers[:3] {
				s.Kill()
			}
			acquired := make(chan *holdfast.Lease, 1)
			go func() {
				lease, err := b.locks.Acquire(t.Context(), "k")
				if err != nil {
					t.Errorf("Acquire: %v", err)
				}
				acquired <- lease
			}()
			const quarantine = 31 * time.Second // of the default MaxTTL
			for _, s := range b.servers[:3] {
				s.Restart(servertest.Aged(quarantine - 4*time.Second))
			}
			granted := false
			servertest.Eventually(t, quarantine, func() error { // connections to the killed ones fail first
				_, err := b.locks.TryAcquire(t.Context(), "other")
				var young *redlock.YoungError
				if granted = err == nil; granted || errors.As(err, &young) && strings.Contains(err.Error(), "votes in") {
					return nil
				}
				return err
			})
			if granted {
				t.Error("TryAcquire while three nodes are young: granted, want a YoungError")
			}
			select {
			case lease := <-acquired:
				if lease == nil {
					return
				}
				old := 0
				for _, s := range b.servers {
					if up, _ := time.ParseDuration(s.Info("server", "uptime_in_seconds") + "s"); up >= quarantine {
						old++
					}
				}
				if old < 3 {
					t.Errorf("acquired though only %d of 5 nodes are as old as %v", old, quarantine)
				}
				if err := lease.Release(t.Context()); err != nil {
					t.Error(err)
				}
			case <-time.After(quarantine):
				t.Fatal("Acquire did not return after the quarantine")
			}
		})
	}
}

// R11: where the only node is dead, a blocking call names the cause beside the deadline, a
// trying call is bounded by the node timeout, and Release does not hang.
func TestDeadNodeIsNamed(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 1, holdfast.Options{TTL: 2 * time.Second})
			lease := kit.Acquire(t, b.locks, "held")
			b.proxies[0].BlackHole()
			var err error
			if d := took(func() { _, err = b.locks.TryAcquire(t.Context(), "k") }); d > 2*nodeTimeout {
				t.Errorf("TryAcquire took %v", d)
			}
			if !errors.Is(err, holdfast.ErrUnavailable) || !errors.Is(err, holdfast.ErrUncertain) {
				t.Errorf("TryAcquire: %v, want ErrUnavailable and ErrUncertain", err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), nodeTimeout)
			defer cancel()
			d := took(func() { _, err = b.locks.Acquire(ctx, "k2") })
			if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, holdfast.ErrUnavailable) || !strings.Contains(err.Error(), b.proxies[0].Addr()) {
				t.Errorf("Acquire: %v, want DeadlineExceeded and ErrUnavailable of a named node", err)
			}
			if d > 2*nodeTimeout {
				t.Errorf("Acquire took %v, its context ended after %v", d, nodeTimeout)
			}
			d = took(func() { err = lease.Release(t.Context()) })
			if err == nil || d > 2*nodeTimeout {
				t.Errorf("Release into a black hole: %v after %v", err, d)
			}
			if b.proxies[0].Counts().BlackHoled == 0 {
				t.Error("nothing fell into the black hole")
			}
		})
	}
}
