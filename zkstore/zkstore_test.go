package zkstore

import (
	"encoding/binary"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

func TestOptionsAreRefused(t *testing.T) {
	good := []string{"zk1"}
	for name, c := range map[string]struct {
		o     Options
		field string
	}{
		"no server":      {Options{}, "Servers"},
		"empty server":   {Options{Servers: []string{""}}, "Servers"},
		"path in server": {Options{Servers: []string{"zk1:2181/apps"}}, "Servers"},
		"port":           {Options{Servers: []string{"zk1:0"}}, "Servers"},
		"port word":      {Options{Servers: []string{"zk1:zk"}}, "Servers"},
		"large port":     {Options{Servers: []string{"zk1:65536"}}, "Servers"},
		"bare IPv6":      {Options{Servers: []string{"::1"}}, "Servers"},
		"relative":       {Options{Servers: good, Chroot: "apps"}, "Chroot"},
		"double slash":   {Options{Servers: good, Chroot: "/apps//shop"}, "Chroot"},
		"dots":           {Options{Servers: good, Chroot: "/apps/../shop"}, "Chroot"},
		"system":         {Options{Servers: good, Chroot: "/zookeeper/quota"}, "Chroot"},
		"control":        {Options{Servers: good, Chroot: "/a\x01"}, "Chroot"},
		"NUL":            {Options{Servers: good, Chroot: "/a\x00"}, "Chroot"},
		"not UTF-8":      {Options{Servers: good, Chroot: "/a\xff"}, "Chroot"},
		"long":           {Options{Servers: good, Chroot: "/" + strings.Repeat("a", 512)}, "Chroot"},
		"user alone":     {Options{Servers: good, User: "u"}, "User"},
		"password alone": {Options{Servers: good, Password: "p"}, "User"},
		"colon":          {Options{Servers: good, User: "a:b", Password: "p"}, "User"},
		"short session":  {Options{Servers: good, SessionTimeout: time.Millisecond}, "SessionTimeout"},
		"negative":       {Options{Servers: good, SessionTimeout: -time.Second}, "SessionTimeout"},
		"long session":   {Options{Servers: good, SessionTimeout: 2 * time.Hour}, "SessionTimeout"},
	} {
		s, err := Dial(c.o)
		var invalid *store.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != c.field || invalid.Rule == "" {
			t.Errorf("%s: Dial answers %v, want an *InvalidError about %s", name, err, c.field)
		}
		if err == nil {
			s.Close()
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: the error is not one line: %q", name, err)
		}
	}
	if _, err := NewGuard(nil); !errors.Is(err, fence.ErrInvalid) {
		t.Errorf("a guard without a store answers %v", err)
	}
}

// Info needs no server, and is the same whatever the order of the servers.
func TestInfo(t *testing.T) {
	a, err := Dial(Options{Servers: []string{"127.0.0.1:1", "[::1]:2", "127.0.0.1"}, Chroot: "/apps/", User: "u", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := Dial(Options{Servers: []string{"[::1]:2", "127.0.0.1:2181", "127.0.0.1:1"}, Chroot: "/apps"})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if a.Info() != b.Info() {
		t.Errorf("the stores answer %+v and %+v", a.Info(), b.Info())
	}
	i := a.Info()
	if i.MaxTTL != DefaultSessionTimeout/2 || i.Fencing != store.FencingDurable || strings.Contains(i.Fingerprint, "secret") {
		t.Errorf("Info answers %+v", i)
	}
}

// A store whose servers cannot be reached says so, and nothing hangs, also after Close.
func TestUnreachable(t *testing.T) {
	s, err := Dial(Options{Servers: []string{"127.0.0.1:1"}, SessionTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	c := s.Claim("k", store.ClaimOptions{TTL: s.Info().MaxTTL})
	if _, err := c.Try(t.Context()); !errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrUncertain) {
		t.Errorf("Try answers %v, want ErrUnavailable alone", err)
	}
	if err := c.Release(t.Context()); err != nil {
		t.Errorf("Release of a claim that has sent nothing answers %v", err)
	}
	s.Close()
	s.Close()
	_, err = s.Claim("k", store.ClaimOptions{TTL: s.Info().MaxTTL}).Try(t.Context())
	if !errors.Is(err, store.ErrInvalid) || errors.Is(err, store.ErrUnavailable) {
		t.Errorf("Try of a closed store answers %v, want ErrInvalid: waiting does not help", err)
	}
	if _, err := s.Inspect(t.Context(), "k"); !errors.Is(err, store.ErrInvalid) {
		t.Errorf("Inspect of a closed store answers %v, want ErrInvalid", err)
	}
}

// The handshake's answer is read along, in whatever pieces it comes.
func TestLinkReadsTheHandshake(t *testing.T) {
	answer := binary.BigEndian.AppendUint32(nil, 36)
	answer = binary.BigEndian.AppendUint32(answer, 0)
	answer = binary.BigEndian.AppendUint32(answer, 4000)
	answer = binary.BigEndian.AppendUint64(answer, 0x1000000000000007)
	answer = append(answer, make([]byte, 20)...)
	for _, size := range []int{1, 4, 7, 64} {
		client, server := net.Pipe()
		go func() {
			for part := range slices.Chunk(answer, size) {
				_, _ = server.Write(part)
			}
			server.Close()
		}()
		l := &link{Conn: client, limit: time.Second, s: &session{}}
		buf := make([]byte, 64)
		for {
			if _, err := l.Read(buf); err != nil {
				break
			}
		}
		if id, timeout := l.session(); id != 0x1000000000000007 || timeout != 4*time.Second {
			t.Errorf("in pieces of %d: the session is %#x with a timeout of %v", size, id, timeout)
		}
		client.Close()
	}
}

// All servers are tried in turn, and a pause comes after a whole turn only.
func TestHosts(t *testing.T) {
	h := &hosts{}
	_ = h.Init([]string{"a", "b", "c"})
	var got []string
	next := func(n int) {
		for range n {
			server, pause := h.Next()
			if pause {
				server = "-" + server
			}
			got = append(got, server)
		}
	}
	next(4)
	h.Connected()
	next(4)
	if want := []string{"a", "b", "c", "-a", "b", "c", "a", "-b"}; !slices.Equal(got, want) {
		t.Errorf("the servers are %q, want %q", got, want)
	}
}

func TestPatience(t *testing.T) {
	for timeout, want := range map[time.Duration]time.Duration{
		30 * time.Second: 5 * time.Second, time.Hour: 5 * time.Second, 6 * time.Second: time.Second, time.Millisecond: 200 * time.Millisecond,
	} {
		if got := patience(timeout); got != want {
			t.Errorf("a request may take %v with a timeout of %v, want %v", got, timeout, want)
		}
	}
}
