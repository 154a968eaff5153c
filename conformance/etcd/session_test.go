package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// long is a session that no test waits for.
const long = time.Minute

var messages = regexp.MustCompile(`(?m)^grpc_server_msg_(sent|received)_total\{grpc_method="(\w+)",.*\} (\S+)$`)

// requests answers how many requests the server has answered, by method; and how many it has had
// whose client may be gone since, by "received " and the method.
func requests(t testing.TB, server *servertest.EtcdServer) map[string]int {
	t.Helper()
	resp, err := http.Get(server.URL() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int{}
	for _, m := range messages.FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			t.Fatal(err)
		}
		method := m[2]
		if m[1] == "received" {
			method = "received " + method
		}
		counts[method] += int(n)
	}
	if len(counts) == 0 {
		t.Fatal("the server does not count its requests")
	}
	return counts
}

// counted answers what the server has had since then.
func counted(t testing.TB, server *servertest.EtcdServer, since map[string]int) map[string]int {
	t.Helper()
	now := requests(t, server)
	for method, n := range since {
		now[method] -= n
	}
	maps.DeleteFunc(now, func(method string, n int) bool { return n == 0 || strings.HasPrefix(method, "received") })
	return now
}

// each runs f for 0 to n-1, sixteen at a time.
func each(n int, f func(i int)) {
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			for i := w; i < n; i += 16 {
				f(i)
			}
		})
	}
	wg.Wait()
}

// sessions answers the etcd leases that there are.
func sessions(t testing.TB, c *clientv3.Client) (ids []clientv3.LeaseID) {
	t.Helper()
	resp, err := c.Leases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range resp.Leases {
		ids = append(ids, l.ID)
	}
	return ids
}

// gone waits until the cluster has neither keys of locks nor leases.
func gone(t testing.TB, c *clientv3.Client, limit time.Duration) {
	t.Helper()
	servertest.Eventually(t, limit, func() error {
		if keys, leases := keys(t, c, etcdstore.DefaultPrefix), len(sessions(t, c)); keys > 0 || leases > 0 {
			return fmt.Errorf("%d keys and %d leases are left", keys, leases)
		}
		return nil
	})
}

// 2,000 locks have one etcd lease: one request takes or releases one of them, and all are extended
// by one renewal, and a look at every hundred. When the last is released nothing is left.
func TestThousandsOnOneSession(t *testing.T) {
	t.Parallel()
	const n, session = 2000, 20 * time.Second
	server := servertest.Etcd(t, module)
	s := openCold(t, connect(t, server.Addr()), etcdstore.Options{Session: session})
	direct := connect(t, server.Addr())
	claims := make([]store.Claim, n)
	tokens := map[holdfast.Token]bool{}
	var mu sync.Mutex
	before := requests(t, server)
	each(n, func(i int) {
		claims[i] = s.Claim("k"+strconv.Itoa(i), store.ClaimOptions{TTL: session})
		g, err := claims[i].Try(t.Context())
		if err != nil {
			t.Errorf("Try: %v", err)
		}
		mu.Lock()
		defer mu.Unlock()
		tokens[g.Token] = true
	})
	acquired := counted(t, server, before)
	if acquired["LeaseGrant"] != 1 || acquired["Txn"] != n || acquired["LeaseKeepAlive"] > 20 {
		t.Errorf("%d acquisitions take %v", n, acquired)
	}
	if len(tokens) != n || len(sessions(t, direct)) != 1 {
		t.Errorf("%d tokens and the leases %x", len(tokens), sessions(t, direct))
	}
	for range 2 {
		time.Sleep(session / 5)
		before = requests(t, server)
		for i, r := range s.ExtendMany(t.Context(), claims) {
			if r.Err != nil || r.Grant.TTL < session/2 {
				t.Fatalf("claim %d is extended: %v, %v", i, r.Grant.TTL, r.Err)
			}
		}
		extended := counted(t, server, before)
		if extended["LeaseKeepAlive"] != 1 || extended["Txn"] != n/100 || extended["LeaseGrant"] != 0 || extended["Range"] > 0 {
			t.Errorf("%d extensions take %v", n, extended)
		}
		t.Logf("%d acquisitions take %v, as many extensions %v", n, acquired, extended)
	}
	before = requests(t, server)
	each(n, func(i int) {
		if err := claims[i].Release(t.Context()); err != nil {
			t.Errorf("Release: %v", err)
		}
	})
	if released := counted(t, server, before); released["Txn"] != n || released["LeaseRevoke"] > 0 {
		t.Errorf("%d releases take %v", n, released)
	}
	if left := keys(t, direct, etcdstore.DefaultPrefix); left != 0 {
		t.Errorf("%d keys are left", left)
	}
	gone(t, direct, 3*session)
	// One that was idle for so long serves again.
	locks := kit.Locker(t, s, holdfast.Options{TTL: session})
	if err := kit.Acquire(t, locks, "k").Release(t.Context()); err != nil {
		t.Error(err)
	}
	if got := sessions(t, direct); len(got) != 1 {
		t.Errorf("the leases are %x, want one", got)
	}
}

