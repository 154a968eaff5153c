package servertest

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// EtcdModule is the directory of the module from which etcd is built, relative to that of the
// test. The module lists etcd's server and etcdutl as its tools.
type EtcdModule string

// etcdTools are the paths of the built programs, by module and tool.
var etcdTools sync.Map

// tool returns the path of a program of the module. It is built where the Go build cache does
// not have it, which takes minutes on a small machine.
func (m EtcdModule) tool(t testing.TB, name string) string {
	t.Helper()
	dir, err := filepath.Abs(string(m))
	if err != nil {
		t.Fatal(err)
	}
	build, _ := etcdTools.LoadOrStore(dir+"\n"+name, sync.OnceValues(func() (string, error) {
		cmd := exec.Command("go", "tool", "-n", name)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return "", fmt.Errorf("%w: %s", err, bytes.TrimSpace(stderr.Bytes()))
		}
		return string(bytes.TrimSpace(out)), nil
	}))
	path, err := build.(func() (string, error))()
	if err != nil {
		missing(t, "etcd", "etcd cannot be built: "+err.Error())
	}
	return path
}

// EtcdServer is an etcd process of the test, alone or one of a cluster. Its methods are safe for
// concurrent use, but what ends and starts the process does not overlap.
type EtcdServer struct {
	t       testing.TB
	bin     string
	module  EtcdModule
	name    string
	dir     string // data
	client  int    // ports
	peer    int
	cluster string // --initial-cluster
	peers   *Proxy // before the peer port; nil where it is alone
	others  []*EtcdServer
	base    etcdOptions

	mu    sync.Mutex
	proc  *Process
	id    uint64 // of the member
	holds []*Held
}

type etcdOptions struct {
	flags map[string]string
	certs *Certs
}

// EtcdOption changes how an etcd server is started.
type EtcdOption func(*etcdOptions)

// EtcdFlag sets a flag of the server, such as EtcdFlag("election-timeout", "1000"). The last one
// counts.
func EtcdFlag(name, value string) EtcdOption {
	return func(o *etcdOptions) { o.flags[name] = value }
}

// EtcdTLS makes the server speak TLS to clients, with the server's certificate of c.
func EtcdTLS(c *Certs) EtcdOption { return func(o *etcdOptions) { o.certs = c } }

// EtcdSync makes the server sync what it answers to its disk, as it does when nobody tells it
// otherwise. Without it an answer outlives the death of the server, not that of the machine.
func EtcdSync() EtcdOption { return EtcdFlag("unsafe-no-fsync", "false") }

// Etcd starts an etcd server on free ports of 127.0.0.1 and returns when it is ready. It ends
// with the test. Its election timeout is short, so that it starts at once.
func Etcd(t testing.TB, module EtcdModule, opts ...EtcdOption) *EtcdServer {
	t.Helper()
	fast := []EtcdOption{EtcdFlag("heartbeat-interval", "10"), EtcdFlag("election-timeout", "100")}
	return startEtcd(t, module, 1, append(fast, opts...))[0]
}

// EtcdCluster starts a cluster of that many members, which reach each other through proxies, and
// returns when all are ready. Their election timeout is a second, as it is by default.
func EtcdCluster(t testing.TB, module EtcdModule, members int, opts ...EtcdOption) []*EtcdServer {
	t.Helper()
	return startEtcd(t, module, members, opts)
}

func startEtcd(t testing.TB, module EtcdModule, members int, opts []EtcdOption) []*EtcdServer {
	t.Helper()
	bin := module.tool(t, "go.etcd.io/etcd/server/v3")
	var err error
	for range 5 {
		var servers []*EtcdServer
		if servers, err = prepareEtcd(t, module, bin, members, opts); err != nil {
			break
		}
		errs := make([]error, members)
		var wg sync.WaitGroup
		for i, s := range servers {
			wg.Go(func() { errs[i] = s.start() })
		}
		wg.Wait()
		if err = errors.Join(errs...); err == nil {
			return servers
		}
		for _, s := range servers {
			s.Kill()
		}
		if !portTaken(err) {
			break
		}
	}
	t.Fatal(err)
	return nil
}

