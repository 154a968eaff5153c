// Package rueidisnode makes nodes of a redlock store from clients of
// github.com/redis/rueidis.
//
// rueidis honours the context: a request that reaches its deadline on a quiet connection closes
// it, and on a busy one its late reply is read and thrown away. Turn DisableRetry on or leave
// it: rueidis does not retry scripts, and it would be safe if it did. A script that meets a
// connection which the server has closed is sent again by the node, where that does no harm.
//
// rueidis panics where a proxy swaps the server behind a connection. Use one that ends the
// client's connection with the server's.
package rueidisnode
