package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/spf13/cobra"

	"github.com/holdfast-go/holdfast/fence"
	"github.com/holdfast-go/holdfast/fence/redisfence"
	"github.com/holdfast-go/holdfast/fence/sqlfence"
	"github.com/holdfast-go/holdfast/redlock/rueidisnode"
	"github.com/holdfast-go/holdfast/sqlstore"
)

const fenceHelp = `Show a fencing token to what keeps the marks of a resource: for shell scripts.

  claim  refuses the token if a larger one was seen, else raises the mark to it. The first
         thing to do with a resource, before anything of it is read
  check  succeeds if the token is the mark: nobody has claimed a larger one. Changes nothing

Inside "holdfast run", RESOURCE is HOLDFAST_KEY and TOKEN is HOLDFAST_TOKEN where they are not
given:
  holdfast run backup -- sh -c '
    holdfast fence claim || exit
    make-backup >new.$HOLDFAST_TOKEN && holdfast fence check && mv new.$HOLDFAST_TOKEN backup.tar'
The token in the name keeps a holder that wakes from writing into the file of the next one.

A check does not hold: whoever is paused between check and mv moves late all the same. It
makes that unlikely where the resource cannot check for itself. What can, checks in the same
step as it writes: a database in its transaction, Redis in a script, a service over HTTP
behind "holdfast gateway".

Marks (--marks, else $` + marksVariable + `, else marks = "URL" in the configuration file):
  file:PATH                a file for these marks alone; one process at a time uses it, and
                           "holdfast gateway" for as long as it runs
  sqlite:PATH              a table in a SQLite database
  postgres://[USER:PASSWORD@]HOST[:PORT]/DATABASE    a table in PostgreSQL. Parameters are those
                           of psql, such as sslmode=verify-full
  mysql://[USER:PASSWORD@]HOST[:PORT]/DATABASE       a table in MySQL or MariaDB
  redis://, rediss://, also with +sentinel and +cluster   as for --store; prefix=PREFIX is that
                           of the marks' keys
Parameters of the three databases:
  table=TABLE              the marks' own table (default holdfast_fence); claim makes it
  column=TABLE.ID.TOKEN    marks in your own table: in its column TOKEN, an integer of 64 bits
                           that may be NULL, of the row whose ID is the resource
and of the servers among them:
  password-file=PATH       the password is the line in this file
  tls=true|skip-verify|preferred, tls-ca=PATH, tls-cert=PATH, tls-key=PATH,
  tls-server-name=NAME     of mysql
Special characters are written as %XX, as for --store.

Exit codes:
  0    claim: the token is the mark now. check: it is the mark
  1    the token is stale: a larger one was seen. The work must stop
  64   the command line or the URL is wrong
  125  holdfast failed; also where the marks cannot be reached, others keep them for longer
       than --wait, or check finds no mark or a smaller one, since claim comes first. After a
       claim the mark may be raised: to claim again is right`

const claimFirst = "holdfast fence claim comes first"

// fenceFlags are the flags of fence.
type fenceFlags struct {
	marks   string
	wait    time.Duration
	verbose bool
}

func fenceCommand() *cobra.Command {
	var f fenceFlags
	verbs := []string{"claim", "check"}
	cmd := &cobra.Command{
		Use:     "fence claim|check [flags] [RESOURCE [TOKEN]]",
		Short:   "Claim or check a fencing token at the marks of a resource",
		Long:    fenceHelp,
		Example: "  holdfast fence claim --marks file:/var/lib/backup/marks backup 1795972895835210",
		Args:    cobra.MaximumNArgs(3),
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 0 {
				return verbs, cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) == 0 || !slices.Contains(verbs, args[0]):
				return usage("say claim or check; see holdfast fence --help")
			case f.wait <= 0:
				return usage("invalid --wait %v: must be positive", f.wait)
			case cmd.Flags().Changed("marks") && f.marks == "":
				return usage("invalid --marks: must not be empty")
			}
			return f.run(cmd.Context(), args[0], args[1:])
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.marks, "marks", "", "`URL` of the marks (default $"+marksVariable+")")
	flags.DurationVarP(&f.wait, "wait", "w", 5*time.Second, "wait at most this long for others that use the marks, and for an answer at most 10s more")
	flags.BoolVarP(&f.verbose, "verbose", "v", false, "also tell of success")
	flags.SortFlags = false
	return cmd
}

