package memstore_test

import (
	"testing"

	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

func harness(testing.TB) storetest.Harness {
	s := memstore.New()
	return storetest.Harness{Open: func() store.Store { return s.Peer() }}
}

func TestConformance(t *testing.T) {
	storetest.Run(t, storetest.Config{New: harness, Bubble: true})
}

func BenchmarkStore(b *testing.B) {
	storetest.Bench(b, storetest.Config{New: harness})
}
