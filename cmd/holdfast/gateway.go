package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/holdfast-go/holdfast/fence/httpfence"
)

const gatewayHelp = `Stand before a service over HTTP that knows nothing of fencing tokens, and check them for it.

A request that may change something carries the token of its lease in the header
Fencing-Token. Of each resource the gateway remembers the highest token that it has seen, on
disk before the first request that carries it goes on. Requests of lower tokens are refused,
and those of them that are at work are waited for before the first of a higher one goes on. So
the service never gets a request of an older holder after one of a newer holder.

GET, HEAD, OPTIONS and TRACE need no token; one that carries a token is checked too.

Resources (--resource):
  path             the path of the request
  header:NAME      what the header NAME says
  /accounts/{id}   the beginning of the path: /accounts/7/transfers is about /accounts/7
All requests that change one thing must name one resource.

Answers of the gateway, all with problem+json (RFC 9457):
  400  the header is no token, or the request names no resource
  412  the token is stale: the holder has been superseded and must stop. Never try again
  428  the request needs a token and has none
  502, 504  the service did not answer. The request may have been obeyed, unless the
            problem's type is urn:holdfast:unavailable: then nothing was done
  503  try again after Retry-After: requests of a lower token did not finish within --drain,
       the marks cannot be written, or the resource is unknown and may have been forgotten

Marks (--marks) are in a file that one gateway uses at a time; it survives SIGKILL and a loss of
power. Keep it on a disk that does both. Where it is new, marks may be lost, and any old holder
would pass: resources that it does not know are refused for the time of --refuse-unknown, which
should be longer than any ttl and any pause of a holder. A restart in the midst of that time
begins it anew. --refuse-unknown 0 is for a service that is new itself.

What the gateway cannot know: what the service still does with a request whose connection broke
or which took longer than --upstream-timeout, and with what a gateway that was killed had sent.
After such a failure, and after each start, a higher token waits for --settle; make it longer
than the service needs for a request, if it goes on with those whose client is gone. What comes
to the service by another way, or through another gateway, is not in order with the rest.

Health and metrics (--admin), for operators only:
  /healthz  200 while the gateway serves and its marks can be written, else 503. The JSON has
            the state of the service too
  /metrics  for Prometheus

SIGTERM or SIGINT ends the gateway: it takes no new connections, and waits for requests at most
as long as --drain. A second one ends it at once.

Output with --json, one object a line: time, event (listening, complete, upstream-fails,
upstream-answers, connection, stopping, failed, and request with --access-log), and what
belongs to it.

Exit codes:
  0    ended by SIGTERM or SIGINT, all requests done
  64   the command line is wrong
  125  holdfast failed: the marks file cannot be used, another gateway has it, the address is
       taken, or requests were cut off at the end
  128+n  signal n came, when it was ending`

// gatewayFlags are the flags of gateway.
type gatewayFlags struct {
	listen, admin   string
	cert, key       string
	upstream        string
	marks           string
	resource        string
	drain           time.Duration
	refuseUnknown   time.Duration
	settle          time.Duration
	upstreamTimeout time.Duration
	accessLog       bool
	json            bool
}

func gatewayCommand() *cobra.Command {
	var f gatewayFlags
	cmd := &cobra.Command{
		Use:               "gateway --listen ADDR --upstream URL --marks PATH --resource path|header:NAME|PATTERN [flags]",
		Short:             "Check fencing tokens before a service that knows nothing of them",
		Long:              gatewayHelp,
		Example:           "  holdfast gateway --listen :8080 --upstream http://ledger:9000 --marks /var/lib/ledger/marks --resource /accounts/{id} --admin 127.0.0.1:8081",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := f.plan()
			if err != nil {
				return err
			}
			return f.run(cmd.Context(), p)
		},
	}
	f.add(cmd.Flags())
	return cmd
}

