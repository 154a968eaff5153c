package breaks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/store"
)

// A lock that another library has left, without a ttl or with a long one, is free within one
// MaxTTL after its break.
func TestBreakForeign(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		for key, set := range map[string][]string{"endless": {"SET", "endless", "7f3a"}, "long": {"SET", "long", "7f3a", "EX", "3600"}} {
			for _, s := range b.servers {
				rig.Must(t, s, set...)
			}
			h := b.inspect(key)
			if !h.Foreign || h.NoTTL != (key == "endless") || h.Owner != "7f3a" || h.Held != 0 || h.Broken {
				t.Errorf("Inspect tells of %+v", h)
			}
			wrong := h
			wrong.Owner = "another"
			if err := b.op.Break(t.Context(), wrong); !errors.Is(err, store.ErrHeld) {
				t.Errorf("Break of another than the holder: %v", err)
			}
			if err := b.op.Break(t.Context(), h); err != nil {
				t.Fatal(err)
			}
		}
		began := time.Now()
		for _, key := range []string{"endless", "long"} {
			if broken := b.inspect(key); !broken.Broken || broken.TTL > maxTTL {
				t.Errorf("after Break Inspect tells of %+v", broken)
			}
		}
		for _, key := range []string{"endless", "long"} {
			b.grant(b.store().Claim(key, store.ClaimOptions{TTL: ttl}))
		}
		if d := time.Since(began); d > 3*maxTTL {
			t.Errorf("the keys are free %v after their break", d)
		}
	})
}

// A key that holds another kind of value is no lock, and stays what it is.
func TestOtherKind(t *testing.T) {
	each(t, func(b *bed) {
		t := b.t
		for _, s := range b.servers {
			rig.Must(t, s, "HSET", "h", "a", "1")
		}
		_, err := b.op.Inspect(t.Context(), "h")
		for op, err := range map[string]error{"Inspect": err, "Break": b.op.Break(t.Context(), store.Holder{Key: "h", Owner: "x"})} {
			var invalid *store.InvalidError
			if !errors.As(err, &invalid) || invalid.Field != "key" {
				t.Errorf("%s: %v", op, err)
			}
			rig.OneLine(t, err, "hash", "h")
		}
		for _, s := range b.servers {
			if v := rig.Must(t, s, "HGET", "h", "a"); v != "1" {
				t.Errorf("the hash has %v now", v)
			}
		}
		if len(b.servers) == 1 {
			return
		}
		// At two of five nodes it only means that they have no vote.
		for _, s := range b.servers[:2] {
			rig.Must(t, s, "HSET", "k", "a", "1")
		}
		claim := b.store().Claim("k", store.ClaimOptions{TTL: ttl})
		g := b.grant(claim)
		if h := b.breaks("k"); h.Owner != g.Owner {
			t.Errorf("Inspect tells of %+v", h)
		}
		if _, err := claim.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
			t.Errorf("Extend after Break: %v", err)
		}
	})
}

// A node that has just started may have forgotten locks, and yet may be told to break one.
func TestYoungNodes(t *testing.T) {
	t.Parallel()
	for _, c := range kit.Clients {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, c, 3)
			claim := b.store().Claim("k", store.ClaimOptions{TTL: ttl})
			b.grant(claim)
			b.servers[0].Restart(servertest.Aged(0))
			b.breaks("k")
			if n := len(b.broken("k")); n != 3 {
				t.Errorf("%d nodes have the operator's vote: %q", n, b.votes("k"))
			}
			if _, err := claim.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
				t.Errorf("Extend after Break: %v", err)
			}
		})
	}
}

// broken are the operators' votes.
func (b *bed) broken(key string) (owners []string) {
	for _, v := range b.votes(key) {
		if strings.Contains(v, ".broken.") {
			owners = append(owners, v)
		}
	}
	return owners
}

// isBreak knows BREAK by the operator's owner.
func isBreak(request []byte) bool { return bytes.Contains(request, []byte(".broken.")) }

// operator is a process that breaks a lock: args are the owner, the client and the nodes.
func operator() {
	args := kit.Args()
	s, end := kit.ChildStoreWith(options, args[1:])
	defer end()
	kit.Say("broken", s.Break(context.Background(), store.Holder{Key: "k", Owner: args[0]}))
}

