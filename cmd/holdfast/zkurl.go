package main

import (
	"cmp"
	"net/url"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/zkstore"
)

// zkSpec is what the URL of a ZooKeeper ensemble says:
//
//	zk://[USER:PASSWORD@]HOST[:PORT][,HOST...][/CHROOT]
//
// and the same with zks for TLS, and with parameters. Of its store fields those of Redis that have the same meaning are used.
type zkSpec struct {
	storeSpec
	chroot  string        // begins with a slash; empty for none
	session time.Duration // timeout; zero: the default one
}

// parseZK reads the URL of an ensemble. What it refuses is an [*store.InvalidError] that shows no
// password.
func parseZK(raw string) (zkSpec, error) {
	scheme, rest, _ := strings.Cut(raw, ":")
	s := zkSpec{storeSpec: storeSpec{scheme: scheme}}
	if rule := s.parse(rest); rule != "" {
		return zkSpec{}, refuseStore(raw)(rule)
	}
	return s, nil
}

// parse takes what follows the scheme and its colon and returns the rule that it breaks, as all its
// siblings do.
func (s *zkSpec) parse(rest string) (rule string) {
	u, hosts, rule := splitHosts(s.scheme, rest)
	if rule != "" {
		return rule
	}
	return cmp.Or(s.setMembers(hosts, "2181"), s.setUser(u.User), s.setChroot(u.Path), s.setAll(u.RawQuery), s.checkMembers("zks"))
}

// setChroot takes the path. What makes a good one, the store knows.
func (s *zkSpec) setChroot(path string) (rule string) {
	if strings.Trim(path, "/") != "" {
		s.chroot = strings.TrimSuffix(path, "/")
	}
	return ""
}

const zkParameters = "there are session-timeout, password-file, tls-ca, tls-cert, tls-key and tls-server-name"

func (s *zkSpec) setAll(query string) (rule string) {
	known := func(name string) bool { return name == "session-timeout" || s.memberText(name) != nil }
	return readParameters(query, zkParameters, known, s.setOne)
}

func (s *zkSpec) setOne(name, value string) (rule string) {
	if text := s.memberText(name); text != nil {
		*text = value
		return ""
	}
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return "session-timeout must be a positive duration with its unit, such as 30s"
	}
	s.session = d
	return ""
}

func (s zkSpec) shown() string { return s.scheme + "://" + hostList(s.addrs) + s.path() }

func (s zkSpec) path() string {
	u := url.URL{Path: s.chroot}
	return u.EscapedPath()
}

func (s zkSpec) url() string {
	text := s.scheme + "://" + userinfo(s.user, s.password) + hostList(s.addrs) + s.path()
	q := url.Values{}
	if s.session != 0 {
		q.Set("session-timeout", s.session.String())
	}
	s.memberParameters(q)
	if len(q) > 0 {
		text += "?" + q.Encode()
	}
	return text
}

// open makes a store of the ensemble, which connects in the background: one that is away says so
// when it is asked, and may come later. Closing it ends its leases at once.
func (s zkSpec) open() (*opened, error) {
	if err := s.absolute(); err != nil {
		return nil, err
	}
	password, err := s.secretFrom(s.password, "password-file", s.passwordFile)
	if err != nil {
		return nil, err
	}
	o := zkstore.Options{
		Servers: strings.Split(s.addrs, ","), Chroot: s.chroot, User: s.user, Password: password, SessionTimeout: s.session,
	}
	if s.scheme == "zks" {
		if o.TLS, err = s.tls(); err != nil {
			return nil, err
		}
	}
	st, err := zkstore.Dial(o)
	if err != nil {
		return nil, err
	}
	return &opened{Store: st, spec: s.url(), close: st.Close}, nil
}
