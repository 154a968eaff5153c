package sqlite

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// The end of a lease is a reading of the boot clock: no wall clock takes part in it.
func TestLeaseEndsByBootClock(t *testing.T) {
	s, db := open(t, lockFile(t))
	before := uptime(t)
	grant(t, claim(s, "k", time.Hour))
	after := uptime(t)
	expires := time.Duration(query[int64](t, db, `SELECT expires FROM holdfast_leases`))
	if expires < before+time.Hour || expires > after+time.Hour+20*time.Millisecond {
		t.Errorf("a lease of 1h that was granted between %v and %v of the boot clock ends at %v", before, after, expires)
	}
}

// uptime reads CLOCK_BOOTTIME in hundredths of a second.
func uptime(t *testing.T) time.Duration {
	text, err := os.ReadFile("/proc/uptime")
	if err != nil {
		t.Fatal(err)
	}
	var seconds float64
	if _, err := fmt.Sscan(string(text), &seconds); err != nil {
		t.Fatal(err)
	}
	return time.Duration(seconds * 1e9)
}

// A ticket goes on in another process with the same token, and only in the database
// and boot that it was written for.
func TestTicket(t *testing.T) {
	path := lockFile(t)
	s, db := open(t, path)
	ctx := context.Background()
	c := claim(s, "k", time.Minute)
	if _, err := s.Ticket(c); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Ticket of a claim that was not granted: %v", err)
	}
	g := grant(t, c)
	text, err := s.Ticket(c)
	if err != nil {
		t.Fatal(err)
	}
	later, _ := open(t, path)
	adopted, h, err := later.Adopt(ctx, text)
	if err != nil || h.Token != g.Token || h.Owner != g.Owner {
		t.Fatalf("Adopt = %+v, %v, want %+v", h, err, g)
	}
	mustBeHeld(t, s, "k")

	elsewhere, _ := open(t, lockFile(t))
	if _, _, err := elsewhere.Adopt(ctx, text); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Adopt in another database: %v", err)
	}
	ticket, err := store.ParseTicket(text)
	if err != nil {
		t.Fatal(err)
	}
	ticket.Boot = "another boot"
	if _, _, err := later.Adopt(ctx, ticket.String()); !errors.Is(err, store.ErrUnsupported) {
		t.Errorf("Adopt of another boot's ticket: %v", err)
	}
	if _, _, err := later.Adopt(ctx, text[:len(text)-3]); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Adopt of a damaged ticket: %v", err)
	}
	release(t, adopted)
	if _, _, err := later.Adopt(ctx, text); !errors.Is(err, store.ErrLost) {
		t.Errorf("Adopt of a released lease: %v", err)
	}
	exec(t, db, `UPDATE holdfast_leases SET owner = ?, token = token + 1, expires = ?`, g.Owner, int64(math.MaxInt64))
	if _, _, err := later.Adopt(ctx, text); !errors.Is(err, store.ErrLost) {
		t.Errorf("Adopt with another token: %v", err)
	}
}
