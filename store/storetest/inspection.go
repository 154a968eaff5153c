package storetest

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var inspectionTests = []test{
	{name: "Inspect", run: testInspect, needs: is[store.Inspector]},
	{name: "List", run: testList, needs: is[store.Inspector]},
	{name: "ListHostilePrefix", run: testListHostilePrefix, needs: is[store.Inspector]},
	{name: "Break", run: testBreak, needs: is[store.Inspector]},
	{name: "BreakWrongOwner", run: testBreakWrongOwner, needs: is[store.Inspector]},
	{name: "BreakFree", run: testBreakFree, needs: is[store.Inspector]},
	{name: "BreakFormer", run: testBreakFormer, needs: is[store.Inspector]},
	{name: "BreakTwice", run: testBreakTwice, needs: is[store.Inspector]},
	{name: "DoneContext", run: testInspectDone, needs: is[store.Inspector]},
}

func (e *env) inspector() store.Inspector { return e.s2.(store.Inspector) }

func (e *env) inspect(key string) (h store.Holder) {
	e.Helper()
	err := e.steady("Inspect", func() (err error) { h, err = e.inspector().Inspect(e.ctx, key); return err })
	if err != nil {
		e.Fatalf("Inspect answers %v", err)
	}
	return h
}

func (e *env) nobody(key, what string) {
	e.Helper()
	if h := e.inspect(key); h.Owner != "" {
		e.Errorf("Inspect of %s names a holder: %+v", what, h)
	}
}

// describes complains where h does not describe the grant g of e.long on key.
func (e *env) describes(op string, h store.Holder, key string, g store.Grant) {
	e.Helper()
	if h.Key != key || h.Owner != g.Owner {
		e.Errorf("%s names key %.80q and owner %q, want %.80q and %q", op, h.Key, h.Owner, key, g.Owner)
	}
	if h.Token != 0 && h.Token != g.Token {
		e.Errorf("%s says token %v, the grant has %v", op, h.Token, g.Token)
	}
	if h.Label != "" && h.Label != "storetest" {
		e.Errorf("%s says label %q, want %q", op, h.Label, "storetest")
	}
	if h.TTL <= 0 || h.TTL > e.long+e.step() {
		e.Errorf("%s says that %v are left of %v", op, h.TTL, e.long)
	}
	if h.NoTTL || h.Foreign || h.Broken {
		e.Errorf("%s calls a lease of this store foreign, endless or broken: %+v", op, h)
	}
	if most := time.Since(e.began) + e.ttl; h.Held < 0 || h.Held > most {
		e.Errorf("%s says that the key has been held for %v, the test runs for less than %v", op, h.Held, most)
	}
}

func testInspect(e *env) {
	key := e.key()
	e.nobody(key, "a key that nobody ever had")
	c := e.claim(e.s, key)
	g := e.grant(c, "the holder")
	e.describes("Inspect", e.inspect(key), key, g)
	e.nobody(key+"x", "a key beside the held one")
	e.release(c, "the holder")
	e.nobody(key, "a released key")
	e.grant(e.short(e.s, key), "a holder that dies")
	time.Sleep(e.ttl + e.step() + e.ttl/2)
	e.nobody(key, "a key whose holder has died")
}

func (e *env) list(prefix string) map[string]store.Holder {
	e.Helper()
	found := map[string]store.Holder{}
	for h, err := range e.inspector().List(e.ctx, prefix) {
		if err != nil {
			e.Fatalf("List answers %v", err)
		}
		if !strings.HasPrefix(h.Key, prefix) {
			e.Errorf("List of prefix %q answers key %q", prefix, h.Key)
		}
		if _, twice := found[h.Key]; twice {
			e.Errorf("List answers key %q twice", h.Key)
		}
		found[h.Key] = h
	}
	return found
}

