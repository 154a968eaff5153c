// Package sqlguard_test shows on real databases that a write under a guard in SQL never takes
// effect behind a newer holder's, at any isolation level, and that it does without.
package sqlguard_test

import (
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
)

func TestMain(m *testing.M) {
	if err := mysql.SetLogger(&mysql.NopLogger{}); err != nil { // it tells of every lost connection
		panic(err)
	}
	kit.Main(m, children)
}
