package redisguard_test

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/servertest"
)

// node is a node for locks on the server that has the data as well.
func node(t testing.TB, name, addr string) redlock.Node {
	t.Helper()
	if name == "rueidis" {
		n, err := rueidisnode.Dial(rueidis.ClientOption{InitAddress: []string{addr}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { n.Close() })
		return n
	}
	c := goredis.NewClient(&goredis.Options{Addr: addr})
	t.Cleanup(func() { c.Close() })
	n, err := goredisnode.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func locker(t testing.TB, n redlock.Node, o redlock.Options, label string) *holdfast.Locker {
	t.Helper()
	s, err := redlock.New(o, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Settle(context.Background()) })
	locks, err := holdfast.New(s, &holdfast.Options{TTL: 20 * time.Second, Label: label})
	if err != nil {
		t.Fatal(err)
	}
	return locks
}

// What docs/guard.md shows: locks and data in one database. The lock's key, the mark and the data
// are three keys.
func TestLocksBesideData(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t, servertest.Aged(time.Minute))
		guard := guard(t, c.eval(t, s.Addr()))
		locks := locker(t, node(t, c.name, s.Addr()), redlock.Options{}, "")
		const data = "{account/123}:balance"
		rig.Must(t, s, "SET", data, "100")
		for range 3 {
			err := locks.Do(t.Context(), "account/123", func(ctx context.Context, lease *holdfast.Lease) error {
				if err := guard.Claim(ctx, "account/123", lease.Token()); err != nil {
					return err
				}
				balance, err := strconv.Atoi(rig.Must(t, s, "GET", data).(string))
				if err != nil {
					return err
				}
				if err := guard.Set(ctx, "account/123", lease.Token(), data, strconv.Itoa(balance-10), 0); err != nil {
					return err
				}
				return lease.Extend(ctx)
			})
			want(t, "Do", err, nil)
		}
		if v := value(t, s, data); v != "70" {
			t.Errorf("the balance is %v", v)
		}
	})
}

// A write whose key is that of a lock in the same database is refused, and nothing is written.
func TestLocksAreNotOverwritten(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t, servertest.Aged(time.Minute))
		g := guard(t, c.eval(t, s.Addr()))
		n := node(t, c.name, s.Addr())
		for _, o := range []struct{ prefix, label string }{{"", ""}, {"locks:", "a label"}, {"", strings.Repeat("ä", 40)}} {
			rig.Must(t, s, "FLUSHALL")
			lease, err := locker(t, n, redlock.Options{Prefix: o.prefix}, o.label).Acquire(t.Context(), "r")
			if err != nil {
				t.Fatal(err)
			}
			key, token := o.prefix+"r", lease.Token()
			rig.Must(t, s, "SET", "data", "x")
			before := value(t, s, key)

			want(t, "Set", g.Set(t.Context(), "r", token, key, "42", 0), fence.ErrInvalid, key, "holds a lock", "{r}:data")
			want(t, "Del", g.Del(t.Context(), "r", token, "data", key), fence.ErrInvalid, key, "holds a lock")
			want(t, "Check: no mark was made", g.Check(t.Context(), "r", token), fence.ErrNoResource)
			want(t, "HSet", g.HSet(t.Context(), "r", token, key, map[string]string{"a": "b"}), fence.ErrInvalid, key)
			_, err = g.IncrBy(t.Context(), "r", token, key, 1)
			want(t, "IncrBy", err, fence.ErrInvalid, key)
			want(t, "stale Set", g.Set(t.Context(), "r", token-1, key, "42", 0), fence.ErrStale)

			if now := value(t, s, key); now != before || value(t, s, "data") != "x" {
				t.Errorf("the lock was %v and is %v", before, now)
			}
			want(t, "Extend", lease.Extend(t.Context()), nil)
			want(t, "Release", lease.Release(t.Context()), nil)
			want(t, "Set where no lock is", g.Set(t.Context(), "r", token, key, "42", 0), nil)
		}
	})
}

// What only begins like a vote is data like any other, and a user without the right to look at it
// writes as before.
func TestDataLikeALock(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		vote := "h1.1234567890123456.0123456789abcdef.0123456789abcdef0123456789abcdef"
		g := guard(t, c.eval(t, s.Addr()))
		for _, text := range []string{"", "h1.", "h1.title { color: red }", vote[:len(vote)-1], "x" + vote, strings.Replace(vote, ".0", "/0", 1),
			strings.Replace(vote, "1234", "12x4", 1), strings.Repeat("h1.", 1000)} {
			rig.Must(t, s, "SET", "r", text)
			want(t, "Set over "+text, g.Set(t.Context(), "r", 1, "r", "v", 0), nil)
			rig.Must(t, s, "SET", "r", text)
			want(t, "Del of "+text, g.Del(t.Context(), "r", 1, "r"), nil)
		}
		rig.Must(t, s, "DEL", "r")
		rig.Must(t, s, "RPUSH", "r", vote)
		want(t, "Set over a list", g.Set(t.Context(), "r", 1, "r", "v", 0), nil)

		rig.Must(t, s, "ACL", "SETUSER", "default", "-getrange")
		rig.Must(t, s, "SET", "r", vote)
		want(t, "Set without the right", g.Set(t.Context(), "r", 1, "r", "v", 0), nil)
		if v := value(t, s, "r"); v != "v" {
			t.Errorf("the key holds %v", v)
		}
		var invalid *fence.InvalidError
		rig.Must(t, s, "ACL", "SETUSER", "default", "+getrange")
		rig.Must(t, s, "SET", "r", vote)
		if err := g.Set(t.Context(), "r", 1, "r", "v", 0); !errors.As(err, &invalid) || invalid.Field != "key" || invalid.Value != "r" {
			t.Errorf("Set over a vote: %v", err)
		}
	})
}
