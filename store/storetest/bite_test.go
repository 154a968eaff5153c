package storetest

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

// recorder takes the complaints of a test that is meant to fail.
type recorder struct {
	testing.TB
	mu         sync.Mutex
	complaints []string
}

func (r *recorder) Helper()             {}
func (r *recorder) Logf(string, ...any) {}
func (r *recorder) Error(args ...any)   { r.add(fmt.Sprint(args...)) }
func (r *recorder) Errorf(f string, args ...any) {
	r.add(fmt.Sprintf(f, args...))
}
func (r *recorder) Fatalf(f string, args ...any) {
	r.Errorf(f, args...)
	runtime.Goexit()
}

func (r *recorder) add(complaint string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.complaints = append(r.complaints, complaint)
}

// complaints runs the suite and answers what each failing test complains of.
func complaints(t *testing.T, cfg Config) map[string][]string {
	found := map[string][]string{}
	s := cfg.New(t).Open()
	for _, topic := range topics {
		for _, test := range topic.tests {
			if !test.suits(cfg, s) {
				continue
			}
			var r *recorder
			synctest.Test(t, func(t *testing.T) {
				r = &recorder{TB: t}
				done := make(chan struct{})
				go func() {
					defer close(done)
					test.run(newEnv(r, cfg))
				}()
				<-done
			})
			if len(r.complaints) > 0 {
				found[topic.name+"/"+test.name] = r.complaints
			}
		}
	}
	return found
}

// broken is memstore with one fault: each function, where there is one, takes the place of
// a method of the store or of its claims.
type broken struct {
	*memstore.Store
	key     func(string) string
	options func(*store.ClaimOptions)
	info    func(*store.Info)
	claims  *claims // of all processes

	try     func(c *brokenClaim, ctx context.Context) (store.Grant, error)
	extend  func(c *brokenClaim, ctx context.Context) (store.Grant, error)
	release func(c *brokenClaim, ctx context.Context) error
	wait    func(c *brokenClaim, ctx context.Context, held *store.HeldError) error
	batch   func([]store.Result)
	adopt   func(s *broken, ctx context.Context, ticket string) (store.Claim, store.Grant, error)
	list    func(s *broken, ctx context.Context, prefix string) iter.Seq2[store.Holder, error]
	break_  func(s *broken, ctx context.Context, h store.Holder) error
	inspect func(h *store.Holder)
}

// claims remembers one claim for each name.
type claims struct {
	mu sync.Mutex
	m  map[string]store.Claim
}

func (m *claims) get(name string) store.Claim {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.m[name]
}

func (m *claims) set(name string, c store.Claim) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.m[name] = c
}

type brokenClaim struct {
	inner    atomic.Pointer[store.Claim]
	s        *broken
	key      string
	o        store.ClaimOptions
	released bool
	granted  atomic.Bool
	losses   int
}

func (c *brokenClaim) in() store.Claim       { return *c.inner.Load() }
func (c *brokenClaim) become(sc store.Claim) { c.inner.Store(&sc) }

func (s *broken) Info() store.Info {
	i := s.Store.Info()
	if s.info != nil {
		s.info(&i)
	}
	return i
}

func (s *broken) Claim(key string, o store.ClaimOptions) store.Claim {
	c := &brokenClaim{s: s, key: key, o: o}
	if s.key != nil {
		key = s.key(key)
	}
	if s.options != nil {
		s.options(&o)
	}
	c.become(s.Store.Claim(key, o))
	return c
}

func (c *brokenClaim) Try(ctx context.Context) (g store.Grant, err error) {
	if c.s.try != nil {
		g, err = c.s.try(c, ctx)
	} else {
		g, err = c.in().Try(ctx)
	}
	if err == nil {
		c.granted.Store(true)
		if c.s.options != nil {
			g.TTL = c.o.TTL
		}
	}
	return g, err
}

