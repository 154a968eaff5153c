package queue

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

const (
	nodeTimeout = time.Second
	ttl         = 10 * time.Second
	// asks is when a waiter asks again that knows of nothing: 1 s after it was parked.
	asks = 1200 * time.Millisecond
	// patience bounds the wait for what must happen, such as a place in the queue.
	patience = 20 * time.Second
)

func TestMain(m *testing.M) {
	goredis.SetLogger(silent{}) // it tells of every connection that fails
	flag.Parse()
	_ = flag.Set("test.parallel", "8") // they mostly wait
	kit.Main(m, map[string]func(){"wait": waitChild, "loop": loopChild, "race": raceChild, "history": historyChild})
}

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// bed is n servers, and a proxy before each where a test asks for them.
type bed struct {
	t       testing.TB
	client  kit.Client
	servers []*servertest.RedisServer
}

func newBed(t testing.TB, c kit.Client, n int, opts ...servertest.RedisOption) *bed {
	t.Helper()
	return &bed{t: t, client: c, servers: kit.Servers(t, n, opts...)}
}

// quorum is how many nodes must agree.
func (b *bed) quorum() int { return len(b.servers)/2 + 1 }

// locker is a process of its own, with a way of its own to the servers, or through proxies.
func (b *bed) locker(o holdfast.Options, proxies ...*servertest.Proxy) *holdfast.Locker {
	b.t.Helper()
	if o.TTL == 0 {
		o.TTL = ttl
	}
	addrs := kit.Addrs(b.servers)
	if len(proxies) > 0 {
		addrs = kit.Addrs(proxies)
	}
	locks := kit.Locker(b.t, kit.Store(b.t, b.client, redlock.Options{NodeTimeout: nodeTimeout}, addrs), o)
	kit.Warm(b.t, locks)
	return locks
}

// queueKey names the queue of a key without a hash tag.
func queueKey(key string) string { return "{" + key + "}:queue" }

// places are the owners that wait at a server, in order.
func (b *bed) places(s *servertest.RedisServer, key string) []string {
	b.t.Helper()
	list, _ := rig.Must(b.t, s, "ZRANGE", queueKey(key), "0", "-1").([]any)
	var owners []string
	for _, o := range list {
		owners = append(owners, o.(string))
	}
	return owners
}

// parked waits until n claims have a place at every server.
func (b *bed) parked(key string, n int) {
	b.t.Helper()
	defer func() {
		if b.t.Failed() {
			b.t.Log(b.state(key))
		}
	}()
	servertest.Eventually(b.t, patience, func() error {
		for i, s := range b.servers {
			if have := b.places(s, key); len(have) != n {
				return fmt.Errorf("node %d: %d claims have a place in the queue of %s, want %d: %q", i, len(have), key, n, have)
			}
		}
		return nil
	})
}

// voted is whose vote a server has, and for how much longer.
func (b *bed) voted(s *servertest.RedisServer, key string) (owner string, left time.Duration) {
	b.t.Helper()
	owner, _ = rig.Must(b.t, s, "GET", key).(string)
	ms, _ := rig.Must(b.t, s, "PTTL", key).(int64)
	return owner, time.Duration(ms) * time.Millisecond
}

// state is what the servers have of a key, for people.
func (b *bed) state(key string) string {
	b.t.Helper()
	var text strings.Builder
	for i, s := range b.servers {
		owner, left := b.voted(s, key)
		fmt.Fprintf(&text, "\nnode %d: vote %s for %v more, mark %s, queue %v, subscribed %v", i, owner, left, b.mark(s, key),
			rig.Must(b.t, s, "ZRANGE", queueKey(key), "0", "-1", "WITHSCORES"), rig.Must(b.t, s, "PUBSUB", "CHANNELS"))
	}
	return text.String()
}

// votes is how many servers have a vote of the owner with this label.
func (b *bed) votes(key, label string) (n int) {
	b.t.Helper()
	for _, s := range b.servers {
		if owner, _ := b.voted(s, key); labelOf(owner) == label {
			n++
		}
	}
	return n
}

// An owner is h1.BIRTH.INBOX.RANDOM[.LABEL].
func part(owner string, i int) string {
	if parts := strings.SplitN(owner, ".", 5); len(parts) > i {
		return parts[i]
	}
	return ""
}

func inboxOf(owner string) string { return part(owner, 2) }
func labelOf(owner string) string { return part(owner, 4) }

// subscribers is how many connections listen to channels.
func subscribers(t testing.TB, s *servertest.RedisServer) int {
	t.Helper()
	list := rig.Must(t, s, "CLIENT", "LIST", "TYPE", "pubsub").(string)
	return len(slices.Collect(strings.Lines(strings.TrimSpace(list))))
}

// listened waits until n connections at each server listen.
func (b *bed) listened(n int) {
	b.t.Helper()
	servertest.Eventually(b.t, patience, func() error {
		for i, s := range b.servers {
			if have := subscribers(b.t, s); have != n {
				return fmt.Errorf("node %d: %d connections listen, want %d", i, have, n)
			}
		}
		return nil
	})
}

// waiter is a child process that waits for a key and then holds it until it is killed.
type waiter struct {
	*kit.Process
	label string
}

