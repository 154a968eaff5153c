package fencetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// recorder takes the complaints of a test that is meant to fail.
type recorder struct {
	testing.TB
	mu         sync.Mutex
	complaints []string
}

func (r *recorder) Helper() {}
func (r *recorder) Errorf(f string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.complaints = append(r.complaints, fmt.Sprintf(f, args...))
}

// complaints runs the suite and answers what each failing test complains of.
func complaints(t *testing.T, h Harness, patience time.Duration) map[string][]string {
	found := map[string][]string{}
	for _, test := range tests {
		if test.reopens && h.Reopen == nil {
			continue
		}
		r := &recorder{TB: t}
		e := newEnv(r, h)
		e.patience = patience
		test.run(e)
		if len(r.complaints) > 0 {
			found[test.name] = r.complaints
		}
	}
	return found
}

// marks are what all guards of one test share.
type marks struct {
	mu   sync.Mutex
	seen map[string]fence.Token
}

// broken is a guard with one fault: each function, where there is one, takes the place of a
// part of a sound one.
type broken struct {
	*marks
	rows  bool // a resource must have been made
	name  func(string) string
	less  func(a, b fence.Token) bool
	keep  func(fence.Token) fence.Token
	args  func(ctx context.Context, r string, t fence.Token) error
	stale func(ctx context.Context, r string, t, seen fence.Token) error
	claim func(b *broken, ctx context.Context, r string, t fence.Token) error
	check func(b *broken, ctx context.Context, r string, t fence.Token) error
}

func newBroken(m *marks, fault func(*broken)) *broken {
	b := &broken{
		marks: m,
		name:  func(r string) string { return r },
		less:  func(a, b fence.Token) bool { return a < b },
		keep:  func(t fence.Token) fence.Token { return t },
		args: func(ctx context.Context, r string, t fence.Token) error {
			if err := fence.CheckResource(r); err != nil {
				return err
			}
			if err := fence.CheckToken(t); err != nil {
				return err
			}
			return ctx.Err()
		},
		stale: fence.Stale,
		claim: (*broken).soundClaim,
		check: (*broken).soundCheck,
	}
	fault(b)
	return b
}

func (b *broken) Claim(ctx context.Context, r string, t fence.Token) error {
	if err := b.args(ctx, r, t); err != nil {
		return err
	}
	return b.claim(b, ctx, r, t)
}

func (b *broken) Check(ctx context.Context, r string, t fence.Token) error {
	if err := b.args(ctx, r, t); err != nil {
		return err
	}
	return b.check(b, ctx, r, t)
}

func (b *broken) soundClaim(ctx context.Context, r string, t fence.Token) error {
	b.mu.Lock()
	seen, ok := b.seen[b.name(r)]
	if b.rows && !ok {
		b.mu.Unlock()
		return &fence.Error{Kind: fence.ErrNoResource, Resource: r}
	}
	if seen != 0 && b.less(t, seen) {
		b.mu.Unlock()
		return b.stale(ctx, r, t, seen)
	}
	b.seen[b.name(r)] = b.keep(t)
	b.mu.Unlock()
	return nil
}

func (b *broken) soundCheck(ctx context.Context, r string, t fence.Token) error {
	seen, ok := b.get(r)
	switch {
	case !ok:
		return &fence.Error{Kind: fence.ErrNoResource, Resource: r}
	case seen == 0 || b.less(seen, t):
		return &fence.Error{Kind: fence.ErrUnclaimed, Resource: r}
	case b.less(t, seen):
		return b.stale(ctx, r, t, seen)
	}
	return nil
}

func (b *broken) get(r string) (t fence.Token, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t, ok = b.seen[b.name(r)]
	return t, ok
}

func (b *broken) set(r string, t fence.Token) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seen[b.name(r)] = t
}

func names(f func(string) string) func(*broken) { return func(b *broken) { b.name = f } }

// checks says what Check answers where there is a mark.
func checks(f func(b *broken, ctx context.Context, r string, t, seen fence.Token) error) func(*broken) {
	return func(b *broken) {
		b.check = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			if seen, ok := b.get(r); ok && seen != 0 {
				return f(b, ctx, r, t, seen)
			}
			return b.soundCheck(ctx, r, t)
		}
	}
}