// An operator is killed when its requests have reached some of five nodes only. The holder
// keeps the lock where that were two, and has lost it where it were three; another operator
// finishes the work.
func TestKilledOperator(t *testing.T) {
	t.Parallel()
	for _, reached := range []int{2, 3} {
		for _, c := range kit.Clients {
			t.Run(fmt.Sprintf("%dx%s", reached, c.Name), func(t *testing.T) {
				t.Parallel()
				b := newBed(t, c, 5)
				claim := b.store().Claim("k", store.ClaimOptions{TTL: ttl})
				asked := time.Now()
				g := b.grant(claim)
				// All nodes have voted, so that what the operator is told does not depend on the moment.
				servertest.Eventually(t, patience, func() error {
					if n := b.votedFor("k", g.Owner); n < 5 {
						_, err := claim.Extend(t.Context())
						return errors.Join(err, fmt.Errorf("%d nodes vote for the holder", n))
					}
					return nil
				})
				proxies := kit.Proxies(t, b.servers)
				for _, p := range proxies[reached:] {
					p.Hold(isBreak)
				}
				child := kit.Child(t, "operator", append([]string{g.Owner, c.Name}, kit.Addrs(proxies)...)...)
				servertest.Eventually(t, patience, func() error {
					if n := len(b.broken("k")); n != reached {
						return fmt.Errorf("the operator has reached %d nodes", n)
					}
					return nil
				})
				child.Kill()
				for _, p := range proxies { // and what it has sent never arrives
					p.Reset()
				}
				_, err := claim.Extend(t.Context())
				if lost := errors.Is(err, store.ErrLost); lost != (reached > 2) {
					t.Fatalf("with %d of 5 nodes broken, Extend answers %v", reached, err)
				}
				if reached == 2 {
					if h := b.breaks("k"); h.Owner != g.Owner {
						t.Errorf("the second operator finds %+v", h)
					}
					if _, err := claim.Extend(t.Context()); !errors.Is(err, store.ErrLost) {
						t.Errorf("after the second operator Extend answers %v", err)
					}
				} else if h := b.inspect("k"); !h.Broken {
					t.Errorf("the second operator finds %+v", h)
				} else if err := b.op.Break(t.Context(), h); err != nil {
					t.Errorf("the second operator is told %v", err)
				}
				began := time.Now()
				next := b.grant(b.store().Claim("k", store.ClaimOptions{TTL: ttl}))
				if early := time.Since(asked); early < store.Validity(g.TTL, 0) || next.Token <= g.Token {
					t.Errorf("another is granted the key %v after a grant of %v, with token %v after %v", early, g.TTL, next.Token, g.Token)
				}
				if d := time.Since(began); d > 3*maxTTL {
					t.Errorf("the key is free %v after the breaks", d)
				}
			})
		}
	}
}

// An operator without rights is told so at once, and nothing has happened.
func TestBreakWithoutRights(t *testing.T) {
	t.Parallel()
	for _, c := range rig.Clients {
		t.Run(c.String(), func(t *testing.T) {
			t.Parallel()
			s := kit.Servers(t, 1)[0]
			rig.Must(t, s, "ACL", "SETUSER", "reader", "on", ">pw", "~*", "&*", "+@all", "-set")
			rig.Must(t, s, "ACL", "SETUSER", "stranger", "on", ">pw", "~*", "&*", "+@connection")
			holder := rig.Store(t, options, rig.GoRedis.Node(t, s.Addr())).Claim("k", store.ClaimOptions{TTL: ttl})
			var g store.Grant
			servertest.Eventually(t, patience, func() (err error) {
				g, err = holder.Try(t.Context())
				return err
			})
			c.User, c.Password = "reader", "pw"
			reader := rig.Store(t, options, c.Node(t, s.Addr()))
			servertest.Eventually(t, patience, func() error {
				h, err := reader.Inspect(t.Context(), "k")
				if err == nil && h.Owner != g.Owner {
					t.Errorf("Inspect by a reader: %+v", h)
				}
				return err
			})
			err := reader.Break(t.Context(), store.Holder{Key: "k", Owner: g.Owner})
			if !errors.Is(err, store.ErrInvalid) || errors.Is(err, store.ErrUncertain) {
				t.Errorf("Break by a reader: %v", err)
			}
			rig.OneLine(t, err, "set", s.Addr())
			if _, err := holder.Extend(t.Context()); err != nil {
				t.Errorf("Extend after a Break that was refused: %v", err)
			}
			c.User = "stranger"
			stranger := rig.Store(t, options, c.Node(t, s.Addr()))
			servertest.Eventually(t, patience, func() error {
				_, err = stranger.Inspect(t.Context(), "k")
				if !errors.Is(err, store.ErrInvalid) {
					return fmt.Errorf("Inspect by a stranger: %w", err)
				}
				return nil
			})
		})
	}
}

// Other terms than those of the nodes are refused before anything is done; a replica is no node.
func TestBreakOnWrongTerms(t *testing.T) {
	t.Parallel()
	s := kit.Servers(t, 1)[0]
	holder := rig.Store(t, options, rig.GoRedis.Node(t, s.Addr())).Claim("k", store.ClaimOptions{TTL: ttl})
	var g store.Grant
	servertest.Eventually(t, patience, func() (err error) {
		g, err = holder.Try(t.Context())
		return err
	})
	other := rig.Store(t, redlock.Options{NodeTimeout: time.Second}, rig.GoRedis.Node(t, s.Addr()))
	var err error
	servertest.Eventually(t, patience, func() error {
		if err = other.Break(t.Context(), store.Holder{Key: "k", Owner: g.Owner}); !errors.Is(err, store.ErrInvalid) {
			return fmt.Errorf("Break with another MaxTTL: %w", err)
		}
		return nil
	})
	rig.OneLine(t, err, "3000ms", "30000ms")

	replica := servertest.Redis(t, servertest.ReplicaOf(s))
	replica.WaitLinked()
	of := rig.Store(t, options, rig.GoRedis.Node(t, replica.Addr()))
	if h, err := of.Inspect(t.Context(), "k"); !errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Inspect of a replica: %+v, %v", h, err)
	} else {
		rig.OneLine(t, err, "replica")
	}
	if _, err := holder.Extend(t.Context()); err != nil {
		t.Errorf("Extend after a Break that was refused: %v", err)
	}
}
