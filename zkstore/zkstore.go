package zkstore

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/holdfast-go/holdfast/store"
)

// Limits of [Options.SessionTimeout].
const (
	DefaultSessionTimeout = 30 * time.Second
	minSessionTimeout     = 200 * time.Millisecond
	maxSessionTimeout     = time.Hour
)

// Options say how to reach an ensemble.
type Options struct {
	// Servers are HOST or HOST:PORT of its members, at least one; the port is 2181 where it is
	// missing. They tell the locks of one ensemble from those of another, so that all processes
	// name the same ones, in any order.
	Servers []string

	// Chroot is the path below which everything lies, as behind the hosts of a ZooKeeper connect
	// string: "/apps/shop". It is made where it is missing. Empty: the root.
	Chroot string

	// User and Password are credentials of the scheme digest. With them, the nodes that the store
	// makes can be used by that user alone. Both are empty, or neither is.
	User, Password string

	// TLS has each connection go through TLS, to the servers' secureClientPort. Nil: plain TCP. An
	// empty ServerName is the host of the server that is dialled. It must not be changed afterwards.
	TLS *tls.Config

	// SessionTimeout is asked from the servers, which grant between 2 and 20 of their ticks unless
	// they are configured otherwise. It must be at least three ticks, which is 6 s by their
	// default; see the package documentation. Half of it is the largest ttl; one timeout, and a
	// tick, is how long a holder that dies keeps the others waiting. Zero means 30 s; at least
	// 200 ms, at most an hour.
	SessionTimeout time.Duration
}

// Store is a [store.Store] on ZooKeeper. It is safe for concurrent use. It also implements
// [store.BatchExtender], [store.Inspector] and [store.Prompt], and its claims implement
// [store.Waiter] and [store.Witness]. A lease cannot go on in another process: there are no tickets.
type Store struct {
	s     *session
	info  store.Info
	base  string // chroot/holdfast
	acl   []zk.ACL
	limit time.Duration // of one call
}

var (
	_ store.Store         = (*Store)(nil)
	_ store.BatchExtender = (*Store)(nil)
	_ store.Inspector     = (*Store)(nil)
	_ store.Prompt        = (*Store)(nil)
	_ store.Waiter        = (*claim)(nil)
	_ store.Witness       = (*claim)(nil)
)

// Dial returns a store, which connects in the background; it does not wait for that. Options that
// break a rule are refused by an [*store.InvalidError]. Close the store when it is no longer used.
func Dial(o Options) (*Store, error) {
	servers, err := checkServers(o.Servers)
	if err != nil {
		return nil, err
	}
	chroot, err := checkChroot(o.Chroot)
	if err != nil {
		return nil, err
	}
	timeout := o.SessionTimeout
	if timeout == 0 {
		timeout = DefaultSessionTimeout
	}
	if timeout < minSessionTimeout || timeout > maxSessionTimeout {
		return nil, &store.InvalidError{Field: "SessionTimeout", Value: o.SessionTimeout.String(),
			Rule: "must be from " + minSessionTimeout.String() + " to " + maxSessionTimeout.String()}
	}
	timeout = timeout.Truncate(time.Millisecond)
	acl, auth := zk.WorldACL(zk.PermAll), []byte(nil)
	switch {
	case (o.User == "") != (o.Password == ""):
		return nil, &store.InvalidError{Field: "User", Value: o.User, Rule: "and Password belong together: give both or neither"}
	case strings.Contains(o.User, ":"):
		return nil, &store.InvalidError{Field: "User", Value: o.User, Rule: "must not contain a colon"}
	case o.User != "":
		acl, auth = zk.AuthACL(zk.PermAll), []byte(o.User+":"+o.Password)
	}
	s, err := dial(servers, timeout, auth, o.TLS)
	if err != nil {
		return nil, err
	}
	return &Store{
		s:     s,
		base:  chroot + "/holdfast",
		acl:   acl,
		limit: patience(timeout) + time.Second,
		info: store.Info{
			Name:        "zookeeper",
			Fingerprint: "zookeeper:" + strings.Join(slices.Sorted(slices.Values(servers)), ",") + chroot,
			Fencing:     store.FencingDurable,
			MinTTL:      store.MinTTL,
			MaxTTL:      timeout / 2,
			TTLStep:     timeout,
		},
	}, nil
}

