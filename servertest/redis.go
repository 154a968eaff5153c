package servertest

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// startTimeout bounds the start of a server, on a busy machine too.
const startTimeout = 30 * time.Second

// RedisServer is a redis-server process of the test. Its methods are safe for concurrent use,
// but what ends and starts the process (Kill, Shutdown, Restart, Wipe, RestoreSnapshot) does
// not overlap.
type RedisServer struct {
	t     testing.TB
	dir   string
	port  int
	bin   string
	base  redisOptions
	clock *Clock

	mu   sync.Mutex
	proc *Process
}

type redisOptions struct {
	config     map[string][]string // values of each directive
	user, pass string
	clock      bool
	age        time.Duration
	sentinel   bool
}

// RedisOption changes how a server is started.
type RedisOption func(*redisOptions)

// Config sets a directive of the configuration, such as Config("maxmemory", "2mb"). The last
// one counts.
func Config(directive string, values ...string) RedisOption {
	return func(o *redisOptions) { o.config[directive] = values }
}

// AppendOnly keeps an append-only file; fsync is always, everysec or no.
func AppendOnly(fsync string) RedisOption {
	return func(o *redisOptions) {
		o.config["appendonly"] = []string{"yes"}
		o.config["appendfsync"] = []string{fsync}
	}
}

// ReplicaOf makes the server a replica of primary. [RedisServer.WaitLinked] waits for the link.
func ReplicaOf(primary *RedisServer) RedisOption {
	return Config("replicaof", "127.0.0.1", strconv.Itoa(primary.port))
}

// As is the user for the commands of [RedisServer.Do]. It does not create the user. An empty
// name means the default user.
func As(user, password string) RedisOption {
	return func(o *redisOptions) { o.user, o.pass = user, password }
}

// WithClock gives the server a [Clock] that can be set. Linux, and a C compiler.
func WithClock() RedisOption { return func(o *redisOptions) { o.clock = true } }

// Aged makes the server say that it has been up for d already, by a clock that is d behind
// while it starts and then right (at the offset that it had before). It implies [WithClock].
// It holds for one start: after a Restart the server is young again unless that asks for it.
func Aged(d time.Duration) RedisOption {
	return func(o *redisOptions) { o.clock, o.age = true, d }
}