// A Locker with 2,000 leases on one session renews that a few times in a ttl, however it spreads its
// extensions.
func TestLockerWithThousandsOnOneSession(t *testing.T) {
	t.Parallel()
	const n, ttl = 2000, 20 * time.Second
	server := servertest.Etcd(t, module)
	locks := kit.Locker(t, open(t, etcdstore.Options{Session: ttl}, server.Addr()), holdfast.Options{TTL: ttl})
	leases := make([]*holdfast.Lease, n)
	each(n, func(i int) { leases[i] = kit.Acquire(t, locks, "k"+strconv.Itoa(i)) })
	before, began := requests(t, server), time.Now()
	time.Sleep(ttl / 2)
	extended := counted(t, server, before)
	// A tenth of the ttl may pass from one renewal to the next.
	if most := int(time.Since(began)/(ttl/10)) + 2; extended["LeaseKeepAlive"] > most || extended["LeaseKeepAlive"] == 0 || extended["Txn"] == 0 {
		t.Errorf("half a ttl of %d leases takes %v, want at most %d renewals", n, extended, most)
	}
	t.Logf("half a ttl of %d leases takes %v", n, extended)
	each(n, func(i int) {
		if err := errors.Join(leases[i].Err(), leases[i].Release(t.Context())); err != nil {
			t.Error(err)
		}
	})
}