func (f *gatewayFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&f.listen, "listen", "", "serve at `ADDR`, such as :8080")
	flags.StringVar(&f.upstream, "upstream", "", "`URL` of the service, http or https")
	flags.StringVar(&f.marks, "marks", "", "keep the marks in the file `PATH`, made where it is missing")
	flags.StringVar(&f.resource, "resource", "", "what of a request names its resource: path, header:`NAME`, or a pattern of paths")
	flags.StringVar(&f.cert, "tls-cert", "", "serve TLS with the certificates in `FILE`")
	flags.StringVar(&f.key, "tls-key", "", "the private key of --tls-cert, in `FILE`")
	flags.DurationVar(&f.drain, "drain", 10*time.Second, "wait at most this long for requests of lower tokens")
	flags.DurationVar(&f.refuseUnknown, "refuse-unknown", time.Minute, "where the marks file is new, refuse unknown resources for this long; 0 not at all")
	flags.DurationVar(&f.settle, "settle", time.Second, "a higher token waits this long for requests of which the gateway has lost sight; 0 not at all")
	flags.DurationVar(&f.upstreamTimeout, "upstream-timeout", time.Minute, "give up a request that the service does not answer within this time")
	flags.StringVar(&f.admin, "admin", "", "serve /healthz and /metrics at `ADDR`, such as 127.0.0.1:8081")
	flags.BoolVar(&f.accessLog, "access-log", false, "write a line for each request to stderr")
	flags.BoolVar(&f.json, "json", false, "write lines of JSON to stderr")
	flags.SortFlags = false
}

// gatewayPlan is what the flags say, read.
type gatewayPlan struct {
	upstream *url.URL
	marks    string
	resource func(*http.Request) (string, error)
	tls      *tls.Config // nil: plain HTTP
}

// plan reads the flags, and opens nothing but the certificate.
func (f *gatewayFlags) plan() (p gatewayPlan, err error) {
	for _, flag := range []struct{ name, value string }{{"listen", f.listen}, {"upstream", f.upstream}, {"marks", f.marks}, {"resource", f.resource}} {
		if flag.value == "" {
			return p, usage("--%s is missing; see holdfast gateway --help", flag.name)
		}
	}
	switch {
	case f.drain <= 0:
		return p, usage("invalid --drain %v: must be positive", f.drain)
	case f.upstreamTimeout <= 0:
		return p, usage("invalid --upstream-timeout %v: must be positive", f.upstreamTimeout)
	case f.refuseUnknown < 0:
		return p, usage("invalid --refuse-unknown %v: must not be negative", f.refuseUnknown)
	case f.settle < 0:
		return p, usage("invalid --settle %v: must not be negative", f.settle)
	}
	if err := cmp.Or(checkAddress("listen", f.listen), checkAddress("admin", f.admin)); err != nil {
		return p, err
	}
	if p.upstream, err = parseUpstream(f.upstream); err != nil {
		return p, err
	}
	if p.marks, err = marksPath(f.marks); err != nil {
		return p, err
	}
	if p.resource, err = parseResource(f.resource); err != nil {
		return p, err
	}
	p.tls, err = f.tls()
	return p, err
}

// checkAddress refuses what is no HOST:PORT; empty is none.
func checkAddress(flag, addr string) error {
	if addr == "" {
		return nil
	}
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return usage("invalid --%s %q: must be HOST:PORT or :PORT, with the number of the port", flag, addr)
	}
	return nil
}

// parseUpstream reads the URL of the service. What it refuses shows no password.
func parseUpstream(raw string) (*url.URL, error) {
	refuse := func(rule string) (*url.URL, error) {
		return nil, usage("invalid --upstream %q: %s", hideSecrets(raw), rule)
	}
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return refuse("is not a valid URL: write http://HOST[:PORT] or https://HOST[:PORT]")
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return refuse("must be http://HOST[:PORT] or https://HOST[:PORT]")
	case u.User != nil:
		return refuse("has a user; the credentials of clients are sent on, and the gateway has none of its own")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return refuse("must have no query and no fragment")
	}
	return u, nil
}

// marksPath reads a path, also where it is written as the URL that holdfast fence takes.
func marksPath(raw string) (string, error) {
	scheme, rest, ok := strings.Cut(raw, ":")
	if !ok || scheme != "file" {
		if strings.Contains(raw, "://") {
			return "", usage("invalid --marks %q: must be the path of a file, in which the gateway keeps its marks", hideSecrets(raw))
		}
		return raw, nil
	}
	path, rule := parsePath(scheme, rest)
	if rule != "" {
		return "", usage("invalid --marks %q: %s", raw, rule)
	}
	return path, nil
}

