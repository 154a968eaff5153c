package main

import (
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

const storeVariable = "HOLDFAST_STORE"

// storeFlags say which store, and what belongs to its deployment.
type storeFlags struct {
	urls          []string
	maxTTL        time.Duration
	trustRestarts bool
}

// opened is a store that is ready for use.
type opened struct {
	store.Store
	// spec names the store for a nested holdfast: what HOLDFAST_STORE of the command says.
	// It holds the password, if there is one.
	spec  string
	close func()
}

// open opens the store that the flags, else the environment, else the default name.
// It refuses what is wrong without I/O on the store.
func (f storeFlags) open() (*opened, error) {
	specs, err := f.specs()
	if err != nil {
		return nil, err
	}
	if specs[0].scheme == "sqlite" {
		if len(specs) > 1 {
			return nil, specs[1].refuse("cannot be joined with a SQLite store; several stores must all be redis:// or rediss://")
		}
		if f.maxTTL != 0 || f.trustRestarts {
			return nil, specs[0].refuse("takes no --max-ttl and no --trust-restarts; they belong to redis://")
		}
		return openSQLite(specs[0].path)
	}
	return openRedis(specs, f)
}

func (f storeFlags) specs() ([]storeSpec, error) {
	urls := f.urls
	if len(urls) == 0 {
		urls = splitStores(os.Getenv(storeVariable))
	}
	if len(urls) == 0 {
		path, err := defaultPath()
		if err != nil {
			return nil, &exit{exitFailed, err}
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			return nil, &exit{exitFailed, fmt.Errorf("the folder of the default store cannot be made: %w; set %s or give --store", err, storeVariable)}
		}
		return []storeSpec{{scheme: "sqlite", path: path}}, nil
	}
	var specs []storeSpec
	for _, u := range urls {
		s, err := parseStore(u)
		if err != nil {
			return nil, err
		}
		if len(specs) > 0 && s.scheme == "sqlite" {
			return nil, s.refuse("cannot be joined with another store")
		}
		specs = append(specs, s)
	}
	return specs, nil
}

// splitStores reads HOLDFAST_STORE: one SQLite store, whose path may hold spaces, or
// URLs with spaces between them.
func splitStores(s string) []string {
	if strings.HasPrefix(s, "sqlite:") {
		return []string{s}
	}
	return strings.Fields(s)
}

// storeSpec is a store's URL, taken apart.
type storeSpec struct {
	scheme         string // "redis", "rediss" or "sqlite"
	path           string // of the SQLite file
	addr           string // host:port of the Redis server
	user, password string
	db             int
	maxTTL         time.Duration // zero where the URL does not say
	trustRestarts  *bool         // nil where the URL does not say
}

// shown is the store as people may see it: without user, password and parameters.
func (s storeSpec) shown() string {
	if s.scheme == "sqlite" {
		return "sqlite:" + s.path
	}
	shown := s.scheme + "://" + s.addr
	if s.db != 0 {
		shown += "/" + strconv.Itoa(s.db)
	}
	return shown
}

func (s storeSpec) refuse(rule string) error {
	return &store.InvalidError{Field: "store", Value: s.shown(), Rule: rule}
}

// hideSecrets cuts user, password and parameters out of a URL, which need not be valid.
func hideSecrets(raw string) string {
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok {
		if i := strings.LastIndexByte(raw, '@'); i >= 0 {
			return "***" + raw[i:]
		}
		return raw
	}
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		rest = "***" + rest[i:]
	}
	if i := strings.IndexAny(rest, "?#"); i >= 0 {
		rest = rest[:i]
	}
	return scheme + "://" + rest
}

// parseStore reads the URL of a store. What it refuses is an [*store.InvalidError] that
// shows no password.
func parseStore(raw string) (storeSpec, error) {
	refuse := func(rule string) (storeSpec, error) {
		return storeSpec{}, &store.InvalidError{Field: "store", Value: hideSecrets(raw), Rule: rule}
	}
	scheme, rest, ok := strings.Cut(raw, ":")
	switch {
	case !ok:
		return refuse("must be a URL: redis://HOST, rediss://HOST or sqlite:PATH")
	case scheme == "sqlite":
		return parseSQLite(rest, refuse)
	case scheme == "redis" || scheme == "rediss":
		return parseRedis(raw, refuse)
	}
	return refuse("unknown scheme; stores are redis://HOST, rediss://HOST and sqlite:PATH")
}

type refuseFunc = func(rule string) (storeSpec, error)

