package main

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// listener is a [sqlstore.Listener]: it hears that a lock was released, so that those who wait for it
// need not look. It has a connection of its own, which must lead to the server and not to a pooler
// that shares connections by transactions.
type listener struct{ config *pgx.ConnConfig }

func (l listener) Listen(ctx context.Context, channel string, deliver func(payload string)) error {
	conn, err := pgx.ConnectConfig(ctx, l.config)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
		return err
	}
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		deliver(n.Payload)
	}
}
