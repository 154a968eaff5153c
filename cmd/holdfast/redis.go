package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
)

// openRedis makes a store of one server, or Redlock of several. Nothing is sent yet: a
// server that is away says so when it is asked, and may come later.
func openRedis(specs []storeSpec, f storeFlags) (*opened, error) {
	terms, err := f.terms(specs)
	if err != nil {
		return nil, err
	}
	var nodes []redlock.Node
	var urls []string
	for _, s := range specs {
		if err := s.absolute(); err != nil {
			return nil, err
		}
		o, err := s.client()
		if err != nil {
			return nil, err
		}
		conn, err := rueidisnode.Dial(o)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, conn)
		urls = append(urls, s.redisURL(terms.MaxTTL, terms.TrustRestarts))
	}
	st, err := redlock.New(terms, nodes...)
	if err != nil {
		return nil, err
	}
	return &opened{Store: st, spec: strings.Join(urls, " "), close: func() { settle(st) }}, nil
}

// terms joins what the flags and the URLs say about the deployment. It is one for all
// servers, so none may contradict another.
func (f storeFlags) terms(specs []storeSpec) (redlock.Options, error) {
	o := redlock.Options{MaxTTL: f.maxTTL}
	var trust *bool
	if f.trustRestarts {
		trust = &f.trustRestarts
	}
	for _, s := range specs {
		if o.MaxTTL == 0 {
			o.MaxTTL = s.maxTTL
		}
		if trust == nil {
			trust = s.trustRestarts
		}
		if s.maxTTL != 0 && s.maxTTL != o.MaxTTL {
			return o, s.refuse("has max-ttl=" + s.maxTTL.String() + ", and " + o.MaxTTL.String() + " is given elsewhere; it is one for all")
		}
		if s.trustRestarts != nil && *s.trustRestarts != *trust {
			return o, s.refuse("says the contrary of what is given elsewhere about trust-restarts; it is one for all")
		}
	}
	o.TrustRestarts = trust != nil && *trust
	return o, nil
}

// client reads the files that the URL names: passwords and certificates.
func (s storeSpec) client() (rueidis.ClientOption, error) {
	o := rueidis.ClientOption{
		InitAddress: strings.Split(s.addrs, ","),
		Username:    s.user,
		SelectDB:    s.db,
		ClientName:  "holdfast",
	}
	var err error
	if o.Password, err = s.secretFrom(s.password, "password-file", s.passwordFile); err != nil {
		return o, err
	}
	if s.isTLS() {
		if o.TLSConfig, err = s.tls(); err != nil {
			return o, err
		}
	}
	if s.isSentinel() {
		o.Sentinel = rueidis.SentinelOption{MasterSet: s.master, Username: s.sentinelUser, TLSConfig: o.TLSConfig,
			Dialer: net.Dialer{Timeout: 2 * time.Second, KeepAlive: 5 * time.Second}} // a Sentinel that went silent is noticed soon
		o.Sentinel.Password, err = s.secretFrom(s.sentinelPassword, "sentinel-password-file", s.sentinelPasswordFile)
	}
	return o, err
}

// secretFrom is the password that is given, else the content of the file without the end of
// its line.
func (s storeSpec) secretFrom(given, parameter, file string) (string, error) {
	if file == "" {
		return given, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", s.refuseFile(parameter, err)
	}
	secret := strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r")
	if secret == "" || strings.ContainsAny(secret, "\n\x00") {
		return "", s.refuse(parameter + " " + file + " must hold one line, the password")
	}
	return secret, nil
}

// refuseFile says that a file of the URL cannot be used. The reason names it.
func (s storeSpec) refuseFile(parameter string, err error) error {
	return s.refuse(parameter + " cannot be used: " + err.Error())
}

// tls is the configuration for rediss://. A server's certificate must be good for the host
// of the URL, or that which a Sentinel or Cluster names, or tls-server-name.
func (s storeSpec) tls() (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: s.serverName}
	if s.ca != "" {
		b, err := os.ReadFile(s.ca)
		if err != nil {
			return nil, s.refuseFile("tls-ca", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(b) {
			return nil, s.refuse("tls-ca " + s.ca + " holds no certificate in PEM form")
		}
	}
	if s.cert != "" {
		pair, err := tls.LoadX509KeyPair(s.cert, s.key)
		if err != nil {
			return nil, s.refuseFile("tls-cert with tls-key", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// settleLimit bounds how long the command stays for servers beyond the quorum.
const settleLimit = 250 * time.Millisecond

// settle lets the releases under way reach every server, and what had no answer be cleared. The
// connections end with the process.
func settle(st interface{ Settle(context.Context) error }) {
	ctx, cancel := context.WithTimeout(context.Background(), settleLimit)
	defer cancel()
	_ = st.Settle(ctx) // a server that does not answer keeps what it has until its ttl ends
}
