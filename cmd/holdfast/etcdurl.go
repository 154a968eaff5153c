package main

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/store"
)

// etcdSpec is what the URL of an etcd cluster says:
//
//	etcd://[USER:PASSWORD@]HOST[:PORT][,HOST...][/PREFIX/]
//
// and the same with etcds for TLS, and with parameters. Of its store fields those of Redis that
// have the same meaning are used.
type etcdSpec struct {
	storeSpec
	prefix  string // of the keys, with a slash at both ends; empty: the default one
	epoch   int
	cluster string // name of the cluster, where it is not its hosts
}

// parseEtcd reads the URL of a cluster. What it refuses is an [*store.InvalidError] that shows no
// password.
func parseEtcd(raw string) (etcdSpec, error) {
	scheme, rest, _ := strings.Cut(raw, ":")
	s := etcdSpec{storeSpec: storeSpec{scheme: scheme}}
	if rule := s.parse(rest); rule != "" {
		return etcdSpec{}, refuseStore(raw)(rule)
	}
	return s, nil
}

// parse takes what follows the scheme and its colon and returns the rule that it breaks, as all its
// siblings do.
func (s *etcdSpec) parse(rest string) (rule string) {
	u, hosts, rule := splitHosts(s.scheme, rest)
	if rule != "" {
		return rule
	}
	return cmp.Or(s.setMembers(hosts, "2379"), s.setUser(u.User), s.setPrefix(u.Path), s.setAll(u.RawQuery), s.checkMembers("etcds"))
}

// setPrefix takes the path: the part before the names of all keys.
func (s *etcdSpec) setPrefix(path string) (rule string) {
	if strings.Trim(path, "/") == "" {
		return ""
	}
	if strings.IndexByte(path, 0) >= 0 {
		return "its path, the prefix of the keys, has a NUL"
	}
	s.prefix = strings.TrimSuffix(path, "/") + "/"
	return ""
}

// text are the parameters that are taken as they are.
func (s *etcdSpec) text(name string) *string {
	if name == "cluster" {
		return &s.cluster
	}
	return s.memberText(name)
}

const etcdParameters = "there are epoch, cluster, password-file, tls-ca, tls-cert, tls-key and tls-server-name"

func (s *etcdSpec) setAll(query string) (rule string) {
	known := func(name string) bool { return name == "epoch" || s.text(name) != nil }
	return readParameters(query, etcdParameters, known, s.setOne)
}

func (s *etcdSpec) setOne(name, value string) (rule string) {
	if text := s.text(name); text != nil {
		*text = value
		return ""
	}
	n, err := strconv.Atoi(value)
	if err != nil || n < 0 || n > etcdstore.MaxEpoch {
		return "epoch must be a number from 0 to " + strconv.Itoa(etcdstore.MaxEpoch)
	}
	s.epoch = n
	return ""
}

func (s etcdSpec) shown() string { return s.scheme + "://" + hostList(s.addrs) + s.path() }

func (s etcdSpec) path() string {
	u := url.URL{Path: s.prefix}
	return u.EscapedPath()
}

func (s etcdSpec) url() string {
	text := s.scheme + "://" + userinfo(s.user, s.password) + hostList(s.addrs) + s.path()
	q := url.Values{}
	if s.epoch != 0 {
		q.Set("epoch", strconv.Itoa(s.epoch))
	}
	if s.cluster != "" {
		q.Set("cluster", s.cluster)
	}
	s.memberParameters(q)
	if len(q) > 0 {
		text += "?" + q.Encode()
	}
	return text
}

// loginError says why the client could not log in.
func (s etcdSpec) loginError(err error) error {
	if errors.Is(rpctypes.Error(err), rpctypes.ErrAuthFailed) {
		return refusal(&store.InvalidError{Field: "store", Value: s.shown(), Rule: "the server refuses the user or its password"})
	}
	err = fmt.Errorf("%w: %s: no login: %w", store.ErrUnavailable, s.shown(), err)
	if advice(err) == "" {
		err = fmt.Errorf("%w; %s", err, reachAdvice)
	}
	return refusal(err)
}

// open makes a store of the cluster. Without a user nothing is sent yet: a cluster that is away
// says so when it is asked, and may come later. With one, the client logs in first.
func (s etcdSpec) open() (*opened, error) {
	if err := s.absolute(); err != nil {
		return nil, err
	}
	cfg := clientv3.Config{
		Username: s.user,
		// A member that is cut off silently is noticed within these.
		DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second,
		DialTimeout: 5 * time.Second, // bounds the login
		Logger:      zap.NewNop(),
	}
	http := "http://"
	var err error
	if cfg.Password, err = s.secretFrom(s.password, "password-file", s.passwordFile); err != nil {
		return nil, err
	}
	if s.scheme == "etcds" {
		http = "https://"
		if cfg.TLS, err = s.tls(); err != nil {
			return nil, err
		}
	}
	for addr := range strings.SplitSeq(s.addrs, ",") {
		cfg.Endpoints = append(cfg.Endpoints, http+addr)
	}
	client, err := clientv3.New(cfg)
	if err != nil {
		return nil, s.loginError(err)
	}
	st, err := etcdstore.New(client, etcdstore.Options{Prefix: s.prefix, Epoch: s.epoch, Cluster: cmp.Or(s.cluster, s.addrs)})
	if err != nil {
		client.Close()
		return nil, err
	}
	return &opened{Store: st, spec: s.url(), close: func() { settle(st); client.Close() }}, nil
}