// parseResource reads --resource.
func parseResource(raw string) (func(*http.Request) (string, error), error) {
	header, ok := strings.CutPrefix(raw, "header:")
	switch {
	case raw == "path":
		return httpfence.ByPath, nil
	case ok && !isHeaderName(header):
		return nil, usage("invalid --resource %q: what follows header: must be the name of a header", raw)
	case ok && (strings.EqualFold(header, httpfence.Header) || strings.EqualFold(header, "X-"+httpfence.Header)):
		return nil, usage("invalid --resource %q: that header is the token", raw)
	case ok:
		return httpfence.ByHeader(header), nil
	case strings.HasPrefix(raw, "/"):
		by, err := httpfence.ByPattern(raw)
		if err != nil {
			return nil, usage("invalid --resource: %w", err)
		}
		return by, nil
	}
	return nil, usage("invalid --resource %q: must be path, header:NAME, or a pattern such as /accounts/{id}", raw)
}

func isHeaderName(name string) bool {
	other := func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z') && !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
	}
	return name != "" && !strings.ContainsFunc(name, other)
}

// tls is nil where the gateway is to speak plain HTTP.
func (f *gatewayFlags) tls() (*tls.Config, error) {
	switch {
	case f.cert == "" && f.key == "":
		return nil, nil
	case f.cert == "" || f.key == "":
		return nil, usage("--tls-cert and --tls-key belong together")
	}
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return nil, usage("--tls-cert with --tls-key cannot be used: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}, nil
}

// marksWait is for the gateway that ran before to end.
const marksWait = 5 * time.Second

// run serves until a signal ends it.
func (f *gatewayFlags) run(ctx context.Context, p gatewayPlan) error {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	ignorePipe()
	log := gatewayLog{f.json}
	g, err := f.open(p, log)
	if err != nil {
		return log.failed(err)
	}
	g.start()
	select {
	case err := <-g.served:
		return log.failed(&exit{exitFailed, fmt.Errorf("the gateway cannot serve: %w", err)})
	case s := <-signals:
		return log.failed(g.stop(ctx, s, signals))
	}
}

// open opens the marks, then the addresses.
func (f *gatewayFlags) open(p gatewayPlan, log gatewayLog) (_ *gateway, err error) {
	g := &gateway{gatewayFlags: f, plan: p, log: log, meters: newMeters(), served: make(chan error, 2)}
	if g.marks, err = openMarks(p.marks, marksOptions{wait: marksWait, shared: true, committed: g.meters.committed}); err != nil {
		return nil, refusal(err)
	}
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	if err := g.build(); err != nil {
		return nil, err
	}
	if g.listener, err = net.Listen("tcp", f.listen); err != nil {
		return nil, &exit{exitFailed, fmt.Errorf("--listen: %w", err)}
	}
	if f.admin != "" {
		if g.adminListener, err = net.Listen("tcp", f.admin); err != nil {
			return nil, &exit{exitFailed, fmt.Errorf("--admin: %w", err)}
		}
	}
	return g, nil
}

// gateway is a gateway that runs.
type gateway struct {
	*gatewayFlags
	plan   gatewayPlan
	log    gatewayLog
	meters *meters
	marks  *marks
	gate   *httpfence.Gate
	proxy  http.Handler

	listener, adminListener net.Listener
	server, adminServer     *http.Server
	served                  chan error // gets what ends a server, unless it is shut down

	refused time.Duration // for how long unknown resources are refused from the start on
	known   *time.Timer   // its end; nil where there is none
	health  health
}

// build makes the handler.
func (g *gateway) build() (err error) {
	if !g.marks.complete {
		g.refused = g.refuseUnknown
	}
	if !g.marks.complete && g.refused == 0 {
		if err := g.marks.setComplete(); err != nil {
			return refusal(err)
		}
	}
	g.gate, err = httpfence.NewGate(g.marks, httpfence.GateOptions{Drain: g.drain, RefuseUnknown: g.refused, Settle: g.settle})
	if err != nil {
		return failure(err)
	}
	g.proxy, err = httpfence.NewGateway(httpfence.GatewayOptions{
		Upstream: g.plan.upstream, Gate: g.gate, Resource: g.plan.resource, UpstreamTimeout: g.upstreamTimeout,
		Transport: sending{upstreamTransport()}, Failed: g.failedUpstream,
	})
	if err != nil {
		return failure(err)
	}
	g.health.marks = g.marks
	g.meters.watch(g.gate, g.marks)
	return nil
}

// upstreamTransport has a connection for each request that is at work, and keeps them.
func upstreamTransport() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Proxy = nil // the environment is not for services behind us
	t.MaxIdleConns, t.MaxIdleConnsPerHost = 0, 1024
	t.DisableCompression = true
	return t
}

