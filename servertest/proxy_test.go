package servertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// short is a time in which nothing comes, long one in which all does.
const short, long = 100 * time.Millisecond, 20 * time.Second

// client is a connection through a proxy.
func client(t *testing.T, p *Proxy) *respConn {
	t.Helper()
	c, err := dialRESP(p.Addr(), long)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func (c *respConn) within(d time.Duration, args ...string) (any, error) {
	_ = c.SetDeadline(time.Now().Add(d))
	return c.do(args...)
}

func wantReply(t *testing.T, c *respConn, want any, args ...string) {
	t.Helper()
	if v, err := c.within(long, args...); err != nil || v != want {
		t.Errorf("%v: %v, %v; want %v", args, v, err, want)
	}
}

func wantSilence(t *testing.T, c *respConn, args ...string) {
	t.Helper()
	if v, err := c.within(short, args...); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%v: %v, %v; want silence", args, v, err)
	}
}

func wantEnd(t *testing.T, c *respConn) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(long))
	if b, err := c.r.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connection goes on: %q, %v", b, err)
	}
}

func TestProxyPasses(t *testing.T) {
	s := Redis(t)
	p := NewProxy(t, s.Addr())
	c := client(t, p)
	big := strings.Repeat("x", 1<<20)
	wantReply(t, c, "OK", "SET", "big", big)
	wantReply(t, c, big, "GET", "big")
	if n := p.Counts(); n.Connections != 1 || n.Requests == 0 || n.Replies == 0 || n.Delayed+n.Dropped+n.BlackHoled+n.Held+n.Reset != 0 {
		t.Errorf("counts %+v", n)
	}
	c.Close()
	Eventually(t, long, func() error {
		if v := s.Info("clients", "connected_clients"); v != "1" {
			return fmt.Errorf("%s clients", v)
		}
		return nil
	})
}

func TestProxyDelays(t *testing.T) {
	s := Redis(t)
	p := NewProxy(t, s.Addr())
	c := client(t, p)
	wantReply(t, c, "PONG", "PING")
	for name, f := range map[string]func(time.Duration){"Delay": p.Delay, "DelayRequests": p.DelayRequests, "DelayReplies": p.DelayReplies} {
		before := p.Counts().Delayed
		f(short)
		start := time.Now()
		wantReply(t, c, "PONG", "PING")
		want := short
		if name == "Delay" {
			want = 2 * short
		}
		if d := time.Since(start); d < want {
			t.Errorf("%s: answered after %v, want at least %v", name, d, want)
		}
		if p.Counts().Delayed == before {
			t.Errorf("%s: nothing counted", name)
		}
		p.Heal()
	}
	// A delay is a time on the way, not a time between chunks.
	p.DelayReplies(2 * short)
	start := time.Now()
	for range 20 {
		if _, err := c.Write([]byte("PING\r\n")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Millisecond)
	}
	_ = c.SetDeadline(time.Now().Add(long))
	for range 20 {
		if v, err := c.read(); v != "PONG" {
			t.Fatal(v, err)
		}
	}
	if d := time.Since(start); d > 20*short {
		t.Errorf("20 chunks took %v, with a delay of %v", d, 2*short)
	}
	// Heal delivers at once what still waits.
	p.DelayRequests(time.Hour)
	wantSilence(t, c, "SET", "late", "1")
	p.Heal()
	_ = c.SetDeadline(time.Now().Add(long))
	if v, err := c.read(); v != "OK" {
		t.Error(v, err)
	}
}

func TestProxyDropsReplies(t *testing.T) {
	s := Redis(t)
	p := NewProxy(t, s.Addr())
	c, idle := client(t, p), client(t, p)
	wantReply(t, c, "PONG", "PING")
	wantReply(t, idle, "PONG", "PING")
	p.DropReplies()
	wantSilence(t, c, "SET", "a", "1")
	if v := mustDo(t, s, "GET", "a"); v != "1" {
		t.Errorf("the request did not arrive: %v", v)
	}
	if p.Counts().Dropped == 0 {
		t.Error("nothing counted")
	}
	p.Heal()
	wantEnd(t, c) // it could never tell which reply is whose
	wantReply(t, idle, "PONG", "PING")
}

func TestProxyHoldsRequests(t *testing.T) {
	s := Redis(t)
	p := NewProxy(t, s.Addr())
	c, other := client(t, p), client(t, p)
	h := p.Hold(func(b []byte) bool { return bytes.Contains(b, []byte("secret")) })
	ctx, cancel := context.WithTimeout(t.Context(), short)
	defer cancel()
	wantReply(t, c, "PONG", "PING")
	if err := h.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) || h.Count() != 0 {
		t.Errorf("holds what does not match: %v, %d", err, h.Count())
	}
	wantSilence(t, c, "SET", "a", "secret")
	if err := h.Wait(t.Context()); err != nil || h.Count() != 1 || p.Counts().Held != 1 {
		t.Errorf("Wait: %v, count %d", err, h.Count())
	}
	wantReply(t, other, "OK", "SET", "a", "other")
	c.Close() // what it sent arrives nevertheless
	time.Sleep(short)
	if v := mustDo(t, s, "GET", "a"); v != "other" {
		t.Errorf("before the release: %v", v)
	}
	h.Release()
	h.Release()
	Eventually(t, long, func() error {
		if v := mustDo(t, s, "GET", "a"); v != "secret" {
			return fmt.Errorf("after the release: %v", v)
		}
		return nil
	})
	wantReply(t, other, "OK", "SET", "a", "another secret")
	if h.Count() != 1 {
		t.Errorf("count %d after the release", h.Count())
	}
	again := p.Hold(func(b []byte) bool { return bytes.Contains(b, []byte("secret")) })
	wantSilence(t, other, "SET", "a", "third secret")
	p.Heal()
	_ = other.SetDeadline(time.Now().Add(long))
	if v, err := other.read(); v != "OK" || again.Count() != 1 {
		t.Error(v, err)
	}
}

