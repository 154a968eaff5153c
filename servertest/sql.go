package servertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// SQLServer is a PostgreSQL or MariaDB process of the test, with an empty database named
// holdfast and one user that needs no password and may do everything, or a pooler in front of
// one. Nothing is encrypted. Its methods are safe for concurrent use, but Kill and Restart do
// not overlap.
type SQLServer struct {
	t    testing.TB
	kind *sqlKind
	bin  string
	dir  string // data files
	port int
	base sqlOptions

	mu      sync.Mutex
	proc    *Process
	stopped *stopGuard // not nil while paused
}

// sqlKind is what differs between the servers.
type sqlKind struct {
	program  string
	defaults map[string]string
	durable  map[string]string
	dsn, url string // with %s for host:port

	// create makes the data files in an empty directory.
	create func(bin, dir string) error
	// command starts the server with all its settings.
	command func(s *SQLServer, settings map[string]string) *exec.Cmd
	// ready is true when the process takes connections.
	ready func(s *SQLServer, p *Process) bool
	// quit asks the process to end without finishing its work, and clean removes what it
	// leaves in the system when it is killed. Both are nil where it leaves nothing.
	quit  func(p *Process)
	clean func(dir string)

	template template
}

type sqlOptions struct {
	settings map[string]string
	durable  bool
}

// with is o and the given options, in settings of its own.
func (o sqlOptions) with(opts []SQLOption) sqlOptions {
	o.settings = maps.Clone(o.settings)
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// SQLOption changes how a SQL server is started.
type SQLOption func(*sqlOptions)

// Setting sets a variable of the server's configuration, such as
// Setting("max_connections", "10"). The last one counts.
func Setting(name, value string) SQLOption {
	return func(o *sqlOptions) { o.settings[name] = value }
}

// Durable makes each commit reach the disk before it is answered, as these servers do when
// nobody tells them otherwise. Without it a commit outlives the death of the server, not that
// of the machine.
func Durable() SQLOption { return func(o *sqlOptions) { o.durable = true } }

// PostgreSQL starts a PostgreSQL server on a free port of 127.0.0.1 and returns when it takes
// connections. It ends with the test. As root, the server runs as the user postgres or nobody.
func PostgreSQL(t testing.TB, opts ...SQLOption) *SQLServer {
	t.Helper()
	return startSQL(t, postgres, opts)
}

// MariaDB starts a MariaDB server on a free port of 127.0.0.1 and returns when it takes
// connections. It ends with the test.
func MariaDB(t testing.TB, opts ...SQLOption) *SQLServer {
	t.Helper()
	return startSQL(t, mariadb, opts)
}

func startSQL(t testing.TB, kind *sqlKind, opts []SQLOption) *SQLServer {
	t.Helper()
	return startSQLOn(t, kind, sqlOptions{settings: map[string]string{}}, opts, func(s *SQLServer) error {
		return kind.template.copyTo(kind, s.bin, s.dir)
	})
}

// startSQLOn starts a server with the data files that fill makes.
func startSQLOn(t testing.TB, kind *sqlKind, base sqlOptions, opts []SQLOption, fill func(*SQLServer) error) *SQLServer {
	t.Helper()
	s := &SQLServer{t: t, kind: kind, bin: Need(t, kind.program), base: base.with(opts)}
	s.dir = filepath.Join(serverDir(t), "data")
	t.Cleanup(s.end)
	err := fill(s)
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if s.port, err = freePort(); err != nil {
			break
		}
		if err = s.start(s.base); err == nil || !portTaken(err) {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *SQLServer) start(o sqlOptions) error {
	settings := maps.Clone(s.kind.defaults)
	if o.durable {
		maps.Copy(settings, s.kind.durable)
	}
	maps.Copy(settings, o.settings)
	cmd := s.kind.command(s, settings)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "TMPDIR="+filepath.Dir(s.dir))
	p, err := start(s.t, cmd)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()
	err = eventually(startTimeout, func() error {
		if p.running() && !s.kind.ready(s, p) {
			return errors.New("not ready")
		}
		return nil
	})
	if err == nil && p.running() {
		return nil
	}
	s.Kill()
	return fmt.Errorf("servertest: %s does not start:\n%s", s.kind.program, p.Log())
}

// Addr is host:port; it stays the same over restarts.
func (s *SQLServer) Addr() string { return loopback(s.port) }

// DSN is the data source name of the database holdfast for database/sql: for the driver "pgx"
// (github.com/jackc/pgx/v5/stdlib) or "mysql" (github.com/go-sql-driver/mysql). addr is where
// to connect, such as that of a [Proxy]; empty means the server itself.
func (s *SQLServer) DSN(addr string) string { return s.at(s.kind.dsn, addr) }

// URL is the same as a URL, postgres:// or mysql://.
func (s *SQLServer) URL(addr string) string { return s.at(s.kind.url, addr) }

func (s *SQLServer) at(format, addr string) string {
	if addr == "" {
		addr = s.Addr()
	}
	return fmt.Sprintf(format, addr)
}

// Dir is where the server keeps its files.
func (s *SQLServer) Dir() string { return s.dir }

func (s *SQLServer) process() *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc
}