// prepareEtcd makes everything but the processes.
func prepareEtcd(t testing.TB, module EtcdModule, bin string, members int, opts []EtcdOption) ([]*EtcdServer, error) {
	t.Helper()
	servers := make([]*EtcdServer, members)
	var cluster []string
	for i := range servers {
		s := &EtcdServer{t: t, module: module, bin: bin, name: "m" + strconv.Itoa(i), dir: filepath.Join(t.TempDir(), "data")}
		s.base.flags = map[string]string{"unsafe-no-fsync": "true", "log-level": "info"}
		for _, o := range opts {
			o(&s.base)
		}
		var err error
		for _, port := range []*int{&s.client, &s.peer} {
			if *port, err = freePort(); err != nil {
				return nil, err
			}
		}
		if members > 1 {
			s.peers = NewProxy(t, loopback(s.peer))
		}
		servers[i] = s
		cluster = append(cluster, s.name+"="+s.peerURL())
		t.Cleanup(s.Kill)
	}
	for i, s := range servers {
		s.cluster = strings.Join(cluster, ",")
		for j, o := range servers {
			if i != j {
				s.others = append(s.others, o)
			}
		}
	}
	return servers, nil
}

// peerURL is where the other members find this one.
func (s *EtcdServer) peerURL() string {
	if s.peers != nil {
		return "http://" + s.peers.Addr()
	}
	return "http://" + loopback(s.peer)
}

// Addr is host:port for clients; it stays the same over restarts.
func (s *EtcdServer) Addr() string { return loopback(s.client) }

// URL is where clients find the server.
func (s *EtcdServer) URL() string {
	if s.base.certs != nil {
		return "https://" + s.Addr()
	}
	return "http://" + s.Addr()
}

func (s *EtcdServer) start() error {
	flags := map[string]string{
		"name": s.name, "data-dir": s.dir,
		"listen-client-urls": s.URL(), "advertise-client-urls": s.URL(),
		"listen-peer-urls": "http://" + loopback(s.peer), "initial-advertise-peer-urls": s.peerURL(),
		"initial-cluster": s.cluster,
	}
	if c := s.base.certs; c != nil {
		flags["cert-file"], flags["key-file"] = c.Server()
	}
	for name, value := range s.base.flags {
		flags[name] = value
	}
	var args []string
	for name, value := range flags {
		args = append(args, "--"+name+"="+value)
	}
	cmd := exec.Command(s.bin, args...)
	cmd.Env = os.Environ()
	p, err := start(s.t, cmd)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()
	err = eventually(startTimeout, func() error {
		if !p.running() {
			return nil
		}
		return s.ready()
	})
	if !p.running() {
		return fmt.Errorf("servertest: etcd ended while it started:\n%s", p.Log())
	}
	if err != nil {
		p.Kill()
		return fmt.Errorf("servertest: etcd does not answer: %w\n%s", err, p.Log())
	}
	return nil
}

// ready answers nil when the server serves, with a leader, and is the one of this test.
func (s *EtcdServer) ready() error {
	status, err := s.status()
	if err != nil {
		return err
	}
	if status.leader == 0 {
		return errors.New("no leader")
	}
	// Another server may have the port, until ours finds that out.
	if !strings.Contains(s.Log(), "serving client traffic") {
		return errors.New("not serving yet")
	}
	s.mu.Lock()
	s.id = status.member
	s.mu.Unlock()
	return nil
}

type etcdStatus struct{ member, leader uint64 }

// status asks the server itself, through its JSON gateway.
func (s *EtcdServer) status() (etcdStatus, error) {
	var answer struct {
		Header struct {
			MemberID string `json:"member_id"`
		} `json:"header"`
		Leader string `json:"leader"`
	}
	if err := s.post("/v3/maintenance/status", &answer); err != nil {
		return etcdStatus{}, err
	}
	member, err := strconv.ParseUint(answer.Header.MemberID, 10, 64)
	if err != nil {
		return etcdStatus{}, fmt.Errorf("servertest: etcd tells no member id: %w", err)
	}
	leader, _ := strconv.ParseUint(answer.Leader, 10, 64) // missing: none
	return etcdStatus{member, leader}, nil
}

func (s *EtcdServer) post(path string, answer any) error {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: (&net.Dialer{Timeout: doTimeout}).DialContext}
	if c := s.base.certs; c != nil {
		transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // to look at our own child
	}
	client := &http.Client{Transport: transport, Timeout: doTimeout}
	resp, err := client.Post(s.URL()+path, "application/json", strings.NewReader("{}"))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("servertest: etcd answers %s: %s", resp.Status, body)
	}
	return json.Unmarshal(body, answer)
}

