package zookeeper

import (
	"bytes"
	"encoding/binary"
	"flag"
	"slices"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/zkstore"
)

func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "8") // they mostly wait
	kit.Main(m, children)
}

// open opens a store, with a session of its own, as another process would.
func open(t testing.TB, o zkstore.Options) *zkstore.Store {
	t.Helper()
	s, err := zkstore.Dial(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// at are the options of a store on the servers.
func at[T interface{ Addr() string }](timeout time.Duration, servers ...T) zkstore.Options {
	o := zkstore.Options{SessionTimeout: timeout}
	for _, s := range servers {
		o.Servers = append(o.Servers, s.Addr())
	}
	return o
}

// reach waits until a store has a session.
func reach(t testing.TB, s *zkstore.Store) {
	t.Helper()
	servertest.Eventually(t, time.Minute, func() error {
		_, err := s.Inspect(t.Context(), "reach")
		return err
	})
}

// link is the way of a store through a proxy.
type link struct{ proxy *servertest.Proxy }

func (l link) LoseRequests() { l.proxy.DropRequest(func([]byte) bool { return true }) }

// LoseReplies loses those to what is more than a read: a Try that has read that the key is held, or
// has not learned whether it is, has not acted.
func (l link) LoseReplies() {
	l.proxy.DropReplyTo(asks(opCreate, opDelete, opSync, opMulti))
}

func (l link) Heal() { l.proxy.Heal() }
func (l link) Hits() int {
	c := l.proxy.Counts()
	return int(c.CutReplies + c.CutRequests)
}

// Requests of ZooKeeper's protocol.
const (
	opCreate = 1
	opDelete = 2
	opSync   = 9
	opMulti  = 14
	opClose  = -11
)

// creates matches the transaction that makes a claim's node, whose record it carries: other
// transactions only ask.
func creates(chunk []byte) bool {
	return asks(opMulti)(chunk) && bytes.Contains(chunk, []byte(`"ttl":`))
}

// asks matches chunks with a request of one of the kinds: a request is its length, a number of its
// own, its kind and what that needs.
func asks(kinds ...int32) func([]byte) bool {
	return func(chunk []byte) bool {
		for len(chunk) >= 12 {
			kind := int32(binary.BigEndian.Uint32(chunk[8:]))
			if slices.Contains(kinds, kind) {
				return true
			}
			length := int(binary.BigEndian.Uint32(chunk)) + 4
			if length > len(chunk) {
				return false
			}
			chunk = chunk[length:]
		}
		return false
	}
}
