package etcdstore

import (
	"context"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/holdfast-go/holdfast/store"
)

// What stands for the boot in tickets: the servers alone know how long a lease lives.
const (
	anyBoot     = "etcd"
	sessionBoot = "etcd session" // the key is on a session
)

// Ticket writes a granted claim down. A ticket is good on every machine that reaches the
// cluster. One of a claim on a session is good for the ttl of the claim, and no longer than the
// session; whoever adopts it is independent of that. See [store.Adopter].
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
	boot := anyBoot
	if c.attempt.session != nil {
		boot = sessionBoot
	}
	return store.Ticket{
		Store: s.info.Fingerprint,
		Key:   []byte(c.key),
		Owner: c.attempt.owner,
		Stamp: c.attempt.revision,
		Token: c.attempt.token,
		TTL:   c.o.TTL,
		Boot:  boot,
		Label: c.o.Label,
	}.String(), nil
}

// Adopt extends the grant of a ticket. See [store.Adopter].
func (s *Store) Adopt(ctx context.Context, ticket string) (store.Claim, store.Grant, error) {
	c, onSession, err := s.parse(ticket)
	if err == nil && onSession {
		if err = ctx.Err(); err == nil {
			_, err = race(ctx, func(ctx context.Context) (struct{}, error) { return struct{}{}, c.move(ctx) }, func() {})
		}
	}
	if err != nil {
		return nil, store.Grant{}, err
	}
	g, err := c.Extend(ctx)
	if err != nil {
		return nil, store.Grant{}, err
	}
	return c, g, nil
}

// move puts the key of a ticket from a session onto the lease that its owner names, if it is still
// as it was granted. A session is its process's: whoever renewed it from elsewhere would
// keep a dead process's other locks. From then on the process that has written the ticket can
// neither free the key, at the end of its time, nor lose it by the end of the session.
func (c *claim) move(ctx context.Context) error {
	a, _ := c.state()
	e, err := c.s.read(ctx, c.path)
	switch {
	case err != nil:
		return err
	case e == nil:
		return c.gone(nil)
	}
	revision := e.change
	switch {
	case e.Owner == a.owner && e.lease == a.lease: // an earlier call has moved it
	case e.change != a.revision:
		return c.gone(&store.HeldError{Holder: e.holder(c.key, 0)})
	default:
		if revision, err = c.rehouse(ctx, a, e.value); err != nil {
			return err
		}
	}
	c.change(func() { c.attempt.revision = revision })
	return nil
}

// rehouse writes the key anew, on the attempt's own lease.
func (c *claim) rehouse(ctx context.Context, a attempt, value []byte) (revision int64, err error) {
	if _, err := c.s.lend(ctx, a.lease, c.o.TTL); err != nil {
		return 0, err
	}
	resp, err := ask(ctx, c.s.kv.Txn, &pb.TxnRequest{
		Compare: []*pb.Compare{isAt(c.path, a.revision)},
		Success: []*pb.RequestOp{putting([]byte(c.path), value, a.lease)},
	})
	switch {
	case err == errNoLease:
		return 0, &fault{kind: store.ErrUnavailable, cause: err}
	case err != nil:
		return 0, err
	case !resp.Succeeded:
		c.s.reaper.add(a.lease, c.o.TTL)
		return 0, c.gone(nil)
	}
	return resp.Header.Revision, nil
}

// parse reads a ticket without I/O, and answers whether it is of a claim on a session.
func (s *Store) parse(ticket string) (c *claim, onSession bool, err error) {
	t, err := store.ParseTicket(ticket)
	if err != nil {
		return nil, false, err
	}
	lease := leaseOf(t.Owner)
	switch {
	case t.Store != s.info.Fingerprint:
		return nil, false, &store.InvalidError{Field: "ticket", Rule: "must be of this cluster and prefix"}
	case t.Boot != anyBoot && t.Boot != sessionBoot || lease == 0 || t.Stamp <= 0 || t.Token == 0:
		return nil, false, &store.InvalidError{Field: "ticket", Rule: "lacks what a ticket of this store has"}
	}
	if err := s.info.CheckTTL(t.TTL); err != nil {
		return nil, false, err
	}
	c = s.Claim(string(t.Key), store.ClaimOptions{TTL: t.TTL, Label: t.Label}).(*claim)
	c.attempt = attempt{lease: lease, owner: t.Owner, found: true, open: true, revision: t.Stamp, token: t.Token}
	return c, t.Boot == sessionBoot, nil
}
