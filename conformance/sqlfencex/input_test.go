package sqlfencex

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
)

// wantInvalid fails unless err is a typed one of one line that names what is wrong.
func wantInvalid(t *testing.T, what string, err error, names string) {
	t.Helper()
	var invalid *fence.InvalidError
	if !errors.As(err, &invalid) || !strings.Contains(err.Error(), names) || strings.Contains(err.Error(), "\n") {
		t.Errorf("%s: %v, want an *InvalidError that names %q", what, err, names)
	}
}

// calls are all that may be the first call of a guard.
func calls(t *testing.T, db *sql.DB, g *sqlfence.Guard, resource string, token fence.Token) map[string]func() error {
	ctx := kit.Context(t, time.Minute)
	in := func(call func(context.Context, sqlfence.Handle, ...sqlfence.Mark) error) func() error {
		return func() error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback()
			return call(ctx, tx, sqlfence.Mark{Resource: resource, Token: token})
		}
	}
	return map[string]func() error{
		"Tx": func() error {
			return g.Tx(ctx, resource, token, func(*sql.Tx) error { t.Error("fn was called"); return nil })
		},
		"Claim":   func() error { return g.Claim(ctx, resource, token) },
		"Check":   func() error { return g.Check(ctx, resource, token) },
		"ClaimIn": in(g.ClaimIn),
		"CheckIn": in(g.CheckIn),
	}
}

func TestBadTables(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		e.makeDoc(t, db)
		e.addDoc(t, db, "a")
		key, other := "varchar(40) PRIMARY KEY", "varchar(40)"
		makes := map[string]string{
			"narrow":  "CREATE TABLE narrow (id " + key + ", last_token smallint, last_seq bigint)",
			"float":   "CREATE TABLE float1 (id " + key + ", last_token double precision, last_seq bigint)",
			"text":    "CREATE TABLE text1 (id " + key + ", last_token varchar(40), last_seq bigint)",
			"seq":     "CREATE TABLE seq1 (id " + key + ", last_token bigint, last_seq varchar(40))",
			"no key":  "CREATE TABLE nokey (id " + other + ", last_token bigint, last_seq bigint)",
			"two key": "CREATE TABLE twokey (id " + other + ", x bigint, last_token bigint, last_seq bigint, PRIMARY KEY (id, x))",
			"view":    "CREATE VIEW view1 AS SELECT * FROM doc",
			"weird":   "CREATE TABLE " + map[bool]string{true: "`we\"ird`", false: `"we""ird"`}[e.dialect == sqlfence.MySQL] + " (id " + key + ", last_token bigint, last_seq bigint)",
		}
		for _, statement := range makes {
			must(t, db, statement)
		}
		table := func(name string) *sqlfence.Column { c := column(); c.Table = name; return c }
		with := func(change func(*sqlfence.Column)) *sqlfence.Column { c := column(); change(c); return c }
		type test struct {
			o     sqlfence.Options
			names string
		}
		tests := map[string]test{
			"no own table":      {sqlfence.Options{Table: "missing"}, "missing"},
			"no schema":         {sqlfence.Options{Table: "nowhere.missing"}, "nowhere.missing"},
			"another own table": {sqlfence.Options{Table: "doc"}, "resource"},
			"no table":          {sqlfence.Options{Column: table("missing")}, "missing"},
			"no ID":             {sqlfence.Options{Column: with(func(c *sqlfence.Column) { c.ID = "nope" })}, "nope"},
			"no Token":          {sqlfence.Options{Column: with(func(c *sqlfence.Column) { c.Token = "nope" })}, "nope"},
			"no Seq":            {sqlfence.Options{Column: with(func(c *sqlfence.Column) { c.Seq = "nope" })}, "nope"},
			"hostile column":    {sqlfence.Options{Column: with(func(c *sqlfence.Column) { c.Token = "v = 1; DROP TABLE doc; --`\"'" })}, "DROP"},
			"float":             {sqlfence.Options{Column: table("float1")}, "last_token"},
			"text":              {sqlfence.Options{Column: table("text1")}, "last_token"},
			"seq":               {sqlfence.Options{Column: table("seq1")}, "last_seq"},
			"no key":            {sqlfence.Options{Column: table("nokey")}, "id"},
			"two keys":          {sqlfence.Options{Column: table("twokey")}, "id"},
			"view":              {sqlfence.Options{Column: table("view1")}, ""},
		}
		if e.dialect != sqlfence.SQLite { // whose SMALLINT has 64 bits
			tests["narrow"] = test{sqlfence.Options{Column: table("narrow")}, "last_token"}
		}
		if e.dialect == sqlfence.MySQL {
			must(t, db, "CREATE TABLE myisam (id "+key+", last_token bigint, last_seq bigint) ENGINE=MyISAM")
			tests["MyISAM"] = test{sqlfence.Options{Column: table("myisam")}, "InnoDB"}
		}
		for name, tt := range tests {
			if tt.o.Table != "missing" && tt.o.Table != "nowhere.missing" {
				wantInvalid(t, name+": EnsureSchema", e.guard(t, db, tt.o).EnsureSchema(t.Context()), tt.names)
			}
			for op, call := range calls(t, db, e.guard(t, db, tt.o), "a", math.MaxInt64) {
				wantInvalid(t, name+": "+op, call(), tt.names)
				call = calls(t, db, e.guard(t, db, tt.o), "a", math.MaxInt64)[op] // no call before
				wantInvalid(t, name+": "+op+" first", call(), tt.names)
			}
		}
		if n := number(t, db, "SELECT COUNT(*) FROM doc WHERE last_token IS NOT NULL OR last_seq IS NOT NULL"); n != 0 {
			t.Errorf("%d rows were written", n)
		}
		g := e.ready(t, db, sqlfence.Options{Column: table(`we"ird`)})
		if err := g.Check(t.Context(), "a", 1); !errors.Is(err, fence.ErrNoResource) {
			t.Errorf("a quoted name: %v", err)
		}
	})
}

