package rig

import (
	"bytes"
	"crypto/sha1" // the digest that EVALSHA asks for
	"encoding/hex"
	"strconv"
	"strings"
	"sync"

	"github.com/holdfast-go/holdfast/servertest"
)

// Tap reads what clients send through a proxy and knows the VOTE scripts by their being
// loaded, as nothing else is. It works from the proxy's start to its next Heal.
type Tap struct {
	mu   sync.Mutex
	text map[string]string // of VOTE, by digest
	last []string          // VOTE
	done map[string]int    // other scripts than VOTE, by key
	sha  string            // loaded last
}

// NewTap taps a proxy.
func NewTap(p *servertest.Proxy) *Tap {
	t := &Tap{text: map[string]string{}, done: map[string]int{}}
	p.Hold(func(chunk []byte) bool {
		t.IsVote(chunk)
		return false
	})
	return t
}

// IsVote says whether a chunk has a VOTE in it. It is for [servertest.Proxy.Hold].
func (t *Tap) IsVote(chunk []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	found := false
	for _, cmd := range commands(chunk) {
		switch name := strings.ToLower(cmd[0]); {
		case name == "script" && len(cmd) == 3 && strings.EqualFold(cmd[1], "load"):
			if !strings.HasPrefix(cmd[2], "-- VOTE") {
				continue
			}
			sum := sha1.Sum([]byte(cmd[2]))
			t.sha = hex.EncodeToString(sum[:])
			t.text[t.sha] = cmd[2]
		case name == "evalsha" && len(cmd) > 2 && t.text[cmd[1]] != "":
			t.last, found = cmd, true
		case name == "evalsha" && len(cmd) > 3:
			t.done[cmd[3]]++
		}
	}
	return found
}

// Vote is the last VOTE that was sent: EVALSHA, its digest, and so on.
func (t *Tap) Vote() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.last...)
}

// Others counts the calls of other scripts than VOTE for a key: RELEASE and KEEP.
func (t *Tap) Others(key string) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.done[key]
}

// Script is the text of VOTE that was loaded last, and its digest.
func (t *Tap) Script() (text, sha string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text[t.sha], t.sha
}

// commands reads the whole commands at the beginning of a chunk.
func commands(chunk []byte) (all [][]string) {
	line := func(kind byte) (n int, ok bool) {
		head, rest, found := bytes.Cut(chunk, []byte("\r\n"))
		if !found || len(head) < 2 || head[0] != kind {
			return 0, false
		}
		n, err := strconv.Atoi(string(head[1:]))
		chunk = rest
		return n, err == nil
	}
	for {
		n, ok := line('*')
		if !ok || n < 1 {
			return all
		}
		cmd := make([]string, n)
		for i := range cmd {
			size, ok := line('$')
			if !ok || size < 0 || len(chunk) < size+2 {
				return all
			}
			cmd[i], chunk = string(chunk[:size]), chunk[size+2:]
		}
		all = append(all, cmd)
	}
}
