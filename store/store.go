// Package store is the contract between a [holdfast.Locker] and what keeps the
// locks. Users of locks do not need it; authors of stores do.
//
// A store keeps, for each key, at most one grant at a time, and mints a fencing
// token in the very step that grants. It never sleeps to wait for another
// holder, and never retries beyond what its own protocol says: the loop is the
// Locker's. Only durations cross this boundary, never points in time.
//
// Package storetest holds the conformance suite that every store runs.
package store

import (
	"context"
	"iter"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// Store is a shared lock backend. It is safe for concurrent use. Whoever opened
// the client underneath closes it.
type Store interface {
	// Info describes the store. It does no I/O and always answers the same.
	Info() Info

	// Claim returns a fresh claim on key, without I/O. The caller has checked
	// the key with [CheckKey] and the options with [Info.CheckTTL]; a store that
	// has rules beyond those answers an [*InvalidError] from Try, before any I/O.
	Claim(key string, o ClaimOptions) Claim
}

// Info says what a store is and what it can do.
type Info struct {
	// Name is a short word for people and metrics, such as "redlock".
	Name string

	// Fingerprint identifies the shared state. Two store values, in whatever
	// process, that reach the same locks have the same one. It holds no credentials.
	Fingerprint string

	// Fencing says how far the store's tokens can be trusted.
	Fencing Fencing

	// MinTTL and MaxTTL bound the ttl of a claim; MaxTTL is zero where there is
	// no ceiling. TTLStep is the unit to which the store rounds a ttl; zero means
	// a millisecond.
	MinTTL, MaxTTL, TTLStep time.Duration
}

// Fencing is the strength of a store's fencing tokens.
type Fencing int

const (
	// FencingNone: the store mints no tokens, Grant.Token is zero.
	FencingNone Fencing = iota
	// FencingByClock: tokens are unique and grow, also when state is lost, as long as
	// no server clock goes back further than the store documents.
	FencingByClock
	// FencingDurable: tokens grow for as long as the store's durable state lives.
	FencingDurable
)

// ClaimOptions are the terms of a claim.
type ClaimOptions struct {
	// TTL is asked from the store, at the grant and at each extension.
	TTL time.Duration
	// Wait says that the caller means to wait: the claim may keep a place in the
	// store's queue between Try calls.
	Wait bool
	// Least is the shortest validity that is of use to the caller, who extends the grant as
	// soon as it asks for: the store may then grant less than TTL at first. Zero means that
	// the whole TTL is wanted.
	Least time.Duration
	// Label tells people who holds the key, such as host and pid. It has no
	// meaning for the store, which may cut it at 64 bytes.
	Label string
}

// Claim is one acquisition: it is tried until granted, extended while held, and
// released once. It is never used for a second acquisition.
//
// Calls of one claim do not overlap, but Release may be called while Try or Extend
// runs, and then wins: whatever the other call is granted is given back. Each call
// returns soon after its context is done, whatever the client underneath does.
type Claim interface {
	// Try makes one attempt. Where another holds the key, it answers a [*HeldError].
	// Repeating it after any error is harmless: a grant whose reply was lost is found
	// again or given back, never doubled. [ErrUncertain] means that the store may
	// have granted; [ErrUnavailable] that it cannot decide now; [ErrInvalid],
	// [ErrUnsupported] that repeating is useless; [ErrLost], [ErrReleased] that this
	// claim has ended, and only a fresh one can be granted. A done context takes nothing.
	Try(ctx context.Context) (Grant, error)

	// Extend asks for the ttl anew. It never re-acquires: [ErrLost], as a
	// [*LostError], is final and says that the grant is gone from the store. Any other
	// error leaves the question open, and the caller may ask again.
	Extend(ctx context.Context) (Grant, error)

	// Release gives the key back, or withdraws a claim that waits. It compares the
	// owner: another's grant is never touched. [ErrLost] says that the grant had gone
	// before; [ErrUncertain] that the store did not confirm, in which case the grant
	// ends with its ttl at the latest. For a claim that was never granted, nil may also say
	// that whatever of it is still under way will take nothing. It is idempotent: a call after one that
	// succeeded answers nil, a call after one that failed tries again.
	Release(ctx context.Context) error
}

// Grant is what a store promises. TTL counts from the start of the call that returned
// it, undiminished: the Locker, and nobody else, subtracts drift and margin. A store
// that needed several rounds adds what had passed before its last request was sent.
// A TTL shorter than asked is honoured.
type Grant struct {
	Token fence.Token // the same for the whole life of a grant
	Owner string      // unique random identity of the attempt
	TTL   time.Duration
	// ExtendIn is when a grant that is shorter than asked should be extended, counted as TTL
	// is. Zero leaves it to the caller.
	ExtendIn time.Duration
}

// Waiter is implemented by a claim that has a better way to wait than polling. Wait
// returns nil when another Try is worth it, at the latest when held says that the
// grant ends. A wake-up is only a hint and may be lost.
type Waiter interface {
	Wait(ctx context.Context, held *HeldError) error
}

// Witness is implemented by a claim that may learn that its grant is gone before it is extended, such
// as from a server that has ended its session.
type Witness interface {
	// OnLoss has f called, once, when the claim learns so; it may never learn. It is called after a
	// grant, and the last f counts. f does not block, and an Extend says what was lost.
	OnLoss(f func())
}

// BatchExtender is implemented by a store that extends many claims in one exchange.
// The answers stand in the order of the claims, which are all of this store. The
// TTL of each grant counts from the start of the call.
type BatchExtender interface {
	ExtendMany(ctx context.Context, claims []Claim) []Result
}

// Result is the answer to one claim of a batch.
type Result struct {
	Grant Grant
	Err   error
}

// Adopter is implemented by a store whose grants can go on in another process.
type Adopter interface {
	// Ticket writes a granted claim down. The claim is not extended or released
	// afterwards.
	Ticket(c Claim) (string, error)
	// Adopt takes a ticket over: it refreshes the grant and never acquires. A lapsed
	// ticket is [ErrLost], a damaged one [ErrInvalid], one of another machine or boot
	// [ErrUnsupported].
	Adopt(ctx context.Context, ticket string) (Claim, Grant, error)
}

// Inspector is implemented by a store that can tell who holds a key.
type Inspector interface {
	// Inspect answers the holder of key, and a zero Holder.Owner where there is none; and who
	// waits for it, as far as the store has a queue.
	Inspect(ctx context.Context, key string) (Holder, error)
	// List answers the holders of all keys that begin with prefix, in any order.
	List(ctx context.Context, prefix string) iter.Seq2[Holder, error]
	// Break takes the key from h.Owner without ever letting two hold: the holder loses it at its
	// next extension, and nobody else gets it while the holder may still trust its lease, for at
	// most the longest ttl that the store grants. It fails with a [*HeldError] where another
	// holds the key, with [ErrLost] where nobody does. [ErrUnavailable] without [ErrUncertain] says
	// that nothing was done; after [ErrUncertain] the holder may have lost the key or not, and Break
	// may be repeated. Of a key that was broken already, named by the Holder that Inspect
	// answers since, it answers nil.
	Break(ctx context.Context, h Holder) error
}

// Holder is who holds a key, as far as the store knows.
type Holder struct {
	Key   string
	Owner string
	Label string      // for people; empty where unknown
	Token fence.Token // zero where unknown
	TTL   time.Duration
	// NoTTL: the grant has no end by itself (another library's). TTL is then zero.
	NoTTL bool
	// Foreign: another library's lock on the same key.
	Foreign bool
	// Broken: an operator has taken the key from its holder ([Inspector]). Nobody holds it, and
	// nobody gets it while its former holder may trust its lease, which is for TTL, or less where that
	// holder gives it up; Label says who broke it.
	Broken bool
	// Session: the key is free when the holder's session ends, and not by itself when TTL is over:
	// that of a holder that has died ends later.
	Session bool
	// Held is how long the key has been held, as far as the store knows: it may be the time since
	// the holder began to wait. Zero where unknown.
	Held time.Duration
	// Waiting is how many claims are in the store's queue for the key, also where nobody holds
	// it, which can be for a moment; zero where unknown. A claim that died is counted until
	// the store comes upon it. Waiters of one process that queue behind one claim are one.
	Waiting int
	// Queue is who is in that queue, the next one first, at most 100. Only Inspect answers it.
	Queue []Queued
}

// Queued is a claim that waits in a store's queue.
type Queued struct {
	Owner  string
	Label  string        // for people; empty where unknown
	Waited time.Duration // since the claim was first tried, by the store's clock; never negative
}

// CheckTTL refuses a ttl that the store cannot keep.
func (i Info) CheckTTL(ttl time.Duration) error {
	floor := max(i.MinTTL, MinTTL)
	switch {
	case ttl <= 0:
		return &InvalidError{Field: "TTL", Value: ttl.String(), Rule: "must be positive; there is no lease without an end"}
	case ttl < floor:
		return &InvalidError{Field: "TTL", Value: ttl.String(), Rule: "must be at least " + floor.String()}
	case i.MaxTTL > 0 && ttl > i.MaxTTL:
		return &InvalidError{Field: "TTL", Value: ttl.String(), Rule: "must be at most " + i.MaxTTL.String() +
			", the store's MaxTTL; a lease is extended while it is held, so a short ttl suffices"}
	}
	return nil
}
