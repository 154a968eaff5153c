package sqlrig

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

// OneKeyTwiceTest extends leases of one key in one batch: an older one, whose loss is not known yet,
// is told of the loss and the newer one is extended, in any order; and two that are the same lease
// are both extended.
func (e Engine) OneKeyTwiceTest(t *testing.T) {
	server := e.Start(t)
	s := e.Open(t, server, "")
	db := e.DB(t, e.DSN(server, ""))
	for _, first := range []string{"the newer one", "the older one"} {
		older, newer, other := Claim(s, first), Claim(s, first), Claim(s, first+"'s neighbour")
		g := Grant(t, older)
		Exec(t, db, fmt.Sprintf("UPDATE holdfast_leases SET owner = '' WHERE token = %d", g.Token)) // as its end does
		g = Grant(t, newer)
		Grant(t, other)
		batch := []store.Claim{newer, older, other}
		if first == "the older one" {
			batch[0], batch[1] = older, newer
		}
		for i, r := range s.ExtendMany(t.Context(), batch) {
			switch lost := batch[i] == older; {
			case lost && !errors.Is(r.Err, store.ErrLost):
				t.Errorf("%s first: the older one is told %+v, %v", first, r.Grant, r.Err)
			case !lost && r.Err != nil:
				t.Errorf("%s first: lease %d, which is held: %v", first, i, r.Err)
			case batch[i] == newer && r.Grant.Token != g.Token:
				t.Errorf("%s first: the newer one has token %v, had %v", first, r.Grant.Token, g.Token)
			}
		}
	}
	c := Claim(s, "adopted")
	Grant(t, c)
	ticket, err := s.Ticket(c)
	if err != nil {
		t.Fatal(err)
	}
	var twice []store.Claim
	for range 2 {
		a, _, err := s.Adopt(t.Context(), ticket)
		if err != nil {
			t.Fatal(err)
		}
		twice = append(twice, a)
	}
	for i, r := range s.ExtendMany(t.Context(), twice) {
		if r.Err != nil {
			t.Errorf("adopter %d of a lease that is held: %v", i, r.Err)
		}
	}
}

// MissingTableTest: EnsureSchema makes the table that is missing while the other one is there, as
// the error that tells of it promises.
func (e Engine) MissingTableTest(t *testing.T) {
	server := e.Start(t)
	db := e.DB(t, e.DSN(server, ""))
	Free(t, e.Open(t, server, ""), "k")
	Exec(t, db, "DROP TABLE holdfast_leases")
	s := e.Open(t, server, "")
	if err := s.EnsureSchema(t.Context()); err != nil {
		t.Errorf("EnsureSchema without one of the tables: %v", err)
	}
	Free(t, s, "k")
}

// ManyBeginTest has many make the tables of an empty database at once.
func (e Engine) ManyBeginTest(t *testing.T, opts ...servertest.SQLOption) {
	server := e.Start(t, opts...)
	var stores []*sqlstore.Store
	for range 20 {
		stores = append(stores, e.Open(t, server, ""))
	}
	db := e.DB(t, e.DSN(server, ""))
	for range 3 {
		var wg sync.WaitGroup
		for _, s := range stores {
			wg.Go(func() {
				if err := s.EnsureSchema(t.Context()); err != nil {
					t.Errorf("EnsureSchema: %v", err)
				}
			})
		}
		wg.Wait()
		Free(t, stores[0], "k")
		Exec(t, db, "DROP TABLE holdfast_leases")
		Exec(t, db, "DROP TABLE holdfast_meta")
	}
}
