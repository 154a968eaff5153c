package main

import (
	"maps"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// redisSpec is what the URL of a Redis deployment says:
//
//	redis://[USER:PASSWORD@]HOST[:PORT][/DB]
//	redis+sentinel://[USER:PASSWORD@]SENTINEL[:PORT][,SENTINEL...]/MASTER[/DB]
//	redis+cluster://[USER:PASSWORD@]HOST[:PORT][,HOST...]
//
// and each with rediss for TLS, and with parameters.
type redisSpec struct {
	addrs          string // host:port; of a Sentinel or Cluster deployment several, with commas between
	master         string // of a Sentinel deployment
	user, password string
	db             int
	database       string        // of SQL marks
	maxTTL         time.Duration // zero where the URL does not say
	trustRestarts  *bool         // nil where the URL does not say

	passwordFile                                         string
	sentinelUser, sentinelPassword, sentinelPasswordFile string
	ca, cert, key, serverName                            string // TLS
}

func isRedis(scheme string) bool {
	base, kind, joined := strings.Cut(scheme, "+")
	return (base == "redis" || base == "rediss") && (!joined || kind == "sentinel" || kind == "cluster")
}

func (s storeSpec) isTLS() bool      { return strings.HasPrefix(s.scheme, "rediss") }
func (s storeSpec) isSentinel() bool { return strings.HasSuffix(s.scheme, "+sentinel") }
func (s storeSpec) isCluster() bool  { return strings.HasSuffix(s.scheme, "+cluster") }

// secret reports whether the URL holds a password itself.
func (s redisSpec) secret() bool { return s.password != "" || s.sentinelPassword != "" }

// files are the files that the URL names.
func (s *redisSpec) files() []*string {
	return []*string{&s.passwordFile, &s.sentinelPasswordFile, &s.ca, &s.cert, &s.key}
}

// absolute makes the names of files good for other folders.
func (s *redisSpec) absolute() error {
	for _, f := range s.files() {
		if *f == "" {
			continue
		}
		abs, err := filepath.Abs(*f)
		if err != nil {
			return &exit{exitFailed, err}
		}
		*f = abs
	}
	return nil
}

// parseRedisStore reads the URL of a server, or of a deployment that is one node.
func parseRedisStore(raw string) (storeSpec, error) {
	scheme, rest, _ := strings.Cut(raw, ":")
	return parseRedis(scheme, rest, refuseStore(raw))
}

// redisServers are the targets as servers of Redis, of which a store has none or nothing else.
func redisServers(list []target) (servers []storeSpec) {
	for _, t := range list {
		if s, ok := t.(*storeSpec); ok && isRedis(s.scheme) {
			servers = append(servers, *s)
		}
	}
	return servers
}

// parseRedis reads what follows the scheme and its colon.
func parseRedis(scheme, rest string, refuse func(rule string) error) (storeSpec, error) {
	s := storeSpec{scheme: scheme}
	u, hosts, rule := splitHosts(scheme, rest)
	if rule != "" {
		return storeSpec{}, refuse(rule)
	}
	for _, step := range []func() string{
		func() string { return s.setHosts(hosts) },
		func() string { return s.setUser(u.User) },
		func() string { return s.setPath(u.EscapedPath()) },
		func() string { return s.setParameters(u.RawQuery) },
		s.check,
	} {
		if rule := step(); rule != "" {
			return storeSpec{}, refuse(rule)
		}
	}
	return s, nil
}

// setHosts takes the servers and returns the rule that they break, as all its siblings do.
func (s *storeSpec) setHosts(list string) (rule string) {
	if strings.Contains(list, ",") && !s.isSentinel() && !s.isCluster() {
		return "has several hosts: give each server a URL of its own, with spaces between them in HOLDFAST_STORE, or write redis+sentinel:// or redis+cluster://"
	}
	port := "6379"
	if s.isSentinel() {
		port = "26379"
	}
	return s.setMembers(list, port)
}

// hostPort reads HOST[:PORT].
func hostPort(raw, port string) (addr, rule string) {
	u, err := url.Parse("redis://" + raw)
	if err != nil || u.User != nil || u.Path != "" {
		return "", "is not a valid URL: check the port, and write special characters of the password as %XX"
	}
	host := u.Hostname()
	if u.Port() != "" {
		port = u.Port()
	}
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case host == "":
		return "", "names no host: write HOST or HOST:PORT after ://"
	case err != nil || n == 0:
		return "", "the port must be a number from 1 to 65535"
	case strings.Contains(host, ":") && !strings.HasPrefix(u.Host, "["):
		return "", "has more than one port; an IPv6 address stands in brackets"
	case strings.HasPrefix(u.Host, "[") && !isIPv6(host):
		return "", "what stands in brackets must be an IPv6 address"
	case strings.HasSuffix(u.Host, ":"):
		return "", "the port is missing after the colon"
	case strings.ContainsAny(host, ",@"):
		return "", "a host has no comma and no @"
	}
	return net.JoinHostPort(host, strconv.FormatUint(n, 10)), ""
}

// isIPv6 reports whether host is an IPv6 address, with a zone or without.
func isIPv6(host string) bool {
	addr, err := netip.ParseAddr(host)
	plain := func(r rune) bool { return r > ' ' && r < 0x7f && !strings.ContainsRune("%,@", r) }
	return err == nil && addr.Is6() && strings.IndexFunc(addr.Zone(), func(r rune) bool { return !plain(r) }) < 0
}

func (s *storeSpec) setUser(u *url.Userinfo) (rule string) {
	if u != nil {
		s.user = u.Username()
		s.password, _ = u.Password()
	}
	return ""
}

