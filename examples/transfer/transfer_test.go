package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/holdfast-go/holdfast/servertest"
)

const programVariable = "TRANSFER_TEST_PROGRAM"

// TestMain is the program, one of its workers, or the tests.
func TestMain(m *testing.M) {
	if os.Getenv(workerVariable) != "" || os.Getenv(programVariable) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// soak is how many of something a test wants: few, or those of a soak run.
func soak[T any](few, many T) T {
	if os.Getenv("HOLDFAST_SOAK") == "1" {
		return many
	}
	return few
}

// load is what all tests of transfers have in common.
func load() config {
	return config{
		Guard: true, Pauses: true, Workers: 8, Accounts: 32, Transfers: 300,
		TTL: 300 * time.Millisecond, Think: 40 * time.Millisecond,
	}
}

// eachEngine runs a test on each database, and gives it a load for an empty one.
func eachEngine(t *testing.T, test func(t *testing.T, c config)) {
	for _, e := range []struct {
		name string
		url  func(t *testing.T) string
	}{
		{"SQLite", func(*testing.T) string { return "" }},
		{"PostgreSQL", func(t *testing.T) string { return servertest.PostgreSQL(t).URL("") }},
		{"MariaDB", func(t *testing.T) string { return servertest.MariaDB(t).URL("") }},
	} {
		t.Run(e.name, func(t *testing.T) {
			if soak(true, false) { // they sleep most of the time
				t.Parallel()
			}
			c := load()
			c.DB = e.url(t)
			test(t, c)
		})
	}
}

func mustRun(t *testing.T, c config) *report {
	t.Helper()
	r, err := run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%v", r)
	if r.Made != c.Transfers || c.Pauses && r.pauses.Load() == 0 {
		t.Errorf("%d transfers of %d, %d pauses", r.Made, c.Transfers, r.pauses.Load())
	}
	return r
}

// Processes are stopped and continued beyond the ttl of their leases: with the guard the
// money is right, each transfer is made once, and late writes were refused.
func TestGuard(t *testing.T) {
	servertest.CanPause(t)
	eachEngine(t, func(t *testing.T, c config) {
		c.Transfers = soak(c.Transfers, 10_000)
		want := soak(3, 100)
		for range 3 { // the pauses may miss
			r := mustRun(t, c)
			if !r.ok() {
				t.Fatal("the money is wrong")
			}
			if r.StaleWrites >= want {
				return
			}
		}
		t.Errorf("never as many as %d stale writes", want)
	})
}

// The same without the guard goes wrong.
func TestGuardOff(t *testing.T) {
	servertest.CanPause(t)
	eachEngine(t, func(t *testing.T, c config) {
		c.Guard = false
		c.Transfers = soak(c.Transfers, 2000)
		for range 3 { // the pauses may miss
			if r := mustRun(t, c); r.sum != r.expected || r.doubled > 0 {
				if r.ok() {
					t.Error("the verdict says that the money is right")
				}
				return
			}
		}
		t.Error("nothing went wrong")
	})
}

// It is the pauses that break the lock without the guard.
func TestNoPauses(t *testing.T) {
	c := load()
	c.Guard, c.Pauses, c.Transfers, c.TTL = false, false, 100, time.Minute
	if r := mustRun(t, c); !r.ok() || r.pauses.Load() > 0 {
		t.Error("the money is wrong")
	}
}

func TestRedisStore(t *testing.T) {
	servertest.CanPause(t)
	c := load()
	c.Workers, c.Accounts, c.Transfers = 4, 16, 100
	c.Store = "redis://" + servertest.Redis(t, servertest.Aged(time.Minute)).Addr()
	if r := mustRun(t, c); !r.ok() {
		t.Error("the money is wrong")
	}
}

// The audit finds what may be wrong.
func TestAudit(t *testing.T) {
	const accounts, transfers = 2, 3
	o := orderOf(1, accounts)
	for _, tt := range []struct {
		name  string
		wrong string // what is done beside the orders
		want  audit
	}{
		{"right", ``, audit{}},
		{"money appears", `UPDATE transfer_accounts SET balance = balance + 7 WHERE id = 1`, audit{sum: 7, wrong: 1}},
		{"money moves", `UPDATE transfer_accounts SET balance = balance + CASE id WHEN 0 THEN 7 ELSE -7 END`, audit{wrong: 2}},
		{"doubled", `INSERT INTO transfer_ledger SELECT id, token + 1, source, target, amount FROM transfer_ledger WHERE id = 1`,
			audit{doubled: 1, wrong: 2}},
		{"missing", `DELETE FROM transfer_ledger WHERE id = 1`, audit{missing: 1, wrong: 2}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			db, err := openDatabase(filepath.Join(t.TempDir(), "bank.db"))
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			if err := db.reset(t.Context(), accounts); err != nil {
				t.Fatal(err)
			}
			b := &bank{db: db}
			for id := range int64(transfers) {
				o = orderOf(id, accounts)
				tx, err := db.BeginTx(t.Context(), nil)
				if err != nil {
					t.Fatal(err)
				}
				made, from, to, err := b.db.read(t.Context(), tx, o)
				if made || err != nil {
					t.Fatal(made, err)
				}
				if err := db.write(t.Context(), tx, o, from-o.amount, to+o.amount, 1); err != nil {
					t.Fatal(err)
				}
				if made, _, _, err = db.read(t.Context(), tx, o); !made || err != nil {
					t.Fatal(made, err)
				}
				if err := tx.Commit(); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := db.ExecContext(t.Context(), tt.wrong); err != nil {
				t.Fatal(err)
			}
			tt.want.expected = accounts * initial
			tt.want.sum += tt.want.expected
			got, err := db.audit(t.Context(), accounts, transfers)
			if got != tt.want || err != nil {
				t.Errorf("audit = %+v, %v, want %+v", got, err, tt.want)
			}
			if got.ok() != (tt.wrong == "") {
				t.Errorf("ok = %v", got.ok())
			}
		})
	}
}

func TestProgram(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args string
		code int
		says string
	}{
		{"-transfers=20 -pauses=false -ttl=1m -guard=off", 0, "the money is right"},
		{"-transfers=20 -pauses=false -ttl=1m", 0, "the money is right"},
		{"-guard=perhaps", 2, "want on or off"},
		{"-workers=0", 2, "at least 1 worker"},
		{"-ttl=1ns", 2, "ttl"},
		{"-db=postgres://127.0.0.1:1/none", 2, "refused"},
		{"-db=mysql://127.0.0.1:1/none", 2, "refused"},
		{"-db=mysql://127.0.0.1:1/none?tls=true", 2, "parameters"},
		{"-store=redis://:x:y", 2, "invalid port"},
	} {
		cmd := exec.CommandContext(t.Context(), exe, strings.Fields(tt.args)...)
		cmd.Env = append(os.Environ(), programVariable+"=1")
		out, err := cmd.CombinedOutput()
		code := 0
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
			code = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if code != tt.code || !strings.Contains(strings.ToLower(string(out)), tt.says) {
			t.Errorf("transfer %s: exit code %d, want %d and %q:\n%s", tt.args, code, tt.code, tt.says, out)
		}
	}
}
