package zkstore

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

// stranger is a server of its own kind: it answers each connection by serve.
func stranger(t *testing.T, serve func(c net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(5 * time.Second))
				serve(c)
			})
		}
	})
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { ln.Close() })
	return ln.Addr().String()
}

// greeting is a server's answer to the handshake.
func greeting(timeout int32, id uint64) []byte {
	b := binary.BigEndian.AppendUint32(nil, 36)
	b = binary.BigEndian.AppendUint32(b, 0)
	b = binary.BigEndian.AppendUint32(b, uint32(timeout))
	b = binary.BigEndian.AppendUint64(b, id)
	b = binary.BigEndian.AppendUint32(b, 16)
	return append(b, make([]byte, 16)...)
}

// hear reads one message.
func hear(c net.Conn) []byte {
	var length [4]byte
	if _, err := io.ReadFull(c, length[:]); err != nil {
		return nil
	}
	b := make([]byte, binary.BigEndian.Uint32(length[:]))
	_, _ = io.ReadFull(c, b)
	return b
}

// What is no ZooKeeper server, or an odd one, ends no process: calls fail in time and say what is wrong.
func TestStrangers(t *testing.T) {
	for name, c := range map[string]struct {
		serve func(c net.Conn)
		says  string
	}{
		"HTTP": {func(c net.Conn) {
			hear(c)
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
		}, "not ZooKeeper's protocol"},
		"nothing": {func(c net.Conn) { hear(c) }, "ended the connection"},
		"empty answer": {func(c net.Conn) {
			hear(c)
			_, _ = c.Write(make([]byte, 4))
			hear(c)
		}, "not ZooKeeper's protocol"},
		"session without a timeout": {func(c net.Conn) {
			hear(c)
			_, _ = c.Write(greeting(0, 7))
			hear(c)
		}, "timeout of 0s"},
		"session with a negative timeout": {func(c net.Conn) {
			hear(c)
			_, _ = c.Write(greeting(-4000, 7))
			hear(c)
		}, "timeout of -4s"},
		"message that is too short": {func(c net.Conn) {
			hear(c)
			_, _ = c.Write(greeting(4000, 7))
			request := hear(c)
			if len(request) < 4 {
				return
			}
			_, _ = c.Write(append([]byte{0, 0, 0, 4}, request[:4]...))
			_, _ = c.Write(append([]byte{0, 0, 0, 8}, request[:8]...))
			hear(c)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := stranger(t, c.serve)
			s, err := Dial(Options{Servers: []string{addr}, SessionTimeout: 4 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			_, err = s.Inspect(t.Context(), "k")
			if !errors.Is(err, store.ErrUnavailable) {
				t.Fatalf("Inspect answers %v, want ErrUnavailable", err)
			}
			if c.says != "" && (!strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), addr)) {
				t.Errorf("Inspect answers %q, want the server and %q", err, c.says)
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("the error is not one line: %q", err)
			}
		})
	}
}

