package storetest

import (
	"context"
	"fmt"
	"iter"
	"sync"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Op is a call that a fault can hit.
type Op int

// The calls of claims and stores. A batch of extensions is one Extend.
const (
	Try Op = iota
	Extend
	Release
	Wait
	Adopt
	Inspect // also List and Break
	numOps
)

// Fault stands between a caller and the store: it may run call, which makes the real call
// and answers its error, any number of times before it returns. A nil error hands the
// answer of the last call on, another one takes its place; only then may call run later.
type Fault func(ctx context.Context, call func(context.Context) error) error

// LoseRequest loses the request: the store never hears of it.
func LoseRequest(ctx context.Context, _ func(context.Context) error) error {
	return fmt.Errorf("storetest: request lost: %w", store.ErrUncertain)
}

// LoseReply lets the store act and loses its answer.
func LoseReply(ctx context.Context, call func(context.Context) error) error {
	if err := call(ctx); err != nil && ctx.Err() != nil {
		return err
	}
	return fmt.Errorf("storetest: reply lost: %w", store.ErrUncertain)
}

// Duplicate delivers the request twice and hands the second answer on.
func Duplicate(ctx context.Context, call func(context.Context) error) error {
	_ = call(ctx)
	return call(ctx)
}

// Hang does not answer until ctx is done, and the store never hears of the call.
func Hang(ctx context.Context, _ func(context.Context) error) error {
	<-ctx.Done()
	return ctx.Err()
}

// HangUntil breaks the rule that a call returns when its context is done: it hangs until
// ch is closed, and only then makes the call.
func HangUntil(ch <-chan struct{}) Fault {
	return func(ctx context.Context, call func(context.Context) error) error {
		<-ch
		return call(ctx)
	}
}

// Delay makes the call d later, unless ctx is done before.
func Delay(d time.Duration) Fault {
	return func(ctx context.Context, call func(context.Context) error) error {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
			return call(ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// DelayReply makes the call at once and answers d later, unless ctx is done before.
func DelayReply(d time.Duration) Fault {
	return func(ctx context.Context, call func(context.Context) error) error {
		err := call(ctx)
		if late := Delay(d)(ctx, func(context.Context) error { return nil }); late != nil {
			return fmt.Errorf("%w: %w", store.ErrUncertain, late)
		}
		return err
	}
}

// Late answers at once that the outcome is not known, and delivers the request d later,
// whatever has become of ctx. As calls of one claim do not overlap, only its Release may
// be called before that.
func Late(d time.Duration) Fault {
	return func(ctx context.Context, call func(context.Context) error) error {
		time.AfterFunc(d, func() { _ = call(context.WithoutCancel(ctx)) })
		return fmt.Errorf("storetest: request late: %w", store.ErrUncertain)
	}
}

// Fail answers err, and the store never hears of the call.
func Fail(err error) Fault {
	return func(context.Context, func(context.Context) error) error { return err }
}

// Faults decides what happens to the calls that go through a store made by [NewFaults].
// Without a fault, everything passes. It is safe for concurrent use.
type Faults struct {
	mu    sync.Mutex
	rules [numOps]rule
}

type rule struct {
	next  []Fault // for one call each
	until Fault   // afterwards, until healed
	hits  int
}

// Set lets f happen to every call of op until healed. A nil f heals op.
func (f *Faults) Set(op Op, fault Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules[op].next, f.rules[op].until = nil, fault
}

// Next lets each of the faults happen to one call of op, in this order, before what Set
// has said goes on. A nil one lets a call pass.
func (f *Faults) Next(op Op, faults ...Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules[op].next = append(f.rules[op].next, faults...)
}

// SetAll lets fault happen to every call of every op until healed.
func (f *Faults) SetAll(fault Fault) {
	for op := range numOps {
		f.Set(op, fault)
	}
}

// Heal ends all faults. Calls that hang go on hanging.
func (f *Faults) Heal() { f.SetAll(nil) }

// Hits tells how many calls of op a fault has happened to.
func (f *Faults) Hits(op Op) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.rules[op].hits
}

func (f *Faults) pick(op Op) Fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	r := &f.rules[op]
	fault := r.until
	if len(r.next) > 0 {
		fault, r.next = r.next[0], r.next[1:]
	}
	if fault != nil {
		r.hits++
	}
	return fault
}

// do makes the call, or lets a fault make it. A done context is refused before any fault.
func (f *Faults) do(ctx context.Context, op Op, call func(context.Context) error) error {
	fault := f.pick(op)
	if fault == nil {
		return call(ctx)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	var last error
	if err := fault(ctx, func(ctx context.Context) error {
		err := call(ctx)
		last = err
		return err
	}); err != nil {
		return err
	}
	return last
}

// answer is do for a call that answers something. What a late call answers is dropped.
func answer[T any](f *Faults, ctx context.Context, op Op, call func(context.Context) (T, error)) (T, error) {
	var last T
	err := f.do(ctx, op, func(ctx context.Context) (err error) {
		last, err = call(ctx)
		return err
	})
	if err != nil {
		var none T
		return none, err
	}
	return last, nil
}

// NewFaults returns a store that passes everything on to s, and what lets faults happen
// on the way. It implements just the optional interfaces that s implements, and so do its
// claims.
func NewFaults(s store.Store) (store.Store, *Faults) {
	f := &Faults{}
	base := faultyStore{s, f}
	b, isBatch := s.(store.BatchExtender)
	a, isAdopter := s.(store.Adopter)
	i, isInspector := s.(store.Inspector)
	batch, adopt, inspect := faultyBatch{b, f}, faultyAdopter{a, f}, faultyInspector{i, f}
	switch {
	case isBatch && isAdopter && isInspector:
		return struct {
			faultyStore
			faultyBatch
			faultyAdopter
			faultyInspector
		}{base, batch, adopt, inspect}, f
	case isBatch && isAdopter:
		return struct {
			faultyStore
			faultyBatch
			faultyAdopter
		}{base, batch, adopt}, f
	case isBatch && isInspector:
		return struct {
			faultyStore
			faultyBatch
			faultyInspector
		}{base, batch, inspect}, f
	case isAdopter && isInspector:
		return struct {
			faultyStore
			faultyAdopter
			faultyInspector
		}{base, adopt, inspect}, f
	case isBatch:
		return struct {
			faultyStore
			faultyBatch
		}{base, batch}, f
	case isAdopter:
		return struct {
			faultyStore
			faultyAdopter
		}{base, adopt}, f
	case isInspector:
		return struct {
			faultyStore
			faultyInspector
		}{base, inspect}, f
	}
	return base, f
}

// Each part keeps what it wraps in a named field, so that embedding several of them
// promotes the methods of each interface once.
type (
	faultyStore struct {
		store  store.Store
		faults *Faults
	}
	faultyBatch struct {
		batch  store.BatchExtender
		faults *Faults
	}
	faultyAdopter struct {
		adopter store.Adopter
		faults  *Faults
	}
	faultyInspector struct {
		inspector store.Inspector
		faults    *Faults
	}
)

func (s faultyStore) Info() store.Info { return s.store.Info() }

func (s faultyStore) Claim(key string, o store.ClaimOptions) store.Claim {
	return s.faults.wrap(s.store.Claim(key, o))
}

func (f *Faults) wrap(c store.Claim) store.Claim {
	if w, ok := c.(store.Waiter); ok {
		return &faultyWaiter{faultyClaim{c, f}, w}
	}
	return &faultyClaim{c, f}
}

// unwrap answers the claim beneath; claims of other stores are left for the store to
// refuse.
func unwrap(c store.Claim) store.Claim {
	if f, ok := c.(interface{ beneath() store.Claim }); ok {
		return f.beneath()
	}
	return c
}

type faultyClaim struct {
	claim  store.Claim
	faults *Faults
}

type faultyWaiter struct {
	faultyClaim
	waiter store.Waiter
}

func (c *faultyClaim) beneath() store.Claim { return c.claim }

func (c *faultyClaim) Try(ctx context.Context) (store.Grant, error) {
	return c.grant(ctx, Try, c.claim.Try)
}

func (c *faultyClaim) Extend(ctx context.Context) (store.Grant, error) {
	return c.grant(ctx, Extend, c.claim.Extend)
}

func (c *faultyClaim) grant(ctx context.Context, op Op, call func(context.Context) (store.Grant, error)) (store.Grant, error) {
	return answer(c.faults, ctx, op, call)
}

func (c *faultyClaim) Release(ctx context.Context) error {
	return c.faults.do(ctx, Release, c.claim.Release)
}

func (c *faultyWaiter) Wait(ctx context.Context, held *store.HeldError) error {
	return c.faults.do(ctx, Wait, func(ctx context.Context) error { return c.waiter.Wait(ctx, held) })
}

func (s faultyBatch) ExtendMany(ctx context.Context, claims []store.Claim) []store.Result {
	beneath := make([]store.Claim, len(claims))
	for i, c := range claims {
		beneath[i] = unwrap(c)
	}
	results, err := answer(s.faults, ctx, Extend, func(ctx context.Context) ([]store.Result, error) {
		return s.batch.ExtendMany(ctx, beneath), nil
	})
	if err != nil {
		results = make([]store.Result, len(claims))
		for i := range results {
			results[i].Err = err
		}
	}
	return results
}

func (s faultyAdopter) Ticket(c store.Claim) (string, error) { return s.adopter.Ticket(unwrap(c)) }

func (s faultyAdopter) Adopt(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	type adopted struct {
		claim store.Claim
		grant store.Grant
	}
	a, err := answer(s.faults, ctx, Adopt, func(ctx context.Context) (adopted, error) {
		c, g, err := s.adopter.Adopt(ctx, ticket)
		return adopted{c, g}, err
	})
	if err != nil {
		return nil, store.Grant{}, err
	}
	return s.faults.wrap(a.claim), a.grant, nil
}

func (s faultyInspector) Inspect(ctx context.Context, key string) (store.Holder, error) {
	return answer(s.faults, ctx, Inspect, func(ctx context.Context) (store.Holder, error) {
		return s.inspector.Inspect(ctx, key)
	})
}

// List reads to the end before it yields, so that a fault is over by then.
func (s faultyInspector) List(ctx context.Context, prefix string) iter.Seq2[store.Holder, error] {
	return func(yield func(store.Holder, error) bool) {
		all, err := answer(s.faults, ctx, Inspect, func(ctx context.Context) (all []store.Holder, _ error) {
			for h, err := range s.inspector.List(ctx, prefix) {
				if err != nil {
					return nil, err
				}
				all = append(all, h)
			}
			return all, nil
		})
		if err != nil {
			yield(store.Holder{}, err)
			return
		}
		for _, h := range all {
			if !yield(h, nil) {
				return
			}
		}
	}
}

func (s faultyInspector) Break(ctx context.Context, h store.Holder) error {
	return s.faults.do(ctx, Inspect, func(ctx context.Context) error { return s.inspector.Break(ctx, h) })
}
