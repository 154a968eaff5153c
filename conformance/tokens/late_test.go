package tokens_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// late is a case in which VOTEs arrive after their attempt's RELEASE.
type late struct {
	nodes   int
	held    []int         // nodes whose VOTE is late
	behind  time.Duration // of the clock of the last node
	granted bool          // the others are enough
}

// A VOTE that arrives after its RELEASE takes the lock for nobody, where no tombstone stops it.
// The client is go-redis, whose requests take connections of their own: rueidis sends the
// RELEASE behind the VOTE, on the same connection, and both are late.
func TestLateVoteLeavesNoKey(t *testing.T) {
	for name, l := range map[string]late{
		"one node":                            {nodes: 1, held: []int{0}},
		"three of five":                       {nodes: 5, held: []int{1, 2, 3}},
		"one of five, granted":                {nodes: 5, held: []int{4}, granted: true},
		"one of five behind, granted":         {nodes: 5, held: []int{4}, behind: 5500 * time.Millisecond, granted: true},
		"one of five behind, and others late": {nodes: 5, held: []int{2, 3, 4}, behind: 5500 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l.run(t)
		})
	}
}

func (l late) run(t *testing.T) {
	servers := servertest.RedisN(t, l.nodes, servertest.Aged(time.Hour))
	if l.behind > 0 {
		last := servers[l.nodes-1]
		last.Clock().Set(-l.behind)
		if d := time.Since(serverTime(t, last)); d < l.behind-time.Second {
			t.Fatalf("the last node is %v behind", d)
		}
	}
	runs := kit.Count(6, 100)
	const lanes = 4
	var wg sync.WaitGroup
	var mu sync.Mutex
	holds, refused := 0, 0
	for lane := range lanes {
		wg.Go(func() {
			// Proxies and clients of its own, so that one lane's late VOTE keeps nobody else.
			proxies := kit.Proxies(t, servers)
			taps := make([]*rig.Tap, len(proxies))
			for i, p := range proxies {
				taps[i] = rig.NewTap(p)
			}
			timeout := 2 * time.Second
			if !l.granted {
				timeout = 250 * time.Millisecond
			}
			st := rig.Store(t, redlock.Options{NodeTimeout: timeout}, rig.Nodes(t, rig.GoRedis, proxies...)...)
			met(t, st, servers, l, lane)
			for run := lane; run < runs; run += lanes {
				h, r := l.once(t, st, servers, proxies, taps, fmt.Sprintf("k%d", run))
				mu.Lock()
				holds, refused = holds+h, refused+r
				mu.Unlock()
				if t.Failed() {
					return
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d runs: %d VOTEs were held back and arrived after their RELEASE, which had to wait for the clock of a node %d times", runs, holds, refused)
	if want := runs * len(l.held); holds < want {
		t.Errorf("%d VOTEs were late, want %d", holds, want)
	}
}

// met makes a store known to all servers. One whose clock is far behind answers and does not
// vote.
func met(t *testing.T, st *redlock.Store, servers []*servertest.RedisServer, l late, lane int) {
	near := l.nodes
	if l.behind > 0 {
		near--
	}
	key := "warm" + strconv.Itoa(lane)
	servertest.Eventually(t, 20*time.Second, func() error {
		c := st.Claim(key, store.ClaimOptions{TTL: 5 * time.Second})
		defer c.Release(context.Background())
		if _, err := c.Try(context.Background()); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond) // the round may end before the last one answers
		for _, s := range servers[:near] {
			if v, err := s.Do("EXISTS", key); err != nil || v != int64(1) {
				return fmt.Errorf("%s has not voted: %v, %v", s.Addr(), v, err)
			}
		}
		return nil
	})
}

// once is one attempt whose VOTEs are late at some nodes, and its RELEASE. It answers how many
// were late.
func (l late) once(t *testing.T, st *redlock.Store, servers []*servertest.RedisServer, proxies []*servertest.Proxy, taps []*rig.Tap, key string) (late, waited int) {
	const ttl = 20 * time.Second // a vote for nobody would stay for long
	var holds []*servertest.Held
	for _, i := range l.held {
		holds = append(holds, proxies[i].Hold(taps[i].IsVote))
	}
	ctx := context.Background()
	c := st.Claim(key, store.ClaimOptions{TTL: ttl})
	_, err := c.Try(ctx)
	switch {
	case l.granted && err != nil:
		t.Errorf("%s: %v", key, err)
		return
	case !l.granted && !errors.Is(err, store.ErrUncertain):
		t.Errorf("%s: not uncertain: %v", key, err)
		return
	}
	wait, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, h := range holds {
		if err := h.Wait(wait); err != nil {
			t.Errorf("%s: no VOTE was held back: %v", key, err)
			return
		}
	}
	if err := c.Release(ctx); err != nil {
		t.Errorf("%s: release: %v", key, err)
	}
	// The RELEASE goes to all nodes whose VOTE is late.
	servertest.Eventually(t, 10*time.Second, func() error {
		for _, i := range l.held {
			if taps[i].Others(key) == 0 {
				return fmt.Errorf("%s: no RELEASE to node %d", key, i)
			}
		}
		return nil
	})
	time.Sleep(10 * time.Millisecond) // it passes the proxy at once
	if l.behind > 0 {
		// The RELEASE is repeated until the node's clock is near enough for a tombstone. The VOTE
		// comes before, while, or after that.
		time.Sleep(rand.N(l.behind - 4500*time.Millisecond))
	}
	for j, i := range l.held {
		if l.behind > 0 && i == l.nodes-1 {
			if v, err := servers[i].Do("EXISTS", "{"+key+"}:fence"); err == nil && v == int64(0) {
				waited++
			}
		}
		calls := votes(t, servers[i])
		late += holds[j].Count()
		holds[j].Release()
		servertest.Eventually(t, 10*time.Second, func() error {
			if votes(t, servers[i]) == calls {
				return fmt.Errorf("%s: the late VOTE has not been executed at node %d", key, i)
			}
			return nil
		})
	}
	// What a VOTE took before its tombstone was there is given back by the repeated RELEASE.
	settle := time.Now()
	for end := settle.Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		left := 0
		for _, s := range servers {
			if v, err := s.Do("EXISTS", key); err != nil || v != int64(0) {
				left++
			}
		}
		quiet := 50 * time.Millisecond
		if l.behind > 0 {
			quiet = 1500 * time.Millisecond
		}
		if left > 0 && (l.behind == 0 || time.Now().After(end)) {
			t.Errorf("%s: %d nodes keep a vote for nobody", key, left)
			return
		}
		if left == 0 && time.Since(settle) > quiet {
			return
		}
	}
}

// votes counts the EVALSHA that a server has executed. Lanes run at once, so it may count too
// early; the final look comes later than that.
func votes(t *testing.T, s *servertest.RedisServer) string {
	v, err := s.Do("INFO", "commandstats")
	if err != nil {
		t.Error(err)
		return ""
	}
	return servertest.InfoField(v.(string), "cmdstat_evalsha")
}

// serverTime is the server's TIME.
func serverTime(t *testing.T, s *servertest.RedisServer) time.Time {
	t.Helper()
	v := rig.Must(t, s, "TIME").([]any)
	sec, err1 := strconv.ParseInt(v[0].(string), 10, 64)
	us, err2 := strconv.ParseInt(v[1].(string), 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return time.Unix(sec, us*1000)
}
