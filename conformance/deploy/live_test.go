package deploy_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/rig"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// state is one that a server can get into while it is used.
type state struct {
	name string
	opts []servertest.RedisOption
	user bool // clients are the user app, with the password pass=1
	do   func(t *testing.T, s *servertest.RedisServer)
	undo func(t *testing.T, s *servertest.RedisServer)
	hit  func(s *servertest.RedisServer) error // nil where the state is there
	kind error                                 // of TryAcquire; nil: it works
	says string
	// extends and releases: what exists can be extended, released.
	extends, releases bool
}

// replies makes a hit of a command that the server must answer so.
func replies(code string, args ...string) func(*servertest.RedisServer) error {
	return func(s *servertest.RedisServer) error {
		if _, err := s.Do(args...); err == nil || !strings.HasPrefix(err.Error(), code) {
			return fmt.Errorf("%v: %v, not %s", args, err, code)
		}
		return nil
	}
}

func must(args ...string) func(*testing.T, *servertest.RedisServer) {
	return func(t *testing.T, s *servertest.RedisServer) { t.Helper(); rig.Must(t, s, args...) }
}

var states = []state{
	{
		name: "OOM", kind: holdfast.ErrUnavailable, says: "OOM", extends: true, releases: true,
		do:   must("CONFIG", "SET", "maxmemory", "1mb"),
		hit:  replies("OOM", "SET", "x", "y", "PX", "1"),
		undo: must("CONFIG", "SET", "maxmemory", "0"),
	},
	{
		name: "MISCONF", kind: holdfast.ErrUnavailable, says: "MISCONF",
		opts: []servertest.RedisOption{servertest.Config("save", "999999", "1")},
		do: func(t *testing.T, s *servertest.RedisServer) {
			if err := os.Mkdir(filepath.Join(s.Dir(), "dump.rdb"), 0o700); err != nil { // no file takes its place
				t.Fatal(err)
			}
			rig.Must(t, s, "BGSAVE")
		},
		hit: replies("MISCONF", "SET", "x", "y", "PX", "1"),
		undo: func(t *testing.T, s *servertest.RedisServer) {
			if err := os.Remove(filepath.Join(s.Dir(), "dump.rdb")); err != nil {
				t.Fatal(err)
			}
			rig.Must(t, s, "BGSAVE")
		},
	},
	{
		name: "NOREPLICAS", kind: holdfast.ErrUnavailable, says: "NOREPLICAS",
		do:   must("CONFIG", "SET", "min-replicas-to-write", "1"),
		hit:  replies("NOREPLICAS", "SET", "x", "y", "PX", "1"),
		undo: must("CONFIG", "SET", "min-replicas-to-write", "0"),
	},
	{
		name: "BUSY", kind: holdfast.ErrUnavailable, says: "BUSY",
		opts: []servertest.RedisOption{servertest.Config("busy-reply-threshold", "50")},
		do: func(t *testing.T, s *servertest.RedisServer) {
			go s.Do("EVAL", "while true do end", "0") // ends by the server's answer to SCRIPT KILL
		},
		hit:  replies("BUSY", "PING"),
		undo: must("SCRIPT", "KILL"),
	},
	{
		name: "CLIENT PAUSE", kind: holdfast.ErrUnavailable, says: "no answer within",
		do:  must("CLIENT", "PAUSE", strconv.Itoa(int(ttl.Milliseconds())*12/10), "ALL"), // UNPAUSE would wait, too
		hit: blocked,
		undo: func(t *testing.T, s *servertest.RedisServer) {
			servertest.Eventually(t, 2*ttl, func() error {
				_, err := s.Do("PING")
				return err
			})
		},
	},
	{
		name: "CLIENT PAUSE WRITE", kind: holdfast.ErrUnavailable, says: "no answer within",
		do:   must("CLIENT", "PAUSE", "60000", "WRITE"),
		hit:  blocked,
		undo: must("CLIENT", "UNPAUSE"),
	},
	{
		name: "connections killed", extends: true, releases: true,
		do: must("CLIENT", "KILL", "TYPE", "normal"),
		hit: func(s *servertest.RedisServer) error {
			_, err := s.Do("PING")
			return err
		},
		undo: must("PING"),
	},
	{
		name: "password changed", user: true, kind: holdfast.ErrInvalid, says: "refuses the credentials",
		do: func(t *testing.T, s *servertest.RedisServer) {
			rig.Must(t, s, "ACL", "SETUSER", "app", "resetpass", ">other")
			rig.Must(t, s, "CLIENT", "KILL", "USER", "app")
		},
		hit:  replies("WRONGPASS", "AUTH", "app", "pass=1"),
		undo: must("ACL", "SETUSER", "app", "resetpass", ">pass=1"),
	},
	{
		name: "user disabled", user: true, kind: holdfast.ErrInvalid, says: "refuses the credentials",
		do: func(t *testing.T, s *servertest.RedisServer) {
			rig.Must(t, s, "ACL", "SETUSER", "app", "off")
			rig.Must(t, s, "CLIENT", "KILL", "USER", "app")
		},
		hit:  replies("WRONGPASS", "AUTH", "app", "pass=1"),
		undo: must("ACL", "SETUSER", "app", "on"),
	},
	{
		name: "right taken away", user: true, kind: holdfast.ErrInvalid, says: "+evalsha",
		do:   must("ACL", "SETUSER", "app", "-evalsha"),
		hit:  func(*servertest.RedisServer) error { return nil },
		undo: must("ACL", "SETUSER", "app", "+evalsha"),
	},
	{
		name: "keys taken away", user: true, kind: holdfast.ErrInvalid, says: "{KEY}:*",
		do:   must("ACL", "SETUSER", "app", "resetkeys", "~{holdfast}:*"),
		hit:  func(*servertest.RedisServer) error { return nil },
		undo: must("ACL", "SETUSER", "app", "~*"),
	},
	{
		name: "scripts flushed", extends: true, releases: true,
		do: func(t *testing.T, s *servertest.RedisServer) {
			rig.Must(t, s, "SCRIPT", "LOAD", one.Text)
			rig.Must(t, s, "SCRIPT", "FLUSH")
		},
		hit: func(s *servertest.RedisServer) error {
			v, err := s.Do("SCRIPT", "EXISTS", one.SHA1)
			if found, _ := v.([]any); err != nil || len(found) != 1 || found[0] != int64(0) {
				return fmt.Errorf("the script is there: %v, %v", v, err)
			}
			return nil
		},
		undo: must("SCRIPT", "FLUSH"),
	},
	{
		name: "client limit reached", kind: holdfast.ErrUnavailable,
		do: func(t *testing.T, s *servertest.RedisServer) {
			rig.Must(t, s, "CONFIG", "SET", "maxclients", "10")
			rig.Must(t, s, "CLIENT", "KILL", "TYPE", "normal")
			crowd.Store(s, idle(t, s.Addr(), 20))
		},
		hit: replies("ERR max number of clients", "PING"),
		undo: func(t *testing.T, s *servertest.RedisServer) {
			closeAll, _ := crowd.Load(s)
			closeAll.(func())()
		},
	},
}

