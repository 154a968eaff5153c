package etcdstore

import (
	"context"

	"github.com/holdfast-go/holdfast/store"
)

// anyBoot stands for the boot in tickets: the servers alone know how long a lease lives.
const anyBoot = "etcd"

// Ticket writes a granted claim down. A ticket is good on every machine that reaches the
// cluster. See [store.Adopter].
func (s *Store) Ticket(any store.Claim) (string, error) {
	c, err := s.own(any)
	if err != nil {
		return "", err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.attempt.revision == 0 || c.released || c.lost {
		return "", &store.InvalidError{Field: "claim", Rule: "must be granted and not released"}
	}
	return store.Ticket{
		Store: s.info.Fingerprint,
		Key:   []byte(c.key),
		Owner: c.attempt.owner,
		Stamp: c.attempt.revision,
		Token: c.attempt.token,
		TTL:   c.o.TTL,
		Boot:  anyBoot,
		Label: c.o.Label,
	}.String(), nil
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

// parse reads a ticket without I/O.
func (s *Store) parse(ticket string) (*claim, error) {
	t, err := store.ParseTicket(ticket)
	if err != nil {
		return nil, err
	}
	lease := leaseOf(t.Owner)
	switch {
	case t.Store != s.info.Fingerprint:
		return nil, &store.InvalidError{Field: "ticket", Rule: "must be of this cluster and prefix"}
	case t.Boot != anyBoot || lease == 0 || t.Stamp <= 0 || t.Token == 0:
		return nil, &store.InvalidError{Field: "ticket", Rule: "lacks what a ticket of this store has"}
	}
	if err := s.info.CheckTTL(t.TTL); err != nil {
		return nil, err
	}
	c := s.Claim(string(t.Key), store.ClaimOptions{TTL: t.TTL, Label: t.Label}).(*claim)
	c.attempt = attempt{lease: lease, owner: t.Owner, found: true, open: true, revision: t.Stamp, token: t.Token}
	return c, nil
}
