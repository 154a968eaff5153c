package main

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/rueidis"
	clientv3 "go.etcd.io/etcd/client/v3"
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
	switch u.Scheme {
	case "redis":
		return openRedis(raw)
	case "etcd":
		return openEtcd(u)
	case "zk":
		return openZooKeeper(u)
	case "postgres":
		return openPostgreSQL(u)
	case "mysql":
		return openMySQL(u)
	}
	return nil, nil, fmt.Errorf("%s: unknown scheme; there are sqlite:, redis://, etcd://, zk://, postgres:// and mysql://", u.Redacted())
}

func openSQLite(path string) (store.Store, func(), error) {
	dsn, err := sqlstore.SQLiteDSN(path)
	if err != nil {
		return nil, nil, err
	}
	return openSQL("sqlite", dsn, sqlstore.SQLite, path)
}

func openPostgreSQL(u *url.URL) (store.Store, func(), error) {
	q := u.Query()
	q.Set("default_query_exec_mode", "exec") // a pooler may be on the way
	dsn := *u
	dsn.RawQuery = q.Encode()
	return openSQL("pgx", dsn.String(), sqlstore.PostgreSQL, u.Host+u.Path)
}

func openMySQL(u *url.URL) (store.Store, func(), error) {
	c := mysql.NewConfig()
	c.User, c.Net, c.Addr, c.DBName = u.User.Username(), "tcp", u.Host, strings.TrimPrefix(u.Path, "/")
	c.Passwd, _ = u.User.Password()
	return openSQL("mysql", c.FormatDSN(), sqlstore.MySQL, u.Host+u.Path)
}

func openSQL(driver, dsn string, dialect sqlstore.Dialect, name string) (store.Store, func(), error) {
	db, err := sql.Open(driver, dsn)
	if err != nil {
		return nil, nil, err
	}
	s, err := sqlstore.New(db, sqlstore.Options{Dialect: dialect, Database: name})
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	return s, func() { db.Close() }, nil
}

// openRedis opens one server. Several servers make a Redlock: redlock.New takes their nodes.
func openRedis(raw string) (store.Store, func(), error) {
	o, err := rueidis.ParseURL(raw)
	if err != nil {
		return nil, nil, err
	}
	node, err := rueidisnode.Dial(o)
	if err != nil {
		return nil, nil, err
	}
	s, err := redlock.New(redlock.Options{}, node)
	return s, func() { node.Close() }, err
}

func openEtcd(u *url.URL) (store.Store, func(), error) {
	c := clientv3.Config{Username: u.User.Username(), DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second, DialTimeout: 5 * time.Second}
	c.Password, _ = u.User.Password()
	for host := range strings.SplitSeq(u.Host, ",") {
		c.Endpoints = append(c.Endpoints, "http://"+host)
	}
	client, err := clientv3.New(c)
	if err != nil {
		return nil, nil, err
	}
	s, err := etcdstore.New(client, etcdstore.Options{})
	return s, func() { client.Close() }, err
}

func openZooKeeper(u *url.URL) (store.Store, func(), error) {
	o := zkstore.Options{Servers: strings.Split(u.Host, ","), Chroot: u.Path, User: u.User.Username()}
	o.Password, _ = u.User.Password()
	s, err := zkstore.Dial(o)
	if err != nil {
		return nil, nil, err
	}
	return s, s.Close, nil
}
