// Package rueidisnode makes nodes of a redlock store from clients of
// github.com/redis/rueidis.
//
// rueidis honours the context: a request that reaches its deadline on a quiet connection closes
// it, and on a busy one its late reply is read and thrown away. Turn DisableRetry on or leave
// it: scripts are not retried by rueidis, and if they were, it would be safe.
package rueidisnode