// The session is revoked while 100 locks are held and 10 wait: all holders are told, with the
// cause; those who wait wait on, and get the key; and acquisitions open one session together.
func TestSessionRevoked(t *testing.T) {
	t.Parallel()
	const held, waiting, ttl = 100, 10, 3 * minTTL
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	locks := kit.Locker(t, open(t, etcdstore.Options{Session: long}, server.Addr()), holdfast.Options{TTL: ttl})
	other := locker(t, holdfast.Options{TTL: ttl}, server.Addr())
	before := kit.Acquire(t, other, "wanted")
	leases, queued := make([]*holdfast.Lease, held), make(chan *holdfast.Lease, waiting)
	each(held, func(i int) { leases[i] = kit.Acquire(t, locks, "k"+strconv.Itoa(i)) })
	for range waiting {
		go func() {
			l, _ := locks.Acquire(t.Context(), "wanted")
			queued <- l
		}()
	}
	var shared clientv3.LeaseID
	servertest.Eventually(t, time.Minute, func() error {
		resp, err := direct.TimeToLive(t.Context(), clientv3.LeaseID(sessionOf(t, direct, leases[0])), clientv3.WithAttachedKeys())
		if err == nil && len(resp.Keys) < held+1 {
			err = fmt.Errorf("the session has %d keys", len(resp.Keys))
		}
		if err == nil {
			shared = resp.ID
		}
		return err
	})
	if _, err := direct.Revoke(t.Context(), shared); err != nil {
		t.Fatal(err)
	}
	limit := time.After(2 * ttl)
	for i, l := range leases {
		select {
		case <-l.Done():
		case <-limit:
			t.Fatalf("lease %d is still trusted", i)
		}
		var cause *etcdstore.SessionError
		if err := l.Err(); !errors.Is(err, holdfast.ErrLost) || !errors.As(err, &cause) || cause.Lease != shared {
			t.Errorf("lease %d is told %v, want ErrLost by a *SessionError", i, err)
		}
		if i == 0 {
			t.Logf("a holder is told: %v", l.Err())
		}
		if err := l.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release of a lost lease: %v", err)
		}
	}
	grants := requests(t, server)["LeaseGrant"]
	again := make([]*holdfast.Lease, held)
	each(held, func(i int) { again[i] = kit.Acquire(t, locks, "k"+strconv.Itoa(i)) })
	if n := requests(t, server)["LeaseGrant"] - grants; n > 1 {
		t.Errorf("%d sessions were opened, want one", n)
	}
	for i, l := range again {
		if l.Token() <= leases[i].Token() || l.Err() != nil {
			t.Errorf("token %v comes after %v, %v", l.Token(), leases[i].Token(), l.Err())
		}
	}
	if err := before.Release(t.Context()); err != nil {
		t.Error(err)
	}
	last := before.Token()
	for range waiting {
		l := await(t, queued, 8*ttl, "one who waits")
		if l.Token() <= last {
			t.Errorf("token %v comes after %v", l.Token(), last)
		}
		last = l.Token()
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	for _, l := range again {
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if n := keys(t, direct, etcdstore.DefaultPrefix); n > 0 {
		t.Errorf("%d keys are left", n)
	}
}

// deleteKey deletes the key of the grant with that token.
func deleteKey(t testing.TB, c *clientv3.Client, token holdfast.Token) {
	t.Helper()
	if _, err := c.Delete(t.Context(), string(keyOf(t, c, token).Key)); err != nil {
		t.Fatal(err)
	}
}

// sessionOf answers the etcd lease that the key of a lock is on.
func sessionOf(t testing.TB, c *clientv3.Client, l *holdfast.Lease) int64 {
	t.Helper()
	return keyOf(t, c, l.Token()).Lease
}

func keyOf(t testing.TB, c *clientv3.Client, token holdfast.Token) *mvccpb.KeyValue {
	t.Helper()
	resp, err := c.Get(t.Context(), etcdstore.DefaultPrefix, clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		if kv.CreateRevision == int64(token) {
			return kv
		}
	}
	t.Fatalf("the key of token %v is missing", token)
	return nil
}

// An acquisition on a session that lives on, whose reply is lost, leaves no key, and neither a
// second session. What else is held there stays held.
func TestLostReplyOnASession(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	runs, workers := kit.Count(24, 500), 4
	var worst time.Duration
	var mu sync.Mutex
	var wg sync.WaitGroup
	for w := range workers {
		prefix := "/w" + strconv.Itoa(w) + "/"
		p := servertest.NewProxy(t, server.Addr())
		s := warm(t, openCold(t, connect(t, p.Addr()), etcdstore.Options{Prefix: prefix, Session: long}))
		locks := kit.Locker(t, s, holdfast.Options{TTL: long})
		anchor := kit.Acquire(t, locks, "anchor")
		wg.Go(func() {
			for i := w; i < runs; i += workers {
				took := loseReply(t, direct, p, locks, prefix+"lock/", 1, i)
				mu.Lock()
				worst = max(worst, took)
				mu.Unlock()
			}
			if err := anchor.Extend(t.Context()); err != nil {
				t.Errorf("another lock of the session: %v", err)
			}
			if err := anchor.Release(t.Context()); err != nil {
				t.Errorf("another lock of the session: %v", err)
			}
			if n := keys(t, direct, prefix+"lock/"); n > 0 {
				t.Errorf("%d keys are left", n)
			}
			if n := keys(t, direct, prefix+"void/"); n == 0 || n > int64(runs) {
				t.Errorf("%d requests are kept from arriving late, in %d runs", n, runs/workers)
			}
		})
	}
	wg.Wait()
	if got := sessions(t, direct); len(got) != workers {
		t.Errorf("%d stores have %d leases", workers, len(got))
	}
	t.Logf("%d runs: each key was gone at most %v after the network was whole again; the session lives for %v", runs, worst.Round(time.Millisecond), long)
}

// loseReply has one acquisition lose its reply, and answers how long it took until its key was gone and those of
// others were left.
func loseReply(t *testing.T, direct *clientv3.Client, p *servertest.Proxy, locks *holdfast.Locker, prefix string, others int64, i int) time.Duration {
	t.Helper()
	key := "k" + strconv.Itoa(i)
	held := p.Hold(taking)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	outcome := make(chan error, 1)
	go func() {
		_, err := locks.TryAcquire(ctx, key)
		outcome <- err
	}()
	if err := held.Wait(ctx); err != nil {
		t.Errorf("run %d: no transaction came: %v", i, err)
	}
	dropped := p.Counts().Dropped
	p.DropReplies()
	held.Release()
	servertest.Eventually(t, 20*time.Second, func() error { // the server has acted
		if keys(t, direct, prefix) <= others || p.Counts().Dropped == dropped {
			return errors.New("the server has not acted, or its reply was not lost")
		}
		return nil
	})
	want := holdfast.ErrUncertain
	if i%2 == 1 { // the caller gives up before the connection breaks
		want = context.Canceled
		cancel()
	}
	healed := time.Now()
	p.Heal()
	if err := <-outcome; !errors.Is(err, want) {
		t.Errorf("run %d: TryAcquire whose reply was lost answers %v, want %v", i, err, want)
	}
	servertest.Eventually(t, long/2, func() error {
		if n := keys(t, direct, prefix); n != others {
			return fmt.Errorf("run %d: there are %d keys, want %d", i, n, others)
		}
		return nil
	})
	return time.Since(healed)
}

// lateNetwork keeps the transactions that take a key, as a network that delivers them when it likes.
type lateNetwork struct {
	on   atomic.Bool
	kept chan *pb.TxnRequest
}

func (l *lateNetwork) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	txn, ok := req.(*pb.TxnRequest)
	if !ok || !l.on.Load() || len(txn.Success) == 0 || !taking(txn.Success[0].GetRequestPut().GetValue()) {
		return invoke(ctx, method, req, reply, cc, opts...)
	}
	for _, o := range opts {
		if p, ok := o.(grpc.PeerCallOption); ok {
			p.PeerAddr.Addr = &net.TCPAddr{} // it has left
		}
	}
	l.kept <- txn
	return status.Error(codes.Unavailable, "the connection broke")
}

