// Package scale holds many leases at once in one process.
package scale
