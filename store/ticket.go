package store

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/fence"
)

// Ticket is a grant written down, for a store that implements [Adopter]. It is a
// bearer secret: who has it can extend and release the lease. It holds no
// credentials. Two adopters of one ticket are not kept apart.
type Ticket struct {
	Store string      `json:"s"` // Info.Fingerprint
	Key   []byte      `json:"k"`
	Owner string      `json:"o"`
	Stamp int64       `json:"h,omitempty"` // highest stamp that was sent
	Token fence.Token `json:"t"`
	// TTL that the claim asks for.
	TTL time.Duration `json:"d"`
	// Boot and Until say until when the grant holds: a reading of the clock of that
	// boot which all processes of the machine share.
	Boot  string        `json:"b"`
	Until time.Duration `json:"u"`
	// Nodes holds the same for the promise of each server, where there are several.
	Nodes []time.Duration `json:"n,omitempty"`
	Label string          `json:"l,omitempty"`
}

const ticketVersion = "hf1."

// String writes the ticket as one word of URL-safe text: version, content, checksum.
// The checksum finds damage; it is no protection against malice.
func (t Ticket) String() string {
	content, err := json.Marshal(t)
	if err != nil {
		panic("store: a ticket of plain values failed to encode: " + err.Error())
	}
	sum := sha256.Sum256(content)
	return ticketVersion + base64.RawURLEncoding.EncodeToString(append(content, sum[:8]...))
}

// ParseTicket reads what [Ticket.String] wrote. Anything else is an [*InvalidError]
// that does not repeat the text.
func ParseTicket(text string) (Ticket, error) {
	bad := func(rule string) (Ticket, error) {
		return Ticket{}, &InvalidError{Field: "ticket", Rule: rule}
	}
	body, ok := strings.CutPrefix(strings.TrimSpace(text), ticketVersion)
	if !ok {
		return bad("does not begin with " + ticketVersion + ": no ticket, or one of another version")
	}
	raw, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil || len(raw) < 8 {
		return bad("is damaged or cut short")
	}
	content := raw[:len(raw)-8]
	if sum := sha256.Sum256(content); string(sum[:8]) != string(raw[len(content):]) {
		return bad("is damaged: its checksum does not match")
	}
	var t Ticket
	if err := json.Unmarshal(content, &t); err != nil {
		return bad("is damaged: its content cannot be read")
	}
	if CheckKey(string(t.Key)) != nil || t.Owner == "" || t.TTL <= 0 || t.Token < 0 || t.Boot == "" {
		return bad("lacks what a ticket must have")
	}
	return t, nil
}
