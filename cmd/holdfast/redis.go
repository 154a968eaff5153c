package main

import (
	"context"
	"crypto/tls"
	"net"
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
		conn, err := rueidisnode.Dial(s.client())
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, conn)
		urls = append(urls, s.url(terms.MaxTTL, terms.TrustRestarts))
	}
	st, err := redlock.New(terms, nodes...)
	if err != nil {
		return nil, err
	}
	return &opened{st, strings.Join(urls, " "), func() { settle(st) }}, nil
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

func (s storeSpec) client() rueidis.ClientOption {
	o := rueidis.ClientOption{
		InitAddress: []string{s.addr},
		Username:    s.user,
		Password:    s.password,
		SelectDB:    s.db,
		ClientName:  "holdfast",
	}
	if s.scheme == "rediss" {
		host, _, _ := net.SplitHostPort(s.addr)
		o.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: host}
	}
	return o
}

// settleLimit bounds how long the command stays for servers beyond the quorum.
const settleLimit = 250 * time.Millisecond

// settle lets the releases under way reach every server. The connections end with the
// process.
func settle(st *redlock.Store) {
	ctx, cancel := context.WithTimeout(context.Background(), settleLimit)
	defer cancel()
	_ = st.Settle(ctx) // a server that does not answer keeps the vote until its ttl ends
}
