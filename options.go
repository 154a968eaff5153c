package holdfast

import (
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/internal/label"
	"github.com/holdfast-go/holdfast/store"
)

// DefaultTTL is the ttl of a Locker whose options name none, as far as its store allows.
const DefaultTTL = 15 * time.Second

// maxTTL keeps sums of times far from the end of their range.
const maxTTL = 10 * 365 * 24 * time.Hour

// Options are the terms of the leases that a [Locker] acquires. The zero value is a good
// choice. Contradictory values are refused with an [*InvalidError].
type Options struct {
	// TTL is asked from the store, and bounds for how long a holder that dies keeps others
	// away. A lease is extended while it is held, so it need not cover the work.
	// Default: 15 s, or the nearest that the store keeps.
	TTL time.Duration

	// ExtendEvery is the time between two extensions, less than half of TTL. An extension
	// may be sent earlier: up to a tenth of it, together with another one, and where many
	// leases are held as much as spreads their extensions evenly. One that failed is repeated
	// every TTL/10. Default: TTL/3, or half of the validity where that is less.
	ExtendEvery time.Duration

	// NoExtend leaves extension to the caller. Default: leases are extended.
	NoExtend bool

	// MaxHold ends a lease, as lost with [ErrMaxHold], and releases its key, however well
	// it could be extended. Default: unbounded.
	MaxHold time.Duration

	// Margin is the time by which the validity ends before the ttl at the store does, so
	// that work can be stopped before another can begin. Default: none, beyond the drift.
	Margin time.Duration

	// Label tells people who holds the key. Stores may cut it at 64 bytes.
	// Default: host and process id.
	Label string

	// RequireFencing refuses a store that mints no fencing tokens.
	RequireFencing bool

	// Observer is told what happens. Default: nobody.
	Observer Observer
}

// inherit fills the zero fields of o from base. A bool that base sets stays set.
func (o Options) inherit(base Options) Options {
	if o.TTL == 0 {
		o.TTL = base.TTL
	}
	if o.ExtendEvery == 0 && !o.NoExtend {
		o.ExtendEvery = base.ExtendEvery
	}
	if o.ExtendEvery == 0 {
		o.NoExtend = o.NoExtend || base.NoExtend
	}
	if o.MaxHold == 0 {
		o.MaxHold = base.MaxHold
	}
	if o.Margin == 0 {
		o.Margin = base.Margin
	}
	if o.Label == "" {
		o.Label = base.Label
	}
	if o.Observer == nil {
		o.Observer = base.Observer
	}
	o.RequireFencing = o.RequireFencing || base.RequireFencing
	return o
}

// complete checks o against a store and fills in the defaults.
func (o Options) complete(info store.Info) (Options, error) {
	if o.TTL == 0 {
		o.TTL = max(DefaultTTL, info.MinTTL)
		if info.MaxTTL > 0 {
			o.TTL = min(o.TTL, info.MaxTTL)
		}
	}
	if err := info.CheckTTL(o.TTL); err != nil {
		return o, err
	}
	invalid := func(field string, value time.Duration, rule string) (Options, error) {
		return o, &InvalidError{Field: field, Value: value.String(), Rule: rule}
	}
	validity := store.Validity(o.TTL, 0) - o.Margin
	switch {
	case o.TTL > maxTTL:
		return invalid("TTL", o.TTL, fmt.Sprintf("must be at most %v; a lease is extended while it is held, so a short ttl suffices", maxTTL))
	case o.ExtendEvery < 0:
		return invalid("ExtendEvery", o.ExtendEvery, "must not be negative; NoExtend turns extension off")
	case o.MaxHold < 0:
		return invalid("MaxHold", o.MaxHold, "must not be negative; zero means unbounded")
	case o.Margin < 0:
		return invalid("Margin", o.Margin, "must not be negative")
	case o.Margin >= o.TTL:
		return invalid("Margin", o.Margin, fmt.Sprintf("must be less than TTL, which is %v", o.TTL))
	case validity <= 0:
		return invalid("Margin", o.Margin, fmt.Sprintf("leaves no validity: TTL %v less the drift %v must exceed it", o.TTL, store.Drift(o.TTL)))
	case o.NoExtend && o.ExtendEvery > 0:
		return invalid("ExtendEvery", o.ExtendEvery, "contradicts NoExtend")
	case o.ExtendEvery >= o.TTL/2:
		return invalid("ExtendEvery", o.ExtendEvery, fmt.Sprintf("must be less than half of TTL, which is %v, so that one failed extension can be repeated", o.TTL))
	case o.ExtendEvery >= validity:
		return invalid("ExtendEvery", o.ExtendEvery, fmt.Sprintf("must be less than the validity, which is %v: TTL less drift and Margin", validity))
	case o.RequireFencing && info.Fencing == store.FencingNone:
		return o, fmt.Errorf("%w: RequireFencing, and this store mints no fencing tokens", ErrUnsupported)
	}
	if o.ExtendEvery == 0 {
		o.ExtendEvery = min(o.TTL/3, validity/2)
	}
	if o.Label == "" {
		o.Label = label.Process()
	}
	return o, nil
}