var crowd sync.Map // *servertest.RedisServer -> func()

// blocked says whether a write waits.
func blocked(s *servertest.RedisServer) error {
	answered := make(chan struct{})
	go func() {
		_, _ = s.Do("SET", "blocked", "1", "PX", "1")
		close(answered)
	}()
	select {
	case <-answered:
		return errors.New("the server answers writes")
	case <-time.After(100 * time.Millisecond):
		return nil
	}
}

// In each state a new key is refused by the documented kind, with the reason; a lease that
// exists is extended and released where the state allows it, and is never taken by another;
// when the state has ended, all goes on by itself, for waiters as well. (EVI-04)
func TestStates(t *testing.T) {
	for _, st := range states {
		t.Run(st.name, func(t *testing.T) {
			t.Parallel()
			each(t, func(t *testing.T, c client) { st.play(t, c) })
		})
	}
}

// one is a script that nobody else loads.
var one = redlock.NewScript("return 1")

func (st state) play(t *testing.T, c client) {
	s := old(t, st.opts...)
	w := to(s)
	if st.user {
		rig.Must(t, s, "ACL", "SETUSER", "app", "on", ">pass=1", "~*", "&*", "+@all")
		w.user, w.password = "app", "pass=1"
	}
	locks := kit.Locker(t, rigStore(t, c, w), holdfast.Options{TTL: ttl, NoExtend: true})
	lease, gone := kit.Acquire(t, locks, "held"), kit.Acquire(t, locks, "gone")
	other := c.locker(t, w)
	kit.Warm(t, other)
	type result struct {
		lease *holdfast.Lease
		err   error
	}
	waited := make(chan result, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), ttl+patience)
		defer cancel()
		l, err := other.Acquire(ctx, "held")
		waited <- result{l, err}
	}()

	st.do(t, s)
	servertest.Eventually(t, 5*time.Second, func() error { return st.hit(s) })
	st.whileItLasts(t, locks, lease, gone)
	st.undo(t, s)

	comesBack(t, locks, "new")
	comesBack(t, other, "newer")
	if lease.Err() == nil {
		err := inTime(t, callLimit, "Release", func() error { return lease.Release(t.Context()) })
		if err != nil && !errors.Is(err, holdfast.ErrLost) {
			t.Errorf("release afterwards: %v", err)
		}
	}
	r := <-waited
	final := st.kind == holdfast.ErrInvalid // the waiter is told at once, where it asked meanwhile
	switch {
	case r.err == nil:
		if r.lease.Token() <= lease.Token() {
			t.Errorf("token %v after %v", r.lease.Token(), lease.Token())
		}
		if err := r.lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
	case !final || !errors.Is(r.err, holdfast.ErrInvalid):
		t.Errorf("the waiter: %v", r.err)
	}
	kit.NoKeys(t, ttl+patience, []*servertest.RedisServer{s})
}

