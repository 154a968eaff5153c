package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

const storeVariable = "HOLDFAST_STORE"

// storeHelp is for the help of every verb that has storeFlags.
func storeHelp() string {
	var b strings.Builder
	b.WriteString("Stores:\n")
	for _, k := range storeKinds {
		b.WriteString(k.help)
	}
	return b.String() + storeTerms
}

const storeTerms = `Parameters of URLs, after ? and with & between them:
  password-file=PATH       the password is the line in this file
  tls-ca=PATH              the authority that signs the server's certificate (else the system's)
  tls-cert=PATH, tls-key=PATH   certificate that the server asks of its clients
  tls-server-name=NAME     name in the server's certificate (else the host)
Parameters of one kind of store:
  redis     max-ttl=30s, trust-restarts=1         the flags of these names
            sentinel-user=USER, sentinel-password=PASSWORD,
            sentinel-password-file=PATH           of the Sentinels
  etcd      epoch=N       a larger one after each restore of the cluster from a snapshot
            cluster=NAME  the cluster's name, where its clients reach it by different hosts
  zk        session-timeout=30s   twice the longest ttl; a holder that dies keeps the others
            waiting for about as long
  postgres  notify=1      releases wake waiters; and the parameters of psql, such as
            sslmode, sslrootcert, sslcert and sslkey in place of those of TLS
  mysql     tls=true, false, skip-verify or preferred
Without --ttl it is 15s, or the nearest that the store keeps. An etcd cluster keeps one from 2s
on, rounded up to whole seconds; with a user in its URL, holdfast logs in first where the
cluster has logins on, and ends where it cannot.
Special characters are written as %XX: / ? # % @ in a password are %2F %3F %23 %25 %40, and
in a path ? # % are %3F %23 %25.
Everybody on the machine can read a command line: a password belongs into HOLDFAST_STORE, the
configuration file or a password-file, not into --store.

Without --store it is HOLDFAST_STORE (URLs with spaces between them), else the store of the
configuration file, else the SQLite file holdfast/locks.db in $XDG_STATE_HOME or
~/.local/state (root: /var/lib), which excludes the processes of one user.

The configuration file is $HOLDFAST_CONFIG, else holdfast/config.toml in $XDG_CONFIG_HOME or
~/.config (not for root), else /etc/holdfast/config.toml. One file is read; flags come first:
  store = "redis://HOST"   or a list: ["redis://A", "redis://B", "redis://C"]
  ttl = "15s"              --ttl
  label = "TEXT"           --label
  max-ttl = "30s"          of the file's store
  trust-restarts = true    of the file's store
  marks = "URL"            --marks of holdfast fence
One that holds a password must not be readable by everybody.`

// storeFlags say which store, and what belongs to its deployment.
type storeFlags struct {
	urls          []string
	maxTTL        time.Duration
	trustRestarts bool
	warn          func(text string) // nil for a line of text
}

func (f storeFlags) warning(text string) {
	if f.warn != nil {
		f.warn(text)
		return
	}
	say("%s", text)
}

// opened is a store that is ready for use.
type opened struct {
	store.Store
	// spec names the store for a nested holdfast: what HOLDFAST_STORE of the command says.
	// It holds the password, if there is one.
	spec  string
	close func()
	// pause is called before this process is stopped, and its result when it goes on. It is nil where
	// a process that has stopped is in nobody's way.
	pause func() (resume func())
}

// open opens the store that the flags, else the environment, else the configuration file,
// else the default name. It refuses what is wrong without I/O on the store.
func (f storeFlags) open() (*opened, error) {
	list, err := f.targets()
	if err != nil {
		return nil, err
	}
	if servers := redisServers(list); len(servers) > 0 {
		return openRedis(servers, f)
	}
	if f.maxTTL != 0 || f.trustRestarts {
		return nil, list[0].refuse("takes no --max-ttl and no --trust-restarts; they belong to redis://")
	}
	return list[0].open()
}

