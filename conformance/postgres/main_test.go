// Package postgres tests sqlstore against a real PostgreSQL server.
package postgres

import (
	"flag"
	"testing"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/servertest"
	"github.com/holdfast-go/holdfast/sqlstore"
)

var engine = sqlrig.PostgreSQL

func TestMain(m *testing.M) {
	_ = flag.Set("test.parallel", "6") // they mostly wait
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

// PGS-09: the holder's connections run a statement that takes long when it is killed.
func TestKilledHolder(t *testing.T) {
	t.Parallel()
	engine.KilledTest(t, "SELECT pg_sleep(60)")
}

// Whatever the database's isolation level is, processes contend and begin without an error.
func TestIsolation(t *testing.T) {
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			engine.ContendTest(t, servertest.Setting("default_transaction_isolation", level))
			engine.FirstTest(t, servertest.Setting("default_transaction_isolation", level))
		})
	}
}
