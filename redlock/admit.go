package redlock

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/holdfast-go/holdfast/store"
)

// Admission (docs/protocol.md, section 3): VOTE is only ever sent by EVALSHA, and a server
// process has the script only after a client found it old enough to have outlived every
// promise that it may have forgotten. The text carries the replication id for which it was
// admitted, which changes with every restart and promotion.

// admitted holds the VOTE scripts with which the servers behind a node were admitted: one,
// or one for each slot of a Cluster that was used.
type admitted struct {
	single    atomic.Pointer[voteScript]
	isCluster atomic.Bool
	turn      chan struct{} // one admission at a time
	bySlot    sync.Map      // uint16 -> *voteScript
}

// admissionSteps is what an admission needs of node timeouts: it connects, and asks five
// things one after the other. A round does not wait for that longer than for a vote.
const admissionSteps = 8

// load returns the script for a key, or nil where its server was not admitted yet.
func (a *admitted) load(key string) *voteScript {
	if !a.isCluster.Load() {
		return a.single.Load()
	}
	v, _ := a.bySlot.Load(slotOf(key))
	s, _ := v.(*voteScript)
	return s
}

func (a *admitted) save(key string, cluster bool, s *voteScript) {
	if cluster {
		a.bySlot.Store(slotOf(key), s)
	} else {
		a.single.Store(s)
	}
	a.isCluster.Store(cluster)
}

// script returns the VOTE script for a key's server, admitting it at first contact.
func (p *peer) script(key string) (*voteScript, error) {
	if s := p.admitted.load(key); s != nil {
		return s, nil
	}
	return p.readmit(key, nil)
}

// readmit admits the server of a key, unless another caller has done so since it had the
// script known.
func (p *peer) readmit(key string, known *voteScript) (*voteScript, error) {
	p.admitted.turn <- struct{}{}
	defer func() { <-p.admitted.turn }()
	if s := p.admitted.load(key); s != nil && s != known {
		return s, nil
	}
	if err := p.usable(); err != nil { // another caller has just found out
		return nil, notAsked{err}
	}
	ctx, cancel := context.WithTimeout(context.Background(), admissionSteps*p.s.opts.NodeTimeout)
	defer cancel()
	var s *voteScript
	var cluster bool
	var err error
	if p.s.opts.TrustRestarts {
		s, err = p.trust(ctx)
	} else {
		s, cluster, err = p.admit(ctx, key)
	}
	if err != nil {
		if known == nil {
			err = closedAtOnce(err)
		}
		err = permanent(p.name, key, err)
		p.note(err, p.s.clock.Now()) // a silence of its own: those who wait for their turn shall not ask again at once
		return nil, notAsked{err}    // no VOTE was sent
	}
	p.note(nil, p.s.clock.Now())
	p.admitted.save(key, cluster, s)
	return s, nil
}

// trust compares the record only: nothing is asked of the server's age, and the script is
// sent by EVAL where the server does not know it.
func (p *peer) trust(ctx context.Context) (*voteScript, error) {
	replied := make(chan Reply, 1)
	go func() {
		replied <- p.run(Call{Script: p.s.scripts.record, Keys: []string{recordKey}, Args: p.s.recordArgs(true)})[0]
	}()
	select {
	case r := <-replied:
		if err := p.checkRecord(r.Value, r.Err); err != nil {
			return nil, err
		}
	case <-ctx.Done():
		return nil, errNoAnswer{p.s.opts.NodeTimeout}
	}
	return newVote("", checkNone, p.s.opts.MaxTTL), nil
}

// admit asks a server who it is, and since when, and loads the script for it.
func (p *peer) admit(ctx context.Context, key string) (*voteScript, bool, error) {
	type admission struct {
		id     identity
		script *voteScript
	}
	a, err := pinned(ctx, p, key, func(do func(args ...string) (any, error)) (a admission, err error) {
		if a.id, err = p.identify(do); err != nil || a.id.cluster {
			return a, err
		}
		if err = p.admitRecord(do, a.id); err == nil {
			a.script, err = p.loadScript(do, a.id)
		}
		return a, err
	})
	if err != nil || !a.id.cluster {
		return a.script, false, err
	}
	// On a Cluster the records may live on another server than the key.
	_, err = pinned(ctx, p, recordKey, func(do func(args ...string) (any, error)) (struct{}, error) {
		return struct{}{}, p.admitRecord(do, a.id)
	})
	if err != nil {
		return nil, true, err
	}
	script, err := pinned(ctx, p, key, func(do func(args ...string) (any, error)) (*voteScript, error) {
		return p.loadScript(do, a.id)
	})
	return script, true, err
}

