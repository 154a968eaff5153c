package etcdstore

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/store"
)

const (
	// DefaultPrefix is where locks and marks are kept unless Options.Prefix says otherwise.
	DefaultPrefix = "/holdfast/"

	// MaxEpoch is the largest Options.Epoch.
	MaxEpoch = 1<<15 - 1

	// An etcd server grants no lease for less than one and a half of its election timeouts,
	// which are a second unless it is told otherwise.
	minTTL = 2 * time.Second
	// maxTTL keeps sums of times far from the end of their range.
	maxTTL = 10 * 365 * 24 * time.Hour

	epochShift = 48 // bits of a token that are the revision
)

// Options say where and how a [Store] keeps its locks. The zero value is good for a cluster
// that was never restored.
type Options struct {
	// Prefix of all keys, with the separator at its end; DefaultPrefix where it is empty.
	// Programs that shall exclude each other have the same one. It is that of the cluster's keys:
	// a namespace of the client (package namespace of clientv3) does not count.
	Prefix string

	// Epoch stands before the revision in fencing tokens (token = Epoch<<48 | revision). All
	// programs that use the locks have the same one, and get a larger one, at most
	// MaxEpoch, when the cluster was restored from a snapshot or made anew; zero before
	// that.
	Epoch int

	// Cluster names the cluster in Info.Fingerprint and in tickets. Empty means the
	// endpoints of the client, sorted: programs that reach one cluster by different endpoints need
	// the name, where they hand tickets over to each other.
	Cluster string

	// Session is the ttl of one etcd lease, the session, that all locks of the store share. It
	// makes thousands of locks cheaper, and is at least as long as any of their ttls. Zero: each
	// acquisition has an etcd lease of its own. The package documentation says what else is
	// different.
	Session time.Duration
}

// Store is a [store.Store] in etcd. It is safe for concurrent use, and needs no closing: goroutines
// of its own run only while leases without an answer are to be revoked, or keys to be deleted; and
// a session ends by itself when no lock needs it any more. It also
// implements [store.BatchExtender], [store.Adopter], [store.Inspector] and [store.Prompt], and its
// claims implement [store.Waiter] and [store.Witness].
type Store struct {
	kv     pb.KVClient
	lease  pb.LeaseClient   // repeats a request that had no answer
	once   pb.LeaseClient   // does not
	events clientv3.Watcher // as kv, and unlike the client's own, knows no namespace
	life   context.Context  // done when the client is closed
	locks  string           // prefix of the locks' keys
	voids  string           // prefix of the keys that keep late requests from taking a lock
	epoch  int64
	info   store.Info

	session time.Duration // zero: none is shared

	seen      atomic.Int64 // largest revision that an answer had
	reaper    reaper[int64]
	leftovers reaper[leftover]

	mu     sync.Mutex
	taken  map[string]struct{} // keys that were held when last heard of
	shared *session            // for new claims; nil before the first one
}

var (
	_ store.Store         = (*Store)(nil)
	_ store.BatchExtender = (*Store)(nil)
	_ store.Adopter       = (*Store)(nil)
	_ store.Inspector     = (*Store)(nil)
	_ store.Prompt        = (*Store)(nil)
	_ store.Waiter        = (*claim)(nil)
	_ store.Witness       = (*claim)(nil)
)

