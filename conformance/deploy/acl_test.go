package deploy_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/servertest"
)

// app gives a server a user with these rules alone.
func app(t *testing.T, s *servertest.RedisServer, rules ...string) way {
	t.Helper()
	rig.Must(t, s, append([]string{"ACL", "SETUSER", "app", "reset", "on", ">pass=1"}, rules...)...)
	w := to(s)
	w.user, w.password = "app", "pass=1"
	return w
}

// advised are the rules that a refusal tells people to add.
func advised(t *testing.T, c client) (rules []string) {
	t.Helper()
	_, err := told(t, c.locker(t, app(t, old(t), "~*", "&*")), "k")
	check(t, "a user without rights", err, holdfast.ErrInvalid, "needs the rules")
	for _, word := range strings.Fields(err.Error()) {
		if strings.HasPrefix(word, "+") {
			rules = append(rules, strings.TrimRight(word, ","))
		}
	}
	if len(rules) < 10 {
		t.Fatalf("no rules in %v", err)
	}
	return rules
}

// lockPatterns are the keys of the locks of an application, and the channel.
var lockPatterns = []string{"~jobs:*", "~{jobs:*", "~{holdfast}:*", "&holdfast:*"}

// The rules that a refusal names suffice, with no more keys than the locks' own, and none of
// them is asked of a server for nothing: without a single one it works, or is refused with it.
// The client's own commands (AUTH, HELLO, PING, SELECT) are open to every user. (RED-09)
func TestRights(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		rules := advised(t, c)
		s := old(t)
		w := app(t, s, append(slices.Clone(rules), lockPatterns...)...)
		a, b := c.locker(t, w), c.locker(t, w)
		lease := kit.Acquire(t, a, "jobs:1")
		if _, err := told(t, b, "jobs:1"); !errors.Is(err, holdfast.ErrHeld) {
			t.Errorf("another client: %v", err)
		}
		extend(t, lease)
		release(t, lease)
		comesBack(t, b, "jobs:1")
		_, err := told(t, b, "other")
		check(t, "a key that is not the application's", err, holdfast.ErrInvalid, "NOPERM", "{KEY}:*")

		t.Run("without", func(t *testing.T) {
			for _, rule := range rules {
				t.Run(rule, func(t *testing.T) {
					t.Parallel()
					s := old(t)
					without := slices.DeleteFunc(slices.Clone(rules), func(r string) bool { return r == rule })
					if cycle(t, c.locker(t, app(t, s, append(without, lockPatterns...)...)), rule) {
						kit.NoKeys(t, ttl+patience, []*servertest.RedisServer{s})
					}
				})
			}
			for _, pattern := range lockPatterns {
				t.Run(pattern, func(t *testing.T) {
					t.Parallel()
					s := old(t)
					patterns := slices.DeleteFunc(slices.Clone(lockPatterns), func(p string) bool { return p == pattern })
					cycle(t, c.locker(t, app(t, s, append(slices.Clone(rules), patterns...)...)), "Holdfast needs")
				})
			}
		})
	})
}

// optional are the rules without which locks still work: waiting polls, or a hand-over takes another round
// trip, nobody can list, the others serve a state in which the server is not.
var optional = []string{"+exists", "+pexpireat", "+pubsub|numsub", "+hget", "+type", "+scan", "&holdfast:*",
	"+zadd", "+zcard", "+zrange", "+zrank", "+zrem", "+zscore", "+zpopmin", "+publish", "+subscribe", "+unsubscribe"}

// cycle acquires, extends and releases, until it is refused with the part. It reports whether
// nothing may be left.
func cycle(t *testing.T, locks *holdfast.Locker, part string) bool {
	t.Helper()
	lease, err := told(t, locks, "jobs:1")
	if err != nil {
		check(t, "TryAcquire", err, holdfast.ErrInvalid, part)
		return true
	}
	time.Sleep(10 * time.Millisecond) // so that there is something to extend
	ask := func(what string, f func(context.Context) error) (err error) {
		servertest.Eventually(t, ttl, func() error { // a busy machine makes answers late
			if err = inTime(t, callLimit, what, func() error { return f(t.Context()) }); contains(err, "no answer within") {
				return err
			}
			return nil
		})
		if err != nil {
			check(t, what, err, holdfast.ErrUnavailable, part)
		}
		return err
	}
	extended, released := ask("Extend", lease.Extend), ask("Release", lease.Release)
	if extended == nil && released == nil && !slices.Contains(optional, strings.TrimPrefix(t.Name()[strings.LastIndex(t.Name(), "/")+1:], "#")) {
		t.Errorf("nothing needs it")
	}
	return released == nil
}

// A user who may call functions only: there is no such mode, and no step that is not atomic. (RED-09)
func TestFunctionsOnly(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := old(t)
		_, err := told(t, c.locker(t, app(t, s, "~*", "&*", "+fcall", "+get", "+set", "+del")), "k")
		check(t, "TryAcquire", err, holdfast.ErrInvalid, "NOPERM", "+eval +evalsha")
		if v := rig.Must(t, s, "DBSIZE"); v != int64(0) {
			t.Errorf("%v keys", v)
		}
	})
}
