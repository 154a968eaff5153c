package holdfast

import (
	"context"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

// What the Locker itself costs: over a store that grants at once and does nothing, and over
// memstore, with its own work.
func stores(b *testing.B, bench func(*testing.B, store.Store)) {
	b.Run("nothing", func(b *testing.B) { bench(b, noStore{}) })
	b.Run("memstore", func(b *testing.B) { bench(b, memstore.New()) })
}

func benchLocker(b *testing.B, s store.Store, o *Options) *Locker {
	k, err := New(s, o)
	if err != nil {
		b.Fatal(err)
	}
	return k
}

func benchPair(ctx context.Context, k *Locker, key string) error {
	l, err := k.Acquire(ctx, key)
	if err != nil {
		return err
	}
	return l.Release(ctx)
}

func BenchmarkAcquireRelease(b *testing.B) {
	stores(b, func(b *testing.B, s store.Store) {
		k := benchLocker(b, s, nil)
		ctx := context.Background()
		b.ReportAllocs()
		for b.Loop() {
			if err := benchPair(ctx, k, "k"); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// With a context that can end, as most callers have.
func BenchmarkAcquireReleaseCancellable(b *testing.B) {
	stores(b, func(b *testing.B, s store.Store) {
		k := benchLocker(b, s, nil)
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		b.ReportAllocs()
		for b.Loop() {
			if err := benchPair(ctx, k, "k"); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkAcquireReleaseParallel(b *testing.B) {
	stores(b, func(b *testing.B, s store.Store) {
		k := benchLocker(b, s, nil)
		ctx := context.Background()
		b.ReportAllocs()
		b.SetParallelism(64 / runtime.GOMAXPROCS(0))
		next := make(chan string, 1024)
		for i := range cap(next) {
			next <- strconv.Itoa(i)
		}
		b.RunParallel(func(pb *testing.PB) {
			key := <-next
			for pb.Next() {
				if err := benchPair(ctx, k, key); err != nil {
					b.Error(err)
					return
				}
			}
			next <- key
		})
	})
}

func BenchmarkDo(b *testing.B) {
	stores(b, func(b *testing.B, s store.Store) {
		k := benchLocker(b, s, nil)
		ctx := context.Background()
		b.ReportAllocs()
		for b.Loop() {
			if err := k.Do(ctx, "k", func(context.Context, *Lease) error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// What waits in line: each hand-over wakes a goroutine of this process.
func BenchmarkHandOver(b *testing.B) {
	stores(b, func(b *testing.B, s store.Store) {
		k := benchLocker(b, s, nil)
		ctx := context.Background()
		b.ReportAllocs()
		b.SetParallelism(4)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if err := benchPair(ctx, k, "k"); err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
}

// What waits at the store: each hand-over wakes another process, of 16, whose waiter tries in its
// own goroutine where the store is prompt, and else in one that wakes it.
func BenchmarkHandOverBetweenProcesses(b *testing.B) {
	for name, open := range map[string]func(*memstore.Store) store.Store{
		"prompt": func(s *memstore.Store) store.Store { return s.Peer() },
		"raced":  func(s *memstore.Store) store.Store { return unprompt{s.Peer()} },
	} {
		b.Run(name, func(b *testing.B) {
			mem := memstore.New()
			ctx := context.Background()
			var left atomic.Int64
			left.Store(int64(b.N))
			var wg sync.WaitGroup
			b.ResetTimer()
			for range 16 {
				k := benchLocker(b, open(mem), nil)
				wg.Go(func() {
					for left.Add(-1) >= 0 {
						if err := benchPair(ctx, k, "k"); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}

// unprompt hides that a store is prompt.
type unprompt struct{ store.Store }

// The heap that one held lease takes, without what its store keeps.
func BenchmarkHeldLeases(b *testing.B) {
	const many = 10_000
	var kept []*Locker // what they give up shall not count
	for b.Loop() {
		k := benchLocker(b, noStore{}, nil)
		kept = append(kept, k)
		keys := make([]string, many)
		for i := range keys {
			keys[i] = "key-" + strconv.Itoa(i)
		}
		leases := make([]*Lease, many)
		before, goroutines := heapInUse(), runtime.NumGoroutine()
		for i, key := range keys {
			l, err := k.Acquire(context.Background(), key)
			if err != nil {
				b.Fatal(err)
			}
			leases[i] = l
		}
		b.ReportMetric(float64(heapInUse()-before)/many, "B/lease")
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/many, "goroutines/lease")
		for _, l := range leases {
			if err := l.Release(context.Background()); err != nil {
				b.Fatal(err)
			}
		}
	}
	runtime.KeepAlive(kept)
}

func heapInUse() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// noStore grants whatever it is asked for, to everybody, and allocates nothing.
type noStore struct{}

func (noStore) Info() store.Info { return store.Info{Name: "nothing"} }

func (noStore) Prompt() {}

func (noStore) Claim(string, store.ClaimOptions) store.Claim { return noClaim{} }

type noClaim struct{}

func (noClaim) Try(context.Context) (store.Grant, error) {
	return store.Grant{Owner: "o", TTL: DefaultTTL}, nil
}

func (noClaim) Extend(context.Context) (store.Grant, error) {
	return store.Grant{Owner: "o", TTL: DefaultTTL}, nil
}

func (noClaim) Release(context.Context) error { return nil }
