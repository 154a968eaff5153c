package sqlstore

import (
	"context"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Ticket writes a granted claim down. It is [store.ErrUnsupported] where leases depend on
// the wall clock. See [store.Adopter].
func (s *Store) Ticket(any store.Claim) (string, error) {
	c, err := s.own(any)
	if err != nil {
		return "", err
	}
	if s.clock.wall {
		return "", errNoTickets()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.token == 0 || c.released {
		return "", &store.InvalidError{Field: "claim", Rule: "must be granted and not released"}
	}
	return store.Ticket{
		Store: s.info.Fingerprint,
		Key:   []byte(c.key),
		Owner: c.owner,
		Token: c.token,
		TTL:   c.o.TTL,
		Boot:  s.clock.boot,
		Until: c.until,
		Label: c.o.Label,
	}.String(), nil
}

func errNoTickets() error {
	return &fault{kind: store.ErrUnsupported, text: "this system has no clock that all processes share and nobody can set"}
}

// Adopt extends the grant of a ticket. See [store.Adopter].
func (s *Store) Adopt(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	c, err := s.parse(ticket)
	if err != nil {
		return nil, store.Grant{}, err
	}
	g, err := c.Extend(ctx)
	if err != nil {
		return nil, store.Grant{}, err
	}
	return c, g, nil
}

// parse reads a ticket without I/O. The owner in it is found in no other database.
func (s *Store) parse(ticket string) (*claim, error) {
	t, err := store.ParseTicket(ticket)
	if err != nil {
		return nil, err
	}
	switch {
	case s.clock.wall:
		return nil, errNoTickets()
	case t.Store != s.info.Fingerprint:
		return nil, &store.InvalidError{Field: "ticket", Rule: "must be of this database"}
	case t.Boot != s.clock.boot:
		return nil, &fault{kind: store.ErrUnsupported, text: "the ticket is of another machine or boot"}
	case t.Until <= s.clock.now():
		return nil, &store.LostError{}
	case t.Token == 0:
		return nil, &store.InvalidError{Field: "ticket", Rule: "lacks the token of its grant"}
	}
	if err := s.info.CheckTTL(t.TTL); err != nil {
		return nil, err
	}
	c := s.Claim(string(t.Key), store.ClaimOptions{TTL: t.TTL, Label: t.Label}).(*claim)
	c.owner, c.token, c.until, c.tried = t.Owner, t.Token, time.Duration(t.Until), true
	return c, nil
}
