package main

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/rueidis"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	_ "modernc.org/sqlite"

	"github.com/holdfast-go/holdfast/etcdstore"
	"github.com/holdfast-go/holdfast/redlock"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
	"github.com/holdfast-go/holdfast/zkstore"
)

// open opens the store of a URL. A program that always has the same store needs one of these
// functions only, and the module that belongs to it.
func open(raw string) (s store.Store, closeStore func(), err error) {
	if path, ok := strings.CutPrefix(raw, "sqlite:"); ok {
		return openSQLite(path)
	}
	u, err := url.Parse(raw)
	if err != nil {
		return nil, nil, errors.New("a URL of a store cannot be read") // the reason would show the password
	}
	k, ok := kinds[u.Scheme]
	if !ok {
		return nil, nil, fmt.Errorf("%s: unknown scheme; there are sqlite:, redis://, etcd://, zk://, postgres:// and mysql://", shown(u))
	}
	if err := k.check(u); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", shown(u), err)
	}
	return k.open(u)
}

// shown is what of a URL may be shown: neither user nor parameters.
func shown(u *url.URL) string { return u.Scheme + "://" + u.Host }

// kind is what a URL of one scheme may say.
type kind struct {
	open       func(u *url.URL) (store.Store, func(), error)
	hosts      bool                          // more than one
	parameters func(name, value string) bool // nil: none
}

var kinds = map[string]kind{
	"redis":    {open: openRedis},
	"etcd":     {open: openEtcd, hosts: true, parameters: isEpoch},
	"zk":       {open: openZooKeeper, hosts: true},
	"postgres": {open: openPostgreSQL, hosts: true, parameters: isOfPgx},
	"mysql":    {open: openMySQL},
}

func isEpoch(name, value string) bool {
	_, err := strconv.Atoi(value)
	return name == "epoch" && err == nil
}

// isOfPgx lets pgx read everything but what is holdfast's own.
func isOfPgx(name, value string) bool {
	return name == "notify" && (value == "0" || value == "1") || name != "notify" && name != "password-file"
}

// check refuses what the URL says and nobody here reads: a lock that is not where the URL says
// excludes nobody.
func (k kind) check(u *url.URL) error {
	values, err := url.ParseQuery(u.RawQuery)
	switch {
	case err != nil:
		return errors.New("its parameters cannot be read")
	case u.Host == "":
		return errors.New("names no host")
	case u.Fragment != "":
		return errors.New("has a #, which this program does not read")
	case !k.hosts && strings.Contains(u.Host, ","):
		return errors.New("names several hosts, of which this program reads one")
	}
	for name, list := range values {
		if len(list) != 1 || k.parameters == nil || !k.parameters(name, list[0]) {
			return fmt.Errorf("this program does not read the parameter %s, or not with that value; holdfast --store may", name)
		}
	}
	return nil
}

func openSQLite(path string) (store.Store, func(), error) {
	if strings.ContainsAny(path, "%?#") || strings.HasPrefix(path, "//") {
		return nil, nil, fmt.Errorf("sqlite:%s: this program takes a path without %%, ? and #, and without // at its beginning", path)
	}
	dsn, err := sqlstore.SQLiteDSN(path)
	if err != nil {
		return nil, nil, err
	}
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, nil, err
	}
	return openSQL(db, sqlstore.Options{Dialect: sqlstore.SQLite, Database: path})
}

func openPostgreSQL(u *url.URL) (store.Store, func(), error) {
	q := u.Query()
	o := sqlstore.Options{Dialect: sqlstore.PostgreSQL, Database: u.Host + u.Path}
	notify := q.Get("notify") == "1"
	q.Del("notify")
	dsn := *u
	dsn.RawQuery = q.Encode()
	c, err := pgx.ParseConfig(dsn.String())
	if err != nil {
		return nil, nil, fmt.Errorf("%s: pgx does not take the URL; look at its parameters", shown(u))
	}
	c.DefaultQueryExecMode = pgx.QueryExecModeExec // a pooler may be on the way
	if notify {
		o.Listener = listener{c}
	}
	return openSQL(stdlib.OpenDB(*c), o)
}

func openMySQL(u *url.URL) (store.Store, func(), error) {
	c := mysql.NewConfig()
	c.User, c.Net, c.Addr, c.DBName = u.User.Username(), "tcp", u.Host, strings.TrimPrefix(u.Path, "/")
	c.Passwd, _ = u.User.Password()
	db, err := sql.Open("mysql", c.FormatDSN())
	if err != nil {
		return nil, nil, err
	}
	return openSQL(db, sqlstore.Options{Dialect: sqlstore.MySQL, Database: u.Host + u.Path})
}

func openSQL(db *sql.DB, o sqlstore.Options) (store.Store, func(), error) {
	s, err := sqlstore.New(db, o)
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	return s, func() { db.Close() }, nil
}

// openRedis opens one server. Several servers make a Redlock: redlock.New takes their nodes.
func openRedis(u *url.URL) (store.Store, func(), error) {
	o, err := rueidis.ParseURL(u.String())
	if err != nil {
		return nil, nil, fmt.Errorf("%s: its path must be / and the number of a database", shown(u))
	}
	node, err := rueidisnode.Dial(o)
	if err != nil {
		return nil, nil, err
	}
	s, err := redlock.New(redlock.Options{}, node)
	if err != nil {
		node.Close()
		return nil, nil, err
	}
	return s, func() { node.Close() }, nil
}

// openEtcd gives the client no logger: it would log each call that meets no server, and errors tell
// of them anyway.
func openEtcd(u *url.URL) (store.Store, func(), error) {
	c := clientv3.Config{Username: u.User.Username(), DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second,
		DialTimeout: 5 * time.Second, Logger: zap.NewNop()}
	c.Password, _ = u.User.Password()
	for host := range strings.SplitSeq(u.Host, ",") {
		if !strings.Contains(host[strings.LastIndex(host, "]")+1:], ":") {
			host += ":2379"
		}
		c.Endpoints = append(c.Endpoints, "http://"+host)
	}
	client, err := clientv3.New(c)
	if err != nil {
		return nil, nil, err
	}
	var o etcdstore.Options
	if strings.Trim(u.Path, "/") != "" {
		o.Prefix = strings.TrimSuffix(u.Path, "/") + "/"
	}
	o.Epoch, _ = strconv.Atoi(u.Query().Get("epoch"))
	s, err := etcdstore.New(client, o)
	if err != nil {
		client.Close()
		return nil, nil, err
	}
	return s, func() { client.Close() }, nil
}

func openZooKeeper(u *url.URL) (store.Store, func(), error) {
	o := zkstore.Options{Servers: strings.Split(u.Host, ","), Chroot: strings.TrimSuffix(u.Path, "/"), User: u.User.Username()}
	o.Password, _ = u.User.Password()
	s, err := zkstore.Dial(o)
	if err != nil {
		return nil, nil, err
	}
	return s, s.Close, nil
}
