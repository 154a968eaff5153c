// Command holdfast runs a program under a distributed lock:
//
//	holdfast run [flags] KEY -- CMD [ARGS]
//
// CMD runs while this process, and no other one, holds KEY. The lease is extended for as
// long as CMD runs; when it is lost, CMD and what it has started are ended before another can
// hold KEY. Signals are sent on, the exit code of CMD is passed on, and CMD finds its fencing
// token in HOLDFAST_TOKEN. See holdfast run --help for the stores, the environment of CMD, the
// exit codes, and what no process can promise about another one.
//
// The other verbs:
//
//	acquire KEY         acquires KEY and prints a ticket, for scripts that work in steps
//	extend [TICKET]     extends the lease and prints the ticket anew; --while-pid PID keeps
//	                    the lease while a process lives
//	release [TICKET]    releases the lease
//	status KEY          tells who holds KEY, and who waits for it
//	list [PREFIX]       lists the keys that are held
//	break KEY           takes KEY from its holder, without ever letting two hold it
//	fence claim|check   shows a fencing token to the marks of a resource, for scripts
//	gateway             checks fencing tokens before a service that knows nothing of them
//	bench               measures a store
//	completion SHELL    prints the completion script of bash, zsh, fish or powershell
//	man [VERB]          prints a manual page
//	version             prints the version
//
// A ticket is a secret; it is read from a file, the standard input or HOLDFAST_TICKET, so that
// no list of processes shows it. The exit codes mean the same for all verbs: 1 another holds the
// key, 2 nobody does (status, break), 64 the command line is wrong, 75 the lease is lost, 125
// holdfast failed, 128+n a signal came. Of fence, 1 says that the token is stale.
package main
