package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/servertest"
)

// poorProxy stands before a server and knows few commands, as many proxies do: it refuses
// whatever is not about one key by name.
type poorProxy struct {
	ln      net.Listener
	target  string
	refused atomic.Int64
	mu      sync.Mutex
	conns   []net.Conn
}

var refusedCommands = []string{"SCRIPT", "SUBSCRIBE", "MULTI", "CLIENT", "HELLO", "INFO", "CONFIG", "WAIT", "SELECT", "PING"}

func newPoorProxy(t *testing.T, s *servertest.RedisServer) *poorProxy {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &poorProxy{ln: ln, target: s.Addr()}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.keep(c)
			wg.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		p.mu.Lock()
		for _, c := range p.conns {
			c.Close()
		}
		p.mu.Unlock()
		wg.Wait()
	})
	return p
}

func (p *poorProxy) Addr() string { return p.ln.Addr().String() }

func (p *poorProxy) keep(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = append(p.conns, c)
}

// serve passes one command after the other, so that the replies are in order.
func (p *poorProxy) serve(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	p.keep(server)
	defer server.Close()
	requests, replies := bufio.NewReader(client), bufio.NewReader(server)
	for {
		raw, args, err := readRESP(requests)
		if err != nil || len(args) == 0 {
			return
		}
		reply := []byte("-ERR unknown command '" + args[0] + "'\r\n")
		if slices.Contains(refusedCommands, strings.ToUpper(args[0])) {
			p.refused.Add(1)
		} else if _, err := server.Write(raw); err != nil {
			return
		} else if reply, _, err = readRESP(replies); err != nil {
			return
		}
		if _, err := client.Write(reply); err != nil {
			return
		}
	}
}

// readRESP reads one value of RESP2: its bytes, and the texts in it.
func readRESP(r *bufio.Reader) (raw []byte, texts []string, err error) {
	line, err := r.ReadBytes('\n')
	if err != nil || len(line) < 3 {
		return nil, nil, errors.Join(err, io.ErrUnexpectedEOF)
	}
	n, _ := strconv.Atoi(strings.TrimSpace(string(line[1:])))
	switch raw = line; line[0] {
	case '$':
		if n >= 0 {
			text := make([]byte, n+2)
			if _, err := io.ReadFull(r, text); err != nil {
				return nil, nil, err
			}
			raw, texts = append(raw, text...), []string{string(text[:n])}
		}
	case '*':
		for range n {
			part, inner, err := readRESP(r)
			if err != nil {
				return nil, nil, err
			}
			raw, texts = append(raw, part...), append(texts, inner...)
		}
	}
	return raw, texts, nil
}

// RED-11, RED-04: before the servers stand proxies that pass scripts with keys, and neither
// SCRIPT nor subscriptions, INFO or WAIT. With TrustRestarts everything works, and waiting polls; without
// it the refusal says that.
func TestProxiesThatKnowFewCommands(t *testing.T) {
	t.Parallel()
	kit.Each(t, []int{1, 3}, func(t *testing.T, c kit.Client, n int) {
		t.Parallel()
		var proxies []*poorProxy
		servers := kit.Servers(t, n)
		for _, s := range servers {
			proxies = append(proxies, newPoorProxy(t, s))
		}
		trusting := redlock.Options{NodeTimeout: nodeTimeout, TrustRestarts: true}
		strict := kit.Locker(t, kit.Store(t, c, redlock.Options{NodeTimeout: nodeTimeout}, kit.Addrs(proxies)), holdfast.Options{TTL: ttl})
		_, err := strict.TryAcquire(t.Context(), "k")
		if !errors.Is(err, holdfast.ErrInvalid) || !strings.Contains(fmt.Sprint(err), "TrustRestarts") {
			t.Errorf("without TrustRestarts: %v, want a refusal that names it", err)
		}
		a := kit.Locker(t, kit.Store(t, c, trusting, kit.Addrs(proxies)), holdfast.Options{TTL: ttl})
		b := kit.Locker(t, kit.Store(t, c, trusting, kit.Addrs(proxies)), holdfast.Options{TTL: ttl})
		lease := kit.Acquire(t, a, "k")
		if _, err := b.TryAcquire(t.Context(), "k"); !errors.Is(err, holdfast.ErrHeld) {
			t.Errorf("another: %v, want ErrHeld", err)
		}
		if err := lease.Extend(t.Context()); err != nil {
			t.Error(err)
		}
		next := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), ttl)
			defer cancel()
			lease, err := b.Acquire(ctx, "k")
			if err == nil {
				err = lease.Release(t.Context())
			}
			next <- err
		}()
		time.Sleep(ttl / 20)
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if err := <-next; err != nil {
			t.Errorf("a waiter: %v", err)
		}
		kit.NoKeys(t, ttl/2, servers)
		for _, p := range proxies {
			if p.refused.Load() == 0 {
				t.Error("nothing was refused: the test shows nothing")
			}
		}
	})
}
