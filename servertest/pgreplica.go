package servertest

import (
	"net"
	"os/exec"
	"path/filepath"
)

// Replica starts a PostgreSQL server that follows s, which is one too, by streaming: it copies
// the data of s, and then takes its commits a moment after they were answered, since nothing
// waits for it. It reads from s at addr, such as that of a [Proxy] that can cut the replication;
// empty means s itself. Replica returns when the server takes connections, which can only read.
//
// It has the options of s, with the given ones added.
func (s *SQLServer) Replica(addr string, opts ...SQLOption) *SQLServer {
	s.t.Helper()
	if s.kind != postgres {
		s.t.Fatalf("servertest: a %s has no replicas here", s.kind.program)
	}
	if addr == "" {
		addr = s.Addr()
	}
	base := s.base.with([]SQLOption{Setting("wal_retrieve_retry_interval", "100ms")}) // after a cut
	return startSQLOn(s.t, postgres, base, opts, func(r *SQLServer) error {
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			return err
		}
		if err := ownDir(r.dir); err != nil {
			return err
		}
		return run(r.tool("pg_basebackup", "-D", r.dir, "-h", host, "-p", port, "-U", "postgres",
			"--write-recovery-conf", "--checkpoint=fast", "--no-sync"), r.dir, "")
	})
}

// Promote makes a server of its own of a replica, and returns when it takes writes. What had not
// reached it is lost; the server that it followed runs on where it does.
func (s *SQLServer) Promote() {
	s.t.Helper()
	if s.kind != postgres {
		s.t.Fatalf("servertest: a %s is no replica", s.kind.program)
	}
	if err := run(s.tool("pg_ctl", "-D", s.dir, "-w", "promote"), s.dir, ""); err != nil {
		s.t.Fatal(err)
	}
}

// tool is a program that comes with the server.
func (s *SQLServer) tool(name string, args ...string) *exec.Cmd {
	return asServerUser(exec.Command(filepath.Join(realDir(s.bin), name), args...))
}
