// Package queue plays the failures of waiters, holders, servers and messages against claims that
// wait in the queue of real Redis servers.
package queue
