package goredisnode

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/redlock"
)

// Eval returns what package redisfence runs its scripts by. The client is a [redis.Client], also
// of a Sentinel deployment, or a [redis.ClusterClient]; anything else is refused by a
// [store.InvalidError]. Eval does no I/O. The caller closes the client, after the last use.
//
// go-redis sends none of these scripts a second time, whatever its MaxRetries: it may have been
// executed. Cluster redirections are followed.
func Eval(client any) (redisfence.Eval, error) {
	switch c := client.(type) {
	case *redis.Client:
		if c != nil {
			n := &single{client: c}
			return evaluate(n.RunOne), nil
		}
	case *redis.ClusterClient:
		if c != nil {
			n := &cluster{client: c}
			return evaluate(func(ctx context.Context, call *redlock.Call) redlock.Reply { return n.Run(ctx, *call)[0] }), nil
		}
	}
	return nil, unfit(client)
}

func evaluate(run func(context.Context, *redlock.Call) redlock.Reply) redisfence.Eval {
	return func(ctx context.Context, script string, keys, args []string) (any, error) {
		r := run(ctx, &redlock.Call{Script: redlock.NewScript(script), Keys: keys, Args: args, Once: true})
		if errors.Is(r.Err, redis.ErrPoolTimeout) || errors.Is(r.Err, redis.ErrPoolExhausted) || errors.Is(r.Err, redis.ErrClosed) {
			r.Err = notSent{r.Err}
		}
		return r.Value, r.Err
	}
}

// notSent is an error of a call that had no connection to go out by.
type notSent struct{ error }

func (e notSent) Unwrap() error      { return e.error }
func (notSent) Is(target error) bool { return target == fence.ErrUnavailable }