// faults says of each fault which test finds it.
var faults = map[string]struct {
	finds string
	fault func(*broken)
}{
	"tokens are compared as text": {"Tokens", func(b *broken) {
		b.less = func(a, b fence.Token) bool { return a.String() < b.String() }
	}},
	"tokens are compared as doubles": {"Tokens", func(b *broken) {
		b.less = func(a, b fence.Token) bool { return float64(a) < float64(b) }
	}},
	"tokens are compared by a difference": {"BadToken", func(b *broken) { // that wraps
		b.less = func(a, b fence.Token) bool { return a-b < 0 }
		b.args = func(ctx context.Context, r string, t fence.Token) error {
			if err := fence.CheckResource(r); err != nil || t == 0 {
				return err
			}
			return ctx.Err()
		}
	}},
	"marks are kept as doubles": {"Tokens", func(b *broken) {
		b.keep = func(t fence.Token) fence.Token {
			if t > 1<<62 {
				return math.MaxInt64
			}
			return fence.Token(float64(t))
		}
	}},
	"marks are kept in 32 bits": {"Tokens", func(b *broken) {
		b.keep = func(t fence.Token) fence.Token { return fence.Token(min(t, math.MaxInt32)) }
	}},
	"names without case":              {"Names", names(strings.ToLower)},
	"names without space at the end":  {"Names", names(func(r string) string { return strings.TrimRight(r, " ") })},
	"names in one normal form":        {"Names", names(func(r string) string { return strings.ReplaceAll(r, "e\u0301", "\u00e9") })},
	"names without accents":           {"Names", names(func(r string) string { return strings.ReplaceAll(r, "\u00e9", "e") })},
	"names cut at 255 bytes":          {"Names", names(func(r string) string { return r[:min(len(r), 255)] })},
	"names cut at 511 bytes":          {"Names", names(func(r string) string { return r[:min(len(r), 511)] })},
	"names cut at the line's end":     {"Names", names(func(r string) string { r, _, _ = strings.Cut(r, "\n"); return r })},
	"names with quotes halved":        {"Names", names(func(r string) string { return strings.ReplaceAll(r, "''", "'") })},
	"names with backslashes read":     {"Names", names(func(r string) string { return strings.ReplaceAll(r, `\\`, `\`) })},
	"names with percent escapes read": {"Names", names(func(r string) string { return strings.ReplaceAll(r, "%41", "A") })},
	"names as numbers":                {"Names", names(func(r string) string { return strings.TrimLeft(r, "0") })},
	"names of the basic plane":        {"Names", names(func(r string) string { return strings.ReplaceAll(r, "\U0001f512", "\U0001f513") })},
	"one mark for all":                {"ManyResources", names(func(string) string { return "" })},
	"names are cut at NUL": {"BadResource", func(b *broken) {
		b.args = func(ctx context.Context, r string, t fence.Token) error {
			return errors.Join(fence.CheckToken(t), ctx.Err())
		}
		b.name = func(r string) string { r, _, _ = strings.Cut(r, "\x00"); return r }
	}},
	"read, then write": {"Concurrent", func(b *broken) {
		b.claim = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			if seen, ok := b.get(r); ok && t < seen {
				return fence.Stale(ctx, r, t, seen)
			}
			time.Sleep(10 * time.Microsecond)
			b.set(r, t)
			return nil
		}
	}},
	"says stale of what was never shown": {"Concurrent", func(b *broken) {
		b.claim = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			err := b.soundClaim(ctx, r, t)
			if s := (*fence.StaleError)(nil); errors.As(err, &s) && s.Seen == tokens {
				s.Seen++
			}
			return err
		}
	}},
	"an equal token is refused": {"Claim", func(b *broken) {
		b.claim = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			if seen, _ := b.get(r); seen == t {
				return &fence.Error{Kind: fence.ErrApplied, Resource: r}
			}
			return b.soundClaim(ctx, r, t)
		}
	}},
	"a stale claim lowers the mark": {"ClaimStale", func(b *broken) {
		b.claim = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			err := b.soundClaim(ctx, r, t)
			b.set(r, t)
			return err
		}
	}},
	"a stale claim passes, unwritten": {"ClaimStale", func(b *broken) {
		b.stale = func(context.Context, string, fence.Token, fence.Token) error { return nil }
	}},
	"a stale claim is bare": {"ClaimStale", func(b *broken) {
		b.stale = func(context.Context, string, fence.Token, fence.Token) error { return fence.ErrStale }
	}},
	"a stale claim names the token as seen": {"ClaimStale", func(b *broken) {
		b.stale = func(ctx context.Context, r string, t, _ fence.Token) error { return fence.Stale(ctx, r, t, t+1) }
	}},
	"Check raises the mark": {"Check", func(b *broken) {
		b.check = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			err := b.soundCheck(ctx, r, t)
			if errors.Is(err, fence.ErrUnclaimed) {
				b.set(r, t)
			}
			return err
		}
	}},
	"Check makes a mark": {"Check", func(b *broken) {
		b.check = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			err := b.soundCheck(ctx, r, t)
			if errors.Is(err, fence.ErrNoResource) {
				b.set(r, t)
			}
			return err
		}
	}},
	"Check takes a token above the mark": {"Check", checks(func(b *broken, ctx context.Context, r string, t, seen fence.Token) error {
		if t < seen {
			return fence.Stale(ctx, r, t, seen)
		}
		return nil
	})},
	"Check takes a token below the mark": {"Check", checks(func(b *broken, ctx context.Context, r string, t, seen fence.Token) error {
		if t > seen {
			return &fence.Error{Kind: fence.ErrUnclaimed, Resource: r}
		}
		return nil
	})},
	"Check cannot tell larger from smaller": {"Check", checks(func(b *broken, ctx context.Context, r string, t, seen fence.Token) error {
		if t != seen {
			return &fence.Error{Kind: fence.ErrUnclaimed, Resource: r}
		}
		return nil
	})},
	"an error of no kind": {"Missing", func(b *broken) {
		b.check = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			if _, ok := b.get(r); !ok {
				return errors.New("sql: no rows in result set")
			}
			return b.soundCheck(ctx, r, t)
		}
	}},
	"an error of two lines": {"Missing", func(b *broken) {
		b.check = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			if err := b.soundCheck(ctx, r, t); errors.Is(err, fence.ErrNoResource) {
				return errors.Join(err, errors.New("no rows"))
			} else {
				return err
			}
		}
	}},
	"tokens are not looked at": {"BadToken", func(b *broken) {
		b.args = func(ctx context.Context, r string, _ fence.Token) error {
			if err := fence.CheckResource(r); err != nil {
				return err
			}
			return ctx.Err()
		}
	}},
	"a bad token is refused without its value": {"BadToken", func(b *broken) {
		sound := b.args
		b.args = func(ctx context.Context, r string, t fence.Token) error {
			err := sound(ctx, r, t)
			if i := (*fence.InvalidError)(nil); errors.As(err, &i) && i.Field == "token" {
				i.Value = ""
			}
			return err
		}
	}},
	"bytes that are no UTF-8 are replaced": {"BadResource", func(b *broken) {
		sound := b.args
		b.args = func(ctx context.Context, r string, t fence.Token) error {
			return sound(ctx, string(bytes.ToValidUTF8([]byte(r), []byte("\ufffd"))), t)
		}
		b.name = func(r string) string { return strings.ToValidUTF8(r, "\ufffd") }
	}},
	"ctx is ignored": {"DoneContext", func(b *broken) {
		sound := b.args
		b.args = func(ctx context.Context, r string, t fence.Token) error {
			return sound(context.WithoutCancel(ctx), r, t)
		}
	}},
	"a done ctx claims, unsaid": {"DoneContext", func(b *broken) {
		sound := b.args
		b.args = func(ctx context.Context, r string, t fence.Token) error {
			return sound(context.WithoutCancel(ctx), r, t)
		}
		b.claim = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			return errors.Join(b.soundClaim(ctx, r, t), ctx.Err())
		}
	}},
	"a done ctx hides a bad argument": {"DoneContext", func(b *broken) {
		sound := b.args
		b.args = func(ctx context.Context, r string, t fence.Token) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return sound(ctx, r, t)
		}
	}},
	"the holder is not told": {"Holder", func(b *broken) {
		b.stale = func(_ context.Context, r string, t, seen fence.Token) error {
			return &fence.StaleError{Resource: r, Token: t, Seen: seen}
		}
	}},
	"the holder is not told by Check": {"Holder", checks(func(b *broken, ctx context.Context, r string, t, seen fence.Token) error {
		return b.soundCheck(context.WithoutCancel(context.Background()), r, t)
	})},
	"the holder is told twice": {"Holder", func(b *broken) {
		b.stale = func(ctx context.Context, r string, t, seen fence.Token) error {
			_ = fence.Stale(ctx, r, t, seen)
			return fence.Stale(ctx, r, t, seen)
		}
	}},
	"the innermost holder is told": {"Holder", func(b *broken) {
		b.stale = func(ctx context.Context, r string, t, seen fence.Token) error {
			_, mine, _ := fence.Innermost(ctx)
			_ = fence.Stale(ctx, r, mine, seen)
			return &fence.StaleError{Resource: r, Token: t, Seen: seen}
		}
	}},
	"the holder is told of an unclaimed token": {"Holder", checks(func(b *broken, ctx context.Context, r string, t, seen fence.Token) error {
		if seen == 9 && t == 10 {
			_ = fence.Stale(ctx, r, 5, seen)
		}
		return b.soundCheck(ctx, r, t)
	})},
	"the holder is told under the lock": {"HolderAsksTheGuard", func(b *broken) {
		b.stale = func(ctx context.Context, r string, t, seen fence.Token) error {
			b.mu.Lock()
			defer b.mu.Unlock()
			return fence.Stale(ctx, r, t, seen)
		}
	}},
	"marks are remembered beside the store": {"Reopen", func(b *broken) {
		cached := &marks{seen: map[string]fence.Token{}}
		b.check = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			c := *b
			if c.marks = cached; c.seen[r] == 0 {
				c.marks = b.marks
			}
			return c.soundCheck(ctx, r, t)
		}
		b.claim = func(b *broken, ctx context.Context, r string, t fence.Token) error {
			err := b.soundClaim(ctx, r, t)
			cached.mu.Lock()
			defer cached.mu.Unlock()
			if err == nil {
				cached.seen[r] = t
			}
			return err
		}
	}},
}

func newMarks() *marks { return &marks{seen: map[string]fence.Token{}} }

func harness(fault func(*broken)) Harness {
	return Harness{
		New:    func(testing.TB) fence.Guard { return newBroken(newMarks(), fault) },
		Reopen: func(_ testing.TB, g fence.Guard) fence.Guard { return newBroken(g.(*broken).marks, fault) },
	}
}

// rows is a harness of a guard whose resources are rows of a table, without a mark at first.
func rows(fault func(*broken)) Harness {
	m := newMarks()
	h := harness(fault)
	h.New = func(testing.TB) fence.Guard {
		b := newBroken(m, fault)
		b.rows = true
		return b
	}
	h.Reopen = nil
	h.Resource = func(_ testing.TB, name string) string {
		if len(name) < fence.MaxResourceLen {
			name = "#" + name // as a database that gives numbers to its rows
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.seen[name] = 0
		return name
	}
	h.MissingIsError = true
	return h
}

func sound(*broken) {}

// The suite passes guards without a fault, and finds each broken one.
func TestSuiteBites(t *testing.T) {
	for name, h := range map[string]Harness{"a sound guard": harness(sound), "a sound guard of rows": rows(sound)} {
		for test, found := range complaints(t, h, patience) {
			t.Errorf("%s fails %s: %s", name, test, found)
		}
	}
	for name, f := range faults {
		t.Run(name, func(t *testing.T) {
			found := complaints(t, harness(f.fault), 100*time.Millisecond)
			if found[f.finds] == nil {
				t.Errorf("%s does not find it; complaints: %v", f.finds, found)
			}
		})
	}
}

// A guard that forgets its marks is found, and so is one that makes rows of its own.
func TestSuiteBitesHarnesses(t *testing.T) {
	forgets := harness(sound)
	forgets.Reopen = func(testing.TB, fence.Guard) fence.Guard { return newBroken(newMarks(), sound) }
	makes := rows(sound)
	guard := makes.New
	makes.New = func(t testing.TB) fence.Guard {
		g := guard(t).(*broken)
		g.rows = false
		return g
	}
	for name, c := range map[string]struct {
		finds string
		h     Harness
	}{"forgets": {"Reopen", forgets}, "makes rows": {"Missing", makes}} {
		if found := complaints(t, c.h, patience); found[c.finds] == nil {
			t.Errorf("%s: %s does not find it; complaints: %v", name, c.finds, found)
		}
	}
}
