// Package etcdserver is the module from which the tests build the etcd server and etcdutl, so
// that no other module requires what these need. It is in no workspace; servertest.EtcdModule
// names its directory.
package etcdserver