// A table that loses its column later gives the same kind of error.
func TestColumnGoes(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		e.makeDoc(t, db)
		e.addDoc(t, db, "a")
		g := e.ready(t, db, sqlfence.Options{Column: column()})
		must(t, db, "ALTER TABLE doc DROP COLUMN last_seq")
		for op, call := range calls(t, db, g, "a", 1) {
			wantInvalid(t, op+" without the column", call(), "last_seq")
		}
		must(t, db, "DROP TABLE doc")
		for op, call := range calls(t, db, g, "a", 1) {
			wantInvalid(t, op+" without the table", call(), "doc")
		}
	})
}

func TestEnsureSchemaRaces(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		for round := range 5 {
			o := sqlfence.Options{Table: fmt.Sprint("marks", round)}
			if e.dialect == sqlfence.PostgreSQL && round == 4 {
				must(t, e.open(t, ""), "CREATE SCHEMA app")
				o.Table = "app.marks"
			}
			var wg sync.WaitGroup
			for range 8 {
				g := e.guard(t, e.open(t, ""), o)
				wg.Go(func() {
					if err := g.EnsureSchema(kit.Context(t, time.Minute)); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			db := e.open(t, "")
			if n := number(t, db, "SELECT token FROM "+o.Table+" WHERE resource = ''"); n != 1 {
				t.Errorf("the version is %d", n)
			}
			must(t, db, "UPDATE "+o.Table+" SET token = 2 WHERE resource = ''")
			wantInvalid(t, "a newer table", e.guard(t, db, o).EnsureSchema(t.Context()), "version 2")
			wantInvalid(t, "a newer table", e.guard(t, db, o).Claim(t.Context(), "r", 1), "version 2")
		}
	})
}

// IDs that are numbers are found by their text, and by nothing that only looks like it.
func TestNumbersAsNames(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		must(t, db, "CREATE TABLE n (id bigint PRIMARY KEY, tok bigint)", "INSERT INTO n (id) VALUES (12), (9223372036854775807)")
		g := e.ready(t, db, sqlfence.Options{Column: &sqlfence.Column{Table: "n", ID: "id", Token: "tok"}})
		ctx := t.Context()
		for _, name := range []string{"12", "9223372036854775807"} {
			if err := g.Claim(ctx, name, 5); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		for _, name := range []string{"12a", "12 monkeys", "x", "9223372036854775806", "99999999999999999999", "12; DROP TABLE n", "1'2"} {
			if err := g.Claim(ctx, name, 6); !errors.Is(err, fence.ErrNoResource) && !errors.Is(err, fence.ErrInvalid) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if n := number(t, db, "SELECT COUNT(*) FROM n WHERE tok = 5"); n != 2 {
			t.Errorf("%d rows have their mark", n)
		}
	})
}

func TestConnHandles(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		g := e.ready(t, db, sqlfence.Options{})
		ctx, m := kit.Context(t, time.Minute), sqlfence.Mark{Resource: "r", Token: 5}
		conn, err := db.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		wantInvalid(t, "a Conn without a transaction", g.ClaimIn(ctx, conn, m), "transaction")
		wantInvalid(t, "a Conn without a transaction", g.CheckIn(ctx, conn, m), "transaction")
		wantInvalid(t, "a DB", g.ClaimIn(ctx, db, m), "transaction")
		if err := g.Check(ctx, "r", 5); !errors.Is(err, fence.ErrNoResource) {
			t.Errorf("something was written: %v", err)
		}
		must(t, conn, "BEGIN")
		if err := g.ClaimIn(ctx, conn, m); err != nil {
			t.Error(err)
		}
		if err := g.CheckIn(ctx, conn, m); err != nil {
			t.Error(err)
		}
		must(t, conn, "ROLLBACK")
		if err := g.Check(ctx, "r", 5); !errors.Is(err, fence.ErrNoResource) {
			t.Errorf("the transaction was rolled back: %v", err)
		}
		must(t, conn, "BEGIN")
		if err := g.ClaimIn(ctx, conn, m); err != nil {
			t.Error(err)
		}
		if e.dialect == sqlfence.PostgreSQL { // the caller's setting is as it was
			var wait string
			if err := conn.QueryRowContext(ctx, "SHOW lock_timeout").Scan(&wait); err != nil || wait != "0" {
				t.Errorf("lock_timeout is %s, %v", wait, err)
			}
		}
		must(t, conn, "COMMIT")
		if err := g.Check(ctx, "r", 5); err != nil {
			t.Error(err)
		}
		if e.dialect == sqlfence.MySQL {
			must(t, conn, "SET autocommit = 0")
			if err := g.ClaimIn(ctx, conn, sqlfence.Mark{Resource: "r", Token: 6}); err != nil {
				t.Error(err)
			}
			must(t, conn, "COMMIT", "SET autocommit = 1")
			if err := g.Check(ctx, "r", 6); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestModes(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		e.makeDoc(t, db)
		for _, name := range []string{"once table", "once column", "once column without Seq", "steps table", "steps column"} {
			e.addDoc(t, db, name)
		}
		ctx := kit.Context(t, time.Minute)
		nothing := func(*sql.Tx) error { return nil }
		for name, options := range layouts {
			o := options()
			o.Mode = sqlfence.Once
			g, r := e.ready(t, db, o), "once "+name
			noSeq := o.Column != nil && o.Column.Seq == ""
			for i, step := range []struct {
				token fence.Token
				want  error
			}{{33, nil}, {33, fence.ErrApplied}, {34, nil}, {33, fence.ErrStale}, {34, fence.ErrApplied}} {
				if err := g.Tx(ctx, r, step.token, nothing); !errors.Is(err, step.want) {
					t.Errorf("%s, Once, %d: %v, want %v", name, i, err, step.want)
				}
			}
			if !noSeq {
				for range 2 {
					if err := g.Claim(ctx, r, 35); err != nil {
						t.Errorf("%s, Once: Claim: %v", name, err)
					}
				}
				if err := g.Tx(ctx, r, 35, nothing); err != nil {
					t.Errorf("%s, Once: Tx after Claim: %v", name, err)
				}
			}
			o.Mode = sqlfence.Sequenced
			if noSeq {
				continue
			}
			g, r = e.guard(t, db, o), "steps "+name
			for i, step := range []struct {
				token fence.Token
				seq   int64
				want  error
			}{{34, 1, nil}, {34, 1, fence.ErrApplied}, {34, 2, nil}, {33, 9, fence.ErrStale}, {35, 1, nil}, {35, 5, nil}, {35, 4, fence.ErrApplied}} {
				if err := g.TxAll(ctx, []sqlfence.Mark{{Resource: r, Token: step.token, Seq: step.seq}}, nothing); !errors.Is(err, step.want) {
					t.Errorf("%s, Sequenced, %d: %v, want %v", name, i, err, step.want)
				}
			}
		}
	})
}

func TestSequence(t *testing.T) {
	eachEngine(t, func(t *testing.T, e *engine) {
		db := e.open(t, "")
		s, err := sqlfence.NewSequence(db, e.dialect, "")
		if err != nil {
			t.Fatal(err)
		}
		ctx := kit.Context(t, time.Minute)
		if _, err := s.Next(ctx, "k"); err == nil {
			t.Error("a number without a table")
		} else {
			wantInvalid(t, "no table", err, "holdfast_sequence")
		}
		if err := s.EnsureSchema(ctx); err != nil {
			t.Fatal(err)
		}
		wantInvalid(t, "a guard on the table of a sequence", e.guard(t, db, sqlfence.Options{Table: "holdfast_sequence"}).Claim(ctx, "k", 1), "sequence")
		var mu sync.Mutex
		seen := map[fence.Token]bool{}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				last := fence.Token(0)
				for range 25 {
					n, err := s.Next(ctx, "k")
					if err != nil || n <= last {
						t.Errorf("%v after %v, %v", n, last, err)
						return
					}
					last = n
					mu.Lock()
					seen[n] = true
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if len(seen) != 200 || !seen[1] || !seen[200] {
			t.Errorf("%d numbers of 200", len(seen))
		}
		if n, err := s.Next(ctx, "another"); n != 1 || err != nil {
			t.Errorf("the first of another key is %v, %v", n, err)
		}
		must(t, db, fmt.Sprintf("UPDATE holdfast_sequence SET token = %d", int64(math.MaxInt64)))
		if _, err := s.Next(ctx, "k"); !errors.Is(err, fence.ErrInvalid) {
			t.Errorf("past the largest number: %v", err)
		}
	})
}