func (c *brokenClaim) Extend(ctx context.Context) (store.Grant, error) {
	if c.s.extend != nil {
		return c.s.extend(c, ctx)
	}
	g, err := c.in().Extend(ctx)
	if c.s.options != nil {
		g.TTL = c.o.TTL
	}
	return g, err
}

func (c *brokenClaim) Release(ctx context.Context) error {
	if c.s.release != nil {
		return c.s.release(c, ctx)
	}
	return c.in().Release(ctx)
}

func (c *brokenClaim) Wait(ctx context.Context, held *store.HeldError) error {
	if c.s.wait != nil {
		return c.s.wait(c, ctx, held)
	}
	return c.in().(store.Waiter).Wait(ctx, held)
}

func (s *broken) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	results := make([]store.Result, len(claims))
	for i, c := range claims {
		results[i].Grant, results[i].Err = c.Extend(ctx)
	}
	if s.batch != nil {
		s.batch(results)
	}
	return results
}

func (s *broken) Ticket(c store.Claim) (string, error) {
	return s.Store.Ticket(c.(*brokenClaim).in())
}

func (s *broken) Adopt(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	if s.adopt != nil {
		return s.adopt(s, ctx, ticket)
	}
	return s.adoptWell(ctx, ticket)
}

func (s *broken) adoptWell(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	c, g, err := s.Store.Adopt(ctx, ticket)
	if err != nil {
		return nil, g, err
	}
	t, _ := store.ParseTicket(ticket)
	adopted := &brokenClaim{s: s, key: string(t.Key), o: store.ClaimOptions{TTL: t.TTL}}
	adopted.become(c)
	adopted.granted.Store(true)
	return adopted, g, nil
}

func (s *broken) List(ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
	if s.list != nil {
		return s.list(s, ctx, prefix)
	}
	return s.Store.List(ctx, prefix)
}

func (s *broken) Inspect(ctx context.Context, key string) (store.Holder, error) {
	h, err := s.Store.Inspect(ctx, key)
	if s.inspect != nil {
		s.inspect(&h)
	}
	return h, err
}

func (s *broken) Break(ctx context.Context, h store.Holder) error {
	if s.break_ != nil {
		return s.break_(s, ctx, h)
	}
	return s.Store.Break(ctx, h)
}

// take takes the key from whoever holds it.
func (s *broken) take(ctx context.Context, key string) {
	if ctx.Err() == nil {
		_ = s.Store.Lose(key)
	}
}

func keysBy(fold func(string) string) func(*broken) {
	return func(s *broken) { s.key = fold }
}