// setPath takes /DB, or /MASTER and /MASTER/DB.
func (s *storeSpec) setPath(escaped string) (rule string) {
	db := strings.TrimPrefix(escaped, "/")
	if s.isSentinel() {
		master, rest, _ := strings.Cut(db, "/")
		name, err := url.PathUnescape(master)
		if err != nil || name == "" || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return "names no master: write " + s.scheme + "://SENTINEL/MASTER or /MASTER/DB"
		}
		s.master, db = name, rest
	}
	if db == "" {
		return ""
	}
	n, err := strconv.Atoi(db)
	switch {
	case err != nil || n < 0:
		return "the path must be the number of a database, such as /0"
	case n > 0 && s.isCluster():
		return "a Cluster has database 0 only"
	}
	s.db = n
	return ""
}

func (s *storeSpec) setParameters(query string) (rule string) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return "its parameters cannot be read: write special characters as %XX"
	}
	secret := values.Has("sentinel-password")
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if rule := s.set(name, values[name], secret); rule != "" {
			return rule
		}
	}
	return ""
}

// text are the parameters that are taken as they are.
func (s *redisSpec) text(name string) *string {
	return map[string]*string{
		"password-file":          &s.passwordFile,
		"sentinel-user":          &s.sentinelUser,
		"sentinel-password":      &s.sentinelPassword,
		"sentinel-password-file": &s.sentinelPasswordFile,
		"tls-ca":                 &s.ca,
		"tls-cert":               &s.cert,
		"tls-key":                &s.key,
		"tls-server-name":        &s.serverName,
	}[name]
}

const parameters = "there are max-ttl, trust-restarts, password-file, tls-ca, tls-cert, tls-key, tls-server-name, sentinel-user, sentinel-password and sentinel-password-file"

// set takes a parameter. Where one of them is a secret, the name of another may be a part
// of it.
func (s *storeSpec) set(name string, values []string, secret bool) (rule string) {
	text := s.text(name)
	switch {
	case text == nil && name != "max-ttl" && name != "trust-restarts" && secret:
		return "has a parameter that does not exist; write & in a password as %26; " + parameters
	case text == nil && name != "max-ttl" && name != "trust-restarts":
		return "has no parameter " + strconv.Quote(name) + "; " + parameters
	case len(values) != 1:
		return "parameter " + name + " is given more than once"
	case values[0] == "":
		return "parameter " + name + " is empty"
	case text != nil && strings.IndexByte(values[0], 0) >= 0:
		return "parameter " + name + " has a NUL"
	case text != nil:
		*text = values[0]
	case name == "max-ttl":
		d, err := time.ParseDuration(values[0])
		if err != nil || d <= 0 {
			return "max-ttl must be a positive duration with its unit, such as 30s"
		}
		s.maxTTL = d
	default:
		b, err := strconv.ParseBool(values[0])
		if err != nil {
			return "trust-restarts must be 0 or 1"
		}
		s.trustRestarts = &b
	}
	return ""
}

// check compares the parts with each other.
func (s *storeSpec) check() (rule string) {
	switch {
	case s.password != "" && s.passwordFile != "":
		return "has a password and a password-file: give one"
	case s.user != "" && s.password == "" && s.passwordFile == "":
		return "has a user without a password: write user:PASSWORD@ or :PASSWORD@, or name a password-file"
	case !s.isTLS() && s.ca+s.cert+s.key+s.serverName != "":
		return "takes no tls- parameters: TLS is rediss://"
	case (s.cert == "") != (s.key == ""):
		return "tls-cert and tls-key belong together"
	case !s.isSentinel() && s.sentinelUser+s.sentinelPassword+s.sentinelPasswordFile != "":
		return "takes no sentinel- parameters: they belong to redis+sentinel://"
	case s.sentinelPassword != "" && s.sentinelPasswordFile != "":
		return "has a sentinel-password and a sentinel-password-file: give one"
	case s.sentinelUser != "" && s.sentinelPassword == "" && s.sentinelPasswordFile == "":
		return "has a sentinel-user without a sentinel-password"
	}
	return ""
}

// urlPath is the path of the URL: master and database.
func (s storeSpec) urlPath() string {
	path := ""
	if s.isSentinel() {
		path = "/" + url.PathEscape(s.master)
	}
	switch {
	case s.db != 0:
		path += "/" + strconv.Itoa(s.db)
	case s.database != "":
		path += "/" + url.PathEscape(s.database)
	}
	return path
}

// hostList writes the servers: a zone's % is escaped.
func hostList(addrs string) string {
	if addrs == "" {
		return ""
	}
	hosts := strings.Split(addrs, ",")
	for i, h := range hosts {
		u := url.URL{Scheme: "redis", Host: h}
		hosts[i] = strings.TrimPrefix(u.String(), "redis://")
	}
	return strings.Join(hosts, ",")
}

// userinfo is what stands before the hosts of a URL.
func userinfo(user, password string) string {
	switch {
	case password != "":
		return url.UserPassword(user, password).String() + "@"
	case user != "":
		return url.User(user).String() + "@"
	}
	return ""
}

func (s storeSpec) redisURL(maxTTL time.Duration, trust bool) string {
	text := s.scheme + "://" + userinfo(s.user, s.password) + hostList(s.addrs) + s.urlPath()
	q := url.Values{}
	if maxTTL != 0 {
		q.Set("max-ttl", maxTTL.String())
	}
	if trust {
		q.Set("trust-restarts", "1")
	}
	for _, name := range []string{"password-file", "sentinel-user", "sentinel-password", "sentinel-password-file", "tls-ca", "tls-cert", "tls-key", "tls-server-name"} {
		if v := *s.text(name); v != "" {
			q.Set(name, v)
		}
	}
	if len(q) > 0 {
		text += "?" + q.Encode()
	}
	return text
}
