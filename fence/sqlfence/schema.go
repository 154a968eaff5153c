package sqlfence

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/internal/sqlerr"
)

// EnsureSchema makes the guard's own table, or checks the one that is there; with
// [Options].Column it makes nothing, and checks the user's table. It may be called at any
// time, by many processes at once. Other methods check the table too, once, unless
// the guard is [Options].Unchecked; they make none.
//
// A table or a column that is missing, a column that cannot hold every int64, an ID that is
// not unique, and a pool of MySQL with autocommit off are refused by a [*fence.InvalidError].
func (g *Guard) EnsureSchema(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return g.loop(ctx, "", func() (next, error) {
		err := g.ensure(ctx)
		if err == nil {
			return finish, nil
		}
		if g.fault(err) == sqlerr.Raced {
			return repeat, err
		}
		return g.early(ctx, "", err)
	})
}

func (g *Guard) ensure(ctx context.Context) error {
	_, err := race(ctx, g.answerWait(), nil, func(ctx context.Context) (none struct{}, err error) {
		found, err := g.e.columns(ctx, g.db)
		if err != nil || !g.l.own {
			return none, err
		}
		if len(found) == 0 {
			for _, statement := range g.e.create() {
				if _, err := g.db.ExecContext(ctx, statement); err != nil {
					return none, err
				}
			}
		}
		return none, nil
	}, nil)
	if err != nil {
		return err
	}
	if err := g.check(ctx, g.db); err != nil || !g.l.own {
		return err
	}
	return g.stamp(ctx)
}

// stamp writes the version of the table into it, unless it is there.
func (g *Guard) stamp(ctx context.Context) error {
	r, err := g.look(ctx, g.db, versionRow, unlocked, false)
	if err != nil || r.exists && r.token != 0 {
		return err
	}
	_, err = race(ctx, g.answerWait(), nil, func(ctx context.Context) (none struct{}, err error) {
		if err := g.e.seed(ctx, g.db, versionRow); err != nil {
			return none, err
		}
		_, err = g.db.ExecContext(ctx, fmt.Sprintf("UPDATE %s SET token = %d, seq = %d WHERE resource = '' AND token = 0",
			g.l.table.quoted, schemaVersion, g.use()))
		return none, err
	}, nil)
	return err
}

// use is what the table was made for, which is the seq of its version's row.
func (g *Guard) use() int64 {
	if g.counts {
		return 1
	}
	return 0
}

// found is where it is noted that the check has passed on such a handle.
func (g *Guard) found(h Handle) *atomic.Bool {
	if _, pool := h.(*sql.DB); pool {
		return &g.ok
	}
	return &g.okIn
}

func (g *Guard) known(h Handle) bool { return g.ok.Load() || g.found(h).Load() }

// checked checks the table the first time, where that is asked for.
func (g *Guard) checked(ctx context.Context, h Handle) error {
	switch {
	case g.known(h):
		return nil
	case g.o.Unchecked:
		return g.learn(ctx, h)
	}
	return g.check(ctx, h)
}

// learn is the part of the check that comes before the first statement of all.
func (g *Guard) learn(ctx context.Context, h Handle) error {
	if g.known(h) {
		return nil
	}
	_, err := race(ctx, g.lockWait, nil, func(ctx context.Context) (none struct{}, err error) { return none, g.e.learn(ctx, h) }, nil)
	return err
}

func (g *Guard) check(ctx context.Context, h Handle) error {
	found, err := race(ctx, g.lockWait, nil, func(ctx context.Context) ([]column, error) { return g.e.columns(ctx, h) }, nil)
	if err != nil {
		return err
	}
	if err := g.l.fits(found, g.o.Dialect == PostgreSQL, g.noTable()); err != nil {
		return err
	}
	if g.l.own {
		r, err := g.look(ctx, h, versionRow, unlocked, false)
		if err != nil {
			return err
		}
		if r.token != 0 && r.seq != g.use() {
			return &fence.InvalidError{Field: "table", Value: g.l.table.given,
				Rule: "guards and sequences must have different tables: this one is of the other kind"}
		}
		if r.token > schemaVersion {
			return &fence.InvalidError{Field: "table", Value: g.l.table.given,
				Rule: fmt.Sprintf("is of version %d, made by a newer version of this package, which knows version %d", r.token, schemaVersion)}
		}
	}
	g.found(h).Store(true)
	return nil
}

// needs lists the columns that the table must have.
func (l *layout) needs() string {
	wide := []string{l.tokName}
	for _, name := range []string{l.seqName, l.prevTok, l.prevSqN} {
		if name != "" {
			wide = append(wide, name)
		}
	}
	return "unique column " + l.idName + ", and of type BIGINT (SQLite: INTEGER) " + strings.Join(wide, ", ")
}

// fits says what is wrong with the table, whose columns were found.
func (l *layout) fits(found []column, exact bool, missing *fence.InvalidError) error {
	if len(found) == 0 {
		return missing
	}
	if found[0].trouble != "" {
		return &fence.InvalidError{Field: "table", Value: l.table.given, Rule: found[0].trouble}
	}
	for _, name := range []string{l.idName, l.tokName, l.seqName, l.prevTok, l.prevSqN} {
		if name == "" {
			continue
		}
		c, ok := find(found, name, exact)
		rule := ""
		switch {
		case !ok:
			rule = "table " + l.table.given + " has no such column"
		case name == l.idName && !c.unique:
			rule = "must have a unique index of its own, since it names the resource"
		case name != l.idName && !c.wide:
			rule = "must hold every int64, so be of type BIGINT (SQLite: INTEGER), is " + strings.ToLower(c.typ)
		default:
			continue
		}
		return &fence.InvalidError{Field: "column", Value: name, Rule: rule}
	}
	return nil
}

func find(columns []column, name string, exact bool) (column, bool) {
	for _, c := range columns {
		if c.name == name || !exact && strings.EqualFold(c.name, name) {
			return c, true
		}
	}
	return column{}, false
}

// listColumns reads name, type, whether the column is unique, and one more text, which
// finish takes.
func listColumns(ctx context.Context, h Handle, query string, args []any, finish func(*column, string)) ([]column, error) {
	rows, err := h.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var list []column
	for rows.Next() {
		var c column
		var more string
		if err := rows.Scan(&c.name, &c.typ, &c.unique, &more); err != nil {
			return nil, err
		}
		finish(&c, more)
		list = append(list, c)
	}
	return list, rows.Err()
}
