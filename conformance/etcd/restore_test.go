package etcd

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/servertest"
)

// snapshot saves the server's data as a backup does.
func snapshot(t *testing.T, addr string) string {
	t.Helper()
	r, err := connect(t, addr).Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	name := filepath.Join(t.TempDir(), "snapshot.db")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(f, r)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	return name
}

// grants takes and releases a key n times and answers the last token.
func grants(t *testing.T, locks *holdfast.Locker, n int) (last holdfast.Token) {
	t.Helper()
	for range n {
		lease := kit.Acquire(t, locks, "k")
		if lease.Token() <= last {
			t.Errorf("token %v comes after %v", lease.Token(), last)
		}
		last = lease.Token()
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return last
}

// The cluster is restored from a snapshot, so that its revision goes back. A store that was in
// use says so instead of granting; one that was not cannot know, and a guard refuses its token; a
// larger epoch, or a restore with a bumped revision, makes tokens grow again.
func TestRestoredSnapshot(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	o := holdfast.Options{TTL: minTTL}
	s := open(t, etcdstore.Options{}, server.Addr())
	locks := kit.Locker(t, s, o)
	grants(t, locks, 2)
	backup := snapshot(t, server.Addr())
	last := grants(t, locks, 20)
	var guard fence.Memory
	if err := guard.Claim(t.Context(), "r", last); err != nil {
		t.Fatal(err)
	}
	restore := func(flags ...string) {
		server.Kill()
		server.Restore(backup, flags...)
		server.Restart()
	}
	restore()
	var refusal error
	servertest.Eventually(t, time.Minute, func() error {
		_, refusal = locks.TryAcquire(t.Context(), "k")
		if refusal == nil || errors.Is(refusal, holdfast.ErrInvalid) {
			return nil
		}
		return refusal
	})
	if !errors.Is(refusal, holdfast.ErrInvalid) {
		t.Errorf("a store that has seen larger revisions answers %v, want ErrInvalid", refusal)
	}
	t.Logf("a store in use says: %v", refusal)
	servertest.Eventually(t, minTTL, func() error {
		if n := keys(t, connect(t, server.Addr()), etcdstore.DefaultPrefix); n != 0 {
			return errors.New("what was taken in vain is still there")
		}
		return nil
	})

	low := grants(t, locker(t, o, server.Addr()), 1)
	if low > last {
		t.Errorf("the revision has not gone back: %v after %v; the test shows nothing", low, last)
	}
	if err := guard.Claim(t.Context(), "r", low); !errors.Is(err, fence.ErrStale) {
		t.Errorf("a guard answers a token of the restored cluster by %v, want ErrStale", err)
	}
	epoch := kit.Locker(t, open(t, etcdstore.Options{Epoch: 1}, server.Addr()), o)
	if first := grants(t, epoch, 1); first <= last {
		t.Errorf("with a larger epoch token %v comes after %v", first, last)
	} else if err := guard.Claim(t.Context(), "r", first); err != nil {
		t.Errorf("a guard refuses a token of the larger epoch: %v", err)
	}

	restore("--bump-revision=1000000", "--mark-compacted")
	if first := grants(t, locks, 1); first <= last {
		t.Errorf("with a bumped revision token %v comes after %v", first, last)
	}
}

// A lease that was granted after the snapshot is not there after it was restored: its holder is
// told at its next extension.
func TestRestoredWithoutTheLease(t *testing.T) {
	t.Parallel()
	server := servertest.Etcd(t, module)
	locks := locker(t, holdfast.Options{TTL: 3 * minTTL}, server.Addr())
	backup := snapshot(t, server.Addr())
	lease := kit.Acquire(t, locks, "k")
	server.Kill()
	server.Restore(backup)
	server.Restart()
	servertest.Eventually(t, time.Minute, func() error {
		if err := lease.Extend(t.Context()); !errors.Is(err, holdfast.ErrLost) {
			return errors.Join(errors.New("the lease is still extended"), err)
		}
		return nil
	})
	_ = lease.Release(t.Context())
}
