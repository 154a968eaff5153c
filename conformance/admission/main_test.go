// Package admission_test shows on real servers which of them may vote: none that may have
// forgotten a lock, and none that is not fit to be a node.
package admission_test

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

func TestMain(m *testing.M) { kit.Main(m, nil) }

const (
	ttl        = 20 * time.Second
	quarantine = 31 * time.Second // of stores whose MaxTTL is at most 30 s
	timeout    = 3 * time.Second  // of a node: the machine is busy
)

var strict = redlock.Options{NodeTimeout: timeout}

// old is a server that is past its quarantine.
func old(t *testing.T, opts ...servertest.RedisOption) *servertest.RedisServer {
	t.Helper()
	return servertest.Redis(t, append([]servertest.RedisOption{servertest.Aged(time.Hour)}, opts...)...)
}

func claim(s *redlock.Store, key string) store.Claim {
	return s.Claim(key, store.ClaimOptions{TTL: ttl})
}

func try(s *redlock.Store, key string) (store.Claim, store.Grant, error) {
	c := claim(s, key)
	g, err := c.Try(context.Background())
	return c, g, err
}

func acquire(t *testing.T, s *redlock.Store, key string) (store.Claim, store.Grant) {
	t.Helper()
	c, g, err := try(s, key)
	if err != nil {
		t.Fatalf("acquire %s: %v", key, err)
	}
	return c, g
}

func release(t *testing.T, c store.Claim) {
	t.Helper()
	if err := c.Release(context.Background()); err != nil {
		t.Fatalf("release: %v", err)
	}
}

// pass lets time pass for servers, without waiting: all their clocks go on by d.
func pass(d time.Duration, servers ...*servertest.RedisServer) {
	for _, s := range servers {
		s.Clock().Set(s.Clock().Offset() + d)
	}
}

var youngText = regexp.MustCompile(`: started or promoted \d+m?\d*s ago, may have forgotten locks, votes in (\d+m)?\d+s$`)

// refusedYoung checks that a store of one node refuses because the server is young, for
// about as long as wanted. A client may find first that the server has closed its connection.
func refusedYoung(t *testing.T, s *redlock.Store, key string, votesIn time.Duration) {
	t.Helper()
	var young *redlock.YoungError
	var err error
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		var g store.Grant
		if _, g, err = try(s, key); err == nil {
			t.Fatalf("a young server voted: token %v", g.Token)
		}
		if errors.As(err, &young) || !errors.Is(err, store.ErrUnavailable) || time.Now().After(end) {
			break
		}
	}
	if !errors.As(err, &young) || !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUncertain) || errors.Is(err, store.ErrInvalid) {
		t.Fatalf("not told that the server is young: %v", err)
	}
	rig.OneLine(t, err)
	if !youngText.MatchString(err.Error()) {
		t.Errorf("unclear: %q", err)
	}
	// The server counts whole seconds, and starting it takes a while.
	if young.VotesIn > votesIn || young.VotesIn < votesIn-10*time.Second {
		t.Errorf("votes in %v, want about %v", young.VotesIn, votesIn)
	}
}

// rawVote repeats, from another client, the VOTE that a tap has seen, in another's name and
// for another key, and returns the server's error.
func rawVote(t *testing.T, s *servertest.RedisServer, tap *rig.Tap, key string) string {
	t.Helper()
	vote := tap.Vote()
	if len(vote) < 8 {
		t.Fatalf("no VOTE was seen: %q", vote)
	}
	vote[3], vote[4], vote[5] = key, "{"+key+"}:fence", "raw"
	v, err := s.Do(vote...)
	if err == nil {
		t.Fatalf("the server voted for a raw EVALSHA: %v", v)
	}
	if n := rig.Must(t, s, "EXISTS", key, "{"+key+"}:fence"); n != int64(0) {
		t.Errorf("a refused VOTE left %v keys", n)
	}
	code, _, _ := strings.Cut(err.Error(), " ")
	return code
}

// tapped puts a tapped proxy before a server.
func tapped(t *testing.T, s *servertest.RedisServer, opts ...servertest.ProxyOption) (*servertest.Proxy, *rig.Tap) {
	t.Helper()
	p := servertest.NewProxy(t, s.Addr(), opts...)
	return p, rig.NewTap(p)
}

// restartedEmpty restarts a server without its data and shows that it is so.
func restartedEmpty(t *testing.T, s *servertest.RedisServer) {
	t.Helper()
	id := s.Info("server", "run_id")
	s.Kill()
	s.Wipe()
	s.Restart()
	if s.Info("server", "run_id") == id || rig.Must(t, s, "DBSIZE") != int64(0) {
		t.Fatal("the server was not restarted empty")
	}
}
