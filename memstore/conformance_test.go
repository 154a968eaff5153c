package memstore_test

import (
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

func harness(testing.TB) storetest.Harness {
	s := memstore.New()
	return storetest.Harness{Open: func() store.Store { return s.Peer() }}
}

func TestConformance(t *testing.T) {
	storetest.Run(t, storetest.Config{New: harness, Bubble: true, Fair: true})
}

// The suite in real time, as servers run it.
func TestConformanceInRealTime(t *testing.T) {
	storetest.Run(t, storetest.Config{New: harness, TTL: 400 * time.Millisecond, Fair: true})
}

// The suite through the fault store, whose every call takes a while: half of it on the way
// there, half on the way back.
func TestConformanceWithLatency(t *testing.T) {
	slow := func(s store.Store) store.Store {
		there, faults := storetest.NewFaults(s)
		faults.SetAll(storetest.Delay(time.Millisecond))
		back, faults := storetest.NewFaults(there)
		faults.SetAll(storetest.DelayReply(time.Millisecond))
		return back
	}
	storetest.Run(t, storetest.Config{Bubble: true, Fair: true, New: func(testing.TB) storetest.Harness {
		s := memstore.New()
		return storetest.Harness{Open: func() store.Store { return slow(s.Peer()) }}
	}})
}

func BenchmarkStore(b *testing.B) {
	storetest.Bench(b, storetest.Config{New: harness})
}
