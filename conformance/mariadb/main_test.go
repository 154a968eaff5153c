// Package mariadb tests sqlstore against a real MariaDB server.
package mariadb

import (
	"testing"

	"github.com/holdfast-go/holdfast/conformance/internal/kit"
	"github.com/holdfast-go/holdfast/conformance/internal/sqlrig"
	"github.com/holdfast-go/holdfast/sqlstore"
)

var engine = sqlrig.MariaDB

func TestMain(m *testing.M) { kit.Main(m, nil) }

func TestStore(t *testing.T) { engine.Suite(t, sqlstore.Options{}) }
