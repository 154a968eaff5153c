package redisfence

import (
	"context"
	_ "embed"
	"strconv"
	"strings"

	"github.com/holdfast-go/holdfast/fence"
)

var (
	//go:embed token.lua
	tokenText string
	//go:embed prologue.lua
	prologueText string
	//go:embed votes.lua
	votesText string
	//go:embed seq.lua
	seqText string
	//go:embed check.lua
	checkText string
	//go:embed set.lua
	setText string
	//go:embed hset.lua
	hsetText string
	//go:embed del.lua
	delText string
	//go:embed incrby.lua
	incrByText string
)

// scripts are the texts of what a guard runs by itself.
type scripts struct{ claim, check, set, hset, del, incrBy, incrBySeq string }

func newScripts() scripts {
	guarded, replacing := prologue(false, "", ""), prologue(false, votesText, "")
	return scripts{
		claim:     prologue(true, "", "") + "return 1",
		check:     script(checkText),
		set:       replacing + script(setText),
		hset:      guarded + script(hsetText), // the server refuses to make a hash of a vote, or a sum
		del:       replacing + script(delText),
		incrBy:    guarded + script(incrByText),
		incrBySeq: prologue(false, "", seqText+strings.Replace(incrByText, "--[[UNDO]]", giveBack, 1)),
	}
}

// giveBack undoes a step whose write failed, which may then be taken again.
const giveBack = "redis.pcall('SET', record, t .. ' ' .. before)"

// prologue is what comes before a write. With a probe it is refused where writes are refused, also
// where the mark need not be raised: what follows may write nothing. What is to be looked at before
// the mark is raised, and the steps, which come last, run within it.
func prologue(probe bool, look, steps string) string {
	text := strings.Replace(prologueText, "@PROBE@", strconv.FormatBool(probe), 1)
	text = strings.Replace(text, "--[[VOTES]]", look, 1)
	return script(strings.Replace(text, "--[[SEQ]]", steps, 1)) + " "
}

// script puts what they share into a script, and joins its lines without the comments, which have
// lines of their own.
func script(text string) string {
	var code []string
	for line := range strings.Lines(strings.Replace(text, "--[[TOKEN]]", tokenText, 1)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "--") {
			code = append(code, line)
		}
	}
	return strings.Join(code, " ")
}

// Script is a script of the user's that runs only where the token is not stale. It is safe for
// concurrent use.
type Script struct {
	g                *Guard
	plain, sequenced string
}

// NewScript makes a guarded script of a Lua source, which need not know of it: it sees the KEYS
// and ARGV of the caller, and its reply is the caller's. Its first lines may be a #! line with
// flags, but not no-writes: the mark has to be raised. It does no I/O; that the source does not
// compile comes to light when it is run.
//
// Redis takes nothing back of a script that fails half way. What it had written stays.
func (g *Guard) NewScript(src string) (*Script, error) {
	head, body := "", src
	if strings.HasPrefix(src, "#!") {
		line, rest, _ := strings.Cut(src, "\n")
		head, body = line+"\n", rest
	}
	switch {
	case strings.TrimSpace(body) == "":
		return nil, &fence.InvalidError{Field: "script", Value: src, Rule: "must not be empty"}
	case strings.Contains(head, "no-writes"):
		return nil, &fence.InvalidError{Field: "script", Value: strings.TrimSpace(head), Rule: "must not have the flag no-writes: the mark of the resource has to be raised"}
	}
	return &Script{g, head + prologue(true, "", "") + body, head + prologue(true, "", seqText) + body}, nil
}

// Run runs the script. The mark is raised before, and stays so where the script fails.
//
// The value is nil, a string, an int64 or a []any of those. An error that the script itself
// answers or raises is [fence.ErrUncertain], since nobody can tell what the script had done before;
// [errors.As] finds the client's error in it. So is a reply that did not come: see
// [Script.RunSeq].
func (s *Script) Run(ctx context.Context, resource string, t fence.Token, keys, args []string) (any, error) {
	return s.g.write(ctx, call{script: s.plain, resource: resource, token: t, keys: keys, args: args, user: true})
}

// RunSeq is [Script.Run] that runs the script at most once for each step: seq is as for
// [Guard.IncrBySeq]. A script that failed has used its step, and an answer that was lost is not told
// again: where the caller needs it, let the script write it down.
func (s *Script) RunSeq(ctx context.Context, resource string, t fence.Token, seq int64, keys, args []string) (any, error) {
	return s.g.write(ctx, call{script: s.sequenced, resource: resource, token: t, seq: seq, sequenced: true, keys: keys, args: args, user: true})
}
