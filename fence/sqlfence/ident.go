package sqlfence

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/holdfast-go/holdfast/fence"
)

// quote quotes the name of a column, or one part of the name of a table. SQLite takes what
// stands in double quotes as text where there is no such column, so that it gets backquotes.
func (d Dialect) quote(field, name string) (string, error) {
	limit, mark := 64, "`"
	if d == PostgreSQL {
		limit, mark = 63, `"` // it cuts longer names silently
	}
	rule := ""
	switch {
	case name == "":
		rule = "must not be empty"
	case len(name) > limit:
		rule = fmt.Sprintf("must have at most %d bytes, has %d", limit, len(name))
	case strings.IndexByte(name, 0) >= 0:
		rule = "must not contain NUL"
	case !utf8.ValidString(name):
		rule = "must be UTF-8"
	case d == MySQL && strings.HasSuffix(name, " "):
		rule = "must not end with a space"
	default:
		return mark + strings.ReplaceAll(name, mark, mark+mark) + mark, nil
	}
	return "", &fence.InvalidError{Field: field, Value: name, Rule: rule}
}

// tableName is the name of a table.
type tableName struct {
	given        string
	schema, name string // as given; schema may be empty
	quoted       string
}

func (d Dialect) table(name string) (t tableName, err error) {
	t = tableName{given: name, name: name}
	schema, rest, qualified := strings.Cut(name, ".")
	if qualified {
		t.schema, t.name = schema, rest
		if strings.Contains(rest, ".") {
			return t, &fence.InvalidError{Field: "table", Value: name, Rule: "may be qualified by one schema only"}
		}
		if t.quoted, err = d.quote("table", schema); err != nil {
			return t, err
		}
		t.quoted += "."
	}
	q, err := d.quote("table", t.name)
	t.quoted += q
	return t, err
}