func checkServers(list []string) ([]string, error) {
	refuse := func(server, rule string) ([]string, error) {
		return nil, &store.InvalidError{Field: "Servers", Value: server, Rule: rule}
	}
	if len(list) == 0 {
		return refuse("", "must name at least one server")
	}
	var servers []string
	for _, server := range list {
		host, port, err := net.SplitHostPort(server)
		if err != nil { // no port, or none that can be told
			host, port = strings.TrimSuffix(strings.TrimPrefix(server, "["), "]"), strconv.Itoa(zk.DefaultPort)
			if strings.Contains(host, ":") && !strings.HasPrefix(server, "[") {
				return refuse(server, "must be HOST or HOST:PORT; an IPv6 address stands in brackets")
			}
		}
		n, err := strconv.Atoi(port)
		if err != nil || n < 1 || n > 65535 {
			return refuse(server, "must have a port from 1 to 65535")
		}
		if host == "" || strings.ContainsAny(host, "/,@ \t\r\n\x00") {
			return refuse(server, "must be HOST or HOST:PORT")
		}
		if full := net.JoinHostPort(host, port); !slices.Contains(servers, full) {
			servers = append(servers, full)
		}
	}
	return servers, nil
}

// checkChroot returns the path without a slash at its end.
func checkChroot(chroot string) (string, error) {
	if chroot == "" || chroot == "/" {
		return "", nil
	}
	refuse := func(rule string) (string, error) {
		return "", &store.InvalidError{Field: "Chroot", Value: chroot, Rule: rule}
	}
	chroot = strings.TrimSuffix(chroot, "/")
	switch {
	case !strings.HasPrefix(chroot, "/"):
		return refuse("must begin with a slash")
	case path.Clean(chroot) != chroot:
		return refuse("must be a plain path, without empty parts, . and ..")
	case strings.HasPrefix(chroot+"/", "/zookeeper/"):
		return refuse("must not lie below /zookeeper, which is the servers' own")
	case len(chroot) > 512:
		return refuse("must have at most 512 bytes")
	}
	for _, r := range chroot {
		if r < ' ' || r >= 0x7f && r <= 0x9f || r >= 0xd800 && r <= 0xf8ff || r >= 0xfff0 {
			return refuse("must not contain control characters, nor other than UTF-8")
		}
	}
	return chroot, nil
}

// Info describes the store. TTLStep is the session's timeout, to which the servers round the ttl
// of a holder that dies. It is as asked; where the servers grant a shorter one, leases are shorter.
func (s *Store) Info() store.Info { return s.info }

// Prompt says that calls return by themselves. See [store.Prompt].
func (s *Store) Prompt() {}

// Close ends the session, and with it every lease at once. It is idempotent.
func (s *Store) Close() { s.s.close() }

// Claim returns a fresh claim on key.
func (s *Store) Claim(key string, o store.ClaimOptions) store.Claim {
	return &claim{s: s, key: key, dir: hashed(s.base+"/locks", key), o: o, owner: newOwner(), slot: make(chan struct{}, 1)}
}

// answerGrace is how long a call waits for an answer that may just have come when its context
// was done.
const answerGrace = 20 * time.Millisecond

// race runs op, which calls a library that knows no contexts, in a goroutine of its own, and leaves
// it soon after ctx is done, or the limit over. settle is called when op has ended, with left where
// the caller has gone without its answer.
func race[T any](ctx context.Context, limit time.Duration, op func(context.Context) (T, error), settle func(left bool)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errNoAnswer)
	defer cancel()
	answers := make(chan answer, 1)
	decided := make(chan struct{}, 1) // full when op has answered, or the caller has left
	go func() {
		v, err := op(ctx)
		left := false
		select {
		case decided <- struct{}{}:
		default:
			left = true
		}
		if settle != nil {
			settle(left)
		}
		answers <- answer{v, err}
	}()
	select {
	case a := <-answers:
		return a.v, a.err
	case <-ctx.Done():
	}
	grace := time.NewTimer(answerGrace)
	defer grace.Stop()
	select {
	case a := <-answers:
		return a.v, a.err
	case <-grace.C:
	}
	select {
	case decided <- struct{}{}:
		var none T
		return none, uncertain(context.Cause(ctx))
	default: // it answers now
		a := <-answers
		return a.v, a.err
	}
}

