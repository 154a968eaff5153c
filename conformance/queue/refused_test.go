package queue

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// deadOwner is an owner whose process is gone: nobody listens to its inbox.
func deadOwner(i int) string {
	return fmt.Sprintf("h1.1700000000000000.deaddeaddeaddead.%032x.dead", i)
}

// bury puts two dead waiters in front of all others in the queue of a key.
func (b *bed) bury(key string) {
	b.t.Helper()
	for _, s := range b.servers {
		for i := range 2 {
			rig.Must(b.t, s, "ZADD", queueKey(key), "1", deadOwner(i))
		}
	}
}

// refusal is a way in which a server refuses what a RELEASE writes.
type refusal struct {
	name           string
	says           string // what Release is told; empty where it succeeds, as a deletion is not refused
	refuse, permit func(t testing.TB, s *servertest.RedisServer)
}

func command(args ...string) func(testing.TB, *servertest.RedisServer) {
	return func(t testing.TB, s *servertest.RedisServer) { t.Helper(); rig.Must(t, s, args...) }
}

var refusals = []refusal{
	{"too few replicas", "NOREPLICAS", command("CONFIG", "SET", "min-replicas-to-write", "1"), command("CONFIG", "SET", "min-replicas-to-write", "0")},
	{"cannot save", "MISCONF", cannotSave, command("CONFIG", "SET", "stop-writes-on-bgsave-error", "no")},
	{"no right to zpopmin", "", command("ACL", "SETUSER", "app", "-zpopmin"), command("ACL", "SETUSER", "app", "+zpopmin")},
}

func cannotSave(t testing.TB, s *servertest.RedisServer) {
	t.Helper()
	rig.Must(t, s, "CONFIG", "SET", "save", "3600 1000000")                     // none by itself
	if err := os.Mkdir(filepath.Join(s.Dir(), "dump.rdb"), 0o700); err != nil { // where the file is to be
		t.Fatal(err)
	}
	rig.Must(t, s, "BGSAVE")
	servertest.Eventually(t, patience, func() error {
		if s.Info("persistence", "rdb_last_bgsave_status") != "err" {
			return errors.New("not failed yet")
		}
		return nil
	})
}

// A RELEASE that finds dead waiters in the queue, and may not take them out of it, comes to an end:
// the server answers others. Where writes are allowed again, the next waiter has the key.
func TestWritesAreRefused(t *testing.T) {
	t.Parallel()
	for _, r := range refusals {
		for _, c := range []rig.Client{rig.GoRedis, rig.Rueidis} {
			for _, n := range []int{1, 3} {
				t.Run(fmt.Sprintf("%s %dx%s", r.name, n, c), func(t *testing.T) {
					t.Parallel()
					writesAreRefused(t, r, c, n)
				})
			}
		}
	}
}

func writesAreRefused(t *testing.T, r refusal, c rig.Client, n int) {
	b := newBed(t, kit.GoRedis, n, servertest.Config("busy-reply-threshold", "200")) // who loops for longer is told of
	for _, s := range b.servers {
		rig.Must(t, s, "ACL", "SETUSER", "app", "reset", "on", ">pass", "~*", "&*", "+@all")
	}
	c.User, c.Password = "app", "pass"
	holder := kit.Locker(t, rig.Store(t, redlock.Options{NodeTimeout: nodeTimeout}, rig.Nodes(t, c, b.servers...)...), holdfast.Options{TTL: ttl})
	waiting := b.locker(holdfast.Options{})
	lease := kit.Acquire(t, holder, "k")
	b.bury("k")
	waiter := acquire(t, waiting, "k")
	b.parked("k", 3)
	for _, s := range b.servers {
		r.refuse(t, s)
	}
	err := lease.Release(context.Background())
	asked := time.Now()
	for _, s := range b.servers {
		rig.Must(t, s, "TIME") // or "BUSY Redis is busy running a script"; PING is refused as a write
		if owners := b.places(s, "k"); !slices.Contains(owners, deadOwner(0)) || !slices.Contains(owners, deadOwner(1)) {
			t.Errorf("a dead waiter was taken out of %q: the test shows nothing", owners)
		}
	}
	within(t, "the server answers others", time.Since(asked), time.Second, ttl/2)
	switch {
	case r.says == "" && err != nil && !errors.Is(err, holdfast.ErrUncertain):
		t.Errorf("Release: %v", err)
	case r.says != "" && (!errors.Is(err, holdfast.ErrUncertain) || !strings.Contains(err.Error(), r.says)):
		t.Errorf("Release: %v, want one that says %s", err, r.says)
	}
	for _, s := range b.servers {
		r.permit(t, s)
	}
	release(t, waiter.wait(3*ttl))
	release(t, kit.Acquire(t, holder, "k"))
	kit.NoKeys(t, 2*ttl, b.servers)
}

// What somebody else writes beside a vote costs a hand-over at most: the owner's RELEASE deletes it.
func TestGarbageBesideAVote(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 1)
			t.Run("keys", func(t *testing.T) {
				for i, garbage := range [][]string{
					{"LPUSH", "queue", "x"}, {"SET", "queue", "x"}, {"ZADD", "queue", "0", "", "0", "somebody", "0", "h1.x", "0", "h1.1.zz.1"},
					{"LPUSH", "fence", "x"}, {"SET", "fence", "no number"}, {"SET", "fence", ""}, {"SET", "fence", "inf"}, {"SET", "fence", "nan"}, {"SET", "fence", "9e99"},
				} {
					for _, waited := range []bool{false, true} {
						t.Run(fmt.Sprint(garbage, waited), func(t *testing.T) {
							t.Parallel()
							b := *b
							b.t = t
							b.garbage(fmt.Sprint("k", i, waited), garbage, waited)
						})
					}
				}
			})
			kit.NoKeys(t, ttl, b.servers)
		})
	}
}

// garbage is put beside the vote of a holder, which has waited for it or has not, and releases it
// while others wait, alive and dead.
func (b *bed) garbage(key string, garbage []string, waited bool) {
	t, s := b.t, b.servers[0]
	holder, other := b.locker(holdfast.Options{Label: "holder"}), b.locker(holdfast.Options{})
	lease := kit.Acquire(t, other, key)
	places := 1
	if waited { // and still has a place, as nobody handed the vote over
		c := acquire(t, holder, key)
		b.parked(key, 1)
		rig.Must(t, s, "DEL", key)
		if err := lease.Release(context.Background()); !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("Release of a vote that was deleted: %v", err)
		}
		lease, places = c.wait(ttl), 2
	} else {
		release(t, lease)
		lease = kit.Acquire(t, holder, key)
	}
	waiter := acquire(t, other, key)
	b.parked(key, places)
	b.bury(key)

	name := "{" + key + "}:" + garbage[1]
	if garbage[0] != "ZADD" {
		rig.Must(t, s, "DEL", name)
	}
	rig.Must(t, s, append([]string{garbage[0], name}, garbage[2:]...)...)
	release(t, lease)
	servertest.Eventually(t, ttl/4, func() error {
		if b.votes(key, "holder") > 0 {
			return errors.New("the vote is left")
		}
		return nil
	})
	rig.Must(t, s, "DEL", name)
	release(t, waiter.wait(2*ttl))
}
