package fence

import (
	"context"
	"sync"
)

// Guard keeps a mark for each resource, the highest token that it has seen, and refuses
// smaller ones. A guard makes a lock correct under any pause, clock or network fault: a
// holder that has been superseded is refused from the new holder's first Claim on.
//
// A guard is safe for concurrent use. Its errors answer the kinds of this package. Both
// methods refuse a bad resource or token by an [*InvalidError], and do nothing for a ctx that
// is done, before they ask the resource.
//
// A Check, or a Claim, that stands alone says nothing of a write that follows it: the holder
// may be paused in between. Packages sqlfence, redisfence and httpfence make the check part of
// the write.
type Guard interface {
	// Claim shows the token to the resource: in one step it refuses a token below the mark, by
	// a [*StaleError], or raises the mark to it, durably. It may be repeated. The holder claims
	// before its first read: otherwise the former holder may still change what was read.
	Claim(ctx context.Context, resource string, t Token) error

	// Check reports whether the token is the mark: nil; a [*StaleError] where the mark is
	// larger; [ErrUnclaimed] where it is smaller; [ErrNoResource] where there is none. It
	// changes nothing.
	Check(ctx context.Context, resource string, t Token) error
}

// Memory is a guard that keeps its marks in the process, one for each resource that it has
// ever seen. It is the reference of how guards behave, for tests and for resources that live
// in one process. The zero value is ready; do not copy it once it is used.
type Memory struct {
	mu    sync.Mutex
	marks map[string]Token
}

var _ Guard = (*Memory)(nil)

// Claim implements [Guard].
func (m *Memory) Claim(ctx context.Context, resource string, t Token) error {
	if err := checkArgs(ctx, resource, t); err != nil {
		return err
	}
	if seen := m.raise(resource, t); seen > t {
		return Stale(ctx, resource, t, seen)
	}
	return nil
}

func (m *Memory) raise(resource string, t Token) (mark Token) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.marks == nil {
		m.marks = map[string]Token{}
	}
	if mark = max(m.marks[resource], t); mark == t {
		m.marks[resource] = t
	}
	return mark
}

// Check implements [Guard].
func (m *Memory) Check(ctx context.Context, resource string, t Token) error {
	if err := checkArgs(ctx, resource, t); err != nil {
		return err
	}
	m.mu.Lock()
	seen := m.marks[resource]
	m.mu.Unlock()
	return Compare(ctx, resource, t, seen)
}

// Compare is what Check answers for a token where the mark is seen; zero means that there is
// no mark. It is for authors of guards, who call it as they call [Stale].
func Compare(ctx context.Context, resource string, t, seen Token) error {
	switch {
	case seen == 0:
		return &Error{Kind: ErrNoResource, Resource: resource}
	case seen < t:
		return &Error{Kind: ErrUnclaimed, Resource: resource}
	case seen > t:
		return Stale(ctx, resource, t, seen)
	}
	return nil
}

func checkArgs(ctx context.Context, resource string, t Token) error {
	if err := CheckResource(resource); err != nil {
		return err
	}
	if err := CheckToken(t); err != nil {
		return err
	}
	return ctx.Err()
}
