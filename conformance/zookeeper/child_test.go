package zookeeper

import (
	"context"
	"strconv"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/zkstore"
)

var children = map[string]func(){"hold": hold}

// hold holds a key and tells, once it has been stopped for longer than the ttl, what it knows then. Its
// arguments are the key, the server and the timeout of the session.
func hold() {
	args := kit.Args()
	timeout, err := time.ParseDuration(args[2])
	if err != nil {
		panic(err)
	}
	s, err := zkstore.Dial(zkstore.Options{Servers: args[1:2], SessionTimeout: timeout})
	if err != nil {
		panic(err)
	}
	locks, err := holdfast.New(s, &holdfast.Options{TTL: timeout / 2})
	if err != nil {
		panic(err)
	}
	lease, err := locks.Acquire(context.Background(), args[0])
	if err != nil {
		panic(err)
	}
	kit.Say("held", lease.Token())
	for last := time.Now(); ; time.Sleep(timeout / 200) {
		now := time.Now()
		if now.Sub(last) > timeout/2 { // it was stopped
			// The first question after waking.
			lost := lease.Err() != nil
			kit.Say("woke", strconv.FormatBool(lost))
			return
		}
		last = now
	}
}