// whileItLasts checks what the state lets happen. A client may meet a closed connection first.
func (st state) whileItLasts(t *testing.T, locks *holdfast.Locker, lease, gone *holdfast.Lease) {
	t.Helper()
	for i := range 3 {
		var err error
		servertest.Eventually(t, 4*callLimit, func() error {
			var l *holdfast.Lease
			if l, err = try(t, locks, "new"+strconv.Itoa(i)); err == nil {
				_ = l.Release(t.Context())
			}
			if (st.kind == nil) != (err == nil) || err != nil && !strings.Contains(err.Error(), st.says) {
				return fmt.Errorf("%v, want %q", err, st.says)
			}
			return nil
		})
		if st.kind != nil {
			check(t, "TryAcquire", err, st.kind, st.says)
			if i == 0 {
				t.Log(err)
			}
		}
	}
	token := lease.Token()
	err := inTime(t, callLimit, "Extend", func() error { return lease.Extend(t.Context()) })
	if err != nil && st.extends {
		extend(t, lease)
		err = nil
	}
	if (err == nil) != st.extends && lease.Err() == nil {
		t.Errorf("Extend: %v", err)
	}
	if err != nil && lease.Err() == nil {
		check(t, "Extend", err, holdfast.ErrUnavailable)
		t.Log(err)
	}
	if lease.Err() == nil && lease.Token() != token {
		t.Error("the token has changed")
	}
	err = inTime(t, callLimit, "Release", func() error { return gone.Release(t.Context()) })
	if err != nil && st.releases {
		release(t, gone)
		err = nil
	}
	if (err == nil) != st.releases && !errors.Is(err, holdfast.ErrLost) {
		t.Errorf("Release: %v", err)
	}
	if err != nil && !errors.Is(err, holdfast.ErrLost) {
		check(t, "Release", err, holdfast.ErrUnavailable)
		t.Log(err)
	}
}
