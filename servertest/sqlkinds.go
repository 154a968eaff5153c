package servertest

import (
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
)

// Without durable, a commit is written to the system and not synced.
var postgres = &sqlKind{
	program: "postgres",
	dsn:     "postgres://postgres@%s/holdfast?sslmode=disable",
	url:     "postgres://postgres@%s/holdfast?sslmode=disable",
	defaults: map[string]string{
		"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB", "huge_pages": "off",
		"max_connections": "200", "unix_socket_directories": "", "listen_addresses": "127.0.0.1",
	},
	durable: map[string]string{"fsync": "on", "full_page_writes": "on"},
	create: func(bin, dir string) error {
		initdb := asServerUser(exec.Command(filepath.Join(realDir(bin), "initdb"), "-D", dir,
			"-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"))
		if err := run(initdb, dir, ""); err != nil {
			return err
		}
		single := asServerUser(exec.Command(bin, "--single", "-D", dir, "-F", "postgres"))
		return run(single, dir, "CREATE DATABASE holdfast\n")
	},
	command: func(s *SQLServer, settings map[string]string) *exec.Cmd {
		// What a killed server has left there says "ready".
		_ = os.Remove(filepath.Join(s.dir, "postmaster.pid"))
		cmd := exec.Command(s.bin, "-D", s.dir, "-p", strconv.Itoa(s.port))
		for name, value := range settings {
			cmd.Args = append(cmd.Args, "-c", name+"="+value)
		}
		dieByQuit(cmd)
		return asServerUser(cmd)
	},
	ready: func(s *SQLServer, p *Process) bool {
		return pidLine(s.dir, 1) == strconv.Itoa(p.PID()) && pidLine(s.dir, 8) == "ready"
	},
	// After SIGKILL a piece of shared memory stays until the next start on the same files.
	quit: func(p *Process) { quitPID(p.PID()) },
	clean: func(dir string) {
		if _, id, ok := strings.Cut(pidLine(dir, 7), " "); ok {
			_ = exec.Command("ipcrm", "-m", strings.TrimSpace(id)).Run()
		}
	},
}

// pidLine is a line of the file that a PostgreSQL server removes when it ends in order; empty
// where there is none. Line 1 is its process, 7 the key and id of its shared memory, 8 its state.
func pidLine(dir string, n int) string {
	b, _ := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	if lines := strings.Split(string(b), "\n"); len(lines) >= n {
		return strings.TrimSpace(lines[n-1])
	}
	return ""
}

var mariadb = &sqlKind{
	program: "mariadbd",
	dsn:     "root@tcp(%s)/holdfast",
	url:     "mysql://root@%s/holdfast",
	defaults: map[string]string{
		"innodb_flush_log_at_trx_commit": "2", "innodb_doublewrite": "0",
		"max_connections": "200", "bind_address": "127.0.0.1",
	},
	durable: map[string]string{"innodb_flush_log_at_trx_commit": "1", "innodb_doublewrite": "1"},
	create: func(_, dir string) error {
		install, err := exec.LookPath("mariadb-install-db")
		if err != nil {
			return err
		}
		args := append([]string{"--no-defaults", "--datadir=" + dir, "--auth-root-authentication-method=normal",
			"--skip-test-db", "--innodb-flush-log-at-trx-commit=2", "--innodb-doublewrite=0"}, mariadbArgs()...)
		if err := run(asServerUser(exec.Command(install, args...)), dir, ""); err != nil {
			return err
		}
		return ownDir(filepath.Join(dir, "holdfast")) // a database is a directory
	},
	command: func(s *SQLServer, settings map[string]string) *exec.Cmd {
		args := append([]string{"--no-defaults", "--datadir=" + s.dir, "--port=" + strconv.Itoa(s.port),
			"--socket=mariadbd.sock", "--pid-file=mariadbd.pid"}, mariadbArgs()...)
		for name, value := range settings {
			args = append(args, "--"+name+"="+value)
		}
		return asServerUser(exec.Command(s.bin, args...))
	},
	ready: func(_ *SQLServer, p *Process) bool { return strings.Contains(p.Log(), "ready for connections") },
}

// mariadbArgs are of the files as much as of the server.
func mariadbArgs() []string {
	return []string{"--skip-name-resolve", "--character-set-server=utf8mb4", "--innodb-log-file-size=16M",
		"--innodb-buffer-pool-size=32M", "--innodb-use-native-aio=0", "--key-buffer-size=1M"}
}

// serverAccount is a user of the system that is not root.
type serverAccount struct{ uid, gid int }

// serverUser is who servers run as when the test runs as root: PostgreSQL refuses to be root.
// It is nil where they run as the test does.
var serverUser = sync.OnceValue(func() *serverAccount {
	if os.Geteuid() != 0 {
		return nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			uid, err1 := strconv.Atoi(u.Uid)
			gid, err2 := strconv.Atoi(u.Gid)
			if err1 == nil && err2 == nil {
				return &serverAccount{uid, gid}
			}
		}
	}
	return &serverAccount{65534, 65534}
})

// asServerUser makes cmd run as [serverUser].
func asServerUser(cmd *exec.Cmd) *exec.Cmd {
	if u := serverUser(); u != nil {
		runAs(cmd, u.uid, u.gid)
	}
	return cmd
}

// realDir is where a program lies that may be found through a link.
func realDir(bin string) string {
	if real, err := filepath.EvalSymlinks(bin); err == nil {
		bin = real
	}
	return filepath.Dir(bin)
}