// headerLimit bounds how long a client takes to say what it wants.
const headerLimit = 10 * time.Second

// start begins to serve, and tells of it.
func (g *gateway) start() {
	errorLog := g.log.errors()
	g.server = &http.Server{Handler: g, TLSConfig: g.plan.tls, ReadHeaderTimeout: headerLimit, IdleTimeout: 3 * time.Minute, ErrorLog: errorLog}
	go func() {
		if g.plan.tls != nil {
			g.served <- g.server.ServeTLS(g.listener, "", "")
		} else {
			g.served <- g.server.Serve(g.listener)
		}
	}()
	if g.adminListener != nil {
		g.adminServer = &http.Server{Handler: g.adminHandler(), ReadTimeout: headerLimit, IdleTimeout: 3 * time.Minute, ErrorLog: errorLog}
		go func() { g.served <- g.adminServer.Serve(g.adminListener) }()
	}
	g.tellStart()
	if g.refused > 0 {
		g.known = time.AfterFunc(g.refused+100*time.Millisecond, g.allKnown) // the gate's own time began before
	}
}

// tellStart says what is guarded, and what is refused at first and why.
func (g *gateway) tellStart() {
	scheme := "http"
	if g.plan.tls != nil {
		scheme = "https"
	}
	e := gatewayEvent{Event: "listening", Address: scheme + "://" + g.listener.Addr().String(), Upstream: g.plan.upstream.String(), Resource: g.resource,
		Marks: g.plan.marks, Resources: new(g.marks.known.Load()), RefuseUnknown: new(g.refused.Seconds())}
	text := fmt.Sprintf("the gateway %s guards %s by %s; marks of %d resources in %s", e.Address, e.Upstream, g.resource, g.marks.known.Load(), g.plan.marks)
	if g.adminListener != nil {
		e.Admin = "http://" + g.adminListener.Addr().String()
		text += "; health and metrics at " + e.Admin
	}
	switch {
	case g.refused > 0 && g.marks.made:
		e.Reason = "the marks file is new, so that marks may be lost"
	case g.refused > 0:
		e.Reason = "no gateway has used the marks file for as long yet"
	}
	g.log.tell(e, text)
	if g.log.json {
		return
	}
	switch {
	case g.refused > 0:
		say("resources without a mark are refused for %v: %s. Where this service is new, --refuse-unknown 0", g.refused, e.Reason)
	case g.marks.made:
		say("the marks file is new, and each resource takes the first token that comes, as --refuse-unknown 0 says")
	}
}

// allKnown ends the time in which unknown resources are refused.
func (g *gateway) allKnown() {
	if err := g.marks.setComplete(); err != nil {
		g.log.tell(gatewayEvent{Event: "failed", Error: err.Error()}, err.Error())
		return
	}
	g.log.tell(gatewayEvent{Event: "complete"}, "resources without a mark are taken from now on")
}

// stop ends the gateway once its requests are done, at most within the limit of a drain.
func (g *gateway) stop(ctx context.Context, s os.Signal, signals <-chan os.Signal) error {
	limit := min(g.drain, maxDrain)
	g.health.stopping.Store(true)
	g.log.tell(gatewayEvent{Event: "stopping"}, fmt.Sprintf("%v: ends when the requests at work are done, at most in %v", s, limit))
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- g.drained(ctx) }()
	select {
	case s := <-signals:
		return &exit{exitSignal + int(s.(syscall.Signal)), errors.New("ended at once by a second signal; requests were cut off, and whether the service has obeyed them is not known")}
	case err := <-done:
		if err != nil {
			return &exit{exitFailed, fmt.Errorf("requests were not done within %v and were cut off; whether the service has obeyed them is not known", limit)}
		}
	}
	g.close()
	return nil
}

// maxDrain bounds the end of the gateway where a drain may last very long.
const maxDrain = time.Hour

// drained waits until all requests are done, also those that have left the server for a
// connection of their own.
func (g *gateway) drained(ctx context.Context) error {
	if err := g.server.Shutdown(ctx); err != nil {
		return err
	}
	for g.gate.Stats().InFlight > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

func (g *gateway) close() {
	if g.known != nil {
		g.known.Stop()
	}
	for _, l := range []net.Listener{g.listener, g.adminListener} {
		if l != nil {
			l.Close()
		}
	}
	g.marks.close()
}
