package store_test

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

func tickets() []store.Ticket {
	least := store.Ticket{Store: "s", Key: []byte("k"), Owner: "o", TTL: 1, Boot: "b"}
	full := store.Ticket{
		Store: "mem:ABC", Key: []byte("a/\xff\n'{}%\u00e9"), Owner: "h1.0000000000000001.x.y", Stamp: 1795972895835210,
		Token: math.MaxInt64, TTL: 15 * time.Second, Boot: "b1f2-+0.1", Until: 123456789 * time.Microsecond,
		Nodes: []time.Duration{1, 2, 0, 4, 5}, Label: "host 42 \"quoted\" \u00e9",
	}
	longest := full
	longest.Key = []byte(strings.Repeat("\xfe", store.MaxKeyLen))
	return []store.Ticket{least, full, longest}
}

func TestTicketRoundTrip(t *testing.T) {
	for _, want := range tickets() {
		text := want.String()
		if strings.ContainsFunc(text, func(r rune) bool {
			return !(r == '.' || r == '-' || r == '_' || r >= '0' && r <= '9' || r >= 'A' && r <= 'Z' || r >= 'a' && r <= 'z')
		}) {
			t.Errorf("the ticket is not one word of URL-safe text: %s", text)
		}
		for _, text := range []string{text, " " + text + "\n", "\t" + text + "\r\n"} {
			got, err := store.ParseTicket(text)
			if err != nil {
				t.Errorf("a ticket of %+v cannot be read: %v", want, err)
			} else if !reflect.DeepEqual(got, want) {
				t.Errorf("the ticket of\n%+v reads as\n%+v", want, got)
			}
		}
	}
}

func refuse(t *testing.T, text, what string) {
	t.Helper()
	got, err := store.ParseTicket(text)
	var invalid *store.InvalidError
	switch {
	case err == nil:
		t.Errorf("%s is read as %+v", what, got)
	case !errors.As(err, &invalid) || !errors.Is(err, store.ErrInvalid) || invalid.Field != "ticket":
		t.Errorf("%s answers %v, want an *InvalidError about the ticket", what, err)
	case len(text) > 20 && strings.Contains(err.Error(), text[4:12]):
		t.Errorf("%s: the error repeats the secret: %v", what, err)
	case strings.ContainsAny(err.Error(), "\r\n"):
		t.Errorf("%s: the error has several lines: %q", what, err)
	}
}

// Every truncation, every byte changed, doubled or left out, and every pair swapped, is
// refused.
func TestTicketTampered(t *testing.T) {
	text := tickets()[1].String()
	for i := range text {
		refuse(t, text[:i], "a ticket cut short")
		if i > 0 {
			refuse(t, text[i:], "a ticket cut at its beginning")
		}
		refuse(t, text[:i]+text[i+1:], "a ticket with a byte left out")
		refuse(t, text[:i+1]+text[i:], "a ticket with a byte doubled")
		for _, bit := range []byte{1, 2, 4, 8, 16, 32, 64, 128} {
			b := []byte(text)
			b[i] ^= bit
			refuse(t, string(b), "a ticket with a bit changed")
		}
		if i > 0 && text[i] != text[i-1] {
			b := []byte(text)
			b[i], b[i-1] = b[i-1], b[i]
			refuse(t, string(b), "a ticket with two bytes swapped")
		}
	}
	for _, tail := range []string{"=", "A", "AAAA", ".", " x", "\x00"} {
		refuse(t, text+tail, "a ticket with a tail")
	}
	refuse(t, text+text, "a ticket written twice")
	refuse(t, strings.ToUpper(text), "a ticket in capitals")
	refuse(t, "hf2."+text[4:], "a ticket of another version")
}

// A sound checksum does not make sense of what lacks a part.
func TestTicketLacking(t *testing.T) {
	for name, lack := range map[string]func(*store.Ticket){
		"a key":               func(t *store.Ticket) { t.Key = nil },
		"a key that is taken": func(t *store.Ticket) { t.Key = []byte("a:fence") },
		"a short key":         func(t *store.Ticket) { t.Key = make([]byte, store.MaxKeyLen+1) },
		"an owner":            func(t *store.Ticket) { t.Owner = "" },
		"a ttl":               func(t *store.Ticket) { t.TTL = 0 },
		"a positive ttl":      func(t *store.Ticket) { t.TTL = -1 },
		"a possible token":    func(t *store.Ticket) { t.Token = -1 },
		"a boot":              func(t *store.Ticket) { t.Boot = "" },
	} {
		ticket := tickets()[1]
		lack(&ticket)
		refuse(t, ticket.String(), "a ticket without "+name)
	}
}

func FuzzParseTicket(f *testing.F) {
	for _, t := range tickets() {
		f.Add(t.String())
	}
	f.Add("")
	f.Add("hf1.")
	f.Add("hf1.AAAAAAAAAAA")
	f.Fuzz(func(t *testing.T, text string) {
		got, err := store.ParseTicket(text)
		if err != nil {
			if !errors.Is(err, store.ErrInvalid) {
				t.Errorf("ParseTicket answers %v, want ErrInvalid", err)
			}
			return
		}
		if err := store.CheckKey(string(got.Key)); err != nil {
			t.Errorf("the ticket's key: %v", err)
		}
		again, err := store.ParseTicket(got.String())
		if err != nil || again.String() != got.String() {
			t.Errorf("%+v reads as %+v, %v", got, again, err)
		}
	})
}

// Whatever is in a ticket comes back.
func FuzzTicketContent(f *testing.F) {
	f.Add([]byte("k"), int64(1), int64(1), int64(1))
	f.Add([]byte("\xff\n"), int64(math.MaxInt64), int64(math.MaxInt64), int64(0))
	f.Fuzz(func(t *testing.T, key []byte, token, ttl, until int64) {
		want := tickets()[1]
		want.Key, want.TTL, want.Until = key, time.Duration(ttl), time.Duration(until)
		want.Token = fence.Token(token)
		got, err := store.ParseTicket(want.String())
		if bad := store.CheckKey(string(key)) != nil || ttl <= 0 || token < 0; bad != (err != nil) {
			t.Fatalf("a ticket of key %q, ttl %d and token %d answers %v", key, ttl, token, err)
		}
		if err == nil && !reflect.DeepEqual(got, want) {
			t.Errorf("the ticket of %+v reads as %+v", want, got)
		}
	})
}
