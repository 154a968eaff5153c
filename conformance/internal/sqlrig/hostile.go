package sqlrig

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
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

// CancelTest has contexts end in the middle of every call, at any moment, with few connections. What is
// released then is free, nothing holds a connection, and no call is told what is not so.
func (e Engine) CancelTest(t *testing.T, server *servertest.SQLServer, other store.Store) {
	t.Helper()
	db := e.DB(t, e.DSN(server, ""))
	db.SetMaxOpenConns(2)
	s := e.New(t, db, sqlstore.Options{})
	Free(t, s, "warm-up")
	calls := 0
	soon := func() (context.Context, context.CancelFunc) {
		if calls++; calls%7 == 1 { // some before anything is sent
			return context.WithTimeout(t.Context(), rand.N(50*time.Microsecond))
		}
		return context.WithTimeout(t.Context(), rand.N(500*time.Microsecond<<(2*rand.N(5)))) // up to 0.5 to 128 ms: machines differ
	}
	answers := map[string]int{}
	var last fence.Token
	for i := range kit.Count(100, 3000) {
		key := fmt.Sprint(t.Name(), i%5)
		c := Claim(s, key)
		ctx, cancel := soon()
		g, err := c.Try(ctx)
		cancel()
		switch {
		case err == nil:
			if g.Token <= last {
				t.Errorf("token %v after %v", g.Token, last)
			}
			last = g.Token
			ctx, cancel := soon()
			if _, err := c.Extend(ctx); errors.Is(err, store.ErrLost) || errors.Is(err, store.ErrInvalid) {
				t.Errorf("Extend of a lease that is held: %v", err)
			}
			cancel()
			answers["granted"]++
		case errors.Is(err, store.ErrUncertain):
			answers["uncertain"]++
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, store.ErrUnavailable):
			answers["nothing"]++
		default:
			t.Errorf("Try: %v", err)
		}
		ctx, cancel = soon()
		err = c.Release(ctx)
		cancel()
		if errors.Is(err, store.ErrLost) {
			t.Errorf("Release: %v", err)
		}
		for err != nil {
			if err = c.Release(kit.Context(t, time.Minute)); errors.Is(err, store.ErrLost) {
				t.Fatalf("Release, again: %v", err)
			}
		}
		if g := Free(t, other, key); g.Token <= last {
			t.Errorf("token %v after %v", g.Token, last)
		} else {
			last = g.Token
		}
	}
	servertest.Eventually(t, time.Minute, func() error {
		if n := db.Stats().InUse; n != 0 {
			return fmt.Errorf("%d connections are in use", n)
		}
		return nil
	})
	if answers["granted"] == 0 || answers["uncertain"]+answers["nothing"] == 0 {
		t.Errorf("answers: %v: the test shows nothing", answers)
	}
	t.Logf("answers: %v", answers)
}

// WaitingStatementTest has the caller of a Try leave while the statement waits at the server, for a row
// that somebody keeps locked, and goes on waiting there. It takes nothing when the row is let go, once
// Release has said nil.
func (e Engine) WaitingStatementTest(t *testing.T, server *servertest.SQLServer, other store.Store) {
	t.Helper()
	s := e.Open(t, server, "")
	key := t.Name()
	Free(t, s, key)
	db := e.DB(t, e.DSN(server, ""))
	uncertain := 0
	for range kit.Count(4, 60) {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		var one int
		if err := tx.QueryRow("SELECT 1 FROM holdfast_leases WHERE label = '' ORDER BY 1 LIMIT 1 FOR UPDATE").Scan(&one); err != nil {
			t.Fatal(err)
		}
		c := Claim(s, key)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if g, err := c.Try(ctx); err == nil {
			t.Fatalf("Try of a row that is locked: %+v", g)
		} else if errors.Is(err, store.ErrUncertain) {
			uncertain++
		}
		cancel()
		let := make(chan error, 1)
		time.AfterFunc(rand.N(900*time.Millisecond), func() { let <- tx.Rollback() })
		servertest.Eventually(t, time.Minute, func() error { return c.Release(t.Context()) })
		Free(t, other, key)
		if err := <-let; err != nil {
			t.Error(err)
		}
		Free(t, other, key)
	}
	if uncertain == 0 {
		t.Error("no statement waited: the test shows nothing")
	}
}

// TinyTimeoutsTest has several contend for a key on a server whose time-outs end most statements. Nobody
// holds it beside another, and no error says that it is of no use to ask again.
func (e Engine) TinyTimeoutsTest(t *testing.T, server *servertest.SQLServer) {
	t.Helper()
	const stores = 4
	rounds := kit.Count(5, 100)
	counter, last := 0, fence.Token(0)
	var mu sync.Mutex
	kinds := map[string]int{}
	var wg sync.WaitGroup
	for range stores {
		s := e.Open(t, server, "")
		wg.Go(func() {
			for n := 0; n < rounds; {
				c := s.Claim("k", store.ClaimOptions{TTL: time.Minute})
				g, err := c.Try(t.Context())
				if err == nil {
					if g.Token <= last {
						t.Errorf("token %v after %v", g.Token, last)
					}
					last = g.Token
					before := counter
					time.Sleep(time.Millisecond)
					counter = before + 1
					n++
				}
				mu.Lock()
				kinds[kindOf(err)]++
				mu.Unlock()
				if kindOf(err) == "" {
					t.Errorf("Try: %v", err)
					return
				}
				for err := errors.New("first"); err != nil; {
					if err = c.Release(t.Context()); errors.Is(err, store.ErrLost) {
						t.Errorf("Release: %v", err)
						return
					}
				}
				time.Sleep(rand.N(2 * time.Millisecond))
			}
		})
	}
	wg.Wait()
	if counter != stores*rounds {
		t.Errorf("the counter is %d after %d increments", counter, stores*rounds)
	}
	t.Logf("answers: %v", kinds)
}

func kindOf(err error) string {
	if err == nil {
		return "granted"
	}
	for _, k := range []error{store.ErrUncertain, store.ErrHeld, store.ErrUnavailable} {
		if errors.Is(err, k) {
			return k.Error()
		}
	}
	return ""
}
