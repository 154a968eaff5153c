package redisfence

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// Eval runs a script on the server that has the keys, or on any where there are none: by EVALSHA,
// and EVAL where the server does not know the script. It is safe for concurrent use.
//
// It must not send a script again that may have been executed, nor let the client library do so.
// The value is nil, a string, an int64 or a []any of those. A reply of the server that is an error
// is an error with a method Code() string, the first word of the reply, as
// redlock.ServerError has it; an error that answers [fence.ErrUnavailable], and one of dialling
// ([net.OpError]), says that nothing was sent; after any other the script may have been executed,
// or may yet be.
//
// It should honour ctx, but need not: every call is raced against a timer. One that hangs keeps a
// goroutine.
type Eval func(ctx context.Context, script string, keys, args []string) (any, error)

// Options of a [Guard]. The zero value is ready.
type Options struct {
	// Prefix begins the names of the marks, "fence:" where it is empty. All processes must use
	// the same one. At most 128 bytes, without { and }.
	Prefix string
	// Timeout bounds each call, beside its ctx: 5 s where it is zero. A script that runs for
	// longer needs more.
	Timeout time.Duration
}

const (
	defaultPrefix  = "fence:"
	maxPrefix      = 128
	defaultTimeout = 5 * time.Second
)

// Guard is a [fence.Guard] whose marks are in Redis, with writes of data in the same step. It is
// safe for concurrent use, by as many processes as like.
//
// The writes refuse as [fence.Guard] Claim does, and raise the mark as it does, so that a holder
// that reads nothing need not claim before. They return what the package's section on errors says.
type Guard struct {
	eval    Eval
	prefix  string
	timeout time.Duration
	scripts scripts
}

var _ fence.Guard = (*Guard)(nil)

// New returns a guard. It does no I/O.
func New(eval Eval, o Options) (*Guard, error) {
	if err := checkEval(eval); err != nil {
		return nil, err
	}
	g := &Guard{eval: eval, prefix: o.Prefix, timeout: o.Timeout, scripts: newScripts()}
	if g.prefix == "" {
		g.prefix = defaultPrefix
	}
	if g.timeout == 0 {
		g.timeout = defaultTimeout
	}
	switch {
	case len(g.prefix) > maxPrefix:
		return nil, &fence.InvalidError{Field: "prefix", Value: o.Prefix, Rule: fmt.Sprintf("must have at most %d bytes, has %d", maxPrefix, len(g.prefix))}
	case strings.ContainsAny(g.prefix, "{}"):
		return nil, &fence.InvalidError{Field: "prefix", Value: o.Prefix, Rule: "must not contain { or }, which name the hash slot on a Cluster"}
	case g.timeout < 0:
		return nil, &fence.InvalidError{Field: "timeout", Value: o.Timeout.String(), Rule: "must not be negative"}
	}
	return g, nil
}

func checkEval(eval Eval) error {
	if eval == nil {
		return &fence.InvalidError{Field: "eval", Rule: "must not be nil; see goredisnode.Eval and rueidisnode.Eval"}
	}
	return nil
}

// Claim implements [fence.Guard].
func (g *Guard) Claim(ctx context.Context, resource string, t fence.Token) error {
	_, err := g.write(ctx, call{script: g.scripts.claim, resource: resource, token: t})
	return err
}

// Check implements [fence.Guard]. An outcome that is not known is [fence.ErrUnavailable]: it
// changes nothing.
func (g *Guard) Check(ctx context.Context, resource string, t fence.Token) error {
	c := call{script: g.scripts.check, resource: resource, token: t, safe: true}
	if err := g.check(ctx, c); err != nil {
		return err
	}
	v, err := ask(ctx, g.eval, g.timeout, c.script, []string{g.MarkKey(resource)}, []string{t.String()})
	if err != nil {
		return g.failure(ctx, c, err)
	}
	var seen fence.Token
	if text, ok := v.(string); !ok || text != "" {
		if seen, err = fence.ParseToken(text); err != nil {
			return g.failure(ctx, c, unexpected(v))
		}
	}
	return fence.Compare(ctx, resource, t, seen)
}

// Set sets key to value, as SET does. The key lives for ttl, in steps of a millisecond and for one
// at least; for ever where ttl is zero.
func (g *Guard) Set(ctx context.Context, resource string, t fence.Token, key, value string, ttl time.Duration) error {
	args := []string{value}
	if ttl > 0 {
		args = append(args, "PX", strconv.FormatInt(max(1, ttl.Milliseconds()), 10))
	}
	c := call{script: g.scripts.set, resource: resource, token: t, keys: []string{key}, args: args}
	if ttl < 0 {
		c.invalid = &fence.InvalidError{Field: "ttl", Value: ttl.String(), Rule: "must not be negative; zero is for ever"}
	}
	_, err := g.write(ctx, c)
	return err
}

// HSet sets fields of the hash at key, as HSET does: all of them or none.
func (g *Guard) HSet(ctx context.Context, resource string, t fence.Token, key string, fields map[string]string) error {
	args := make([]string, 0, 2*len(fields))
	for field, value := range fields {
		args = append(args, field, value)
	}
	c := call{script: g.scripts.hset, resource: resource, token: t, keys: []string{key}, args: args}
	if len(fields) == 0 {
		c.invalid = &fence.InvalidError{Field: "fields", Rule: "must not be empty"}
	}
	_, err := g.write(ctx, c)
	return err
}

