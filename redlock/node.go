package redlock

import (
	"context"
	"crypto/sha1" // the digest that EVALSHA asks for
	"encoding/hex"
	"strings"
)

// Node is one Redis server of a store, or a Sentinel or Cluster deployment, which counts
// as one. Packages goredisnode and rueidisnode make nodes of the two common clients. A
// Node is safe for concurrent use; whoever opened the client closes it.
//
// The store races every call against a timer of its own, so a node need not honour its
// context, but should: a call that hangs keeps a goroutine. A late reply must never be
// given to another request.
type Node interface {
	// Name is the address, without credentials. It is the node's identity in errors,
	// events and in the check for a node that is given twice.
	Name() string

	// Run sends the calls as one pipeline and answers each, in order. A reply of the
	// server that is an error is a [*ServerError]; any other error means that it is not
	// known whether the call was executed.
	Run(ctx context.Context, calls ...Call) []Reply

	// Pinned runs fn with one connection, to the server that has key. Within fn, do sends
	// one command and answers it as Run does.
	Pinned(ctx context.Context, key string, fn func(do func(args ...string) (any, error)) error) error

	// Subscribe delivers the messages of a channel until ctx is done, reconnecting by
	// itself, and calls up after each confirmed (re)subscription. deliver and up must not
	// block. It returns when ctx is done, or with an error where the server does not have
	// or does not allow it. Its calls should share one connection: see [Subscriptions].
	Subscribe(ctx context.Context, channel string, deliver func(payload string), up func()) error
}

// Call is one execution of a script.
type Call struct {
	Script *Script
	Keys   []string
	Args   []string
	// Strict: send EVALSHA only, and answer NOSCRIPT to the caller. Otherwise a node sends
	// EVAL where the server does not know the script.
	Strict bool
	// Once: do not let the client library send it again by itself. Its answer tells what the
	// first execution found, and a second one would hide that.
	Once bool
}

// Reply is what a server answered: Value is nil, a string, an int64 or a []any of those.
type Reply struct {
	Value any
	Err   error
}

// Script is the text of a Lua script and its digest.
type Script struct {
	Text string
	SHA1 string
}

// NewScript returns the script with the given text.
func NewScript(text string) *Script {
	sum := sha1.Sum([]byte(text))
	return &Script{Text: text, SHA1: hex.EncodeToString(sum[:])}
}

// ServerError is an error that a Redis server replied.
type ServerError struct{ Text string }

// Error is the text without what a server repeats of a command that it does not know: that may be
// a password, where the command is AUTH or HELLO.
func (e *ServerError) Error() string {
	text, _, _ := strings.Cut(e.Text, ", with args beginning with")
	return text
}

// Code is the first word of the reply, such as "NOSCRIPT" or "READONLY".
func (e *ServerError) Code() string {
	code, _, _ := strings.Cut(e.Text, " ")
	return code
}