// waiters starts n of them, each when the one before has a place on every node. before claims
// have one already.
func (b *bed) waiters(key string, ttl time.Duration, before, n int) []waiter {
	b.t.Helper()
	var list []waiter
	for i := range n {
		w := waiter{label: fmt.Sprintf("w%d", before+i)}
		w.Process = kit.Child(b.t, "wait", append([]string{key, ttl.String(), w.label, b.client.Name}, kit.Addrs(b.servers)...)...)
		list = append(list, w)
		w.Expect(b.t, "ready", time.Minute)
		b.parked(key, before+i+1)
	}
	return list
}

// granted is when the waiter was granted the key.
func (w waiter) granted(t testing.TB, limit time.Duration) time.Time {
	t.Helper()
	ns, err := strconv.ParseInt(w.Expect(t, "granted", limit), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return time.Unix(0, ns)
}

// child opens the locker of a child process, whose arguments are key, ttl, label, client,
// addresses.
func child() (locks *holdfast.Locker, key string) {
	args := kit.Args()
	s, _ := kit.ChildStoreWith(redlock.Options{NodeTimeout: nodeTimeout}, args[3:])
	d, err := time.ParseDuration(args[1])
	if err == nil {
		locks, err = holdfast.New(s, &holdfast.Options{TTL: d, Label: args[2]})
	}
	if err != nil {
		panic(err)
	}
	warm, err := locks.Acquire(context.Background(), args[0]+"."+args[2])
	if err == nil {
		err = warm.Release(context.Background())
	}
	if err != nil {
		panic(err)
	}
	return locks, args[0]
}

func waitChild() {
	locks, key := child()
	kit.Say("ready")
	lease, err := locks.Acquire(context.Background(), key)
	if err != nil {
		kit.Say("error", err)
		return
	}
	kit.Say("granted", time.Now().UnixNano())
	<-lease.Done()
	kit.Say("lost", lease.Err())
	time.Sleep(time.Minute)
}

// loopChild takes the key and gives it back, again and again, until it is killed.
func loopChild() {
	locks, key := child()
	for turns := 0; ; turns++ {
		if turns == 3 {
			kit.Say("looping")
		}
		lease, err := locks.Acquire(context.Background(), key)
		if err != nil {
			kit.Say("error", err)
			return
		}
		_ = lease.Release(context.Background())
	}
}

// claim is an Acquire under way in this process.
type claim struct {
	t      testing.TB
	cancel context.CancelFunc
	done   chan struct{}

	lease *holdfast.Lease
	err   error
	at    time.Time
}

func acquire(t testing.TB, locks *holdfast.Locker, key string) *claim {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c := &claim{t: t, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.lease, c.err = locks.Acquire(ctx, key)
		c.at = time.Now()
	}()
	return c
}

// wait answers the lease, which must come.
func (c *claim) wait(limit time.Duration) *holdfast.Lease {
	c.t.Helper()
	select {
	case <-c.done:
	case <-time.After(limit):
		c.t.Fatalf("the waiter is not granted the key within %v: it is lost", limit)
	}
	if c.err != nil {
		c.t.Fatal(c.err)
	}
	return c.lease
}

// drain gives back what the claims are granted, in whatever order that comes, and answers when
// the last one was. Nobody may come for longer than limit.
func drain(t testing.TB, limit time.Duration, claims ...*claim) (last time.Time) {
	t.Helper()
	for last = time.Now(); len(claims) > 0; time.Sleep(time.Millisecond) {
		i := slices.IndexFunc(claims, func(c *claim) bool { return !c.waits() })
		switch {
		case i >= 0:
			release(t, claims[i].wait(limit))
			last = claims[i].at
			claims = slices.Delete(slices.Clone(claims), i, i+1)
		case time.Since(last) > limit:
			t.Fatalf("nobody is granted the key within %v: %d waiters are lost", limit, len(claims))
		}
	}
	return last
}

// waits reports whether it has not returned yet.
func (c *claim) waits() bool {
	select {
	case <-c.done:
		return false
	default:
		return true
	}
}

// release gives a lease back that is not lost. On a busy machine the answer may be late.
func release(t testing.TB, lease *holdfast.Lease) {
	t.Helper()
	if err := lease.Release(context.Background()); err != nil && !errors.Is(err, holdfast.ErrUncertain) {
		t.Errorf("Release: %v", err)
	}
}

// within checks a time: by the figure that is promised where the machine is ours, and else by one
// that only a hang exceeds.
func within(t testing.TB, what string, d, promised, generous time.Duration) {
	t.Helper()
	t.Logf("%s: %v (promised: %v)", what, d.Round(100*time.Microsecond), promised)
	limit := generous
	if kit.Soak() {
		limit = promised
	}
	if d > limit {
		t.Errorf("%s: %v, more than %v", what, d, limit)
	}
}

// alone runs the test beside others only where its figures do not count.
func alone(t *testing.T) {
	if !kit.Soak() {
		t.Parallel()
	}
}

// jain is Jain's index of fairness: 1 where all have the same.
func jain(counts []int) float64 {
	var sum, squares float64
	for _, c := range counts {
		sum += float64(c)
		squares += float64(c) * float64(c)
	}
	if squares == 0 {
		return 0
	}
	return sum * sum / (float64(len(counts)) * squares)
}
