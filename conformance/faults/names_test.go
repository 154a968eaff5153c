package faults

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
)

// KEY-02: the application keeps data under the name of a lock. That is told as a foreign
// holder without an end, by name, and never overwritten; data written over a lock end the
// lease and are not deleted by its release.
func TestDataUnderTheNameOfALock(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{TTL: 2 * time.Second, ExtendEvery: 200 * time.Millisecond})
		const data = "balance: 100"
		everywhere := func(args ...string) (answers []any) {
			t.Helper()
			for _, s := range b.servers {
				v, err := s.Do(args...)
				if err != nil {
					t.Fatal(err)
				}
				answers = append(answers, v)
			}
			return answers
		}
		intact := func() {
			t.Helper()
			for _, v := range everywhere("GET", "k") {
				if v != data {
					t.Errorf("the data are now %v", v)
				}
			}
		}
		everywhere("SET", "k", data)
		_, err := b.locks.TryAcquire(t.Context(), "k")
		var held *holdfast.HeldError
		if !errors.As(err, &held) || !held.Holder.Foreign || !held.Holder.NoTTL || !strings.Contains(err.Error(), `"k"`) {
			t.Errorf("TryAcquire beside data: %v, want a foreign holder of \"k\" without an end", err)
		}
		intact()
		everywhere("SET", "k", strings.Repeat("data", 1<<18))
		if _, err := b.locks.TryAcquire(t.Context(), "k"); !errors.As(err, &held) || len(held.Holder.Owner) > 256 {
			t.Errorf("the answer about a megabyte of data tells all of it, or: %.200v", err)
		}
		everywhere("DEL", "k")

		lease := kit.Acquire(t, b.locks, "k")
		everywhere("SET", "k", data)
		select {
		case <-lease.Done():
		case <-time.After(ttl):
			t.Fatal("the loss is not noticed")
		}
		if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release of a lease whose vote was overwritten: %v, want ErrLost", err)
		}
		intact()
	})
}

// KEY-05: two deployments with prefixes of their own share servers and key, and do not meet.
func TestPrefixesKeepDeploymentsApart(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		servers := kit.Servers(t, n)
		var leases []*holdfast.Lease
		for _, prefix := range []string{"", "a/", "b/"} {
			s := kit.Store(t, c, redlock.Options{Prefix: prefix, NodeTimeout: nodeTimeout}, kit.Addrs(servers))
			lease, err := kit.Locker(t, s, holdfast.Options{TTL: ttl}).TryAcquire(t.Context(), "k")
			if err != nil {
				t.Fatalf("prefix %q: %v", prefix, err)
			}
			leases = append(leases, lease)
			if v, err := servers[0].Do("GET", prefix+"k"); n == 1 && (err != nil || v != lease.Owner()) {
				t.Errorf("the vote is not at %q: %v, %v", prefix+"k", v, err)
			}
		}
		for _, lease := range leases {
			if err := lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

// TOK-08: marks that somebody has set far beyond any clock, where numbers are not exact any
// more in a script. A node with such a mark gives no vote and keeps nothing; the others go on,
// with tokens that rise and stand on the servers digit by digit.
func TestMarksBeyondAnyClock(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		kit.Warm(t, b.locks)
		var last holdfast.Token
		grow := func(lease *holdfast.Lease) {
			t.Helper()
			if lease.Token() <= last {
				t.Errorf("token %v after %v", lease.Token(), last)
			}
			last = lease.Token()
			exact := 0
			for _, s := range b.servers {
				if v, _ := s.Do("GET", "{k}:fence"); v == lease.Token().String() {
					exact++
				}
			}
			if exact <= n/2 {
				t.Errorf("token %v stands on %d of %d nodes", lease.Token(), exact, n)
			}
			if err := lease.Release(t.Context()); err != nil {
				t.Error(err)
			}
		}
		for _, mark := range []string{"9007199254740990", "9007199254740993", "4611686018427387904", "9223372036854775807"} {
			if _, err := b.servers[0].Do("SET", "{k}:fence", mark); err != nil {
				t.Fatal(err)
			}
			if n > 1 {
				for range 10 {
					grow(kit.Acquire(t, b.locks, "k"))
				}
				continue
			}
			for range 3 {
				lease, err := b.locks.TryAcquire(t.Context(), "k")
				if lease != nil || !errors.Is(err, holdfast.ErrUnavailable) || errors.Is(err, holdfast.ErrHeld) {
					t.Errorf("beside a mark of %s: %v, want ErrUnavailable", mark, err)
				}
			}
			kit.NoKeys(t, ttl/2, b.servers)
			if v, err := b.servers[0].Do("GET", "{k}:fence"); err != nil || v != mark {
				t.Errorf("the mark %s is now %v, %v", mark, v, err)
			}
		}
		if _, err := b.servers[0].Do("DEL", "{k}:fence"); err != nil {
			t.Fatal(err)
		}
		for range 10 {
			grow(kit.Acquire(t, b.locks, "k"))
		}
	})
}

