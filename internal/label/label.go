// Package label names this process for people.
package label

import (
	"os"
	"strconv"
)

// Process is the host and the process id, such as "db1:4711".
func Process() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return host + ":" + strconv.Itoa(os.Getpid())
}

// BrokenBy is what the place of a holder says whose key was broken by this process, in at most
// 60 bytes: of a longer host name the end is left out.
func BrokenBy() string { return brokenBy(Process()) }

func brokenBy(p string) string {
	const by, most = "broken by ", 60
	if cut := len(by) + len(p) - most; cut > 0 {
		pid := ":" + strconv.Itoa(os.Getpid())
		p = p[:len(p)-len(pid)-cut] + pid
	}
	return by + p
}
