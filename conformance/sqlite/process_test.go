package sqlite

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	osexec "os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/holdfast-go/holdfast"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
	"github.com/holdfast-go/holdfast/store"
)

const childVariable = "HOLDFAST_TEST_CHILD"

// TestMain runs a child process of the tests below, or the tests, which leave no goroutine behind.
func TestMain(m *testing.M) {
	if role := os.Getenv(childVariable); role != "" {
		if err := roles[role](os.Args[1:]); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", role, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// soak is how many rounds a test runs: few, or those of a soak run.
func soak(few, many int) int {
	if os.Getenv("HOLDFAST_SOAK") == "1" {
		return many
	}
	return few
}

// roles are what a child process can be.
var roles = map[string]func(args []string) error{
	"count":   childCount,
	"noise":   childNoise,
	"first":   childFirst,
	"refused": childRefused,
	"hold":    childHold,
	"turns":   childTurns,
}

// process is a child process.
type process struct {
	t   *testing.T
	cmd *osexec.Cmd
	out strings.Builder
}

func child(t *testing.T, role string, args ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, cmd: osexec.Command(exe, args...)}
	p.cmd.Env = append(os.Environ(), childVariable+"="+role)
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.cmd.Process.Kill() })
	return p
}

func (p *process) mustSucceed() {
	p.t.Helper()
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("a child process failed: %v: %s", err, p.out.String())
	}
}

func childStore(path string) (*sqlstore.Store, *sql.DB, error) {
	dsn, err := sqlstore.SQLiteDSN(path)
	if err != nil {
		return nil, nil, err
	}
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		return nil, nil, err
	}
	s, err := sqlstore.New(db, sqlstore.Options{Dialect: sqlstore.SQLite, Database: path})
	return s, db, err
}

// acquire does what a Locker does. An error other than that the key is held is an error.
func acquire(ctx context.Context, c store.Claim) (store.Grant, error) {
	for {
		g, err := c.Try(ctx)
		var held *store.HeldError
		if !errors.As(err, &held) {
			return g, err
		}
		if err := c.(store.Waiter).Wait(ctx, held); err != nil {
			return g, err
		}
	}
}

// childCount increments a plain file under the lock, and appends its tokens to a log.
func childCount(args []string) error {
	path, rounds := args[0], args[1]
	n, err := strconv.Atoi(rounds)
	if err != nil {
		return err
	}
	s, db, err := childStore(path)
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	for range n {
		c := s.Claim("counter", store.ClaimOptions{TTL: time.Minute, Wait: true})
		g, err := acquire(ctx, c)
		if err != nil {
			return fmt.Errorf("acquire: %w", err)
		}
		if err := increment(path, g); err != nil {
			return err
		}
		if err := c.Release(ctx); err != nil {
			return fmt.Errorf("release: %w", err)
		}
	}
	return nil
}

