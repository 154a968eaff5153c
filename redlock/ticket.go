package redlock

import (
	"context"
	"fmt"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Ticket writes a lease down. The claim is not extended or released afterwards.
func (s *Store) Ticket(sc store.Claim) (string, error) {
	c, ours := sc.(*claim)
	if !ours || c.s != s {
		return "", &store.InvalidError{Field: "claim", Rule: "must be a claim of this store"}
	}
	if s.boot == "" {
		return "", fmt.Errorf("%w: a ticket needs a clock that all processes of the machine share", store.ErrUnsupported)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.lost != nil:
		return "", c.lost
	case c.ended || c.ticketed:
		return "", store.ErrReleased
	case !c.held:
		return "", &store.InvalidError{Field: "claim", Value: c.key(), Rule: "is not granted; only a lease has a ticket"}
	case s.clock.Passed(c.until):
		return "", &store.LostError{}
	}
	c.ticketed, c.held = true, false
	t := store.Ticket{
		Store: s.info.Fingerprint,
		Key:   []byte(c.key()),
		Owner: c.attempt.owner,
		Token: c.token,
		TTL:   c.ttl,
		Boot:  s.boot,
		Until: c.until.Boot(),
		Stamp: c.attempt.stamp, // none of those that only a node with a clock far off got
	}
	for _, n := range c.attempt.nodes {
		var until time.Duration
		if !n.until.IsZero() {
			until = n.until.Boot()
		}
		t.Nodes = append(t.Nodes, until)
	}
	return t.String(), nil
}

// Adopt takes a ticket over, on the machine and boot that wrote it: it is an extension, and
// counts a node only while that node's promise to the ticket's owner runs. It never votes,
// so a lapsed ticket is lost.
func (s *Store) Adopt(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	t, err := store.ParseTicket(ticket)
	if err != nil {
		return nil, store.Grant{}, err
	}
	switch {
	case t.Store != s.info.Fingerprint:
		return nil, store.Grant{}, &store.InvalidError{Field: "ticket", Rule: "is of another store: other nodes or another prefix"}
	case len(t.Nodes) != len(s.peers) || t.TTL > s.opts.MaxTTL:
		return nil, store.Grant{}, &store.InvalidError{Field: "ticket", Rule: "does not fit this store's nodes or MaxTTL"}
	case s.boot == "" || t.Boot != s.boot:
		return nil, store.Grant{}, fmt.Errorf("%w: the ticket is of another machine or boot", store.ErrUnsupported)
	}
	c := s.Claim(string(t.Key), store.ClaimOptions{TTL: t.TTL}).(*claim)
	if c.invalid != nil {
		return nil, store.Grant{}, c.invalid
	}
	o := parseOwner(t.Owner)
	c.birth, c.label, c.adopted = o.birth, encodeLabel(o.label), true
	c.attempt = c.newAttempt(o.text)
	c.attempt.stamp = t.Stamp
	for i, until := range t.Nodes {
		c.attempt.nodes[i].sent = t.Stamp
		if until > 0 {
			c.attempt.nodes[i].until = s.clock.At(until) // rule L: what the ticket says counts, no more
		}
	}
	c.held, c.token, c.until = true, t.Token, s.clock.At(t.Until)
	grant, err := c.Extend(ctx)
	if err != nil {
		return nil, store.Grant{}, err
	}
	return c, grant, nil
}
