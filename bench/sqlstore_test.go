package bench

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
)

// leaser is a database as a store of locks.
type leaser struct {
	name, driver, params string
	dialect              sqlstore.Dialect
	start                func(testing.TB, ...servertest.SQLOption) *servertest.SQLServer
}

var leasers = []leaser{
	{"PostgreSQL", "pgx", "", sqlstore.PostgreSQL, servertest.PostgreSQL},
	{"MariaDB", "mysql", "?interpolateParams=true", sqlstore.MySQL, servertest.MariaDB},
}

// pool opens connections of their own, as another process would.
func (l leaser) pool(b testing.TB, server *servertest.SQLServer) *sql.DB {
	db, err := sql.Open(l.driver, server.DSN("")+l.params)
	if err != nil {
		b.Fatal(err)
	}
	db.SetMaxIdleConns(goroutines)
	db.SetMaxOpenConns(goroutines)
	b.Cleanup(func() { db.Close() })
	return db
}

func (l leaser) locker(b testing.TB, db *sql.DB, o sqlstore.Options) *holdfast.Locker {
	o.Dialect, o.Database = l.dialect, "server/holdfast"
	s, err := sqlstore.New(db, o)
	if err != nil {
		b.Fatal(err)
	}
	locks, err := holdfast.New(s, &holdfast.Options{TTL: ttl})
	if err != nil {
		b.Fatal(err)
	}
	return locks
}

// BenchmarkSQLStore compares a pair, which is two commits, with one bare commit that updates one
// row. Every commit but that of a release reaches the disk, where the database can tell them
// apart. Hand-overs are compared with those of pglock, which sleeps for a lease between two
// looks: 3.6 s were measured with a lease of 4 s, the default being 20 s.
func BenchmarkSQLStore(b *testing.B) {
	for _, l := range leasers {
		b.Run(l.name, func(b *testing.B) {
			server := l.start(b, servertest.Durable())
			db := l.pool(b, server)
			pairs := []contender{overLocker("pairs", l.locker(b, db, sqlstore.Options{})), l.updates(b, db)}
			for i := range manyKeys { // make the row
				if _, err := pairs[0].pair(pairs[0].key(i)); err != nil {
					b.Fatal(err)
				}
			}
			line := "SQLStore/" + l.name
			b.Run("Sequential", func(b *testing.B) {
				once(b, func() {
					s := sequential(b, pairs)
					figure(b, line+"/Sequential", "updates/pair", s.ratios("update", "pairs", cycleTime)...)
					figure(b, line+"/Sequential", "p50-us", s.values("pairs", cycleTime)...)
				})
			})
			b.Run("Parallel64", func(b *testing.B) {
				once(b, func() {
					s := parallel(b, pairs)
					figure(b, line+"/Parallel64", "pairs/update", s.ratios("pairs", "update", rateOf)...)
					figure(b, line+"/Parallel64", "pairs/s", s.values("pairs", rateOf)...)
				})
			})
			b.Run("HandOver", func(b *testing.B) {
				once(b, func() { l.handOvers(b, server, line+"/HandOver", sqlstore.Options{}) })
			})
			if l.dialect == sqlstore.PostgreSQL {
				b.Run("Notified", func(b *testing.B) {
					once(b, func() {
						l.handOvers(b, server, line+"/Notified", sqlstore.Options{Listener: listener(server.DSN(""))})
					})
				})
			}
		})
	}
}

// updates are bare commits.
func (l leaser) updates(b *testing.B, db *sql.DB) contender {
	if _, err := db.Exec("CREATE TABLE bare (id varchar(128) PRIMARY KEY, n bigint NOT NULL)"); err != nil {
		b.Fatal(err)
	}
	e := engine{dialect: engines[1].dialect}
	if l.dialect == sqlstore.PostgreSQL {
		e.dialect = engines[0].dialect
	}
	c := contender{name: "update"}
	for i := range manyKeys {
		if _, err := db.Exec(fmt.Sprintf("INSERT INTO bare VALUES ('%s', 0)", c.key(i))); err != nil {
			b.Fatal(err)
		}
	}
	statement := e.sql("UPDATE %s SET n = n + 1 WHERE id = ?", "bare")
	return pair("update", func(key string) (func() error, error) {
		ctx, cancel := context.WithTimeout(background, time.Minute) // as any program's
		defer cancel()
		_, err := db.ExecContext(ctx, statement, key)
		return func() error { return nil }, err
	})
}

// pglock is how many hand-overs it does in a second.
const pglock = 1 / 3.6

// handOvers measures how often in a second a key goes to another process: from one to one that
// waits, and through 16 that wait.
func (l leaser) handOvers(b *testing.B, server *servertest.SQLServer, line string, o sqlstore.Options) {
	const crowd = 16
	var lockers []*holdfast.Locker
	for range crowd + 1 {
		lockers = append(lockers, l.locker(b, l.pool(b, server), o))
	}
	var one, many, ratios []float64
	for range repetitions() {
		one = append(one, handOver(b, lockers[:2]))
		many = append(many, handOver(b, lockers))
		ratios = append(ratios, one[len(one)-1]/pglock)
	}
	figure(b, line, "rate/pglock", ratios...)
	figure(b, line, "from-one/s", one...)
	figure(b, line, "through-16/s", many...)
}

// handOver has the first locker hold until the others have waited for a while, and each of
// those release at once.
func handOver(b *testing.B, lockers []*holdfast.Locker) (perSecond float64) {
	lease, err := lockers[0].Acquire(background, "handed over")
	if err != nil {
		b.Fatal(err)
	}
	var wg sync.WaitGroup
	for _, locks := range lockers[1:] {
		wg.Go(func() {
			lease, err := locks.Acquire(background, "handed over")
			if err == nil {
				err = lease.Release(background)
			}
			if err != nil {
				b.Error(err)
			}
		})
	}
	time.Sleep(2 * time.Second)
	start := time.Now()
	if err := lease.Release(background); err != nil {
		b.Fatal(err)
	}
	wg.Wait()
	return float64(len(lockers)-1) / time.Since(start).Seconds()
}

// listener is a [sqlstore.Listener].
type listener string

func (l listener) Listen(ctx context.Context, channel string, deliver func(payload string)) error {
	conn, err := pgx.Connect(ctx, string(l))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "LISTEN "+channel); err != nil {
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