// A request that takes a key on a session, or queues up, and arrives after all was cleared, finds
// nothing to take.
func TestLateRequestOnASession(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	network := &lateNetwork{kept: make(chan *pb.TxnRequest, 1)}
	cfg := config(server.Addr())
	cfg.DialOptions = append(cfg.DialOptions, grpc.WithChainUnaryInterceptor(network.intercept))
	client, err := clientv3.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	s := warm(t, openCold(t, client, etcdstore.Options{Session: long}))
	other := kit.Acquire(t, locker(t, holdfast.Options{TTL: long}, server.Addr()), "held")
	before := s.Claim("held", store.ClaimOptions{TTL: long, Wait: true})
	if _, err := before.Try(t.Context()); !errors.Is(err, store.ErrHeld) { // so that it is known to be held
		t.Fatal(err)
	}
	for i, o := range []struct {
		key      string
		wait     bool
		released bool
	}{{"free", false, true}, {"held", true, true}, {"free", true, true}, {"free", false, false}, {"held", true, false}} {
		ttl := long
		if !o.released { // its time ends it
			ttl = minTTL
		}
		c := s.Claim(o.key, store.ClaimOptions{TTL: ttl, Wait: o.wait})
		network.on.Store(true)
		if _, err := c.Try(t.Context()); !errors.Is(err, store.ErrUncertain) {
			t.Fatalf("%d: Try without an answer answers %v", i, err)
		}
		network.on.Store(false)
		if o.released {
			if err := c.Release(t.Context()); err != nil {
				t.Errorf("%d: Release: %v", i, err)
			}
		}
		void := etcdstore.DefaultPrefix + "void/"
		servertest.Eventually(t, long/2, func() error {
			if n := keys(t, direct, void); n != int64(i+1) {
				return fmt.Errorf("%d: %d requests are kept from taking a key", i, n)
			}
			return nil
		})
		if _, err := pb.NewKVClient(direct.ActiveConnection()).Txn(t.Context(), <-network.kept); err != nil {
			t.Fatalf("%d: the late request: %v", i, err)
		}
		if n := keys(t, direct, etcdstore.DefaultPrefix+"lock/"); n != 2 { // of the holder and the other waiter
			t.Errorf("%d: there are %d keys after a late request, want 2", i, n)
		}
	}
	// The same where another request has taken the key, and somebody has deleted it since.
	c := s.Claim("again", store.ClaimOptions{TTL: long})
	network.on.Store(true)
	if _, err := c.Try(t.Context()); !errors.Is(err, store.ErrUncertain) {
		t.Fatalf("Try without an answer answers %v", err)
	}
	network.on.Store(false)
	g, err := c.Try(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	deleteKey(t, direct, g.Token)
	if _, err := c.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
		t.Errorf("Extend of a key that was deleted answers %v", err)
	}
	servertest.Eventually(t, long/2, func() error {
		if n := keys(t, direct, etcdstore.DefaultPrefix+"void/"); n != 6 {
			return fmt.Errorf("%d requests are kept from taking a key", n)
		}
		return nil
	})
	if _, err := pb.NewKVClient(direct.ActiveConnection()).Txn(t.Context(), <-network.kept); err != nil {
		t.Fatal(err)
	}
	if n := keys(t, direct, etcdstore.DefaultPrefix+"lock/"); n != 2 {
		t.Errorf("there are %d keys after a late request of a lost claim, want 2", n)
	}
	if err := before.Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := other.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A lock whose lease is not extended goes at the end of its ttl, to who waits for it, though the
// session lives for long, and others on it are extended.
func TestNoExtendOnASession(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	s := open(t, etcdstore.Options{Session: long}, server.Addr())
	kept := kit.Acquire(t, kit.Locker(t, s, holdfast.Options{TTL: minTTL}), "kept")
	const n = 200
	leases := make([]*holdfast.Lease, n)
	short := kit.Locker(t, s, holdfast.Options{TTL: minTTL, NoExtend: true})
	each(n, func(i int) { leases[i] = kit.Acquire(t, short, "k"+strconv.Itoa(i)) })
	next := await(t, acquiring(t.Context(), locker(t, holdfast.Options{TTL: minTTL}, server.Addr()), "k0"), long/3, "who waits for what is not extended")
	if err := leases[0].Err(); !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("another has the key, and the holder is told %v", err)
	}
	servertest.Eventually(t, long/3, func() error {
		if left := keys(t, direct, etcdstore.DefaultPrefix+"lock/"); left > 2 {
			return fmt.Errorf("%d keys are left", left)
		}
		return nil
	})
	for _, l := range leases {
		if err := l.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release of a lease that has ended: %v", err)
		}
	}
	for _, l := range []*holdfast.Lease{kept, next} {
		if err := l.Err(); err != nil {
			t.Errorf("a lease that is extended: %v", err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Errorf("a lease that is extended: %v", err)
		}
	}
}