func (s *EtcdServer) process() *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc
}

// PID is the id of the process, which a restart changes.
func (s *EtcdServer) PID() int { return s.process().PID() }

// Log is the last of what the server wrote since its last start.
func (s *EtcdServer) Log() string { return s.process().Log() }

// Kill ends the server by SIGKILL, also a stopped one, and waits for its end.
func (s *EtcdServer) Kill() {
	if p := s.process(); p != nil {
		p.Kill()
	}
}

// Stop pauses the server by SIGSTOP and returns when it stands still.
func (s *EtcdServer) Stop() { s.t.Helper(); s.process().Stop() }

// Cont lets the server run on after Stop.
func (s *EtcdServer) Cont() { s.t.Helper(); s.process().Cont() }

// Restart starts the server again on the same ports and data and returns when it is ready. A
// server that still runs is killed first.
func (s *EtcdServer) Restart() {
	s.t.Helper()
	s.Kill()
	// The ports may be in a closing state for a moment.
	if err := eventually(startTimeout, s.start); err != nil {
		s.t.Fatal(err)
	}
}

// Restore replaces the data by those of a snapshot file, as etcdutl does. The server must be down
// and alone; Restart loads them. The flags are etcdutl's, such as --bump-revision=1000.
func (s *EtcdServer) Restore(snapshot string, flags ...string) {
	s.t.Helper()
	if s.process().running() {
		s.t.Fatal("servertest: the server still runs")
	}
	if err := os.RemoveAll(s.dir); err != nil {
		s.t.Fatal(err)
	}
	args := append([]string{"snapshot", "restore", snapshot, "--data-dir=" + s.dir, "--name=" + s.name,
		"--initial-cluster=" + s.cluster, "--initial-advertise-peer-urls=" + s.peerURL()}, flags...)
	cmd := exec.Command(s.module.tool(s.t, "go.etcd.io/etcd/etcdutl/v3"), args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		s.t.Fatalf("servertest: etcdutl: %v\n%s", err, out)
	}
}

// Isolate cuts a member of a cluster off from the others, in both directions, until Rejoin. Its
// clients reach it as before. The others see each other.
func (s *EtcdServer) Isolate() {
	s.t.Helper()
	if len(s.others) == 0 || len(s.holds) > 0 {
		s.t.Fatal("servertest: no member of a cluster, or isolated already")
	}
	// Each connection that one member opens to another begins with its name.
	from := Containing(fmt.Sprintf("X-Server-From: %x", s.id))
	s.peers.BlackHole()
	for _, o := range s.others {
		s.holds = append(s.holds, o.peers.Hold(from))
		o.peers.Reset() // what was open carries messages of all
	}
}

// Rejoin ends Isolate.
func (s *EtcdServer) Rejoin() {
	s.t.Helper()
	for _, h := range s.holds {
		h.Release()
	}
	s.holds = nil
	s.peers.Reset()
	s.peers.Heal()
	for _, o := range s.others {
		o.peers.Reset()
	}
}

// Held is how many messages Isolate has kept back.
func (s *EtcdServer) Held() (n int) {
	for _, h := range s.holds {
		n += h.Count()
	}
	return n + int(s.peers.Counts().BlackHoled)
}

// EtcdLeader waits until the members that are up, but those to be left out, agree on one of them
// as their leader, and answers it and the others.
func EtcdLeader(t testing.TB, servers []*EtcdServer, without ...*EtcdServer) (leader *EtcdServer, followers []*EtcdServer) {
	t.Helper()
	Eventually(t, startTimeout, func() error {
		leader, followers = nil, nil
		var agreed uint64
		for _, s := range servers {
			if !s.process().running() || slices.Contains(without, s) {
				continue
			}
			status, err := s.status()
			if err != nil {
				return err
			}
			if status.leader == 0 || agreed != 0 && status.leader != agreed {
				return errors.New("servertest: the members do not agree on a leader")
			}
			agreed = status.leader
			if status.member == status.leader {
				leader = s
			} else {
				followers = append(followers, s)
			}
		}
		if leader == nil {
			return errors.New("servertest: no leader")
		}
		return nil
	})
	return leader, followers
}