// faults are the broken stores, each with a test that must find it. Others may, too.
var faults = map[string]struct {
	finds string
	fault func(*broken)
}{
	"a second holder takes the key": {"Exclusion/OneHolder", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			if errors.Is(err, store.ErrHeld) {
				s.take(ctx, c.key)
				return c.in().Try(ctx)
			}
			return g, err
		}
	}},
	"an error of no kind for a held key": {"Exclusion/OneHolder", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			if errors.Is(err, store.ErrHeld) {
				return g, errors.New("redis: nil")
			}
			return g, err
		}
	}},
	"the label is the owner": {"Exclusion/SameLabel", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			if same := s.claims.get(c.key + " " + c.o.Label); same != nil {
				c.become(same)
			}
			g, err := c.in().Try(ctx)
			if err == nil {
				s.claims.set(c.key+" "+c.o.Label, c.in())
			}
			return g, err
		}
	}},
	"the ttl is shorter than promised": {"TTL/DeadHolder", func(s *broken) {
		s.options = func(o *store.ClaimOptions) { o.TTL = max(store.MinTTL, o.TTL/2) }
	}},
	"the ttl is longer than asked": {"TTL/DeadHolder", func(s *broken) {
		s.options = func(o *store.ClaimOptions) { o.TTL *= 3 }
	}},
	"the promise is longer than asked": {"TTL/Promise", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			g.TTL *= 2
			return g, err
		}
	}},
	"a whole ttl is left at any time": {"TTL/Remaining", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			if held := new(store.HeldError); errors.As(err, &held) {
				held.Holder.TTL = c.o.TTL
			}
			return g, err
		}
	}},
	"extension re-acquires": {"Extension/NotAfterExpiry", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Extend(ctx)
			if errors.Is(err, store.ErrLost) {
				c.become(s.Store.Claim(c.key, c.o))
				return c.in().Try(ctx)
			}
			return g, err
		}
	}},
	"a loss is not final": {"Extension/NotAfterExpiry", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Extend(ctx)
			if c.losses++; errors.Is(err, store.ErrLost) && c.losses > 1 {
				c.become(s.Store.Claim(c.key, c.o))
				return c.in().Try(ctx)
			}
			return g, err
		}
	}},
	"extension after release": {"Extension/NotAfterRelease", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Extend(ctx)
			if errors.Is(err, store.ErrReleased) {
				return store.Grant{Token: 1, Owner: "x", TTL: c.o.TTL}, nil
			}
			return g, err
		}
	}},
	"extension takes the key from its holder": {"Extension/NotAfterAnother", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Extend(ctx)
			if errors.Is(err, store.ErrHeld) {
				s.take(ctx, c.key)
			}
			return g, err
		}
	}},
	"extension without a compare": {"Extension/NotInAnothersName", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			if err == nil {
				s.claims.set(c.key, c.in())
			}
			return g, err
		}
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Extend(ctx)
			if errors.Is(err, store.ErrHeld) {
				_, _ = s.claims.get(c.key).Extend(ctx)
			}
			return g, err
		}
	}},
	"extension shortens": {"Extension/NeverShortens", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			time.AfterFunc(c.o.TTL/2, func() { s.take(context.Background(), c.key) })
			return c.in().Extend(ctx)
		}
	}},
	"extension changes the token": {"Extension/Keeps", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Extend(ctx)
			g.Token++
			return g, err
		}
	}},
	"extension extends nothing": {"Extension/Keeps", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			return c.Try(ctx)
		}
	}},
	"extension of what was never granted": {"Extension/NotWithoutGrant", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			if !c.granted.Load() {
				return c.Try(ctx)
			}
			return c.in().Extend(ctx)
		}
	}},
	"answers of a batch in another order": {"Extension/Batch", func(s *broken) {
		s.batch = slices.Reverse[[]store.Result]
	}},
	"a batch fails as a whole": {"Extension/Batch", func(s *broken) {
		s.batch = func(results []store.Result) {
			for i := range results {
				if results[i].Err != nil {
					for j := range results {
						results[j] = results[i]
					}
				}
			}
		}
	}},
	"release compares no owner": {"Release/AfterAnother", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			s.take(ctx, c.key)
			return c.in().Release(ctx)
		}
	}},
	"release frees nothing": {"Release/Frees", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error { return nil }
	}},
	"release is not idempotent": {"Release/Frees", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if c.released {
				return &store.LostError{}
			}
			err := c.in().Release(ctx)
			c.released = err == nil
			return err
		}
	}},
	"release of a lapsed lease succeeds": {"Release/AfterExpiry", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if err := c.in().Release(ctx); !errors.Is(err, store.ErrLost) {
				return err
			}
			return nil
		}
	}},
	"release of a refused claim fails": {"Release/Refused", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if err := c.in().Release(ctx); err != nil || c.granted.Load() {
				return err
			}
			return &store.LostError{}
		}
	}},
	"a late Try is granted":                   {"Release/ThenTry", grantsAfterRelease},
	"a late Try, its caller gone, is granted": {"Uncertainty/TryAfterItsRelease", grantsAfterRelease},
	"tokens restart at each release": {"Tokens/GrowOverReleases", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			g.Token = 1
			return g, err
		}
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Extend(ctx)
			g.Token = 1
			return g, err
		}
	}},
	"tokens fall when a ttl ends": {"Tokens/GrowOverExpiry", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			g.Token = 1<<40 - fence.Token(time.Since(time.Unix(946684800, 0))/time.Millisecond)
			return g, err
		}
	}},
	"tokens are zero": {"Exclusion/OneHolder", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			g.Token = 0
			return g, err
		}
	}},
	"tokens where Info says none": {"Exclusion/OneHolder", func(s *broken) {
		s.info = func(i *store.Info) { i.Fencing = store.FencingNone }
	}},
	"every process has a fingerprint of its own": {"Exclusion/Info", func(s *broken) {
		s.info = func(i *store.Info) { i.Fingerprint = fmt.Sprintf("%p", s) }
	}},
	"a Try is no longer known": {"Uncertainty/TryReplyLostThenTry", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			c.become(s.Store.Claim(c.key, c.o))
			return c.in().Try(ctx)
		}
	}},
	"keys without case":              {"Keys/ByteExact", keysBy(strings.ToLower)},
	"keys without space":             {"Keys/ByteExact", keysBy(strings.TrimSpace)},
	"keys without space at the end":  {"Keys/ByteExact", keysBy(func(k string) string { return strings.TrimRight(k, " ") })},
	"keys as valid UTF-8":            {"Keys/ByteExact", keysBy(func(k string) string { return strings.ToValidUTF8(k, "\ufffd") })},
	"keys as paths":                  {"Keys/ByteExact", keysBy(path.Clean)},
	"keys in one normal form":        {"Keys/ByteExact", keysBy(func(k string) string { return strings.ReplaceAll(k, "e\u0301", "\u00e9") })},
	"keys cut at 511 bytes":          {"Keys/ByteExact", keysBy(func(k string) string { return k[:min(len(k), 511)] })},
	"keys cut at 255 bytes":          {"Keys/ByteExact", keysBy(func(k string) string { return k[:min(len(k), 255)] })},
	"keys cut at the line's end":     {"Keys/ByteExact", keysBy(func(k string) string { k, _, _ = strings.Cut(k, "\n"); return k })},
	"keys by their hash tag":         {"Keys/ByteExact", keysBy(func(k string) string { return strings.NewReplacer("{", "", "}", "").Replace(k) })},
	"keys with percent escapes read": {"Keys/ByteExact", keysBy(func(k string) string { return strings.ReplaceAll(k, "%41", "A") })},
	"keys with quotes halved":        {"Keys/ByteExact", keysBy(func(k string) string { return strings.ReplaceAll(k, "''", "'") })},
	"a key blocks those below it": {"Keys/ByteExact", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			for h := range s.Store.List(ctx, c.key+"/") {
				return store.Grant{}, &store.HeldError{Holder: h}
			}
			return c.in().Try(ctx)
		}
	}},
	"a done context takes": {"Contexts/DoneTakesNothing", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			return c.in().Try(context.WithoutCancel(ctx))
		}
	}},
	"a done context takes, unsaid": {"Contexts/DoneTakesNothing", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(context.WithoutCancel(ctx))
			if ctx.Err() != nil {
				return store.Grant{}, ctx.Err()
			}
			return g, err
		}
	}},
	"a done context is a loss": {"Contexts/DoneLeavesTheLease", func(s *broken) {
		s.extend = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			if ctx.Err() != nil {
				return store.Grant{}, &store.LostError{}
			}
			return c.in().Extend(ctx)
		}
	}},
	"a cancelled Try is forgotten": {"Contexts/CancelledMidCall", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			time.Sleep(time.Millisecond)
			if ctx.Err() != nil {
				return store.Grant{}, ctx.Err()
			}
			return g, err
		}
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if !c.granted.Load() {
				return nil
			}
			return c.in().Release(ctx)
		}
	}},
	"the lease ends with the context of its Try": {"Contexts/LeaseOutlivesContext", func(s *broken) {
		s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
			g, err := c.in().Try(ctx)
			if err == nil {
				context.AfterFunc(ctx, func() { _ = s.Store.Lose(c.key) })
			}
			return g, err
		}
	}},
	"Wait is not woken": {"Waiting/Release", func(s *broken) {
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			return Delay(held.Holder.TTL)(ctx, func(context.Context) error { return nil })
		}
	}},
	"Wait misses what was before it": {"Waiting/ReleaseBeforeWait", func(s *broken) {
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			return Delay(held.Holder.TTL)(ctx, func(context.Context) error { return nil })
		}
	}},
	"Wait knows no context": {"Waiting/Cancelled", func(s *broken) {
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			return c.in().(store.Waiter).Wait(context.WithoutCancel(ctx), held)
		}
	}},
	"Wait goes on when the grant does": {"Waiting/ReturnsAtTheEnd", func(s *broken) {
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			for {
				if h, err := s.Store.Inspect(ctx, c.key); err != nil || h.Owner == "" {
					return err
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
	}},
	"a withdrawn waiter keeps its place": {"Waiting/Cancelled", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if !c.granted.Load() {
				return nil
			}
			return c.in().Release(ctx)
		}
	}},
	"waiters ask when they like": {"Queue/InOrder", func(s *broken) {
		s.options = func(o *store.ClaimOptions) { o.Wait = false }
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			return Delay(rand.N(20*time.Millisecond))(ctx, func(context.Context) error { return nil })
		}
	}},
	"waiters poll": {"Queue/AsksSeldom", func(s *broken) {
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			return Delay(250*time.Millisecond)(ctx, func(context.Context) error { return nil })
		}
	}},
	"the second hand-over wakes nobody": {"Queue/Woken", func(s *broken) {
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			if held.Holder.Token%2 == 0 {
				return Delay(held.Holder.TTL)(ctx, func(context.Context) error { return nil })
			}
			return c.in().(store.Waiter).Wait(ctx, held)
		}
	}},
	"a withdrawal takes the key": {"Queue/WithdrawnAtItsTurn", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if !c.granted.Load() {
				_, err := c.in().Try(ctx)
				if err == nil {
					return nil
				}
			}
			return c.in().Release(ctx)
		}
	}},
	"a withdrawal between release and Try takes the key": {"Queue/WithdrawalRacesRelease", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if !c.granted.Load() {
				if h, _ := s.Store.Inspect(ctx, c.key); h.Owner == "" {
					_, _ = c.in().Try(ctx)
					return nil
				}
			}
			return c.in().Release(ctx)
		}
	}},
	"a place ends with the waiter behind it": {"Queue/PlaceOfTheCancelled", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if !c.granted.Load() {
				s.claims.set(c.key+" withdrawn", c)
			}
			return c.in().Release(ctx)
		}
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			err := c.in().(store.Waiter).Wait(ctx, held)
			if s.claims.get(c.key+" withdrawn") != nil {
				return Delay(held.Holder.TTL)(ctx, func(context.Context) error { return err })
			}
			return err
		}
	}},
	"Wait takes its time": {"Queue/ReturnsAtOnce", func(s *broken) {
		s.wait = func(c *brokenClaim, ctx context.Context, held *store.HeldError) error {
			err := c.in().(store.Waiter).Wait(ctx, held)
			time.Sleep(500 * time.Millisecond)
			return err
		}
	}},
	"a withdrawn waiter stays in the queue": {"Queue/LeavesNothing", func(s *broken) {
		s.release = func(c *brokenClaim, ctx context.Context) error {
			if !c.granted.Load() {
				return nil
			}
			return c.in().Release(ctx)
		}
	}},
	"the queue is told backwards": {"Queue/Inspected", func(s *broken) {
		s.inspect = func(h *store.Holder) { slices.Reverse(h.Queue) }
	}},
	"a ticket acquires": {"Adoption/Lapsed", func(s *broken) {
		s.adopt = func(s *broken, ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
			c, g, err := s.adoptWell(ctx, ticket)
			if errors.Is(err, store.ErrLost) {
				t, _ := store.ParseTicket(ticket)
				c = s.Claim(string(t.Key), store.ClaimOptions{TTL: t.TTL})
				g, err = c.Try(ctx)
			}
			return c, g, err
		}
	}},
	"a ticket takes the key from its holder": {"Adoption/Taken", func(s *broken) {
		s.adopt = func(s *broken, ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
			c, g, err := s.adoptWell(ctx, ticket)
			if errors.Is(err, store.ErrHeld) {
				t, _ := store.ParseTicket(ticket)
				s.take(ctx, string(t.Key))
			}
			return c, g, err
		}
	}},
	"an adopted lease has a new token": {"Adoption/RoundTrip", func(s *broken) {
		s.adopt = func(s *broken, ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
			c, g, err := s.adoptWell(ctx, ticket)
			g.Token++
			return c, g, err
		}
	}},
	"a damaged ticket is a lapsed one": {"Adoption/Damaged", func(s *broken) {
		s.adopt = func(s *broken, ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
			c, g, err := s.adoptWell(ctx, ticket)
			if errors.Is(err, store.ErrInvalid) {
				err = &store.LostError{}
			}
			return c, g, err
		}
	}},
	"List knows no prefix": {"Inspection/List", func(s *broken) {
		s.list = func(s *broken, ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
			return s.Store.List(ctx, "")
		}
	}},
	"List takes a prefix for a pattern": {"Inspection/ListHostilePrefix", func(s *broken) {
		s.list = func(s *broken, ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
			return func(yield func(store.Holder, error) bool) {
				for h, err := range s.Store.List(ctx, "") {
					if ok, _ := path.Match(prefix+"*", h.Key[:min(len(h.Key), len(prefix)+5)]); err != nil || ok || strings.HasPrefix(h.Key, prefix) {
						if !yield(h, err) {
							return
						}
					}
				}
			}
		}
	}},
	"Break compares no owner": {"Inspection/BreakWrongOwner", func(s *broken) {
		s.break_ = func(s *broken, ctx context.Context, h store.Holder) error {
			s.take(ctx, h.Key)
			return ctx.Err()
		}
	}},
	"Break frees the key at once": {"Inspection/Break", func(s *broken) {
		s.break_ = func(s *broken, ctx context.Context, h store.Holder) error {
			err := s.Store.Break(ctx, h)
			if err == nil {
				s.take(ctx, h.Key)
			}
			return err
		}
	}},
	"Break takes a free key": {"Inspection/BreakFormer", func(s *broken) {
		s.break_ = func(s *broken, ctx context.Context, h store.Holder) error {
			err := s.Store.Break(ctx, h)
			if errors.Is(err, store.ErrLost) {
				_, _ = s.Store.Claim(h.Key, store.ClaimOptions{TTL: time.Hour}).Try(ctx)
			}
			return err
		}
	}},
	"Break breaks nothing": {"Inspection/Break", func(s *broken) {
		s.break_ = func(s *broken, ctx context.Context, h store.Holder) error { return ctx.Err() }
	}},
	"Break breaks with a done context": {"Inspection/DoneContext", func(s *broken) {
		s.break_ = func(s *broken, ctx context.Context, h store.Holder) error {
			if err := s.Store.Break(context.WithoutCancel(ctx), h); err != nil {
				return err
			}
			return ctx.Err()
		}
	}},
}

