package main

import (
	"context"
	"database/sql"
	"maps"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/holdfast-go/holdfast/sqlstore"
)

// sqlStoreSpec is what the URL of a database server that keeps locks says:
//
//	postgres://[USER:PASSWORD@]HOST[:PORT][,HOST...]/DATABASE[?notify=1 and those of pgx]
//	mysql://[USER:PASSWORD@]HOST[:PORT]/DATABASE
//
// with the parameters that such a URL of marks has, aside from table and column.
type sqlStoreSpec struct {
	marksSpec
	notify bool // releases wake waiters
}

func isSQLServer(scheme string) bool {
	return scheme == "postgres" || scheme == "postgresql" || scheme == "mysql"
}

// parseSQLStore reads the URL of a database server. What it refuses is an [*store.InvalidError]
// that shows no password.
func parseSQLStore(raw string) (sqlStoreSpec, error) {
	scheme, rest, _ := strings.Cut(raw, ":")
	if scheme == "postgresql" {
		scheme = "postgres"
	}
	s := sqlStoreSpec{marksSpec: marksSpec{storeSpec: storeSpec{field: "store"}}}
	rule := "must be the URL of a database server: postgres://HOST/DATABASE or mysql://HOST/DATABASE"
	if isSQLServer(scheme) {
		if rest, rule = s.takeNotify(scheme, rest); rule == "" {
			rule = s.parseSQL(scheme, rest)
		}
	}
	if rule != "" {
		return sqlStoreSpec{}, refuseStore(raw)(rule)
	}
	return s, nil
}

// takeNotify takes its parameter out of the URL.
func (s *sqlStoreSpec) takeNotify(scheme, rest string) (_, rule string) {
	head, query, _ := strings.Cut(rest, "?")
	own, others := splitParameters(query, "notify")
	switch {
	case own == "":
		return rest, ""
	case scheme != "postgres":
		return "", "takes no notify, which only PostgreSQL does"
	case own != "notify=1" && own != "notify=0":
		return "", "notify must be 1 or 0, and given once"
	}
	s.notify = own == "notify=1"
	if others != "" {
		head += "?" + others
	}
	return head, ""
}

// sqlFiles are the parameters of pgx that name files.
func (s marksSpec) sqlFiles() (names []string) {
	for _, name := range []string{"passfile", "servicefile", "sslrootcert", "sslcert", "sslkey"} {
		if path := s.query.Get(name); path != "" && (path != "system" || name != "sslrootcert") {
			names = append(names, name)
		}
	}
	return names
}

// absoluteFiles makes the names of files good for other folders.
func (s *sqlStoreSpec) absoluteFiles() error {
	s.query = maps.Clone(s.query)
	for _, name := range s.sqlFiles() {
		abs, err := filepath.Abs(s.query.Get(name))
		if err != nil {
			return &exit{exitFailed, err}
		}
		s.query.Set(name, abs)
	}
	return s.absolute()
}

func (s *marksSpec) fromFile(maxTTL time.Duration, trust bool) error {
	for _, name := range s.sqlFiles() {
		if path := s.query.Get(name); !filepath.IsAbs(path) {
			return s.refuse(relativePath(path))
		}
	}
	return s.storeSpec.fromFile(maxTTL, trust)
}

func (s sqlStoreSpec) url() string {
	values := maps.Clone(s.query)
	if values == nil {
		values = url.Values{}
	}
	for name, value := range map[string]string{"password-file": s.passwordFile, "tls": s.tls, "tls-ca": s.ca, "tls-cert": s.cert,
		"tls-key": s.key, "tls-server-name": s.serverName} {
		if value != "" {
			values.Set(name, value)
		}
	}
	if s.notify {
		values.Set("notify", "1")
	}
	text := s.scheme + "://" + userinfo(s.user, s.password) + hostList(s.addrs) + s.urlPath()
	if len(values) > 0 {
		text += "?" + values.Encode()
	}
	return text
}

// open opens a database; nothing is sent yet.
func (s sqlStoreSpec) open() (*opened, error) {
	if err := s.absoluteFiles(); err != nil {
		return nil, err
	}
	o := sqlstore.Options{Dialect: sqlstore.MySQL, Database: sortedHosts(s.addrs) + "/" + s.database}
	var db *sql.DB
	var err error
	if s.scheme == "postgres" {
		o.Dialect = sqlstore.PostgreSQL
		db, err = s.openPostgresStore(&o)
	} else {
		db, err = s.openMySQL()
	}
	if err != nil {
		return nil, err
	}
	st, err := sqlstore.New(db, o)
	if err != nil {
		db.Close()
		return nil, err
	}
	return &opened{Store: st, spec: s.url(), close: func() { db.Close() }}, nil
}

// openPostgresStore prepares no statement, unless the URL says so, since a pooler may be on the
// way, and connects to the one of several hosts that takes writes.
func (s sqlStoreSpec) openPostgresStore(o *sqlstore.Options) (*sql.DB, error) {
	c, err := s.pgxConfig()
	if err != nil {
		return nil, err
	}
	if !s.query.Has("default_query_exec_mode") {
		c.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	if strings.Contains(s.addrs, ",") && !s.query.Has("target_session_attrs") {
		c.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	}
	if s.addrs == "" || s.database == "" { // pgx has found them elsewhere
		o.Database = net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))) + "/" + c.Database
	}
	if s.notify {
		o.Listener = pgListener{c}
	}
	return stdlib.OpenDB(*c), nil
}

func sortedHosts(addrs string) string {
	list := strings.Split(addrs, ",")
	slices.Sort(list)
	return strings.Join(list, ",")
}

// pgListener listens over a connection of its own.
type pgListener struct{ config *pgx.ConnConfig }

func (l pgListener) Listen(ctx context.Context, channel string, deliver func(payload string)) error {
	conn, err := pgx.ConnectConfig(ctx, l.config)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
		return err
	}
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		deliver(n.Payload)
	}
}
