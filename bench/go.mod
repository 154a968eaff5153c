module github.com/holdfast-go/holdfast/bench

go 1.26.0

require (
	github.com/bsm/redislock v0.9.4
	github.com/go-redsync/redsync/v4 v4.18.1
	github.com/holdfast-go/holdfast v0.0.0
	github.com/holdfast-go/holdfast/redlock/goredisnode v0.0.0
	github.com/holdfast-go/holdfast/redlock/rueidisnode v0.0.0
	github.com/redis/go-redis/v9 v9.23.0
	github.com/redis/rueidis v1.0.79
	github.com/redis/rueidis/rueidiscompat v1.0.79
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	go.uber.org/atomic v1.12.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
)

replace (
	github.com/holdfast-go/holdfast => ../
	github.com/holdfast-go/holdfast/redlock/goredisnode => ../redlock/goredisnode
	github.com/holdfast-go/holdfast/redlock/rueidisnode => ../redlock/rueidisnode
)