// stopped is why an op under [race] sends nothing more: nil, the caller's context, or the limit.
func stopped(ctx context.Context) error {
	if context.Cause(ctx) == errNoAnswer {
		return unavailable(errNoAnswer)
	}
	return ctx.Err()
}

// call makes one request of the client library under the watchdog.
func call[T any](s *session, l *life, f func() (T, error)) (T, error) {
	defer s.watchdog(l.lasts())()
	return f()
}

func (s *Store) sync(l *life, path string) error {
	_, err := call(s.s, l, func() (string, error) { return s.s.conn.Sync(path) })
	return err
}

// commit has a quorum agree to a transaction that changes nothing, and after which the connection reads
// what is at least as new. The path need not exist.
func (s *Store) commit(l *life, path string) error {
	answers, err := s.multi(l, &zk.CheckVersionRequest{Path: path, Version: -1})
	if _, err = failedAt(answers, err); errors.Is(err, zk.ErrNoNode) {
		return nil
	}
	return err
}

// multi makes one transaction. It also shows that the leader leads, unless nothing was answered.
func (s *Store) multi(l *life, ops ...any) ([]zk.MultiResponse, error) {
	start := time.Now()
	answers, err := call(s.s, l, func() ([]zk.MultiResponse, error) { return s.s.conn.Multi(ops...) })
	if len(answers) > 0 {
		l.agree(start)
	}
	return answers, err
}

// confirm has the leader answer, and show that it leads where that has not been shown for a while.
func (s *Store) confirm(l *life, path string) error {
	if l.stale() {
		return s.commit(l, path)
	}
	return s.sync(l, path)
}

// synced reads what is at least as new as this call. The read is sent right behind the sync, and the
// server executes it after that: the two take the time of one.
func synced[T any](s *Store, l *life, path string, read func() (T, error)) (T, error) {
	var none T
	link, sent := s.s.syncing()
	answered := make(chan error, 1)
	go func() { answered <- s.sync(l, path) }()
	select {
	case <-sent:
	case err := <-answered:
		if err != nil {
			return none, err
		}
		answered <- nil
	}
	v, err := read()
	if synced := <-answered; synced != nil {
		return none, synced
	}
	if now, _ := s.s.syncing(); now != link { // the order is that of one connection
		return none, zk.ErrConnectionClosed
	}
	return v, err
}

func (s *Store) children(l *life, path string) ([]string, error) {
	return call(s.s, l, func() ([]string, error) {
		names, _, err := s.s.conn.Children(path)
		return names, err
	})
}

type content struct {
	data []byte
	stat zk.Stat
}

func (s *Store) get(l *life, path string) (content, error) {
	return call(s.s, l, func() (content, error) {
		data, stat, err := s.s.conn.Get(path)
		if err != nil {
			return content{}, err
		}
		return content{data, *stat}, nil
	})
}

func (s *Store) delete(l *life, path string) error {
	_, err := call(s.s, l, func() (struct{}, error) { return struct{}{}, s.s.conn.Delete(path, -1) })
	return err
}

// mkdir makes a node that stays, and its parents where they are missing.
func (s *Store) mkdir(l *life, dir string) error {
	_, err := s.get(l, dir)
	if !errors.Is(err, zk.ErrNoNode) {
		return err
	}
	if parent := path.Dir(dir); parent != "/" {
		if err := s.mkdir(l, parent); err != nil {
			return err
		}
	}
	_, err = call(s.s, l, func() (string, error) { return s.s.conn.Create(dir, nil, zk.FlagPersistent, s.acl) })
	if errors.Is(err, zk.ErrNodeExists) {
		return nil
	}
	return err
}

// queue makes the node of a key's queue, which the servers remove when it is empty for a while.
func (s *Store) queue(l *life, dir, key string) error {
	for range 3 {
		_, err := call(s.s, l, func() (string, error) {
			return s.s.conn.CreateContainer(dir, []byte(key), zk.FlagContainer, s.acl)
		})
		switch {
		case errors.Is(err, zk.ErrNodeExists):
			return nil
		case !errors.Is(err, zk.ErrNoNode):
			return err
		}
		if err := s.mkdir(l, path.Dir(dir)); err != nil {
			return err
		}
	}
	return zk.ErrNoNode
}
