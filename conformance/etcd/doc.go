// Package etcd tests package etcdstore on real etcd servers: the suite of stores and that of
// guards, lost requests and replies, partitions, elections and restored clusters.
package etcd