func testList(e *env) {
	prefix := e.key() + "/"
	grants := map[string]store.Grant{}
	var released store.Claim
	for i := range 25 {
		key := fmt.Sprintf("%s%d", prefix, i)
		c := e.claim(e.s, key)
		grants[key] = e.grant(c, "a holder")
		if i == 7 {
			released = c
			delete(grants, key)
		}
	}
	e.release(released, "one of the holders")
	e.grant(e.claim(e.s, strings.TrimSuffix(prefix, "/")), "the holder of a key that is shorter than the prefix")
	found := e.list(prefix)
	if len(found) != len(grants) {
		e.Errorf("List answers %d keys, %d are held", len(found), len(grants))
	}
	for key, g := range grants {
		e.describes("List", found[key], key, g)
	}
	n := 0
	for range e.inspector().List(e.ctx, prefix) {
		if n++; n == 3 {
			break
		}
	}
	if n != 3 {
		e.Errorf("an iteration that stops at the third key has seen %d", n)
	}
}

// A prefix is bytes, not a pattern.
func testListHostilePrefix(e *env) {
	base := e.key()
	for i, special := range []string{"%", "_", "*", "?", "[a]", "[^b]", `\`, "'", "{x}", "\xff", "\xff\xff", "Aa", "aA"} {
		if e.refuses(base + special) {
			continue
		}
		prefix := fmt.Sprintf("%s/%d", base, i)
		in, out := prefix+special+"in", prefix+"axb"+"out"
		e.grant(e.claim(e.s, in), "a holder")
		e.grant(e.claim(e.s, out), "a holder")
		if found := e.list(prefix + special); len(found) != 1 || found[in].Key != in {
			e.Errorf("List of prefix %q answers %v, want %q alone", prefix+special, found, in)
		}
	}
}

// Break ends the holder's lease for the holder, and never lets two hold: the key stays taken
// while the holder, if it has not asked, may trust its grant.
func testBreak(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	asked := time.Now()
	g := e.grant(c, "the holder")
	e.break_(e.inspect(key))
	e.lost(c, "a holder whose lease was broken")
	next := e.claim(e.s2, key)
	n := e.afterBreak(next)
	if early := time.Since(asked); early < store.Validity(g.TTL, 0) {
		e.Errorf("another is granted the key after %v, though the grant that was broken promised %v", early, g.TTL)
	}
	if e.info.Fencing != store.FencingNone && n.Token <= g.Token {
		e.Errorf("token %v comes after token %v, which was broken", n.Token, g.Token)
	}
	if err := e.tryRelease(c); !errors.Is(err, store.ErrLost) {
		e.Errorf("Release of a broken lease answers %v, want ErrLost", err)
	}
	e.extend(next, "the next holder, after Release of a broken lease")
	e.release(next, "the next holder")
}

func (e *env) break_(h store.Holder) {
	e.Helper()
	if err := e.steady("Break", func() error { return e.inspector().Break(e.ctx, h) }); err != nil {
		e.Fatalf("Break of %q answers %v", h.Owner, err)
	}
}

// afterBreak tries until it is granted a key that was broken. Until then the key is neither free
// nor held.
func (e *env) afterBreak(next store.Claim) store.Grant {
	e.Helper()
	start := time.Now()
	for {
		g, err := e.try(next)
		if err == nil {
			return g
		}
		var held *store.HeldError
		if !errors.As(err, &held) || !held.Holder.Broken {
			e.Errorf("Try of a broken key answers %v, want a *HeldError that says that it is broken", err)
		}
		if limit := e.longest() + 2*e.ttl; time.Since(start) > limit {
			e.Fatalf("a broken key is not free after %v: %v", limit, err)
		}
		e.pause()
	}
}

// longest is for how long a key that was broken may stay taken. A ceiling of days is none.
func (e *env) longest() time.Duration {
	if e.info.MaxTTL > time.Hour {
		return e.long
	}
	return max(e.long, e.info.MaxTTL)
}

// What was broken says so, to everybody who asks, and breaking it again changes nothing.
func testBreakTwice(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	g := e.grant(c, "the holder")
	h := e.inspect(key)
	e.break_(h)
	broken := e.inspect(key)
	if !broken.Broken || broken.Owner == "" || broken.Owner == g.Owner || broken.Label == "" {
		e.Fatalf("Inspect of a broken key answers %+v", broken)
	}
	if limit := e.longest(); broken.TTL <= 0 || broken.TTL > limit+e.step() {
		e.Errorf("Inspect says that a broken key is free in %v, want at most %v", broken.TTL, limit)
	}
	if found := e.list(key)[key]; !found.Broken || found.Owner != broken.Owner {
		e.Errorf("List answers %+v for a broken key, Inspect %+v", found, broken)
	}
	e.break_(broken)
	var held *store.HeldError
	if err := e.inspector().Break(e.ctx, h); err != nil && !(errors.As(err, &held) && held.Holder.Broken) {
		e.Errorf("Break of a holder whose key is broken already answers %v, want nil or a *HeldError that says so", err)
	}
	if again := e.inspect(key); again.Owner != broken.Owner || again.TTL > broken.TTL {
		e.Errorf("breaking it again turns %+v into %+v", broken, again)
	}
	e.lost(c, "a holder whose lease was broken")
}

// Where nobody holds the key, Break says so, and leaves it free.
func testBreakFormer(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	g := e.grant(c, "the holder")
	e.release(c, "the holder")
	for _, owner := range []string{g.Owner, "nobody"} {
		err := e.steady("Break", func() error {
			return e.inspector().Break(e.ctx, store.Holder{Key: key, Owner: owner})
		})
		if !errors.Is(err, store.ErrLost) {
			e.Errorf("Break of a key that nobody holds answers %v, want ErrLost", err)
		}
	}
	e.nobody(key, "a free key, after Break")
	next := e.claim(e.s, key)
	e.regrant(next, "the next holder, after Break of a free key")
	e.release(next, "the next holder")
}

func testBreakWrongOwner(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	e.grant(c, "the holder")
	err := e.steady("Break", func() error {
		return e.inspector().Break(e.ctx, store.Holder{Key: key, Owner: "nobody"})
	})
	var held *store.HeldError
	if !errors.As(err, &held) {
		e.Errorf("Break of another than the holder answers %v, want a *HeldError", err)
	}
	e.extend(c, "the holder, after Break of another")
	e.held(key, "a key after Break of another than its holder")
	e.release(c, "the holder")
}

// Break of a former holder takes nothing from those who come later.
func testBreakFree(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	g := e.grant(c, "the holder")
	e.release(c, "the holder")
	next := e.claim(e.s, key)
	e.grant(next, "the next holder")
	if err := e.inspector().Break(e.ctx, store.Holder{Key: key, Owner: g.Owner}); !errors.Is(err, store.ErrHeld) {
		e.Errorf("Break of a former holder, another holding the key, answers %v, want ErrHeld", err)
	}
	e.extend(next, "the holder, after Break of a former one")
	e.release(next, "the holder")
}

func testInspectDone(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	g := e.grant(c, "the holder")
	for want, ctx := range e.done() {
		if _, err := e.inspector().Inspect(ctx, key); !errors.Is(err, want) {
			e.Errorf("Inspect with a done context answers %v, want %v", err, want)
		}
		var last error
		for _, err := range e.inspector().List(ctx, key) {
			last = err
		}
		if !errors.Is(last, want) {
			e.Errorf("List with a done context ends with %v, want %v", last, want)
		}
		if err := e.inspector().Break(ctx, store.Holder{Key: key, Owner: g.Owner}); !errors.Is(err, want) {
			e.Errorf("Break with a done context answers %v, want %v", err, want)
		}
	}
	e.extend(c, "the holder, after Break with a done context")
	e.release(c, "the holder")
}
