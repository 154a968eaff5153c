package holdfast_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/memstore"
	"github.com/holdfast-go/holdfast/store"
)

// telling is a store whose claims tell when they are told to.
type telling struct {
	store.Store
	tell chan func()
}

type tellingClaim struct {
	store.Claim
	tell chan func()
}

func (s telling) Claim(key string, o store.ClaimOptions) store.Claim {
	return tellingClaim{s.Store.Claim(key, o), s.tell}
}

func (c tellingClaim) OnLoss(f func()) { c.tell <- f }

// A claim that learns of its loss by itself ends the lease at once, whether or not that is extended.
// One that was mistaken ends nothing.
func TestClaimTellsOfItsLoss(t *testing.T) {
	for _, noExtend := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			mem := memstore.New()
			s := telling{mem, make(chan func(), 1)}
			locks, err := holdfast.New(s, &holdfast.Options{TTL: 15 * time.Second, NoExtend: noExtend})
			if err != nil {
				t.Fatal(err)
			}
			lease, err := locks.Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			tell := <-s.tell
			tell()
			synctest.Wait()
			if err := lease.Err(); err != nil {
				t.Fatalf("a claim that was mistaken ends the lease: %v", err)
			}
			if err := mem.Break(t.Context(), store.Holder{Key: "k", Owner: lease.Owner()}); err != nil {
				t.Fatal(err)
			}
			began := time.Now()
			tell()
			synctest.Wait()
			if took := time.Since(began); !errors.Is(lease.Err(), holdfast.ErrLost) || took != 0 {
				t.Errorf("%v after its claim has told, the lease says %v, want ErrLost at once", took, lease.Err())
			}
			_ = lease.Release(t.Context())
		})
	}
}