func TestProxyBlackHole(t *testing.T) {
	s := Redis(t)
	p := NewProxy(t, s.Addr())
	c := client(t, p)
	wantReply(t, c, "PONG", "PING")
	p.BlackHole()
	wantSilence(t, c, "SET", "a", "1")
	late := client(t, p) // is accepted
	wantSilence(t, late, "SET", "b", "1")
	late.Close()
	if v := mustDo(t, s, "EXISTS", "a", "b"); v != int64(0) {
		t.Errorf("%v requests came through", v)
	}
	if n := p.Counts().BlackHoled; n != 2 {
		t.Errorf("%d counted, want 2", n)
	}
	p.Heal()
	_ = c.SetDeadline(time.Now().Add(long))
	if v, err := c.read(); v != "OK" {
		t.Error(v, err)
	}
	Eventually(t, long, func() error {
		if v := mustDo(t, s, "EXISTS", "a", "b"); v != int64(2) {
			return fmt.Errorf("%v of 2 late requests arrived", v)
		}
		return nil
	})
	// Replies are kept as well.
	sub := client(t, p)
	if _, err := sub.within(long, "SUBSCRIBE", "ch"); err != nil {
		t.Fatal(err)
	}
	p.BlackHole()
	mustDo(t, s, "PUBLISH", "ch", "x")
	_ = sub.SetDeadline(time.Now().Add(short))
	if v, err := sub.read(); err == nil {
		t.Errorf("%v came through", v)
	}
}

func TestProxyResetsAndRefuses(t *testing.T) {
	s := Redis(t)
	p := NewProxy(t, s.Addr())
	c, d := client(t, p), client(t, p)
	wantReply(t, c, "PONG", "PING")
	wantReply(t, d, "PONG", "PING")
	if n := p.Reset(); n != 2 || p.Counts().Reset != 2 {
		t.Errorf("%d reset, counts %+v", n, p.Counts())
	}
	_ = c.SetDeadline(time.Now().Add(long))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) && runtime.GOOS == "linux" {
		t.Errorf("read: %v, want a reset", err)
	}
	wantEnd(t, d)

	c = client(t, p)
	wantReply(t, c, "PONG", "PING")
	p.Refuse()
	p.Refuse()
	if conn, err := net.DialTimeout("tcp", p.Addr(), long); err == nil {
		conn.Close()
		t.Error("a connection was accepted")
	}
	wantReply(t, c, "PONG", "PING")
	p.Heal()
	p.Heal()
	wantReply(t, client(t, p), "PONG", "PING")
}

func TestProxyServerGone(t *testing.T) {
	s := Redis(t)
	p := NewProxy(t, s.Addr())
	c := client(t, p)
	wantReply(t, c, "PONG", "PING")
	s.Kill()
	wantEnd(t, c)
	d := client(t, p)
	if _, err := d.within(long, "PING"); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("without a server: %v", err)
	}
}

func TestProxyKeepsClients(t *testing.T) {
	s := Redis(t, AppendOnly("always"))
	p := NewProxy(t, s.Addr(), KeepClients())
	c := client(t, p)
	wantReply(t, c, "OK", "SET", "a", "1")
	for i := range 3 {
		s.Restart()
		wantReply(t, c, "1", "GET", "a")
		if n := p.Counts().Redialed; n != int64(i+1) {
			t.Errorf("%d redialed, want %d", n, i+1)
		}
	}
	// What is sent while the server is away arrives when it is back.
	s.Kill()
	time.Sleep(200 * time.Millisecond) // the proxy hears of it; a request before that may be lost with the server
	wantSilence(t, c, "SET", "a", "2")
	s.Restart()
	_ = c.SetDeadline(time.Now().Add(long))
	if v, err := c.read(); v != "OK" && !strings.HasPrefix(fmt.Sprint(v), "LOADING") { // either way it has arrived
		t.Error(v, err)
	}
	if p.Counts().Connections != 1 {
		t.Errorf("counts %+v", p.Counts())
	}
	// A request whose reply is lost with the server ends the connection.
	CanPause(t)
	s.Stop()
	wantSilence(t, c, "GET", "a")
	s.Kill()
	wantEnd(t, c)
}

func TestProxyLeavesNothing(t *testing.T) {
	CanPause(t)
	s := Redis(t)
	before := runtime.NumGoroutine()
	for _, fault := range []func(p *Proxy){
		func(p *Proxy) {},
		func(p *Proxy) { p.Delay(time.Hour) },
		func(p *Proxy) { p.DropReplies() },
		func(p *Proxy) { p.BlackHole() },
		func(p *Proxy) { p.Hold(func([]byte) bool { return true }) },
		func(p *Proxy) { p.Refuse() },
		func(p *Proxy) { s.Stop() },
	} {
		p := NewProxy(t, s.Addr())
		var conns []*respConn
		for range 5 {
			c := client(t, p)
			wantReply(t, c, "PONG", "PING")
			conns = append(conns, c)
		}
		fault(p)
		for i, c := range conns {
			_, _ = c.within(short/10, "PING")
			if i%2 == 0 {
				c.Close()
			}
		}
		p.Close()
		p.Close()
		for _, c := range conns {
			c.Close()
		}
	}
	Eventually(t, long, func() error {
		if now := runtime.NumGoroutine(); now > before {
			buf := make([]byte, 1<<20)
			return fmt.Errorf("%d goroutines, before %d\n%s", now, before, buf[:runtime.Stack(buf, true)])
		}
		return nil
	})
}
