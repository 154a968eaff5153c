// Package faults plays the failures of nodes, networks and holders against Holdfast on real
// Redis servers.
package faults