// Who adopts a lock of a session is independent of it, with or without a session of its own.
func TestAdoptFromASession(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	direct := connect(t, server.Addr())
	first := open(t, etcdstore.Options{Session: long}, server.Addr())
	for _, session := range []time.Duration{0, long} {
		second := open(t, etcdstore.Options{Session: session}, server.Addr())
		lease := kit.Acquire(t, kit.Locker(t, first, holdfast.Options{TTL: minTTL}), "k")
		on := sessionOf(t, direct, lease)
		ticket, err := lease.Ticket()
		if err != nil {
			t.Fatal(err)
		}
		next := kit.Locker(t, second, holdfast.Options{TTL: minTTL})
		adopted, err := next.Adopt(t.Context(), ticket)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := direct.Revoke(t.Context(), clientv3.LeaseID(on)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * minTTL) // past what the first store would have kept it for
		if err := adopted.Extend(t.Context()); err != nil || adopted.Token() != lease.Token() {
			t.Errorf("the adopter, when the session has ended: %v, token %v after %v", err, adopted.Token(), lease.Token())
		}
		if resp, err := direct.Txn(t.Context()).If(second.Holds("k", adopted.Token())).Commit(); err != nil || resp.Succeeded {
			t.Errorf("Holds of an adopted lease: %v, %v", resp.Succeeded, err)
		}
		if err := adopted.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := next.Adopt(t.Context(), ticket); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("a ticket whose lease was released: %v, want ErrLost", err)
		}
	}
}

// A session is lost with the network: its holder knows before the servers let another in.
func TestCutOffSession(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	next := locker(t, holdfast.Options{TTL: minTTL}, server.Addr())
	for i := range kit.Count(2, 20) {
		p := servertest.NewProxy(t, server.Addr())
		locks := kit.Locker(t, open(t, etcdstore.Options{Session: 2 * minTTL}, p.Addr()), holdfast.Options{TTL: minTTL})
		key := "k" + strconv.Itoa(i)
		lease := kit.Acquire(t, locks, key)
		time.Sleep(minTTL / 2)
		p.BlackHole()
		after := await(t, acquiring(t.Context(), next, key), 8*minTTL, "the next holder")
		if err := lease.Err(); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("another has the key, and the holder is told %v", err)
		}
		if p.Counts().BlackHoled == 0 {
			t.Error("nothing fell into the black hole: the test shows nothing")
		}
		p.Reset()
		p.Heal()
		time.Sleep(minTTL) // what the former holder's store deletes is its own
		if err := after.Release(t.Context()); err != nil {
			t.Errorf("the next holder, when the former one is back: %v", err)
		}
	}
}
