// Package fencetest is the conformance suite of guards: one suite defines what a
// [fence.Guard] must do, and every guard runs it.
//
//	func TestGuard(t *testing.T) {
//		fencetest.Run(t, fencetest.Harness{
//			New:    func(t testing.TB) fence.Guard { return open(t, database(t)) },
//			Reopen: func(t testing.TB, g fence.Guard) fence.Guard { return open(t, g.(*Guard).db) },
//		})
//	}
//
// The suite judges by the order of calls and never by the clock, so that a busy machine does
// not fail it.
package fencetest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// Harness describes the guard under test.
type Harness struct {
	// New opens a guard for one test. Its marks may be those of other tests, because no two
	// tests use the same resource. Clean-up goes to t.Cleanup.
	New func(t testing.TB) fence.Guard

	// Reopen opens another guard on the marks of g, as another process does; both are in use
	// from then on. Nil: the marks live in the guard alone.
	Reopen func(t testing.TB, g fence.Guard) fence.Guard

	// Resource makes a resource, such as a row, that has no mark yet, and returns its name.
	// Nil: a name is all that it takes.
	Resource func(t testing.TB, name string) string

	// MissingIsError: Claim of a resource that Resource did not make is fence.ErrNoResource,
	// and makes none.
	MissingIsError bool
}

// Run runs the whole suite.
func Run(t *testing.T, h Harness) {
	for _, test := range tests {
		if test.reopens && h.Reopen == nil {
			continue // what a guard does not declare is not tested
		}
		t.Run(test.name, func(t *testing.T) { test.run(newEnv(t, h)) })
	}
}

type test struct {
	name    string
	run     func(*env)
	reopens bool // needs Harness.Reopen
}

var tests = []test{
	{name: "Claim", run: testClaim},
	{name: "ClaimStale", run: testClaimStale},
	{name: "Check", run: testCheck},
	{name: "Missing", run: testMissing},
	{name: "Tokens", run: testTokens},
	{name: "Names", run: testNames},
	{name: "BadToken", run: testBadToken},
	{name: "BadResource", run: testBadResource},
	{name: "DoneContext", run: testDoneContext},
	{name: "Holder", run: testHolder},
	{name: "HolderAsksTheGuard", run: testHolderAsks},
	{name: "Concurrent", run: testConcurrent},
	{name: "ManyResources", run: testManyResources},
	{name: "Reopen", run: testReopen, reopens: true},
}

// patience bounds what would otherwise hang; no sound guard comes near it.
const patience = 2 * time.Minute

// env is what one test works with.
type env struct {
	testing.TB
	h        Harness
	g        fence.Guard
	ctx      context.Context
	salt     string
	names    int
	patience time.Duration
}

func newEnv(t testing.TB, h Harness) *env {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return &env{TB: t, h: h, g: h.New(t), ctx: ctx, salt: strings.ToLower(rand.Text()[:12]), patience: patience}
}

// another returns a guard on the same marks.
func (e *env) another() fence.Guard {
	if e.h.Reopen == nil {
		return e.g
	}
	return e.h.Reopen(e, e.g)
}

// name returns a name that nobody else uses.
func (e *env) name() string {
	e.names++
	return fmt.Sprintf("fencetest/%s/%d", e.salt, e.names)
}

// resource makes a resource that nobody else uses, and that has no mark.
func (e *env) resource() string {
	e.Helper()
	return e.make(e.name())
}

func (e *env) make(name string) string {
	e.Helper()
	if e.h.Resource == nil {
		return name
	}
	return e.h.Resource(e, name)
}

// answer is what a guard may answer.
type answer struct {
	kind error       // nil, or what the error answers
	seen fence.Token // of a stale answer
}

var (
	accepted   = answer{}
	noResource = answer{kind: fence.ErrNoResource}
	unclaimed  = answer{kind: fence.ErrUnclaimed}
)

func stale(seen fence.Token) answer { return answer{fence.ErrStale, seen} }

func (a answer) String() string {
	switch {
	case a.kind == nil:
		return "nil"
	case a.seen != 0:
		return fmt.Sprintf("stale, %v seen", a.seen)
	}
	return a.kind.Error()
}

// claim claims and must be answered so.
func (e *env) claim(g fence.Guard, resource string, t fence.Token, want answer) {
	e.Helper()
	e.answers("Claim", g.Claim(e.ctx, resource, t), resource, t, want)
}

// check checks and must be answered so.
func (e *env) check(g fence.Guard, resource string, t fence.Token, want answer) {
	e.Helper()
	e.answers("Check", g.Check(e.ctx, resource, t), resource, t, want)
}

func (e *env) answers(op string, err error, resource string, t fence.Token, want answer) {
	e.Helper()
	e.known(op, err)
	what := fmt.Sprintf("%s(%.80q, %v) answers %v", op, resource, t, err)
	if !errors.Is(err, want.kind) {
		e.Errorf("%s, want %v", what, want)
		return
	}
	switch want.kind {
	case nil:
	case fence.ErrStale:
		var s *fence.StaleError
		if !errors.As(err, &s) || *s != (fence.StaleError{Resource: resource, Token: t, Seen: want.seen}) {
			e.Errorf("%s, which is %+v, want a *StaleError of this resource and token, %v seen", what, err, want.seen)
		}
	default:
		var f *fence.Error
		if !errors.As(err, &f) || f.Resource != resource {
			e.Errorf("%s, want a *fence.Error that names the resource", what)
		}
	}
}

// kinds are what a guard may answer beside a stale token.
var kinds = []error{fence.ErrStale, fence.ErrNoResource, fence.ErrUnclaimed, fence.ErrApplied, fence.ErrBusy,
	fence.ErrUncertain, fence.ErrUnavailable, fence.ErrInvalid, context.Canceled, context.DeadlineExceeded}

// known complains of an error that is of no kind, or that is not one line.
func (e *env) known(op string, err error) {
	e.Helper()
	if err == nil {
		return
	}
	if text := err.Error(); text == "" || strings.ContainsAny(text, "\r\n") {
		e.Errorf("%s answers an error that is not one line: %q", op, text)
	}
	for _, kind := range kinds {
		if errors.Is(err, kind) {
			return
		}
	}
	e.Errorf("%s answers an error of no kind of package fence: %v", op, err)
}

// unmarked complains of a resource, made by resource, that has a mark.
func (e *env) unmarked(resource, after string) {
	e.Helper()
	err := e.g.Check(e.ctx, resource, 1)
	if e.h.MissingIsError && errors.Is(err, fence.ErrUnclaimed) {
		return // there is a row, and it is below any token
	}
	if !errors.Is(err, fence.ErrNoResource) {
		e.Errorf("after %s, Check(%.80q, 1) answers %v, want %v", after, resource, err, noResource)
	}
}
