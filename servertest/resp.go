package servertest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

// ReplyError is an error that a Redis server replied.
type ReplyError string

func (e ReplyError) Error() string { return string(e) }

// doTimeout bounds one command of [RedisServer.Do]. A server that is stopped answers nothing.
const doTimeout = 5 * time.Second

// respConn speaks just enough of RESP2 to look at a server.
type respConn struct {
	net.Conn
	r *bufio.Reader
}

func dialRESP(addr string, timeout time.Duration) (*respConn, error) {
	c, err := net.DialTimeout("tcp", addr, timeout)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(timeout))
	return &respConn{c, bufio.NewReader(c)}, nil
}

// do sends one command. The value is nil, a string, an int64 or a []any of those and of
// ReplyErrors.
func (c *respConn) do(args ...string) (any, error) {
	buf := fmt.Appendf(nil, "*%d\r\n", len(args))
	for _, a := range args {
		buf = fmt.Appendf(buf, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := c.Write(buf); err != nil {
		return nil, err
	}
	v, err := c.read()
	if e, ok := v.(ReplyError); ok {
		return nil, e
	}
	return v, err
}

func (c *respConn) read() (any, error) {
	line, err := c.r.ReadString('\n')
	if err != nil {
		return nil, err
	}
	if len(line) < 3 {
		return nil, errors.New("servertest: short reply line")
	}
	kind, rest := line[0], line[1:len(line)-2]
	switch kind {
	case '+':
		return rest, nil
	case '-':
		return ReplyError(rest), nil
	case ':':
		return strconv.ParseInt(rest, 10, 64)
	}
	n, err := strconv.Atoi(rest)
	if err != nil {
		return nil, err
	}
	switch {
	case n < 0:
		return nil, nil
	case kind == '$':
		b := make([]byte, n+2)
		_, err = io.ReadFull(c.r, b)
		return string(b[:n]), err
	case kind == '*':
		list := make([]any, n)
		for i := range list {
			if list[i], err = c.read(); err != nil {
				return nil, err
			}
		}
		return list, nil
	}
	return nil, fmt.Errorf("servertest: unknown reply %q", line)
}
