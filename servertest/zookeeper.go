package servertest

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// zooKeeperJar is where the Debian package zookeeper puts the server. Its manifest names the
// rest of the class path.
const zooKeeperJar = "/usr/share/java/zookeeper.jar"

// ZooKeeperServer is a ZooKeeper process of the test: a single server, or a member of a
// [ZooKeeperEnsemble]. Its methods are safe for concurrent use, but Kill and Restart do not
// overlap.
type ZooKeeperServer struct {
	t      testing.TB
	java   string
	dir    string
	port   int
	config map[string]string

	mu   sync.Mutex
	proc *Process
}

// ZooKeeperOption changes how a server is started.
type ZooKeeperOption func(map[string]string)

// ZooKeeperConfig sets a line of zoo.cfg, such as ZooKeeperConfig("tickTime", "500"), the
// milliseconds of a tick. Timeouts of sessions are between 2 and 20 ticks. The last one counts.
func ZooKeeperConfig(name, value string) ZooKeeperOption {
	return func(c map[string]string) { c[name] = value }
}

// ZooKeeperDurable makes each transaction reach the disk before it is answered, as the server
// does when nobody tells it otherwise. Without it a transaction outlives the death of the server,
// not that of the machine.
func ZooKeeperDurable() ZooKeeperOption { return ZooKeeperConfig("forceSync", "yes") }

// ZooKeeperTLS gives the server a port with TLS beside the plain one; see
// [ZooKeeperServer.SecureAddr]. It asks clients for no certificate.
func ZooKeeperTLS(t testing.TB, c *Certs) ZooKeeperOption {
	t.Helper()
	var both []byte
	cert, key := c.Server()
	for _, name := range []string{key, cert} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		both = append(both, b...)
	}
	file := filepath.Join(t.TempDir(), "zookeeper.pem")
	if err := os.WriteFile(file, both, 0o600); err != nil {
		t.Fatal(err)
	}
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	return func(c map[string]string) {
		maps.Copy(c, map[string]string{
			securePort: strconv.Itoa(port), "secureClientPortAddress": "127.0.0.1",
			"serverCnxnFactory":     "org.apache.zookeeper.server.NettyServerCnxnFactory",
			"ssl.keyStore.location": file, "ssl.keyStore.type": "PEM", "ssl.clientAuth": "none",
		})
	}
}

const securePort = "secureClientPort"

// SecureAddr is where a server with [ZooKeeperTLS] speaks TLS.
func (s *ZooKeeperServer) SecureAddr() string { return "127.0.0.1:" + s.config[securePort] }

// linked is not of zoo.cfg.
const linked = "linked"

// ZooKeeperLinks puts a proxy between each member of an ensemble and the quorum port of each other;
// see [ZooKeeperEnsemble.Link]. A proxy accepts connections also before the member behind it leads,
// so that an election may need a second round, after initLimit ticks.
func ZooKeeperLinks() ZooKeeperOption { return ZooKeeperConfig(linked, "yes") }

// ZooKeeper starts a single server on a free port of 127.0.0.1, with ticks of 200 ms unless the
// options say otherwise, and returns when it serves. It ends with the test.
func ZooKeeper(t testing.TB, opts ...ZooKeeperOption) *ZooKeeperServer {
	t.Helper()
	var err error
	for range 5 {
		s := newZooKeeper(t, opts)
		if s.port, err = freePort(); err != nil {
			break
		}
		if err = s.start(); err == nil {
			err = s.serving()
		}
		if err == nil {
			return s
		}
		s.Kill()
		if !portTaken(err) {
			break
		}
	}
	t.Fatal(err)
	return nil
}

// newZooKeeper makes everything but the port and the process.
func newZooKeeper(t testing.TB, opts []ZooKeeperOption) *ZooKeeperServer {
	t.Helper()
	if _, err := os.Stat(zooKeeperJar); err != nil {
		missing(t, "zookeeper", "ZooKeeper is not installed (Debian package zookeeper)")
	}
	s := &ZooKeeperServer{t: t, java: Need(t, "java"), dir: t.TempDir(), config: map[string]string{
		"tickTime": "200", "initLimit": "15", "syncLimit": "10", "maxClientCnxns": "0",
		"admin.enableServer": "false", "4lw.commands.whitelist": "*", "forceSync": "no",
		"clientPortAddress": "127.0.0.1", "autopurge.purgeInterval": "0",
		"extendedTypesEnabled": "true", "znode.container.checkIntervalMs": "60000",
	}}
	for _, o := range opts {
		o(s.config)
	}
	s.config["dataDir"] = s.dir
	t.Cleanup(s.Kill)
	return s
}

// start runs the process.
func (s *ZooKeeperServer) start() error {
	var text strings.Builder
	s.config["clientPort"] = strconv.Itoa(s.port)
	for _, name := range slices.Sorted(maps.Keys(s.config)) {
		if name != linked {
			fmt.Fprintf(&text, "%s=%s\n", name, s.config[name])
		}
	}
	file := filepath.Join(s.dir, "zoo.cfg")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		return err
	}
	class := zooKeeperJar
	for _, name := range []string{"slf4j-simple", "netty-codec", "netty-resolver"} { // Netty's, for TLS, are not named by the manifest
		if jar := filepath.Join(filepath.Dir(zooKeeperJar), name+".jar"); exists(jar) {
			class += string(os.PathListSeparator) + jar
		}
	}
	cmd := exec.Command(s.java, "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
		"-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dzookeeper.jmx.log4j.disable=true",
		"-cp", class, "org.apache.zookeeper.server.quorum.QuorumPeerMain", file)
	cmd.Dir = s.dir
	p, err := start(s.t, cmd)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// serving waits until the server serves clients, alone or as a member of an ensemble.
