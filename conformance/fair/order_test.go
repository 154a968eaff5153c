package fair

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
)

// FAR-05: processes of either client come one after the other, and some die while they wait.
// The others are served in the order in which they came, and the dead ones cost them nothing
// that is worth mentioning: not a ttl, nor a time-out for each.
func TestOrderOfArrival(t *testing.T) {
	for _, n := range []int{1, 5} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			servers := kit.Servers(t, n)
			lease := kit.Acquire(t, crowd(t, rig.Rueidis, servers, 1, storeOptions, holdfast.Options{})[0], "k")
			many := kit.Count(8, 40)
			children := make([]*kit.Process, many)
			for i := range children {
				client := kit.Clients[i%2].Name
				children[i] = kit.Child(t, "stand", append([]string{client}, kit.Addrs(servers)...)...)
				await(t, servers, i+1)
			}
			dead := []int{0, 1, 4}
			for _, i := range dead {
				children[i].Kill()
			}
			began := time.Now()
			if err := lease.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			last := int64(lease.Token())
			for i, child := range children {
				if slices.Contains(dead, i) {
					continue
				}
				said := child.Expect(t, "granted", patience)
				token, err := strconv.ParseInt(said, 10, 64)
				if err != nil {
					t.Fatalf("process %d: %s", i, said)
				}
				if token <= last {
					t.Errorf("process %d was served before the one that came before it", i)
				}
				last = token
			}
			took := time.Since(began)
			t.Logf("%d processes, of which %d were dead, were served in %v", many, len(dead), took.Round(time.Millisecond))
			if took > holdfast.DefaultTTL/2 {
				t.Errorf("%v for %d hand-overs with %d dead waiters", took, many, len(dead))
			}
		})
	}
}

// PRI-02, FAR-05, HRD-06: contenders that do nothing but take the lock. They have equal
// shares, whatever they call themselves; few are overtaken, by few; and a hand-over takes as many
// requests with four of them as with many.
func TestEqualShares(t *testing.T) {
	each(t, func(t *testing.T, c rig.Client, n int) {
		for _, many := range []int{4, 32} {
			t.Run(strconv.Itoa(many), func(t *testing.T) {
				servers := kit.Servers(t, n)
				locks := crowd(t, c, servers, many-1, storeOptions, holdfast.Options{Label: "usual"})
				locks = append(locks, crowd(t, c, servers, 1, storeOptions, holdfast.Options{Label: "important"})...)
				for _, k := range locks {
					kit.Warm(t, k)
				}
				var served turns
				gate := kit.Acquire(t, locks[0], "k")
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var wg sync.WaitGroup
				for i, k := range locks {
					wg.Go(func() { loop(ctx, t, i, k, 0, &served) })
				}
				await(t, servers, many-1) // the first one waits in its own process
				before := requests(t, servers)
				if err := gate.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Duration(kit.Count(1000, 20000)) * time.Millisecond)
				end, asked := time.Now(), requests(t, servers)-before
				cancel()
				wg.Wait()
				report(t, served.inOrder(), many, n, end, asked)
			})
		}
	})
}

func report(t *testing.T, list []turn, many, n int, end time.Time, asked int) {
	shares, longest := make([]int, many), [2]time.Duration{}
	total := 0
	over := overtaken(list)
	for _, x := range list {
		class := 0
		if x.who == many-1 {
			class = 1
		}
		longest[class] = max(longest[class], x.waited)
		if x.at.Before(end) {
			shares[x.who]++
			total++
		}
	}
	slices.Sort(over)
	p99, each := over[len(over)*99/100], float64(asked)/float64(total)
	t.Logf("%d hand-overs, Jain's index %.4f; %.1f requests for each; overtaken by p99 %d, at the most %d; the longest wait %v, of the important one %v",
		total, jain(shares), each, p99, over[len(over)-1], longest[0].Round(time.Millisecond), longest[1].Round(time.Millisecond))
	if total < 5*many {
		t.Errorf("only %d hand-overs among %d", total, many)
	}
	if j := jain(shares); j < 0.98 {
		t.Errorf("Jain's index is %.4f: %v", j, shares)
	}
	if p99 > many {
		t.Errorf("one in a hundred was overtaken by %d others", p99)
	}
	if each > perHandOver[n]*1.2 {
		t.Errorf("%.1f requests for each hand-over", each)
	}
}
