// Package redis runs the conformance suite against redlock on real Redis servers, one and
// five, through both clients.
package redis
