package sqlfencex

import (
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
)

func TestMain(m *testing.M) {
	if err := mysql.SetLogger(&mysql.NopLogger{}); err != nil { // it tells of every lost connection
		panic(err)
	}
	kit.Main(m, nil)
}
