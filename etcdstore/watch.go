package etcdstore

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// watch returns when the key is deleted at the revision or later, and when it cannot tell: then
// the next Try finds out.
func (s *Store) watch(ctx context.Context, path string, from int64) {
	// A member without a leader would stay silent.
	ctx = clientv3.WithRequireLeader(ctx)
	for resp := range s.client.Watch(ctx, path, clientv3.WithRev(from), clientv3.WithFilterPut()) {
		if resp.Err() != nil || len(resp.Events) > 0 {
			return
		}
	}
}