// PID is the id of the process, which a restart changes.
func (s *SQLServer) PID() int { return s.process().PID() }

// Log is the last of what the server wrote since its last start.
func (s *SQLServer) Log() string { return s.process().Log() }

// Stop pauses the server by SIGSTOP, with the processes that serve its connections, and returns
// when all stand still.
func (s *SQLServer) Stop() {
	s.t.Helper()
	pids, err := stopTree(s.PID())
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped.end()
	if s.stopped, err = guardStopped(pids); err != nil {
		s.t.Fatal(err)
	}
}

// Cont lets the server run on after Stop.
func (s *SQLServer) Cont() {
	s.t.Helper()
	s.mu.Lock()
	s.stopped.end()
	s.stopped = nil
	s.mu.Unlock()
	pids, err := children(s.PID())
	for _, pid := range append(pids, s.PID()) {
		err = errors.Join(err, Resume(pid))
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// Kill ends the server by SIGKILL, with the processes that serve its connections, also a
// stopped one, and waits for their end.
func (s *SQLServer) Kill() {
	p := s.process()
	if p == nil {
		return
	}
	if p.running() {
		pids, err := stopTree(p.PID()) // so that it starts no new one
		if err != nil && !errors.Is(err, ErrNoPause) && p.running() {
			s.t.Errorf("servertest: kill %s: %v", s.kind.program, err)
		}
		for _, pid := range pids {
			killPID(pid)
		}
		p.Kill()
		_ = eventually(startTimeout, func() error {
			for _, pid := range pids {
				if _, err := isStopped(pid); err == nil {
					return errors.New("runs on")
				}
			}
			return nil
		})
	}
	s.mu.Lock()
	s.stopped.end()
	s.stopped = nil
	s.mu.Unlock()
}

// end is the end of the test.
func (s *SQLServer) end() {
	if p := s.process(); p != nil && s.kind.quit != nil {
		s.mu.Lock()
		stopped := s.stopped != nil
		s.mu.Unlock()
		if !stopped && p.running() {
			s.kind.quit(p)
			select {
			case <-p.done:
			case <-time.After(startTimeout):
			}
		}
	}
	s.Kill()
	if s.kind.clean != nil {
		s.kind.clean(s.dir)
	}
}

// Restart starts the server again on the same port and data and returns when it takes
// connections. A server that still runs is killed first. The options add to those of the first
// start, for this start only.
func (s *SQLServer) Restart(opts ...SQLOption) {
	s.t.Helper()
	s.Kill()
	o := s.base.with(opts)
	// The port may be in a closing state for a moment.
	if err := eventually(startTimeout, func() error { return s.start(o) }); err != nil {
		s.t.Fatal(err)
	}
}

// stopTree pauses a process, and then its children, and answers all their ids.
func stopTree(pid int) ([]int, error) {
	if err := Pause(pid); err != nil {
		return []int{pid}, err
	}
	kids, err := children(pid)
	if err != nil {
		return []int{pid}, err
	}
	pids := []int{pid}
	for _, kid := range kids {
		switch err := Pause(kid); {
		case err == nil:
			pids = append(pids, kid)
		case !errors.Is(err, os.ErrProcessDone):
			return pids, err
		}
	}
	return pids, nil
}

// stopGuard lets stopped processes run on when this process is killed: while they stand still
// they do not notice the end of their parent.
type stopGuard struct{ cmd *exec.Cmd }

func guardStopped(pids []int) (*stopGuard, error) {
	args := []string{"-c", `read -r line || kill -CONT "$@"`, "sh"}
	for _, pid := range pids {
		args = append(args, fmt.Sprint(pid))
	}
	cmd := exec.Command("/bin/sh", args...)
	if _, err := cmd.StdinPipe(); err != nil { // ends with this process
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("servertest: %w", err)
	}
	return &stopGuard{cmd}, nil
}

func (g *stopGuard) end() {
	if g == nil {
		return
	}
	_ = g.cmd.Process.Kill()
	_ = g.cmd.Wait()
}

// template holds the data files of a new server, in memory: making them takes longer than
// starting the server, and no test process leaves a file behind.
type template struct {
	once  sync.Once
	err   error
	files []templateFile
}

type templateFile struct {
	path string // with slashes; a directory ends in one
	data []byte // without the zeros at its end, of which a log has megabytes
	size int64
}

func (m *template) copyTo(kind *sqlKind, bin, dir string) error {
	m.once.Do(func() { m.err = m.create(kind, bin) })
	if m.err != nil {
		return fmt.Errorf("servertest: new data files of %s: %w", kind.program, m.err)
	}
	if err := ownDir(dir); err != nil {
		return err
	}
	for _, f := range m.files {
		if err := f.write(filepath.Join(dir, filepath.FromSlash(f.path))); err != nil {
			return err
		}
	}
	return nil
}

func (m *template) create(kind *sqlKind, bin string) error {
	top, err := newServerDir()
	if err != nil {
		return err
	}
	defer os.RemoveAll(top)
	dir := filepath.Join(top, "data")
	if err := ownDir(dir); err != nil {
		return err
	}
	if err := kind.create(bin, dir); err != nil {
		return err
	}
	return fs.WalkDir(os.DirFS(dir), ".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil || path == ".":
			return err
		case d.IsDir():
			m.files = append(m.files, templateFile{path: path + "/"})
			return nil
		case !d.Type().IsRegular():
			return nil
		}
		b, err := os.ReadFile(filepath.Join(dir, filepath.FromSlash(path)))
		m.files = append(m.files, templateFile{path, bytes.Clone(bytes.TrimRight(b, "\x00")), int64(len(b))})
		return err
	})
}