// increment reads, adds one and writes, which only an exclusive lock makes safe.
func increment(path string, g store.Grant) error {
	path += ".count"
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	n, _ := strconv.Atoi(string(text))
	if err := os.WriteFile(path, []byte(strconv.Itoa(n+1)), 0o600); err != nil {
		return err
	}
	log, err := os.OpenFile(path+".tokens", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	_, err = fmt.Fprintln(log, g.Token)
	return err
}

// checkCount complains unless the counter was incremented want times, under growing tokens.
func checkCount(t *testing.T, path string, want int) {
	t.Helper()
	text, err := os.ReadFile(path + ".count")
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != strconv.Itoa(want) {
		t.Errorf("the counter is %s after %d increments", text, want)
	}
	log, err := os.Open(path + ".count.tokens")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	last, n := int64(0), 0
	for lines := bufio.NewScanner(log); lines.Scan(); n++ {
		token, err := strconv.ParseInt(lines.Text(), 10, 64)
		if err != nil || token <= last {
			t.Fatalf("token %q follows %d", lines.Text(), last)
		}
		last = token
	}
	if n != want {
		t.Errorf("%d tokens for %d grants", n, want)
	}
}

// LIT-01: eight processes on one file, with and without another one whose transactions
// read first and write later: no busy database reaches the caller.
func TestProcesses(t *testing.T) {
	for _, noise := range []bool{false, true} {
		t.Run(fmt.Sprintf("noise=%v", noise), func(t *testing.T) {
			const processes = 8
			rounds := soak(25, 200)
			path := lockFile(t)
			var noisy *process
			if noise {
				noisy = child(t, "noise", path)
			}
			start := time.Now()
			var all []*process
			for range processes {
				all = append(all, child(t, "count", path, strconv.Itoa(rounds)))
			}
			for _, p := range all {
				p.mustSucceed()
			}
			t.Logf("%d grants in %v", processes*rounds, time.Since(start))
			checkCount(t, path, processes*rounds)
			if noise {
				if err := os.WriteFile(path+".stop", nil, 0o600); err != nil {
					t.Fatal(err)
				}
				noisy.mustSucceed()
				t.Log(noisy.out.String())
			}
		})
	}
}

// childNoise runs deferred transactions that read first and write later, and fails unless
// it has got in the way: some of its commits succeed, and some find the database busy.
func childNoise(args []string) error {
	path := args[0]
	db, err := sql.Open("sqlite", "file:"+path+"?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)")
	if err != nil {
		return err
	}
	defer db.Close()
	var commits, busy int
	for {
		if _, err := os.Stat(path + ".stop"); err == nil {
			break
		}
		switch err := readThenWrite(db); {
		case err == nil:
			commits++
		case strings.Contains(err.Error(), "locked"):
			busy++
		default:
			return err
		}
	}
	fmt.Printf("noise: %d commits, %d times busy", commits, busy)
	if commits == 0 || busy == 0 {
		return errors.New("the noise was never in the way")
	}
	return nil
}

func readThenWrite(db *sql.DB) error {
	if _, err := db.Exec(`CREATE TABLE IF NOT EXISTS noise (n INTEGER)`); err != nil {
		return err
	}
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var n int
	if err := tx.QueryRow(`SELECT count(*) FROM noise`).Scan(&n); err != nil {
		return err
	}
	time.Sleep(time.Millisecond)
	if _, err := tx.Exec(`INSERT INTO noise VALUES (?)`, n); err != nil {
		return err
	}
	return tx.Commit()
}

// Many processes may be the first one to open a file that is missing.
func TestFirstStartOfManyProcesses(t *testing.T) {
	for range soak(3, 30) {
		path := lockFile(t)
		var all []*process
		for i := range 8 {
			all = append(all, child(t, "first", path, fmt.Sprint("key ", i)))
		}
		for _, p := range all {
			p.mustSucceed()
		}
		_, db := open(t, path)
		if n := query[int](t, db, `SELECT count(*) FROM holdfast_leases WHERE token > 0`); n != 8 {
			t.Errorf("%d of 8 first grants are left", n)
		}
		if n := query[int](t, db, `SELECT count(*) FROM holdfast_meta`); n != 2 {
			t.Errorf("%d rows in holdfast_meta, want a version and an id", n)
		}
		db.Close()
	}
}

func childFirst(args []string) error {
	s, db, err := childStore(args[0])
	if err != nil {
		return err
	}
	defer db.Close()
	_, err = s.Claim(args[1], store.ClaimOptions{TTL: time.Minute}).Try(context.Background())
	return err
}

// childRefused succeeds if another holds the key.
func childRefused(args []string) error {
	if err := childFirst(args); !errors.Is(err, store.ErrHeld) {
		return fmt.Errorf("Try = %v, want ErrHeld", err)
	}
	return nil
}

// childHold counts under the lock until it is killed.
func childHold(args []string) error {
	s, db, err := childStore(args[0])
	if err != nil {
		return err
	}
	defer db.Close()
	for {
		c := s.Claim("counter", store.ClaimOptions{TTL: 3 * store.MinTTL, Wait: true, Label: strconv.Itoa(os.Getpid())})
		g, err := acquire(context.Background(), c)
		if err != nil {
			return err
		}
		if err := increment(args[0]+"."+args[1], g); err != nil {
			return err
		}
		if _, err := c.Extend(context.Background()); err != nil && !errors.Is(err, store.ErrLost) {
			return err
		}
		if err := c.Release(context.Background()); err != nil && !errors.Is(err, store.ErrLost) {
			return err
		}
	}
}

// Holders are killed at any moment, also within a transaction: the others go on, no
// token is granted twice, and the file stays sound.
func TestKilledHolders(t *testing.T) {
	const holders = 3
	kills := soak(5, 100) // of each
	path := lockFile(t)
	s, db := open(t, path)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	done := make(chan struct{})
	var died atomic.Int32 // while they held
	var wg sync.WaitGroup
	for i := range holders {
		wg.Go(func() {
			granted := func() bool {
				_, err := os.Stat(fmt.Sprintf("%s.%d.count.tokens", path, i))
				return err == nil
			}
			for n := 0; n < kills || (died.Load() == 0 || !granted()) && ctx.Err() == nil; n++ {
				if killHolder(t, s, path, strconv.Itoa(i)) {
					died.Add(1)
				}
			}
		})
	}
	go func() { wg.Wait(); close(done) }()
	for going := true; going; {
		c := s.Claim("counter", store.ClaimOptions{TTL: time.Minute, Wait: true})
		g, err := acquire(ctx, c)
		if err != nil {
			t.Errorf("acquire: %v", err)
			<-done
			break
		}
		if err := increment(path+".test", g); err != nil {
			t.Error(err)
		}
		if err := c.Release(ctx); err != nil {
			t.Error(err)
		}
		select {
		case <-done:
			going = false
		case <-time.After(time.Millisecond):
		}
	}
	if got := query[string](t, db, `PRAGMA integrity_check`); got != "ok" {
		t.Errorf("integrity_check = %q", got)
	}
	t.Logf("%d of %d kills while the lock was held", died.Load(), holders*kills)
	if died.Load() == 0 {
		t.Error("no holder was killed while it held")
	}
	checkTokens(t, path, holders+1)
}

// killHolder starts a holder, kills it after a random time, and reports whether it held then.
func killHolder(t *testing.T, s *sqlstore.Store, path, name string) bool {
	p := child(t, "hold", path, name)
	time.Sleep(time.Duration(50+rand.IntN(150)) * time.Millisecond)
	if err := p.cmd.Process.Kill(); err != nil {
		t.Errorf("a holder ended by itself: %s", p.out.String())
	}
	p.cmd.Wait()
	h, err := s.Inspect(context.Background(), "counter")
	return err == nil && h.Label == strconv.Itoa(p.cmd.Process.Pid)
}

// checkTokens complains where a log of tokens falls, or two logs share one.
func checkTokens(t *testing.T, path string, want int) {
	t.Helper()
	logs, err := filepath.Glob(path + ".*.tokens")
	if err != nil || len(logs) != want {
		t.Fatalf("logs of tokens: %v, %v, want %d", logs, err, want)
	}
	seen := map[string]string{}
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		last := ""
		for token := range strings.FieldsSeq(string(text)) {
			if other, ok := seen[token]; ok {
				t.Errorf("token %s was granted twice: %s, %s", token, other, log)
			}
			if seen[token] = log; len(token) < len(last) || token <= last {
				t.Errorf("token %s follows %s", token, last)
			}
			last = token
		}
	}
	t.Logf("%d grants in %d logs", len(seen), len(logs))
}

