package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/internal/label"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
	"github.com/holdfast-go/holdfast/store"
)

// patience is how long a statement that writes may go on when its caller has left. What is
// told to end sooner may be executed after all, behind the back of the release that follows.
const patience = 500 * time.Millisecond

// redials is how often at least a statement is sent again that was not sent at all, because the
// pool's connection was dead; and maxRedials how often at most, where more of them are idle there,
// which may all be dead since a restart of the server.
const (
	redials    = 3
	maxRedials = 1000
)

// server is the engine of a database that has a clock of its own, by which leases end. Each
// step is one statement, which commits by itself, and leaves nothing in the session: that
// works through a pooler that changes the connection after each transaction, no process that
// is stopped keeps a row locked, and any isolation level is right.
type server struct {
	db    *sql.DB
	clock leaseClock
	statements
	checked atomic.Bool
}

// statements are the SQL of a server. Those that answer ok have found their row as it must be.
type statements interface {
	name() string
	server() string // as package sqlerr calls it

	// take gives key to owner if nobody has it, and never makes the row. seed makes it.
	take(ctx context.Context, c handle, key, owner, label string, ttl time.Duration) (token int64, ok bool, err error)
	seed(ctx context.Context, c handle, key string) error
	// refresh extends a grant of which only the owner is known.
	refresh(ctx context.Context, c handle, key, owner string, ttl time.Duration) (token int64, ok bool, err error)
	extend(ctx context.Context, c handle, leases []lease) (ok []bool, err error)
	// release answers the row as it was before.
	release(ctx context.Context, c handle, key, owner string) (r row, ok bool, err error)
	breakOff(ctx context.Context, c handle, key, owner, broken, label string) (ok bool, err error)

	// read and list also answer whether the server is one that cannot grant: what a standby
	// has is old.
	read(ctx context.Context, c handle, key string) (r row, standby bool, err error)
	list(ctx context.Context, c handle, after, prefix string) (page []row, standby bool, err error)
	// check refuses what would break promises, and answers the version of the tables.
	check(ctx context.Context, c handle) (version string, standby bool, err error)
	schema() []string

	fault(err error) sqlerr.Kind
	// advice is what to do about an error that the server answered; empty where that is not known.
	advice(err error) string
}

// handle is a connection.
type handle interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func newServerStore(db *sql.DB, o Options, lc leaseClock) *Store {
	var d statements = mysql{}
	if o.Dialect == PostgreSQL {
		d = postgres{notify: o.Listener != nil}
	}
	s := newStore(&server{db: db, clock: lc, statements: d}, lc, d.name(), o.Database)
	s.listener = o.Listener
	return s
}

// Schema returns the statements that make the tables of a server's dialect, for those who do not
// let the programs make them. Each may be run at any time. Of SQLite there are none: its file is
// made by its first user.
func Schema(d Dialect) []string {
	switch d {
	case PostgreSQL:
		return postgres{}.schema()
	case MySQL:
		return mysql{}.schema()
	}
	return nil
}

func errStandby(cause error) error {
	return unavailable("the server is a standby or read-only; connect to the primary", cause)
}

func readOnly(err error) bool {
	switch sqlerr.MySQLNumber(err) {
	case 1290, 1792, 1836, 1036:
		return true
	}
	return sqlerr.SQLState(err) == "25006"
}

// busy says that nothing was written, and the statement may be run again.
func (e *server) busy(err error) bool {
	switch e.fault(err) {
	case sqlerr.Retry, sqlerr.LockWait, sqlerr.Raced:
		return true
	}
	return false
}

// meaning gives an error of the driver its meaning, where nothing was written.
func (e *server) meaning(err error) error {
	text := oneLine(sqlerr.Plain(err))
	if rule := cmp.Or(sqlerr.Entry(err, e.server()), e.advice(err)); rule != "" {
		return badDatabase(rule+": "+text, err)
	}
	if readOnly(err) {
		return errStandby(err)
	}
	switch e.fault(err) {
	case sqlerr.NoTable:
		return badDatabase("must exist and have the tables, which EnsureSchema makes: "+text, err)
	case sqlerr.NoColumn:
		return badDatabase("must have the tables of this program: "+text, err)
	case sqlerr.OutOfRange:
		return errTokensUsedUp(err)
	case sqlerr.Refused, sqlerr.BadValue:
		return badDatabase("refused: "+text, err)
	}
	return unavailable(text, err)
}

// run runs one statement that reads, and again while the database is busy.
func (e *server) run(ctx context.Context, f func(context.Context, handle) error) error {
	return retry(ctx, attempts{e.busy, "others use the row", e.meaning, e.db}, func() error {
		return e.once(ctx, func(c handle) error { return f(ctx, c) })
	})
}