// Redis starts a redis-server on a free port of 127.0.0.1, without persistence unless the
// options ask for it, and returns when it answers. It ends with the test.
func Redis(t testing.TB, opts ...RedisOption) *RedisServer {
	t.Helper()
	s, err := newRedis(t, opts)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// RedisN starts n servers at once, all with the same options.
func RedisN(t testing.TB, n int, opts ...RedisOption) []*RedisServer {
	t.Helper()
	Need(t, "redis-server")
	each := make([][]RedisOption, n)
	for i := range each {
		each[i] = opts
	}
	return startAll(t, each)
}

func startAll(t testing.TB, each [][]RedisOption) []*RedisServer {
	t.Helper()
	servers := make([]*RedisServer, len(each))
	for i, opts := range each {
		servers[i] = prepare(t, opts) // may end the test, hence in its own goroutine
	}
	errs := make([]error, len(each))
	var wg sync.WaitGroup
	for i, s := range servers {
		wg.Go(func() { errs[i] = s.first() })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return servers
}

func newRedis(t testing.TB, opts []RedisOption) (*RedisServer, error) {
	t.Helper()
	s := prepare(t, opts)
	return s, s.first()
}

// prepare makes everything but the process.
func prepare(t testing.TB, opts []RedisOption) *RedisServer {
	t.Helper()
	s := &RedisServer{t: t, bin: Need(t, "redis-server"), dir: t.TempDir()}
	s.base.config = map[string][]string{
		"bind": {"127.0.0.1"}, "save": {""}, "appendonly": {"no"}, "daemonize": {"no"},
		"tcp-keepalive": {"0"}, "repl-diskless-sync-delay": {"0"},
	}
	for _, o := range opts {
		o(&s.base)
	}
	if s.base.clock {
		clockShim(t)
		s.clock = newClock(t, filepath.Join(t.TempDir(), "clock"))
	}
	t.Cleanup(s.Kill)
	return s
}

// first starts the server on a port that it can have.
func (s *RedisServer) first() error {
	var err error
	for range 5 {
		if s.port, err = freePort(); err != nil {
			return err
		}
		for needs, directive := range map[string]string{"cluster-enabled": "cluster-port", "tls-port": "tls-port"} {
			if _, ok := s.base.config[needs]; !ok {
				continue
			}
			port, err := freePort()
			if err != nil {
				return err
			}
			s.base.config[directive] = []string{strconv.Itoa(port)}
		}
		if err = s.start(s.base); err == nil || !portTaken(err) {
			return err
		}
	}
	return err
}

func portTaken(err error) bool { return strings.Contains(err.Error(), "in use") }

// start runs the process and waits until it answers.
func (s *RedisServer) start(o redisOptions) error {
	conf := filepath.Join(s.dir, "redis.conf")
	// A Sentinel writes its own state into the file; it starts from what it wrote.
	if _, err := os.Stat(conf); err != nil || !o.sentinel {
		if err := os.WriteFile(conf, s.render(o), 0o600); err != nil {
			return err
		}
	}
	args := []string{conf}
	if o.sentinel {
		args = append(args, "--sentinel")
	}
	cmd := exec.Command(s.bin, args...)
	cmd.Dir = s.dir
	cmd.Env = os.Environ()
	var offset time.Duration
	if s.clock != nil {
		offset = s.clock.Offset()
		s.clock.Set(offset - o.age)
		cmd.Env = append(cmd.Env, s.clock.env(clockShim(s.t))...)
	}
	p, err := start(s.t, cmd)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()
	if err := s.waitUp(p); err != nil {
		p.Kill()
		return err
	}
	if s.clock != nil {
		s.clock.Set(offset)
		return s.waitAge(o.age)
	}
	return nil
}

// render is the configuration file.
func (s *RedisServer) render(o redisOptions) []byte {
	b := fmt.Appendf(nil, "port %d\ndir %s\n", s.port, strconv.Quote(s.dir))
	for d, values := range o.config {
		if strings.HasPrefix(d, "sentinel ") {
			continue
		}
		b = appendDirective(b, d, values)
	}
	// These name the primary that "sentinel monitor" defines, which must come first.
	for _, d := range []string{"sentinel monitor", "sentinel down-after-milliseconds", "sentinel failover-timeout", "sentinel auth-user", "sentinel auth-pass"} {
		if values, ok := o.config[d]; ok {
			b = appendDirective(b, d, values)
		}
	}
	return b
}

func appendDirective(b []byte, d string, values []string) []byte {
	b = append(b, d...)
	for _, v := range values {
		b = fmt.Appendf(b, " %s", strconv.Quote(v))
	}
	return append(b, '\n')
}

func (s *RedisServer) waitUp(p *Process) error {
	err := eventually(startTimeout, func() error {
		if !p.running() {
			return nil
		}
		info, err := s.Do("INFO", "server")
		// Another server may have the port.
		if str, _ := info.(string); err == nil && InfoField(str, "process_id") != strconv.Itoa(p.PID()) {
			return errors.New("address in use by another server")
		}
		if err == nil {
			_, err = s.Do("PING") // refused while it loads its data, unlike INFO
		}
		if e := ReplyError(""); errors.As(err, &e) && strings.HasPrefix(string(e), "NOPERM") {
			return nil
		}
		return err
	})
	if !p.running() {
		return fmt.Errorf("servertest: redis-server ended while it started:\n%s", p.Log())
	}
	if err != nil {
		return fmt.Errorf("servertest: redis-server does not answer: %w\n%s", err, p.Log())
	}
	return nil
}

// waitAge waits until the server's cached time has followed its clock.
func (s *RedisServer) waitAge(age time.Duration) error {
	return eventually(startTimeout, func() error {
		up, err := s.info("server", "uptime_in_seconds")
		if err != nil || up == "" {
			return err
		}
		if n, _ := strconv.Atoi(up); time.Duration(n)*time.Second < age.Truncate(time.Second) {
			return fmt.Errorf("servertest: uptime is %s s, not %v", up, age)
		}
		return nil
	})
}

// Addr is host:port.
func (s *RedisServer) Addr() string { return loopback(s.port) }

// Port is the TCP port; it stays the same over restarts.
func (s *RedisServer) Port() int { return s.port }

// Dir is where the server keeps its files.
func (s *RedisServer) Dir() string { return s.dir }

// Clock is the clock of a server that was started with [WithClock] or [Aged].
func (s *RedisServer) Clock() *Clock {
	s.t.Helper()
	if s.clock == nil {
		s.t.Fatal("servertest: the server has no clock of its own; start it with WithClock or Aged")
	}
	return s.clock
}

func (s *RedisServer) process() *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc
}

// PID is the id of the process, which a restart changes.
func (s *RedisServer) PID() int { return s.process().PID() }

// Log is the last of what the server wrote since its last start.
func (s *RedisServer) Log() string { return s.process().Log() }

// Kill ends the server by SIGKILL, also a stopped one, and waits for its end.
func (s *RedisServer) Kill() {
	if p := s.process(); p != nil {
		p.Kill()
	}
}

// Stop pauses the server by SIGSTOP and returns when it stands still.
func (s *RedisServer) Stop() { s.t.Helper(); s.process().Stop() }

// Cont lets the server run on after Stop.
func (s *RedisServer) Cont() { s.t.Helper(); s.process().Cont() }

// Shutdown ends the server by its own command, which saves what its configuration says.
func (s *RedisServer) Shutdown() {
	s.t.Helper()
	p := s.process()
	_, err := s.Do("SHUTDOWN")
	if e := ReplyError(""); errors.As(err, &e) {
		s.t.Fatalf("servertest: SHUTDOWN: %v", e)
	}
	select {
	case <-p.done:
	case <-time.After(startTimeout):
		s.t.Fatal("servertest: redis-server did not shut down")
	}
}

// Restart starts the server again on the same port and directory and returns when it answers.
// A server that still runs is killed first. The options add to those of the first start, for
// this start only.
func (s *RedisServer) Restart(opts ...RedisOption) {
	s.t.Helper()
	s.Kill()
	o := s.base
	o.config, o.age = maps.Clone(o.config), 0
	for _, opt := range opts {
		opt(&o)
	}
	if o.clock && s.clock == nil {
		s.t.Fatal("servertest: the server has no clock of its own; start it with WithClock or Aged")
	}
	// The port may be in a closing state for a moment.
	err := eventually(startTimeout, func() error { return s.start(o) })
	if err != nil {
		s.t.Fatal(err)
	}
}

// Do sends one command over a connection of its own, to look at the server. The value is nil,
// a string, an int64 or a []any of those; an error of the server is a [ReplyError]. A server
// that does not answer is given up after 5 s.
func (s *RedisServer) Do(args ...string) (any, error) {
	c, err := dialRESP(s.Addr(), doTimeout)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	if s.base.pass != "" {
		auth := []string{"AUTH", s.base.pass}
		if s.base.user != "" {
			auth = []string{"AUTH", s.base.user, s.base.pass}
		}
		if _, err := c.do(auth...); err != nil {
			return nil, err
		}
	}
	return c.do(args...)
}

// Info is one field of one section of INFO, empty where the server does not have it.
func (s *RedisServer) Info(section, name string) string {
	s.t.Helper()
	v, err := s.info(section, name)
	if err != nil {
		s.t.Fatalf("servertest: INFO %s: %v", section, err)
	}
	return v
}

func (s *RedisServer) info(section, name string) (string, error) {
	v, err := s.Do("INFO", section)
	str, _ := v.(string)
	return InfoField(str, name), err
}

// WaitLinked waits until a replica has an intact link to its primary and all its data.
func (s *RedisServer) WaitLinked() {
	s.t.Helper()
	err := eventually(startTimeout, func() error {
		if v, err := s.info("replication", "master_link_status"); err != nil || v != "up" {
			return fmt.Errorf("servertest: link to the primary is %q: %w", v, err)
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// Snapshot is a copy of a server's data files.
type Snapshot struct{ dir string }

// SaveSnapshot copies the data files, as a backup would. A server without an append-only file
// saves its data first.
func (s *RedisServer) SaveSnapshot() Snapshot {
	s.t.Helper()
	if s.base.config["appendonly"][0] != "yes" && s.process().running() {
		if _, err := s.Do("SAVE"); err != nil {
			s.t.Fatalf("servertest: SAVE: %v", err)
		}
	}
	snap := Snapshot{s.t.TempDir()}
	if err := os.CopyFS(snap.dir, os.DirFS(s.dir)); err != nil {
		s.t.Fatal(err)
	}
	return snap
}

// RestoreSnapshot puts older data files in the place of the present ones. The server must be
// down; Restart loads them.
func (s *RedisServer) RestoreSnapshot(snap Snapshot) {
	s.t.Helper()
	s.Wipe()
	err := fs.WalkDir(os.DirFS(snap.dir), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(filepath.Join(snap.dir, path))
		if err != nil {
			return err
		}
		to := filepath.Join(s.dir, path)
		if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
			return err
		}
		return os.WriteFile(to, b, 0o600)
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// Wipe deletes the data files. The server must be down; after Restart it is empty.
func (s *RedisServer) Wipe() {
	s.t.Helper()
	if s.process().running() {
		s.t.Fatal("servertest: the server still runs")
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(s.dir, e.Name())); err != nil {
			s.t.Fatal(err)
		}
	}
}

// CanPause skips the test on systems where processes cannot be paused.
func CanPause(t testing.TB) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip(ErrNoPause.Error())
	}
}
