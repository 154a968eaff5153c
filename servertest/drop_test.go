package servertest

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// lineServer greets, reads lines, and answers each one with "did " and the line after it has
// counted it.
type lineServer struct {
	net.Listener
	done sync.Map // line to *atomic.Int64
	wg   sync.WaitGroup
}

func newLineServer(t *testing.T) *lineServer {
	t.Helper()
	l, err := listenFree()
	if err != nil {
		t.Fatal(err)
	}
	s := &lineServer{Listener: l}
	s.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s.wg.Go(func() { s.serve(c) })
		}
	})
	t.Cleanup(func() { l.Close(); s.wg.Wait() })
	return s
}

func (s *lineServer) serve(c net.Conn) {
	defer c.Close()
	fmt.Fprintln(c, "hello")
	for r := bufio.NewScanner(c); r.Scan(); {
		n, _ := s.done.LoadOrStore(r.Text(), new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
		fmt.Fprintln(c, "did", r.Text())
	}
}

// times is how often the server did it.
func (s *lineServer) times(line string) int64 {
	n, ok := s.done.Load(line)
	if !ok {
		return 0
	}
	return n.(*atomic.Int64).Load()
}

type lineClient struct {
	net.Conn
	r *bufio.Reader
}

func dialLines(t *testing.T, p *Proxy) *lineClient {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(long))
	l := &lineClient{c, bufio.NewReader(c)}
	if s, err := l.r.ReadString('\n'); s != "hello\n" {
		t.Fatalf("greeting %q, %v", s, err)
	}
	return l
}

// ask answers what the server says; empty where the connection is cut.
func (c *lineClient) ask(t *testing.T, line string) string {
	t.Helper()
	fmt.Fprintln(c, line)
	s, err := c.r.ReadString('\n')
	if errors.Is(err, os.ErrDeadlineExceeded) || err != nil && s != "" {
		t.Fatalf("%s: %q, %v", line, s, err)
	}
	return strings.TrimSpace(s)
}

func TestDropReplyTo(t *testing.T) {
	s := newLineServer(t)
	p := NewProxy(t, s.Addr().String())
	d := p.DropReplyTo(Containing("commit"))
	const each, workers = 20, 4
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range each {
				c := dialLines(t, p)
				if got := c.ask(t, "update"); got != "did update" {
					t.Errorf("update: %q", got)
				}
				if got := c.ask(t, "COMMIT"); got != "" {
					t.Errorf("commit: %q, want a cut", got)
				}
			}
		})
	}
	wg.Wait()
	// The connection was cut after the server had acted: no need to wait for it.
	if n := s.times("COMMIT"); n != each*workers || d.Count() != each*workers {
		t.Errorf("%d commits, %d cut, want %d", n, d.Count(), each*workers)
	}
	if n := p.Counts(); n.CutReplies != each*workers || n.CutRequests != 0 {
		t.Errorf("%+v", n)
	}
	d.Stop()
	if got := dialLines(t, p).ask(t, "commit"); got != "did commit" || d.Count() != each*workers {
		t.Errorf("after the fault: %q, %d cut", got, d.Count())
	}
}

// TestDropReplyToWaits: the client hears nothing before the server has answered.
func TestDropReplyToWaits(t *testing.T) {
	s := newLineServer(t)
	p := NewProxy(t, s.Addr().String())
	c := dialLines(t, p)
	d := p.DropReplyTo(Containing("commit"))
	h := p.Hold(Containing("commit"))
	fmt.Fprintln(c, "commit")
	if err := h.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(short))
	if b, err := c.r.ReadByte(); !errors.Is(err, os.ErrDeadlineExceeded) || d.Count() != 0 {
		t.Errorf("before the server was asked: %q, %v, %d cut", b, err, d.Count())
	}
	h.Release()
	_ = c.SetDeadline(time.Now().Add(long))
	if b, err := c.r.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) || d.Count() != 1 || s.times("commit") != 1 {
		t.Errorf("%q, %v, %d cut, %d done", b, err, d.Count(), s.times("commit"))
	}
}

func TestDropRequest(t *testing.T) {
	s := newLineServer(t)
	p := NewProxy(t, s.Addr().String())
	d := p.DropRequest(Only(3, Containing("commit")))
	for i := range 5 {
		c := dialLines(t, p)
		if got := c.ask(t, "update"); got != "did update" {
			t.Errorf("update: %q", got)
		}
		want := ""
		if i >= 3 {
			want = "did commit"
		}
		if got := c.ask(t, "commit"); got != want {
			t.Errorf("commit %d: %q, want %q", i, got, want)
		}
	}
	if n := s.times("commit"); n != 2 || d.Count() != 3 || p.Counts().CutRequests != 3 || p.Counts().CutReplies != 0 {
		t.Errorf("%d commits reached the server, %d cut, %+v", n, d.Count(), p.Counts())
	}
	p.DropRequest(Containing("update"))
	p.Heal()
	if got := dialLines(t, p).ask(t, "update"); got != "did update" {
		t.Errorf("after Heal: %q", got)
	}
}

// A message that is swallowed does not arrive, and the connection goes on.
func TestSwallow(t *testing.T) {
	p := NewProxy(t, newLineServer(t).Addr().String())
	s := p.Swallow(Only(1, Containing("did b")))
	c := dialLines(t, p)
	if got := c.ask(t, "a"); got != "did a" {
		t.Fatalf("%q", got)
	}
	fmt.Fprintln(c, "b")
	Eventually(t, startTimeout, func() error {
		if s.Count() != 1 {
			return fmt.Errorf("%d swallowed", s.Count())
		}
		return nil
	})
	for range 2 {
		if got := c.ask(t, "b"); got != "did b" {
			t.Fatalf("%q", got)
		}
		s.Stop()
	}
	if s.Count() != 1 {
		t.Errorf("%d swallowed", s.Count())
	}
}
