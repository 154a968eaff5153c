package redisguard_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/servertest"
)

// write is one of the guarded writes, with what it does to the keys of a resource.
type write struct {
	name string
	do   func(g *redisfence.Guard, ctx ctx, resource string, t fence.Token) error
	look []string // shows what it did
	want any
}

func writes(t testing.TB, resource string) []write {
	key := func(kind string) string { return "{" + resource + "}" + kind }
	return []write{
		{"Set", func(g *redisfence.Guard, ctx ctx, r string, t fence.Token) error {
			return g.Set(ctx, r, t, key("set"), "new\r\n\x00", 0)
		}, []string{"GET", key("set")}, "new\r\n\x00"},
		{"HSet", func(g *redisfence.Guard, ctx ctx, r string, t fence.Token) error {
			return g.HSet(ctx, r, t, key("hash"), map[string]string{"a": "new", "b": "2"})
		}, []string{"HMGET", key("hash"), "a", "b", "c"}, []any{"new", "2", "kept"}},
		{"Del", func(g *redisfence.Guard, ctx ctx, r string, t fence.Token) error {
			return g.Del(ctx, r, t, key("del"), key("none"), key("del2"))
		}, []string{"EXISTS", key("del"), key("del2")}, int64(0)},
		{"IncrBy", func(g *redisfence.Guard, ctx ctx, r string, t fence.Token) error {
			n, err := g.IncrBy(ctx, r, t, key("int"), -7)
			if err == nil && n != 1<<53+1-7 {
				return fmt.Errorf("sum is %d", n)
			}
			return err
		}, []string{"GET", key("int")}, strconv.Itoa(1<<53 + 1 - 7)},
		{"script", func(g *redisfence.Guard, ctx ctx, r string, tok fence.Token) error {
			s, err := g.NewScript("return redis.call('RPUSH', KEYS[1], ARGV[1])")
			if err != nil {
				return err
			}
			_, err = s.Run(ctx, r, tok, []string{key("list")}, []string{"new"})
			return err
		}, []string{"LRANGE", key("list"), "0", "-1"}, []any{"old", "new"}},
	}
}

// fill puts what the writes change.
func fill(t testing.TB, s *servertest.RedisServer, resource string) {
	t.Helper()
	key := func(kind string) string { return "{" + resource + "}" + kind }
	rig.Must(t, s, "SET", key("set"), "old", "PX", "9999999")
	rig.Must(t, s, "HSET", key("hash"), "a", "old", "c", "kept")
	rig.Must(t, s, "MSET", key("del"), "x", key("del2"), "y", key("int"), strconv.Itoa(1<<53+1))
	rig.Must(t, s, "RPUSH", key("list"), "old")
}

func TestWrites(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		for i, w := range writes(t, "r") {
			r := "r" // a mark each
			rig.Must(t, s, "FLUSHALL")
			fill(t, s, r)
			before := rig.Must(t, s, w.look...)
			want(t, "Claim", g.Claim(t.Context(), r, 5), nil)

			err := w.do(g, t.Context(), r, 4)
			want(t, w.name+" of 4 after 5", err, fence.ErrStale)
			var stale *fence.StaleError
			if !errors.As(err, &stale) || *stale != (fence.StaleError{Resource: r, Token: 4, Seen: 5}) {
				t.Errorf("%s: %#v", w.name, stale)
			}
			if now := rig.Must(t, s, w.look...); !reflect.DeepEqual(now, before) {
				t.Errorf("a stale %s wrote %v", w.name, now)
			}
			next := fence.Token(5 + i%2) // the claimed one, or one that the write itself claims
			want(t, w.name, w.do(g, t.Context(), r, next), nil)
			if now := rig.Must(t, s, w.look...); !reflect.DeepEqual(now, w.want) {
				t.Errorf("%s wrote %q, want %q", w.name, now, w.want)
			}
			if mark := value(t, s, g.MarkKey(r)); mark != next.String() {
				t.Errorf("%s left the mark at %v", w.name, mark)
			}
			want(t, "Claim of 7", g.Claim(t.Context(), r, 7), nil)
			want(t, w.name+" of 6 after 7", w.do(g, t.Context(), r, 6), fence.ErrStale)
		}
		if pttl := rig.Must(t, s, "PTTL", g.MarkKey("r")); pttl != int64(-1) {
			t.Errorf("the mark's ttl is %v", pttl)
		}
	})
}