func (s *ZooKeeperServer) serving() error {
	return eventually(2*startTimeout, func() error {
		if p := s.process(); p == nil || !p.running() {
			return fmt.Errorf("servertest: ZooKeeper has ended: %s", s.Log())
		}
		if mode, err := s.mode(); err != nil {
			return err
		} else if mode == "" {
			return errors.New("servertest: ZooKeeper does not serve yet")
		}
		return nil
	})
}

func (s *ZooKeeperServer) process() *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc
}

// Addr is host:port for clients; it stays the same over Restart.
func (s *ZooKeeperServer) Addr() string { return loopback(s.port) }

// Log is the last of what the process wrote.
func (s *ZooKeeperServer) Log() string {
	if p := s.process(); p != nil {
		return p.Log()
	}
	return ""
}

// Kill ends the process at once and waits for its end. Its data stays.
func (s *ZooKeeperServer) Kill() {
	if p := s.process(); p != nil {
		p.Kill()
	}
}

// Restart starts the process again on the same port and data, and returns when it serves.
func (s *ZooKeeperServer) Restart() {
	s.t.Helper()
	s.Kill()
	if err := errors.Join(s.start(), s.serving()); err != nil {
		s.t.Fatal(err)
	}
}

// Stop pauses the process by SIGSTOP.
func (s *ZooKeeperServer) Stop() { s.t.Helper(); s.process().Stop() }

// Cont lets it run on.
func (s *ZooKeeperServer) Cont() { s.t.Helper(); s.process().Cont() }

// Ask sends one of the server's four-letter words, such as "srvr" or "cons", and returns what it
// answers.
func (s *ZooKeeperServer) Ask(word string) (string, error) {
	c, err := net.DialTimeout("tcp", s.Addr(), time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(2 * time.Second))
	if _, err := io.WriteString(c, word); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// mode is standalone, leader or follower, and empty while the server does not serve.
func (s *ZooKeeperServer) mode() (string, error) {
	text, err := s.Ask("srvr")
	if err != nil {
		return "", err
	}
	return InfoField(text, "Mode"), nil
}

// ZooKeeperEnsemble is several ZooKeeper servers that elect a leader.
type ZooKeeperEnsemble struct {
	Servers []*ZooKeeperServer

	t     testing.TB
	links [][]*Proxy // from a member to a peer, with ZooKeeperLinks
}

// NewZooKeeperEnsemble starts an ensemble of n members and returns when all of them serve.
func NewZooKeeperEnsemble(t testing.TB, n int, opts ...ZooKeeperOption) *ZooKeeperEnsemble {
	t.Helper()
	e := &ZooKeeperEnsemble{t: t}
	var err error
	for range 3 {
		if err = e.try(n, opts); err == nil {
			return e
		}
		for _, s := range e.Servers {
			s.Kill()
		}
		if !portTaken(err) {
			break
		}
	}
	t.Fatal(err)
	return nil
}

func (e *ZooKeeperEnsemble) try(n int, opts []ZooKeeperOption) error {
	e.t.Helper()
	e.Servers, e.links = nil, nil
	quorum, election := make([]int, n), make([]int, n)
	for i := range n {
		s := newZooKeeper(e.t, opts)
		var err error
		for _, port := range []*int{&s.port, &quorum[i], &election[i]} {
			if *port, err = freePort(); err != nil {
				return err
			}
		}
		e.Servers = append(e.Servers, s)
	}
	for i, s := range e.Servers {
		e.links = append(e.links, make([]*Proxy, n))
		for j := range n {
			addr := loopback(quorum[j])
			if i != j && s.config[linked] != "" {
				e.links[i][j] = NewProxy(e.t, addr)
				addr = e.links[i][j].Addr()
			}
			s.config["server."+strconv.Itoa(j+1)] = addr + ":" + strconv.Itoa(election[j])
		}
		if err := os.WriteFile(filepath.Join(s.dir, "myid"), []byte(strconv.Itoa(i+1)), 0o600); err != nil {
			return err
		}
		if err := s.start(); err != nil {
			return err
		}
	}
	for _, s := range e.Servers {
		if err := s.serving(); err != nil {
			return err
		}
	}
	return nil
}

// Addrs are the addresses of all members for clients.
func (e *ZooKeeperEnsemble) Addrs() []string {
	var addrs []string
	for _, s := range e.Servers {
		addrs = append(addrs, s.Addr())
	}
	return addrs
}

// Leader waits until a member leads and answers it.
func (e *ZooKeeperEnsemble) Leader() *ZooKeeperServer {
	e.t.Helper()
	var leader *ZooKeeperServer
	Eventually(e.t, 2*startTimeout, func() error {
		for _, s := range e.Servers {
			if mode, err := s.mode(); err == nil && mode == "leader" {
				leader = s
				return nil
			}
		}
		return errors.New("servertest: no member of the ensemble leads")
	})
	return leader
}

// Followers are the members that follow now.
func (e *ZooKeeperEnsemble) Followers() []*ZooKeeperServer {
	var list []*ZooKeeperServer
	for _, s := range e.Servers {
		if mode, err := s.mode(); err == nil && mode == "follower" {
			list = append(list, s)
		}
	}
	return list
}

// Link is the way that the member from takes to follow the member to, while that leads, in an ensemble
// with [ZooKeeperLinks]. It does not carry elections.
func (e *ZooKeeperEnsemble) Link(from, to *ZooKeeperServer) *Proxy {
	return e.links[slices.Index(e.Servers, from)][slices.Index(e.Servers, to)]
}