// targets are the URLs of the store to open: one, or several of Redis servers.
func (f storeFlags) targets() ([]target, error) {
	if len(f.urls) > 0 {
		return parseStores(f.urls)
	}
	if urls := splitStores(os.Getenv(storeVariable)); len(urls) > 0 {
		return parseStores(urls)
	}
	c, err := loadConfig()
	if err != nil {
		return nil, err
	}
	if path := unreadConfig(); path != "" {
		warnUnread.Do(func() {
			f.warning(path + " is not read for root, and so the store may be another; set " + configVariable + " to it, or move it to /etc/holdfast/config.toml")
		})
	}
	if len(c.stores) > 0 {
		return c.stores, nil
	}
	path, err := defaultPath()
	if err != nil {
		return nil, &exit{exitFailed, err}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, &exit{exitFailed, fmt.Errorf("the folder of the default store cannot be made: %w; set %s or give --store", err, storeVariable)}
	}
	return []target{&storeSpec{scheme: "sqlite", path: path}}, nil
}

const blanks = " \t\r\n"

// splitStores reads HOLDFAST_STORE: one SQLite store, whose path may hold spaces, or
// URLs with spaces between them.
func splitStores(s string) []string {
	s = strings.Trim(s, blanks) // the end of a line in a file of settings is no part of a path
	if strings.HasPrefix(s, "sqlite:") {
		return []string{s}
	}
	return strings.Fields(s)
}

// parseStores reads URLs that together are one store.
func parseStores(urls []string) ([]target, error) {
	var list []target
	for _, u := range urls {
		t, err := parseStore(u)
		if err != nil {
			return nil, err
		}
		list = append(list, t)
	}
	return list, checkJoined(list)
}

// checkJoined refuses stores that cannot be one.
func checkJoined(list []target) error {
	for _, t := range list {
		if len(list) > 1 && !isRedis(t.kind()) {
			return t.refuse("cannot be joined with another store; several stores are several Redis servers, and the members of a cluster stand in one URL with commas between them")
		}
	}
	return nil
}

// target is the URL of a store, taken apart.
type target interface {
	kind() string // one of the schemes of storeKinds
	// shown is the store as people may see it, without user, password and parameters.
	shown() string
	// url writes the store for a nested holdfast, with the password, unless that is in a file.
	url() string
	// secret reports whether the URL holds a password itself.
	secret() bool
	refuse(rule string) error
	// fromFile gives it the terms that stand beside it in a configuration file. It refuses names of
	// files that depend on where holdfast is started.
	fromFile(maxTTL time.Duration, trust bool) error
	// open opens the store. Servers of Redis are opened together, by openRedis.
	open() (*opened, error)
}

// storeKind is a row of the table of stores.
type storeKind struct {
	schemes []string
	form    string // for the refusal of what is no store
	help    string // lines
	parse   func(raw string) (target, error)
}

