// Package conformance holds the tests that need drivers, servers or other libraries.
package conformance