// parseSQLite reads what follows "sqlite:". The path is taken as it is, not decoded.
func parseSQLite(path string, refuse refuseFunc) (storeSpec, error) {
	if after, ok := strings.CutPrefix(path, "//"); ok {
		if !strings.HasPrefix(after, "/") {
			return refuse("a file has no host: write sqlite:PATH, or sqlite:///PATH with a path from the root")
		}
		path = after
	}
	switch {
	case path == "":
		return refuse("names no file")
	case strings.IndexByte(path, 0) >= 0:
		return refuse("a path has no NUL")
	case strings.ContainsAny(path, "?#"):
		return refuse("has no parameters, and a path has no ? or #")
	}
	return storeSpec{scheme: "sqlite", path: path}, nil
}

// isIPv6 reports whether host is an IPv6 address, with a zone or without.
func isIPv6(host string) bool {
	addr, err := netip.ParseAddr(host)
	plain := func(r rune) bool { return r > ' ' && r < 0x7f && r != '%' }
	return err == nil && addr.Is6() && strings.IndexFunc(addr.Zone(), func(r rune) bool { return !plain(r) }) < 0
}

func parseRedis(raw string, refuse refuseFunc) (storeSpec, error) {
	u, err := url.Parse(raw)
	if err != nil { // its text repeats the URL with the password
		return refuse("is not a valid URL: check the port, and write special characters of the password as %XX")
	}
	s := storeSpec{scheme: u.Scheme}
	port := u.Port()
	if port == "" {
		port = "6379"
	}
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case u.Opaque != "" || u.Hostname() == "":
		return refuse("names no host: write " + s.scheme + "://HOST or " + s.scheme + "://HOST:PORT")
	case err != nil || n == 0:
		return refuse("the port must be a number from 1 to 65535")
	case strings.Contains(u.Hostname(), ":") && !strings.HasPrefix(u.Host, "["):
		return refuse("has more than one port; an IPv6 address stands in brackets")
	case strings.HasPrefix(u.Host, "[") && !isIPv6(u.Hostname()):
		return refuse("what stands in brackets must be an IPv6 address")
	case strings.HasSuffix(u.Host, ":"):
		return refuse("the port is missing after the colon")
	case u.Fragment != "":
		return refuse("has no fragment: write # in a password as %23")
	}
	s.addr = net.JoinHostPort(u.Hostname(), strconv.FormatUint(n, 10))
	if u.User != nil {
		password, ok := u.User.Password()
		if !ok || password == "" {
			return refuse("has a user without a password: write user:PASSWORD@ or :PASSWORD@")
		}
		s.user, s.password = u.User.Username(), password
	}
	if db := strings.TrimPrefix(u.Path, "/"); db != "" {
		if s.db, err = strconv.Atoi(db); err != nil || s.db < 0 {
			return refuse("the path must be the number of a database, such as /0")
		}
	}
	values, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return refuse("its parameters cannot be read")
	}
	for name, v := range values {
		if rule := s.set(name, v); rule != "" {
			return refuse(rule)
		}
	}
	return s, nil
}

// set takes a parameter of the URL and returns the rule that it breaks.
func (s *storeSpec) set(name string, values []string) (rule string) {
	if len(values) != 1 {
		return "parameter " + strconv.Quote(name) + " is given more than once"
	}
	switch name {
	case "max-ttl":
		d, err := time.ParseDuration(values[0])
		if err != nil || d <= 0 {
			return "max-ttl must be a positive duration with its unit, such as 30s"
		}
		s.maxTTL = d
	case "trust-restarts":
		b, err := strconv.ParseBool(values[0])
		if err != nil {
			return "trust-restarts must be 0 or 1"
		}
		s.trustRestarts = &b
	default:
		return "has no parameter " + strconv.Quote(name) + "; there are max-ttl and trust-restarts"
	}
	return ""
}

// url writes the store for a nested holdfast. It holds the password.
func (s storeSpec) url(maxTTL time.Duration, trust bool) string {
	if s.scheme == "sqlite" {
		return "sqlite:" + s.path
	}
	u := url.URL{Scheme: s.scheme, Host: s.addr}
	if s.password != "" {
		u.User = url.UserPassword(s.user, s.password)
	}
	if s.db != 0 {
		u.Path = "/" + strconv.Itoa(s.db)
	}
	q := url.Values{}
	if maxTTL != 0 {
		q.Set("max-ttl", maxTTL.String())
	}
	if trust {
		q.Set("trust-restarts", "1")
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// openSQLite opens the file at path, and makes it where it is missing.
func openSQLite(path string) (*opened, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, &exit{exitFailed, err}
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		return nil, &exit{exitFailed, errors.New("the folder of the store cannot be used: " + err.Error())}
	}
	dsn, err := sqlstore.SQLiteDSN(path)
	if err != nil {
		return nil, err
	}
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, err
	}
	st, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.SQLite, Database: path})
	if err != nil {
		db.Close()
		return nil, err
	}
	return &opened{st, storeSpec{scheme: "sqlite", path: path}.url(0, false), func() { db.Close() }}, nil
}