func (f *fenceFlags) run(ctx context.Context, verb string, args []string) error {
	resource, t, err := fenceArgs(args)
	if err != nil {
		return err
	}
	spec, err := marksURL(f.marks)
	if err != nil {
		return failure(err)
	}
	ctx, cancel := context.WithTimeout(ctx, f.wait+answerLimit)
	defer cancel()
	guard, done, err := spec.open(ctx, f.wait, verb == "claim")
	if err != nil {
		return failure(err)
	}
	defer done()
	if verb == "claim" {
		err = guard.Claim(ctx, resource, t)
	} else {
		err = guard.Check(ctx, resource, t)
	}
	switch {
	case err == nil && f.verbose:
		say("%s: %v is the mark of %q", verb, t, resource)
		return nil
	case err == nil:
		return nil
	case errors.Is(err, fence.ErrStale):
		return &exit{exitConflict, err}
	case errors.Is(err, fence.ErrUnclaimed), errors.Is(err, fence.ErrNoResource) && spec.column == nil:
		err = fmt.Errorf("%w; %s", err, claimFirst)
	}
	return f.refusal(ctx, verb, err)
}

// fenceArgs are the arguments, else what holdfast run says in the environment.
func fenceArgs(args []string) (resource string, t fence.Token, err error) {
	value := func(i int, name, variable string) (string, error) {
		if len(args) > i {
			return args[i], nil // also where it is empty, as of a variable that is not set
		}
		if v := os.Getenv(variable); v != "" {
			return v, nil
		}
		return "", usage("no %s is given, nor is %s set, as inside holdfast run", name, variable)
	}
	resource, err = value(0, "RESOURCE", "HOLDFAST_KEY")
	if err != nil {
		return "", 0, err
	}
	text, err := value(1, "TOKEN", "HOLDFAST_TOKEN")
	if err != nil {
		return "", 0, err
	}
	if t, err = fence.ParseToken(text); err != nil {
		return "", 0, &exit{exitUsage, err}
	}
	return resource, t, failureOf(fence.CheckResource(resource))
}

// refusal is the end of a verb whose marks do not do what they were asked for.
func (f *fenceFlags) refusal(ctx context.Context, verb string, err error) error {
	if ctx.Err() != nil {
		return refusalOfMarks(asked("fence "+verb, "", f.wait+answerLimit, err))
	}
	return refusalOfMarks(fmt.Errorf("fence %s: %w", verb, err)) // also where the guard's own time was over
}

// failureOf is [failure], and nil for nil.
func failureOf(err error) error {
	if err == nil {
		return nil
	}
	return failure(err)
}

// open opens the guard. wait bounds each wait for others. Where claims are not made, nothing is.
func (s marksSpec) open(ctx context.Context, wait time.Duration, claims bool) (_ fence.Guard, done func(), err error) {
	switch {
	case s.scheme == "file":
		return fileMarks{s.path, wait}, func() {}, nil
	case isRedis(s.scheme):
		return s.openRedis(wait)
	}
	db, dialect, err := s.openSQL(claims)
	if err != nil {
		return nil, nil, err
	}
	o := sqlfence.Options{Dialect: dialect, Table: s.table, LockWait: wait}
	if s.column != nil {
		o.Column = &sqlfence.Column{Table: s.column.table, ID: s.column.id, Token: s.column.token}
	}
	g, err := sqlfence.New(db, o)
	if err != nil {
		db.Close()
		return nil, nil, err
	}
	if claims {
		if err := g.EnsureSchema(ctx); err != nil {
			db.Close()
			return nil, nil, (&fenceFlags{wait: wait}).refusal(ctx, "claim", err)
		}
	}
	return g, func() { db.Close() }, nil
}

