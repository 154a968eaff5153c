// Command holdfast runs a program under a distributed lock:
//
//	holdfast run [flags] KEY -- CMD [ARGS]
//
// CMD runs while this process, and no other one, holds KEY. The lease is extended for as
// long as CMD runs; when it is lost, CMD is ended before another can hold KEY. See
// holdfast run --help for the stores, the environment of CMD and the exit codes.
package main