// New returns a store on the cluster of client, without I/O. The caller keeps the client open
// while the store is in use; before closing it, release the locks, and call [Store.Settle]: what is to
// be cleared in the background stops with the client, and ends with its etcd lease. A client whose
// Logger is not set, to zap.NewNop() for one, writes warnings of its own to the standard error.
func New(client *clientv3.Client, o Options) (*Store, error) {
	prefix, err := checkTarget(client, o.Prefix)
	if err != nil {
		return nil, err
	}
	if o.Epoch < 0 || o.Epoch > MaxEpoch {
		return nil, &store.InvalidError{Field: "Epoch", Value: strconv.Itoa(o.Epoch), Rule: fmt.Sprintf("must be from 0 to %d", MaxEpoch)}
	}
	if o.Session != 0 && (o.Session < minTTL || o.Session > maxTTL) {
		return nil, &store.InvalidError{Field: "Session", Value: o.Session.String(), Rule: fmt.Sprintf("must be zero or from %v to %v", minTTL, maxTTL)}
	}
	if !utf8.ValidString(o.Cluster) { // tickets would not come back as they were
		return nil, &store.InvalidError{Field: "Cluster", Value: o.Cluster, Rule: "must be UTF-8"}
	}
	cluster := o.Cluster
	if cluster == "" {
		endpoints := client.Endpoints()
		slices.Sort(endpoints)
		cluster = strings.Join(slices.Compact(endpoints), ",")
	}
	s := &Store{
		kv:     clientv3.RetryKVClient(client),
		lease:  clientv3.RetryLeaseClient(client),
		once:   pb.NewLeaseClient(client.ActiveConnection()),
		events: clientv3.NewWatcher(client),
		life:   client.Ctx(),
		locks:  prefix + "lock/",
		voids:  prefix + "void/",
		epoch:  int64(o.Epoch),
		taken:  map[string]struct{}{},

		session: o.Session,
		info: store.Info{
			Name:        "etcd",
			Fingerprint: "etcd:" + cluster + prefix,
			Fencing:     store.FencingDurable,
			MinTTL:      minTTL,
			MaxTTL:      maxTTL,
			TTLStep:     time.Second,
		},
	}
	if o.Session != 0 {
		s.info.MaxTTL = o.Session
	}
	s.reaper = reaper[int64]{life: s.life, most: 1, end: func(ctx context.Context, leases []int64) error { return s.revoke(ctx, leases[0]) }}
	s.leftovers = reaper[leftover]{life: s.life, most: batchSize, lasts: func(l leftover) bool { return l.n.mayLive() },
		end: func(ctx context.Context, left []leftover) error { _, err := s.clear(ctx, left); return err }}
	return s, nil
}

// checkTarget refuses what neither a store nor a guard can work with.
func checkTarget(client *clientv3.Client, prefix string) (string, error) {
	if client == nil {
		return "", &store.InvalidError{Field: "client", Rule: "must not be nil"}
	}
	if prefix == "" {
		prefix = DefaultPrefix
	}
	if len(prefix) > 256 || strings.IndexByte(prefix, 0) >= 0 || !utf8.ValidString(prefix) {
		return "", &store.InvalidError{Field: "Prefix", Value: prefix, Rule: "must have at most 256 bytes of UTF-8 without NUL"}
	}
	return prefix, nil
}

// Info describes the store.
func (s *Store) Info() store.Info { return s.info }

// Settle returns when nothing is left that the store clears in the background, such as a lock
// whose Release had no answer, when the client is closed, or when ctx is done, with its error. A
// program that ends at once leaves that to the ends of the etcd leases. While no server answers it
// is tried for up to a minute, or as long as a session may live: give ctx an end.
func (s *Store) Settle(ctx context.Context) error {
	if err := s.reaper.wait(ctx); err != nil {
		return err
	}
	return s.leftovers.wait(ctx)
}

// Prompt says that calls return by themselves. See [store.Prompt].
func (*Store) Prompt() {}

// Claim returns a fresh claim on key.
func (s *Store) Claim(key string, o store.ClaimOptions) store.Claim {
	return &claim{s: s, key: key, path: s.path(key), o: o, slot: make(chan struct{}, 1)}
}