func TestTTL(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		for ttl, most := range map[time.Duration]int64{time.Hour: 3600_000, 0: -1, math.MaxInt64: math.MaxInt64 / 1_000_000} {
			want(t, "Set", g.Set(t.Context(), "r", 1, "{r}k", "v", ttl), nil)
			got := rig.Must(t, s, "PTTL", "{r}k").(int64)
			if got > most || got < most-int64(patience/time.Millisecond) || (got == -1) != (ttl == 0) {
				t.Errorf("ttl %v: PTTL %d", ttl, got)
			}
		}
		want(t, "Set", g.Set(t.Context(), "r", 1, "{r}k", "v", time.Nanosecond), nil)
		servertest.Eventually(t, patience, func() error {
			if v := value(t, s, "{r}k"); v != nil {
				return fmt.Errorf("still %v", v)
			}
			return nil
		})
	})
}

// More fields and keys than Lua can unpack at once are still one write.
func TestManyFieldsAndKeys(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		const n = 10_001
		fields, mset, keys := map[string]string{}, []string{"MSET"}, []string(nil)
		for i := range n {
			fields["f"+strconv.Itoa(i)] = strconv.Itoa(i)
			keys = append(keys, "{r}"+strconv.Itoa(i))
			mset = append(mset, keys[i], "x")
		}
		rig.Must(t, s, mset...)
		want(t, "HSet", g.HSet(t.Context(), "r", 1, "{r}h", fields), nil)
		if v := rig.Must(t, s, "HLEN", "{r}h"); v != int64(n) {
			t.Errorf("%v fields", v)
		}
		if v := rig.Must(t, s, "HGET", "{r}h", "f7777"); v != "7777" {
			t.Errorf("f7777 is %v", v)
		}
		want(t, "Del", g.Del(t.Context(), "r", 1, keys...), nil)
		if v := rig.Must(t, s, "DBSIZE"); v != int64(2) {
			t.Errorf("%v keys are left, want the hash and the mark", v)
		}
	})
}

var edges = []fence.Token{1, 9, 10, 99, 100, 1<<31 - 1, 1 << 31, 1<<53 - 1, 1 << 53, 1<<53 + 1, 1<<53 + 2, 999999999999999999,
	1000000000000000000, 1<<63 - 1025, 1<<63 - 1024, 1<<63 - 3, 1<<63 - 2, 1<<63 - 1}

// Tokens are compared as int64s: all pairs around the edges, and random ones. (TOK-08)
func TestOrder(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		pair := func(first, second fence.Token) {
			t.Helper()
			rig.Must(t, s, "DEL", g.MarkKey("r"))
			want(t, "the first", g.Set(t.Context(), "r", first, "r", first.String(), 0), nil)
			err := g.Set(t.Context(), "r", second, "r", second.String(), 0)
			var stale *fence.StaleError
			if errors.As(err, &stale) != (second < first) || second >= first && err != nil {
				t.Errorf("%v after %v: %v", second, first, err)
			} else if stale != nil && (stale.Seen != first || stale.Token != second) {
				t.Errorf("%v after %v: %+v", second, first, stale)
			}
			if v, most := value(t, s, "r"), max(first, second).String(); v != most {
				t.Errorf("%v after %v: %v was written last", second, first, v)
			}
		}
		for _, first := range edges {
			for _, second := range edges {
				pair(first, second)
			}
		}
		rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))
		random := func() fence.Token { return fence.Token(rnd.Int64N(math.MaxInt64)>>rnd.IntN(62) + 1) }
		for range kit.Count(300, 20_000) {
			first := random()
			second := random()
			switch rnd.IntN(3) {
			case 0: // close to it
				second = max(1, first-5+fence.Token(min(rnd.Int64N(11), math.MaxInt64-int64(first)+5)))
			case 1: // of the same length
				b := []byte(first.String())
				b[rnd.IntN(len(b))] = '1' + byte(rnd.IntN(9))
				if n, err := fence.ParseToken(string(b)); err == nil {
					second = n
				}
			}
			pair(first, second)
		}
	})
}