func grantsAfterRelease(s *broken) {
	s.try = func(c *brokenClaim, ctx context.Context) (store.Grant, error) {
		g, err := c.in().Try(ctx)
		if errors.Is(err, store.ErrReleased) {
			return s.Store.Claim(c.key, c.o).Try(ctx)
		}
		return g, err
	}
}

// The suite passes a store without a fault, and finds each broken one.
func TestSuiteBites(t *testing.T) {
	harness := func(fault func(*broken)) func(testing.TB) Harness {
		return func(testing.TB) Harness {
			s, all := memstore.New(), &claims{m: map[string]store.Claim{}}
			return Harness{Open: func() store.Store {
				b := &broken{Store: s.Peer(), claims: all}
				fault(b)
				return b
			}}
		}
	}
	for test, found := range complaints(t, Config{New: harness(func(*broken) {}), Fair: true}) {
		t.Errorf("a sound store fails %s: %s", test, found)
	}
	for name, f := range faults {
		t.Run(name, func(t *testing.T) {
			found := complaints(t, Config{New: harness(f.fault), Fair: true})
			if found[f.finds] == nil {
				t.Errorf("%s does not find it; complaints: %v", f.finds, found)
			}
		})
	}
}

// brokenLinks are stores that misjudge what the loss of a request or a reply means. Each
// is given the sound store's faults, and wraps what that answers.
var brokenLinks = map[string]struct {
	finds string
	fault func(*Faults) Link
}{
	"a lost reply is unavailability": {"Uncertainty/TryReplyLostThenRelease", func(f *Faults) Link {
		return brokenLink{f, LoseRequest, func(ctx context.Context, call func(context.Context) error) error {
			_ = LoseReply(ctx, call)
			return store.ErrUnavailable
		}}
	}},
	"an unanswered extension is a loss": {"Uncertainty/ExtendReplyLost", func(f *Faults) Link {
		return brokenLink{f, LoseRequest, func(ctx context.Context, call func(context.Context) error) error {
			_ = LoseReply(ctx, call)
			return &store.LostError{}
		}}
	}},
	"an unanswered release succeeds": {"Uncertainty/ReleaseRequestLost", func(f *Faults) Link {
		return brokenLink{f, func(context.Context, func(context.Context) error) error { return nil }, LoseReply}
	}},
	"a call hangs": {"Contexts/ReturnsSoon", func(f *Faults) Link {
		return brokenLink{f, LoseRequest, func(ctx context.Context, call func(context.Context) error) error {
			return DelayReply(time.Minute)(context.WithoutCancel(ctx), call)
		}}
	}},
	"a link that loses nothing": {"Uncertainty/ExtendRequestLost", func(f *Faults) Link {
		return brokenLink{f, nil, nil}
	}},
}