// Del deletes keys, as DEL does: those that there are.
func (g *Guard) Del(ctx context.Context, resource string, t fence.Token, keys ...string) error {
	c := call{script: g.scripts.del, resource: resource, token: t, keys: keys}
	if len(keys) == 0 {
		c.invalid = &fence.InvalidError{Field: "key", Rule: "at least one is needed"}
	}
	_, err := g.write(ctx, c)
	return err
}

// IncrBy adds n, which may be negative, to the integer at key, as INCRBY does, and returns the
// sum, exactly. After [fence.ErrUncertain] the caller cannot know whether to repeat it: see
// [Guard.IncrBySeq].
func (g *Guard) IncrBy(ctx context.Context, resource string, t fence.Token, key string, n int64) (int64, error) {
	return g.incrBy(ctx, call{script: g.scripts.incrBy, resource: resource, token: t}, key, n)
}

// IncrBySeq is [Guard.IncrBy] that is applied at most once, however often it is repeated: seq
// counts the steps that the holder of t takes on the resource, rising from 1, and one that is not
// above the last is answered by [fence.ErrApplied]. So after [fence.ErrUncertain] the caller
// repeats it with the same seq, and takes ErrApplied for done. One that failed by any other error
// has not used its step. The steps of one token come one after the other, not at the same time.
// Gaps do no harm; another token starts anew.
func (g *Guard) IncrBySeq(ctx context.Context, resource string, t fence.Token, seq int64, key string, n int64) (int64, error) {
	return g.incrBy(ctx, call{script: g.scripts.incrBySeq, resource: resource, token: t, seq: seq, sequenced: true}, key, n)
}

func (g *Guard) incrBy(ctx context.Context, c call, key string, n int64) (int64, error) {
	c.keys, c.args = []string{key}, []string{strconv.FormatInt(n, 10)}
	v, err := g.write(ctx, c)
	if err != nil {
		return 0, err
	}
	text, _ := v.(string)
	sum, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, g.failure(ctx, c, unexpected(v))
	}
	return sum, nil
}

// call is one call of a script about a resource.
type call struct {
	script     string
	resource   string
	token      fence.Token
	seq        int64
	sequenced  bool
	keys, args []string
	invalid    *fence.InvalidError // of the arguments
	user       bool                // the script is the user's: it may have written before it failed
	safe       bool                // it changes nothing
}

// check looks at everything that can be looked at before any I/O.
func (g *Guard) check(ctx context.Context, c call) error {
	if err := fence.CheckResource(c.resource); err != nil {
		return err
	}
	if err := fence.CheckToken(c.token); err != nil {
		return err
	}
	if c.sequenced && c.seq <= 0 {
		return &fence.InvalidError{Field: "seq", Value: strconv.FormatInt(c.seq, 10), Rule: "must be positive; the steps of a token count from 1"}
	}
	if c.invalid != nil {
		return c.invalid
	}
	if err := g.checkKeys(c); err != nil {
		return err
	}
	return ctx.Err()
}

// write runs a script that begins with the prologue.
func (g *Guard) write(ctx context.Context, c call) (any, error) {
	if err := g.check(ctx, c); err != nil {
		return nil, err
	}
	keys := make([]string, len(c.keys), len(c.keys)+2)
	args := make([]string, len(c.args), len(c.args)+2)
	copy(keys, c.keys)
	copy(args, c.args)
	// The prologue takes the mark first.
	if c.sequenced {
		keys, args = append(keys, seqKey(g.prefix, c.resource)), append(args, strconv.FormatInt(c.seq, 10))
	}
	keys, args = append(keys, g.MarkKey(c.resource)), append(args, c.token.String())
	v, err := ask(ctx, g.eval, g.timeout, c.script, keys, args)
	if err != nil {
		return nil, g.failure(ctx, c, err)
	}
	return v, nil
}

// early is by how much the client's deadline comes before ours: it knows more of what went wrong,
// such as that it was still dialling.
const early = 100 * time.Millisecond

// ask calls eval, and gives up on it when ctx or the time is up.
func ask(ctx context.Context, eval Eval, limit time.Duration, script string, keys, args []string) (any, error) {
	began := time.Now()
	var end error // why the time is up, where ctx goes on
	if deadline, ok := ctx.Deadline(); ok {
		if left := deadline.Sub(began); left <= limit {
			limit, end = max(0, left), context.DeadlineExceeded
		}
	}
	theirs, cancel := context.WithTimeout(ctx, limit-min(early, limit/8))
	defer cancel()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	type reply struct {
		value any
		err   error
	}
	replies := make(chan reply, 1)
	go func() {
		v, err := eval(theirs, script, keys, args)
		replies <- reply{v, err}
	}()
	var unsent error
	select {
	case r := <-replies:
		if r.err == nil || !isLate(r.err) {
			return r.value, r.err
		}
		if neverSent(r.err) {
			unsent = r.err
		}
	case <-timer.C:
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		end = err
		if cause := context.Cause(ctx); cause != err {
			end = fmt.Errorf("%w: %w", err, cause)
		}
	}
	return nil, noAnswer{time.Since(began), end, unsent}
}

func unexpected(v any) error {
	return fmt.Errorf("unexpected reply of the server: %.80q", fmt.Sprint(v))
}
