package main

import (
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/holdfast-go/holdfast/store"
)

const marksVariable = "HOLDFAST_MARKS"

// marksSpec is the URL of marks, taken apart:
//
//	file:PATH
//	sqlite:PATH[?table=TABLE|?column=TABLE.ID.TOKEN]
//	postgres://..., mysql://...   the same parameters, and those of the database
//	redis://..., redis+sentinel://..., redis+cluster://...[?prefix=PREFIX]
//
// Of its store field the scheme may also be file, postgres and mysql. While it is read, field is
// set only where it is the URL of a store; see [parseSQLStore].
type marksSpec struct {
	storeSpec
	table  string     // of the marks
	column *columnRef // the marks are in the user's table
	prefix string     // of Redis keys
	tls    string     // of MySQL: what the driver knows by this name
	query  url.Values // for pgx
}

// columnRef says where marks are in a table of the user.
type columnRef struct{ table, id, token string }

const marksSchemes = "file:PATH, sqlite:PATH, postgres://HOST/DATABASE, mysql://HOST/DATABASE, redis://HOST"

// secret reports whether the URL holds a password itself.
func (s marksSpec) secret() bool {
	return s.storeSpec.secret() || s.query.Has("password") || s.query.Has("sslpassword")
}

// parseMarks reads the URL of marks. What it refuses is an [*store.InvalidError] that shows no
// password.
func parseMarks(raw string) (marksSpec, error) {
	scheme, rest, ok := strings.Cut(raw, ":")
	if scheme == "postgresql" {
		scheme = "postgres"
	}
	s := marksSpec{}
	refuse := func(rule string) error {
		return &store.InvalidError{Field: "marks", Value: hideSecrets(raw), Rule: rule}
	}
	var rule string
	switch {
	case !ok:
		rule = "must be a URL: " + marksSchemes
	case scheme == "file":
		s.path, rule = parsePath(scheme, rest)
	case scheme == "sqlite":
		head, query, _ := strings.Cut(rest, "?")
		if s.path, rule = parsePath(scheme, head); rule == "" {
			rule = s.takeParameters(query)
		}
	case scheme == "postgres", scheme == "mysql":
		rule = s.parseSQL(scheme, rest)
	case isRedis(scheme):
		err := s.parseRedis(scheme, rest, refuse)
		if err != nil {
			return marksSpec{}, err
		}
	default:
		rule = "unknown scheme; marks are in " + marksSchemes
	}
	if rule != "" {
		return marksSpec{}, refuse(rule)
	}
	s.scheme, s.field = scheme, "marks"
	return s, nil
}

// parseRedis reads what [parseRedis] reads, and the prefix.
func (s *marksSpec) parseRedis(scheme, rest string, refuse func(rule string) error) (err error) {
	head, query, _ := strings.Cut(rest, "?")
	own, others := splitParameters(query, "prefix")
	if others != "" {
		head += "?" + others
	}
	s.storeSpec, err = parseRedis(scheme, head, refuse)
	switch {
	case err != nil:
		return err
	case s.maxTTL != 0 || s.trustRestarts != nil:
		return refuse("takes no max-ttl and no trust-restarts: they belong to locks")
	}
	values, err := url.ParseQuery(own)
	if err != nil || len(values["prefix"]) > 1 || own != "" && values.Get("prefix") == "" {
		return refuse("prefix must be given once, and not be empty")
	}
	s.prefix = values.Get("prefix")
	return nil
}

// splitParameters takes the parameters of a name out of a query.
func splitParameters(query, name string) (own, others string) {
	var mine, rest []string
	for p := range strings.SplitSeq(query, "&") {
		if p == name || strings.HasPrefix(p, name+"=") {
			mine = append(mine, p)
		} else if p != "" {
			rest = append(rest, p)
		}
	}
	return strings.Join(mine, "&"), strings.Join(rest, "&")
}

// parseSQL reads what follows the scheme of a database server and its colon, and returns the
// rule that it breaks.
func (s *marksSpec) parseSQL(scheme, rest string) (rule string) {
	u, hosts, rule := splitHosts(scheme, rest)
	if rule != "" {
		return rule
	}
	s.setUser(u.User)
	s.database = strings.TrimPrefix(u.Path, "/")
	if scheme == "postgres" {
		rule = s.setPostgres(hosts)
	} else {
		rule = s.setMySQL(hosts)
	}
	switch {
	case rule != "":
		return rule
	case strings.ContainsAny(s.database, "/\x00"):
		return "the path must be the name of a database, such as /app"
	case strings.ContainsAny(s.user+s.password, "\x00"):
		return "user and password have no NUL"
	}
	s.scheme = scheme
	return s.takeParameters(u.RawQuery)
}

