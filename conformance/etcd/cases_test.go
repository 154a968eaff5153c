package etcd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// ETC-01: a lease that is not extended ends with its ttl, and one that is does not: these are two
// modes, and nothing else renews.
func TestFixedTTL(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	a := kit.Acquire(t, locker(t, holdfast.Options{TTL: minTTL, NoExtend: true}, server.Addr()), "k")
	began := time.Now()
	b := kit.Acquire(t, locker(t, holdfast.Options{TTL: minTTL}, server.Addr()), "k")
	took := time.Since(began)
	if !errors.Is(a.Err(), holdfast.ErrLost) {
		t.Errorf("the first holder is told %v, want ErrLost", a.Err())
	}
	if took > 2*minTTL {
		t.Errorf("the next holder waits %v for a ttl of %v", took, minTTL)
	}
	time.Sleep(2 * minTTL)
	if err := b.Err(); err != nil {
		t.Errorf("a lease that is extended is lost: %v", err)
	}
	if err := b.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// ETC-05: the history is compacted, and connections are cut, while claims wait: they wait on, and
// leave neither keys nor leases.
func TestCompactedWhileWaiting(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	p := servertest.NewProxy(t, server.Addr())
	holder, waiter := locker(t, holdfast.Options{TTL: minTTL}, server.Addr()), locker(t, holdfast.Options{TTL: minTTL}, p.Addr())
	lease := kit.Acquire(t, holder, "k")
	waiting := acquiring(t.Context(), waiter, "k")
	for i := range 10 {
		time.Sleep(minTTL / 20)
		resp, err := direct.Put(t.Context(), "elsewhere", fmt.Sprint(i))
		if err == nil {
			_, err = direct.Compact(t.Context(), resp.Header.Revision)
		}
		if err != nil {
			t.Fatal(err)
		}
		if p.Reset() == 0 && i == 0 {
			t.Error("no connection was cut: the test shows nothing")
		}
		if n := keys(t, direct, etcdstore.DefaultPrefix); n < 1 || n > 2 {
			t.Errorf("%d keys while one holds and one waits, want one of each", n)
		}
	}
	// One that begins to wait from a revision which is compacted before it watches.
	s := open(t, etcdstore.Options{}, server.Addr())
	claim := s.Claim("k", store.ClaimOptions{TTL: minTTL, Wait: true}).(interface {
		store.Claim
		store.Waiter
	})
	_, err := claim.Try(t.Context())
	var held *store.HeldError
	if !errors.As(err, &held) {
		t.Fatalf("Try of a held key: %v", err)
	}
	resp, err := direct.Put(t.Context(), "elsewhere", "last")
	if err == nil {
		resp, err = direct.Put(t.Context(), "elsewhere", "very last")
	}
	if err == nil {
		_, err = direct.Compact(t.Context(), resp.Header.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := claim.Wait(t.Context(), held); err != nil {
		t.Errorf("Wait from a compacted revision: %v, want nil: Try finds out", err)
	}
	if err := claim.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	next := await(t, waiting, minTTL, "the waiter whose history was compacted")
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
	servertest.Eventually(t, 4*minTTL, func() error {
		leases, err := direct.Leases(t.Context())
		if n := keys(t, direct, etcdstore.DefaultPrefix); n > 0 || err == nil && len(leases.Leases) > 0 {
			return fmt.Errorf("%d keys and %d leases are left", n, len(leases.Leases))
		}
		return err
	})
}

// ETC-06: somebody deletes the key of a lock. Its holder is told at its next extension; whoever
// holds it afterwards has a key of the revision that its token names.
func TestKeyDeleted(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	s := open(t, etcdstore.Options{}, server.Addr())
	a, b := kit.Locker(t, s, holdfast.Options{TTL: 4 * minTTL}), locker(t, holdfast.Options{TTL: minTTL}, server.Addr())
	lease := kit.Acquire(t, a, "k")
	stands := func(l *holdfast.Lease) bool {
		resp, err := direct.Txn(t.Context()).If(s.Holds("k", l.Token())).Commit()
		if err != nil {
			t.Fatal(err)
		}
		return resp.Succeeded
	}
	if !stands(lease) {
		t.Error("Holds does not hold for a holder")
	}
	if _, err := direct.Delete(t.Context(), etcdstore.DefaultPrefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	if stands(lease) {
		t.Error("Holds holds though the key was deleted")
	}
	if err := lease.Extend(t.Context()); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("Extend after the key was deleted answers %v, want ErrLost", err)
	}
	// The same process and another one want it at once: one of them has it, and its key is there.
	waiting := []<-chan *holdfast.Lease{acquiring(t.Context(), a, "k"), acquiring(t.Context(), b, "k")}
	last := lease
	for range waiting {
		var now *holdfast.Lease
		select {
		case now = <-waiting[0]:
		case now = <-waiting[1]:
		case <-time.After(8 * minTTL):
			t.Fatal("nobody is granted the key")
		}
		if now.Token() <= last.Token() || !stands(now) || stands(last) {
			t.Errorf("the holder of token %v comes after %v; their keys stand: %v, %v", now.Token(), last.Token(), stands(now), stands(last))
		}
		last = now
		if err := now.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("Release of a lease whose key was deleted answers %v, want ErrLost", err)
	}
}

// ETC-08: nobody releases a lease. It is extended for as long as the process lives, unless there
// is a bound on holding.
func TestForgottenLease(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	func() {
		kit.Acquire(t, locker(t, holdfast.Options{TTL: minTTL, MaxHold: 2 * minTTL}, server.Addr()), "k")
	}()
	began := time.Now()
	next := kit.Acquire(t, locker(t, holdfast.Options{TTL: minTTL}, server.Addr()), "k")
	if took := time.Since(began); took > 4*minTTL {
		t.Errorf("a lease that nobody releases keeps its key for %v, MaxHold being %v", took, 2*minTTL)
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// ETC-10: the token of a login lives for a shorter time than the lease. Extensions, the release
// and the next acquisition log in anew. A user who may not, and one whose password has changed, are
// told so: that is not "held", and nothing is left behind.
func TestAuthentication(t *testing.T) {
	t.Parallel()
	const login = 2 * time.Second // of a token
	server := servertest.Etcd(t, module, servertest.EtcdFlag("auth-token", "simple"), servertest.EtcdFlag("auth-token-ttl", "2"))
	root := secure(t, server)
	as := func(user, password string) *etcdstore.Store {
		cfg := config(server.Addr())
		cfg.Username, cfg.Password = user, password
		c, err := clientv3.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return openCold(t, c, etcdstore.Options{})
	}
	s := as("jobs", "one")
	locks := kit.Locker(t, s, holdfast.Options{TTL: 2 * minTTL})
	for range 2 {
		lease := kit.Acquire(t, locks, "k")
		pause := 3 * login
		if kit.Soak() {
			pause = 30 * time.Second
		}
		time.Sleep(pause)
		if err := lease.Err(); err != nil {
			t.Errorf("a login that ends costs the holder its lease: %v", err)
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Errorf("Release, long after the login: %v", err)
		}
	}
	stranger := kit.Locker(t, as("stranger", "two"), holdfast.Options{TTL: minTTL})
	if _, err := stranger.Acquire(t.Context(), "k"); !errors.Is(err, holdfast.ErrInvalid) || errors.Is(err, holdfast.ErrHeld) {
		t.Errorf("a user without permission is told %v, want ErrInvalid at once", err)
	} else {
		t.Logf("a user without permission is told: %v", err)
	}
	nobody := kit.Locker(t, openCold(t, connect(t, server.Addr()), etcdstore.Options{}), holdfast.Options{TTL: minTTL})
	if _, err := nobody.Acquire(t.Context(), "k"); !errors.Is(err, holdfast.ErrInvalid) {
		t.Errorf("a client without a user is told %v, want ErrInvalid at once", err)
	} else {
		t.Logf("a client without a user is told: %v", err)
	}
	// Nothing keeps the next one.
	if err := kit.Acquire(t, locks, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := root.UserChangePassword(t.Context(), "jobs", "three"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := locks.Acquire(ctx, "k"); !errors.Is(err, holdfast.ErrInvalid) || errors.Is(err, holdfast.ErrHeld) {
		t.Errorf("a user whose password has changed is told %v, want ErrInvalid", err)
	} else {
		t.Logf("a user whose password has changed is told: %v", err)
	}
	fresh := kit.Locker(t, as("jobs", "three"), holdfast.Options{TTL: minTTL})
	if err := kit.Acquire(t, fresh, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
	servertest.Eventually(t, 4*minTTL, func() error {
		leases, err := root.Leases(t.Context())
		if err == nil && len(leases.Leases) > 0 {
			return fmt.Errorf("%d leases are left", len(leases.Leases))
		}
		return err
	})
}

// secure turns authentication on: root, a user who may use locks, and one who may not. It answers
// root's client.
func secure(t *testing.T, server *servertest.EtcdServer) *clientv3.Client {
	t.Helper()
	c := connect(t, server.Addr())
	ctx := t.Context()
	must := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	end := clientv3.GetPrefixRangeEnd(etcdstore.DefaultPrefix)
	must(c.RoleAdd(ctx, "root"))
	must(c.RoleAdd(ctx, "locks"))
	must(c.RoleGrantPermission(ctx, "locks", etcdstore.DefaultPrefix, end, clientv3.PermissionType(clientv3.PermReadWrite)))
	for user, password := range map[string]string{"root": "zero", "jobs": "one", "stranger": "two"} {
		must(c.UserAdd(ctx, user, password))
	}
	must(c.UserGrantRole(ctx, "root", "root"))
	must(c.UserGrantRole(ctx, "jobs", "locks"))
	must(c.AuthEnable(ctx))
	cfg := config(server.Addr())
	cfg.Username, cfg.Password = "root", "zero"
	root, err := clientv3.New(cfg)
	must(nil, err)
	t.Cleanup(func() { root.Close() })
	return root
}

// ETC-12: a lease was lost while its client was cut off. It stays lost when the client is back;
// the next acquisition has another token.
func TestLostStaysLost(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	p := servertest.NewProxy(t, server.Addr())
	locks := locker(t, holdfast.Options{TTL: minTTL}, p.Addr())
	lease := kit.Acquire(t, locks, "k")
	p.BlackHole()
	<-lease.Done()
	p.Heal()
	time.Sleep(minTTL)
	for range 3 {
		if err := lease.Extend(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("a lost lease is extended, or so: %v", err)
		}
	}
	next := kit.Acquire(t, locks, "k")
	if next.Token() <= lease.Token() || !errors.Is(lease.Err(), holdfast.ErrLost) {
		t.Errorf("token %v comes after %v, and the lost lease says %v", next.Token(), lease.Token(), lease.Err())
	}
	if err := next.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// People can read in etcd who holds what.
func TestReadable(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	lease := kit.Acquire(t, locker(t, holdfast.Options{TTL: minTTL, Label: "nightly"}, server.Addr()), "jobs/näme")
	resp, err := direct.Get(t.Context(), etcdstore.DefaultPrefix, clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("%d keys, %v", len(resp.Kvs), err)
	}
	var r struct{ Key, Owner, Label string }
	if err := json.Unmarshal(resp.Kvs[0].Value, &r); err != nil || r.Key != "jobs/näme" || r.Label != "nightly" || r.Owner != lease.Owner() {
		t.Errorf("the value is %s, %v", resp.Kvs[0].Value, err)
	}
	if int64(lease.Token()) != resp.Kvs[0].CreateRevision {
		t.Errorf("token %v, and the key was created at %d", lease.Token(), resp.Kvs[0].CreateRevision)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
