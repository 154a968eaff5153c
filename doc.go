// Package holdfast gives distributed leases with fencing tokens.
package holdfast