// storeKinds are all stores that the command knows, by the schemes of their URLs.
var storeKinds = []storeKind{
	{[]string{"sqlite"}, "sqlite:PATH", `  sqlite:PATH              a file: all processes of this machine
`, reading(parseSQLite)},
	{[]string{"redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"},
		"redis://HOST, redis+sentinel://HOST,HOST/MASTER, redis+cluster://HOST,HOST (with rediss for TLS)",
		`  redis://[USER:PASSWORD@]HOST[:PORT][/DB]                  one Redis server
  redis+sentinel://[USER:PASSWORD@]HOST[:PORT],.../MASTER[/DB]  what Sentinels watch
  redis+cluster://[USER:PASSWORD@]HOST[:PORT],...           a Redis Cluster
  rediss://, rediss+sentinel://, rediss+cluster://          the same with TLS
  several of redis, one --store each       Redlock: a lock needs more than half of them
`, reading(parseRedisStore)},
	{[]string{"etcd", "etcds"}, "etcd://HOST (etcds for TLS)",
		`  etcd://[USER:PASSWORD@]HOST[:PORT],...[/PREFIX/]          an etcd cluster; etcds:// with TLS
`, reading(parseEtcd)},
	{[]string{"zk", "zks"}, "zk://HOST (zks for TLS)",
		`  zk://[USER:PASSWORD@]HOST[:PORT],...[/CHROOT]             a ZooKeeper ensemble, without tickets;
                                                            zks:// with TLS
`, reading(parseZK)},
	{[]string{"postgres", "postgresql"}, "postgres://HOST/DATABASE",
		`  postgres://[USER:PASSWORD@]HOST[:PORT],...[/DATABASE]     a table in PostgreSQL
`, reading(parseSQLStore)},
	{[]string{"mysql"}, "mysql://HOST/DATABASE",
		`  mysql://[USER:PASSWORD@]HOST[:PORT]/DATABASE              a table in MySQL or MariaDB
`, reading(parseSQLStore)},
}

// reading makes a target of what parse reads.
func reading[S any, T interface {
	*S
	target
}](parse func(raw string) (S, error)) func(raw string) (target, error) {
	return func(raw string) (target, error) {
		s, err := parse(raw)
		if err != nil {
			return nil, err
		}
		return T(&s), nil
	}
}

// schemes is a list of all stores, for refusals.
func schemes() string {
	var forms []string
	for _, k := range storeKinds {
		forms = append(forms, k.form)
	}
	last := len(forms) - 1
	return strings.Join(forms[:last], ", ") + " and " + forms[last]
}

// storeSpec is a store's URL, taken apart.
type storeSpec struct {
	scheme string // one of those of storeKinds
	path   string // of the SQLite file
	field  string // what it is the URL of, for errors; empty for a store
	redisSpec
}

func (s storeSpec) kind() string { return s.scheme }

func (s storeSpec) shown() string {
	if s.path != "" {
		return s.scheme + ":" + escapePath(s.path)
	}
	return s.scheme + "://" + hostList(s.addrs) + s.urlPath()
}

func (s storeSpec) refuse(rule string) error {
	return &store.InvalidError{Field: cmp.Or(s.field, "store"), Value: s.shown(), Rule: rule}
}

// hideSecrets cuts user, password and parameters out of a URL, which need not be valid.
func hideSecrets(raw string) string {
	scheme, rest, ok := strings.Cut(raw, "://")
	if !ok {
		if i := strings.LastIndexByte(raw, '@'); i >= 0 {
			return "***" + raw[i:]
		}
		if i := strings.Index(strings.ToLower(raw), "password"); i >= 0 { // of what is no URL, such as host=h password=p
			return raw[:i] + "***"
		}
		return raw
	}
	tail := ""
	if i := strings.IndexAny(rest, "?#"); i >= 0 {
		rest, tail = rest[:i], rest[i:]
	}
	if strings.Contains(tail, "@") { // the ? may be one of the password
		return scheme + "://***"
	}
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		rest = "***" + rest[at:]
	} else if i := strings.IndexByte(rest, ':'); i >= 0 && strings.Trim(rest[i:], ":0123456789,/[]") != "" && !strings.ContainsAny(rest, "[,") {
		rest = rest[:i] + ":***" // what looks like a port may be the first half of a password that has a space
	}
	return scheme + "://" + rest
}

// parseStore reads the URL of a store. What it refuses is an [*store.InvalidError] that
// shows no password.
func parseStore(raw string) (target, error) {
	scheme, _, ok := strings.Cut(raw, ":")
	for _, k := range storeKinds {
		if ok && slices.Contains(k.schemes, scheme) {
			return k.parse(raw)
		}
	}
	rule := "unknown scheme; stores are " + schemes()
	switch {
	case !ok:
		rule = "must be a URL: " + schemes()
	case scheme == "mem":
		rule = "a store in memory keeps out nobody, since each holdfast is a process of its own: use sqlite:PATH for one machine"
	}
	return nil, refuseStore(raw)(rule)
}

