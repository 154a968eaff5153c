package storetest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Bench runs the benchmarks of a store: acquire and release of a key of one's own, the
// same under contention, and extension, of one lease and of a hundred at once.
func Bench(b *testing.B, cfg Config) {
	b.Run("AcquireRelease", func(b *testing.B) { benchAcquire(newBench(b, cfg), b) })
	b.Run("AcquireReleaseParallel", func(b *testing.B) { benchParallel(newBench(b, cfg), b) })
	for _, n := range []int{2, 16} {
		b.Run(fmt.Sprintf("Contended/%d", n), func(b *testing.B) { benchContended(newBench(b, cfg), b, n) })
	}
	b.Run("Extend", func(b *testing.B) { benchExtend(newBench(b, cfg), b) })
	if e := newBench(b, cfg); is[store.BatchExtender](e.s) {
		b.Run("ExtendMany/100", func(b *testing.B) { benchExtendMany(newBench(b, cfg), b, 100) })
	}
}

func newBench(b *testing.B, cfg Config) *env {
	e := newEnv(b, cfg)
	e.ctx = b.Context() // no limit: a benchmark runs as long as it is told
	e.long = 30 * time.Second
	if e.info.MaxTTL > 0 {
		e.long = min(e.long, e.info.MaxTTL)
	}
	return e
}

func (e *env) once(c store.Claim) error {
	if _, err := e.acquire(e.ctx, c); err != nil {
		return err
	}
	return c.Release(e.ctx)
}

func benchAcquire(e *env, b *testing.B) {
	key := e.key()
	for b.Loop() {
		if err := e.once(e.claim(e.s, key)); err != nil {
			b.Fatal(err)
		}
	}
}

func benchParallel(e *env, b *testing.B) {
	var n atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		key := fmt.Sprintf("storetest/%s/p%d", e.salt, n.Add(1))
		for pb.Next() {
			if err := e.once(e.claim(e.s, key)); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// benchContended counts hand-overs between n waiters in four processes.
func benchContended(e *env, b *testing.B, n int) {
	key := e.key()
	stores := []store.Store{e.s, e.s2, e.h.Open(), e.h.Open()}
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	var left atomic.Int64
	left.Store(int64(b.N))
	errs := make(chan error, n)
	b.ResetTimer()
	for i := range n {
		go func() {
			for left.Add(-1) >= 0 {
				c := e.waiter(stores[i%len(stores)], key)
				if _, err := e.acquire(ctx, c); err != nil {
					errs <- err
					return
				}
				if err := c.Release(ctx); err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			b.Error(err)
		}
	}
}

func benchExtend(e *env, b *testing.B) {
	c := e.claim(e.s, e.key())
	e.grant(c, "the holder")
	for b.Loop() {
		if _, err := c.Extend(e.ctx); err != nil {
			b.Fatal(err)
		}
	}
}

func benchExtendMany(e *env, b *testing.B, n int) {
	claims := make([]store.Claim, n)
	for i := range claims {
		claims[i] = e.claim(e.s, e.key())
		e.grant(claims[i], "a holder")
	}
	for b.Loop() {
		for _, r := range e.s.(store.BatchExtender).ExtendMany(e.ctx, claims) {
			if r.Err != nil {
				b.Fatal(r.Err)
			}
		}
	}
}
