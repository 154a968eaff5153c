package deploy_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/servertest"
)

// lost waits until a lease is lost, for not longer than it would last.
func lost(t *testing.T, lease *holdfast.Lease) error {
	t.Helper()
	select {
	case <-lease.Done():
	case <-time.After(ttl + callLimit):
		t.Fatal("the lease is not lost")
	}
	if !errors.Is(lease.Err(), holdfast.ErrLost) {
		t.Fatalf("the lease ended by %v", lease.Err())
	}
	return lease.Err()
}

// Somebody else's value in the place of a held lock: the lease is not extended, never puts the
// vote back, and leaves the value alone. (RST-03, KEY-02)
func TestKeyOverwritten(t *testing.T) {
	for _, row := range []struct {
		name string
		do   []string
		says string
	}{
		{"text", []string{"SET", "k", "data"}, "another library's lock"},
		{"list", []string{"EVAL", "redis.call('DEL', KEYS[1]) return redis.call('RPUSH', KEYS[1], 'a')", "1", "k"}, "holds another kind of value"},
		{"nothing", []string{"DEL", "k"}, "gone from the store"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, c client) {
				s := old(t)
				locks := c.locker(t, to(s))
				lease := kit.Acquire(t, locks, "k")
				rig.Must(t, s, row.do...)
				var said string
				for lease.Err() == nil && !strings.Contains(said, row.says) {
					if err := lease.Extend(t.Context()); err != nil {
						said = err.Error()
					}
				}
				if !strings.Contains(said, row.says) {
					t.Errorf("told %q, not %q", said, row.says)
				}
				if row.name != "list" { // where it is unknown what the value means, the lease ends with its time
					lost(t, lease)
				}
				if err := lease.Release(t.Context()); !errors.Is(err, holdfast.ErrLost) && row.name != "list" {
					t.Errorf("release: %v", err)
				}
				if got := rig.Must(t, s, "TYPE", "k"); got != map[string]string{"text": "string", "list": "list", "nothing": "none"}[row.name] {
					t.Errorf("the key is a %v", got)
				}
			})
		})
	}
}

// A policy that evicts: a lock that was evicted is lost at the next extension, and never put
// back. That it could be evicted is what noeviction is for.
func TestEviction(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := old(t, servertest.Config("maxmemory-policy", "allkeys-random"))
		locks := kit.Locker(t, rigStore(t, c, to(s)), holdfast.Options{TTL: ttl, NoExtend: true})
		lease := kit.Acquire(t, locks, "k")
		used, err := strconv.Atoi(s.Info("memory", "used_memory"))
		if err != nil {
			t.Fatal(err)
		}
		rig.Must(t, s, "CONFIG", "SET", "maxmemory", strconv.Itoa(used+200<<10))
		for i := 0; rig.Must(t, s, "EXISTS", "k") == int64(1); i++ {
			if i == 1000 {
				t.Fatal("it is not evicted")
			}
			rig.Must(t, s, "EVAL", "for i = 1, 100 do redis.call('SET', ARGV[1] .. i, string.rep('x', 1000)) end", "0", fmt.Sprint("fill", i, "."))
		}
		if s.Info("stats", "evicted_keys") == "0" {
			t.Error("nothing was evicted")
		}
		check(t, "Extend", lease.Extend(t.Context()), holdfast.ErrLost, "gone from the store")
		if v := rig.Must(t, s, "EXISTS", "k"); v != int64(0) {
			t.Error("it was put back")
		}
	})
}

// The scripts are flushed again and again while one holds and one waits: the holder keeps its
// lease, the waiter gets its own when the holder releases. (RED-02)
func TestScriptsFlushedAgainAndAgain(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := old(t)
		holder := kit.Locker(t, rigStore(t, c, to(s)), holdfast.Options{TTL: ttl, ExtendEvery: 100 * time.Millisecond})
		waiter := c.locker(t, to(s))
		lease := kit.Acquire(t, holder, "k")
		got := make(chan error, 1)
		go func() {
			l, err := waiter.Acquire(t.Context(), "k")
			if err == nil && l.Token() <= lease.Token() {
				err = fmt.Errorf("token %v after %v", l.Token(), lease.Token())
			}
			if err == nil {
				err = l.Release(t.Context())
			}
			got <- err
		}()
		for range 50 {
			rig.Must(t, s, "SCRIPT", "FLUSH")
			extend(t, lease)
			select {
			case err := <-got:
				t.Fatalf("the waiter, while it is held: %v", err)
			default:
			}
		}
		release(t, lease)
		rig.Must(t, s, "SCRIPT", "FLUSH")
		select {
		case err := <-got:
			if err != nil {
				t.Errorf("the waiter: %v", err)
			}
		case <-time.After(patience):
			t.Error("the waiter got nothing")
		}
	})
}