// refuseStore makes errors about the URL of a store.
func refuseStore(raw string) func(rule string) error {
	return func(rule string) error {
		return &store.InvalidError{Field: "store", Value: hideSecrets(raw), Rule: rule}
	}
}

// parseSQLite reads "sqlite:PATH".
func parseSQLite(raw string) (storeSpec, error) {
	scheme, rest, _ := strings.Cut(raw, ":")
	path, rule := parsePath(scheme, rest)
	if rule != "" {
		return storeSpec{}, refuseStore(raw)(rule)
	}
	return storeSpec{scheme: scheme, path: path}, nil
}

// parsePath reads the path of a file behind a scheme and its colon, and returns the rule that it
// breaks.
func parsePath(scheme, path string) (_, rule string) {
	if after, ok := strings.CutPrefix(path, "//"); ok {
		if !strings.HasPrefix(after, "/") {
			return "", "a file has no host: write " + scheme + ":PATH, or " + scheme + ":///PATH with a path from the root"
		}
		path = after
	}
	if strings.ContainsAny(path, "?#") {
		return "", "has no parameters; in a path write ? as %3F and # as %23"
	}
	path, err := url.PathUnescape(path)
	switch {
	case err != nil:
		return "", "its path cannot be read: write % as %25"
	case path == "":
		return "", "names no file"
	case strings.IndexByte(path, 0) >= 0:
		return "", "a path has no NUL"
	}
	return path, ""
}

// escapePath writes a path so that splitStores and parseSQLite read it.
func escapePath(path string) string {
	if last := len(path) - 1; last >= 0 && strings.IndexByte(blanks, path[last]) >= 0 {
		return escapePath(path[:last]) + fmt.Sprintf("%%%02X", path[last])
	}
	if rest, ok := strings.CutPrefix(path, "//"); ok { // which would begin a host
		return "%2F/" + pathEscaper.Replace(rest)
	}
	return pathEscaper.Replace(path)
}

var pathEscaper = strings.NewReplacer("%", "%25", "?", "%3F", "#", "%23")

func (s storeSpec) url() string {
	if s.scheme == "sqlite" {
		return "sqlite:" + escapePath(s.path)
	}
	return s.redisURL(s.maxTTL, s.trustRestarts != nil && *s.trustRestarts)
}

func (s storeSpec) open() (*opened, error) {
	if isRedis(s.scheme) {
		return openRedis([]storeSpec{s}, storeFlags{})
	}
	return openSQLite(s.path)
}

// openSQLite opens the file at path, and makes it where it is missing.
func openSQLite(path string) (*opened, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, &exit{exitFailed, err}
	}
	if _, err := os.Stat(filepath.Dir(path)); err != nil {
		advice := ""
		if errors.Is(err, fs.ErrNotExist) {
			advice = "; make the folder first"
		}
		return nil, &exit{exitFailed, errors.New("the folder of the store cannot be used: " + err.Error() + advice)}
	}
	if err := noFolder(path); err != nil {
		return nil, &exit{exitFailed, fmt.Errorf("the store cannot be used: %w", err)}
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
	return &opened{
		Store: st, spec: storeSpec{scheme: "sqlite", path: path}.url(),
		close: func() { db.Close() }, pause: func() func() { return pauseSQLite(db) },
	}, nil
}

// noFolder refuses a path at which there is something else than a file.
func noFolder(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil || info.Mode().IsRegular():
		return nil
	case info.IsDir():
		return fmt.Errorf("%s is a folder; name a file in it, such as %s", path, filepath.Join(path, "locks.db"))
	}
	return fmt.Errorf("%s is no file", path)
}

