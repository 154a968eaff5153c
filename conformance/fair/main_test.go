package fair

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// patience bounds what must happen, on a busy machine too.
const patience = time.Minute

var storeOptions = redlock.Options{NodeTimeout: 2 * time.Second}

func TestMain(m *testing.M) { kit.Main(m, map[string]func(){"stand": stand, "hang": hang}) }

// each runs f for one node and for five, with either client.
func each(t *testing.T, f func(t *testing.T, c rig.Client, n int)) {
	for _, n := range []int{1, 5} {
		for _, c := range rig.Clients {
			t.Run(fmt.Sprintf("%dx%v", n, c), func(t *testing.T) { f(t, c, n) })
		}
	}
}

// crowd is many lockers, each over a store of its own, as processes have: they share nothing
// but the connections.
func crowd(t testing.TB, c rig.Client, servers []*servertest.RedisServer, many int, so redlock.Options, o holdfast.Options) []*holdfast.Locker {
	t.Helper()
	nodes := rig.Nodes(t, c, servers...)
	locks := make([]*holdfast.Locker, many)
	for i := range locks {
		locks[i] = kit.Locker(t, rig.Store(t, so, nodes...), o)
	}
	return locks
}

// requests is how many requests about locks the clients have sent so far: scripts, and what
// has to do with subscriptions. Commands within scripts do not count.
func requests(t testing.TB, servers []*servertest.RedisServer) (n int) {
	t.Helper()
	for _, s := range servers {
		for line := range strings.Lines(rig.Must(t, s, "INFO", "commandstats").(string)) {
			name, rest, _ := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls=")
			if !slices.Contains([]string{"eval", "evalsha", "script|load", "subscribe", "unsubscribe", "ping"}, name) {
				continue
			}
			calls, _, _ := strings.Cut(rest, ",")
			k, err := strconv.Atoi(calls)
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			n += k
		}
	}
	return n
}

// queued are the owners that have a place in the queue of k on a quorum of the servers.
func queued(t testing.TB, servers []*servertest.RedisServer) (owners []string) {
	t.Helper()
	places := map[string]int{}
	for _, s := range servers {
		for _, owner := range rig.Must(t, s, "ZRANGE", "{k}:queue", "0", "-1").([]any) {
			if places[owner.(string)]++; places[owner.(string)] == len(servers)/2+1 {
				owners = append(owners, owner.(string))
			}
		}
	}
	return owners
}

// await waits until so many claims have a place in the queue.
func await(t testing.TB, servers []*servertest.RedisServer, many int) {
	t.Helper()
	servertest.Eventually(t, patience, func() error {
		if n := len(queued(t, servers)); n != many {
			return fmt.Errorf("%d claims have a place in the queue, not %d", n, many)
		}
		return nil
	})
}

// turn is one lease of k.
type turn struct {
	who    int
	owner  string
	token  holdfast.Token
	birth  int64 // when the claim began, by the clock of its client, in us
	waited time.Duration
	at     time.Time
}

func newTurn(t testing.TB, who int, l *holdfast.Lease, began time.Time) turn {
	now := time.Now()
	parts := strings.SplitN(l.Owner(), ".", 3)
	birth, err := strconv.ParseInt(parts[min(1, len(parts)-1)], 10, 64)
	if err != nil {
		t.Errorf("owner %q: %v", l.Owner(), err)
	}
	return turn{who, l.Owner(), l.Token(), birth, now.Sub(began), now}
}

// turns collects leases.
type turns struct {
	mu  sync.Mutex
	all []turn
}

func (s *turns) add(x turn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, x)
}

// inOrder are the leases in the order of their tokens, which is that of the grants.
func (s *turns) inOrder() []turn {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.all, func(a, b turn) int { return cmp.Compare(a.token, b.token) })
	return s.all
}

// overtaken is, for each lease, how many of later claims were granted before it.
func overtaken(list []turn) []int {
	const back = 1000 // further back nobody is
	n := make([]int, len(list))
	for i, x := range list {
		for _, y := range list[max(0, i-back):i] {
			if y.birth > x.birth {
				n[i]++
			}
		}
	}
	return n
}

// jain is Jain's index of fairness: 1 where all have the same, 1/n where one has everything.
func jain(shares []int) float64 {
	var sum, squares float64
	for _, x := range shares {
		sum += float64(x)
		squares += float64(x) * float64(x)
	}
	return sum * sum / (float64(len(shares)) * squares)
}

// once acquires k, holds it for a while, and releases it.
func once(ctx context.Context, t testing.TB, who int, locks *holdfast.Locker, hold time.Duration) (turn, error) {
	began := time.Now()
	lease, err := locks.Acquire(ctx, "k")
	if err != nil {
		return turn{}, err
	}
	x := newTurn(t, who, lease, began)
	time.Sleep(hold)
	return x, lease.Release(context.WithoutCancel(ctx))
}

// loop does that until ctx is done.
func loop(ctx context.Context, t testing.TB, who int, locks *holdfast.Locker, hold time.Duration, s *turns) {
	for ctx.Err() == nil {
		x, err := once(ctx, t, who, locks, hold)
		switch {
		case err == nil:
			s.add(x)
		case ctx.Err() == nil || !errors.Is(err, ctx.Err()):
			t.Errorf("%d: %v", who, err)
			return
		}
	}
}

// stand is a child that stands in line once: it says that it is granted, and goes.
func stand() {
	s, end := kit.ChildStore(kit.Args())
	defer end()
	locks, err := holdfast.New(s, nil)
	if err != nil {
		kit.Say("granted", err)
		return
	}
	lease, err := locks.Acquire(context.Background(), "k")
	if err != nil {
		kit.Say("granted", err)
		return
	}
	token := int64(lease.Token())
	if err := lease.Release(context.Background()); err != nil {
		kit.Say("granted", err)
		return
	}
	_ = s.Settle(context.Background())
	kit.Say("granted", token)
}

// hang is a child that acquires k, with the ttl of its first argument, and never returns.
func hang() {
	ttl, err := time.ParseDuration(kit.Args()[0])
	if err != nil {
		kit.Say("held", err)
		return
	}
	s, _ := kit.ChildStoreWith(shortTTLs, kit.Args()[1:])
	locks, err := holdfast.New(s, &holdfast.Options{TTL: ttl})
	if err == nil {
		_, err = locks.Acquire(context.Background(), "k")
	}
	kit.Say("held", err)
	select {}
}
