// Package goredisnode makes nodes of a redlock store from clients of
// github.com/redis/go-redis/v9.
//
// At its defaults go-redis ignores the deadline of a context and waits 3 s for a reply, four
// times. A node of a single server or a Sentinel deployment does better without touching the
// client's options: it asks for the reply within the context's deadline (at most twice what
// remained), the deadline ends the retries, and a server that cannot be reached is told as
// such instead of being dialled until then. go-redis never uses a connection again on which a
// reply did not come in time. A [redis.ClusterClient] has no such means: set its ReadTimeout or
// ContextTimeoutEnabled.
//
// Where a server does not know CLIENT MAINT_NOTIFICATIONS, go-redis 9.23 notes that in options which its
// connections share without a common lock: a program under the race detector may report it. Options with
// MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled} avoid that,
// and a round trip for each connection.
package goredisnode
