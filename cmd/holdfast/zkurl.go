package main

import (
	"cmp"
	"maps"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/holdfast-go/holdfast/zkstore"
)

// zkSpec is what the URL of a ZooKeeper ensemble says:
//
//	zk://[USER:PASSWORD@]HOST[:PORT][,HOST...][/CHROOT]
//
// with parameters. Of its store fields those of Redis that have the same meaning are used.
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
	return cmp.Or(s.setMembers(hosts, "2181"), s.setUser(u.User), s.setChroot(u.Path), s.setAll(u.RawQuery), s.checkZK())
}

// setChroot takes the path. What makes a good one, the store knows.
func (s *zkSpec) setChroot(path string) (rule string) {
	if strings.Trim(path, "/") != "" {
		s.chroot = strings.TrimSuffix(path, "/")
	}
	return ""
}

const zkParameters = "there are session-timeout and password-file"

func (s *zkSpec) setAll(query string) (rule string) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return "its parameters cannot be read: write special characters as %XX"
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if rule := s.setOne(name, values[name]); rule != "" {
			return rule
		}
	}
	return ""
}

func (s *zkSpec) setOne(name string, values []string) (rule string) {
	switch {
	case name != "session-timeout" && name != "password-file":
		return "has no parameter " + strconv.Quote(name) + "; " + zkParameters
	case len(values) != 1:
		return "parameter " + name + " is given more than once"
	case values[0] == "":
		return "parameter " + name + " is empty"
	case strings.IndexByte(values[0], 0) >= 0:
		return "parameter " + name + " has a NUL"
	case name == "password-file":
		s.passwordFile = values[0]
		return ""
	}
	d, err := time.ParseDuration(values[0])
	if err != nil || d <= 0 {
		return "session-timeout must be a positive duration with its unit, such as 30s"
	}
	s.session = d
	return ""
}

// checkZK compares the parts with each other.
func (s *zkSpec) checkZK() (rule string) {
	switch {
	case s.password != "" && s.passwordFile != "":
		return "has a password and a password-file: give one"
	case s.user != "" && s.password == "" && s.passwordFile == "":
		return "has a user without a password: write USER:PASSWORD@, or name a password-file"
	case s.user == "" && s.password+s.passwordFile != "":
		return "has a password without a user: write USER:PASSWORD@"
	}
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
	if s.passwordFile != "" {
		q.Set("password-file", s.passwordFile)
	}
	if len(q) > 0 {
		text += "?" + q.Encode()
	}
	return text
}

// open makes a store of the ensemble, which connects in the background: one that is away says so
// when it is asked, and may come later. Closing it ends its leases at once.
func (s zkSpec) open() (*opened, error) {
	if s.passwordFile != "" {
		abs, err := filepath.Abs(s.passwordFile) // good for other folders
		if err != nil {
			return nil, &exit{exitFailed, err}
		}
		s.passwordFile = abs
	}
	password, err := s.secretFrom(s.password, "password-file", s.passwordFile)
	if err != nil {
		return nil, err
	}
	st, err := zkstore.Dial(zkstore.Options{
		Servers: strings.Split(s.addrs, ","), Chroot: s.chroot, User: s.user, Password: password, SessionTimeout: s.session,
	})
	if err != nil {
		return nil, err
	}
	return &opened{Store: st, spec: s.url(), close: st.Close}, nil
}
