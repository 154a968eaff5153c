package zookeeper

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// ZOO-02: the connection of a waiter drops, again and again, for less than the session lives. It
// keeps its one node, does not queue behind itself, and is granted the key when that is released.
func TestWaiterReconnects(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	c := client(t, server.Addr())
	proxy := servertest.NewProxy(t, server.Addr())
	holder := kit.Locker(t, open(t, at(sessionTimeout, server)), holdfast.Options{TTL: sessionTimeout / 2, Label: "holder"})
	waiter := kit.Locker(t, open(t, at(sessionTimeout, proxy)), holdfast.Options{TTL: sessionTimeout / 2, Label: "waiter"})
	lease := kit.Acquire(t, holder, "k")
	acquired := make(chan *holdfast.Lease, 1)
	go func() {
		l, err := waiter.Acquire(t.Context(), "k")
		if err != nil {
			t.Error(err)
		}
		acquired <- l
	}()
	var name string
	servertest.Eventually(t, time.Minute, func() error {
		_, nodes := queueOf(t, c)
		if len(nodes) != 2 {
			return errors.New("nobody waits yet")
		}
		name = slices.MaxFunc(nodes, func(a, b string) int { return int(sequence(a)) - int(sequence(b)) })
		return nil
	})
	for i := range kit.Count(4, 40) {
		if proxy.Reset() == 0 {
			t.Fatal("no connection was there to be cut")
		}
		servertest.Eventually(t, sessionTimeout, func() error {
			if proxy.Counts().Connections < int64(i+2) {
				return errors.New("the waiter is not back")
			}
			return nil
		})
		time.Sleep(50 * time.Millisecond)
		if _, nodes := queueOf(t, c); len(nodes) != 2 || !slices.Contains(nodes, name) {
			t.Fatalf("after %d cuts the queue is %q, the waiter had %q", i+1, nodes, name)
		}
	}
	proxy.Reset()
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if l := <-acquired; l != nil {
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	empty(t, c, sessionTimeout)
}

// sequence is the number at the end of a node's name.
func sequence(name string) (n int32) {
	for _, d := range name[len(name)-10:] {
		n = 10*n + d - '0'
	}
	return n
}

// ZOO-09: the servers end a holder's session, while it does nothing and its connection was fine. The
// context of the lease ends with the cause, long before its validity would have run out; a waiter
// that lost its place as well gets a new one.
func TestSessionEndedByTheServers(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	proxy := servertest.NewProxy(t, server.Addr())
	handshake := record(proxy)
	s := open(t, at(10*time.Second, proxy))
	locks := kit.Locker(t, s, holdfast.Options{TTL: 5 * time.Second, NoExtend: true}) // no extension asks
	lease := kit.Acquire(t, locks, "k")
	ctx := lease.Context(t.Context())
	other := kit.Locker(t, open(t, at(10*time.Second, server)), holdfast.Options{TTL: 5 * time.Second})
	between := kit.Acquire(t, other, "w")
	acquired := make(chan *holdfast.Lease, 1)
	go func() {
		l, err := locks.Acquire(t.Context(), "w")
		if err != nil {
			t.Error(err)
		}
		acquired <- l
	}()
	servertest.Eventually(t, time.Minute, func() error {
		if h, err := s.Inspect(t.Context(), "w"); err != nil || h.Waiting != 1 {
			return errors.New("nobody waits yet")
		}
		return nil
	})
	began := time.Now()
	proxy.Refuse() // or the client could take its session back before it is closed
	endSession(t, server.Addr(), handshake())
	proxy.Heal()
	select {
	case <-ctx.Done():
		t.Logf("the holder knew %v after the end of its session", time.Since(began).Round(time.Millisecond))
		if left := lease.Validity(); left > 0 {
			t.Errorf("the lease is still valid for %v", left)
		}
	case <-time.After(4 * time.Second): // its validity runs out later
		t.Error("the context of the lease does not end with the session")
	}
	if err := lease.Err(); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("the holder is told %v, want ErrLost", err)
	}
	if err := between.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if l := <-acquired; l != nil {
		if l.Token() <= lease.Token() {
			t.Errorf("the waiter's token is %v", l.Token())
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// record keeps the first thing that the server says, which is the answer to the handshake.
func record(p *servertest.Proxy) func() []byte {
	var mu sync.Mutex
	var first []byte
	p.Swallow(func(chunk []byte) bool {
		mu.Lock()
		defer mu.Unlock()
		if first == nil {
			first = slices.Clone(chunk)
		}
		return false
	})
	return func() []byte {
		mu.Lock()
		defer mu.Unlock()
		return first
	}
}

// endSession takes a session over and closes it: what an administrator does.
func endSession(t testing.TB, addr string, handshake []byte) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	id, password := handshake[12:20], handshake[24:40]
	ask := binary.BigEndian.AppendUint32(nil, 44)
	ask = binary.BigEndian.AppendUint32(ask, 0) // version
	ask = binary.BigEndian.AppendUint64(ask, 0) // last transaction seen
	ask = binary.BigEndian.AppendUint32(ask, 10_000)
	ask = append(ask, id...)
	ask = binary.BigEndian.AppendUint32(ask, 16)
	ask = append(ask, password...)
	const closing int32 = opClose
	end := binary.BigEndian.AppendUint32(nil, 8)
	end = binary.BigEndian.AppendUint32(end, 1)
	number := closing
	end = binary.BigEndian.AppendUint32(end, uint32(number))
	if _, err := c.Write(append(ask, end...)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(c) // the server ends the connection with the session
	if len(answer) < 20 || !slices.Equal(answer[12:20], id) {
		t.Fatalf("the session was not taken over: % x, %v", answer, err)
	}
}

// Each chroot has locks of its own, and is made where it is missing; the name of a key cannot lead
// out of it.
func TestChroot(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, servertest.ZooKeeperConfig("tickTime", "2000"))
	c := client(t, server.Addr())
	for _, chroot := range []string{"", "/apps/shop", "/apps/shop/"} {
		o := at(40*time.Second, server)
		o.Chroot = chroot
		for _, key := range []string{"k", "../../k", "/zookeeper/quota", "é/\xff"} {
			claim := open(t, o).Claim(key, store.ClaimOptions{TTL: 20 * time.Second})
			_, err := again(func() (store.Grant, error) { return claim.Try(t.Context()) })
			if taken := chroot == "/apps/shop/"; taken && !errors.Is(err, store.ErrHeld) || !taken && err != nil {
				t.Errorf("in chroot %q, Try of key %q answers %v", chroot, key, err)
			}
		}
	}
	for path, want := range map[string][]string{"/": {"apps", "holdfast", "zookeeper"}, "/apps": {"shop"}, "/apps/shop": {"holdfast"}} {
		names, _, err := c.Children(path)
		slices.Sort(names)
		if err != nil || !slices.Equal(names, want) {
			t.Errorf("below %s are %q, %v, want %q", path, names, err, want)
		}
	}
}

// With credentials, nobody else sees or changes the locks, and who has other ones is told so.
func TestDigest(t *testing.T) {
	t.Parallel()
	server := servertest.ZooKeeper(t, ticks())
	proxy := servertest.NewProxy(t, server.Addr())
	o := at(sessionTimeout, proxy)
	o.Chroot, o.User, o.Password = "/apps", "shop", "secret"
	s := open(t, o)
	lease := kit.Acquire(t, kit.Locker(t, s, holdfast.Options{TTL: sessionTimeout / 2}), "k")
	proxy.Reset() // the credentials go along to the next connection
	if err := lease.Extend(t.Context()); err != nil && !errors.Is(err, store.ErrUnavailable) && !errors.Is(err, store.ErrUncertain) {
		t.Errorf("after a cut, Extend answers %v", err)
	}
	servertest.Eventually(t, sessionTimeout, func() error { return lease.Extend(t.Context()) })

	c := client(t, server.Addr())
	if _, _, err := c.Children("/apps/holdfast/locks"); !errors.Is(err, zk.ErrNoAuth) {
		t.Errorf("a client without credentials is answered %v", err)
	}
	for _, password := range []string{"", "wrong"} {
		o := at(sessionTimeout, server)
		if o.Chroot = "/apps"; password != "" {
			o.User, o.Password = "shop", password
		}
		claim := open(t, o).Claim("k", store.ClaimOptions{TTL: time.Second})
		_, err := again(func() (store.Grant, error) { return claim.Try(t.Context()) })
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != "credentials" {
			t.Errorf("with password %q, Try answers %v, want an *InvalidError about the credentials", password, err)
		}
	}
	o.Servers = []string{server.Addr()}
	if held := open(t, o); !holds(t, held, "k", lease) {
		t.Error("another store with the same credentials does not see the holder")
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
