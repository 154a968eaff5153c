package sqlfence

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/holdfast-go/holdfast/fence"
)

type stateError string

func (e stateError) Error() string    { return "FATAL: (SQLSTATE " + string(e) + ")" }
func (e stateError) SQLState() string { return string(e) }

// A database that lets nobody in, or is of another kind, is what is wrong, and not the table. What a
// driver tried before is not told.
func TestDatabaseIsRefused(t *testing.T) {
	for _, c := range []struct {
		e     engine
		state string
		says  string
	}{
		{&postgres{}, "28P01", "refuses the user or its password"},
		{&postgres{}, "3D000", "does not exist on the server"},
		{&mysql{}, "42703", "is PostgreSQL and not MySQL or MariaDB; set the Dialect"},
		{&sqlite{}, "42601", "is PostgreSQL and not SQLite; set the Dialect"},
	} {
		g := &Guard{e: c.e}
		err := g.meaning("r", fmt.Errorf("tried TLS: %w", stateError(c.state)))
		var invalid *fence.InvalidError
		if !errors.As(err, &invalid) || invalid.Field != "database" || !strings.Contains(invalid.Rule, c.says) ||
			strings.Contains(err.Error(), "tried TLS") || !errors.Is(err, stateError(c.state)) {
			t.Errorf("%T, %s: %v", c.e, c.state, err)
		}
	}
}
