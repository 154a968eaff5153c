// Package rules shows that each rule of docs/protocol.md, section 7, is needed: with the rule
// switched off, its counterexample breaks the lock on real servers, and with the rule on it
// does not. The switches exist only in builds with the tag holdfast_rules:
//
//	go test -tags holdfast_rules ./conformance/rules
package rules
