package rueidisnode

import (
	"context"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/redlock"
)

// Eval returns what package redisfence runs its scripts by, for a client of any mode; nil is
// refused by a [store.InvalidError]. It does no I/O. The caller closes the client, after the last
// use. A [Conn] has a method for it.
//
// rueidis sends none of these scripts a second time, whatever its options: it may have been
// executed. Cluster redirections are followed.
func Eval(client rueidis.Client) (redisfence.Eval, error) {
	if client == nil {
		return nil, noClient()
	}
	n := &node{client: func(context.Context) (rueidis.Client, error) { return client, nil }}
	return n.Eval, nil
}

// Eval is a [redisfence.Eval].
func (n *node) Eval(ctx context.Context, script string, keys, args []string) (any, error) {
	client, err := n.connect(ctx)
	if err != nil {
		return nil, notSent{err}
	}
	r := one(ctx, client, &redlock.Call{Script: redlock.NewScript(script), Keys: keys, Args: args, Once: true})
	return r.Value, r.Err
}

// notSent is an error of a call that had no client to go out by.
type notSent struct{ error }

func (e notSent) Unwrap() error      { return e.error }
func (notSent) Is(target error) bool { return target == fence.ErrUnavailable }