// write runs one statement that writes. Once it was sent, the end of ctx does not stop it at
// once. Where there is no answer, the outcome is uncertain: also where a driver has said that it
// sent nothing (lib/pq says so when the connection ends before the answer) and there is no answer
// on another connection either.
func (e *server) write(ctx context.Context, f func(context.Context, handle) error) error {
	broken := false
	err := retry(ctx, attempts{e.busy, "others use the row", e.meaning, e.db}, func() error {
		return e.once(ctx, func(c handle) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			outlive, end := context.WithCancel(context.WithoutCancel(ctx))
			defer end()
			defer context.AfterFunc(ctx, func() { time.AfterFunc(patience, end) })()
			err := f(outlive, c)
			if unsent(err) {
				broken = true
				return err
			}
			if err == nil || hasKind(err) {
				return err
			}
			switch e.fault(err) {
			case sqlerr.Unknown, sqlerr.Connection:
				if cause := context.Cause(ctx); cause != nil {
					err = errors.Join(cause, err)
				}
				return uncertain(err)
			}
			return err
		})
	})
	if err != nil && broken && !errors.Is(err, store.ErrUncertain) && !errors.Is(err, store.ErrInvalid) {
		return uncertain(err)
	}
	return err
}

// once runs f on a connection, and on another one where nothing was sent.
func (e *server) once(ctx context.Context, f func(handle) error) error {
	for n := 0; ; n++ {
		again := n < redials || e.db.Stats().Idle > 0
		c, err := e.db.Conn(ctx)
		if err != nil {
			return err
		}
		err = f(c)
		c.Close()
		if !unsent(err) || !again || n == maxRedials {
			return err
		}
	}
}

// unsent says that nothing was sent: the driver says so, or the server, which had ended the session
// because it was idle.
func unsent(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || sqlerr.SQLState(err) == "57P05" || sqlerr.MySQLNumber(err) == 4031
}

// usable makes sure that the database has been checked once by this store.
func (e *server) usable(ctx context.Context) error {
	if e.checked.Load() {
		return nil
	}
	return e.ensure(ctx)
}

// ensure makes the tables only where none can be seen: a search path may lead to some that
// CREATE TABLE IF NOT EXISTS would not look at.
func (e *server) ensure(ctx context.Context) error {
	made, err := e.look(ctx)
	if made || err != nil {
		return err
	}
	for _, statement := range e.schema() {
		err := e.write(ctx, func(ctx context.Context, c handle) error {
			_, err := c.ExecContext(ctx, statement)
			return err
		})
		if err != nil {
			return noGrant(err)
		}
	}
	made, err = e.look(ctx)
	if err == nil && !made {
		err = checkVersion("")
	}
	return err
}

// look checks the database. Where made is false, its tables are missing, or another is about to
// make them: the version comes last.
func (e *server) look(ctx context.Context) (made bool, err error) {
	err = e.run(ctx, func(ctx context.Context, c handle) error {
		version, standby, err := e.check(ctx, c)
		switch {
		case err != nil && e.fault(err) == sqlerr.NoTable:
			return nil
		case err != nil:
			return err
		case standby:
			return errStandby(nil)
		case version == "":
			return nil
		}
		made = true
		return checkVersion(version)
	})
	if err == nil && made {
		e.checked.Store(true)
	}
	return made, err
}

func (e *server) read(ctx context.Context, key string) (r row, err error) {
	if err := e.usable(ctx); err != nil {
		return row{}, err
	}
	err = e.run(ctx, func(ctx context.Context, c handle) (err error) {
		var standby bool
		if r, standby, err = e.statements.read(ctx, c, key); err == nil && standby {
			err = errStandby(nil)
		}
		r.key = key
		return err
	})
	return r, err
}

func (e *server) list(ctx context.Context, after, prefix string) (page []row, err error) {
	if err := e.usable(ctx); err != nil {
		return nil, err
	}
	err = e.run(ctx, func(ctx context.Context, c handle) (err error) {
		var standby bool
		if page, standby, err = e.statements.list(ctx, c, after, prefix); err == nil && standby {
			err = errStandby(nil)
		}
		return err
	})
	return page, err
}