// openSQL opens a database; nothing is sent yet.
func (s marksSpec) openSQL(make bool) (db *sql.DB, d sqlfence.Dialect, err error) {
	switch s.scheme {
	case "sqlite":
		d = sqlfence.SQLite
		db, err = s.openSQLite(make && s.column == nil)
	case "postgres":
		d = sqlfence.PostgreSQL
		db, err = s.openPostgres()
	default:
		d = sqlfence.MySQL
		db, err = s.openMySQL()
	}
	return db, d, err
}

// openSQLite opens the user's database as it is: its journal mode is left alone.
func (s marksSpec) openSQLite(make bool) (*sql.DB, error) {
	path, err := filepath.Abs(s.path)
	if err != nil {
		return nil, &exit{exitFailed, err}
	}
	dsn, err := sqlstore.SQLiteDSN(path)
	if err != nil {
		return nil, err
	}
	dsn, _, _ = strings.Cut(dsn, "?")
	dsn += "?_pragma=busy_timeout(10)&_pragma=synchronous(FULL)&_txlock=immediate&mode=rw"
	if make {
		dsn += "c"
	} else if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) && s.column == nil {
		return nil, &exit{exitFailed, fmt.Errorf("there are no marks in %s yet; %s", path, claimFirst)}
	} else if err != nil {
		return nil, &exit{exitFailed, fmt.Errorf("the marks cannot be read: %w", err)}
	}
	if err := noFolder(path); err != nil {
		return nil, &exit{exitFailed, fmt.Errorf("the marks cannot be used: %w", err)}
	}
	return sql.Open("sqlite", dsn)
}

// connectLimit bounds a connection attempt to a database.
const connectLimit = 5 * time.Second

func (s marksSpec) openPostgres() (*sql.DB, error) {
	c, err := s.pgxConfig()
	if err != nil {
		return nil, err
	}
	return stdlib.OpenDB(*c), nil
}

func (s marksSpec) pgxConfig() (*pgx.ConnConfig, error) {
	text := "postgres://" + userinfo(s.user, s.password) + hostList(s.addrs) + s.urlPath()
	if len(s.query) > 0 {
		text += "?" + s.query.Encode()
	}
	c, err := pgx.ParseConfig(text)
	if err != nil {
		_, rule, _ := strings.Cut(strings.ReplaceAll(err.Error(), text, ""), "`: ") // before it stands the URL
		return nil, s.refuse("is refused by pgx: " + rule)
	}
	if s.passwordFile != "" {
		if c.Password, err = s.secretFrom("", "password-file", s.passwordFile); err != nil {
			return nil, err
		}
	}
	if c.ConnectTimeout == 0 || c.ConnectTimeout > connectLimit {
		c.ConnectTimeout = connectLimit
	}
	return c, nil
}

func (s marksSpec) openMySQL() (*sql.DB, error) {
	c := mysql.NewConfig()
	c.User, c.Net, c.Addr, c.DBName = s.user, "tcp", s.addrs, s.database
	c.Timeout = connectLimit
	var err error
	if c.Passwd, err = s.secretFrom(s.password, "password-file", s.passwordFile); err != nil {
		return nil, err
	}
	if c.TLSConfig = s.tls; s.ca+s.cert+s.serverName != "" {
		if c.TLS, err = s.storeSpec.tls(); err != nil {
			return nil, err
		}
		c.TLSConfig = ""
	}
	connector, err := mysql.NewConnector(c)
	if err != nil {
		return nil, s.refuse("is refused by the driver: " + err.Error())
	}
	return sql.OpenDB(connector), nil
}

// openRedis makes a client that connects when it is asked.
func (s marksSpec) openRedis(wait time.Duration) (fence.Guard, func(), error) {
	o, err := s.client()
	if err != nil {
		return nil, nil, err
	}
	conn, err := rueidisnode.Dial(o)
	if err != nil {
		return nil, nil, err
	}
	g, err := redisfence.New(conn.Eval, redisfence.Options{Prefix: s.prefix, Timeout: wait})
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	return g, func() { conn.Close() }, nil
}