// pauseSQLite sees to it that no transaction is open while the process is stopped, since that would
// keep all others from writing. It waits for a moment only.
func pauseSQLite(db *sql.DB) (resume func()) {
	db.SetMaxOpenConns(1)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn, err := db.Conn(ctx)
	if err != nil {
		return func() {}
	}
	return func() { conn.Close() }
}

// splitHosts takes apart what follows the scheme and its colon, for a store that has several hosts: the
// URL with one host in their place, and the hosts; or the rule that it breaks.
func splitHosts(scheme, rest string) (u *url.URL, hosts, rule string) {
	rest, ok := strings.CutPrefix(rest, "//")
	if !ok {
		return nil, "", "names no host: write " + scheme + "://HOST"
	}
	authority := rest
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		authority = rest[:i]
	}
	rest = rest[len(authority):]
	userinfo, hosts := "", authority
	if i := strings.LastIndexByte(authority, '@'); i >= 0 {
		userinfo, hosts = authority[:i+1], authority[i+1:]
	}
	switch { // before anything of it is shown
	case strings.Contains(rest, "@"):
		return nil, "", "write special characters of the password as %XX: / ? # @ are %2F %3F %23 %40"
	case strings.Contains(rest, "#"):
		return nil, "", "has no fragment: write # in a password as %23"
	}
	u, err := url.Parse("//" + userinfo + "host" + rest)
	if err != nil { // its text repeats the URL with the password
		return nil, "", "is not a valid URL: write special characters of the password as %XX"
	}
	return u, hosts, ""
}

// memberText are the parameters, taken as they are, of stores whose members are one cluster.
func (s *storeSpec) memberText(name string) *string {
	if strings.HasPrefix(name, "sentinel-") {
		return nil
	}
	return s.text(name)
}

// memberParameters writes them.
func (s *storeSpec) memberParameters(into url.Values) {
	for _, name := range []string{"password-file", "tls-ca", "tls-cert", "tls-key", "tls-server-name"} {
		if v := *s.memberText(name); v != "" {
			into.Set(name, v)
		}
	}
}

// checkMembers compares the parts with each other. tls is the scheme of the same store over TLS.
func (s *storeSpec) checkMembers(tls string) (rule string) {
	switch {
	case s.password != "" && s.passwordFile != "":
		return "has a password and a password-file: give one"
	case s.user != "" && s.password == "" && s.passwordFile == "":
		return "has a user without a password: write USER:PASSWORD@, or name a password-file"
	case s.user == "" && s.password+s.passwordFile != "":
		return "has a password without a user: write USER:PASSWORD@"
	case s.scheme != tls && s.ca+s.cert+s.key+s.serverName != "":
		return "takes no tls- parameters: TLS is " + tls + "://"
	case (s.cert == "") != (s.key == ""):
		return "tls-cert and tls-key belong together"
	}
	return ""
}

// readParameters reads a query: each parameter once, with a value. there says which there are.
func readParameters(query, there string, known func(name string) bool, set func(name, value string) (rule string)) (rule string) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return "its parameters cannot be read: write special characters as %XX"
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		switch v := values[name]; {
		case !known(name):
			return "has no parameter " + strconv.Quote(name) + "; " + there
		case len(v) != 1:
			return "parameter " + name + " is given more than once"
		case v[0] == "":
			return "parameter " + name + " is empty"
		case strings.IndexByte(v[0], 0) >= 0:
			return "parameter " + name + " has a NUL"
		default:
			if rule := set(name, v[0]); rule != "" {
				return rule
			}
		}
	}
	return ""
}

// setMembers takes a list with commas, each with the port where it has none.
func (s *storeSpec) setMembers(list, port string) (rule string) {
	var addrs []string
	for host := range strings.SplitSeq(list, ",") {
		addr, rule := hostPort(host, port)
		if rule != "" {
			return rule
		}
		addrs = append(addrs, addr)
	}
	s.addrs = strings.Join(addrs, ",")
	return ""
}