// A sum is exact, and refused beyond int64. (TOK-08)
func TestIncrBy(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		for _, tt := range []struct {
			was any
			n   int64
			sum int64
			bad string
		}{
			{nil, 5, 5, ""},
			{nil, math.MinInt64, math.MinInt64, ""},
			{1<<53 - 1, 1, 1 << 53, ""},
			{1<<53 - 1, 2, 1<<53 + 1, ""},
			{1<<62 + 1, 0, 1<<62 + 1, ""},
			{math.MaxInt64 - 1, 1, math.MaxInt64, ""},
			{math.MaxInt64, 1, 0, "overflow"},
			{math.MinInt64, -1, 0, "overflow"},
			{math.MaxInt64, math.MinInt64, -1, ""},
			{"x", 1, 0, "not an integer"},
			{"1.5", 1, 0, "not an integer"},
			{"9223372036854775808", 1, 0, "not an integer"},
		} {
			rig.Must(t, s, "DEL", "r")
			if tt.was != nil {
				rig.Must(t, s, "SET", "r", fmt.Sprint(tt.was))
			}
			sum, err := g.IncrBy(t.Context(), "r", 1, "r", tt.n)
			if tt.bad != "" {
				want(t, fmt.Sprint(tt), err, fence.ErrInvalid, tt.bad)
				if v := value(t, s, "r"); v != fmt.Sprint(tt.was) {
					t.Errorf("%v: the key holds %v", tt, v)
				}
				continue
			}
			if err != nil || sum != tt.sum || value(t, s, "r") != strconv.FormatInt(tt.sum, 10) {
				t.Errorf("%v: %d, %v", tt, sum, err)
			}
		}
	})
}

// Each step of a token is taken once.
func TestSteps(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		append_, err := g.NewScript("return redis.call('APPEND', KEYS[1], ARGV[1])")
		if err != nil {
			t.Fatal(err)
		}
		for _, tt := range []struct {
			token fence.Token
			seq   int64
			kind  error
		}{
			{7, 1, nil}, {7, 1, fence.ErrApplied}, {7, 2, nil}, {7, 1, fence.ErrApplied}, {7, 9, nil}, {7, 10, nil}, {7, 9, fence.ErrApplied},
			{7, 1 << 53, nil}, {7, 1<<53 + 1, nil}, {7, 1 << 53, fence.ErrApplied},
			{6, 1 << 60, fence.ErrStale}, {8, 1, nil}, {8, 1, fence.ErrApplied}, {7, math.MaxInt64, fence.ErrStale}, {8, math.MaxInt64, nil},
			{8, math.MaxInt64, fence.ErrApplied}, {8, 0, fence.ErrInvalid}, {9, -1, fence.ErrInvalid},
		} {
			rig.Must(t, s, "SET", "{r}n", "40")
			rig.Must(t, s, "SET", "{r}s", "")
			rig.Must(t, s, "DEL", "{r}other")
			n, err := g.IncrBySeq(t.Context(), "r", tt.token, tt.seq, "{r}n", 2)
			want(t, fmt.Sprintf("IncrBySeq %v", tt), err, tt.kind)
			_, err = append_.RunSeq(t.Context(), "x{r}", tt.token, tt.seq, []string{"{r}s"}, []string{"+"})
			want(t, fmt.Sprintf("RunSeq %v", tt), err, tt.kind)
			wantN, wantS := "42", "+"
			if tt.kind != nil {
				wantN, wantS = "40", ""
			}
			if value(t, s, "{r}n") != wantN || value(t, s, "{r}s") != wantS || (tt.kind == nil) != (n == 42) {
				t.Errorf("%v: sum %d, %v and %q", tt, n, value(t, s, "{r}n"), value(t, s, "{r}s"))
			}
		}
		// Writes without a step may come between, and steps of one resource are none of another.
		want(t, "Set", g.Set(t.Context(), "r", 8, "r", "x", 0), nil)
		_, err = g.IncrBySeq(t.Context(), "q", 8, 1, "q", 1)
		want(t, "another resource", err, nil)
	})
}

