package sqlite

import (
	"context"
	"testing"

	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/store/storetest"
)

func harness(t testing.TB) storetest.Harness {
	path := lockFile(t)
	return storetest.Harness{
		Open: func() store.Store {
			s, _ := open(t, path)
			return s
		},
		OpenFaulty: func() (store.Store, storetest.Link) {
			s, link := openFaulty(t, path)
			if err := s.EnsureSchema(context.Background()); err != nil {
				t.Fatal(err)
			}
			return s, link
		},
	}
}

func TestStore(t *testing.T) { storetest.Run(t, storetest.Config{New: harness}) }

func BenchmarkStore(b *testing.B) { storetest.Bench(b, storetest.Config{New: harness}) }