func (f templateFile) write(path string) error {
	if strings.HasSuffix(f.path, "/") {
		return ownDir(path)
	}
	if err := os.WriteFile(path, f.data, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(path, f.size); err != nil {
		return err
	}
	return giveAway(path)
}

// serverDir is a directory for one server, which the user that servers run as can reach.
func serverDir(t testing.TB) string {
	t.Helper()
	dir, err := newServerDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func newServerDir() (string, error) {
	parent := os.TempDir()
	if serverUser() != nil && !reachable(parent) {
		parent = "/tmp"
	}
	dir, err := os.MkdirTemp(parent, "servertest")
	if err != nil {
		return "", err
	}
	return dir, errors.Join(giveAway(dir), os.Chmod(dir, 0o711))
}

// reachable is true where other users may pass through all directories of the path.
func reachable(dir string) bool {
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&1 == 0 {
			return false
		}
		up := filepath.Dir(dir)
		if up == dir {
			return true
		}
		dir = up
	}
}

// ownDir makes a directory of the user that servers run as.
func ownDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return giveAway(dir)
}

func giveAway(path string) error {
	if u := serverUser(); u != nil {
		return os.Chown(path, u.uid, u.gid)
	}
	return nil
}

// run runs a program that makes data files in dir.
func run(cmd *exec.Cmd, dir, stdin string) error {
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "TMPDIR="+filepath.Dir(dir))
	cmd.Stdin = strings.NewReader(stdin)
	cmd.WaitDelay = time.Second
	dieWithParent(cmd)
	var out tail
	cmd.Stdout, cmd.Stderr = &out, &out
	ctx, cancel := context.WithTimeout(context.Background(), 4*startTimeout)
	defer cancel()
	if err := cmd.Start(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w\n%s", filepath.Base(cmd.Path), err, out.String())
	}
	return nil
}