type brokenLink struct {
	faults         *Faults
	request, reply Fault
}

func (l brokenLink) LoseRequests() { l.faults.SetAll(l.request) }
func (l brokenLink) LoseReplies()  { l.faults.SetAll(l.reply) }
func (l brokenLink) Heal()         { l.faults.Heal() }
func (l brokenLink) Hits() int     { return faultLink{l.faults}.Hits() }

func TestSuiteBitesBrokenLinks(t *testing.T) {
	for name, f := range brokenLinks {
		t.Run(name, func(t *testing.T) {
			found := complaints(t, Config{New: func(testing.TB) Harness {
				s := memstore.New()
				return Harness{
					Open: func() store.Store { return s.Peer() },
					OpenFaulty: func() (store.Store, Link) {
						faulty, faults := NewFaults(s.Peer())
						return faulty, f.fault(faults)
					},
				}
			}})
			if found[f.finds] == nil {
				t.Errorf("%s does not find it; complaints: %v", f.finds, found)
			}
		})
	}
}

// Two processes that do not reach the same state are found out.
func TestSuiteFindsSeparateStates(t *testing.T) {
	found := complaints(t, Config{New: func(testing.TB) Harness {
		return Harness{Open: func() store.Store { return memstore.New() }}
	}})
	if found["Exclusion/OneHolder"] == nil {
		t.Errorf("stores that share nothing pass: %v", found)
	}
}