// owners is a child process that says the owners of some leases.
func owners() {
	args := kit.Args()
	s, end := kit.ChildStore(args[1:])
	defer end()
	locks, err := holdfast.New(s, &holdfast.Options{Label: "worker-1"})
	if err != nil {
		kit.Say("error", err)
		return
	}
	for i := range 20 {
		lease, err := locks.Acquire(context.Background(), args[0]+strconv.Itoa(i))
		if err != nil {
			kit.Say("error", err)
			return
		}
		kit.Say("owner", lease.Owner())
		_ = lease.Release(context.Background())
	}
}

// FRK-02, TOK-06: processes that start at the same moment, and all call themselves worker-1,
// share no owner: no random part of one, and no channel of its process.
func TestOwnersOfManyProcesses(t *testing.T) {
	t.Parallel()
	servers := kit.Servers(t, 1)
	var children []*kit.Process
	for i := range kit.Count(8, 64) {
		c := kit.Clients[i%len(kit.Clients)]
		children = append(children, kit.Child(t, "owners", "k"+strconv.Itoa(i)+".", c.Name, servers[0].Addr()))
	}
	random, inboxes := map[string]bool{}, map[string]bool{}
	for i, child := range children {
		var inbox string
		for range 20 {
			parts := strings.Split(child.Expect(t, "owner", time.Minute), ".") // version, birth, inbox, random, label
			if len(parts) != 5 || len(parts[3]) < 20 {
				t.Fatalf("an owner of the form %q", parts)
			}
			if random[parts[3]] {
				t.Errorf("process %d has an owner with the random part %s of another", i, parts[3])
			}
			random[parts[3]] = true
			if inbox != "" && inbox != parts[2] {
				t.Errorf("process %d has two channels", i)
			}
			inbox = parts[2]
		}
		if inboxes[inbox] {
			t.Errorf("process %d has the channel of another", i)
		}
		inboxes[inbox] = true
		<-child.Done()
	}
	if len(inboxes) != len(children) || len(random) != 20*len(children) {
		t.Errorf("%d processes have %d channels and %d owners", len(children), len(inboxes), len(random))
	}
}

// TOK-06: a label that two processes share makes neither the holder of what the other holds.
func TestSharedLabelIsNoOwner(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{Label: "worker-1"})
		lease := kit.Acquire(t, b.locks, "k")
		_, err := b.other(t, holdfast.Options{Label: "worker-1"}).TryAcquire(t.Context(), "k")
		var held *holdfast.HeldError
		if !errors.As(err, &held) || held.Holder.Label != "worker-1" || held.Holder.Owner != lease.Owner() {
			t.Errorf("another of the same label is told %v", err)
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A release finds what stands on the servers while it is executed, also where the key has
// become something else than a string.
func TestReleaseOfAKeyOfAnotherKind(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		b := newBed(t, c, n, holdfast.Options{})
		lease := b.acquireEverywhere(t, "k")
		for _, s := range b.servers {
			for _, cmd := range [][]string{{"DEL", "k"}, {"HSET", "k", "field", "value"}} {
				if _, err := s.Do(cmd...); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release: %v, want ErrLost", err)
		}
		for _, s := range b.servers {
			if v, err := s.Do("HGET", "k", "field"); err != nil || v != "value" {
				t.Errorf("the data are now %v, %v", v, err)
			}
		}
	})
}
