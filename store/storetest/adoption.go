package storetest

import (
	"errors"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

var adoptionTests = []test{
	{name: "RoundTrip", run: testAdopt, needs: is[store.Adopter]},
	{name: "Again", run: testAdoptAgain, needs: is[store.Adopter]},
	{name: "Lapsed", run: testAdoptLapsed, needs: is[store.Adopter]},
	{name: "Released", run: testAdoptReleased, needs: is[store.Adopter]},
	{name: "Taken", run: testAdoptTaken, needs: is[store.Adopter]},
	{name: "Damaged", run: testAdoptDamaged, needs: is[store.Adopter]},
	{name: "DoneContext", run: testAdoptDone, needs: is[store.Adopter]},
	{name: "NothingToWrite", run: testTicketWithoutGrant, needs: is[store.Adopter]},
}

func (e *env) ticket(s store.Store, c store.Claim) string {
	e.Helper()
	text, err := s.(store.Adopter).Ticket(c)
	if err != nil {
		e.Fatalf("Ticket of a lease that stands answers %v", err)
	}
	return text
}

func (e *env) adopt(s store.Store, ticket string) (c store.Claim, g store.Grant) {
	e.Helper()
	err := e.steady("Adopt", func() (err error) { c, g, err = s.(store.Adopter).Adopt(e.ctx, ticket); return err })
	if err != nil {
		e.Fatalf("Adopt of a lease that stands answers %v", err)
	}
	e.sound(g, "an adopted lease")
	return c, g
}

// unadoptable adopts and must be told that the lease is gone; it takes nothing.
func (e *env) unadoptable(ticket, what string) {
	e.Helper()
	for range 2 {
		err := e.steady("Adopt", func() error { _, _, err := e.s2.(store.Adopter).Adopt(e.ctx, ticket); return err })
		if !errors.Is(err, store.ErrLost) {
			e.Fatalf("Adopt of %s answers %v, want ErrLost", what, err)
		}
	}
}

func testAdopt(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	g := e.grant(c, "the holder")
	text := e.ticket(e.s, c)
	t, err := store.ParseTicket(text)
	if err != nil {
		e.Fatalf("the store's ticket cannot be read: %v", err)
	}
	if t.Store != e.info.Fingerprint || string(t.Key) != key || t.Owner != g.Owner || t.Token != g.Token || t.TTL != e.long {
		e.Errorf("the ticket says %+v, the lease is on %q with owner %q, token %v, ttl %v", t, key, g.Owner, g.Token, e.long)
	}
	start := time.Now()
	adopted, a := e.adopt(e.s2, text)
	if a.Token != g.Token || a.Owner != g.Owner {
		e.Errorf("the adopted lease has token %v and owner %q, the lease had %v and %q", a.Token, a.Owner, g.Token, g.Owner)
	}
	if most := e.long + e.step() + time.Since(start); a.TTL > most {
		e.Errorf("the adopted lease promises %v, asked were %v", a.TTL, e.long)
	}
	e.held(key, "a key whose lease was adopted")
	if x := e.extend(adopted, "the adopter"); x.Token != g.Token {
		e.Errorf("Extend of an adopted lease answers token %v, the lease had %v", x.Token, g.Token)
	}
	e.release(adopted, "the adopter")
	if next := e.free(key, "a key that its adopter has released"); e.info.Fencing != store.FencingNone && next.Token <= g.Token {
		e.Errorf("token %v comes after token %v, of an adopted lease", next.Token, g.Token)
	}
}

// An adopted lease lives on past the ttl of the first holder, and can be given away again.
func testAdoptAgain(e *env) {
	key := e.key()
	c := e.short(e.s, key)
	g := e.grant(c, "the holder")
	s := []store.Store{e.s2, e.s}
	from := e.s
	for i := range 4 {
		text := e.ticket(from, c)
		time.Sleep(e.ttl / 3)
		from = s[i%2]
		var a store.Grant
		if c, a = e.adopt(from, text); a.Token != g.Token {
			e.Errorf("adopter %d has token %v, the lease had %v", i+1, a.Token, g.Token)
		}
	}
	e.held(key, "a key whose lease was adopted four times")
	e.release(c, "the fourth adopter")
	e.free(key, "a key that its fourth adopter has released")
}

func testAdoptLapsed(e *env) {
	key := e.key()
	c := e.short(e.s, key)
	e.grant(c, "the holder")
	text := e.ticket(e.s, c)
	time.Sleep(e.ttl + e.step() + e.ttl/2)
	e.unadoptable(text, "a lapsed ticket")
	e.free(key, "a key after Adopt of a lapsed ticket")
}

func testAdoptReleased(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	e.grant(c, "the holder")
	text := e.ticket(e.s, c)
	e.release(c, "the holder, against the rule")
	e.unadoptable(text, "a ticket whose lease was released")
	e.free(key, "a key after Adopt of a released lease")
}

func testAdoptTaken(e *env) {
	key := e.key()
	l := e.hold(e.short(e.s, key), "the holder")
	text := e.ticket(e.s, l.claim)
	next := e.lapse(l, e.claim(e.s2, key), "a holder that has written a ticket")
	e.unadoptable(text, "a ticket whose key another holds")
	e.extend(next.claim, "the holder, after another's ticket was tried")
	e.release(next.claim, "the holder")
}

func testAdoptDamaged(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	e.grant(c, "the holder")
	text := e.ticket(e.s, c)
	damaged := []string{"", " ", "x", text[:len(text)-1], text[1:], text[:len(text)/2], text + "A", text + text}
	for i := 0; i < len(text); i += 7 {
		flipped := []byte(text)
		flipped[i] = 'A' + (flipped[i]-'A'+1)%26
		if string(flipped) != text {
			damaged = append(damaged, string(flipped))
		}
	}
	for _, d := range damaged {
		if _, _, err := e.s2.(store.Adopter).Adopt(e.ctx, d); !errors.Is(err, store.ErrInvalid) {
			e.Errorf("Adopt of a damaged ticket answers %v, want ErrInvalid", err)
		}
	}
	e.release(c, "the holder")
}

func testAdoptDone(e *env) {
	key := e.key()
	c := e.claim(e.s, key)
	e.grant(c, "the holder")
	text := e.ticket(e.s, c)
	for want, ctx := range e.done() {
		if _, _, err := e.s2.(store.Adopter).Adopt(ctx, text); !errors.Is(err, want) {
			e.Errorf("Adopt with a done context answers %v, want %v", err, want)
		}
	}
	adopted, _ := e.adopt(e.s2, text)
	e.release(adopted, "the adopter")
}

func testTicketWithoutGrant(e *env) {
	key := e.key()
	holder, c := e.claim(e.s, key), e.claim(e.s, key)
	e.grant(holder, "the holder")
	e.refused(c, "the other claim")
	if text, err := e.s.(store.Adopter).Ticket(c); err == nil {
		e.Errorf("Ticket of a claim that was refused answers %q", text)
	}
	if text, err := e.s.(store.Adopter).Ticket(e.claim(e.s, e.key())); err == nil {
		e.Errorf("Ticket of a claim that was never tried answers %q", text)
	}
}