// A server that ends each connection as soon as it stands is not asked again without a pause.
func TestConnectionsThatEndAtOnce(t *testing.T) {
	var n atomic.Int64
	addr := stranger(t, func(c net.Conn) {
		hear(c)
		n.Add(1)
		_, _ = c.Write(greeting(4000, 7))
	})
	s, err := Dial(Options{Servers: []string{addr}, SessionTimeout: 4 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	time.Sleep(2 * time.Second)
	if got := n.Load(); got < 2 || got > 20 {
		t.Errorf("the server had %d connections in two seconds", got)
	}
}

// A server that refuses the credentials is told from one that is away.
func TestCredentialsThatAreRefused(t *testing.T) {
	addr := stranger(t, func(c net.Conn) {
		hear(c)
		_, _ = c.Write(greeting(4000, 7))
		hear(c)
		const number, code = int32(authXid), int32(-115)
		n, e := number, code
		b := binary.BigEndian.AppendUint32(nil, 16)
		b = binary.BigEndian.AppendUint32(b, uint32(n))
		b = binary.BigEndian.AppendUint64(b, 0)
		_, _ = c.Write(binary.BigEndian.AppendUint32(b, uint32(e)))
	})
	s, err := Dial(Options{Servers: []string{addr}, SessionTimeout: 4 * time.Second, User: "u", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = s.Inspect(t.Context(), "k")
	for range 20 { // the first one may have been sent before
		if errors.Is(err, store.ErrInvalid) {
			break
		}
		_, err = s.Inspect(t.Context(), "k")
	}
	var invalid *store.InvalidError
	if !errors.As(err, &invalid) || invalid.Field != "credentials" || strings.Contains(err.Error(), "secret") {
		t.Errorf("Inspect answers %v, want an *InvalidError about the credentials", err)
	}
}

// The reason is why there is no session now.
func TestNoSessionSaysWhy(t *testing.T) {
	s, err := Dial(Options{Servers: []string{"127.0.0.1:1"}, SessionTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = s.Inspect(t.Context(), "k")
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") || !strings.Contains(err.Error(), "refused") {
		t.Errorf("Inspect answers %v, want the server and that it refuses", err)
	}
}

// A transaction that servers would answer by ending the connection, with all that the session waits
// for, and which overruns the client library's buffer, is refused before that.
func TestWritesAreBounded(t *testing.T) {
	s, err := Dial(Options{Servers: []string{"127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	g, err := NewGuard(s)
	if err != nil {
		t.Fatal(err)
	}
	set := func(n int) any { return &zk.SetDataRequest{Path: "/data", Data: make([]byte, n), Version: -1} }
	for name, writes := range map[string][]any{
		"one":     {set(maxWrites)},
		"many":    {set(maxWrites / 2), set(maxWrites / 2)},
		"buffer":  {set(connBuffer)},
		"path":    {&zk.DeleteRequest{Path: "/" + strings.Repeat("a", maxWrites)}},
		"nil":     {nil},
		"no set":  {(*zk.SetDataRequest)(nil)},
		"no make": {(*zk.CreateRequest)(nil)},
		"no end":  {(*zk.DeleteRequest)(nil)},
		"no look": {(*zk.CheckVersionRequest)(nil)},
	} {
		var invalid *fence.InvalidError
		if _, err := g.Write(t.Context(), "r", 1, writes...); !errors.As(err, &invalid) {
			t.Errorf("%s: Write answers %v, want an *InvalidError", name, err)
		}
		if _, err := s.WriteHeld(t.Context(), "k", 1, writes...); !errors.As(err, &invalid) {
			t.Errorf("%s: WriteHeld answers %v, want an *InvalidError", name, err)
		}
	}
}

// sizeOf is never less than what a request has.
func TestSizeOf(t *testing.T) {
	acl := zk.DigestACL(zk.PermAll, "user", "password")
	for _, c := range []struct {
		op   any
		real int // by the encoding: 9 bytes of a header, and each string has a length of 4
	}{
		{&zk.CreateRequest{Path: "/path", Data: []byte("data"), Acl: acl, Flags: 3},
			9 + 4 + 5 + 4 + 4 + 4 + 4 + 4 + len(acl[0].Scheme) + 4 + len(acl[0].ID) + 4},
		{&zk.SetDataRequest{Path: "/path", Data: []byte("data")}, 9 + 4 + 5 + 4 + 4 + 4},
		{&zk.DeleteRequest{Path: "/path"}, 9 + 4 + 5 + 4},
		{&zk.CheckVersionRequest{Path: "/path"}, 9 + 4 + 5 + 4},
	} {
		if got := sizeOf(c.op); got < c.real || got > c.real+64 {
			t.Errorf("the size of %+v is %d, want at least %d", c.op, got, c.real)
		}
	}
}

// What a node says of a ttl makes nobody ask without a pause.
func TestRecordsWithOddTTLs(t *testing.T) {
	for _, ttl := range []int64{-1, -1 << 63} {
		if r := parseRecord([]byte(`{"ttl":` + strconv.FormatInt(ttl, 10) + `}`)); r.TTL != 0 {
			t.Errorf("a record with a ttl of %d has %v", ttl, r.TTL)
		}
	}
}

// A lease is trusted no longer than the quorum's last word allows.
func TestTrustNeedsAQuorum(t *testing.T) {
	now := time.Now()
	for _, c := range []struct{ since, want time.Duration }{
		{0, 6 * time.Second}, {6 * time.Second, 6 * time.Second}, {8 * time.Second, 4 * time.Second}, {20 * time.Second, -8 * time.Second},
	} {
		l := &life{timeout: 12 * time.Second}
		l.agree(now.Add(-c.since))
		l.agree(now.Add(-time.Hour)) // an older one changes nothing
		if got := l.until(now).Sub(now); got != c.want {
			t.Errorf("%v after a quorum has agreed, a lease is trusted for %v, want %v", c.since, got, c.want)
		}
		if l.stale() != (c.since > 3*time.Second) {
			t.Errorf("%v after a quorum has agreed, stale is %v", c.since, l.stale())
		}
	}
}