// identity is what INFO says of a server.
type identity struct {
	runID, replid string
	uptime        time.Duration
	promoted      bool // was a replica, or loaded the history of replication
	cluster       bool
	checks        check
}

// identify reads INFO and refuses a server that must not be a node.
func (p *peer) identify(do func(args ...string) (any, error)) (identity, error) {
	info := map[string]string{}
	for _, section := range []string{"server", "replication"} {
		sent := p.s.clock.Now()
		v, err := do("INFO", section)
		if err != nil {
			if codeOf(err) == "NOPERM" {
				return identity{}, refuse(p.name, oneLine(err.Error())+"; "+rights+". TrustRestarts needs no INFO")
			}
			return identity{}, err
		}
		text, _ := v.(string)
		parseInfo(text, info)
		if now, err := strconv.ParseInt(info["server_time_usec"], 10, 64); err == nil && section == "server" {
			p.s.learn(p, now, p.s.clock.Since(sent))
		}
	}
	id := identity{
		runID:    info["run_id"],
		replid:   info["master_replid"],
		promoted: info["second_repl_offset"] != "-1",
		cluster:  info["redis_mode"] == "cluster",
		checks:   checkAlways,
	}
	seconds, err := strconv.ParseInt(info["uptime_in_seconds"], 10, 64)
	if info["redis_mode"] == "sentinel" {
		return identity{}, refuse(p.name, "is a Sentinel, which keeps no keys; connect to the master that it names")
	}
	if err != nil || id.runID == "" || id.replid == "" || !isHex(id.replid) {
		return identity{}, refuse(p.name, "does not tell its run_id, master_replid and uptime_in_seconds; set TrustRestarts to use it all the same")
	}
	id.uptime = time.Duration(seconds) * time.Second
	if info["role"] != "master" {
		of := "is a replica of " + info["master_host"] + ":" + info["master_port"]
		if p.wasPrimary.Load() {
			return identity{}, errors.New(of + " since a failover; a node must be a primary")
		}
		replica := refuse(p.name, of+"; a node must be a primary")
		if !p.s.contacted.Load() {
			replica = misconfigured{replica}
		}
		return identity{}, replica
	}
	p.wasPrimary.Store(true)
	if other, taken := p.s.runIDs.LoadOrStore(id.runID, p.name); taken && other != p.name && !id.cluster {
		return identity{}, misconfigured{refuse(p.name, fmt.Sprintf("is the same server as %v; each node must be a server of its own", other))}
	}
	if knownSince7(info) && !id.cluster {
		id.checks = checkCached
	}
	return id, nil
}

// knownSince7 reports whether the server neither writes scripts to its AOF nor replicates
// them: Redis 7 and later. Other servers claim a redis_version too, and name themselves by
// server_name or by a version of their own.
func knownSince7(info map[string]string) bool {
	for k := range info {
		if k == "server_name" || strings.HasSuffix(k, "_version") && k != "redis_version" && k != "gcc_version" {
			return false
		}
	}
	major, _, _ := strings.Cut(info["redis_version"], ".")
	n, err := strconv.Atoi(major)
	return err == nil && n >= 7
}

func parseInfo(text string, into map[string]string) {
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		if k, v, found := strings.Cut(lines.Text(), ":"); found {
			into[k] = strings.TrimSpace(v)
		}
	}
}

func isHex(s string) bool {
	return strings.Trim(s, "0123456789abcdef") == ""
}

func (s *Store) recordArgs(write bool) []string {
	args := []string{strconv.FormatInt(s.opts.MaxTTL.Milliseconds(), 10), "0", "0"}
	if s.opts.TrustRestarts {
		args[1] = "1"
	}
	if write {
		args[2] = "1"
	}
	return args
}

