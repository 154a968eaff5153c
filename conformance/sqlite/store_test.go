package sqlite

import (
	"testing"

	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

func harness(t testing.TB) storetest.Harness {
	path := lockFile(t)
	return storetest.Harness{Open: func() store.Store {
		s, _ := open(t, path)
		return s
	}}
}

func TestStore(t *testing.T) { storetest.Run(t, storetest.Config{New: harness}) }

func BenchmarkStore(b *testing.B) { storetest.Bench(b, storetest.Config{New: harness}) }
