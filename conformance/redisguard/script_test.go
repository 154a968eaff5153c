package redisguard_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

type ctx = context.Context

func newScript(t testing.TB, g *redisfence.Guard, src string) *redisfence.Script {
	t.Helper()
	s, err := g.NewScript(src)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// transfer is a script as a user has it.
const transfer = `-- moves ARGV[1] from KEYS[1] to KEYS[2]
local amount = tonumber(ARGV[1])
if #KEYS ~= 2 or #ARGV ~= 1 then
  return redis.error_reply('ERR wrong arguments')
end
if tonumber(redis.call('GET', KEYS[1]) or '0') < amount then
  return {err = 'FUNDS too little'}
end
redis.call('DECRBY', KEYS[1], amount)
redis.call('INCRBY', KEYS[2], amount)
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]), #ARGV} -- no newline at the end`

func TestScript(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		rig.Must(t, s, "SET", "{r}a", "10")
		move := newScript(t, g, transfer)
		run := func(tok fence.Token, amount string) (any, error) {
			return move.Run(t.Context(), "r", tok, []string{"{r}a", "{r}b"}, []string{amount})
		}
		v, err := run(3, "4")
		if err != nil || !reflect.DeepEqual(v, []any{"6", "4", int64(1)}) {
			t.Errorf("transfer: %v, %v", v, err)
		}
		_, err = run(2, "1")
		want(t, "stale transfer", err, fence.ErrStale)
		_, err = run(4, "100")
		want(t, "transfer of too much", err, fence.ErrUncertain, "FUNDS too little")
		var reply *redlock.ServerError
		if !errors.As(err, &reply) || reply.Code() != "FUNDS" {
			t.Errorf("the script's answer: %#v", reply)
		}
		_, err = run(3, "1")
		want(t, "transfer after a failed one of a larger token", err, fence.ErrStale)
		if a, b := value(t, s, "{r}a"), value(t, s, "{r}b"); a != "6" || b != "4" {
			t.Errorf("a %v, b %v", a, b)
		}
	})
}

// A script sees what it would see without the guard, and its answer is its own.
func TestScriptSeesItsOwn(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		keys, args := []string{"{r}1", "{r}2"}, []string{"a", "", "c"}
		for src, want := range map[string]any{
			"return {#KEYS, #ARGV, KEYS[2], ARGV[3], KEYS[3], ARGV[4]}":      []any{int64(2), int64(3), "{r}2", "c"},
			"return {#_G.KEYS, #_G['ARGV'], loadstring('return KEYS[1]')()}": []any{int64(2), int64(3), "{r}1"},
			"for _, n in ipairs({'mark', 't', 'seen', 'token', 'less', 'refuse', 'failed', 'bad'}) do if rawget(_G, n) then return n end end return 'nothing of ours'": "nothing of ours",
			"local function f(...) return select('#', ...) end return f(unpack(ARGV))":                                                                                 int64(3),
			"local t = {} for i = 1, 150 do t[i] = i end " + strings.Repeat("local a = 1; ", 150) + " return #t":                                                       int64(150),
			"return nil":   nil,
			"return false": nil,
			"return 'x'":   "x",
			"return 42":    int64(42),
			"return 3.99":  int64(3),
			"return {1, {2, 'x', false}, {ok = 'fine'}}":                                           []any{int64(1), []any{int64(2), "x", nil}, "fine"},
			"return redis.status_reply('FINE')":                                                    "FINE",
			"return redis.call('SET', KEYS[1], ARGV[1])":                                           "OK",
			"redis.setresp(3) return redis.call('HGETALL', KEYS[2])":                               []any{},
			"\n\n-- only a comment\n\nreturn 1 -- and one more":                                    int64(1),
			"#!lua\nreturn {#KEYS, #ARGV}":                                                         []any{int64(2), int64(3)},
			"#!lua flags=allow-oom\nreturn KEYS[1]":                                                "{r}1",
			"(function() redis.call('SET', KEYS[1], 'x') end)() return redis.call('GET', KEYS[1])": "x",
		} {
			script := newScript(t, g, src)
			for range 2 { // the mark is raised, and stands already
				v, err := script.Run(t.Context(), "r", 1, keys, args)
				if err != nil || !reflect.DeepEqual(v, want) {
					t.Errorf("%.90q: %#v, %v, want %#v", src, v, err, want)
				}
			}
			rig.Must(t, s, "FLUSHALL")
		}
		v, err := newScript(t, g, "return {#KEYS, #ARGV}").Run(t.Context(), "r", 1, nil, nil)
		if err != nil || !reflect.DeepEqual(v, []any{int64(0), int64(0)}) {
			t.Errorf("without arguments: %v, %v", v, err)
		}
	})
}