// setPostgres takes the hosts, of which there may be none: pgx then looks where libpq does.
func (s *marksSpec) setPostgres(hosts string) (rule string) {
	if hosts == "" {
		return ""
	}
	addrs := strings.Split(hosts, ",")
	for i, h := range addrs {
		if addrs[i], rule = hostPort(h, "5432"); rule != "" {
			return rule
		}
	}
	s.addrs = strings.Join(addrs, ",")
	return ""
}

func (s *marksSpec) setMySQL(host string) (rule string) {
	if s.database == "" {
		return "names no database: write mysql://HOST/DATABASE"
	}
	s.addrs, rule = hostPort(host, "3306")
	return rule
}

// takeParameters takes the parameters of a database, and leaves the others of PostgreSQL to pgx.
func (s *marksSpec) takeParameters(query string) (rule string) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return "its parameters cannot be read: write special characters as %XX"
	}
	for _, name := range []string{"table", "column", "password-file", "tls", "tls-ca", "tls-cert", "tls-key", "tls-server-name"} {
		given, ok := values[name]
		if !ok {
			continue
		}
		switch {
		case len(given) != 1:
			return "parameter " + name + " is given more than once"
		case given[0] == "":
			return "parameter " + name + " is empty"
		case strings.IndexByte(given[0], 0) >= 0:
			return "parameter " + name + " has a NUL"
		}
		if rule := s.takeParameter(name, given[0]); rule != "" {
			return rule
		}
		values.Del(name)
	}
	switch {
	case len(values) > 0 && s.scheme != "postgres":
		return "has a parameter that does not exist; " + s.parameters()
	case s.table != "" && s.column != nil:
		return "has a table and a column: give one"
	case s.password != "" && s.passwordFile != "":
		return "has a password and a password-file: give one"
	case (s.cert == "") != (s.key == ""):
		return "tls-cert and tls-key belong together"
	case s.tls == "false" && s.ca+s.cert+s.serverName != "":
		return "takes no tls- parameters beside tls=false"
	case (s.tls == "skip-verify" || s.tls == "preferred") && s.ca+s.serverName != "":
		return "tls-ca and tls-server-name are for a certificate that is verified: leave tls=" + s.tls + " out"
	}
	s.query = values
	return ""
}

// parameters says which parameters there are.
func (s *marksSpec) parameters() string {
	if s.field != "" && s.scheme == "mysql" { // a store
		return "there are password-file, tls, tls-ca, tls-cert, tls-key and tls-server-name"
	}
	if s.scheme == "mysql" {
		return "there are table, column, password-file, tls, tls-ca, tls-cert, tls-key and tls-server-name"
	}
	return "there are table and column"
}

func (s *marksSpec) takeParameter(name, value string) (rule string) {
	switch {
	case s.field != "" && (name == "table" || name == "column"):
		return "takes no " + name + ", which is for marks"
	case name == "table":
		s.table = value
	case name == "column":
		parts := strings.Split(value, ".")
		if len(parts) < 3 || slices.Contains(parts, "") {
			return "column must be TABLE.ID.TOKEN: the table, its column that holds the name of the resource, and that which holds the mark"
		}
		last := len(parts) - 2
		s.column = &columnRef{strings.Join(parts[:last], "."), parts[last], parts[last+1]}
	case s.scheme == "": // sqlite
		return "has a parameter that does not exist; " + s.parameters()
	case name == "password-file":
		s.passwordFile = value
	case s.scheme == "postgres":
		return name + " is sslmode, sslrootcert, sslcert and sslkey here, as with psql"
	case name != "tls":
		*s.text(name) = value
	case !slices.Contains([]string{"true", "false", "skip-verify", "preferred"}, value):
		return "tls must be true, false, skip-verify or preferred"
	default:
		s.tls = value
	}
	return ""
}

// marksURL is the marks that the flag, else the environment, else the configuration file names.
func marksURL(flag string) (marksSpec, error) {
	for _, raw := range []string{flag, strings.Trim(os.Getenv(marksVariable), blanks)} {
		if raw != "" {
			return parseMarks(raw)
		}
	}
	c, err := loadConfig()
	if err != nil {
		return marksSpec{}, err
	}
	if c.marks == nil {
		return marksSpec{}, usage("no marks are named: give --marks or set %s, such as file:/var/lib/backup/marks", marksVariable)
	}
	return *c.marks, nil
}
