package kit

import (
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/goredisnode"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
)

// ChildStore opens a store in a child process: args are the name of the client and the
// addresses of the nodes. end closes the clients.
func ChildStore(args []string) (s *redlock.Store, end func()) {
	return ChildStoreWith(redlock.Options{}, args)
}

// ChildStoreWith is [ChildStore] with other options.
func ChildStoreWith(o redlock.Options, args []string) (s *redlock.Store, end func()) {
	var nodes []redlock.Node
	var ends []func()
	for _, addr := range args[1:] {
		var n redlock.Node
		var err error
		if args[0] == Rueidis.Name {
			var c *rueidisnode.Conn
			c, err = rueidisnode.Dial(rueidis.ClientOption{InitAddress: []string{addr}})
			n, ends = c, append(ends, func() { c.Close() })
		} else {
			c := goredis.NewClient(&goredis.Options{Addr: addr})
			n, err = goredisnode.New(c)
			ends = append(ends, func() { c.Close() })
		}
		if err != nil {
			panic(err)
		}
		nodes = append(nodes, n)
	}
	s, err := redlock.New(o, nodes...)
	if err != nil {
		panic(err)
	}
	return s, func() {
		for _, end := range ends {
			end()
		}
	}
}