// An increment that fails has not used its step: what was refused is not taken for done.
func TestFailedStep(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		for _, bad := range [][]string{{"RPUSH", "r", "x"}, {"SET", "r", "x"}, {"SET", "r", "9223372036854775807"}} {
			rig.Must(t, s, "FLUSHALL")
			for _, step := range []int64{1, 7} { // the first of the token, and a later one
				rig.Must(t, s, "SET", "r", "41")
				_, err := g.IncrBySeq(t.Context(), "r", 5, step, "r", 1)
				want(t, "a step", err, nil)
				rig.Must(t, s, "DEL", "r")
				rig.Must(t, s, bad...)
				dump := rig.Must(t, s, "DUMP", "r")
				for range 2 {
					_, err = g.IncrBySeq(t.Context(), "r", 5, step+1, "r", 1)
					want(t, fmt.Sprint(bad), err, fence.ErrInvalid)
				}
				_, err = g.IncrBySeq(t.Context(), "r", 5, step, "r", 1)
				want(t, "the step before", err, fence.ErrApplied)
				if now := rig.Must(t, s, "DUMP", "r"); now != dump {
					t.Errorf("%v: the key was changed", bad)
				}
				rig.Must(t, s, "DEL", "r")
				n, err := g.IncrBySeq(t.Context(), "r", 5, step+1, "r", 1)
				if err != nil || n != 1 {
					t.Errorf("%v: once it is mended: %d, %v", bad, n, err)
				}
			}
			rig.Must(t, s, "DEL", "r")
			rig.Must(t, s, bad...)
			_, err := g.IncrBySeq(t.Context(), "r", 6, 1, "r", 1)
			want(t, "the first step of another token", err, fence.ErrInvalid)
			_, err = g.IncrBySeq(t.Context(), "r", 5, 9, "r", 1)
			want(t, "a step of the token before", err, fence.ErrStale)
			rig.Must(t, s, "DEL", "r")
			for range 2 {
				_, err = g.IncrBySeq(t.Context(), "r", 6, 1, "r", 1)
			}
			want(t, "the same step twice", err, fence.ErrApplied)
			if v := value(t, s, "r"); v != "1" {
				t.Errorf("%v: applied %v times", bad, v)
			}
		}
	})
}

// What is no token under the key of a mark is no mark, and no zero either.
func TestBadMarks(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		key := g.MarkKey("r")
		bad := map[string]func(){
			"a list": func() { rig.Must(t, s, "RPUSH", key, "5") },
			"a hash": func() { rig.Must(t, s, "HSET", key, "t", "5") },
		}
		for _, text := range []string{"", "0", "007", "-5", "+5", " 5", "5 ", "5\n", "\n", "5\x00", "5.0", "1e3", "0x5", "nan", "9223372036854775808",
			"10000000000000000000", "99999999999999999999", strings.Repeat("9", 5000), "\u0665", "x\r\ny"} {
			bad[fmt.Sprintf("%.30q", text)] = func() { rig.Must(t, s, "SET", key, text) }
		}
		for name, put := range bad {
			rig.Must(t, s, "FLUSHALL")
			fill(t, s, "r")
			put()
			dump := rig.Must(t, s, "DUMP", key)
			for _, tok := range []fence.Token{1, 5, 6, math.MaxInt64} {
				want(t, name+": Claim", g.Claim(t.Context(), "r", tok), fence.ErrInvalid, "mark", "fence:{r}r")
				want(t, name+": Check", g.Check(t.Context(), "r", tok), fence.ErrInvalid, "mark", "fence:{r}r")
				for _, w := range writes(t, "r") {
					before := rig.Must(t, s, w.look...)
					want(t, name+": "+w.name, w.do(g, t.Context(), "r", tok), fence.ErrInvalid, "mark", "fence:{r}r")
					if now := rig.Must(t, s, w.look...); !reflect.DeepEqual(now, before) {
						t.Errorf("%s: %s wrote %v", name, w.name, now)
					}
				}
			}
			if now := rig.Must(t, s, "DUMP", key); now != dump {
				t.Errorf("%s: the mark was changed", name)
			}
		}
		for _, text := range []string{"", "5", "5 ", " 5", "5 5 5", "a b", "5 -1"} {
			rig.Must(t, s, "FLUSHALL")
			rig.Must(t, s, "SET", "fence:seq:{r}r", text)
			_, err := g.IncrBySeq(t.Context(), "r", 5, 1, "r", 1)
			want(t, fmt.Sprintf("record %q", text), err, fence.ErrInvalid, "fence:seq:{r}r")
			if v := value(t, s, "r"); v != nil {
				t.Errorf("record %q: %v was written", text, v)
			}
		}
	})
}

// Keys that hold another kind of value are refused, and stay as they are.
func TestWrongType(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		rig.Must(t, s, "RPUSH", "r", "x")
		want(t, "HSet", g.HSet(t.Context(), "r", 1, "r", map[string]string{"a": "b"}), fence.ErrInvalid, `"r"`, "another kind")
		_, err := g.IncrBy(t.Context(), "r", 1, "r", 1)
		want(t, "IncrBy", err, fence.ErrInvalid, `"r"`, "another kind")
		if v := rig.Must(t, s, "LRANGE", "r", "0", "-1"); !reflect.DeepEqual(v, []any{"x"}) {
			t.Errorf("now %v", v)
		}
		want(t, "Set, which takes any", g.Set(t.Context(), "r", 1, "r", "x", 0), nil)
	})
}
