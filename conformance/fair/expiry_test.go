package fair

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// Tests of what happens when a ttl ends have short ones.
const shortTTL = 2 * time.Second

var shortTTLs = redlock.Options{NodeTimeout: 2 * time.Second, MaxTTL: shortTTL}

func all(t testing.TB, servers []*servertest.RedisServer, args ...string) {
	t.Helper()
	for _, s := range servers {
		rig.Must(t, s, args...)
	}
}

// FAR-03: a lock ends without a release, so that nobody is told. Its waiters, whose patience is
// much longer than the ttl, have the key when the ttl of the dead holder ends, by timers of their
// own. FAR-04: also where what remains of that ttl on the servers makes no sense.
func TestEndWithoutRelease(t *testing.T) {
	for name, end := range map[string]func(t *testing.T, servers []*servertest.RedisServer, holder *kit.Process){
		"killed": func(_ *testing.T, _ []*servertest.RedisServer, holder *kit.Process) { holder.Kill() },
		"deleted": func(t *testing.T, servers []*servertest.RedisServer, _ *kit.Process) {
			all(t, servers, "DEL", "k")
		},
		"killed, without a ttl, deleted": func(t *testing.T, servers []*servertest.RedisServer, holder *kit.Process) {
			holder.Kill()
			all(t, servers, "PERSIST", "k")
			time.Sleep(2 * shortTTL) // the waiters have asked meanwhile
			all(t, servers, "DEL", "k")
		},
		"killed, with a ttl of years, deleted": func(t *testing.T, servers []*servertest.RedisServer, holder *kit.Process) {
			holder.Kill()
			all(t, servers, "PEXPIRE", "k", strconv.Itoa(10*365*24*3600*1000))
			time.Sleep(2 * shortTTL)
			all(t, servers, "DEL", "k")
		},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, c rig.Client, n int) {
				t.Parallel()
				servers := kit.Servers(t, n)
				client := kit.GoRedis.Name
				if c.Rueidis {
					client = kit.Rueidis.Name
				}
				holder := kit.Child(t, "hang", append([]string{shortTTL.String(), client}, kit.Addrs(servers)...)...)
				if err := holder.Expect(t, "held", patience); err != "<nil>" {
					t.Fatal(err)
				}
				const many = 2
				var served turns
				failed := make(chan error, many)
				for i, locks := range crowd(t, c, servers, many, shortTTLs, holdfast.Options{TTL: shortTTL}) {
					go func() {
						ctx, cancel := context.WithTimeout(t.Context(), patience)
						defer cancel()
						x, err := once(ctx, t, i, locks, 0)
						served.add(x)
						failed <- err
					}()
					await(t, servers, i+1)
				}
				time.Sleep(shortTTL / 2)
				end(t, servers, holder)
				ended := time.Now()
				for range many {
					if err := <-failed; err != nil {
						t.Fatal(err)
					}
				}
				list := served.inOrder()
				waited := list[0].at.Sub(ended)
				t.Logf("the first one has the key %v after the end, the other one %v later", waited.Round(time.Millisecond),
					list[1].at.Sub(list[0].at).Round(time.Millisecond))
				// What a waiter last knew ends within a ttl, and it looks a quarter later at the latest.
				if waited > 2*shortTTL+shortTTL/4 {
					t.Errorf("the first waiter has the key %v after the end, with a ttl of %v", waited, shortTTL)
				}
			})
		})
	}
}

// FAR-04: another library holds the key, with any ttl or none. Nobody will tell when it goes,
// so that is asked for: neither without a pause, nor too seldom. A lock without an end is told
// to the Observer as what it is.
func TestForeignHolderOfAnyTTL(t *testing.T) {
	for name, ttl := range map[string][]string{
		"none": nil, "1 ms": {"PX", "1"}, "50 ms": {"PX", "50"}, "years": {"PX", strconv.Itoa(10 * 365 * 24 * 3600 * 1000)},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, c rig.Client, n int) {
				t.Parallel()
				servers := kit.Servers(t, n)
				events := &kit.Events{}
				locks := crowd(t, c, servers, 1, storeOptions, holdfast.Options{TTL: 10 * time.Second, Observer: events})[0]
				kit.Warm(t, locks)
				all(t, servers, append([]string{"SET", "k", "another library's"}, ttl...)...)
				before := requests(t, servers)
				got := make(chan error, 1)
				go func() {
					_, err := once(t.Context(), t, 0, locks, 0)
					got <- err
				}()
				const held = 2 * time.Second
				time.Sleep(held)
				asked := requests(t, servers) - before
				all(t, servers, "DEL", "k")
				freed := time.Now()
				select {
				case err := <-got:
					if err != nil {
						t.Fatal(err)
					}
				case <-time.After(5 * time.Second):
					t.Fatal("the waiter does not get the key that is free")
				}
				t.Logf("%d requests to %d servers in %v; it has the key %v after that was free", asked, n, held, time.Since(freed).Round(time.Millisecond))
				if asked > n*int(held/(20*time.Millisecond)) {
					t.Errorf("%d requests to %d servers in %v", asked, n, held)
				}
				if ttl != nil {
					return
				}
				for _, e := range kit.Select[holdfast.Waiting](events) {
					var by *holdfast.HeldError
					if errors.As(e.Err, &by) && by.Holder.Foreign && by.Holder.NoTTL {
						return
					}
				}
				t.Error("the Observer is not told that the lock has no end")
			})
		})
	}
}

// FAR-04: a claim that is told to wait for a time that cannot be returns all the same, after a
// pause.
func TestWaitForTimesThatCannotBe(t *testing.T) {
	servers := kit.Servers(t, 1)
	nodes := rig.Nodes(t, rig.GoRedis, servers...)
	kit.Acquire(t, kit.Locker(t, rig.Store(t, shortTTLs, nodes...), holdfast.Options{TTL: shortTTL}), "k")
	for _, wait := range []bool{false, true} {
		for _, holder := range []store.Holder{
			{TTL: -2 * time.Millisecond}, {TTL: -1}, {}, {TTL: 1}, {TTL: time.Millisecond}, {TTL: 1<<63 - 1}, {NoTTL: true},
			{NoTTL: true, TTL: -time.Hour}, {Foreign: true, TTL: -1}, {Foreign: true, TTL: 1<<63 - 1}, {Foreign: true, NoTTL: true},
		} {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				claim := rig.Store(t, shortTTLs, nodes...).Claim("k", store.ClaimOptions{TTL: shortTTL, Wait: wait})
				defer claim.Release(context.WithoutCancel(t.Context()))
				ctx, cancel := context.WithTimeout(t.Context(), 10*shortTTL)
				defer cancel()
				rounds := 0
				for began := time.Now(); time.Since(began) < shortTTL; rounds++ {
					if _, err := claim.Try(ctx); !errors.Is(err, store.ErrHeld) {
						t.Fatal(err)
					}
					if err := claim.(store.Waiter).Wait(ctx, &store.HeldError{Holder: holder}); err != nil {
						t.Fatalf("it hangs: %v", err)
					}
				}
				if rounds > int(2*shortTTL/time.Millisecond) {
					t.Errorf("%+v: %d rounds in %v", holder, rounds, shortTTL)
				}
			})
		}
	}
}