// admitRecord compares the node's record, asks for the age, and writes the record of a
// server that is old enough and has none.
func (p *peer) admitRecord(do func(args ...string) (any, error), id identity) error {
	eval := func(s *Script, key string, args ...string) (any, error) {
		return do(append([]string{"EVAL", s.Text, "1", key}, args...)...)
	}
	if err := p.checkRecord(eval(p.s.scripts.record, recordKey, p.s.recordArgs(false)...)); err != nil {
		return err
	}
	age := id.uptime
	if id.promoted {
		v, err := eval(p.s.scripts.promoted, promotedKey, id.replid)
		if err != nil {
			return err
		}
		us, isInt := v.(int64)
		if !isInt {
			return errReply
		}
		age = min(age, max(0, time.Duration(us)*time.Microsecond))
	}
	if q := p.s.quarantine(); age < q && !off(ruleP) {
		return &YoungError{Age: age, VotesIn: q - age}
	}
	return p.checkRecord(eval(p.s.scripts.record, recordKey, p.s.recordArgs(true)...))
}

// checkRecord refuses a node whose clients work by other terms.
func (p *peer) checkRecord(v any, err error) error {
	if err != nil {
		return err
	}
	r, isArray := v.([]any)
	if !isArray || len(r) != 2 {
		return errReply
	}
	args := p.s.recordArgs(false)
	for i, term := range []func(string) string{maxTTLTerm, trustTerm} {
		if got, _ := r[i].(string); got != args[i] {
			return misconfigured{refuse(p.name, fmt.Sprintf("is used with %s, and this client has %s; to change it stop all clients, delete the key %s and wait for %v",
				term(got), term(args[i]), recordKey, p.s.quarantine()))}
		}
	}
	return nil
}

// maxTTLTerm and trustTerm say for people what the record holds.
func maxTTLTerm(ms string) string { return "MaxTTL " + ms + "ms" }

func trustTerm(trust string) string {
	return map[string]string{"0": "TrustRestarts off", "1": "TrustRestarts on"}[trust]
}

// loadScript gives the server the scripts that only an admitted one has.
func (p *peer) loadScript(do func(args ...string) (any, error), id identity) (*voteScript, error) {
	s := newVote(id.replid, id.checks, p.s.opts.MaxTTL)
	for _, script := range []*Script{s.release, s.Script} {
		v, err := do("SCRIPT", "LOAD", script.Text)
		if err != nil {
			return nil, err
		}
		if sum, _ := v.(string); sum != script.SHA1 {
			return nil, errReply
		}
	}
	return s, nil
}

// contact meets every node before the store's first vote, so that a replica, a server
// given twice and clients that disagree are refused at once and not only when their turn
// comes. It waits for each node for at most the node timeout, and once in the store's life.
func (s *Store) contact(ctx context.Context, key string) error {
	if !s.contacted.Load() {
		s.meet.Do(func() { go s.meetAll(store.Trace(ctx), key) })
		select {
		case <-s.met:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return s.refusal(key)
}

func (s *Store) meetAll(trace func(store.NodeEvent), key string) {
	began := s.clock.Now()
	met := make(chan *peer, len(s.peers))
	missing := map[*peer]bool{}
	for _, p := range s.peers {
		missing[p] = true
		go func() {
			sent := s.clock.Now()
			_, err := p.script(key)
			outcome := ok
			if err != nil {
				outcome = noAnswer
			}
			p.tell(trace, "admit", "", outcome, err, sent)
			met <- p
		}()
	}
	limit := time.NewTimer(s.opts.NodeTimeout)
	defer limit.Stop()
	for late := false; len(missing) > 0 && !late; {
		select {
		case p := <-met:
			delete(missing, p)
		case <-limit.C:
			late = true
		}
	}
	for p := range missing {
		p.note(errNoAnswer{s.opts.NodeTimeout}, began)
	}
	s.contacted.Store(true)
	close(s.met)
}

// refusal returns why the store is not put together right, where that was found. It stands
// until the node that was refused is found mended: it is asked again from time to time.
func (s *Store) refusal(key string) error {
	for _, p := range s.peers {
		err, again := p.refusal()
		if again {
			go p.reconsider(key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