// childTurns takes turns with others until the parent says stop, and tells how many it had.
func childTurns(args []string) error {
	path := args[0]
	s, db, err := childStore(path)
	if err != nil {
		return err
	}
	defer db.Close()
	locks, err := holdfast.New(s, nil)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".ready."+args[1], nil, 0o600); err != nil {
		return err
	}
	all, err := os.OpenFile(path+".turns", os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer all.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	for !exists(path + ".go") {
		time.Sleep(time.Millisecond)
	}
	n := 0
	for !exists(path + ".stop") {
		lease, err := locks.Acquire(ctx, "turns")
		if err != nil {
			return err
		}
		time.Sleep(2 * time.Millisecond)
		if _, err := all.Write([]byte{'.'}); err != nil {
			return err
		}
		if err := lease.Release(ctx); err != nil {
			return err
		}
		n++
	}
	fmt.Print(n)
	return nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Eight processes that want one key all the time get it about equally often.
func TestProcessesTakeTurns(t *testing.T) {
	const processes = 8
	path := lockFile(t)
	var all []*process
	for i := range processes {
		all = append(all, child(t, "turns", path, strconv.Itoa(i)))
	}
	servertest.Eventually(t, time.Minute, func() error {
		if found, _ := filepath.Glob(path + ".ready.*"); len(found) < processes {
			return fmt.Errorf("%d of %d processes are ready", len(found), processes)
		}
		return nil
	})
	if err := os.WriteFile(path+".go", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// Turns come in streaks, since whoever releases is quick to ask again: of 600, chance makes a factor of
	// three now and then.
	servertest.Eventually(t, 5*time.Minute, func() error {
		if info, err := os.Stat(path + ".turns"); err != nil || info.Size() < int64(soak(4000, 6000)) {
			return errors.New("too few turns so far")
		}
		return nil
	})
	if err := os.WriteFile(path+".stop", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var turns []int
	for _, p := range all {
		p.mustSucceed()
		n, err := strconv.Atoi(p.out.String())
		if err != nil {
			t.Fatal(err)
		}
		turns = append(turns, n)
	}
	most, least := slices.Max(turns), slices.Min(turns)
	t.Logf("turns %v", turns)
	if least == 0 || most > 3*least {
		t.Errorf("turns of the processes: %v, want at most 3 times as many for one as for another", turns)
	}
}