// grant takes the key where it is free, by a statement that locks and writes nothing where it
// is not. Then it looks: the key may be missing, another's, or ours since a call that had no
// answer.
func (e *server) grant(ctx context.Context, key, owner string, o store.ClaimOptions) (granted, error) {
	if err := e.usable(ctx); err != nil {
		return granted{}, err
	}
	for range 10 {
		g, ok, err := e.mint(ctx, o.TTL, func(ctx context.Context, c handle) (int64, bool, error) {
			return e.take(ctx, c, key, owner, cutLabel(o.Label), o.TTL)
		})
		if ok || err != nil {
			return g, err
		}
		r, err := e.read(ctx, key)
		switch {
		case err != nil:
			return granted{}, err
		case !r.exists:
			if err := e.write(ctx, func(ctx context.Context, c handle) error { return e.seed(ctx, c, key) }); err != nil {
				return granted{}, noGrant(err)
			}
		case r.live() && r.owner != owner:
			return granted{}, r.held()
		case r.live():
			g, ok, err := e.mint(ctx, o.TTL, func(ctx context.Context, c handle) (int64, bool, error) {
				return e.refresh(ctx, c, key, owner, o.TTL)
			})
			if ok || err != nil {
				return g, err
			}
		}
	}
	return granted{}, unavailable("the row of the key changes at every look", nil)
}

func (e *server) mint(ctx context.Context, ttl time.Duration, f func(context.Context, handle) (int64, bool, error)) (g granted, ok bool, err error) {
	err = e.write(ctx, func(ctx context.Context, c handle) (err error) {
		g.sent, g.until = e.clock.Now(), e.clock.now()+ttl
		g.token, ok, err = f(ctx, c)
		return err
	})
	return g, ok && err == nil, err
}

func (e *server) extend(ctx context.Context, leases []lease) (x extended, err error) {
	if err := e.usable(ctx); err != nil {
		return extended{}, err
	}
	x.errs = make([]error, len(leases))
	for n, round := range rounds(leases) {
		part := make([]lease, len(round))
		for i, at := range round {
			part[i] = leases[at]
		}
		var ok []bool
		err = e.write(ctx, func(ctx context.Context, c handle) (err error) {
			if n == 0 {
				x.sent, x.now = e.clock.Now(), e.clock.now()
			}
			ok, err = e.statements.extend(ctx, c, part)
			return err
		})
		if err != nil {
			return extended{}, err
		}
		for i, at := range round {
			if !ok[i] {
				x.errs[at] = e.gone(ctx, leases[at])
			}
		}
	}
	return x, nil
}

// gone is why a lease was not extended.
func (e *server) gone(ctx context.Context, l lease) error {
	r, err := e.read(ctx, l.key)
	switch {
	case errors.Is(err, store.ErrInvalid): // the session, or the tables, are the reason
		return err
	case err != nil: // it is lost all the same
		r = row{}
	case r.loss(l.owner) == nil && r.token == int64(l.token): // another who adopted it has extended it meanwhile
		return unavailable("the lease was extended by another at the same moment", nil)
	}
	return r.gone(l.owner)
}

// rounds are the places of leases whose keys differ: what a statement answers of a row must not be
// taken for the answer to another lease of the same key, which may be an older one. There is one
// round but where a key comes twice.
func rounds(leases []lease) (all [][]int) {
	seen := make(map[string]int, len(leases))
	for i, l := range leases {
		n := seen[l.key]
		seen[l.key]++
		if n == len(all) {
			all = append(all, nil)
		}
		all[n] = append(all[n], i)
	}
	return all
}

func (e *server) release(ctx context.Context, key, owner string) (r row, err error) {
	if err := e.usable(ctx); err != nil {
		return row{}, err
	}
	var ok bool
	sent := 0
	err = e.write(ctx, func(ctx context.Context, c handle) (err error) {
		sent++
		r, ok, err = e.statements.release(ctx, c, key, owner)
		return err
	})
	if err != nil || ok {
		r.exists, r.key, r.owner = ok, key, owner
		return r, err
	}
	r, err = e.read(ctx, key)
	r.again = sent > 1
	return r, err
}

func (e *server) breakOff(ctx context.Context, key, owner string) error {
	if err := e.usable(ctx); err != nil {
		return err
	}
	for range 10 {
		// What no owner is, and what is broken already, is only looked at.
		if utf8.ValidString(owner) && !strings.Contains(owner, "\x00") && !strings.HasPrefix(owner, brokenBy) {
			var ok bool
			err := e.write(ctx, func(ctx context.Context, c handle) (err error) {
				ok, err = e.statements.breakOff(ctx, c, key, owner, brokenOwner(owner), label.BrokenBy())
				return err
			})
			if ok || err != nil {
				return err
			}
		}
		r, err := e.read(ctx, key)
		if err != nil {
			return err
		}
		if done, err := r.broken(owner); done || err != nil {
			return err
		}
	}
	return unavailable("the row of the key changes at every look", nil)
}
