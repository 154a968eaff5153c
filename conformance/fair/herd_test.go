package fair

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/servertest"
)

// perHandOver is how many requests of clients a hand-over may take, by the number of nodes.
var perHandOver = map[int]float64{1: 3.2, 5: 18}

// HRD-06: a hundred processes wait for a key that is held. While it is, they ask for nothing:
// a wake-up comes. When it is released, each is told in its turn, and nobody else.
func TestWaitersDoNotPoll(t *testing.T) {
	each(t, func(t *testing.T, c rig.Client, n int) {
		const many = 100
		servers := kit.Servers(t, n)
		locks := crowd(t, c, servers, many, storeOptions, holdfast.Options{TTL: 30 * time.Second})
		lease := kit.Acquire(t, crowd(t, c, servers, 1, storeOptions, holdfast.Options{TTL: 30 * time.Second})[0], "k")
		var served turns
		var wg sync.WaitGroup
		for i := range many {
			wg.Go(func() {
				x, err := once(t.Context(), t, i, locks[i], 0)
				if err != nil {
					t.Error(err)
				}
				served.add(x)
			})
		}
		await(t, servers, many)
		time.Sleep(2 * time.Second) // each asks once for its rank, a second after it has its place
		d := time.Duration(kit.Count(2, 60)) * time.Second
		before := requests(t, servers)
		time.Sleep(d)
		asked := requests(t, servers) - before
		if asked > int(10*d.Seconds())*n {
			t.Errorf("%d requests to %d servers in %v, while the key is held", asked, n, d)
		}
		var queues []map[string]int // places by owner, from 1
		for _, s := range servers {
			q := map[string]int{}
			for i, owner := range rig.Must(t, s, "ZRANGE", "{k}:queue", "0", "-1").([]any) {
				q[owner.(string)] = i + 1
			}
			queues = append(queues, q)
		}
		before = requests(t, servers)
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		each := float64(requests(t, servers)-before) / many
		if each > perHandOver[n] {
			t.Errorf("%.1f requests for each hand-over, more than %v", each, perHandOver[n])
		}
		list := served.inOrder()
		for j := range list {
			for i := range j {
				if !slices.ContainsFunc(queues, func(q map[string]int) bool { return q[list[i].owner] < q[list[j].owner] }) {
					t.Errorf("%d was served before %d, which was before it in the queue of every node", i, j)
				}
			}
		}
		t.Logf("%d waiters: %d requests to %d servers in %v; then %.1f for each hand-over, %v in all", many, asked, n, d, each,
			list[many-1].at.Sub(list[0].at).Round(time.Millisecond))
	})
}

// HRD-01: the holder hangs for ever, and a thousand goroutines of one process wait, each for as
// long as it likes. To the servers and in goroutines of the library they cost what one does,
// and nothing of them is left.
func TestHolderHangs(t *testing.T) {
	each(t, func(t *testing.T, c rig.Client, n int) {
		t.Parallel()
		const many, limit, ttl = 1000, 3 * time.Second, 30 * time.Second
		servers := kit.Servers(t, n)
		locks := crowd(t, c, servers, 1, storeOptions, holdfast.Options{TTL: ttl})[0]
		lease := kit.Acquire(t, crowd(t, c, servers, 1, storeOptions, holdfast.Options{TTL: ttl})[0], "k")
		before := requests(t, servers)
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		var wg sync.WaitGroup
		began := time.Now()
		for range many {
			wg.Go(func() {
				if _, err := locks.Acquire(ctx, "k"); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, holdfast.ErrHeld) {
					t.Errorf("Acquire: %v, want DeadlineExceeded and ErrHeld", err)
				}
			})
		}
		await(t, servers, 1) // one claim for all of them
		wg.Wait()
		late := time.Since(began) - limit
		if late > ttl/4 {
			t.Errorf("the last one was told %v after its time", late)
		}
		asked := requests(t, servers) - before
		if asked > 20*n {
			t.Errorf("%d requests to %d servers for %d waiters of one process", asked, n, many)
		}
		servertest.Eventually(t, patience, func() error {
			for _, s := range servers {
				if keys := kit.Keys(t, s); !slices.Equal(keys, []string{"k"}) {
					return errors.New("left on a server: " + strings.Join(keys, ", "))
				}
			}
			return nil
		})
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
		t.Logf("%d waiters of one process: %d requests to %d servers in %v; the last one was told %v after its time", many, asked, n,
			limit, late.Round(time.Millisecond))
	})
}

// HRD-05: the servers close every idle connection before every call, again and again. No call
// that can be repeated without harm fails for it, and a waiter that does not hear of the
// release because its subscription is gone, too, has the key soon after.
func TestConnectionsKilled(t *testing.T) {
	each(t, func(t *testing.T, c rig.Client, n int) {
		t.Parallel()
		const ttl = 10 * time.Second
		servers := kit.Servers(t, n)
		kill := func(kinds ...string) {
			for _, s := range servers {
				for _, kind := range kinds {
					rig.Must(t, s, "CLIENT", "KILL", "TYPE", kind)
				}
			}
		}
		two := crowd(t, c, servers, 1, storeOptions, holdfast.Options{TTL: ttl})
		two = append(two, crowd(t, c, servers, 1, storeOptions, holdfast.Options{TTL: ttl})...)
		kit.Warm(t, two[0])
		failed := map[string]int{}
		note := func(op string, err error) {
			if err != nil {
				if failed[op]++; failed[op] == 1 {
					t.Errorf("%s: %v", op, err)
				}
			}
		}
		rounds := kit.Count(50, 1000)
		for i := range rounds {
			kill("normal")
			lease, err := two[0].TryAcquire(t.Context(), "k"+strconv.Itoa(i)) // a release may be under way to slower nodes
			note("TryAcquire", err)
			if err != nil {
				continue
			}
			kill("normal")
			note("Extend", lease.Extend(t.Context()))
			kill("normal")
			note("Release", lease.Release(t.Context()))
		}
		if len(failed) > 0 {
			t.Errorf("of %d rounds failed %v", rounds, failed)
		}
		for range kit.Count(3, 100) {
			lease := kit.Acquire(t, two[0], "k")
			got := make(chan error, 1)
			go func() {
				_, err := once(t.Context(), t, 1, two[1], 0)
				got <- err
			}()
			await(t, servers, 1)
			kill("normal", "pubsub")
			note("Release", lease.Release(t.Context()))
			select {
			case err := <-got:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(ttl):
				t.Fatalf("the waiter does not get the key within %v", ttl)
			}
		}
	})
}
