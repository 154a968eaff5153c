package holdfast

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

// LOS-08, TTL-03, TTL-09: contradictions are refused where the Locker is made.
func TestOptionsAreRefused(t *testing.T) {
	ceiling := changed{Store: memstore.New(), info: func(i *store.Info) { i.MaxTTL = 30 * time.Second }}
	for name, c := range map[string]struct {
		o     Options
		field string
	}{
		"negative ttl":                {Options{TTL: -1}, "TTL"},
		"ttl below the floor":         {Options{TTL: 99 * time.Millisecond}, "TTL"},
		"ttl above the ceiling":       {Options{TTL: 31 * time.Second}, "TTL"},
		"ttl of an overflow":          {Options{TTL: seconds(1e12)}, "TTL"},
		"ttl without an end":          {Options{TTL: math.MaxInt64}, "TTL"},
		"negative ExtendEvery":        {Options{ExtendEvery: -1}, "ExtendEvery"},
		"half of the ttl":             {Options{TTL: 2 * time.Second, ExtendEvery: time.Second}, "ExtendEvery"},
		"ExtendEvery over the ttl":    {Options{TTL: time.Second, ExtendEvery: time.Minute}, "ExtendEvery"},
		"half of the default ttl":     {Options{ExtendEvery: DefaultTTL / 2}, "ExtendEvery"},
		"extend and do not":           {Options{ExtendEvery: time.Second, NoExtend: true}, "ExtendEvery"},
		"negative MaxHold":            {Options{MaxHold: -1}, "MaxHold"},
		"negative Margin":             {Options{Margin: -1}, "Margin"},
		"Margin as long as the ttl":   {Options{TTL: time.Second, Margin: time.Second}, "Margin"},
		"Margin over the ttl":         {Options{TTL: time.Second, Margin: time.Minute}, "Margin"},
		"Margin that leaves nothing":  {Options{TTL: time.Second, Margin: 990 * time.Millisecond}, "Margin"},
		"no time left for extensions": {Options{TTL: 10 * time.Second, Margin: 8 * time.Second, ExtendEvery: 3 * time.Second}, "ExtendEvery"},
	} {
		_, err := New(ceiling, &c.o)
		want(t, err, ErrInvalid)
		var invalid *InvalidError
		if !errors.As(err, &invalid) || invalid.Field != c.field || invalid.Rule == "" {
			t.Errorf("%s: %q names not the field %s and a rule", name, err, c.field)
		}
		k, err := New(ceiling, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := k.With(c.o); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: With answers %v", name, err)
		}
	}
	_, err := New(memstore.New(), &Options{TTL: math.MaxInt64}) // a store without a ceiling
	want(t, err, ErrInvalid)
	_, err = New(nil, nil)
	want(t, err, ErrInvalid)
	none := changed{Store: memstore.New(), info: func(i *store.Info) { i.Fencing = store.FencingNone }}
	_, err = New(none, &Options{RequireFencing: true})
	want(t, err, ErrUnsupported)
	k, err := New(none, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = k.With(Options{RequireFencing: true})
	want(t, err, ErrUnsupported)
}

// seconds multiplies as a careless caller does.
func seconds(n int64) time.Duration { return time.Duration(n) * time.Second }

// TTL-03: no ttl means the default, never one without an end.
func TestDefaultsFitTheStore(t *testing.T) {
	for name, c := range map[string]struct {
		info func(*store.Info)
		ttl  time.Duration
	}{
		"any":          {nil, 15 * time.Second},
		"low ceiling":  {func(i *store.Info) { i.MaxTTL = 6 * time.Second }, 6 * time.Second},
		"high floor":   {func(i *store.Info) { i.MinTTL = time.Minute }, time.Minute},
		"high ceiling": {func(i *store.Info) { i.MaxTTL = time.Hour }, 15 * time.Second},
	} {
		k, err := New(changed{Store: memstore.New(), info: c.info}, nil)
		if err != nil {
			t.Fatal(name, err)
		}
		if k.o.TTL != c.ttl || k.o.ExtendEvery != c.ttl/3 {
			t.Errorf("%s: ttl %v, extended every %v", name, k.o.TTL, k.o.ExtendEvery)
		}
		if !strings.Contains(k.o.Label, ":") {
			t.Errorf("label %q does not name host and process", k.o.Label)
		}
	}
}

func TestWithInherits(t *testing.T) {
	observer := &record{}
	k, err := New(memstore.New(), &Options{TTL: 9 * time.Second, MaxHold: time.Hour, Margin: time.Second, Label: "me", Observer: observer})
	if err != nil {
		t.Fatal(err)
	}
	same, err := k.With(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if same.o != k.o || same.f != k.f || same.observer != k.observer {
		t.Errorf("inherited %+v from %+v", same.o, k.o)
	}
	short, err := k.With(Options{TTL: 3 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if short.o.ExtendEvery != 988*time.Millisecond-4*time.Millisecond && short.o.ExtendEvery != (store.Validity(3*time.Second, 0)-time.Second)/2 {
		t.Errorf("the default of ExtendEvery does not follow the ttl: %v", short.o.ExtendEvery)
	}
	if short.o.Label != "me" || short.o.MaxHold != time.Hour {
		t.Errorf("inherited %+v", short.o)
	}
	by, err := k.With(Options{NoExtend: true})
	if err != nil || !by.o.NoExtend {
		t.Fatal(err)
	}
	if again, err := by.With(Options{ExtendEvery: time.Second}); err != nil || again.o.NoExtend {
		t.Errorf("ExtendEvery does not turn extension on again: %v", err)
	}
}

func TestKeysAreRefusedBeforeAnyCall(t *testing.T) {
	bubble(t, Options{}, func(b *bed) {
		b.faults.SetAll(func(context.Context, func(context.Context) error) error {
			t.Error("the store was called")
			return store.ErrUnavailable
		})
		for _, key := range []string{"", strings.Repeat("k", 513), "a\x00b", "a:fence", "a:queue", "{holdfast}:node"} {
			_, err := b.locks.Acquire(b.ctx, key)
			want(t, err, ErrInvalid)
			_, err = b.locks.TryAcquire(b.ctx, key)
			want(t, err, ErrInvalid)
			_, err = b.locks.AcquireAll(b.ctx, "good", key)
			want(t, err, ErrInvalid)
			err = b.locks.Do(b.ctx, key, func(context.Context, *Lease) error { t.Error("fn was called"); return nil })
			want(t, err, ErrInvalid)
		}
		want(t, b.locks.Do(b.ctx, "k", nil), ErrInvalid)
		_, err := b.locks.AcquireAll(b.ctx)
		want(t, err, ErrInvalid)
		_, err = b.locks.Adopt(b.ctx, "hf1.damaged")
		want(t, err, ErrInvalid)
	})
}

func TestErrorsAreOneLine(t *testing.T) {
	several := errors.Join(errors.New("one"), errors.New("two\r\n3\r4"))
	err := &Error{Op: "acquire", Key: "k\n", Store: "mem", Err: join(several, nil, ErrHeld)}
	if got := err.Error(); got != `holdfast: acquire "k\n" on mem: one; two; 3; 4; held by another` {
		t.Error(got)
	}
	want(t, err, ErrHeld)
	if join(nil, nil) != nil || join(nil, ErrHeld) != ErrHeld {
		t.Error("join wraps what need not be wrapped")
	}
	long := (&Error{Op: "acquire", Key: strings.Repeat("k", 512), Err: ErrHeld}).Error()
	if len(long) > 150 {
		t.Error(long)
	}
	for _, c := range []struct{ err, is, not error }{
		{ErrMaxHold, ErrLost, ErrReleased},
		{ErrHandedOver, ErrReleased, ErrLost},
		{&ExpiredError{Err: ErrUnavailable}, ErrUnavailable, ErrReleased},
		{&ExpiredError{}, ErrLost, ErrUnavailable},
		{ErrAlreadyHeld, ErrAlreadyHeld, ErrHeld},
	} {
		if !errors.Is(c.err, c.is) || errors.Is(c.err, c.not) {
			t.Errorf("%v", c.err)
		}
	}
}
