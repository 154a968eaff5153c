// Package mariadb tests sqlstore against a real MariaDB server.
package mariadb

import (
	"flag"
	"io"
	"log"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
)

var engine = sqlrig.MariaDB

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(log.New(io.Discard, "", 0)) // tests break connections
	_ = flag.Set("test.parallel", "6")              // they mostly wait
	kit.Main(m, sqlrig.Children(engine))
}

func TestStore(t *testing.T) {
	t.Parallel()
	engine.Suite(t, sqlstore.Options{})
}

func parallel(t *testing.T, f func(*testing.T)) { t.Parallel(); f(t) }

func TestCutOffHolderKnowsFirst(t *testing.T)         { parallel(t, engine.CutOffTest) }
func TestStoppedHolderWakesToALostLease(t *testing.T) { parallel(t, engine.StoppedTest) }
func TestLostReplies(t *testing.T)                    { parallel(t, engine.LostRepliesTest) }
func TestLateTry(t *testing.T)                        { parallel(t, engine.LateTest) }
func TestManyLeases(t *testing.T)                     { parallel(t, engine.ManyTest) }
func TestTokens(t *testing.T)                         { parallel(t, engine.TokensTest) }
func TestOneConnection(t *testing.T)                  { parallel(t, engine.OneConnectionTest) }
func TestServerKilled(t *testing.T)                   { parallel(t, engine.ServerKilledTest) }
func TestDroppedTables(t *testing.T)                  { parallel(t, engine.DroppedTest) }

func TestKilledHolder(t *testing.T) {
	t.Parallel()
	engine.KilledTest(t, "SELECT SLEEP(60)")
}

// Whatever the database's isolation level is, processes contend and begin without an error.
func TestIsolation(t *testing.T) {
	for _, level := range []string{"READ-COMMITTED", "REPEATABLE-READ", "SERIALIZABLE"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			engine.ContendTest(t, servertest.Setting("transaction_isolation", level))
			engine.FirstTest(t, servertest.Setting("transaction_isolation", level))
		})
	}
}

// Everything works also where the driver counts the rows that were found, and not those that
// changed, and where it writes parameters into statements.
func TestParameters(t *testing.T) {
	t.Parallel()
	server := engine.Start(t)
	plain := engine.Open(t, server, "")
	for _, params := range []string{"", "?clientFoundRows=true", "?interpolateParams=true&parseTime=true", "?charset=latin1",
		"?time_zone=%27%2B11%3A00%27", "?sql_mode=%27%27"} {
		t.Run(params, func(t *testing.T) {
			e := engine.With(params)
			s := e.Open(t, server, "")
			e.EveryCallTest(t, s)
			sqlrig.Grant(t, sqlrig.Claim(s, params+"!"))
			h, err := plain.Inspect(t.Context(), params+"!")
			if err != nil || h.TTL < 59*time.Minute || h.TTL > time.Hour {
				t.Errorf("to others the key is held for %v, %v", h.TTL, err)
			}
		})
	}
}