// Holds is the condition that the lease on key whose token is t still stands, for the If part of
// a transaction on the store's cluster, such as one that writes what the lock protects:
//
//	client.Txn(ctx).If(s.Holds(key, lease.Token())).Then(clientv3.OpPut(...)).Commit()
//
// Unlike [Guard] it refuses as soon as the lease has ended, also where nobody has followed. It
// always refuses a lease that was adopted from a store with Options.Session. The client of the
// transaction has no namespace.
//
// After a restore whose revision has gone back (see the package), a lease that was granted after
// the snapshot may have the revision of another one that was granted since, and Holds takes one for
// the other: there it is [Guard] that tells them apart.
func (s *Store) Holds(key string, t fence.Token) clientv3.Cmp {
	revision := int64(t) & (1<<epochShift - 1)
	if t <= 0 || revision == 0 { // no token: zero is the revision of a key that is missing
		revision = -1
	}
	return clientv3.Compare(clientv3.ModRevision(s.path(key)), "=", revision)
}

func (s *Store) path(key string) string { return s.locks + hashed(key) }

var encoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// hashed makes a name of constant length of any bytes.
func hashed(name string) string {
	sum := sha256.Sum256([]byte(name))
	return encoding.EncodeToString(sum[:])
}

// token makes a fencing token of a revision.
func token(epoch, revision int64) fence.Token { return fence.Token(epoch<<epochShift | revision) }

// grew notes the revision of an answer whose request was sent when the largest one was before. It
// complains where the revision has gone back, or no longer leaves room for the epoch.
func (s *Store) grew(before, revision int64) error {
	if revision < before {
		return &store.InvalidError{Field: "cluster", Value: fmt.Sprint("revision ", revision), Rule: fmt.Sprintf(
			"its revision was %d before: it was restored from a snapshot or made anew, and tokens would repeat; "+
				"give all stores a larger Epoch", before)}
	}
	if revision >= 1<<epochShift {
		return &store.InvalidError{Field: "cluster", Value: fmt.Sprint("revision ", revision), Rule: "its revision is too large for fencing tokens"}
	}
	for {
		seen := s.seen.Load()
		if revision <= seen || s.seen.CompareAndSwap(seen, revision) {
			return nil
		}
	}
}

// maxTaken bounds what the store remembers of keys that others held.
const maxTaken = 10_000

// note remembers whether a key is held: for one that is, a read comes before what costs an entry
// in the log. It is a hint and may be wrong.
func (s *Store) note(path string, held bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !held {
		delete(s.taken, path)
		return
	}
	if len(s.taken) >= maxTaken {
		clear(s.taken)
	}
	s.taken[path] = struct{}{}
}

func (s *Store) likelyHeld(path string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.taken[path]
	return ok
}

// leaseID returns a random id that etcd takes: positive.
func leaseID() int64 {
	var b [8]byte
	rand.Read(b[:])
	return int64(binary.BigEndian.Uint64(b[:])>>1 | 1)
}

// seconds rounds a ttl up to what etcd knows.
func seconds(ttl time.Duration) int64 { return int64((ttl + time.Second - 1) / time.Second) }

// read answers what the key is; nil where it is missing.
func (s *Store) read(ctx context.Context, path string) (*entry, error) {
	resp, err := look(ctx, s.kv.Range, &pb.RangeRequest{Key: []byte(path)})
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return newEntry(resp.Kvs[0]), nil
}

// lend makes a lease of that id. Where a request without an answer has made it before, its time
// begins anew.
func (s *Store) lend(ctx context.Context, lease int64, ttl time.Duration) (time.Duration, error) {
	resp, err := ask(ctx, s.lease.LeaseGrant, &pb.LeaseGrantRequest{ID: lease, TTL: seconds(ttl)})
	switch {
	case err == errLeaseExists: // the caller's clock counts from before this renewal
		return s.renew(ctx, lease)
	case err != nil:
		return 0, err
	}
	return time.Duration(resp.TTL) * time.Second, nil
}

// revoke ends a lease and deletes its key. It answers errNoLease where there is none.
func (s *Store) revoke(ctx context.Context, lease int64) error {
	_, err := ask(ctx, s.once.LeaseRevoke, &pb.LeaseRevokeRequest{ID: lease})
	return err
}