// A script that fails has written what it had written, and the error says so, with its own line.
func TestScriptFails(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		half := newScript(t, g, "redis.call('SET', KEYS[1], 'half')\nredis.call('LPUSH', KEYS[1], 'x')\nredis.call('SET', KEYS[1], 'whole')")
		_, err := half.RunSeq(t.Context(), "r", 5, 1, []string{"r"}, nil)
		want(t, "a script that fails half way", err, fence.ErrUncertain, "WRONGTYPE", "user_script:2")
		if v := value(t, s, "r"); v != "half" {
			t.Errorf("the key holds %v", v)
		}
		if v := value(t, s, g.MarkKey("r")); v != "5" {
			t.Errorf("the mark is %v", v)
		}
		_, err = half.RunSeq(t.Context(), "r", 5, 1, []string{"r"}, nil)
		want(t, "its step", err, fence.ErrApplied)

		for src, kind := range map[string]error{
			"return nosuch()": fence.ErrUncertain,
			"error('mine')":   fence.ErrUncertain,
			"return redis.error_reply('MINE is mine')":                                     fence.ErrUncertain,
			"redis.call('SET', KEYS[1], 'x') return redis.error_reply('READONLY is mine')": fence.ErrUncertain,
			"redis.call('SET', KEYS[1], 'x') return {err = 'BUSY with others'}":            fence.ErrUncertain,
			"redis.call('SET', KEYS[1], 'x') error('Error compiling script')":              fence.ErrUncertain,
			"return redis.pcall('NOSUCH')":                                                 fence.ErrUncertain,
			"return redis.pcall('LPUSH', KEYS[1], 1)":                                      fence.ErrUncertain,
			"local x = = 1":                fence.ErrInvalid,
			"end":                          fence.ErrInvalid,
			"#!lua flags=nosuch\nreturn 1": fence.ErrInvalid,
			"#!python\nreturn 1":           fence.ErrInvalid,
		} {
			_, err := newScript(t, g, src).Run(t.Context(), "q", 1, []string{"r"}, nil)
			want(t, src, err, kind)
		}
		var invalid *fence.InvalidError
		for _, src := range []string{"", " \n", "#!lua", "#!lua flags=no-writes\nreturn 1", "#!lua flags=allow-oom,no-writes\nreturn 1"} {
			if _, err := g.NewScript(src); !errors.As(err, &invalid) || invalid.Field != "script" {
				t.Errorf("NewScript(%q): %v", src, err)
			}
		}
	})
}

// Scripts that a server forgets are sent anew.
func TestScriptFlush(t *testing.T) {
	each(t, func(t *testing.T, c client) {
		s := servertest.Redis(t)
		g := guard(t, c.eval(t, s.Addr()))
		script := newScript(t, g, "return redis.call('INCR', KEYS[1])")
		for i := range 10 {
			v, err := script.Run(t.Context(), "r", 1, []string{"r"}, nil)
			if err != nil || v != int64(i+1) {
				t.Errorf("run %d: %v, %v", i, v, err)
			}
			want(t, "Claim", g.Claim(t.Context(), "r", 1), nil)
			if i%2 == 0 {
				rig.Must(t, s, "SCRIPT", "FLUSH")
			}
		}
		if calls := commands(t, s, "eval"); calls != 2*6 {
			t.Errorf("%d scripts were sent whole, want 12", calls)
		}
	})
}
