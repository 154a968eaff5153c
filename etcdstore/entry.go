package etcdstore

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/holdfast-go/holdfast/store"
)

// maxLabel is how much of a label is kept, in bytes.
const maxLabel = 64

// record is the value of a lock's key.
type record struct {
	Key    string `json:"key,omitempty"` // where it is UTF-8
	Key64  []byte `json:"key64,omitempty"`
	Owner  string `json:"owner"`
	Label  string `json:"label,omitempty"`
	Epoch  int64  `json:"epoch,omitempty"`
	Since  int64  `json:"since"` // wall clock of the holder in ms, for people
	Broken bool   `json:"broken,omitempty"`
}

func newRecord(key, owner, label string, epoch int64) record {
	r := record{Owner: owner, Label: label[:min(len(label), maxLabel)], Epoch: epoch, Since: time.Now().UnixMilli()}
	if utf8.ValidString(key) {
		r.Key = key
	} else {
		r.Key64 = []byte(key)
	}
	return r
}

func (r record) text() []byte {
	b, err := json.Marshal(r)
	if err != nil {
		panic("etcdstore: a record of plain values failed to encode: " + err.Error())
	}
	return b
}

// entry is what etcd has for a lock's key.
type entry struct {
	record
	value           []byte // the record as it is
	foreign         bool   // not written by a store
	lease           int64
	created, change int64 // revisions
}

// newEntry reads a key, and answers nil for nil.
func newEntry(kv *mvccpb.KeyValue) *entry {
	if kv == nil {
		return nil
	}
	e := &entry{value: kv.Value, lease: kv.Lease, created: kv.CreateRevision, change: kv.ModRevision}
	if json.Unmarshal(kv.Value, &e.record) != nil || e.Owner == "" || e.Key == "" && len(e.Key64) == 0 {
		e.record, e.foreign = record{Owner: string(kv.Value)}, true
	}
	if len(e.Key64) > 0 {
		e.Key = string(e.Key64)
	}
	return e
}

// holder tells people of the entry. left is what remains of its lease.
func (e *entry) holder(key string, left time.Duration) store.Holder {
	h := store.Holder{Key: key, Owner: e.Owner, Label: e.Label, TTL: left, NoTTL: e.lease == 0, Foreign: e.foreign, Broken: e.Broken}
	if e.foreign {
		return h
	}
	h.Token = token(e.Epoch, e.created)
	h.Held = e.age()
	return h
}

// age is the time since the record was made, by the wall clocks.
func (r record) age() time.Duration { return max(0, time.Since(time.UnixMilli(r.Since))) }

// left answers what remains of the lease of an entry: never less than it is, at most a second
// more.
func (s *Store) left(ctx context.Context, e *entry) (time.Duration, error) {
	if e.lease == 0 {
		return 0, nil
	}
	resp, err := look(ctx, s.lease.LeaseTimeToLive, &pb.LeaseTimeToLiveRequest{ID: e.lease})
	switch {
	case err == errNoLease:
		return time.Second, nil
	case err != nil:
		return 0, err
	case resp.TTL < 0: // the key goes with the lease, within half a second
		return time.Second, nil
	}
	granted := time.Duration(min(resp.GrantedTTL, seconds(maxTTL))) * time.Second
	return min(time.Duration(resp.TTL+1)*time.Second, granted), nil
}

// newOwner names an attempt by its lease.
func newOwner(lease int64) string { return fmt.Sprintf("%016x.%016x", lease, rand.Uint64()) }

// leaseOf reads the lease in an owner; zero where there is none.
func leaseOf(owner string) int64 {
	id, _, _ := strings.Cut(owner, ".")
	lease, err := strconv.ParseInt(id, 16, 64)
	if err != nil || len(id) != 16 || lease <= 0 {
		return 0
	}
	return lease
}

// brokenBy says who broke a lock, in at most 60 bytes.
func brokenBy() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	pid := ":" + strconv.Itoa(os.Getpid())
	const by, most = "broken by ", 60
	return by + host[:min(len(host), most-len(by)-len(pid))] + pid
}
