package servertest

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// PgBouncer starts a PgBouncer in transaction mode in front of server, a PostgreSQL, on a free
// port of 127.0.0.1: each transaction gets any of its few connections to the server, and what
// belongs to a session is lost between two. It returns when it takes connections. It has no data
// of its own; DSN and URL lead to that of the server.
//
// addr is where it finds the server, such as that of a [Proxy]; empty means the server itself.
// Setting sets a variable of the section [pgbouncer], such as Setting("default_pool_size", "3").
//
// This PgBouncer may know nothing of prepared statements: a driver that prepares by itself, as
// pgx does, must be told not to. [SQLServer.DSN] tells pgx.
func PgBouncer(t testing.TB, server *SQLServer, addr string, opts ...SQLOption) *SQLServer {
	t.Helper()
	if server.kind != postgres {
		t.Fatalf("servertest: PgBouncer is for PostgreSQL, not for a %s", server.kind.program)
	}
	if addr == "" {
		addr = server.Addr()
	}
	return startSQLOn(t, bouncer(addr), sqlOptions{settings: map[string]string{}}, opts,
		func(s *SQLServer) error { return ownDir(s.dir) })
}

// bouncer is the kind of a PgBouncer in front of the PostgreSQL at addr.
func bouncer(addr string) *sqlKind {
	host, port, _ := strings.Cut(addr, ":")
	return &sqlKind{
		program: "pgbouncer",
		dsn:     postgres.dsn + "&default_query_exec_mode=exec",
		url:     postgres.url,
		defaults: map[string]string{
			"pool_mode": "transaction", "listen_addr": "127.0.0.1", "unix_socket_dir": "",
			"auth_type": "any", "max_client_conn": "500", "default_pool_size": "20",
			"ignore_startup_parameters": "extra_float_digits",
			"client_tls_sslmode":        "disable", "server_tls_sslmode": "disable",
			// Its own wait before it tries a server again that was down.
			"server_login_retry": "0.1",
		},
		command: func(s *SQLServer, settings map[string]string) *exec.Cmd {
			ini := filepath.Join(s.dir, "pgbouncer.ini")
			text := fmt.Sprintf("[databases]\nholdfast = host=%s port=%s user=postgres\n[pgbouncer]\nlisten_port = %d\n", host, port, s.port)
			for _, name := range slices.Sorted(maps.Keys(settings)) {
				text += name + " = " + settings[name] + "\n"
			}
			if err := os.WriteFile(ini, []byte(text), 0o600); err != nil {
				s.t.Error(err) // then it does not start
			}
			if err := giveAway(ini); err != nil {
				s.t.Error(err)
			}
			return asServerUser(exec.Command(s.bin, ini))
		},
		ready: func(_ *SQLServer, p *Process) bool { return strings.Contains(p.Log(), "process up") },
	}
}
